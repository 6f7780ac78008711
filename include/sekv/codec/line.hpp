// R2: the encoder of refined lines. Layout: codec/format.hpp and exec/line_ops.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sekv {

/// Widths per group of eight components and a step per component, for the key's or the value's half of a line.
struct line_code {
    std::vector<std::uint8_t> widths;
    std::vector<float> step;  ///< 0 where the width is 0
};

/// Allots `bytes` over groups of eight components of codes [count, size] and chooses the steps.
[[nodiscard]] line_code fit_line(const float* codes, std::int64_t count, std::int32_t size, std::span<const double> variance, std::int32_t bytes);

/// Writes the codes of count tokens [count, size] at lines + i * line_stride + offset.
void pack_lines(const float* codes, std::int64_t count, std::int32_t size, const std::uint8_t* widths, const float* step, std::uint8_t* lines, std::int64_t line_stride, std::int64_t offset);

/// The code of the level nearest to x, which is in steps. width 1 to 8; NaN becomes code 0.
[[nodiscard]] std::uint8_t nearest_level(float x, std::int32_t width) noexcept;

}  // namespace sekv
