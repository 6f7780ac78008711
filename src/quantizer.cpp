#include "sekv/codec/quantizer.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace sekv {
namespace {

// Max-Lloyd constants for the unit Gaussian, uniform levels: optimal step and distortion by bits.
constexpr std::array<double, 9> gaussian_step{0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308};
constexpr std::array<double, 9> gaussian_loss{1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.000304, 0.0000874};
// The same with the levels of a line (exec/line_ops.hpp).
constexpr std::array<double, 9> line_loss{1.0, 0.3634, 0.1175, 0.0346, 0.0096, 0.0026, 0.0007, 0.0002, 0.00006};

// The greedy of both allotments: `weight` units are paid per bit of width, variance is the unit's total.
std::vector<std::uint8_t> water_fill(std::span<const double> variance, std::int32_t budget, std::span<const std::uint8_t> widths, const std::array<double, 9>& loss) {
    std::vector<std::uint8_t> chosen(variance.size(), 0);
    for (;;) {
        double best = 0;
        std::size_t at = 0;
        std::uint8_t to = 0;
        for (std::size_t j = 0; j < chosen.size(); ++j) {
            for (const auto w : widths) {
                if (w <= chosen[j] || w - chosen[j] > budget) continue;
                const double gain = variance[j] * (loss[chosen[j]] - loss[w]) / (w - chosen[j]);
                if (gain > best) best = gain, at = j, to = w;
            }
        }
        if (to == 0) return chosen;
        budget -= to - chosen[at];
        chosen[at] = to;
    }
}

}  // namespace

std::vector<std::uint8_t> allot_bits(std::span<const double> variance, std::int32_t bits, std::span<const std::uint8_t> widths) { return water_fill(variance, bits, widths, gaussian_loss); }

std::vector<std::uint8_t> allot_groups(std::span<const double> variance, std::int32_t bytes) {
    static constexpr std::array<std::uint8_t, 6> widths{2, 3, 4, 5, 6, 8};
    std::vector<double> sums(variance.size() / 8, 0.0);
    for (std::size_t j = 0; j < variance.size(); ++j) sums[j / 8] += variance[j];
    return water_fill(sums, bytes, widths, line_loss);
}

quantizer_step choose_step(const float* samples, std::int64_t count, std::int64_t stride, std::int32_t bits) {
    double square = 0;
    for (std::int64_t i = 0; i < count; ++i) square += static_cast<double>(samples[i * stride]) * samples[i * stride];
    const double deviation = count > 0 ? std::sqrt(square / static_cast<double>(count)) : 0.0;
    quantizer_step best{1e-30F, static_cast<float>(deviation * deviation)};
    if (deviation < 1e-20) return best;
    best.error = INFINITY;
    for (const double clip : {0.8, 1.0, 1.2, 1.45, 1.75, 2.2, 3.0}) {
        const auto step = static_cast<float>(gaussian_step[static_cast<std::size_t>(bits)] * deviation * clip);
        const float inverse = 1.0F / step;
        double error = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const float c = samples[i * stride];
            const float y = (static_cast<float>(quantize(c, inverse, bits)) + lowest_level(bits)) * step;
            error += static_cast<double>(y - c) * (y - c);
        }
        error /= static_cast<double>(count);
        if (error < best.error) best = {step, static_cast<float>(error)};
    }
    return best;
}

}  // namespace sekv
