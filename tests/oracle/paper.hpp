// The paper preset, written down once more in double precision and without factors, pages or units: dense attention over rows, means and biases.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sekv/codec/calibration.hpp"
#include "sekv/core/shape.hpp"
#include "sekv/span/segmenter.hpp"

namespace sekv::oracle {

/// A span's own tokens, and the tokens that stay exact, of positions [0, sealed).
struct paper_spans {
    std::vector<std::vector<std::int64_t>> own;
    std::vector<std::int64_t> exact;
    std::vector<std::int64_t> sinks;
    std::int64_t sealed = 0;
};

/// borders: positions where a seal began, ascending, the last one the end of what is sealed.
[[nodiscard]] inline paper_spans split_spans(const segmenter& s, const std::vector<std::int64_t>& borders, std::int64_t sinks) {
    paper_spans out;
    out.sealed = borders.back();
    std::vector<std::int64_t> ends(borders);
    ends.push_back(sinks);
    for (const auto& x : s.all_spans()) ends.push_back(x.end);
    for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
        for (auto t = std::max({s.length(), borders[i], sinks}); t < borders[i + 1]; t += s.options().l_max) ends.push_back(t);
    }
    std::sort(ends.begin(), ends.end());
    for (std::int64_t t = 0; t < std::min(sinks, out.sealed); ++t) out.sinks.push_back(t);
    for (auto t = std::max(sinks, borders.front()); t < out.sealed;) {
        const auto end = std::min(out.sealed, *std::upper_bound(ends.begin(), ends.end(), t));
        std::vector<std::int64_t> own, anchors;
        for (; t < end; ++t) (t < s.length() && s.is_anchor(t) ? anchors : own).push_back(t);
        if (own.size() < 2) {
            anchors.insert(anchors.end(), own.begin(), own.end());
            own.clear();
        }
        out.exact.insert(out.exact.end(), anchors.begin(), anchors.end());
        if (!own.empty()) out.own.push_back(std::move(own));
    }
    return out;
}

/// One layer's rows [tokens, kv_heads, size] and what is asked of them.
struct paper_case {
    const layer_shape* shape = nullptr;
    const std::vector<float>*keys = nullptr, *values = nullptr;
    const segmenter* signals = nullptr;
    const std::vector<float>* w = nullptr;  ///< [32, key_size]
    double tau = 0.05;
};

struct paper_answer {
    std::vector<double> out;                                  ///< [group, value_size]
    std::vector<double> lse;                                  ///< [group]
    double margin = std::numeric_limits<double>::infinity();  ///< of the closest decision
    std::int64_t zoomed = 0, coarse = 0;                      ///< tokens
};

/// queries [group, key_size] of KV head h, unscaled, which see tokens [0, length).
[[nodiscard]] inline paper_answer attend_paper(const paper_case& c, const paper_spans& spans, std::int32_t h, const float* queries, std::int64_t length) {
    const auto& l = *c.shape;
    const auto dk = l.key_size, dv = l.value_size, group = l.group;
    struct row {
        std::vector<double> key, value;
        double bias = 0;
    };
    std::vector<row> rows;
    const auto at = [&](const std::vector<float>* from, std::int64_t t, std::int32_t d) {
        const auto* p = from->data() + (t * l.kv_heads + h) * d;
        return std::vector<double>(p, p + d);
    };
    const auto add = [&](std::int64_t t) {
        if (t < length) rows.push_back({at(c.keys, t, dk), at(c.values, t, dv), 0});
    };
    std::vector<double> route(paper_weights::route_size, 0.0);
    for (std::size_t r = 0; r < route.size(); ++r) {
        for (std::int32_t g = 0; g < group; ++g) {
            for (std::int32_t j = 0; j < dk; ++j)
                route[r] += static_cast<double>((*c.w)[r * static_cast<std::size_t>(dk) + static_cast<std::size_t>(j)]) *
                            static_cast<double>(queries[g * dk + j]) / group;
        }
    }
    paper_answer a;
    for (const auto t : spans.sinks) add(t);
    for (const auto t : spans.exact) add(t);
    for (auto t = spans.sealed; t < length; ++t) add(t);
    for (const auto& own : spans.own) {
        const auto n = static_cast<double>(own.size());
        if (own.back() >= length) {
            for (const auto t : own) add(t);
            continue;
        }
        double total = 0;
        for (const auto t : own) total += own.back() < c.signals->length() ? static_cast<double>(c.signals->signal(t)) : 0;
        row mean{std::vector<double>(static_cast<std::size_t>(dk)), std::vector<double>(static_cast<std::size_t>(dv)), std::log(n)};
        for (const auto t : own) {
            const double w = total > 0 ? static_cast<double>(c.signals->signal(t)) / total : 1 / n;
            const auto k = at(c.keys, t, dk), v = at(c.values, t, dv);
            for (std::size_t j = 0; j < k.size(); ++j) mean.key[j] += w * k[j];
            for (std::size_t j = 0; j < v.size(); ++j) mean.value[j] += w * v[j];
        }
        double dot = 0, squares = 0;
        for (std::size_t r = 0; r < route.size(); ++r) {
            double s = 0;
            for (std::size_t j = 0; j < mean.key.size(); ++j) s += static_cast<double>((*c.w)[r * mean.key.size() + j]) * mean.key[j];
            dot += route[r] * s;
            squares += s * s;
        }
        const double x = dot / std::sqrt(squares) / std::sqrt(32.0) + std::log(n);
        a.margin = std::min(a.margin, std::abs(x - std::log(c.tau / (1 - c.tau))));
        if (1 / (1 + std::exp(-x)) > c.tau) {
            for (const auto t : own) add(t);
            a.zoomed += static_cast<std::int64_t>(own.size());
        } else {
            rows.push_back(std::move(mean));
            a.coarse += static_cast<std::int64_t>(own.size());
        }
    }
    for (std::int32_t g = 0; g < group; ++g) {
        std::vector<double> s;
        for (const auto& r : rows) {
            double x = 0;
            for (std::int32_t j = 0; j < dk; ++j) x += r.key[static_cast<std::size_t>(j)] * static_cast<double>(queries[g * dk + j]);
            x *= static_cast<double>(l.logit_scale());
            if (l.soft_cap > 0) x = static_cast<double>(l.soft_cap) * std::tanh(x / static_cast<double>(l.soft_cap));
            s.push_back(x + r.bias);
        }
        const double most = *std::max_element(s.begin(), s.end());
        double sum = 0;
        std::vector<double> out(static_cast<std::size_t>(dv));
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const double p = std::exp(s[i] - most);
            sum += p;
            for (std::size_t j = 0; j < out.size(); ++j) out[j] += p * rows[i].value[j];
        }
        for (const auto x : out) a.out.push_back(x / sum);
        a.lse.push_back(most + std::log(sum));
    }
    return a;
}

}  // namespace sekv::oracle
