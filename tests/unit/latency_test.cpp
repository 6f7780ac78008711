#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "oracle/random.hpp"
#include "sekv/tier/transfer.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240811;

TEST(Latency, PercentilesAreWithinABucket) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    for (std::int64_t i = 0; i < oracle::iterations(200); ++i) {
        latency_histogram h;
        std::vector<std::uint64_t> exact(1 + random.below<std::size_t>(2000));
        for (auto& x : exact) {
            x = static_cast<std::uint64_t>(std::exp2(40 * random.uniform()));
            h.add(x);
        }
        std::sort(exact.begin(), exact.end());
        EXPECT_EQ(h.count(), exact.size());
        EXPECT_EQ(h.max(), exact.back());
        for (const double p : {0.0, 0.25, 0.5, 0.9, 0.99, 1.0}) {
            const auto truth = exact[static_cast<std::size_t>(p * static_cast<double>(exact.size() - 1))];
            const auto got = h.percentile(p);
            EXPECT_GE(got, truth) << p;
            EXPECT_LE(static_cast<double>(got), static_cast<double>(truth) * 1.125) << p;
        }
    }
}

TEST(Latency, SmallAndHugeDurationsAreExactEnough) {
    for (std::uint64_t x = 0; x < 16; ++x) {
        latency_histogram h;
        h.add(x);
        h.add(1000);
        EXPECT_EQ(h.percentile(0), x);
    }
    latency_histogram h;
    const auto most = std::numeric_limits<std::uint64_t>::max();
    h.add(most);
    EXPECT_EQ(h.percentile(0.5), most);
    EXPECT_EQ(latency_histogram().percentile(0.5), 0U);
}

TEST(Latency, SumsAreAsIfAddedToOne) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 1);
    latency_histogram a, b, both;
    for (int i = 0; i < 500; ++i) {
        const auto x = static_cast<std::uint64_t>(std::exp2(30 * random.uniform()));
        (i % 3 == 0 ? a : b).add(x);
        both.add(x);
    }
    a += b;
    EXPECT_EQ(a.count(), both.count());
    EXPECT_EQ(a.max(), both.max());
    for (const double p : {0.0, 0.5, 0.99, 1.0}) EXPECT_EQ(a.percentile(p), both.percentile(p));
}

TEST(Latency, ZoomCountersAddUp) {
    zoom_metrics a, b;
    EXPECT_EQ(a.hit_rate(), 0.0);
    a.zooms = 1, a.tokens = 10, a.hits = 4, a.misses = 6, a.bytes = 60, a.most_tokens = 10;
    b.zooms = 2, b.tokens = 10, b.hits = 10, b.capped = 1, b.most_tokens = 7;
    b.latency.add(5);
    a += b;
    EXPECT_EQ(a.zooms, 3U);
    EXPECT_EQ(a.tokens, 20U);
    EXPECT_EQ(a.capped, 1U);
    EXPECT_EQ(a.bytes, 60U);
    EXPECT_EQ(a.most_tokens, 10U);
    EXPECT_EQ(a.latency.count(), 1U);
    EXPECT_DOUBLE_EQ(a.hit_rate(), 0.7);
}

}  // namespace
}  // namespace sekv
