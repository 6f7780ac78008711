// Bits per component by reverse water-filling, and the uniform mid-rise quantiser (design.md section 2, "Bits").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sekv {

/// Bits per component: greedily spends `bits` where the distortion of a Gaussian of that variance falls most per bit. Widths allowed: 0 and `widths` (ascending, 1 to 8).
[[nodiscard]] std::vector<std::uint8_t> allot_bits(std::span<const double> variance, std::int32_t bits, std::span<const std::uint8_t> widths);

/// Widths per group of eight components, 0 or from {2, 3, 4, 5, 6, 8}, whose sum (bytes per token) is at most `bytes`. The variances' count must be a multiple of 8.
[[nodiscard]] std::vector<std::uint8_t> allot_groups(std::span<const double> variance, std::int32_t bytes);

/// A step and its mean squared error: code = clamp(floor(c / step) + 2^(bits-1)), decoded (code + 0.5 - 2^(bits-1)) * step.
struct quantizer_step {
    float step = 0;
    float error = 0;
};

/// The step of least squared error on count samples that lie `stride` apart, among clips around the Gaussian optimum. bits 1 to 8.
[[nodiscard]] quantizer_step choose_step(const float* samples, std::int64_t count, std::int64_t stride, std::int32_t bits);

[[nodiscard]] inline std::uint8_t quantize(float c, float inverse_step, std::int32_t bits) noexcept {
    const auto half = static_cast<float>(1 << (bits - 1));
    float x = c * inverse_step + half;
    x = x > 0.0F ? x : 0.0F;  // also what NaN becomes
    const float top = 2.0F * half - 1.0F;
    x = x < top ? x : top;
    return static_cast<std::uint8_t>(x);
}

/// What code 0 decodes to, in steps.
[[nodiscard]] constexpr float lowest_level(std::int32_t bits) noexcept { return 0.5F - static_cast<float>(1 << (bits - 1)); }

}  // namespace sekv
