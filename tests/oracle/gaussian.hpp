// Losses of optimal uniform quantisers of a unit Gaussian, and bit allotment over them, as shared/reference/progressive.py has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sekv::oracle {

inline constexpr std::array<double, 9> gaussian_loss{1.0, 0.363, 0.119, 0.0374, 0.0115, 0.0035, 0.001, 0.0003, 0.0001};
/// The same of the Lloyd-Max quantisers, which a line's levels follow (Max 1960, table I; the last three from the high-rate formula).
inline constexpr std::array<double, 9> line_loss{1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.0025, 0.00066, 0.00017, 0.00005};

[[nodiscard]] inline double distortion(std::span<const double> variance, std::span<const std::uint8_t> bits, const std::array<double, 9>& loss = gaussian_loss) {
    double sum = 0;
    for (std::size_t j = 0; j < variance.size(); ++j) sum += variance[j] * loss[bits[j]];
    return sum;
}

/// The reference's allot: greedy by distortion saved per bit.
[[nodiscard]] inline std::vector<std::uint8_t> allot(std::span<const double> variance, int budget, std::span<const std::uint8_t> widths, const std::array<double, 9>& loss = gaussian_loss) {
    std::vector<std::uint8_t> bits(variance.size(), 0);
    for (;;) {
        double best = 0;
        std::size_t component = 0;
        std::uint8_t width = 0;
        for (std::size_t j = 0; j < bits.size(); ++j) {
            for (const auto w : widths) {
                if (w <= bits[j] || w - bits[j] > budget) continue;
                const double gain = variance[j] * (loss[bits[j]] - loss[w]) / (w - bits[j]);
                if (width == 0 || gain > best) best = gain, component = j, width = w;
            }
        }
        if (width == 0 || best <= 0) return bits;
        budget -= width - bits[component];
        bits[component] = width;
    }
}

}  // namespace sekv::oracle
