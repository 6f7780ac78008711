#include "sekv/codec/line.hpp"

#include <algorithm>

#include "sekv/codec/quantizer.hpp"

namespace sekv {
namespace {

constexpr std::int64_t sample_count = 2048;  // tokens that a step is chosen from

}  // namespace

line_code fit_line(const float* codes, std::int64_t count, std::int32_t size, std::span<const double> variance, std::int32_t bytes) {
    line_code out;
    out.widths = allot_groups(variance, bytes);
    out.step.assign(static_cast<std::size_t>(size), 0.0F);
    const std::int64_t skip = std::max<std::int64_t>(1, count / sample_count);
    for (std::size_t j = 0; j < out.step.size(); ++j) {
        const auto width = out.widths[j / 8];
        if (width > 0) out.step[j] = choose_step(codes + j, (count + skip - 1) / skip, skip * size, width).step;
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
                word |= static_cast<std::uint64_t>(quantize(codes[i * size + k], 1.0F / step[k], w)) << (j * w);
            }
            for (int b = 0; b < w; ++b) at[b] = static_cast<std::uint8_t>(word >> (8 * b));
            at += w;
        }
    }
}

float line_offset(const std::uint8_t* widths, const float* step, std::int32_t component) noexcept {
    const int w = widths[component / 8];
    return w == 0 ? 0.0F : lowest_level(w) * step[component];
}

}  // namespace sekv
