#include "sekv/exec/sketch_ops.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "oracle/random.hpp"
#include "oracle/targets.hpp"

namespace sekv::host {
namespace {

constexpr std::uint32_t seed = 20240806;

class SketchOps : public oracle::each_target {
protected:
    oracle::draws random{seed};
};

int nibble(const std::uint8_t* planes, int plane, std::int64_t token) {
    const int byte = planes[plane * plane_bytes + token % 32];
    return token < 32 ? byte & 15 : byte >> 4;
}

// Blocks of `planes` planes, each in a buffer of its own size, so that a sanitizer sees a read past the end.
struct blocks {
    std::vector<std::vector<std::uint8_t>> bytes;
    std::vector<const std::uint8_t*> list;

    blocks(oracle::draws& random, std::int64_t count, int planes) {
        for (std::int64_t b = 0; b < count; ++b) bytes.push_back(random.bytes(static_cast<std::int64_t>(planes) * plane_bytes));
        for (const auto& b : bytes) list.push_back(b.data());
    }
};

// Tables whose entries fill the 16 bits that the sums of `planes` may take; high bytes of narrow planes are garbage.
struct tables {
    std::vector<std::uint8_t> low, high, wide, fresh;
    std::vector<float> step, base;
    score_tables view;

    tables(oracle::draws& random, int planes, int group, bool allow_wide) {
        const auto entries = static_cast<std::int64_t>(planes) * group * 16;
        low = random.bytes(entries);
        high = random.bytes(entries);
        const int most = 65535 / planes;
        for (int p = 0; p < planes; ++p) {
            wide.push_back(allow_wide && random.below(2) == 1 ? 1 : 0);
            for (std::int64_t i = p * group * 16; wide.back() == 1 && i < (p + 1) * group * 16; ++i) {
                const int x = random.below(most + 1);
                low[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(x & 255);
                high[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(x >> 8);
            }
        }
        for (int g = 0; g < group; ++g) {
            step.push_back(static_cast<float>(0.001 + 0.05 * random.uniform()));
            base.push_back(random.normal(20.0F));
        }
        const bool marked = random.below(3) > 0;
        const auto row = static_cast<std::int64_t>(group) * 16;
        for (int p = 0, sum = 0; p < planes; ++p) {
            if (marked && random.below(2) == 1) {  // small bytes, that several planes may sum
                for (std::int64_t i = p * row; i < (p + 1) * row; ++i) low[static_cast<std::size_t>(i)] &= 31;
            }
            const int most = *std::max_element(low.begin() + p * row, low.begin() + (p + 1) * row);
            fresh.push_back(sum + most > 255 ? 1 : 0);
            sum = fresh.back() == 1 ? most : sum + most;
        }
        view = {planes, group, low.data(), high.data(), wide.data(), marked ? fresh.data() : nullptr, step.data(), base.data()};
    }
    [[nodiscard]] double score(const std::uint8_t* block, int g, std::int64_t token) const {
        double sum = 0;
        for (int p = 0; p < view.planes; ++p) {
            const auto at = static_cast<std::size_t>((p * view.group + g) * 16 + nibble(block, p, token));
            sum += low[at] + (wide[static_cast<std::size_t>(p)] == 1 ? 256.0 * high[at] : 0.0);
        }
        return base[static_cast<std::size_t>(g)] + sum * step[static_cast<std::size_t>(g)];
    }
};

TEST_P(SketchOps, ScoresEqualTheTables) {
    SCOPED_TRACE(seed);
    for (std::int64_t i = 0; i < oracle::iterations(300); ++i) {
        const int planes = 1 + random.below(32), group = 1 + random.below(16);
        const std::int64_t count = random.below(6);
        const blocks b(random, count, planes);
        const tables t(random, planes, group, i % 2 == 1);
        const std::int64_t stride = count * 64 + random.below(20);
        std::vector<float> scores(static_cast<std::size_t>(stride * group + 1), -7.0F);
        sketch_scores(b.list.data(), count, t.view, scores.data(), stride);
        EXPECT_EQ(scores.back(), -7.0F);
        for (int g = 0; g < group; ++g) {
            for (std::int64_t x = 0; x < stride; ++x) {
                const double got = scores[static_cast<std::size_t>(g * stride + x)];
                const double expected = x < count * 64 ? t.score(b.list[static_cast<std::size_t>(x / 64)], g, x % 64) : -7.0;
                ASSERT_NEAR(got, expected, 1e-6 * (std::abs(expected) + 3300)) << "planes " << planes << " group " << group << " query " << g << " token " << x;
            }
        }
    }
}

TEST_P(SketchOps, ValuesEqualTheOracle) {
    SCOPED_TRACE(seed);
    for (std::int64_t i = 0; i < oracle::iterations(150); ++i) {
        const int planes = 1 + random.below(16), group = 1 + random.below(17), count = random.below(5), field_count = random.below(30);
        const blocks b(random, count, planes);
        std::vector<sketch_field> fields;
        for (int f = 0; f < field_count; ++f) {
            const int width = 1 << random.below(3), shift = width * random.below(4 / width);
            fields.push_back({static_cast<std::uint8_t>(random.below(planes)), static_cast<std::uint8_t>(shift), static_cast<std::uint8_t>((1 << width) - 1), static_cast<std::uint8_t>(f)});
        }
        const std::int64_t stride = count * 64 + random.below(10);
        auto weights = random.normals(stride * group);
        std::vector<float> sums(static_cast<std::size_t>(group * field_count + 1), 0.5F), totals(static_cast<std::size_t>(group + 1), 0.25F);
        sketch_values(b.list.data(), count, fields.data(), field_count, weights.data(), stride, group, sums.data(), totals.data());
        EXPECT_EQ(sums.back(), 0.5F);
        EXPECT_EQ(totals.back(), 0.25F);
        for (int g = 0; g < group; ++g) {
            const float* w = weights.data() + g * stride;
            double total = 0.25, mass = 1;
            for (std::int64_t x = 0; x < count * 64; ++x) total += w[x], mass += std::abs(w[x]);
            ASSERT_NEAR(totals[static_cast<std::size_t>(g)], total, 2e-6 * mass);
            for (int f = 0; f < field_count; ++f) {
                const auto& field = fields[static_cast<std::size_t>(f)];
                double sum = 0.5;
                for (std::int64_t x = 0; x < count * 64; ++x) sum += static_cast<double>(w[x]) * ((nibble(b.list[static_cast<std::size_t>(x / 64)], field.plane, x % 64) >> field.shift) & field.mask);
                ASSERT_NEAR(sums[static_cast<std::size_t>(g * field_count + f)], sum, 2e-6 * mass * field.mask) << "query " << g << " field " << f;
            }
        }
    }
}

TEST_P(SketchOps, WeightsAreExponentials) {
    SCOPED_TRACE(seed);
    for (const std::int64_t count : {0, 1, 7, 16, 64, 100, 640}) {
        for (const float shift : {0.0F, -30.0F, 5000.0F}) {
            auto values = random.normals(count + 1, 15.0F);
            for (auto& x : values) x = shift - std::abs(x);
            if (count > 2) values[1] = -std::numeric_limits<float>::infinity(), values[2] = shift - 200;
            const auto before = values;
            const double got = sketch_weights(values.data(), count, shift);
            EXPECT_EQ(values.back(), before.back());
            double sum = 0;
            for (std::size_t i = 0; i + 1 < values.size(); ++i) {
                const double expected = std::exp(static_cast<double>(before[i]) - shift);
                sum += expected;
                ASSERT_NEAR(values[i], expected < 1.2e-38 ? 0.0 : expected, 1e-5 * expected + 1e-37) << before[i] << " shift " << shift;
            }
            EXPECT_NEAR(got, sum, 1e-5 * sum);
        }
    }
}

// Dyadic weights and factors: every sum is exact, so that equality with the threshold is met and decided.
TEST_P(SketchOps, SelectsWhatExceedsTheThreshold) {
    SCOPED_TRACE(seed);
    for (std::int64_t i = 0; i < oracle::iterations(400); ++i) {
        const int group = 1 + random.below(9);
        const std::int64_t count = random.below(200), stride = count + random.below(9);
        std::vector<float> weights(static_cast<std::size_t>(stride * group + 1)), factors(static_cast<std::size_t>(group));
        for (auto& w : weights) w = static_cast<float>(random.below(17)) / 16;
        for (auto& f : factors) f = std::ldexp(1.0F, -random.below(4));
        const float threshold = static_cast<float>(random.below(32)) / 64;
        for (const bool max : {false, true}) {
            std::vector<std::int32_t> found(static_cast<std::size_t>(count + 1), -1);
            std::vector<float> mass(found.size(), -7.0F);
            const auto n = (max ? select_above_max : select_above)(weights.data(), stride, group, factors.data(), threshold, count, found.data(), mass.data());
            std::size_t k = 0;
            for (std::int64_t x = 0; x < count; ++x) {
                float s = 0;
                for (int g = 0; g < group; ++g) {
                    const float p = weights[static_cast<std::size_t>(g * stride + x)] * factors[static_cast<std::size_t>(g)];
                    s = max ? std::max(s, p) : s + p;
                }
                if (s <= threshold) continue;
                ASSERT_EQ(found[k], x);
                ASSERT_EQ(mass[k], s);
                ++k;
            }
            ASSERT_EQ(n, static_cast<std::int64_t>(k));
            EXPECT_EQ(found.back(), -1);
            EXPECT_EQ(mass.back(), -7.0F);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, SketchOps, oracle::all_targets(), oracle::name_of_target);

}  // namespace
}  // namespace sekv::host
