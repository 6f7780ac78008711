// Replay, fork and truncate: equal histories give equal bits, whatever the line cache held, other sequences did, or how many threads ran.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "unit/cache_fixtures.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;
using sekv::tier;

const world& two_layers() {
    static const world w = [] {
        world x({layer(1, 2), layer(2, 1, 40), layer(2, 2)});
        x.query_gain = 2.0F;
        return x;
    }();
    return w;
}

sekv::progressive_options zooming(std::int32_t slots) {
    auto o = small_codec();
    o.line_slots = slots;
    o.tau = 2e-3F;
    return o;
}

std::uint64_t line_cache_bytes(float_cache& c) {
    const auto s = c.open({0, 4000});
    const auto n = c.used(s).at(tier::device, sekv::kind::line_cache);
    c.close(s);
    return n;
}

// A quota that leaves the same room for levels whatever the line cache takes.
sekv::sequence open_with(float_cache& c, std::uint64_t room, std::int64_t capacity = 4000) { return c.open({quota(c, room, capacity) + line_cache_bytes(c), capacity}); }

constexpr std::uint64_t room = 1'100'000;
const uids prompt = fresh(1, 900);

TEST(CacheFork, ReplayIsBitEqualWhateverLineCacheThreadsAndNeighbours) {
    const auto& w = two_layers();
    const auto run = [&](std::int32_t slots, std::int32_t threads, bool neighbours) {
        float_cache c(w.model, small_options(), zooming(slots), sekv::host_backend(threads));
        std::vector<sekv::sequence> others;
        if (neighbours) {
            others = {open_with(c, 850'000, 2000), c.open({0, 2000})};
            prefill(c, w, others[0], fresh(50'000, 700));
        }
        const auto s = open_with(c, room);
        prefill(c, w, s, prompt);
        std::vector<result> out;
        for (uid i = 0; i < turns(300); ++i) {
            out.push_back(step(c, w, s, {2000 + i}));
            if (neighbours && i % 7 == 0) (void)step(c, w, others[i % 2], fresh(90'000 + 10 * i, 3));
        }
        EXPECT_GT(c.sealed(s), turns(500) < 500 ? 100 : 500);
        EXPECT_GT(c.zooms().tokens, 0U);
        EXPECT_EQ(c.zooms().hits > 0, slots > 0);
        return out;
    };
    const auto plain = run(32, 1, false);
    EXPECT_TRUE(plain == run(0, 1, false)) << "no line cache";
    EXPECT_TRUE(plain == run(256, 3, false)) << "larger line cache, more threads";
    EXPECT_TRUE(plain == run(64, 2, true)) << "other sequences between";
}

TEST(CacheFork, BothSidesOfAForkContinueAlike) {
    const auto& w = two_layers();
    for (const bool prefilled : {false, true}) {
        float_cache c(w.model, small_options(), zooming(32), sekv::host_backend(2));
        const auto a = open_with(c, room);
        prefill(c, w, a, prompt);
        if (prefilled) (void)decode(c, w, a, fresh(2000, 70));
        const auto b = c.fork(a);
        EXPECT_EQ(c.length(b), c.length(a));
        const auto alone = decode(c, w, b, fresh(3000, 5));  // then interleaved, past seals and a generation of sketches
        EXPECT_TRUE(decode(c, w, a, fresh(3000, 5)) == alone);
        for (uid i = 0; i < turns(250); ++i) ASSERT_EQ(step(c, w, a, {4000 + i}), step(c, w, b, {4000 + i})) << "step " << i;
        EXPECT_EQ(c.sealed(a), c.sealed(b));
        EXPECT_EQ(c.used(a), c.used(b));
        const auto both = c.used();
        c.close(a);
        EXPECT_LT(c.used().total(tier::device), both.total(tier::device));
        (void)decode(c, w, b, fresh(6000, 3));
    }
}

TEST(CacheFork, SidesDoNotSeeEachOther) {
    const auto& w = two_layers();
    float_cache c(w.model, small_options(), zooming(32)), alone(w.model, small_options(), zooming(32));
    const auto a = open_with(c, room), expected = open_with(alone, room);
    prefill(c, w, a, prompt);
    prefill(alone, w, expected, prompt);
    const auto b = c.fork(a);
    for (uid i = 0; i < turns(250); ++i) {
        (void)step(c, w, b, {70'000 + i});
        ASSERT_EQ(step(c, w, a, {4000 + i}), step(alone, w, expected, {4000 + i})) << "step " << i;
    }
}

TEST(CacheFork, SharedBytesCountOnce) {
    const auto& w = two_layers();
    float_cache c(w.model, small_options(), zooming(32));
    const auto empty = c.used();
    const auto a = open_with(c, room);
    prefill(c, w, a, prompt);
    const auto before = c.used().total(tier::device);
    const auto b = c.fork(a);
    const auto own = c.used(b);
    EXPECT_EQ(c.used().total(tier::device), before + own.at(tier::device, sekv::kind::line_cache) + own.at(tier::device, sekv::kind::tables) + own.at(tier::device, sekv::kind::statistics));
    EXPECT_EQ(c.used(b), c.used(a));
    c.close(a);
    c.close(b);
    EXPECT_EQ(c.used(), empty);
}

TEST(CacheFork, ShorterForkEqualsTruncatedParent) {
    const auto& w = two_layers();
    float_cache c(w.model, small_options(), zooming(32));
    const auto a = open_with(c, room);
    prefill(c, w, a, prompt);
    const auto b = c.fork(a, 880);
    c.truncate(a, 880);
    EXPECT_EQ(c.length(b), 880);
    EXPECT_TRUE(decode(c, w, a, fresh(3000, 100)) == decode(c, w, b, fresh(3000, 100)));
}

TEST(CacheFork, RejectedDraftsLeaveNoTrace) {
    const auto& w = two_layers();
    // Drafts are appended and attended in one cache only; queries of rejected drafts enter the metric, so both see the same queries.
    const auto run = [&](uid drafts) {
        float_cache c(w.model, small_options(), zooming(32));
        const auto s = open_with(c, room);
        prefill(c, w, s, prompt);
        std::vector<result> out;
        for (uid i = 0; i < turns(60); ++i) {
            const auto n = c.length(s);
            append_all(c, w, s, fresh(drafts + 100 * i, 1 + static_cast<std::int64_t>(i % 30)));
            c.truncate(s, n);
            out.push_back(step(c, w, s, {4000 + i, 5000 + i, 6000 + i}));
        }
        return out;
    };
    EXPECT_TRUE(run(100'000) == run(200'000));
}

TEST(CacheFork, NothingOfTruncatedTokensLeaksAcrossTheSealBoundary) {
    const world plain({layer(1, 2), layer(2, 2)});  // a window's rows would be gone that far back
    const std::vector<std::int64_t> kept = float_cache::on_device ? (short_run() ? std::vector<std::int64_t>{100} : std::vector<std::int64_t>{0, 3, 100, 600}) : std::vector<std::int64_t>{0, 1, 3, 30, 64, 100, 130, 600, 890};
    for (const auto keep : kept) {
        const auto run = [&](uid removed) {
            float_cache c(plain.model, small_options(), zooming(32));
            const auto s = open_with(c, room);
            // Sealed in two steps, so that what is kept was encoded without what is removed.
            prefill(c, plain, s, prompt);
            const auto first = c.sealed(s);
            for (uid i = 0; i < 400; ++i) append_all(c, plain, s, {removed + i});
            EXPECT_GT(c.sealed(s), first + 100);
            c.truncate(s, std::min<std::int64_t>(first, keep));
            EXPECT_EQ(c.length(s), std::min<std::int64_t>(first, keep));
            auto out = decode(c, plain, s, fresh(4000, 40));
            for (uid i = 0; i < 12; ++i) out.push_back(step(c, plain, s, fresh(5000 + 100 * i, 50)));
            return out;
        };
        EXPECT_TRUE(run(100'000) == run(200'000)) << "kept " << keep;
    }
}

TEST(CacheFork, ManyShortUnitsStillFitTheWorkspace) {
    const world w({layer(1, 2)});
    auto o = small_options();
    o.window = 1;
    o.rejectable = 0;
    float_cache c(w.model, o, small_codec());
    const auto s = open_with(c, 260'000);
    prefill(c, w, s, fresh(1, 600));
    ASSERT_GT(c.sealed(s), 0);
    for (uid i = 0; i < (float_cache::on_device ? turns(24, 4) : 60); ++i) {  // each turn leaves a unit of one token
        for (uid t = 0; t < 20 && c.sealed(s) == c.sealed(s) && c.units(s).back().end() + 200 > c.length(s); ++t) (void)step(c, w, s, fresh(10'000 + 1000 * i + 40 * t, 32));
        c.truncate(s, c.units(s).back().begin + 1);
        const auto r = attend_all(c, w, s, {5}, resolution::adaptive);
        for (const float x : r.out[0]) ASSERT_TRUE(std::isfinite(x));
    }
}

TEST(CacheFork, DeepTruncationAndRefitsStaySane) {
    const world w({layer(1, 2)});
    float_cache c(w.model, small_options(), zooming(32));
    const auto s = c.open({quota(c, float_cache::on_device ? 360'000 : 260'000, 8000), 8000});  // bases weigh more beside 16-bit rows
    uids all = fresh(1, 600);
    prefill(c, w, s, all);
    for (uid turn = 0; turn < turns(6, 2); ++turn) {
        for (uid i = 0; i < 12; ++i) {
            const auto more = fresh(10'000 * (turn + 1) + 100 * i, 40);
            all.insert(all.end(), more.begin(), more.end());
            const auto r = step(c, w, s, more);
            EXPECT_LT(distance_from_full(w, r, all, more, ssize(all) - 40), 0.6);
        }
        all.resize(all.size() / 3);
        c.truncate(s, ssize(all));
        const auto got = materialize(c, w, s, 0, 0, ssize(all));
        const auto k = w.keys(0, all);
        for (std::size_t i = 0; i < all.size(); ++i) EXPECT_LT(row_distance(got.keys, k, i, 64), 0.6) << "token " << i << ", turn " << turn;
    }
}

}  // namespace
