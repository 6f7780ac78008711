// Sealed blocks as token-level rows, against the host library's decode.
//
// Tolerance. Before rounding to the stored type, an element is within 2e-5 of its row's norm per sqrt(size) (fp32 sums in another order); a stored element is
// that, rounded.
#include <gtest/gtest.h>

#include <array>

#include "rows_world.hpp"

namespace sekv::cuda::rows_tests {
namespace {

constexpr std::uint32_t seed = 20261131;
constexpr float tolerance = 2e-5F;

// Root mean square of a row of a [64, size] array.
float row_size(const std::vector<float>& rows, std::int32_t token, std::int32_t size) {
    double sum = 0;
    for (std::int32_t j = 0; j < size; ++j) {
        const double x = rows[static_cast<std::size_t>(token * size + j)];
        sum += x * x;
    }
    return static_cast<float>(std::sqrt(sum / size));
}

// Half a unit in the last place of the stored type, or less.
float rounding(dtype stored, float x) { return std::max(std::abs(x) * (stored == dtype::f16 ? 0x1p-11F : 0x1p-8F), stored == dtype::f16 ? 0x1p-25F : 0.0F); }

void expect_near(float got, float want, float allowed, const std::string& where) {
    ASSERT_LE(std::abs(got - want), allowed) << where << ": " << got << " for " << want;
}

struct strip {
    strip(const sealed_world& w, std::int32_t first, std::int32_t count)
        : place{64, static_cast<std::uint64_t>((w.layer.key_size + w.layer.value_size) * block_tokens * 2 + 16)},
          stride(place.first + static_cast<std::size_t>(w.layer.kv_heads) * place.stride + 32),
          rows(static_cast<std::size_t>(count) * stride / 2) {
        reconstruct_step step;
        step.layer = w.layer, step.sequence = w.view(), step.first = first, step.count = count;
        step.strip = reinterpret_cast<std::byte*>(rows.get()), step.strip_stride = stride, step.page = place;
        reconstruct_blocks(step, nullptr);
        finish();
    }
    head_stride place;
    std::size_t stride;
    array<std::uint16_t> rows;
};

// Returns the strip's bits, so that schedules can be compared.
std::vector<std::uint16_t> expect_blocks(const sealed_world& w, dtype stored, std::int32_t first, std::int32_t count) {
    const auto& l = w.layer;
    const strip s(w, first, count);
    const auto got = s.rows.read();
    std::size_t written = 0;
    for (std::int32_t b = 0; b < count; ++b) {
        const auto block = first + b;
        const auto* page = got.data() + static_cast<std::size_t>(b) * s.stride / 2;
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
            std::vector<float> keys, values;
            w.decode(block, h, false, keys, values);
            for (std::int32_t t = 0; t < block_tokens; ++t) {
                const bool inside = t < w.count(block), same = w.is_exact(block) || w.is_sink(block, t) || !inside;
                const auto slack = [&](const std::vector<float>& rows, std::int32_t size) { return same ? 0.0F : tolerance * row_size(rows, t, size); };
                const auto allowed_key = slack(keys, l.key_size), allowed_value = slack(values, l.value_size);
                const auto where = "block " + std::to_string(block) + ", head " + std::to_string(h) + ", token " + std::to_string(t);
                for (std::int32_t j = 0; j < l.key_size; ++j, ++written) {
                    const auto want = inside && w.is_sink(block, t) ? w.sink_key(block, h, j, t) : keys[static_cast<std::size_t>(t * l.key_size + j)];
                    const auto x = value_of(stored, page[key_index(s.place, h, j, t)]);
                    expect_near(x, want, same ? 0 : allowed_key + rounding(stored, want) * 1.01F, where + ", key " + std::to_string(j));
                }
                for (std::int32_t i = 0; i < l.value_size; ++i, ++written) {
                    const auto want = inside && w.is_sink(block, t) ? w.sink_value(block, h, t, i) : values[static_cast<std::size_t>(t * l.value_size + i)];
                    const auto x = value_of(stored, page[value_index(s.place, l, h, t, i)]);
                    expect_near(x, want, same ? 0 : allowed_value + rounding(stored, want) * 1.01F, where + ", value " + std::to_string(i));
                }
                if (testing::Test::HasFatalFailure()) return got;
            }
        }
    }
    // Between the heads' parts nothing is written.
    std::size_t left = 0;
    for (std::int32_t b = 0; b < count; ++b) {
        const auto* page = got.data() + static_cast<std::size_t>(b) * s.stride / 2;
        for (std::size_t i = 0; i < s.place.first / 2; ++i) left += page[i] == 0xa5a5 ? 1 : 0;
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
            for (auto i = value_index(s.place, l, h, block_tokens, 0); i < key_index(s.place, h + 1, 0, 0); ++i) left += page[i] == 0xa5a5 ? 1 : 0;
        }
        for (auto i = key_index(s.place, l.kv_heads, 0, 0); i < s.stride / 2; ++i) left += page[i] == 0xa5a5 ? 1 : 0;
    }
    EXPECT_EQ(left + written, got.size());
    return got;
}

std::vector<float> expect_keys(const sealed_world& w, std::int32_t first, std::int32_t count) {
    const auto& l = w.layer;
    const std::int64_t head_elements = count * block_tokens * l.key_size + 7;
    const array<float> rows(static_cast<std::size_t>(l.kv_heads * head_elements));
    reconstruct_step step;
    step.layer = l, step.sequence = w.view(), step.first = first, step.count = count;
    reconstruct_keys(step, rows.get(), head_elements, nullptr);
    finish();
    const auto got = rows.read();
    for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        const auto* at = got.data() + h * head_elements;
        for (std::int32_t b = 0; b < count; ++b) {
            std::vector<float> keys, values;
            w.decode(first + b, h, true, keys, values);
            for (std::int32_t t = 0; t < block_tokens && !testing::Test::HasFatalFailure(); ++t) {
                const float allowed = tolerance * row_size(keys, t, l.key_size);
                for (std::int32_t j = 0; j < l.key_size; ++j)
                    expect_near(*at++, keys[static_cast<std::size_t>(t * l.key_size + j)], allowed,
                                "block " + std::to_string(first + b) + ", token " + std::to_string(t));
            }
        }
        if (testing::Test::HasFatalFailure()) return got;
        for (int i = 0; i < 7; ++i) EXPECT_EQ(std::bit_cast<std::uint32_t>(*at++), 0xa5a5a5a5U);
    }
    return got;
}

struct head_sizes {
    std::int32_t dk, dv;
};
constexpr std::array<head_sizes, 8> all_sizes{{{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {128, 64}, {64, 256}, {256, 80}}};

TEST(CudaReconstruct, EverySizeAndType) {
    std::uint32_t s = seed;
    for (const auto size : all_sizes) {
        for (const auto stored : {dtype::bf16, dtype::f16}) {
            SCOPED_TRACE("seed " + std::to_string(s + 1) + ", sizes " + std::to_string(size.dk) + " " + std::to_string(size.dv) + ", stored " +
                         std::to_string(static_cast<int>(stored)));
            sealed_world::shape x;
            x.stored = stored, x.dk = size.dk, x.dv = size.dv, x.seed = ++s;
            const sealed_world w(x);
            expect_blocks(w, stored, 0, w.blocks());
            expect_keys(w, 0, w.blocks());
        }
    }
}

TEST(CudaReconstruct, ExactTierAndSinks) {
    for (const auto size : {head_sizes{64, 64}, head_sizes{80, 128}, head_sizes{256, 96}}) {
        SCOPED_TRACE(size.dk);
        sealed_world::shape x;
        x.stored = dtype::f16, x.dk = size.dk, x.dv = size.dv, x.kv_heads = 3, x.seed = seed + 100, x.counts = {64, 64, 50, 64, 64, 1},
        x.exact = {true, false, true, false, false, true};
        const sealed_world w(x);
        expect_blocks(w, x.stored, 0, w.blocks());
        expect_keys(w, 0, w.blocks());
    }
}

// Sinks that run over a short first block, none, and a sequence that begins elsewhere.
TEST(CudaReconstruct, SinksAnywhere) {
    for (const std::int32_t sinks : {0, 1, 9, 64}) {
        SCOPED_TRACE(sinks);
        sealed_world::shape x;
        x.sinks = sinks, x.counts = {5, 64, 40}, x.seed = seed + 200 + static_cast<std::uint32_t>(sinks);
        const sealed_world w(x);
        expect_blocks(w, x.stored, 0, w.blocks());
    }
    sealed_world::shape x;
    x.begin = 3, x.seed = seed + 300;
    const sealed_world w(x);
    expect_blocks(w, x.stored, 0, w.blocks());
}

TEST(CudaReconstruct, PartOfTheBlocks) {
    sealed_world::shape x;
    x.seed = seed + 400, x.counts = {64, 64, 64, 64, 33, 64};
    const sealed_world w(x);
    expect_blocks(w, x.stored, 2, 3);
    expect_keys(w, 1, 4);
    expect_blocks(w, x.stored, 5, 1);
}

TEST(CudaReconstruct, LongLinesAndNoCodesAtAll) {
    for (const float factor : {0.75F, 1.5F, 2.0F}) {
        SCOPED_TRACE(factor);
        sealed_world::shape x;
        x.seed = seed + 500, x.line_factor = factor, x.dk = 128, x.dv = 96;
        const sealed_world w(x);
        expect_blocks(w, x.stored, 0, w.blocks());
    }
    sealed_world::shape x;
    x.seed = seed + 501, x.empty_codes = true;
    const sealed_world w(x);
    expect_blocks(w, x.stored, 0, w.blocks());
    expect_keys(w, 0, w.blocks());
}

TEST(CudaReconstruct, SameBitsUnderAllSchedules) {
    sealed_world::shape x;
    x.seed = seed + 600, x.dk = 80, x.dv = 96, x.counts = {64, 64, 30}, x.exact = {false, true, false};
    const sealed_world w(x);
    const auto rows = expect_blocks(w, x.stored, 0, 3);
    const auto keys = expect_keys(w, 0, 3);
    under_schedules(6, [&] {
        EXPECT_EQ(expect_blocks(w, x.stored, 0, 3), rows);
        EXPECT_EQ(expect_keys(w, 0, 3), keys);
    });
}

}  // namespace
}  // namespace sekv::cuda::rows_tests
