// How a decode step's workspace is cut: what each of its kernels leaves for the next.
#pragma once

#include "kernels/decode.hpp"

namespace sekv::cuda {

/// Query heads of a group as the kernels hold them: the next of 1, 2, 4, 8, 16. Entries past the group are zeros.
[[nodiscard]] constexpr std::int32_t padded_group(std::int32_t group) noexcept { return group <= 1 ? 1 : group <= 2 ? 2 : group <= 4 ? 4 : group <= 8 ? 8 : 16; }

/// Maximum and sum of exp(logit - maximum) of some tokens for one query; empty: -infinity and 0.
struct partial_sum {
    float max, weight;
};

/// An unbounded probability list would hold 1 / tau tokens (x group for zoom_rule::max): their sum is at most 1. A little more, for rounding.
struct candidate {
    std::int32_t block;  ///< index of the sealed block << 6 | token in block
    float mass;          ///< the group's mean (or largest) probability
};
struct candidate_run {
    std::int32_t first, count;  ///< of one segment's candidates, ascending
};

/// One token of the final list: read at R2 (or R3) out of `line`, or (line null) a candidate that the cap turned away, attended at R1 like every other token.
struct zoomed_token {
    const std::uint8_t* line;  ///< device line-cache slot, or pinned host
    std::int32_t block;        ///< as in candidate
    std::int32_t unused;
};
/// A run of at most refine_tokens list entries of one epoch and one R1 key basis: the unit of work of refine.
struct refine_run {
    std::int32_t first, count, epoch, keys;
};
inline constexpr std::int32_t refine_tokens = 32;
inline constexpr std::int32_t exact_split_blocks = 4;  ///< exact blocks that one thread block attends

/// Sizes. R: query rows, H: KV heads, G: padded group. Every array is [R, H, ...] (row-major), so that thread block (x, head, row) finds its own part.
struct decode_workspace {
    std::int32_t group, fields, exact_splits, segments, epochs, key_bases, candidates, runs, dk, dv;

    // project writes:
    float* field_weight;   ///< [R, H, key_bases, fields, G]: logit per unit of each field's code
    std::uint32_t* field_matrix;  ///< [R, H, key_bases, matrix_words(fields, G) of decode_parts.cuh]: the same / 2^shift of the field / field_unit, as two fp16 each
    float* field_unit;     ///< [R, H, key_bases, G]: a power of two, so that each query's largest weight lies within [2^14, 2^15)
    float* field_base;     ///< [R, H, key_bases, G]: q . mean + what code 0 decodes to + sum_j t_j^2 D_j / 2. The mean is the epoch's; see epoch_base
    float* epoch_base;     ///< [R, H, epochs, G]: scale * q . key_mean, added to field_base for R1 and the base of R2's logits
    float* line_weight;    ///< [R, H, epochs, dk, G]: t_j * key_step_j in the basis of R2
    // score writes: partial sums of exact splits (0 .. exact_splits - 1), then of segments
    partial_sum* sums;     ///< [R, H, exact_splits + segments, G]
    float* exact_out;      ///< [R, H, exact_splits, G, dv]: sum of exp(logit - max) v
    // route writes:
    float* log_sum;        ///< [R, H, G]: L, by segment 0's thread block
    partial_sum* rest;     ///< [R, H, segments, G]: of the segment's tokens that are not candidates; its max is L, so that weights are probabilities
    float* rest_codes;     ///< [R, H, segments, G, dv]: sum of exp(logit - max) * typical_scale * component, in the epoch's code space
    std::int32_t* cursor;  ///< [R, H]: candidates so far; zeroed by project
    candidate_run* candidate_runs;  ///< [R, H, segments]
    candidate* list;       ///< [R, H, candidates]
    // choose writes:
    zoomed_token* zoomed;  ///< [R, H, candidates]: ascending by token
    refine_run* refine_runs;  ///< [R, H, runs]
    std::int32_t* run_count;  ///< [R, H]
    // refine writes:
    partial_sum* refined;  ///< [R, H, runs, G]
    float* refined_codes;  ///< [R, H, runs, G, dv]: sum of exp(logit - max) * scale * component, in the epoch's code space; token-level sums where the exact tier is read

    std::size_t bytes;     ///< of all
};

/// Cuts `base` (null to measure). dk, dv, group of the layer; counts of the bounds.
[[nodiscard]] decode_workspace cut_workspace(const layer_layout& layer, const decode_bounds& bounds, std::byte* base);

// The kernels in order; each is launched by a function of its own file, with grid (x, kv_heads, rows).
void launch_project(const decode_step& step, const decode_workspace& w, stream s);       // kernels/project.cu
void launch_score_exact(const decode_step& step, const decode_workspace& w, stream s);   // kernels/exact.cu
void launch_score_sketch(const decode_step& step, const decode_workspace& w, stream s);  // kernels/route.cu
void launch_route(const decode_step& step, const decode_workspace& w, stream s);         // kernels/route.cu
void launch_choose(const decode_step& step, const decode_workspace& w, stream s);        // kernels/choose.cu: grid (kv_heads, items), a loop over the item's rows
void launch_refine(const decode_step& step, const decode_workspace& w, stream s);        // kernels/refine.cu
void launch_combine(const decode_step& step, const decode_workspace& w, stream s);       // kernels/combine.cu

}  // namespace sekv::cuda
