#include "sekv/codec/sketch.hpp"

#include <algorithm>
#include <array>

#include "sekv/codec/quantizer.hpp"

namespace sekv {
namespace {

constexpr std::int64_t sample_count = 2048;  // tokens that a step is chosen from

// The high nibble of an 8-bit component comes right before its low one.
bool is_low_nibble(std::span<const host::sketch_field> fields, std::size_t f) noexcept { return f > 0 && fields[f - 1].component == fields[f].component; }

std::uint8_t nibble_at(const std::uint8_t* planes, const host::sketch_field& f, std::int64_t token) noexcept {
    const auto byte = planes[f.plane * host::plane_bytes + token % 32];
    return static_cast<std::uint8_t>((token < 32 ? byte : byte >> 4) & 0x0f);
}

}  // namespace

sketch_code fit_sketch(const float* codes, std::int64_t count, std::int32_t size, std::span<const double> variance, std::int32_t bits) {
    static constexpr std::array<std::uint8_t, 4> widths{1, 2, 4, 8};
    sketch_code out;
    out.bits = allot_bits(variance, bits, widths);
    out.step.assign(static_cast<std::size_t>(size), 0.0F);
    out.error.assign(static_cast<std::size_t>(size), 0.0F);
    const std::int64_t skip = std::max<std::int64_t>(1, count / sample_count);
    for (std::size_t j = 0; j < out.bits.size(); ++j) {
        if (out.bits[j] == 0) {
            out.error[j] = static_cast<float>(variance[j]);
            continue;
        }
        const auto s = choose_step(codes + j, (count + skip - 1) / skip, skip * size, out.bits[j]);
        out.step[j] = s.step;
        out.error[j] = s.error;
    }
    out.fields = lay_fields(out.bits);
    return out;
}

std::vector<host::sketch_field> lay_fields(std::span<const std::uint8_t> bits) {
    std::vector<host::sketch_field> fields;
    int used = 0;  // bits laid so far; widest first keeps every field inside a nibble
    const auto lay = [&](int width, std::size_t component) {
        fields.push_back({static_cast<std::uint8_t>(used / 4), static_cast<std::uint8_t>(used % 4), static_cast<std::uint8_t>((1 << width) - 1), static_cast<std::uint8_t>(component)});
        used += width;
    };
    for (const int width : {8, 4, 2, 1}) {
        for (std::size_t j = 0; j < bits.size(); ++j) {
            if (bits[j] != width) continue;
            if (width == 8) lay(4, j);
            lay(width == 8 ? 4 : width, j);
        }
    }
    return fields;
}

field_level level_of(std::span<const host::sketch_field> fields, std::size_t f, std::int32_t bits, float step) noexcept {
    if (bits < 8) return {step, lowest_level(bits) * step};
    return is_low_nibble(fields, f) ? field_level{step, 0.0F} : field_level{16 * step, lowest_level(8) * step};
}

void pack_sketch(const float* codes, std::int64_t count, std::int32_t size, std::span<const host::sketch_field> fields, const std::uint8_t* bits, const float* step, std::uint8_t* planes) {
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const auto& field = fields[f];
        const std::int32_t width = bits[field.component];
        const float inverse = 1.0F / step[field.component];
        const bool high = width == 8 && !is_low_nibble(fields, f);
        std::uint8_t* plane = planes + field.plane * host::plane_bytes;
        for (std::int64_t i = 0; i < count; ++i) {
            const auto code = quantize(codes[i * size + field.component], inverse, width);
            const int part = (high ? code >> 4 : code) & field.mask;
            auto& byte = plane[i % 32];
            byte = static_cast<std::uint8_t>(byte | part << (field.shift + (i < 32 ? 0 : 4)));
        }
    }
}

void unpack_sketch(const std::uint8_t* planes, std::int64_t count, std::int32_t size, std::span<const host::sketch_field> fields, const std::uint8_t* bits, const float* step, float* out) {
    std::fill_n(out, count * size, 0.0F);
    for (std::size_t f = 0; f < fields.size(); ++f) {
        const auto level = level_of(fields, f, bits[fields[f].component], step[fields[f].component]);
        for (std::int64_t i = 0; i < count; ++i) {
            const int code = (nibble_at(planes, fields[f], i) >> fields[f].shift) & fields[f].mask;
            out[i * size + fields[f].component] += static_cast<float>(code) * level.factor + level.offset;
        }
    }
}

}  // namespace sekv
