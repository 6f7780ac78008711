// Sealing on the host: fits epochs on rows, encodes blocks as R1 and R2.
#include <algorithm>
#include <cmath>

#include "sekv/attend/progressive.hpp"
#include "sekv/codec/basis.hpp"
#include "sekv/codec/line.hpp"
#include "sekv/exec/row_ops.hpp"

namespace sekv {
namespace {

// rows[i] = (rows[i] - mean) * scales[i]; scales may be null for 1.
void center(float* rows, std::int64_t count, std::int32_t size, const float* mean) {
    for (std::int64_t i = 0; i < count; ++i) {
        for (std::int32_t j = 0; j < size; ++j) rows[i * size + j] -= mean[j];
    }
}

std::vector<float> transposed(std::span<const float> m, std::int32_t size) {
    std::vector<float> t(m.size());
    const auto d = static_cast<std::size_t>(size);
    for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = 0; j < d; ++j) t[j * d + i] = m[i * d + j];
    }
    return t;
}

// out = rows * m for [count, size] rows and a [size, size] matrix.
std::vector<float> times(const std::vector<float>& rows, std::int64_t count, std::int32_t size, const float* m) {
    std::vector<float> out(rows.size());
    host::gemm(rows.data(), size, m, size, out.data(), size, count, size, size, false);
    return out;
}

// Values about the mean, each divided by `typical`, or by its own coded scale where typical is 0.
std::vector<float> normalized(const float* values, std::int64_t count, std::int32_t size, const float* mean, float typical) {
    std::vector<float> out(static_cast<std::size_t>(count * size));
    for (std::int64_t i = 0; i < count; ++i) {
        const float inverse = 1.0F / (typical > 0 ? typical : scale_of(scale_byte(values + i * size, mean, size)));
        for (std::int32_t j = 0; j < size; ++j) out[static_cast<std::size_t>(i * size + j)] = (values[i * size + j] - mean[j]) * inverse;
    }
    return out;
}

std::vector<double> variance_of(const std::vector<float>& codes, std::int64_t count, std::int32_t size) {
    std::vector<double> v(static_cast<std::size_t>(size), 0.0);
    for (std::int64_t i = 0; i < count; ++i) {
        for (std::int32_t j = 0; j < size; ++j) {
            const double c = codes[static_cast<std::size_t>(i * size + j)];
            v[static_cast<std::size_t>(j)] += c * c;
        }
    }
    for (auto& x : v) x /= static_cast<double>(std::max<std::int64_t>(count, 1));
    return v;
}

std::vector<float> half_rounded(const fp16* m, std::int64_t count) {
    std::vector<float> out(static_cast<std::size_t>(count));
    host::to_float(m, dtype::f16, out.size(), out.data());
    return out;
}

template <scalar T>
void store_exact_as(std::byte* lines, const float* keys, std::int32_t dk, const float* values, std::int32_t dv, std::int64_t count) {
    auto* out = reinterpret_cast<T*>(lines);
    for (std::int64_t i = 0; i < count; ++i, out += dk + dv) {
        host::from_float(keys + i * dk, static_cast<std::size_t>(dk), out);
        host::from_float(values + i * dv, static_cast<std::size_t>(dv), out + dk);
    }
}

void store_exact(std::byte* lines, dtype type, const float* keys, std::int32_t dk, const float* values, std::int32_t dv, std::int64_t count) {
    if (type == dtype::f32) store_exact_as<float>(lines, keys, dk, values, dv, count);
    if (type == dtype::f16) store_exact_as<fp16>(lines, keys, dk, values, dv, count);
    if (type == dtype::bf16) store_exact_as<bf16>(lines, keys, dk, values, dv, count);
}

// Rows of sealed units, for a fit on what is already encoded.
class decoded_rows final : public row_reader {
public:
    decoded_rows(const progressive_codec& codec, const std::vector<progressive_codec::unit>& units, const model_shape& model) : codec_(codec), units_(units), model_(model) {}
    void read(std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const override {
        const auto& l = model_.layers[static_cast<std::size_t>(layer)];
        for (const auto& u : units_) {
            const auto first = std::max(u.begin, range.begin);
            const auto last = std::min(u.end(), range.end());
            if (first >= last) continue;
            codec_.decode(u, layer, head, {first, last - first}, keys + (first - range.begin) * l.key_size, values + (first - range.begin) * l.value_size);
        }
    }

private:
    const progressive_codec& codec_;
    const std::vector<progressive_codec::unit>& units_;
    const model_shape& model_;
};

}  // namespace

void progressive_codec::fit_epoch(const sequence& s, epoch& e, const row_reader& rows, token_range range, std::int64_t length, std::int32_t index, std::vector<unit>* units) const {
    const auto layer = layer_of_[static_cast<std::size_t>(index)];
    const auto head = head_of_[static_cast<std::size_t>(index)];
    const auto& f = layout_.format(index);
    const auto n = range.count;
    std::vector<float> keys(static_cast<std::size_t>(n * f.key_size));
    std::vector<float> values(static_cast<std::size_t>(n * f.value_size));
    rows.read(layer, head, range, keys.data(), values.data());
    // Sinks are read exactly and are unlike every other token, so they don't shape the basis.
    const std::int64_t skip = range.begin == 0 ? std::min<std::int64_t>(model_.sinks, n - 1) : 0;
    const auto kb = fit_keys(keys.data() + skip * f.key_size, n - skip, f.key_size, metric_of(s, layer, head, length), options_.metric_power);
    const auto vb = fit_values(values.data() + skip * f.value_size, n - skip, f.value_size);
    auto centered = keys;
    center(centered.data(), n, f.key_size, kb.mean.data());
    const auto key_codes = times(centered, n, f.key_size, kb.b.data());
    const auto* fitted_keys = key_codes.data() + skip * f.key_size;
    const auto key_sketch = fit_sketch(fitted_keys, n - skip, f.key_size, kb.variance, f.key_bits);
    const auto key_lines = fit_line(fitted_keys, n - skip, f.key_size, kb.variance, f.key_line_bytes);

    const auto rough = times(normalized(values.data(), n, f.value_size, vb.mean.data(), vb.typical_scale), n, f.value_size, vb.u.data());
    const auto rough_variance = variance_of(rough, n, f.value_size);
    const auto value_sketch = fit_sketch(rough.data() + skip * f.value_size, n - skip, f.value_size, rough_variance, f.value_bits);
    const auto fine = times(normalized(values.data(), n, f.value_size, vb.mean.data(), 0), n, f.value_size, vb.u.data());
    const auto value_lines = fit_line(fine.data() + skip * f.value_size, n - skip, f.value_size, vb.variance, f.value_line_bytes);

    e.keys->set(index, kb.a, kb.b, key_sketch);
    const auto ut = transposed(vb.u, f.value_size);
    e.set(index, {kb.mean, vb.mean, ut, vb.typical_scale, &value_sketch, key_lines.widths, value_lines.widths, key_lines.step, value_lines.step});
    if (units == nullptr) return;
    for (auto& u : *units) {
        if (u.payload.statistics.get() != &e) continue;
        encode_rows(e, *e.keys, index, keys.data() + (u.begin - range.begin) * f.key_size, values.data() + (u.begin - range.begin) * f.value_size, u);
    }
}

void progressive_codec::encode_rows(const epoch& e, const key_bases& bases, std::int32_t index, const float* keys, const float* values, unit& u) const {
    const auto& f = layout_.format(index);
    const auto dk = f.key_size, dv = f.value_size;
    const auto refined = e.keys->view(index);
    const auto rough = bases.view(index);
    const auto v = e.values(index);
    const auto lines = e.lines(index);
    auto* sketch = u.payload.sketch->as<std::uint8_t>(layout_.sketch_offset(index));
    auto* line = u.payload.lines->as<std::uint8_t>(layout_.line_offset(index));

    std::vector<float> centered(keys, keys + u.count * dk);
    center(centered.data(), u.count, dk, e.key_mean(index));
    const auto codes = times(centered, u.count, dk, refined.encoder);
    pack_lines(codes.data(), u.count, dk, lines.key_widths, lines.key_step, line, f.line_stride, 0);
    const auto sketch_codes = &bases == e.keys.get() ? codes : times(centered, u.count, dk, rough.encoder);
    pack_sketch(sketch_codes.data(), u.count, dk, rough.sketch.fields, rough.sketch.bits, rough.sketch.step, sketch);

    const auto basis = transposed(half_rounded(v.basis, static_cast<std::int64_t>(dv) * dv), dv);
    const auto typical = times(normalized(values, u.count, dv, v.mean, v.typical_scale), u.count, dv, basis.data());
    pack_sketch(typical.data(), u.count, dv, v.sketch.fields, v.sketch.bits, v.sketch.step, sketch + f.key_planes() * host::plane_bytes);
    const auto scaled = times(normalized(values, u.count, dv, v.mean, 0), u.count, dv, basis.data());
    pack_lines(scaled.data(), u.count, dv, lines.value_widths, lines.value_step, line, f.line_stride, f.value_line_offset());
    for (std::int32_t i = 0; i < u.count; ++i) line[i * f.line_stride + f.key_line_bytes] = scale_byte(values + i * dv, v.mean, dv);
    if (u.payload.exact) store_exact(u.payload.exact->data() + exact_offset_[static_cast<std::size_t>(index)], stored_, keys, dk, values, dv, u.count);
}

void progressive_codec::fit_and_encode(const progressive_sequence& s, const std::vector<std::shared_ptr<epoch>>& epochs, const std::vector<token_range>& ranges, std::vector<unit>& units, const seal_request& request) {
    const auto heads = static_cast<std::int64_t>(layout_.heads());
    executor_->run(heads * static_cast<std::int64_t>(epochs.size()), [&](std::int64_t i, std::int32_t) {
        const auto which = static_cast<std::size_t>(i / heads);
        fit_epoch(s, *epochs[which], *request.rows, ranges[which], request.length, static_cast<std::int32_t>(i % heads), &units);
    });
}

void progressive_codec::fit_decoded(const progressive_sequence& s, epoch& e, const std::vector<unit>& units, token_range range, std::int64_t length) {
    const decoded_rows rows(*this, units, model_);
    executor_->run(layout_.heads(), [&](std::int64_t i, std::int32_t) { fit_epoch(s, e, rows, range, length, static_cast<std::int32_t>(i), nullptr); });
}

void progressive_codec::encode_units(std::vector<unit>& units, const seal_request& request) {
    executor_->run(layout_.heads(), [&](std::int64_t i, std::int32_t) {
        const auto index = static_cast<std::int32_t>(i);
        const auto& f = layout_.format(index);
        for (auto& u : units) {
            std::vector<float> keys(static_cast<std::size_t>(u.count * f.key_size));
            std::vector<float> values(static_cast<std::size_t>(u.count * f.value_size));
            request.rows->read(layer_of_[static_cast<std::size_t>(index)], head_of_[static_cast<std::size_t>(index)], {u.begin, u.count}, keys.data(), values.data());
            encode_rows(*u.payload.statistics, *u.payload.keys, index, keys.data(), values.data(), u);
        }
    });
}

void progressive_codec::sketch_anew(const progressive_sequence& s, const std::vector<unit>& units, const std::vector<sketch_run>& runs, std::byte* planes, std::int64_t length) {
    const auto heads = static_cast<std::int64_t>(layout_.heads());
    executor_->run(heads * static_cast<std::int64_t>(runs.size()), [&](std::int64_t task, std::int32_t) {
        const auto& r = runs[static_cast<std::size_t>(task / heads)];
        const auto index = static_cast<std::int32_t>(task % heads);
        const auto& f = layout_.format(index);
        const auto layer = layer_of_[static_cast<std::size_t>(index)];
        const auto head = head_of_[static_cast<std::size_t>(index)];
        const auto begin = units[r.first].begin;
        const auto n = units[r.last - 1].end() - begin;
        std::vector<float> keys(static_cast<std::size_t>(n * f.key_size));
        std::vector<float> values(static_cast<std::size_t>(host::block_tokens * f.value_size));
        for (std::size_t i = r.first; i < r.last; ++i) decode(units[i], layer, head, {units[i].begin, units[i].count}, keys.data() + (units[i].begin - begin) * f.key_size, values.data());
        center(keys.data(), n, f.key_size, units[r.first].payload.statistics->key_mean(index));
        const std::int64_t skip = begin == 0 ? std::min<std::int64_t>(model_.sinks, n - 1) : 0;
        const auto kb = fit_keys(keys.data() + skip * f.key_size, n - skip, f.key_size, metric_of(s, layer, head, length), options_.metric_power);
        const auto codes = times(keys, n, f.key_size, kb.b.data());
        const auto code = fit_sketch(codes.data() + skip * f.key_size, n - skip, f.key_size, kb.variance, f.key_bits);
        r.bases->set(index, kb.a, kb.b, code);
        for (std::size_t i = r.first; i < r.last; ++i) {
            auto* to = reinterpret_cast<std::uint8_t*>(planes + i * layout_.sketch_block_bytes() + layout_.sketch_offset(index));
            pack_sketch(codes.data() + (units[i].begin - begin) * f.key_size, units[i].count, f.key_size, code.fields, code.bits.data(), code.step.data(), to);
        }
    });
}

}  // namespace sekv
