// Progressive attention of one query token of one KV head, in double, from decoded codes: the method of shared/reference/progressive.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

namespace sekv::oracle {

/// What a query sees of one KV head. Sealed tokens: rows at R1 and at R2 (or R3); exact ones: sinks, window, unsealed.
struct head_history {
    std::size_t key_size = 0, value_size = 0;
    std::vector<double> k1, v1, k2, v2;  ///< [sealed, size]
    std::vector<std::size_t> basis;      ///< [sealed] index into decoders
    struct decoder {
        std::vector<double> a;      ///< [key_size, key_size] row-major, k ~ mean + A c
        std::vector<double> error;  ///< [key_size] mean squared R1 error by component
    };
    std::vector<decoder> decoders;
    std::vector<double> exact_keys, exact_values;

    [[nodiscard]] std::size_t sealed() const { return basis.size(); }
};

struct zoom_policy {
    double tau = 1;
    std::size_t cap = 0;
    bool largest_of_group = false;  ///< else the group's mean decides
    double soft_cap = 0;
};

struct attention {
    std::vector<double> out;  ///< [group, value_size]
    std::vector<double> lse;  ///< [group]
    std::vector<std::size_t> zoomed;
};

[[nodiscard]] inline double capped(double s, double cap) { return cap > 0 ? cap * std::tanh(s / cap) : s; }

[[nodiscard]] inline double dot(const double* a, const double* b, std::size_t n) { return std::inner_product(a, a + n, b, 0.0); }

/// Adds softmax attention of one query: logits [n] over value rows.
inline void softmax_rows(const std::vector<double>& logits, const std::vector<const double*>& rows, std::size_t size, double* out, double& lse) {
    double top = -std::numeric_limits<double>::infinity(), weight = 0;
    for (const auto s : logits) top = std::max(top, s);
    std::fill_n(out, size, 0.0);
    for (std::size_t i = 0; i < logits.size(); ++i) {
        const double w = std::exp(logits[i] - top);
        weight += w;
        for (std::size_t j = 0; j < size; ++j) out[j] += w * rows[i][j];
    }
    for (std::size_t j = 0; j < size; ++j) out[j] /= weight;
    lse = top + std::log(weight);
}

/// R1 logits with the variance correction sum_j t_j^2 D_j / 2, t = A^T q.
[[nodiscard]] inline std::vector<double> sketch_logits(const double* q, const head_history& h, double soft_cap) {
    const auto d = h.key_size;
    std::vector<double> correction;
    for (const auto& x : h.decoders) {
        double sum = 0;
        for (std::size_t j = 0; j < d; ++j) {
            double t = 0;
            for (std::size_t i = 0; i < d; ++i) t += q[i] * x.a[i * d + j];
            sum += 0.5 * t * t * x.error[j];
        }
        correction.push_back(sum);
    }
    std::vector<double> s(h.sealed());
    for (std::size_t i = 0; i < s.size(); ++i) s[i] = capped(dot(q, h.k1.data() + i * d, d) + correction[h.basis[i]], soft_cap);
    return s;
}

[[nodiscard]] inline std::vector<double> exact_logits(const double* q, const head_history& h, double soft_cap) {
    std::vector<double> s(h.exact_keys.size() / h.key_size);
    for (std::size_t i = 0; i < s.size(); ++i) s[i] = capped(dot(q, h.exact_keys.data() + i * h.key_size, h.key_size), soft_cap);
    return s;
}

[[nodiscard]] inline double log_sum_exp(const std::vector<double>& a, const std::vector<double>& b) {
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (const auto* v : {&a, &b}) {
        for (const auto s : *v) top = std::max(top, s);
    }
    for (const auto* v : {&a, &b}) {
        for (const auto s : *v) sum += std::exp(s - top);
    }
    return top + std::log(sum);
}

/// queries [group, key_size], scaled.
[[nodiscard]] inline attention attend(const std::vector<double>& queries, const head_history& h, const zoom_policy& policy) {
    const auto group = queries.size() / h.key_size;
    std::vector<std::vector<double>> rough, exact;
    std::vector<double> p(h.sealed(), 0.0);
    for (std::size_t g = 0; g < group; ++g) {
        rough.push_back(sketch_logits(queries.data() + g * h.key_size, h, policy.soft_cap));
        exact.push_back(exact_logits(queries.data() + g * h.key_size, h, policy.soft_cap));
        const double l = log_sum_exp(rough[g], exact[g]);
        for (std::size_t i = 0; i < p.size(); ++i) {
            const double x = std::exp(rough[g][i] - l);
            p[i] = policy.largest_of_group ? std::max(p[i], x) : p[i] + x / static_cast<double>(group);
        }
    }
    attention result;
    for (std::size_t i = 0; i < p.size(); ++i) {
        if (p[i] > policy.tau) result.zoomed.push_back(i);
    }
    std::stable_sort(result.zoomed.begin(), result.zoomed.end(), [&](std::size_t a, std::size_t b) { return p[a] > p[b]; });
    result.zoomed.resize(std::min(result.zoomed.size(), policy.cap));
    std::vector<char> fine(p.size(), 0);
    for (const auto i : result.zoomed) fine[i] = 1;

    result.out.resize(group * h.value_size);
    result.lse.resize(group);
    for (std::size_t g = 0; g < group; ++g) {
        const double* q = queries.data() + g * h.key_size;
        auto logits = rough[g];
        std::vector<const double*> rows;
        for (std::size_t i = 0; i < p.size(); ++i) {
            if (fine[i] != 0) logits[i] = capped(dot(q, h.k2.data() + i * h.key_size, h.key_size), policy.soft_cap);
            rows.push_back((fine[i] != 0 ? h.v2 : h.v1).data() + i * h.value_size);
        }
        for (std::size_t i = 0; i < exact[g].size(); ++i) {
            logits.push_back(exact[g][i]);
            rows.push_back(h.exact_values.data() + i * h.value_size);
        }
        softmax_rows(logits, rows, h.value_size, result.out.data() + g * h.value_size, result.lse[g]);
    }
    return result;
}

}  // namespace sekv::oracle
