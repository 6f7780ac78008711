// The line cache on the device beside the host library's.
#include "cuda/route_checks.hpp"
#include "kernels/line_cache.hpp"
#include "sekv/tier/line_cache.hpp"

namespace sekv::cuda::route_tests {
namespace {

/// The host's cache beside the device's, fed with the same lists.
class cache_pair {
public:
    cache_pair(world& w, const sealed_sequence& a) : w_(w), a_(a), host_(w.budget(), w.shape.kv_heads, w.shape.slots, w.layer.cache_stride, 60000) {}

    /// One query token per step: both caches must hold the same lines, and count the same.
    void follow(const step& s) {
        zoom_metrics metrics;
        for (std::int32_t head = 0; head < w_.shape.kv_heads; ++head) {
            const auto listed = candidates_of(s, 0, head);
            std::vector<std::int64_t> positions;
            std::vector<const std::uint8_t*> sources, on_device;
            for (const auto& z : check_choose(s, listed, 0, head)) {
                if (z.line == nullptr) continue;
                positions.push_back(a_.blocks[static_cast<std::size_t>(z.block / block_tokens)].begin + z.block % block_tokens);
                sources.push_back(a_.line(z.block / block_tokens, z.block % block_tokens, head));
                on_device.push_back(z.line);
            }
            std::vector<const std::uint8_t*> lines(positions.size());
            if (positions.empty()) continue;
            const auto& l = w_.layer;
            host_.resolve(head, positions, sources.data(), l.exact_line_bytes > 0 ? l.exact_line_bytes : l.line_bytes, lines.data(), metrics);
            for (std::size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i] == sources[i], on_device[i] == sources[i]) << "head " << head << " position " << positions[i];
        }
        EXPECT_EQ(s.counters().hits, metrics.hits);
        EXPECT_EQ(s.counters().misses, metrics.misses);
        EXPECT_EQ(s.counters().bytes, metrics.bytes);
        hits += metrics.hits;
        misses += metrics.misses;
    }
    void invalidate(std::int64_t position) {
        invalidate_lines(a_.view.line_cache, {w_.bases.heads(), w_.shape.slots, w_.layer.cache_stride}, position, nullptr);
        host_.invalidate_from(position);
    }
    unsigned long long hits = 0, misses = 0;

private:
    world& w_;
    const sealed_sequence& a_;
    line_cache host_;
};

class LineCache : public testing::TestWithParam<int> {};

TEST_P(LineCache, HoldsWhatTheHostsHolds) {
    for (const bool exact : {false, true}) {
        world w({.group = 2, .exact_tier = exact, .slots = GetParam(), .epochs = {12, 7}, .seed = 41});
        const sealed_sequence a(w, 4, 0);
        cache_pair caches(w, a);
        for (int i = 0; i < 7; ++i) {
            SCOPED_TRACE("step " + std::to_string(i));
            step s(w, {{&a, a.length + i, 1}}, {.tau = i % 2 == 0 ? 1e-3F : 2e-3F});
            s.run();
            caches.follow(s);
            if (i == 3) caches.invalidate(a.length / 2);
        }
        EXPECT_GT(caches.misses, 0U);
        EXPECT_TRUE(caches.hits > 0 || GetParam() < 256);
    }
}
INSTANTIATE_TEST_SUITE_P(Slots, LineCache, testing::Values(32, 96, 256, 2048), testing::PrintToStringParamName());

TEST(LineCacheRules, ASecondLookFindsEveryLine) {
    rows_tests::under_schedules(2, [] {
        world w({.slots = 4096, .epochs = {6, 7}, .seed = 42});
        const sealed_sequence a(w, 4, 0);
        step s(w, {{&a, a.length, 3}}, {});
        s.run();
        const auto once = s.counters();
        s.run();
        EXPECT_GT(once.misses, 0U);
        EXPECT_EQ(s.counters().misses, once.misses);
        EXPECT_EQ(s.counters().hits, once.hits + once.tokens);
    });
}

// The lines of all of an item's rows are read after the last was resolved, so that none may displace another's.
TEST(LineCacheRules, DraftRowsKeepTheirLines) {
    for (const int slots : {32, 96}) {
        world w({.kv_heads = 1, .slots = slots, .epochs = {12, 7}, .seed = 43});
        const sealed_sequence a(w, 4, 0);
        for (int i = 0; i < 3; ++i) {
            step s(w, {{&a, a.length - 30, 5}}, {.tau = 1e-3F});
            s.run();
            EXPECT_GT(check_step(s).tokens, 100U);
        }
    }
}

// 8 bits of clock: after 256 steps a line from long ago looks as if it were of the present step, and is then left alone.
TEST(LineCacheRules, OutlivesItsClock) {
    world w({.group = 1, .kv_heads = 1, .slots = 32, .epochs = {2, 1}, .seed = 44});
    const sealed_sequence a(w, 0, 0);
    cache_pair caches(w, a);
    for (int i = 0; i < 300; ++i) {
        step s(w, {{&a, i < 2 ? a.length : 90 + i % 5, 1}}, {.tau = 2e-2F});
        s.run();
        caches.follow(s);
    }
    EXPECT_GT(caches.hits, 0U);
}

}  // namespace
}  // namespace sekv::cuda::route_tests
