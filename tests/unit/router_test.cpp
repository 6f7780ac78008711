#include "sekv/zoom/router.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "oracle/random.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240808;

// A sketch of one block of random codes, and tables over it.
struct fixture {
    std::int32_t size, planes, group;
    sketch_code code;
    std::vector<std::uint8_t> block;
    std::vector<float> decoded;
    std::vector<std::byte> memory;
    routing_tables tables;

    fixture(oracle::draws& random, std::int32_t d, std::int32_t bits, std::int32_t g) : size(d), planes(bits / 4), group(g), block(static_cast<std::size_t>(planes) * host::plane_bytes, 0) {
        std::vector<float> codes(static_cast<std::size_t>(500 * d));
        std::vector<double> variance(static_cast<std::size_t>(d), 0.0);
        for (std::size_t i = 0; i < codes.size(); ++i) {
            const auto j = i % variance.size();
            codes[i] = random.normal(static_cast<float>(std::pow(0.93, static_cast<double>(j))));
            variance[j] += static_cast<double>(codes[i]) * codes[i] / 500;
        }
        code = fit_sketch(codes.data(), 500, d, variance, bits);
        pack_sketch(codes.data(), 64, d, code.fields, code.bits.data(), code.step.data(), block.data());
        decoded.resize(static_cast<std::size_t>(64 * d));
        unpack_sketch(block.data(), 64, d, code.fields, code.bits.data(), code.step.data(), decoded.data());
        arena measure;
        routing_tables().layout(measure, planes, group);
        memory.resize(measure.used() + 64);
        const auto at = (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
        arena a(memory.data() + at, measure.used());
        tables.layout(a, planes, group);
    }
    [[nodiscard]] key_view view() const { return {nullptr, code.error.data(), {code.step.data(), code.bits.data(), code.fields}, nullptr}; }
};

// |score - exact| against the exact sketch logit with its variance correction, in units of what rounding allows.
void expect_scores(fixture& f, const std::vector<float>& t, const std::vector<float>& query_mean) {
    fill_tables(f.tables, f.view(), t.data(), query_mean.data(), f.size);
    const std::uint8_t* block = f.block.data();
    std::vector<float> scores(static_cast<std::size_t>(64 * f.group));
    host::sketch_scores(&block, 1, f.tables.view, scores.data(), 64);
    const auto d = static_cast<std::size_t>(f.size);
    for (std::size_t g = 0; g < static_cast<std::size_t>(f.group); ++g) {
        double correction = 0;
        for (std::size_t j = 0; j < d; ++j) correction += 0.5 * t[g * d + j] * t[g * d + j] * f.code.error[j];
        for (std::size_t i = 0; i < 64; ++i) {
            double exact = query_mean[g] + correction, mass = std::abs(query_mean[g]) + correction;
            for (std::size_t j = 0; j < d; ++j) {
                const double term = static_cast<double>(t[g * d + j]) * f.decoded[i * d + j];
                exact += term;
                mass += std::abs(term) + std::abs(t[g * d + j] * 130 * f.code.step[j]) * (f.code.bits[j] == 8 ? 1 : 0);
            }
            const double rounding = f.planes * 0.5 * static_cast<double>(f.tables.step[g]);
            ASSERT_LE(std::abs(scores[g * 64 + i] - exact), rounding + 4e-6 * mass) << "query " << g << " token " << i << " step " << f.tables.step[g];
        }
    }
}

TEST(Router, TablesAreTheSketchLogitsWithinTheirRounding) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    for (const std::int32_t d : {64, 80, 128, 256}) {
        for (const std::int32_t bits : {4, 80, 96, 128}) {
            for (const std::int32_t group : {1, 3, 8}) {
                fixture f(random, d, bits, group);
                for (const float spread : {1e-4F, 0.3F, 3.0F, 30.0F}) {  // 30: planes of far more than 255 steps
                    SCOPED_TRACE(testing::Message() << "size " << d << " bits " << bits << " spread " << spread);
                    expect_scores(f, random.normals(group * d, spread), random.normals(group, 5.0F));
                    EXPECT_LE(*std::max_element(f.tables.step, f.tables.step + group), 0.05F);
                }
            }
        }
    }
}

// Sums have 16 bits; logits that span thousands of nats must widen the step rather than wrap.
TEST(Router, EnormousLogitsStayInOrder) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 1);
    for (const float spread : {300.0F, 3e3F, 1e5F}) {
        SCOPED_TRACE(spread);
        fixture f(random, 64, 80, 2);
        expect_scores(f, random.normals(2 * 64, spread), random.normals(2));
    }
}

TEST(Router, AQueryOfZerosScoresItsBase) {
    oracle::draws random(seed + 2);
    fixture f(random, 64, 80, 2);
    expect_scores(f, std::vector<float>(128, 0.0F), {0.5F, -2.0F});
}

struct zoomed {
    std::vector<std::int32_t> tokens;
    std::vector<float> mass;
    bool capped;
};

zoomed choose(const std::vector<float>& weights, std::int32_t group, const std::vector<float>& factors, const progressive_options& o) {
    const auto count = static_cast<std::int64_t>(weights.size()) / group;
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
    std::vector<float> mass(tokens.size()), largest(static_cast<std::size_t>(o.cap) + 1, -7.0F);
    zoom_list list{tokens.data(), mass.data(), 0, false};
    choose_zoom(list, weights.data(), count, group, factors.data(), count, o, largest.data());
    EXPECT_EQ(largest.back(), -7.0F);
    tokens.resize(static_cast<std::size_t>(list.count));
    mass.resize(static_cast<std::size_t>(list.count));
    return {tokens, mass, list.capped};
}

TEST(Router, ZoomsWhatExceedsTauUpToTheCap) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 3);
    for (std::int64_t i = 0; i < oracle::iterations(1000); ++i) {
        const std::int32_t group = 1 << random.below(4);
        const std::int64_t count = 64 * (1 + random.below(6));
        std::vector<float> weights(static_cast<std::size_t>(count * group)), factors(static_cast<std::size_t>(group), 0.25F);
        for (auto& w : weights) w = static_cast<float>(random.below(9)) / 8;  // many ties
        progressive_options o;
        o.rule = random.below(2) == 0 ? zoom_rule::mean : zoom_rule::max;
        o.tau = static_cast<float>(1 + random.below(32)) / 128;
        o.cap = random.below(2) == 0 ? random.below(40) : 1024;
        const auto got = choose(weights, group, factors, o);

        std::vector<std::pair<float, std::int32_t>> above;  // by falling probability, the older first
        for (std::int32_t x = 0; x < count; ++x) {
            float sum = 0, most = 0;
            for (std::int32_t g = 0; g < group; ++g) {
                const float p = 0.25F * weights[static_cast<std::size_t>(g * count + x)];
                sum += p;
                most = std::max(most, p);
            }
            const float p = o.rule == zoom_rule::mean ? sum / static_cast<float>(group) : most;
            if (p > o.tau) above.emplace_back(-p, x);
        }
        std::sort(above.begin(), above.end());
        EXPECT_EQ(got.capped, above.size() > static_cast<std::size_t>(o.cap));
        above.resize(std::min(above.size(), static_cast<std::size_t>(o.cap)));
        std::vector<std::int32_t> expected;
        for (const auto& a : above) expected.push_back(a.second);
        std::sort(expected.begin(), expected.end());
        ASSERT_EQ(got.tokens, expected) << "cap " << o.cap << " tau " << o.tau;
    }
}

TEST(Router, CapZeroZoomsNothingAndTauOneNeither) {
    progressive_options o;
    o.cap = 0;
    const std::vector<float> weights(64, 1.0F);
    const auto none = choose(weights, 1, {1.0F}, o);
    EXPECT_TRUE(none.tokens.empty());
    EXPECT_TRUE(none.capped);
    o.cap = 1024;
    o.tau = 1.0F;
    const auto also_none = choose(weights, 1, {1.0F}, o);
    EXPECT_TRUE(also_none.tokens.empty());
    EXPECT_FALSE(also_none.capped);
}

}  // namespace
}  // namespace sekv
