// A seal by the host library's functions: what a device's is compared with.
#pragma once

#include <array>
#include <span>

#include "kernels/seal.hpp"
#include "rows_world.hpp"
#include "sekv/codec/basis.hpp"
#include "sekv/codec/line.hpp"
#include "sekv/codec/metric.hpp"
#include "sekv/codec/quantizer.hpp"
#include "sekv/codec/sketch.hpp"
#include "sekv/exec/line_ops.hpp"

namespace sekv::cuda::seal_tests {

using rows_tests::array;
using floats = std::vector<float>;

/// Everything that encodes and decodes one head's rows: out of device buffers, or fitted by the host library.
struct head_codec {
    std::int32_t dk = 0, dv = 0;
    floats key_mean, encoder, a, value_mean, basis;  // basis: row j is component j
    float typical = 1;
    sketch_code keys, values;
    line_code key_lines, value_lines;
};

/// Rows of one head; sealed from `skip` on as far as statistics go.
struct head_rows {
    floats keys, values;
    std::int64_t count = 0;
};

inline floats transposed(const floats& m, std::int32_t size) {
    floats t(m.size());
    for (std::int32_t i = 0; i < size; ++i) {
        for (std::int32_t j = 0; j < size; ++j) t[static_cast<std::size_t>(j * size + i)] = m[static_cast<std::size_t>(i * size + j)];
    }
    return t;
}

/// rows * m, summed in double: [count, size] by [size, size].
inline floats times(const floats& rows, const floats& m, std::int32_t size) {
    const auto d = static_cast<std::size_t>(size);
    floats out(rows.size());
    for (std::size_t r = 0; r < rows.size() / d; ++r) {
        std::vector<double> sum(d, 0.0);
        for (std::size_t i = 0; i < d; ++i) {
            const double x = rows[r * d + i];
            for (std::size_t j = 0; j < d; ++j) sum[j] += x * static_cast<double>(m[i * d + j]);
        }
        for (std::size_t j = 0; j < d; ++j) out[r * d + j] = static_cast<float>(sum[j]);
    }
    return out;
}

inline floats centered(floats rows, const floats& mean) {
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] -= mean[i % mean.size()];
    return rows;
}

/// Value codes at the typical scale, or (typical 0) at each row's own.
inline floats value_codes(const head_codec& c, const floats& values, float typical) {
    auto rows = centered(values, c.value_mean);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(rows.size()) / c.dv; ++i) {
        const float inverse = 1.0F / (typical > 0 ? typical : scale_of(scale_byte(values.data() + i * c.dv, c.value_mean.data(), c.dv)));
        for (std::int32_t j = 0; j < c.dv; ++j) rows[static_cast<std::size_t>(i * c.dv + j)] *= inverse;
    }
    return times(rows, transposed(c.basis, c.dv), c.dv);
}

inline std::vector<double> mean_squares(const floats& codes, std::int32_t size) {
    std::vector<double> v(static_cast<std::size_t>(size), 0.0);
    for (std::size_t i = 0; i < codes.size(); ++i) v[i % v.size()] += static_cast<double>(codes[i]) * codes[i];
    for (auto& x : v) x /= static_cast<double>(std::max<std::size_t>(1, codes.size() / v.size()));
    return v;
}

inline std::span<const float> from_row(const floats& rows, std::int64_t row, std::int32_t size) { return std::span(rows).subspan(static_cast<std::size_t>(row * size)); }

/// As src/progressive_seal.cpp's fit_epoch.
struct host_fit {
    key_basis keys;
    value_basis values;
    std::vector<double> rough_variance;
    head_codec codec;
};
inline host_fit fit_by_host(const head_rows& rows, std::int64_t skip, const layer_layout& l, const std::vector<double>& metric, double power) {
    host_fit f;
    const auto n = rows.count - skip;
    f.keys = fit_keys(from_row(rows.keys, skip, l.key_size).data(), n, l.key_size, metric, power);
    f.values = fit_values(from_row(rows.values, skip, l.value_size).data(), n, l.value_size);
    auto& c = f.codec;
    c.dk = l.key_size, c.dv = l.value_size, c.key_mean = f.keys.mean, c.encoder = f.keys.b, c.a = f.keys.a, c.value_mean = f.values.mean, c.basis = transposed(f.values.u, l.value_size), c.typical = f.values.typical_scale;
    const auto key = times(centered(rows.keys, c.key_mean), c.encoder, c.dk);
    const auto fitted = from_row(key, skip, c.dk).data();
    c.keys = fit_sketch(fitted, n, c.dk, f.keys.variance, l.key_bits);
    c.key_lines = fit_line(fitted, n, c.dk, f.keys.variance, l.key_line_bytes);
    const auto rough = value_codes(c, rows.values, c.typical), fine = value_codes(c, rows.values, 0);
    f.rough_variance = mean_squares(rough, c.dv);
    c.values = fit_sketch(from_row(rough, skip, c.dv).data(), n, c.dv, f.rough_variance, l.value_bits);
    c.value_lines = fit_line(from_row(fine, skip, c.dv).data(), n, c.dv, f.values.variance, l.value_line_bytes);
    for (auto* m : {&c.a, &c.basis}) {  // as they are kept
        for (auto& x : *m) x = static_cast<float>(fp16(x));
    }
    return f;
}

/// One block of one head, encoded by the host library.
struct host_block {
    std::vector<std::uint8_t> planes, lines;
};
inline host_block encode_by_host(const head_codec& c, const layer_layout& l, const floats& keys, const floats& values, std::int32_t count) {
    host_block b;
    b.planes.assign(static_cast<std::size_t>((l.key_planes + l.value_planes) * plane_bytes), 0);
    b.lines.assign(static_cast<std::size_t>(block_tokens * l.line_stride), 0);
    const auto key = times(centered(keys, c.key_mean), c.encoder, c.dk);
    pack_sketch(key.data(), count, c.dk, c.keys.fields, c.keys.bits.data(), c.keys.step.data(), b.planes.data());
    pack_lines(key.data(), count, c.dk, c.key_lines.widths.data(), c.key_lines.step.data(), b.lines.data(), l.line_stride, 0);
    pack_sketch(value_codes(c, values, c.typical).data(), count, c.dv, c.values.fields, c.values.bits.data(), c.values.step.data(), b.planes.data() + l.key_planes * plane_bytes);
    pack_lines(value_codes(c, values, 0).data(), count, c.dv, c.value_lines.widths.data(), c.value_lines.step.data(), b.lines.data(), l.line_stride, l.key_line_bytes + 1);
    for (std::int32_t i = 0; i < count; ++i) b.lines[static_cast<std::size_t>(i * l.line_stride + l.key_line_bytes)] = scale_byte(values.data() + i * c.dv, c.value_mean.data(), c.dv);
    return b;
}

/// Components that planes or lines decode to, [count, size].
inline floats sketch_components(const sketch_code& code, const std::uint8_t* planes, std::int32_t count, std::int32_t size) {
    floats out(static_cast<std::size_t>(count * size));
    unpack_sketch(planes, count, size, code.fields, code.bits.data(), code.step.data(), out.data());
    return out;
}
inline floats line_components(const line_code& code, const std::uint8_t* lines, const layer_layout& l, std::int32_t count, std::int32_t size, std::int32_t offset) {
    floats out(static_cast<std::size_t>(count * size));
    std::vector<std::uint8_t> padded(lines, lines + block_tokens * l.line_stride);
    padded.resize(padded.size() + 64);  // line_levels reads past a line
    host::line_levels(padded.data(), l.line_stride, count, offset, code.widths.data(), size, out.data());
    for (std::size_t i = 0; i < out.size(); ++i) out[i] *= code.step[i % code.step.size()];
    return out;
}

/// Mean squared error of decoded rows relative to the rows' variance: keys then values.
inline std::array<double, 2> line_error(const head_codec& c, const layer_layout& l, const std::uint8_t* lines, const floats& keys, const floats& values, std::int32_t count) {
    auto k = times(line_components(c.key_lines, lines, l, count, c.dk, 0), transposed(c.a, c.dk), c.dk);
    auto v = times(line_components(c.value_lines, lines, l, count, c.dv, l.key_line_bytes + 1), c.basis, c.dv);
    const auto error = [](const floats& got, const floats& want) {
        double e = 0, s = 0;
        for (std::size_t i = 0; i < got.size(); ++i) e += std::pow(static_cast<double>(got[i]) - want[i], 2), s += std::pow(static_cast<double>(want[i]), 2);
        return e / std::max(s, 1e-30);
    };
    for (std::size_t i = 0; i < v.size(); ++i) v[i] *= scale_of(lines[static_cast<std::int32_t>(i) / c.dv * l.line_stride + l.key_line_bytes]);
    return {error(k, centered(keys, c.key_mean)), error(v, centered(values, c.value_mean))};
}

}  // namespace sekv::cuda::seal_tests
