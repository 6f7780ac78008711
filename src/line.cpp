#include "sekv/codec/line.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "sekv/codec/quantizer.hpp"
#include "sekv/exec/line_ops.hpp"

namespace sekv {
namespace {

constexpr std::int64_t sample_count = 1024;  // tokens that a step is chosen from

// Midpoints between neighbouring levels, by width.
struct threshold_table {
    std::array<std::array<float, 255>, 9> of{};
    constexpr threshold_table() {
        for (int w = 1; w <= 8; ++w) {
            for (int k = 0; k + 1 < 1 << w; ++k) of[static_cast<std::size_t>(w)][static_cast<std::size_t>(k)] = 0.5F * (host::line_level(k, w) + host::line_level(k + 1, w));
        }
    }
};
constexpr threshold_table thresholds;

// The step of least squared error, searched around what suits a Gaussian.
float choose_line_step(const float* samples, std::int64_t count, std::int64_t stride, std::int32_t width) {
    static constexpr std::array<float, 9> gaussian{0, 1.596F, 0.896F, 0.4728F, 0.2443F, 0.1108F, 0.055F, 0.031F, 0.018F};
    double square = 0;
    for (std::int64_t i = 0; i < count; ++i) square += static_cast<double>(samples[i * stride]) * samples[i * stride];
    const double deviation = count > 0 ? std::sqrt(square / static_cast<double>(count)) : 0.0;
    if (deviation < 1e-20) return 1e-30F;
    float best = 0;
    double least = INFINITY;
    for (const double clip : {0.65, 0.8, 0.9, 1.0, 1.12, 1.3, 1.6, 2.2}) {
        const auto step = static_cast<float>(static_cast<double>(gaussian[static_cast<std::size_t>(width)]) * deviation * clip);
        double error = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            const float c = samples[i * stride];
            const float e = host::line_level(nearest_level(c / step, width), width) * step - c;
            error += static_cast<double>(e) * e;
        }
        if (error < least) least = error, best = step;
    }
    return best;
}

}  // namespace

std::uint8_t nearest_level(float x, std::int32_t width) noexcept {
    const auto& t = thresholds.of[static_cast<std::size_t>(width)];
    std::size_t code = 0;
    for (std::int32_t b = width - 1; b >= 0; --b) {  // bit by bit from the top: thresholds ascend
        const auto half = std::size_t{1} << b;
        code += x > t[code + half - 1] ? half : 0;
    }
    return static_cast<std::uint8_t>(code);
}

line_code fit_line(const float* codes, std::int64_t count, std::int32_t size, std::span<const double> variance, std::int32_t bytes) {
    line_code out;
    out.widths = allot_groups(variance, bytes);
    out.step.assign(static_cast<std::size_t>(size), 0.0F);
    const std::int64_t skip = std::max<std::int64_t>(1, count / sample_count);
    for (std::size_t j = 0; j < out.step.size(); ++j) {
        const auto width = out.widths[j / 8];
        if (width > 0) out.step[j] = choose_line_step(codes + j, (count + skip - 1) / skip, skip * size, width);
    }
    return out;
}

void pack_lines(const float* codes, std::int64_t count, std::int32_t size, const std::uint8_t* widths, const float* step, std::uint8_t* lines, std::int64_t line_stride, std::int64_t offset) {
    for (std::int64_t i = 0; i < count; ++i) {
        std::uint8_t* at = lines + i * line_stride + offset;
        for (std::int32_t c = 0; c < size / 8; ++c) {
            const int w = widths[c];
            if (w == 0) continue;
            std::uint64_t word = 0;
            for (int j = 0; j < 8; ++j) {
                const auto k = c * 8 + j;
                word |= static_cast<std::uint64_t>(nearest_level(codes[i * size + k] / step[k], w)) << (j * w);
            }
            for (int b = 0; b < w; ++b) at[b] = static_cast<std::uint8_t>(word >> (8 * b));
            at += w;
        }
    }
}

}  // namespace sekv
