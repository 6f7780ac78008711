// Host kernels over R1, the token sketch. A block holds 64 tokens, component-major: plane after plane of 32 bytes;
// byte i of a plane carries the nibble of token i (low) and of token i + 32 (high). Compiled in src/sketch_ops.cpp.
#pragma once

#include <cstdint>

namespace sekv::host {

inline constexpr std::int32_t block_tokens = 64;
inline constexpr std::int32_t plane_bytes = 32;

/// Partial logits of a group of queries by plane and nibble, as 16-bit fixed point split in two bytes:
/// logit = base + step * sum over planes of (low + 256 * high).
struct score_tables {
    std::int32_t planes = 0;
    std::int32_t group = 0;
    const std::uint8_t* low = nullptr;    ///< [planes, group, 16]
    const std::uint8_t* high = nullptr;   ///< [planes, group, 16], read only where `wide` is set
    const std::uint8_t* wide = nullptr;   ///< [planes]: 1 where some query's table needs its high byte
    const std::uint8_t* fresh = nullptr;  ///< [planes]: 0 where every query's low bytes, summed from the last plane with 1 up to this one, stay below 256; null: 1 everywhere
    const float* step = nullptr;          ///< [group]
    const float* base = nullptr;          ///< [group]
};

/// scores[g * score_stride + b * 64 + i] = sketch logit of token i of block b < block_count for query g.
void sketch_scores(const std::uint8_t* const* blocks, std::int64_t block_count, const score_tables& tables, float* scores, std::int64_t score_stride);

/// values[i] = exp(values[i] - shift) for count values, and returns their sum: as exp_sum of row_ops.hpp, but to a relative error of 1e-5 only, which is far below the
/// sketch's own, in a third of the time. shift must be finite; -infinity gives 0.
float sketch_weights(float* values, std::int64_t count, float shift);

/// One field of a nibble: code = (nibble >> shift) & mask.
struct sketch_field {
    std::uint8_t plane = 0;
    std::uint8_t shift = 0;
    std::uint8_t mask = 0;
    std::uint8_t component = 0;
};

/// sums[g * field_count + f] += sum_i weights[g * weight_stride + i] * code(f, i), over the tokens of all blocks, and
/// totals[g] += sum_i weights[g * weight_stride + i].
void sketch_values(const std::uint8_t* const* blocks, std::int64_t block_count, const sketch_field* fields, std::int32_t field_count, const float* weights, std::int64_t weight_stride, std::int32_t group,
                   float* sums, float* totals);

/// Writes to found[] each i < count with sum_g factors[g] * weights[g * weight_stride + i] > threshold, in order, and the sum
/// itself to mass[]; returns how many. found and mass hold count elements.
std::int64_t select_above(const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, float threshold, std::int64_t count, std::int32_t* found, float* mass);
/// The same with the largest factors[g] * weights[g * weight_stride + i] over g in place of the sum.
std::int64_t select_above_max(const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, float threshold, std::int64_t count, std::int32_t* found, float* mass);

}  // namespace sekv::host
