// What is exact: everything below the budget; window, sinks and unsealed tokens above it. Sliding windows, soft-cap, shared layers, 16-bit rows.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "unit/cache_fixtures.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;
using sekv::tier;

// Steps of several sizes over a sequence, each compared with full attention.
template <class Cache>
void expect_full_attention(Cache& c, const world& w, sekv::sequence s, const std::vector<std::pair<std::int64_t, resolution>>& steps, double most, double most_lse, const world& oracle) {
    uids all;
    uid next = 1000;
    for (const auto& [n, how] : steps) {
        const auto tokens = fresh(next, n);
        next += tokens.size();
        all.insert(all.end(), tokens.begin(), tokens.end());
        const auto r = step(c, w, s, tokens, how);
        double lse = 0;
        EXPECT_LT(distance_from_full(oracle, r, all, tokens, ssize(all) - n, &lse), std::max(most, exact_error(how))) << "at length " << all.size() << ", " << n << " tokens, resolution " << static_cast<int>(how);
        EXPECT_LT(lse, std::max(most_lse, exact_lse_error(how)));
    }
}

const std::vector<std::pair<std::int64_t, resolution>> mixed_steps{{1, resolution::full},     {70, resolution::full},     {1, resolution::adaptive},  {5, resolution::adaptive}, {130, resolution::full},
                                                                   {3, resolution::adaptive}, {128, resolution::adaptive}, {64, resolution::full},     {1, resolution::adaptive}};

TEST(CacheExact, EqualsFullAttentionBelowTheBudget) {
    world w({layer(1, 3), layer(2, 2), layer(2, 1)});
    w.query_gain = 2.0F;
    float_cache c(w.model, {}, small_codec(), sekv::host_backend(2));
    const auto s = c.open({0, 4000});
    expect_full_attention(c, w, s, mixed_steps, 2e-6, 1e-5, w);
    c.end_prefill(s);
    EXPECT_EQ(c.sealed(s), 0);
}

TEST(CacheExact, EveryHeadSize) {
    for (const std::int32_t d : {64, 80, 96, 128, 256}) {
        auto a = layer(2, 2, 0, d);
        a.value_size = d == 256 ? 64 : d;
        const world w({a});
        float_cache c(w.model);
        SCOPED_TRACE(d);
        expect_full_attention(c, w, c.open({0, 4000}), {{100, resolution::full}, {2, resolution::adaptive}}, 2e-6, 1e-5, w);
    }
}

TEST(CacheExact, SoftCapScaleAndSharedLayers) {
    auto capped = layer(2, 2);
    capped.soft_cap = 3.0F;
    capped.scale = 0.3F;
    auto shared = layer(2, 3);
    shared.kv_source = 0;
    const world w({capped, layer(1, 2, 20), shared});
    float_cache c(w.model);
    expect_full_attention(c, w, c.open({0, 4000}), mixed_steps, 2e-6, 1e-5, w);
}

TEST(CacheExact, SlidingWindowsOfSeveralWidths) {
    const world w({layer(1, 2, 1), layer(2, 1, 7), layer(1, 1, 64), layer(1, 2, 200)});
    auto o = small_options();
    o.rejectable = 16;
    float_cache c(w.model, o);
    expect_full_attention(c, w, c.open({0, 4000}), mixed_steps, 2e-6, 1e-5, w);
}

TEST(CacheExact, SlidingWindowLayersStayBounded) {
    const world w({layer(1, 1, 40), layer(2, 1, 10)});
    auto o = small_options();
    o.rejectable = 100;  // wider than both windows
    float_cache c(w.model, o);
    const auto s = c.open({0, 4000});
    std::uint64_t most = 0;
    for (int i = 0; i < 40; ++i) {
        (void)step(c, w, s, fresh(static_cast<uid>(100 * i), 30));
        most = std::max(most, c.used(s).at(tier::device, sekv::kind::exact));
    }
    const std::uint64_t page = 64 * 3 * 128 * (float_cache::on_device ? 2 : 4);  // 40 + 100 + 30 tokens lie in at most 4 blocks
    EXPECT_LE(most, 4 * page);
    EXPECT_EQ(c.sealed(s), 0);
}

TEST(CacheExact, SlidingWindowsCanBeTruncatedByWhatIsRejectable) {
    for (const std::int32_t window : {8, 300}) {
        const world w({layer(1, 2, window), layer(1, 2)});
        auto o = small_options();
        o.rejectable = 48;
        float_cache c(w.model, o);
        const auto s = c.open({0, 4000});
        uids all;
        for (int i = 0; i < 20; ++i) {
            const auto more = fresh(static_cast<uid>(1000 * window + 100 * i), 50);
            (void)step(c, w, s, more);
            all.insert(all.end(), more.begin(), more.end());
        }
        for (const std::int64_t back : {1, 48}) {
            const auto f = c.fork(s);
            c.truncate(f, 1000 - back);
            uids kept(all.begin(), all.end() - back);
            const auto more = fresh(77, 3);
            kept.insert(kept.end(), more.begin(), more.end());
            EXPECT_LT(distance_from_full(w, step(c, w, f, more), kept, more, ssize(kept) - 3), exact_error(resolution::adaptive)) << "window " << window << ", back " << back;
            c.close(f);
        }
        EXPECT_THROW(c.truncate(s, 800 - window), sekv::state_error);
        EXPECT_EQ(c.length(s), 1000);
        const uids again(all.end() - 2, all.end());
        EXPECT_LT(distance_from_full(w, attend_all(c, w, s, again, resolution::adaptive), all, again, 998), exact_error(resolution::adaptive)) << "a refused truncation must change nothing";
        c.truncate(s, 0);
        EXPECT_LT(distance_from_full(w, step(c, w, s, fresh(5, 4)), fresh(5, 4), fresh(5, 4), 0), exact_error(resolution::adaptive));
    }
}

TEST(CacheExact, QueriesNeverSeeLaterTokens) {
    const world w({layer(1, 2), layer(2, 1, 30)});
    const auto early = fresh(1, 100);
    std::vector<result> seen;
    for (const uid later : {10'000U, 20'000U}) {
        float_cache c(w.model);
        const auto s = c.open({0, 4000});
        append_all(c, w, s, early);
        append_all(c, w, s, fresh(later, 60));
        const uids asked{early[40], early[41], early[42]};
        for (const auto how : {resolution::adaptive, resolution::full}) {
            seen.push_back(attend_all(c, w, s, asked, how, 97));
            EXPECT_LT(distance_from_full(w, seen.back(), early, asked, 97), exact_error(how));
        }
    }
    EXPECT_EQ(seen[0], seen[2]);
    EXPECT_EQ(seen[1], seen[3]);
}

TEST(CacheExact, SealedTokensAfterAQueryAreNotSeen) {
    const world w({layer(2, 2)});
    const auto prompt = fresh(1, 700);
    auto o = small_options();
    o.device_budget = budget(3'000'000);
    auto codec = small_codec();
    codec.exact_tier = true;
    codec.tau = 1e-9F;  // all are read exactly: the only difference from full attention could be a wrong token
    codec.cap = 4096;
    float_cache c(w.model, o, codec);
    const auto s = c.open({quota(c, 400'000, 1000), 1000});
    prefill(c, w, s, prompt);
    ASSERT_GT(c.sealed(s), 300);
    for (const std::int64_t p : {0, 2, 3, 4, 5, 63, 64, 127, 200, 257}) {
        const uids asked{9'000'000U + static_cast<uid>(p)};
        double lse = 0;
        for (const auto how : {resolution::adaptive, resolution::full}) EXPECT_LT(distance_from_full(w, attend_all(c, w, s, asked, how, p), prompt, asked, p, &lse), 3 * exact_error(how)) << "position " << p;
        EXPECT_LT(lse, 2 * exact_lse_error(resolution::full));
    }
}

TEST(CacheExact, WindowSinksAndUnsealedStayExact) {
    const world w({layer(1, 2)});
    const auto prompt = fresh(1, 600);
    auto o = small_options();
    o.device_budget = budget(1 << 20);
    float_cache c(w.model, o, small_codec());
    const auto s = c.open({quota(c, 230'000, 2000), 2000});
    prefill(c, w, s, prompt);
    (void)decode(c, w, s, fresh(5000, 200));
    const auto sealed = c.sealed(s);
    ASSERT_GT(sealed, 0);
    EXPECT_LE(sealed, 800 - o.window - o.rejectable);
    uids all = prompt;
    const auto more = fresh(5000, 200);
    all.insert(all.end(), more.begin(), more.end());
    const uids tail(all.begin() + sealed, all.end());
    const auto rows = materialize(c, w, s, 0, sealed, ssize(tail));
    EXPECT_EQ(rows.keys, w.keys(0, tail));
    EXPECT_EQ(rows.values, w.values(0, tail));
    // Of two caches whose sinks differ, every output differs by what exact sinks say: a query that is a multiple of a sink's key reads that sink's value.
    const auto k = w.keys(0, {all[1]});
    std::vector<float> q(2 * 64), out(2 * 64);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = 12.0F * k[i % 64];
    const sekv::batch_item item{s, 1, -1};
    c.attend({&item, 1}, 0, sekv::rows(q.data(), 1, 2, 64), resolution::adaptive, sekv::out_rows(out.data(), 1, 2, 64));
    const auto v = w.values(0, {all[1]});
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], v[i % 64], 1e-5F);
}

template <class Scalar>
void sixteen_bit(double most) {
    const world w({layer(2, 2), layer(1, 2, 50)});
    sekv::basic_cache<Scalar, sekv::host_backend, sekv::progressive_codec> c(w.model, small_options(), small_codec());
    const auto s = c.open({0, 4000});
    expect_full_attention(c, w, s, mixed_steps, most, most, w);
    const auto tokens = fresh(1000, 10);
    const auto got = materialize(c, w, s, 0, 0, 10);
    auto expected = w.keys(0, tokens);
    for (auto& x : expected) x = static_cast<float>(Scalar(x));
    EXPECT_EQ(got.keys, expected);
}
TEST(CacheExact, Bf16Rows) { sixteen_bit<sekv::bf16>(1e-2); }
TEST(CacheExact, Fp16Rows) { sixteen_bit<sekv::fp16>(2e-3); }

}  // namespace
