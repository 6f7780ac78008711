// Token-level K and V of sealed blocks, for exact prefill over history, for engines with their own attention, and for refits.
#include <algorithm>

#include "sekv/attend/progressive.hpp"
#include "sekv/codec/basis.hpp"
#include "sekv/codec/line.hpp"
#include "sekv/exec/row_ops.hpp"

namespace sekv {
namespace {

// rows = mean + scales * (codes * M), M [size, size] in fp16; scales null for 1. `by_column`: multiply by M's transpose.
void expand(const std::vector<float>& codes, std::int64_t count, std::int32_t size, const fp16* m, bool by_column, const float* mean, const float* scales, float* rows) {
    const auto d = static_cast<std::size_t>(size);
    std::vector<float> matrix(d * d);
    host::to_float(m, dtype::f16, d * d, matrix.data());
    if (by_column) {
        for (std::size_t i = 0; i < d; ++i) {
            for (std::size_t j = 0; j < i; ++j) std::swap(matrix[i * d + j], matrix[j * d + i]);
        }
    }
    host::gemm(codes.data(), size, matrix.data(), size, rows, size, count, size, size, false);
    for (std::int64_t i = 0; i < count; ++i) {
        const float s = scales != nullptr ? scales[i] : 1.0F;
        for (std::int32_t j = 0; j < size; ++j) rows[i * size + j] = mean[j] + s * rows[i * size + j];
    }
}

// Codes of one half of `count` lines, in units of the components.
std::vector<float> line_components(const std::uint8_t* lines, std::int64_t stride, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, const float* step, std::int32_t size) {
    std::vector<float> codes(static_cast<std::size_t>(count * size));
    host::line_levels(lines, stride, count, offset, widths, size, codes.data());
    for (std::int64_t i = 0; i < count; ++i) {
        for (std::int32_t j = 0; j < size; ++j) codes[static_cast<std::size_t>(i * size + j)] *= step[j];
    }
    return codes;
}

}  // namespace

void progressive_codec::decode(const unit& u, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const {
    const auto index = layout_.head_index(layer, head);
    const auto& f = layout_.format(index);
    const auto dk = f.key_size, dv = f.value_size;
    const auto at = range.begin - u.begin;
    if (u.payload.exact) {
        const auto* line = u.payload.exact->data() + exact_offset_[static_cast<std::size_t>(index)] + at * exact_stride(index);
        for (std::int64_t i = 0; i < range.count; ++i, line += exact_stride(index)) {
            host::to_float(line, stored_, static_cast<std::size_t>(dk), keys + i * dk);
            host::to_float(line + static_cast<std::size_t>(dk) * size_of(stored_), stored_, static_cast<std::size_t>(dv), values + i * dv);
        }
        return;
    }
    const auto& e = *u.payload.statistics;
    const auto lines = e.lines(index);
    const auto v = e.values(index);
    const auto* first = u.payload.lines->as<std::uint8_t>(layout_.line_offset(index)) + at * f.line_stride;
    expand(line_components(first, f.line_stride, range.count, 0, lines.key_widths, lines.key_step, dk), range.count, dk, e.keys->view(index).a, true, e.key_mean(index), nullptr, keys);
    std::vector<float> scales(static_cast<std::size_t>(range.count));
    for (std::int64_t i = 0; i < range.count; ++i) scales[static_cast<std::size_t>(i)] = scale_of(first[i * f.line_stride + f.key_line_bytes]);
    expand(line_components(first, f.line_stride, range.count, f.value_line_offset(), lines.value_widths, lines.value_step, dv), range.count, dv, v.basis, false, v.mean, scales.data(), values);
}

void progressive_codec::decode_sketch(const unit& u, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const {
    const auto index = layout_.head_index(layer, head);
    const auto& f = layout_.format(index);
    const auto dk = f.key_size, dv = f.value_size;
    const auto& e = *u.payload.statistics;
    const auto k = u.payload.keys->view(index);
    const auto v = e.values(index);
    const auto at = range.begin - u.begin;
    const auto* planes = u.payload.sketch->as<std::uint8_t>(layout_.sketch_offset(index));
    const auto tail = [&](const std::vector<float>& block, std::int32_t size) { return std::vector<float>(block.begin() + at * size, block.begin() + (at + range.count) * size); };
    std::vector<float> codes(static_cast<std::size_t>(u.count * dk));
    unpack_sketch(planes, u.count, dk, k.sketch.fields, k.sketch.bits, k.sketch.step, codes.data());
    expand(tail(codes, dk), range.count, dk, k.a, true, e.key_mean(index), nullptr, keys);
    codes.resize(static_cast<std::size_t>(u.count * dv));
    unpack_sketch(planes + f.key_planes() * host::plane_bytes, u.count, dv, v.sketch.fields, v.sketch.bits, v.sketch.step, codes.data());
    const std::vector<float> scales(static_cast<std::size_t>(range.count), v.typical_scale);
    expand(tail(codes, dv), range.count, dv, v.basis, false, v.mean, scales.data(), values);
}

}  // namespace sekv
