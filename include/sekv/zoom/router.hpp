// Routing over R1: score tables of a query group, and the zoom list by threshold (design.md section 2, "Scores and zoom").
#pragma once

#include <cstdint>
#include <vector>

#include "sekv/codec/options.hpp"
#include "sekv/exec/arena.hpp"
#include "sekv/exec/sketch_ops.hpp"
#include "sekv/tier/bases.hpp"

namespace sekv {

/// Writable tables for one run of blocks that share a basis; `view` is what the kernel reads.
struct routing_tables {
    std::uint8_t* low = nullptr;
    std::uint8_t* high = nullptr;
    std::uint8_t* wide = nullptr;
    std::uint8_t* fresh = nullptr;
    float* step = nullptr;
    float* base = nullptr;
    float* partial = nullptr;  ///< [planes, 16], one query's logits before rounding
    host::score_tables view;

    void layout(arena& a, std::int32_t planes, std::int32_t group) {
        low = a.take<std::uint8_t>(static_cast<std::int64_t>(planes) * group * 16);
        high = a.take<std::uint8_t>(static_cast<std::int64_t>(planes) * group * 16);
        wide = a.take<std::uint8_t>(planes);
        fresh = a.take<std::uint8_t>(planes);
        step = a.take<float>(group);
        base = a.take<float>(group);
        partial = a.take<float>(static_cast<std::int64_t>(planes) * 16);
        view = {planes, group, low, high, wide, fresh, step, base};
    }
};

/// Fills the tables for t = A^T q of each query, [group, size], and its q . mean. Rounding is at most half of 0.05 nat per plane, or of 1/65,000 of the
/// logits' range where that is more. The base carries the variance correction
/// sum_j t_j^2 D_j / 2: E[exp s] under the code's noise, for codes that are centroids.
void fill_tables(routing_tables& tables, const key_view& keys, const float* t, const float* query_mean, std::int32_t size);

/// The tokens to zoom, by index into the sketch scores, ascending.
struct zoom_list {
    std::int32_t* tokens = nullptr;
    float* mass = nullptr;
    std::int64_t count = 0;
    bool capped = false;
};

/// Chooses tokens whose probability exceeds tau: weights [group] rows of exp(s - max), factors[g] = exp(max - L) makes them probabilities. Where more than `cap` do, the largest
/// win, the older first among equals. list.tokens and list.mass must hold `count` elements; largest must hold cap of them.
void choose_zoom(zoom_list& list, const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, std::int64_t count, const progressive_options& options, float* largest);

}  // namespace sekv
