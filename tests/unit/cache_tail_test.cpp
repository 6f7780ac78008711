// When the tail is sealed, and how spans follow a sequence under each policy.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "unit/cache_fixtures.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;
using sekv::span_policy;
using sekv::tier;

TEST(CacheTail, SealsOnlyBehindWindowAndRejectable) {
    const world w({layer(2, 2)});
    for (const std::int32_t window : {1, 100}) {
        for (const std::int32_t rejectable : {0, 70}) {
            auto o = small_options();
            o.window = window;
            o.rejectable = rejectable;
            float_cache c(w.model, o, small_codec());
            const auto s = c.open({quota(c, 520'000), 4000});
            prefill(c, w, s, fresh(1, 650));
            for (uid i = 0; i < turns(200); ++i) {
                const auto before = c.sealed(s);
                (void)step(c, w, s, {9000 + i});
                ASSERT_LE(c.sealed(s), std::max<std::int64_t>(before, c.length(s) - 1 - window - rejectable));
                ASSERT_LE(c.used(s).total(tier::device), quota(c, 520'000));
                ASSERT_EQ(c.used(s).at(tier::host, sekv::kind::exact), 0U) << "what is exact after the prompt is on the device";
            }
            EXPECT_GT(c.sealed(s), turns(250) < 250 ? 0 : 250);
        }
    }
}

TEST(CacheTail, NothingIsSealedWhileThePromptRuns) {
    const world w({layer(2, 2)});
    auto o = small_options();
    o.device_budget = budget(3 << 20);
    float_cache c(w.model, o, small_codec());
    const std::uint64_t bytes = float_cache::on_device ? 640'000 : 520'000;  // bases weigh more beside 16-bit rows
    const auto s = c.open({quota(c, bytes), 4000});
    uids all;
    for (uid i = 0; i < 10; ++i) {
        const auto chunk = fresh(1000 * i + 1, 128);
        all.insert(all.end(), chunk.begin(), chunk.end());
        const auto r = step(c, w, s, chunk, resolution::full);
        const uids last(chunk.end() - 2, chunk.end());
        result tail;
        tail.out.push_back({r.out[0].end() - 2 * 4 * 64, r.out[0].end()});
        EXPECT_LT(distance_from_full(w, tail, all, last, ssize(all) - 2), exact_error(resolution::full));
        EXPECT_EQ(c.sealed(s), 0);
        EXPECT_LE(c.used(s).total(tier::device), quota(c, bytes));
    }
    EXPECT_GT(c.used(s).at(tier::host, sekv::kind::exact), 0U);
    c.end_prefill(s);
    EXPECT_GT(c.sealed(s), 0);
    EXPECT_EQ(c.used(s).at(tier::host, sekv::kind::exact), 0U);
}

TEST(CacheTail, LevelsFollowTheOwnQuotaOnly) {
    const world w({layer(2, 2)});
    std::vector<std::int64_t> sealed;
    for (const int others : {0, 3}) {
        auto o = small_options();
        o.device_budget = budget(16 << 20);
        float_cache c(w.model, o, small_codec());
        for (int i = 0; i < others; ++i) prefill(c, w, c.open({quota(c, 600'000), 4000}), fresh(static_cast<uid>(50'000 * (i + 1)), 700));
        const auto s = c.open({quota(c, 520'000), 4000});
        prefill(c, w, s, fresh(1, 650));
        for (uid i = 0; i < 5; ++i) {
            (void)step(c, w, s, fresh(9000 + 100 * i, 40));
            sealed.push_back(c.sealed(s));
        }
    }
    EXPECT_TRUE(std::equal(sealed.begin(), sealed.begin() + 5, sealed.begin() + 5));
}

TEST(CacheTail, SpansUnderEachPolicy) {
    const world w({layer(2, 2), layer(1, 2)});
    for (const auto policy : {span_policy::surprisal, span_policy::key_novelty, span_policy::fixed, span_policy::dictated}) {
        auto o = small_options();
        o.spans.policy = policy;
        float_cache c(w.model, o, small_codec());
        const auto s = c.open({quota(c, 520'000), 4000}), whole = c.open({0, 4000});
        const auto all = fresh(1, 400);
        if (policy == span_policy::key_novelty) {
            const std::vector<float> one{1.0F};
            append_all(c, w, s, {all[0]});
            EXPECT_THROW(c.observe(s, one), sekv::state_error);
            c.truncate(s, 0);
        }
        for (std::size_t at = 0; at < 400; at += 50) {
            const uids chunk(all.begin() + static_cast<std::ptrdiff_t>(at), all.begin() + static_cast<std::ptrdiff_t>(at + 50));
            (void)step(c, w, s, chunk);
            (void)step(c, w, s, fresh(77'000 + at, 9));  // rejected
            c.truncate(s, static_cast<std::int64_t>(at + 50));
            if (policy == span_policy::dictated) c.cut(s, std::vector<std::int64_t>{static_cast<std::int64_t>(at + 20), static_cast<std::int64_t>(at + 50)});
        }
        append_all(c, w, whole, all);
        c.reserve(whole, 0);  // a device backend's spans follow the keys between steps
        if (policy == span_policy::dictated) {
            EXPECT_EQ(c.spans(s).spans().size(), 16U);
            continue;
        }
        if (policy != span_policy::key_novelty) c.observe(whole, w.surprisal(all));
        EXPECT_EQ(c.spans(s).all_spans(), c.spans(whole).all_spans()) << "policy " << static_cast<int>(policy);
        EXPECT_GT(c.spans(s).spans().size(), 3U);
    }
}

TEST(CacheTail, KeyNoveltyWhereOnlyAWindowIsHeld) {
    const world w({layer(2, 2, 8)});
    auto o = small_options();
    o.rejectable = 0;
    o.spans.policy = span_policy::key_novelty;
    o.spans.alpha = 100;  // spans end at l_max only: they begin long before the window
    o.spans.l_max = 1000;
    float_cache c(w.model, o, small_codec());
    const auto s = c.open({0, 4000});
    uids all;
    for (uid i = 0; i < 30; ++i) {
        const auto chunk = fresh(100 * i, 30);
        all.insert(all.end(), chunk.begin(), chunk.end());
        (void)step(c, w, s, chunk);
    }
    c.truncate(s, 899);
    all.pop_back();
    const auto child = c.fork(s);
    for (const auto x : {s, child}) {
        auto longer = all;
        longer.push_back(5);
        EXPECT_LT(distance_from_full(w, step(c, w, x, {5}), longer, {5}, 899), exact_error(resolution::adaptive));
        c.reserve(x, 0);  // a device backend's spans follow the keys between steps
        EXPECT_EQ(c.spans(x).length(), 900);
    }
}

}  // namespace
