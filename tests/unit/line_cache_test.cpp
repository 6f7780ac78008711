#include "sekv/tier/line_cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

#include "oracle/random.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240809;
constexpr std::int32_t line_bytes = 20, stride = 24;

std::shared_ptr<memory> unlimited() { return std::make_shared<memory>(make_heap_resource(), memory::unlimited, memory::unlimited); }

// The host tier: a line per position whose content changes when the position is written anew.
struct source {
    std::vector<std::vector<std::uint8_t>> lines;

    source(std::int64_t tokens, oracle::draws& random) {
        for (std::int64_t i = 0; i < tokens; ++i) lines.push_back(random.bytes(line_bytes));
    }
};

struct list {
    std::vector<std::int64_t> positions;
    std::vector<const std::uint8_t*> sources, lines;
};

// Some positions below `length`, ascending; half of the draws come from the first 50.
list draw_list(oracle::draws& random, const source& s, std::int64_t length, std::int64_t count) {
    std::set<std::int64_t> chosen;
    for (std::int64_t i = 0; i < count; ++i) chosen.insert(random.below(2) == 0 ? random.below(std::min<std::int64_t>(length, 50)) : random.below(length));
    list l;
    l.positions.assign(chosen.begin(), chosen.end());
    for (const auto p : l.positions) l.sources.push_back(s.lines[static_cast<std::size_t>(p)].data());
    l.lines.assign(l.positions.size(), nullptr);
    return l;
}

void expect_lines(const list& l) {
    for (std::size_t i = 0; i < l.lines.size(); ++i) {
        ASSERT_NE(l.lines[i], nullptr);
        ASSERT_EQ(std::memcmp(l.lines[i], l.sources[i], line_bytes), 0) << "position " << l.positions[i];
    }
}

TEST(LineCache, NeverServesWrongBytes) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    for (const std::int32_t slots : {0, 32, 96, 256}) {
        const auto mem = unlimited();
        line_cache cache(*mem, 2, slots, stride, 3000);
        std::vector<source> heads{source(3000, random), source(3000, random)};
        std::int64_t length = 3000;
        zoom_metrics metrics;
        for (std::int64_t i = 0; i < oracle::iterations(25000); ++i) {
            if (random.below(100) == 0) {  // truncate: later positions are written anew
                const auto from = random.below<std::int64_t>(length);
                cache.invalidate_from(from);
                for (auto& h : heads) {
                    for (auto p = static_cast<std::size_t>(from); p < h.lines.size(); p += 1 + random.below<std::size_t>(9)) h.lines[p] = random.bytes(line_bytes);
                }
            }
            const auto head = random.below(2);
            auto l = draw_list(random, heads[static_cast<std::size_t>(head)], length, random.below<std::int64_t>(i % 500 == 0 ? 1000 : 30));
            cache.resolve(head, l.positions, l.sources.data(), line_bytes, l.lines.data(), metrics);
            expect_lines(l);
            if (HasFatalFailure()) return;
        }
        EXPECT_EQ(metrics.hits + metrics.misses, metrics.tokens);
        EXPECT_EQ(metrics.bytes, metrics.misses * line_bytes);
        EXPECT_EQ(metrics.hits > 0, slots > 0);
    }
}

TEST(LineCache, HitsWhatItHeldAndForgetsWhatWasInvalidated) {
    oracle::draws random(seed + 1);
    const auto mem = unlimited();
    line_cache cache(*mem, 1, 64, stride, 1000);
    const source s(1000, random);
    auto l = draw_list(random, s, 1000, 20);
    zoom_metrics first, second, third;
    cache.resolve(0, l.positions, l.sources.data(), line_bytes, l.lines.data(), first);
    EXPECT_EQ(first.hits, 0U);
    cache.resolve(0, l.positions, l.sources.data(), line_bytes, l.lines.data(), second);
    EXPECT_EQ(second.hits, l.positions.size());
    for (std::size_t i = 0; i < l.lines.size(); ++i) EXPECT_NE(l.lines[i], l.sources[i]);
    const auto cut = l.positions[l.positions.size() / 2];
    cache.invalidate_from(cut);
    cache.resolve(0, l.positions, l.sources.data(), line_bytes, l.lines.data(), third);
    EXPECT_EQ(third.hits, l.positions.size() / 2);
    expect_lines(l);
}

// Lines of one list stay valid together, whether they hit, were fetched, or found no way free.
TEST(LineCache, AListLongerThanTheCacheStreamsPast) {
    oracle::draws random(seed + 2);
    const auto mem = unlimited();
    line_cache cache(*mem, 1, 32, stride, 500);
    const source s(500, random);
    list all;
    for (std::int64_t p = 0; p < 500; ++p) {
        all.positions.push_back(p);
        all.sources.push_back(s.lines[static_cast<std::size_t>(p)].data());
    }
    all.lines.assign(500, nullptr);
    for (int i = 0; i < 600; ++i) {  // past the clock's 256 steps
        zoom_metrics m;
        cache.resolve(0, all.positions, all.sources.data(), line_bytes, all.lines.data(), m);
        expect_lines(all);
        std::set<const std::uint8_t*> distinct(all.lines.begin(), all.lines.end());
        ASSERT_EQ(distinct.size(), 500U) << "two positions share a slot";
    }
}

TEST(LineCache, TagsTellEveryPositionOfItsCapacityApart) {
    const auto mem = unlimited();
    EXPECT_THROW(line_cache(*mem, 1, 32, stride, std::int64_t{1} << 18), unsupported);
    line_cache cache(*mem, 1, 128, stride, 65535 * 4 - 1);
    const std::vector<std::uint8_t> a(line_bytes, 1), b(line_bytes, 2);
    for (const std::int64_t p : {std::int64_t{0}, std::int64_t{3}, std::int64_t{65534} * 4 - 1, std::int64_t{65535} * 4 - 2}) {
        const std::uint8_t* line = nullptr;
        const std::uint8_t* from = p % 2 == 0 ? a.data() : b.data();
        zoom_metrics m;
        cache.resolve(0, {&p, 1}, &from, line_bytes, &line, m);
        EXPECT_EQ(m.misses, 1U) << "position " << p << " was taken for another";
        EXPECT_EQ(*line, *from);
        cache.resolve(0, {&p, 1}, &from, line_bytes, &line, m);
        EXPECT_EQ(m.hits, 1U);
        cache.invalidate_from(p + 1);
        cache.resolve(0, {&p, 1}, &from, line_bytes, &line, m);
        EXPECT_EQ(m.hits, 2U);
        cache.invalidate_from(p);
        cache.resolve(0, {&p, 1}, &from, line_bytes, &line, m);
        EXPECT_EQ(m.misses, 2U);
    }
}

TEST(LineCache, CountsItsBytes) {
    const auto mem = unlimited();
    {
        const line_cache cache(*mem, 3, 64, 128, 1000);
        EXPECT_EQ(mem->used().at(tier::device, kind::line_cache), line_cache::bytes(3, 64, 128));
        EXPECT_GE(line_cache::bytes(3, 64, 128), 3U * 64 * (128 + 3));
        const line_cache off(*mem, 3, 0, 128, 1000);
        EXPECT_EQ(mem->used().at(tier::device, kind::line_cache), line_cache::bytes(3, 64, 128));
    }
    EXPECT_EQ(mem->used(), usage{});
}

}  // namespace
}  // namespace sekv
