// Bad input: a typed error whose sentence names the value, and the cache as it was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "unit/cache_fixtures.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;
using sekv::rows;
using ::testing::HasSubstr;

constexpr auto huge = std::numeric_limits<std::int64_t>::max();

// A cache with a sealed, forked sequence; every refused call must leave all of it as it was.
class CacheErrors : public ::testing::Test {
protected:
    CacheErrors() : w({layer(2, 2), layer(1, 2, 30), layer(2, 1)}), cache(w.model, options(), small_codec()), s(cache.open({quota(cache, 900'000, 1000), 1000})) {
        prefill(cache, w, s, fresh(1, 500));
        EXPECT_GT(cache.sealed(s), 0);
        cache.reserve(s, 5);
    }
    static sekv::cache_options options() {
        auto o = small_options();
        o.device_budget = budget(4 << 20);
        return o;
    }
    template <class Error, class Body>
    void refused(const std::string& words, const Body& body) {
        const auto length = cache.length(s), sealed = cache.sealed(s), spans = cache.spans(s).length();
        const auto used = cache.used(s);
        const auto held = materialize(cache, w, s, 0, 0, length);
        try {
            body();
            ADD_FAILURE() << "accepted: " << words;
        } catch (const Error& e) {
            EXPECT_THAT(e.what(), HasSubstr(words));
        } catch (const sekv::error& e) {
            ADD_FAILURE() << "another error than expected: " << e.what();
        }
        EXPECT_EQ(cache.length(s), length) << words;
        EXPECT_EQ(cache.sealed(s), sealed) << words;
        EXPECT_EQ(cache.spans(s).length(), spans) << words;
        EXPECT_EQ(cache.used(s), used) << words;
        EXPECT_EQ(materialize(cache, w, s, 0, 0, length), held) << words;
    }
    template <class Error>
    void refused_append(const std::string& words, std::int32_t l, const sekv::rows_view& k, const sekv::rows_view& v, std::int64_t position = -1) {
        refused<Error>(words, [&] { cache.append(s, l, k, v, position); });
    }
    world w;
    float_cache cache;
    sekv::sequence s;
    std::vector<float> row = std::vector<float>(4096, 0.5F), out = std::vector<float>(4096);
};

TEST_F(CacheErrors, Shapes) {
    const auto good = rows(row.data(), 1, 2, 64);
    refused_append<sekv::invalid_argument>("[1, 3, 64]", 0, rows(row.data(), 1, 3, 64), good);
    refused_append<sekv::invalid_argument>("[1, 2, 80]", 0, rows(row.data(), 1, 2, 80), good);
    refused_append<sekv::invalid_argument>("values", 0, good, rows(row.data(), 2, 2, 64));
    refused_append<sekv::invalid_argument>("without", 0, rows<float>(nullptr, 1, 2, 64), good);
    refused_append<sekv::invalid_argument>("at least one token", 0, rows(row.data(), 0, 2, 64), rows(row.data(), 0, 2, 64));
    refused_append<sekv::invalid_argument>("at least one token", 0, rows(row.data(), -3, 2, 64), rows(row.data(), -3, 2, 64));
    refused_append<sekv::invalid_argument>("was opened for 1000", 0, rows(row.data(), huge, 2, 64), rows(row.data(), huge, 2, 64));
    refused_append<sekv::invalid_argument>("no layer 3", 3, good, good);
    refused_append<sekv::invalid_argument>("no layer -1", -1, good, good);
    refused_append<sekv::invalid_argument>("position 499", 0, good, good, 499);
    refused_append<sekv::invalid_argument>("position 501", 0, good, good, 501);
    refused<sekv::invalid_argument>("queries", [&] {
        const auto q = rows(row.data(), 1, 3, 64);
        cache.append(s, 0, good, good, -1, &q);
    });
}

TEST_F(CacheErrors, ValuesThatAreNotFinite) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
        auto spoiled = row;
        spoiled[77] = bad;
        refused_append<sekv::invalid_argument>("Keys of token 0, head 1", 0, rows(spoiled.data(), 1, 2, 64), rows(row.data(), 1, 2, 64));
        refused_append<sekv::invalid_argument>("Values of token 0, head 1", 0, rows(row.data(), 1, 2, 64), rows(spoiled.data(), 1, 2, 64));
        refused<sekv::invalid_argument>("not finite", [&] {
            const auto q = rows(spoiled.data(), 1, 4, 64);
            cache.append(s, 0, rows(row.data(), 1, 2, 64), rows(row.data(), 1, 2, 64), -1, &q);
        });
        refused<sekv::invalid_argument>("not finite", [&] {
            const sekv::batch_item item{s, 1, -1};
            cache.attend({&item, 1}, 0, rows(spoiled.data(), 1, 4, 64), resolution::adaptive, sekv::out_rows(out.data(), 1, 4, 64));
        });
    }
    sekv::basic_cache<sekv::fp16, sekv::host_backend, sekv::progressive_codec> half(w.model);
    const auto h = half.open();
    auto large = row;
    large[3] = 1e6F;
    EXPECT_THROW(half.append(h, 0, rows(large.data(), 1, 2, 64), rows(row.data(), 1, 2, 64)), sekv::invalid_argument);
    EXPECT_EQ(half.length(h), 0);
}

TEST_F(CacheErrors, StepsOutOfOrder) {
    cache.truncate(s, 500);  // nothing reserved
    append(cache, w, s, 0, fresh(900, 2));
    EXPECT_THROW((void)cache.length(s), sekv::state_error);
    EXPECT_THROW((void)cache.fork(s), sekv::state_error);
    EXPECT_THROW(cache.reserve(s, 1), sekv::state_error);
    EXPECT_THROW(cache.end_prefill(s), sekv::state_error);
    EXPECT_THROW(cache.begin_prefill(s), sekv::state_error);
    EXPECT_THROW(append(cache, w, s, 1, fresh(900, 3)), sekv::state_error);
    EXPECT_THROW((void)attend_all(cache, w, s, fresh(900, 501), resolution::adaptive, 0), sekv::state_error) << "layer 1 has no such token";
    cache.truncate(s, 500);  // takes the half step back
    EXPECT_EQ(cache.length(s), 500);
    (void)step(cache, w, s, fresh(900, 2));
    EXPECT_EQ(cache.length(s), 502);
}

TEST_F(CacheErrors, Attention) {
    const auto attend = [&](std::int64_t tokens, std::int64_t position, std::int32_t heads, std::int64_t out_tokens, std::int32_t l = 0) {
        const sekv::batch_item item{s, tokens, position};
        cache.attend({&item, 1}, l, rows(row.data(), tokens, heads, 64), resolution::adaptive, sekv::out_rows(out.data(), out_tokens, 4, 64));
    };
    refused<sekv::invalid_argument>("queries", [&] { attend(1, -1, 2, 1); });
    refused<sekv::invalid_argument>("out must be", [&] { attend(1, -1, 4, 2); });
    refused<sekv::invalid_argument>("no layer 9", [&] { attend(1, -1, 4, 1, 9); });
    refused<sekv::invalid_argument>("at least one query", [&] { attend(0, -1, 4, 1); });
    refused<sekv::invalid_argument>("at least one query", [&] { attend(huge, -1, 4, 1); });
    refused<sekv::state_error>("append their K and V first", [&] { attend(1, 500, 4, 1); });
    refused<sekv::state_error>("append their K and V first", [&] { attend(1, huge, 4, 1); });
    refused<sekv::state_error>("append their K and V first", [&] { attend(501, -1, 4, 501); });
    refused<sekv::invalid_argument>("twice", [&] {
        const sekv::batch_item items[] = {{s, 1, 3}, {s, 1, 4}};
        (void)cache.make_plan(items, resolution::adaptive);
    });
    const auto fresh_one = cache.open({quota(cache, 300'000, 100), 100});
    refused<sekv::state_error>("append their K and V first", [&] {
        const sekv::batch_item item{fresh_one, 1, -1};
        cache.attend({&item, 1}, 0, rows(row.data(), 1, 4, 64), resolution::adaptive, sekv::out_rows(out.data(), 1, 4, 64));
    });
}

TEST_F(CacheErrors, Plans) {
    const sekv::batch_item item{s, 1, -1};
    sekv::plan none;
    refused<sekv::invalid_argument>("another cache", [&] { cache.attend(none, 0, rows(row.data(), 0, 4, 64), sekv::out_rows(out.data(), 0, 4, 64)); });
    float_cache other(w.model, options(), small_codec());
    const auto theirs = other.open({quota(other, 900'000, 1000), 1000});
    (void)step(other, w, theirs, fresh(1, 3));
    auto foreign = other.make_plan({&item, 1}, resolution::adaptive);
    refused<sekv::invalid_argument>("another cache", [&] { cache.attend(foreign, 0, rows(row.data(), 1, 4, 64), sekv::out_rows(out.data(), 1, 4, 64)); });
    sekv::sequence other_one = cache.open({quota(cache, 900'000, 3000), 3000});
    const sekv::batch_item small{other_one, 1, -1};
    (void)step(cache, w, other_one, {1});
    auto outgrown = cache.make_plan({&small, 1}, resolution::adaptive);
    for (uid i = 0; i < 11; ++i) append_all(cache, w, other_one, fresh(100 * i, 100));
    refused<sekv::state_error>("make a new plan", [&] { cache.attend(outgrown, 0, rows(row.data(), 1, 4, 64), sekv::out_rows(out.data(), 1, 4, 64)); });
    cache.close(other_one);
    refused<sekv::state_error>("not open", [&] { cache.attend(outgrown, 0, rows(row.data(), 1, 4, 64), sekv::out_rows(out.data(), 1, 4, 64)); });
}

TEST_F(CacheErrors, ClosedAndForeignSequences) {
    const auto gone = cache.open({quota(cache, 300'000, 100), 100});
    cache.close(gone);
    for (const auto bad : {gone, sekv::sequence{}, sekv::sequence{57, 1}, sekv::sequence{s.index, s.generation + 1}}) {
        refused<sekv::state_error>("not open", [&] { cache.close(bad); });
        refused<sekv::state_error>("not open", [&] { (void)cache.length(bad); });
        refused<sekv::state_error>("not open", [&] { (void)cache.fork(bad); });
        refused<sekv::state_error>("not open", [&] { cache.truncate(bad, 0); });
        refused<sekv::state_error>("not open", [&] { cache.reserve(bad, 1); });
        refused<sekv::state_error>("not open", [&] { append(cache, w, bad, 0, {1}); });
        refused<sekv::state_error>("not open", [&] { cache.observe(bad, {}); });
        refused<sekv::state_error>("not open", [&] { cache.cut(bad, {}); });
        refused<sekv::state_error>("not open", [&] { cache.begin_prefill(bad); });
        refused<sekv::state_error>("not open", [&] { cache.end_prefill(bad); });
        refused<sekv::state_error>("not open", [&] { (void)cache.used(bad); });
        refused<sekv::state_error>("not open", [&] { (void)materialize(cache, w, bad, 0, 0, 1); });
        refused<sekv::state_error>("not open", [&] { cache.export_sequence(bad, "/nowhere"); });
    }
    refused<sekv::unsupported>("not supported yet", [&] { cache.export_sequence(s, "/nowhere"); });
    refused<sekv::unsupported>("not supported yet", [&] { (void)cache.import_sequence("/nowhere"); });
}

TEST_F(CacheErrors, Ranges) {
    refused<sekv::invalid_argument>("501", [&] { cache.truncate(s, 501); });
    refused<sekv::invalid_argument>("-1", [&] { cache.truncate(s, -1); });
    refused<sekv::invalid_argument>("501", [&] { (void)cache.fork(s, 501); });
    refused<sekv::invalid_argument>("-2", [&] { (void)cache.fork(s, -2); });
    refused<sekv::state_error>("sliding-window", [&] { cache.truncate(s, 100); });
    refused<sekv::state_error>("sliding-window", [&] { (void)cache.fork(s, 100); });
    refused<sekv::invalid_argument>("opened for 1000", [&] { cache.reserve(s, 501); });
    refused<sekv::invalid_argument>("opened for 1000", [&] { cache.reserve(s, huge); });
    refused<sekv::invalid_argument>("-1", [&] { cache.reserve(s, -1); });
    const auto read = [&](std::int64_t begin, std::int64_t count, std::int32_t heads = 2) {
        const sekv::out_view v{out.data(), count, heads, 64, 0, 0};
        cache.materialize(s, 0, begin, count, v, v);
    };
    refused<sekv::invalid_argument>("can't materialise", [&] { read(0, 501); });
    refused<sekv::invalid_argument>("can't materialise", [&] { read(1, huge); });
    refused<sekv::invalid_argument>("can't materialise", [&] { read(huge, 1); });
    refused<sekv::invalid_argument>("can't materialise", [&] { read(-1, 1); });
    refused<sekv::invalid_argument>("other shapes", [&] { read(0, 1, 1); });
    refused<sekv::invalid_argument>("can't materialise", [&] { (void)materialize(cache, w, s, 1, 0, 1); });
    const std::vector<float> one{1.0F}, bad{NAN}, below{-1.0F};
    refused<sekv::invalid_argument>("501", [&] { cache.observe(s, one); });
    cache.truncate(s, 499);
    append_all(cache, w, s, {7});
    refused<sekv::invalid_argument>("nan", [&] { cache.observe(s, bad); });
    refused<sekv::invalid_argument>("-1", [&] { cache.observe(s, below); });
    const std::int64_t cuts[] = {501};
    refused<sekv::invalid_argument>("501", [&] { cache.cut(s, cuts); });
}

TEST_F(CacheErrors, BudgetsThatAreTooSmall) {
    refused<sekv::budget_error>("line cache", [&] { (void)cache.open({1000, 100}); });
    refused<sekv::invalid_argument>("capacity", [&] { (void)cache.open({0, 0}); });
    refused<sekv::invalid_argument>("capacity", [&] { (void)cache.open({0, huge}); });
    float_cache tight(w.model, options(), small_codec());
    const auto t = tight.open({quota(tight, 30'000, 1000), 1000});  // less than one block of the sliding-window layer's rows
    EXPECT_THROW(append_all(tight, w, t, fresh(1, 10)), sekv::budget_error);
    EXPECT_EQ(tight.length(t), 0);
    EXPECT_THROW(tight.end_prefill(t), sekv::budget_error);
    const auto u = tight.open({quota(tight, 350'000, 1000), 1000});  // a prompt goes in, by way of the host, but its window doesn't fit
    for (uid i = 0; i < 4; ++i) append_all(tight, w, u, fresh(100 * i, 100));
    const auto held = materialize(tight, w, u, 0, 0, 400);
    EXPECT_THROW(tight.end_prefill(u), sekv::budget_error);
    EXPECT_EQ(tight.sealed(u), 0);
    EXPECT_EQ(materialize(tight, w, u, 0, 0, 400), held);
}

template <class Change>
void bad_model(const std::string& words, const Change& change) {
    world w({layer(2, 2), layer(2, 2)});
    change(w.model);
    try {
        float_cache c(w.model);
        ADD_FAILURE() << "accepted: " << words;
    } catch (const sekv::error& e) {
        EXPECT_THAT(e.what(), HasSubstr(words));
    }
}

TEST(CacheConstruction, ModelsThatItCannotTake) {
    for (const std::int32_t d : {0, -64, 1, 63, 65, 100, 192, 512}) bad_model("key_size", [&](auto& m) { m.layers[1].key_size = d; });
    bad_model("value_size", [](auto& m) { m.layers[0].value_size = 72; });
    bad_model("at least one layer", [](auto& m) { m.layers.clear(); });
    bad_model("sinks", [](auto& m) { m.sinks = 65; });
    bad_model("kv_heads", [](auto& m) { m.layers[0].kv_heads = 0; });
    bad_model("group", [](auto& m) { m.layers[0].group = 65; });
    bad_model("sliding_window", [](auto& m) { m.layers[0].sliding_window = -1; });
    bad_model("soft_cap", [](auto& m) { m.layers[0].soft_cap = NAN; });
    bad_model("scale", [](auto& m) { m.layers[0].scale = -1; });
    bad_model("kv_source", [](auto& m) { m.layers[0].kv_source = 0; });
    bad_model("kv_source", [](auto& m) { m.layers[1].kv_source = 7; });
    bad_model("sink logits", [](auto& m) { m.layers[0].sink_logits = true; });
}

template <class Change>
void bad_options(const std::string& words, const Change& change) {
    sekv::cache_options o;
    sekv::progressive_options p;
    change(o, p);
    try {
        float_cache c(world({layer(1, 1)}).model, o, p);
        ADD_FAILURE() << "accepted: " << words;
    } catch (const sekv::invalid_argument& e) {
        EXPECT_THAT(e.what(), HasSubstr(words));
    }
}

TEST(CacheConstruction, OptionsThatItCannotTake) {
    bad_options("max_sequences", [](auto& o, auto&) { o.max_sequences = 0; });
    bad_options("window", [](auto& o, auto&) { o.window = 0; });
    bad_options("window", [](auto& o, auto&) { o.window = 65537; });
    bad_options("rejectable", [](auto& o, auto&) { o.rejectable = -1; });
    bad_options("alpha", [](auto& o, auto&) { o.spans.alpha = NAN; });
    bad_options("l_min", [](auto& o, auto&) { o.spans.l_min = 65; });
    bad_options("key_sketch_bits", [](auto&, auto& p) { p.key_sketch_bits = 6; });
    bad_options("value_sketch_bits", [](auto&, auto& p) { p.value_sketch_bits = 516; });
    bad_options("line_factor", [](auto&, auto& p) { p.line_factor = NAN; });
    bad_options("tau", [](auto&, auto& p) { p.tau = 0; });
    bad_options("tau", [](auto&, auto& p) { p.tau = NAN; });
    bad_options("cap", [](auto&, auto& p) { p.cap = -1; });
    bad_options("line_slots", [](auto&, auto& p) { p.line_slots = 33; });
    bad_options("horizon", [](auto&, auto& p) { p.horizon = -1; });
    bad_options("shrinkage", [](auto&, auto& p) { p.shrinkage = 0; });
    bad_options("metric_power", [](auto&, auto& p) { p.metric_power = 3; });
    bad_options("metric_memory", [](auto&, auto& p) { p.metric_memory = 0; });
    bad_options("epoch_tokens", [](auto&, auto& p) { p.epoch_tokens = 255; });
    EXPECT_THROW(sekv::host_backend(nullptr), sekv::invalid_argument);
}

}  // namespace
