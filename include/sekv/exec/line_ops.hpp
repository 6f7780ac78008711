// Host kernels over R2, the refined lines: token-major codes in groups of eight components. A group of width w takes w
// bytes, component j in bits [j w, j w + w), little-endian. Compiled in src/line_ops.cpp.
#pragma once

#include <cstdint>

namespace sekv::host {

inline constexpr std::int32_t line_group = 8;

/// logits[g * stride + i] = base[g] + sum_j t[g * size + j] * code(i, j): the key codes at the head of each line. `widths` has
/// size / 8 entries of 0 to 8 bits. Up to 64 bytes past a line may be read.
void line_logits(const std::uint8_t* const* lines, std::int64_t count, const std::uint8_t* widths, std::int32_t size, const float* t, const float* base, std::int32_t group, float* logits,
                 std::int64_t stride);

/// sums[g * size + j] += sum_i weights[g * stride + i] * code(i, j), codes at lines[i] + offset.
void line_accumulate(const std::uint8_t* const* lines, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, const float* weights, std::int64_t stride, std::int32_t group,
                     float* sums);

/// codes[i * size + j] = code(i, j), codes at lines + i * line_stride + offset.
void line_codes(const std::uint8_t* lines, std::int64_t line_stride, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, float* codes);

}  // namespace sekv::host
