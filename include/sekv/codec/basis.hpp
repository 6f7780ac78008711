// SVD bases of keys (in the query metric) and of values, in covariance form. Double precision inside (Eigen, src/basis.cpp).
#pragma once

#include <cstdint>
#include <vector>

namespace sekv {

/// c = B^T (k - mean), k ~ mean + A c, columns by falling code variance. A, B: [size, size] row-major, A = W^-1 U, B = W U.
struct key_basis {
    std::int32_t size = 0;
    std::vector<float> mean, a, b;
    std::vector<double> variance;  ///< of the codes
};

/// v = mean + scale * U c with a scale per token. u: [size, size] row-major, columns by falling variance.
struct value_basis {
    std::int32_t size = 0;
    std::vector<float> mean, u;
    std::vector<double> variance;  ///< of the codes at per-token scale
    float typical_scale = 1;       ///< root mean square of the per-token scales, which R1 uses for all
};

/// Basis of count keys [count, size] in the metric M' [size, size], W = (M' / its mean eigenvalue)^(power/2) (KQ-SVD, arXiv 2512.05916, in covariance form). count >= 1.
[[nodiscard]] key_basis fit_keys(const float* keys, std::int64_t count, std::int32_t size, const std::vector<double>& metric, double power);

/// Basis of count values [count, size] about their mean, each divided by its scale.
[[nodiscard]] value_basis fit_values(const float* values, std::int64_t count, std::int32_t size);

/// The byte that codes a token's scale, log2 in eighths: scale = 2^((byte - 160) / 8), so 2^-20 to 2^11.9.
[[nodiscard]] std::uint8_t scale_byte(const float* value, const float* mean, std::int32_t size) noexcept;
[[nodiscard]] float scale_of(std::uint8_t byte) noexcept;

}  // namespace sekv
