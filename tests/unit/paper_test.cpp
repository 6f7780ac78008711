// What the paper preset attends, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "unit/paper_world.hpp"

namespace {

using namespace sekv;
using namespace sekv::paper_test;

class PaperShapes : public ::testing::TestWithParam<setup> {};

TEST_P(PaperShapes, ZoomingEverythingIsFullAttention) {
    world w(GetParam(), codec_of(everything));
    w.fill(650);
    ASSERT_GT(w.cache.sealed(w.seq), 300);
    oracle::paper_spans none;  // nothing sealed: plain attention
    for (const auto layer : {0, 2}) EXPECT_TRUE(w.agrees(layer, none, 650, zoomed_tolerance));
    EXPECT_GT(w.cache.zooms().tokens, 500U);
}

TEST_P(PaperShapes, ZoomingNothingReadsMeansWithTheirSizes) {
    world w(GetParam(), codec_of(nothing));
    w.fill(650);
    for (const auto layer : {0, 2}) EXPECT_TRUE(w.agrees(layer, w.spans(), 650, coarse_tolerance));
    EXPECT_EQ(w.zoomed, 0);
    EXPECT_GT(w.coarse, 500);
    EXPECT_EQ(w.cache.zooms().tokens, 0U);
    EXPECT_EQ(w.cache.zooms().bytes, 0U);
}

TEST_P(PaperShapes, RelevanceDecidesPerSpan) {
    world w(GetParam(), codec_of(0.93F));
    w.fill(650);
    const auto spans = w.spans();
    int sure = 0;
    for (int i = 0; i < 10; ++i) sure += w.agrees(i % 2 == 0 ? 0 : 2, spans, 650, zoomed_tolerance) ? 1 : 0;
    EXPECT_GE(sure, 3);
    EXPECT_GT(w.zoomed, 200);
    EXPECT_GT(w.coarse, 200);
    EXPECT_EQ(w.cache.zooms().tokens, static_cast<std::uint64_t>(w.zoomed));
    EXPECT_EQ(w.cache.zooms().misses, w.cache.zooms().tokens);
    EXPECT_EQ(w.cache.zooms().zooms, 20U);
}

TEST_P(PaperShapes, SlidingWindowLayersStayExact) {
    world w(GetParam(), codec_of(nothing));
    w.fill(650);
    const auto& l = w.model.layers[1];
    const auto a = w.attend(1);
    oracle::paper_spans none;
    auto hidden = w.keys[1], kept = w.values[1];
    hidden.erase(hidden.begin(), hidden.begin() + (650 - 96) * l.kv_heads * l.key_size);
    kept.erase(kept.begin(), kept.begin() + (650 - 96) * l.kv_heads * l.value_size);
    const segmenter blank;
    for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        const auto e =
            oracle::attend_paper({&l, &hidden, &kept, &blank, &w.weights.layers[1].weight, 0.5}, none, h, a.queries.data() + h * l.group * l.key_size, 96);
        for (std::size_t j = 0; j < e.out.size(); ++j) EXPECT_NEAR(a.out[static_cast<std::size_t>(h * l.group * l.value_size) + j], e.out[j], coarse_tolerance);
    }
}

INSTANTIATE_TEST_SUITE_P(Heads, PaperShapes,
                         ::testing::Values(setup{1, 64}, setup{3, 64}, setup{8, 128}, setup{3, 128, 20.0F}, setup{1, 64, 5.0F}, setup{3, 64, 0, 0.3F},
                                           setup{3, 80, 0, 0, 0}),
                         [](const auto& i) {
                             return "Group" + std::to_string(i.param.group) + "Size" + std::to_string(i.param.size) + "Case" + std::to_string(i.index);
                         });

TEST(Paper, ConstantRowsCountEveryTokenOnce) {
    for (const float tau : {everything, 0.9F, nothing}) {
        world w({3, 64}, codec_of(tau));
        for (const std::size_t i : {0U, 2U}) {
            std::fill(w.keys[i].begin(), w.keys[i].end(), 0.125F);
            std::fill(w.values[i].begin(), w.values[i].end(), -2.5F);
        }
        w.fill(650);
        const auto a = w.attend(2);
        for (const auto x : a.out) EXPECT_NEAR(x, -2.5F, 3e-3F);
        for (std::size_t q = 0; q < a.lse.size(); ++q) {
            double logit = 0;
            for (std::size_t j = 0; j < 64; ++j) logit += 0.125 / 8 * static_cast<double>(a.queries[q * 64 + j]);
            EXPECT_NEAR(a.lse[q], logit + std::log(650.0), 2e-3);
        }
    }
}

TEST(Paper, UnobservedTokensFormEvenSpansOfLMax) {
    world w({3, 64}, codec_of(nothing));
    w.fill(650, false);
    const auto spans = w.spans();
    EXPECT_TRUE(spans.exact.empty());
    EXPECT_EQ(spans.own.front().size(), 64U);
    EXPECT_TRUE(w.agrees(0, spans, 650, coarse_tolerance));
    for (const auto& u : w.cache.units(w.seq)) EXPECT_EQ(u.payload.exact_rows, 0);
}

TEST(Paper, SilentSpansAreAveragedEvenly) {
    world w({3, 64}, codec_of(nothing));
    std::fill(w.signals.begin(), w.signals.end(), 0.0F);
    w.fill(650);
    EXPECT_TRUE(w.agrees(0, w.spans(), 650, coarse_tolerance));
}

TEST(Paper, ThreadsDontChangeABit) {
    world one({3, 64}, codec_of(0.93F)), two({3, 64}, codec_of(0.93F), 1, 0.6, 2);
    one.fill(650);
    two.fill(650);
    const auto a = one.attend(0), b = two.attend(0);
    EXPECT_EQ(a.out, b.out);
    EXPECT_EQ(a.lse, b.lse);
}

TEST(Paper, ARouterBringsItsOwnThresholdAndWeights) {
    const auto model = model_of({3, 64});
    auto router = paper_weights::untrained(model);
    for (auto& l : router.layers) {
        l.tau = 0.97F;
        for (std::size_t i = 0; i < l.weight.size(); ++i) l.weight[i] = 0.3F * std::sin(static_cast<float>(i));
    }
    world w({3, 64}, codec_of(0, std::make_shared<paper_weights>(router)));
    w.tau = 0.97F;
    w.fill(650);
    int sure = 0;
    for (int i = 0; i < 10; ++i) sure += w.agrees(0, w.spans(), 650, zoomed_tolerance) ? 1 : 0;
    EXPECT_GE(sure, 3);
    EXPECT_GT(w.zoomed, 50);
    EXPECT_GT(w.coarse, 50);
    EXPECT_EQ(w.cache.coder().parameters(), 3U * (32U * 64U + 1U));
}

TEST(Paper, RefusesWhatIsNotItsOwn) {
    const auto model = model_of({3, 64});
    auto router = paper_weights::untrained(model);
    router.fingerprint = "another";
    EXPECT_THROW(float_cache(model, {}, codec_of(0, std::make_shared<paper_weights>(router))), format_error);
    router = paper_weights::untrained(model);
    router.layers.pop_back();
    EXPECT_THROW(float_cache(model, {}, codec_of(0, std::make_shared<paper_weights>(router))), format_error);
    router = paper_weights::untrained(model_of({3, 128}));
    EXPECT_THROW(float_cache(model, {}, codec_of(0, std::make_shared<paper_weights>(router))), format_error);
    for (const float tau : {-0.1F, 1.0F, std::nanf("")}) EXPECT_THROW(float_cache(model, {}, paper_options{tau, 32, nullptr}), invalid_argument);
    for (const std::int32_t rank : {0, 65}) EXPECT_THROW(float_cache(model, {}, paper_options{0, rank, nullptr}), invalid_argument);
}

}  // namespace
