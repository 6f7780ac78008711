// The running softmax of a group of queries: partial attentions merge by log-sum-exp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sekv {

/// Unnormalised attention of `group` queries: sum_i exp(s_i - max) v_i, its weight sum_i exp(s_i - max), and max. Views
/// memory that the caller owns; an empty state has max -infinity and weight 0, and merging it changes nothing.
struct softmax_state {
    std::int32_t group = 0;
    std::int32_t size = 0;
    float* max = nullptr;     ///< [group]
    float* weight = nullptr;  ///< [group]
    float* sums = nullptr;    ///< [group, size]

    static constexpr float empty_max = -std::numeric_limits<float>::infinity();

    void clear() noexcept {
        std::fill_n(max, group, empty_max);
        std::fill_n(weight, group, 0.0F);
        std::fill_n(sums, group * size, 0.0F);
    }
    /// Makes `shift` at least m for query g, rescaling what is held; returns the shift that new terms must use.
    float raise(std::int32_t g, float m) noexcept {
        if (m <= max[g]) return max[g];
        if (weight[g] > 0) {
            const float f = std::exp(max[g] - m);
            weight[g] *= f;
            for (std::int32_t j = 0; j < size; ++j) sums[g * size + j] *= f;
        }
        return max[g] = m;
    }
    /// Merges a partial attention of query g that was formed with shift m.
    void merge(std::int32_t g, float m, float w, const float* partial) noexcept {
        if (!(w > 0)) return;
        const float f = std::exp(m - raise(g, m));
        weight[g] += f * w;
        for (std::int32_t j = 0; j < size; ++j) sums[g * size + j] += f * partial[j];
    }
    /// Log-sum-exp of all logits so far, natural log; -infinity when empty.
    [[nodiscard]] float log_sum_exp(std::int32_t g) const noexcept { return weight[g] > 0 ? max[g] + std::log(weight[g]) : empty_max; }
    /// The attention's output, zeros when empty.
    void finish(std::int32_t g, float* out) const noexcept {
        const float f = weight[g] > 0 ? 1.0F / weight[g] : 0.0F;
        for (std::int32_t j = 0; j < size; ++j) out[j] = f * sums[g * size + j];
    }
};

}  // namespace sekv
