// Host kernels over R2, the refined lines: token-major codes in groups of eight components. A group of width w takes w
// bytes, component j in bits [j w, j w + w), little-endian. A code stands for a level, in steps: finer near zero, where most
// components are, than a uniform quantiser's. Compiled in src/line_ops.cpp.
#pragma once

#include <cstdint>

namespace sekv::host {

inline constexpr std::int32_t line_group = 8;

/// level(code) = u + line_curve[w] u^3 with u = code - (2^w - 1) / 2: a cubic through the Lloyd-Max levels of a Gaussian, which lose 10 to 25% less than
/// uniform ones at 3 to 5 bits on real keys and values. Width 0 has the one level 0.
inline constexpr float line_curve[9] = {0, 0, 0.0555F, 0.0239F, 0.0076F, 0.0027F, 0.0008F, 0.0002F, 0.00005F};

[[nodiscard]] constexpr float line_level(std::int32_t code, std::int32_t width) noexcept {
    const float u = static_cast<float>(code) - 0.5F * static_cast<float>((1 << width) - 1);
    return u + line_curve[width] * u * u * u;
}

/// logits[g * stride + i] = base[g] + sum_j t[g * size + j] * level(i, j): the key codes at the head of each line. `widths` has
/// size / 8 entries of 0 to 8 bits. Up to 64 bytes past a line may be read.
void line_logits(const std::uint8_t* const* lines, std::int64_t count, const std::uint8_t* widths, std::int32_t size, const float* t, const float* base, std::int32_t group, float* logits,
                 std::int64_t stride);

/// sums[g * size + j] += sum_i weights[g * stride + i] * level(i, j), codes at lines[i] + offset.
void line_accumulate(const std::uint8_t* const* lines, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, const float* weights, std::int64_t stride, std::int32_t group,
                     float* sums);

/// levels[i * size + j] = level(i, j), codes at lines + i * line_stride + offset.
void line_levels(const std::uint8_t* lines, std::int64_t line_stride, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, float* levels);

}  // namespace sekv::host
