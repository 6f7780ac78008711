// Sealing on the device against the host library's functions on the same rows.
//
// Tolerances. Means to 1e-6 of the rows' spread; variances to 1e-5 of themselves plus 1e-9 of the largest; A and U up to a column's sign to 2e-3 (fp16); bits, widths and fields equal; steps to 1e-4
// relative; codes equal but for 2 in 1,000, which differ by one (ties: fp32 products summed in another order).
#include <gtest/gtest.h>

#include "seal_checks.hpp"

namespace sekv::cuda::seal_tests {
namespace {

std::string name_of(const testing::TestParamInfo<shape>& i) {
    const auto& s = i.param;
    std::int64_t tokens = 0;
    for (const auto c : s.counts) tokens += c;
    return std::string(s.stored == dtype::f16 ? "f16" : "bf16") + "_k" + std::to_string(s.dk) + "_v" + std::to_string(s.dv) + "_h" + std::to_string(s.kv_heads) + "_n" + std::to_string(tokens) + "_c" + std::to_string(s.chunk);
}

class Seal : public testing::TestWithParam<shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Seal,
                         testing::Values(make(dtype::bf16, 2, 64, 64, {64, 64, 64, 64, 64, 37}, 128), make(dtype::f16, 3, 80, 64, {64, 17, 64, 64, 64, 64, 5}, 192, 640), make(dtype::bf16, 1, 96, 128, {64, 64, 64, 64, 64, 64}, 1024),
                                         make(dtype::f16, 2, 128, 96, {64, 64, 64, 64, 64, 1}, 64), make(dtype::bf16, 1, 256, 80, {64, 64, 64, 64, 64, 64, 30}, 256), make(dtype::bf16, 1, 64, 256, {64, 64, 64, 64, 64, 64, 64}, 128)),
                         name_of);

TEST_P(Seal, FitsAndEncodesAsTheHost) {
    seal_world w(GetParam());
    w.seal();
    for (std::int32_t h = 0; h < GetParam().kv_heads; ++h) {
        SCOPED_TRACE("head " + std::to_string(h));
        expect_fit(w, h);
        const auto c = w.codec(h);
        expect_codes(w, h, c, c);
        expect_quality(w, h);
    }
}

TEST_P(Seal, WritesOnlyItsOwnLayer) {
    seal_world w(GetParam());
    w.seal();
    const auto untouched = [](const auto& bytes, std::uint64_t end) {
        for (std::uint64_t i = 0; i < end; ++i) {
            if (static_cast<int>(bytes[i]) != 0xa5) return false;
        }
        return true;
    };
    EXPECT_TRUE(untouched(w.key_buffer.read(), w.layer.key_buffer.first));
    EXPECT_TRUE(untouched(w.epoch_buffer.read(), w.layer.epoch_buffer.first));
    EXPECT_TRUE(untouched(w.encoder_buffer.read(), w.layer.encoder_buffer.first));
    for (std::size_t b = 0; b < w.sketches.size(); ++b) {
        EXPECT_TRUE(untouched(w.sketch_pages[b].read(), w.layer.sketch_page.first));
        EXPECT_TRUE(untouched(w.line_pages[b].read(), w.layer.line_page.first));
    }
}

TEST(SealExact, CopiesRowsAsStored) {
    for (const auto stored : {dtype::bf16, dtype::f16}) {
        auto s = make(stored, 3, 80, 64, {64, 64, 21}, 64);
        seal_world w(s);
        w.seal();
        for (std::size_t b = 0; b < w.exact.size(); ++b) {
            const auto page = w.exact_pages[b].read();
            for (std::int32_t h = 0; h < s.kv_heads; ++h) {
                const auto rows = w.block(h, static_cast<std::int32_t>(b));
                for (std::int64_t t = 0; t < rows.count; ++t) {
                    const auto* line = reinterpret_cast<const std::uint16_t*>(page.data() + w.layer.exact_line_page.first + static_cast<std::uint64_t>(h) * w.layer.exact_line_page.stride + static_cast<std::uint64_t>(t * w.layer.exact_line_bytes));
                    for (std::int32_t j = 0; j < s.dk + s.dv; ++j) {
                        const float x = j < s.dk ? rows.keys[static_cast<std::size_t>(t * s.dk + j)] : rows.values[static_cast<std::size_t>(t * s.dv + j - s.dk)];
                        ASSERT_EQ(line[j], w.exact[b] != nullptr ? rows_tests::bits_of(stored, x) : 0xa5a5) << "block " << b << ", token " << t << ", element " << j;
                    }
                }
            }
        }
    }
}

// Strided samples (more than 4,096 tokens), more of them than a chunk.
TEST(SealSamples, ChoosesStepsOnTheHostsSamples) {
    auto s = make(dtype::bf16, 1, 64, 64, std::vector<std::int32_t>(67, 64), 256);
    s.counts.push_back(50);
    seal_world w(s);
    w.seal();
    expect_fit(w, 0);
    const auto c = w.codec(0);
    expect_codes(w, 0, c, c);
}

TEST(SealChunks, AnyChunkGivesTheSameCodes) {
    auto s = make(dtype::bf16, 2, 64, 80, {64, 64, 30, 64, 64, 64, 64}, 64);
    seal_world small(s);
    s.chunk = 512;
    seal_world large(s);
    small.seal();
    large.seal();
    for (std::int32_t h = 0; h < s.kv_heads; ++h) {
        EXPECT_EQ(small.codec(h).keys.bits, large.codec(h).keys.bits);
        expect_close(small.codec(h).keys.step, large.codec(h).keys.step, 0, 1e-5, "step");
        expect_same_basis(small.codec(h).a, large.codec(h).a, s.dk, false, s.dk, 2e-3, "A");
    }
}

TEST(SealSchedules, EveryScheduleGivesTheSameBits) {
    std::vector<std::vector<std::uint8_t>> all;
    rows_tests::under_schedules(4, [&] {
        seal_world w(make(dtype::f16, 1, 80, 96, {64, 64, 64, 33}, 128));
        w.seal();
        std::vector<std::uint8_t> bytes;
        for (std::size_t b = 0; b < w.sketches.size(); ++b) {
            for (const auto& page : {w.sketch_pages[b].read(), w.line_pages[b].read()}) bytes.insert(bytes.end(), page.begin(), page.end());
        }
        for (const auto x : w.key_buffer.read()) bytes.push_back(static_cast<std::uint8_t>(x));
        for (const auto x : w.epoch_buffer.read()) bytes.push_back(static_cast<std::uint8_t>(x));
        all.push_back(std::move(bytes));
        EXPECT_EQ(all.back(), all.front());
    });
}

// A metric power of 0 is plain PCA; of 2, the metric itself.
TEST(SealMetric, EveryPower) {
    for (const double power : {0.0, 0.5, 2.0}) {
        auto s = make(dtype::bf16, 2, 64, 64, {64, 64, 64, 64}, 128);
        s.power = power;
        seal_world w(s);
        w.seal();
        for (std::int32_t h = 0; h < 2; ++h) expect_fit(w, h);
    }
}

class SealDegenerate : public testing::TestWithParam<shape::data> {};
INSTANTIATE_TEST_SUITE_P(Rows, SealDegenerate, testing::Values(shape::data::constant_keys, shape::data::zero_values, shape::data::rank_one));

TEST_P(SealDegenerate, StaysFinite) {
    for (const auto& counts : {std::vector<std::int32_t>{64, 64, 9}, std::vector<std::int32_t>{1}, std::vector<std::int32_t>{3}}) {
        auto s = make(dtype::bf16, 2, 64, 64, counts, 128);
        s.rows = GetParam();
        seal_world w(s);
        w.seal();
        for (std::int32_t h = 0; h < 2; ++h) {
            const auto c = w.codec(h);
            for (const auto* v : {&c.key_mean, &c.encoder, &c.a, &c.value_mean, &c.basis, &c.keys.step, &c.keys.error, &c.values.step, &c.key_lines.step, &c.value_lines.step}) {
                for (const auto x : *v) ASSERT_TRUE(std::isfinite(x));
            }
            ASSERT_TRUE(std::isfinite(c.typical));
            expect_codes(w, h, c, c);
            if (counts.size() > 1) expect_quality(w, h);
        }
    }
}

TEST(SealSketch, KeysInAnotherBasisThanTheLines) {
    auto s = make(dtype::bf16, 2, 96, 64, {64, 64, 64, 64, 11}, 128);
    seal_world w(s);
    const array<std::byte> keys(w.bases().key_device_bytes()), encoder(w.bases().key_host_bytes(), true);
    const array<std::byte> workspace(seal_workspace_bytes(w.workspace_shape()));
    const owned_stream stream;
    sealer seal(w.workspace_shape(), workspace.get(), stream.get());
    w.fit(seal);
    std::vector<double> identity(w.metric.size(), 0.0);
    for (std::size_t i = 0; i < identity.size(); ++i) identity[i] = i % static_cast<std::size_t>(s.dk * s.dk) % static_cast<std::size_t>(s.dk + 1) == 0 ? 1.0 : 0.0;
    const array<std::byte> other_epoch(w.bases().epoch_bytes());
    seal.fit_epoch(w.layer, w.rows(), identity.data(), 1, keys.get(), other_epoch.get(), encoder.get());
    seal.encode(w.layer, w.rows(), w.epoch_buffer.get(), w.encoder_buffer.get(), keys.get(), encoder.get(), w.sketches.data(), w.lines.data(), nullptr);
    for (std::int32_t h = 0; h < s.kv_heads; ++h) expect_codes(w, h, w.codec(h), w.codec(h, keys, encoder));
}

template <class E, class F>
std::string sentence_of(F&& f) {
    try {
        f();
    } catch (const E& e) {
        return e.what();
    }
    return "";
}

TEST(SealErrors, RefusesWhatDoesNotFit) {
    seal_world w(make(dtype::bf16, 2, 128, 64, {64, 64, 64, 64}, 64));
    const array<std::byte> workspace(seal_workspace_bytes(w.workspace_shape()));
    const owned_stream stream;
    const seal_shape narrow{2, 96, 64}, few{1, 128, 64};
    for (const auto& shape : {narrow, few}) {
        sealer s(shape, workspace.get(), stream.get());
        EXPECT_NE(sentence_of<invalid_argument>([&] { w.fit(s); }).find("doesn't fit the seal's workspace"), std::string::npos);
    }
    EXPECT_NE(sentence_of<invalid_argument>([] { (void)seal_workspace_bytes({2, 128, 100}); }).find("multiple of 64, not 100"), std::string::npos);
    sealer s(w.workspace_shape(), workspace.get(), stream.get());
    auto rows = w.rows();
    rows.count = 0;
    EXPECT_THROW(s.fit_epoch(w.layer, rows, w.metric.data(), 1, w.key_buffer.get(), w.epoch_buffer.get(), w.encoder_buffer.get()), invalid_argument);
    auto gap = w.pages.blocks;
    gap[1].begin += 1;
    const array<exact_block> gaps(gap);
    rows = w.rows();
    rows.blocks = gaps.get();
    EXPECT_NE(sentence_of<invalid_argument>([&] { s.fit_epoch(w.layer, rows, w.metric.data(), 1, w.key_buffer.get(), w.epoch_buffer.get(), w.encoder_buffer.get()); }).find("without gaps"), std::string::npos);
    w.fit(s);  // and goes on
    expect_fit(w, 0);
}

}  // namespace
}  // namespace sekv::cuda::seal_tests
