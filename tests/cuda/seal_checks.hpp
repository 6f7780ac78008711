// How the tests of sealing compare a device's seal with the host library's.
#pragma once

#include <cmath>

#include "seal_world.hpp"

namespace sekv::cuda::seal_tests {

using shape = seal_world::shape;

inline shape make(dtype stored, std::int32_t heads, std::int32_t dk, std::int32_t dv, std::vector<std::int32_t> counts, std::int32_t chunk, std::int64_t begin = 0) {
    shape s;
    s.stored = stored, s.kv_heads = heads, s.dk = dk, s.dv = dv, s.counts = std::move(counts), s.chunk = chunk, s.begin = begin;
    s.exact_tier = heads % 2 == 1, s.seed = static_cast<std::uint32_t>(dk + dv + heads);
    return s;
}

inline void expect_close(std::span<const float> got, std::span<const float> want, double absolute, double relative, const std::string& what) {
    ASSERT_EQ(got.size(), want.size()) << what;
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_LE(std::abs(static_cast<double>(got[i]) - want[i]), absolute + relative * std::abs(static_cast<double>(want[i]))) << what << " " << i << ": " << got[i] << " for " << want[i];
}

// Columns (by_row: rows) of two bases, up to sign, each relative to its own length.
inline void expect_same_basis(const floats& got, const floats& want, std::int32_t size, bool by_row, std::int32_t count, double tolerance, const std::string& what) {
    const auto at = [&](const floats& m, std::int32_t i, std::int32_t j) { return static_cast<double>(m[static_cast<std::size_t>(by_row ? j * size + i : i * size + j)]); };
    for (std::int32_t j = 0; j < count; ++j) {
        double same = 0, other = 0, length = 0;
        for (std::int32_t i = 0; i < size; ++i) {
            same += std::pow(at(got, i, j) - at(want, i, j), 2), other += std::pow(at(got, i, j) + at(want, i, j), 2), length += std::pow(at(want, i, j), 2);
        }
        ASSERT_LE(std::sqrt(std::min(same, other) / length), tolerance) << what << ", component " << j;
    }
}

inline void expect_fit(const seal_world& w, std::int32_t head) {
    const auto host = w.host(head);
    const auto& want = host.codec;
    const auto got = w.codec(head);
    expect_close(got.key_mean, want.key_mean, 1e-6, 1e-6, "key mean");
    expect_close(got.value_mean, want.value_mean, 1e-6, 1e-6, "value mean");
    expect_close(std::span(&got.typical, 1), std::span(&want.typical, 1), 0, 1e-6, "typical scale");
    expect_same_basis(got.encoder, want.encoder, got.dk, false, got.dk, 1e-3, "B");
    expect_same_basis(got.a, want.a, got.dk, false, got.dk, 2e-3, "A");
    expect_same_basis(got.basis, want.basis, got.dv, true, got.dv, 2e-3, "U");
    EXPECT_EQ(got.keys.bits, want.keys.bits);
    EXPECT_EQ(got.values.bits, want.values.bits);
    EXPECT_EQ(got.key_lines.widths, want.key_lines.widths);
    EXPECT_EQ(got.value_lines.widths, want.value_lines.widths);
    const auto fields = [](const sketch_code& c) {
        std::vector<std::array<int, 4>> f;
        for (const auto& x : c.fields) f.push_back({x.plane, x.shift, x.mask, x.component});
        return f;
    };
    EXPECT_EQ(fields(got.keys), fields(want.keys));
    EXPECT_EQ(fields(got.values), fields(want.values));
    expect_close(got.keys.step, want.keys.step, 0, 1e-4, "key step");
    expect_close(got.keys.error, want.keys.error, 1e-9 * host.keys.variance[0], 1e-4, "key error");
    expect_close(got.values.step, want.values.step, 0, 1e-4, "value step");
    expect_close(got.key_lines.step, want.key_lines.step, 0, 1e-4, "key line step");
    expect_close(got.value_lines.step, want.value_lines.step, 0, 1e-4, "value line step");
}

// How many codes of an array differ; none by more than one.
struct code_counts {
    std::int64_t all = 0, different = 0;
    void add(int got, int want, const char* what) {
        ++all;
        different += got != want;
        EXPECT_LE(std::abs(got - want), 1) << what;
    }
};

// Fields as codes: an 8-bit component is two fields.
inline void compare_planes(const sketch_code& code, const std::uint8_t* got, const std::uint8_t* want, code_counts& counts) {
    const auto codes = [&](const std::uint8_t* planes) {
        std::vector<int> out(static_cast<std::size_t>(block_tokens) * 256, 0);
        for (const auto& f : code.fields) {
            for (std::size_t t = 0; t < block_tokens; ++t) {
                const int nibble = planes[static_cast<std::size_t>(f.plane * plane_bytes) + t % 32] >> (t < 32 ? 0 : 4) & 15;
                auto& c = out[t * 256 + f.component];
                c = c * 16 + ((nibble >> f.shift) & f.mask);
            }
        }
        return out;
    };
    const auto a = codes(got), b = codes(want);
    for (const auto& f : code.fields) {
        for (std::size_t t = 0; t < block_tokens; ++t) counts.add(a[t * 256 + f.component], b[t * 256 + f.component], "sketch code");
    }
}

inline void compare_lines(const line_code& code, const layer_layout& l, std::int32_t offset, const std::vector<std::uint8_t>& got, const std::vector<std::uint8_t>& want, code_counts& counts) {
    for (std::int32_t t = 0; t < block_tokens; ++t) {
        auto at = static_cast<std::size_t>(t * l.line_stride + offset);
        for (const auto w : code.widths) {
            std::uint64_t a = 0, b = 0;
            for (std::size_t i = 0; i < w; ++i) a |= static_cast<std::uint64_t>(got[at + i]) << (8 * i), b |= static_cast<std::uint64_t>(want[at + i]) << (8 * i);
            for (int j = 0; w > 0 && j < 8; ++j) counts.add(static_cast<int>(a >> (j * w) & ((1U << w) - 1)), static_cast<int>(b >> (j * w) & ((1U << w) - 1)), "line code");
            at += w;
        }
    }
}

// Against the host's encoder with what the device's buffers hold. sketch: of R1's keys.
inline void expect_codes(const seal_world& w, std::int32_t head, const head_codec& lines, const head_codec& sketch) {
    code_counts counts;
    const auto& l = w.layer;
    for (std::int32_t b = 0; b < static_cast<std::int32_t>(w.sketches.size()); ++b) {
        const auto rows = w.block(head, b);
        const auto n = static_cast<std::int32_t>(rows.count);
        const auto want = encode_by_host(lines, l, rows.keys, rows.values, n), rough = encode_by_host(sketch, l, rows.keys, rows.values, n);
        const auto planes = w.planes(head, b), got = w.block_lines(head, b);
        compare_planes(sketch.keys, planes.data(), rough.planes.data(), counts);
        compare_planes(lines.values, planes.data() + l.key_planes * plane_bytes, want.planes.data() + l.key_planes * plane_bytes, counts);
        compare_lines(lines.key_lines, l, 0, got, want.lines, counts);
        compare_lines(lines.value_lines, l, l.key_line_bytes + 1, got, want.lines, counts);
        for (std::int32_t t = 0; t < block_tokens; ++t) {
            const auto at = static_cast<std::size_t>(t * l.line_stride + l.key_line_bytes);
            ASSERT_EQ(got[at], want.lines[at]) << "scale byte of token " << t;
            for (auto i = static_cast<std::size_t>(t * l.line_stride + l.line_bytes); i < static_cast<std::size_t>((t + 1) * l.line_stride); ++i) ASSERT_EQ(got[i], 0) << "padding";
        }
    }
    EXPECT_LE(counts.different, counts.all / 500 + 1) << "of " << counts.all << " codes";
}

// Decoded lines are as near to the rows as the host's own, fitted and encoded from scratch.
inline void expect_quality(const seal_world& w, std::int32_t head) {
    const auto device = w.codec(head), host = w.host(head).codec;
    std::array<double, 2> got{}, want{};
    for (std::int32_t b = 1; b < static_cast<std::int32_t>(w.sketches.size()); ++b) {
        const auto rows = w.block(head, b);
        const auto n = static_cast<std::int32_t>(rows.count);
        const auto x = line_error(device, w.layer, w.block_lines(head, b).data(), rows.keys, rows.values, n);
        const auto y = line_error(host, w.layer, encode_by_host(host, w.layer, rows.keys, rows.values, n).lines.data(), rows.keys, rows.values, n);
        for (std::size_t i = 0; i < 2; ++i) got[i] += x[i], want[i] += y[i];
    }
    for (std::size_t i = 0; i < 2; ++i) EXPECT_LE(got[i], want[i] * 1.002 + 1e-9) << (i == 0 ? "keys" : "values");
}

}  // namespace sekv::cuda::seal_tests
