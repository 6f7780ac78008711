// Routing on the device against a plain model in double and the host library's own choose_zoom and line_cache.
#include "cuda/route_checks.hpp"

namespace sekv::cuda::route_tests {
namespace {

struct scenario {
    const char* name;
    world_shape shape;
    policy rules;
    dtype type = dtype::bf16;
};

class Route : public testing::TestWithParam<scenario> {};

// A query at the end, draft tokens in the middle of the sealed history, one that sees sinks alone, and padding.
TEST_P(Route, AgreesWithTheModel) {
    const auto& p = GetParam();
    rows_tests::under_schedules(2, [&] {
        world w(p.shape);
        const sealed_sequence a(w, 4, 0), b(w, 0, 23);
        step s(w, {{&a, a.length + 9, 1}, {&b, b.blocks[b.blocks.size() / 2].begin + 40, 3}, {nullptr, 0, 2}}, p.rules, p.type);
        s.run();
        const auto t = check_step(s);
        EXPECT_GT(t.tokens, 0U);
    });
}

const scenario scenarios[] = {
    {"Group1", {.group = 1, .seed = 11}, {}},
    {"Group3Resketched", {.group = 3, .resketched = true, .seed = 12}, {}},
    {"Group5Head80", {.group = 5, .kv_heads = 1, .dk = 80, .dv = 96, .slots = 64, .seed = 13}, {}, dtype::f16},
    {"Group7SoftCap", {.group = 7, .kv_heads = 1, .dk = 96, .dv = 64, .soft_cap = 6, .seed = 14}, {}, dtype::f32},
    {"Group8Largest", {.group = 8, .kv_heads = 1, .dk = 128, .dv = 128, .slots = 512, .seed = 15}, {.tau = 5e-3F, .largest = true}},
    {"Group16Head256", {.group = 16, .kv_heads = 1, .dk = 256, .dv = 80, .epochs = {17, 16, 2}, .seed = 16}, {}},
    {"Group4ExactTier", {.group = 4, .kv_heads = 3, .dk = 64, .dv = 128, .exact_tier = true, .slots = 32, .resketched = true, .seed = 17}, {}},
    {"Group2LongLists", {.group = 2, .longest_segment = 3, .seed = 18}, {.tau = 1e-4F}},
    {"Group4WideSketch", {.group = 4, .kv_heads = 1, .dk = 256, .dv = 256, .key_bits = 512, .value_bits = 512, .epochs = {18, 17, 1}, .seed = 19}, {}},
    {"Group16WideSketch", {.group = 16, .kv_heads = 1, .dk = 128, .dv = 64, .key_bits = 512, .value_bits = 256, .epochs = {16, 17}, .seed = 20}, {}},
    {"Group2NarrowSketch", {.group = 2, .dk = 64, .dv = 256, .key_bits = 4, .value_bits = 4, .seed = 21}, {}},
    {"Group1ManySegments", {.group = 1, .kv_heads = 1, .slots = 64, .epochs = {150, 130}, .longest_segment = 1, .seed = 22}, {.tau = 1e-3F}},
    {"Group4Capped", {.group = 4, .slots = 256, .seed = 23}, {.tau = 5e-4F, .cap = 37}},
    {"Group2CappedWithTies", {.group = 2, .slots = 64, .patterns = 40, .seed = 24}, {.tau = 2e-4F, .cap = 100}},
    // Counts of fields: 64 of one bit, and fewer than a step's.
    {"Group3FullSteps", {.group = 3, .key_bits = 64, .value_bits = 64, .seed = 41, .decay = 0.999}, {.tau = 1e-4F}},
    {"Group16FullSteps", {.group = 16, .kv_heads = 1, .key_bits = 64, .value_bits = 64, .seed = 42, .decay = 0.999}, {.tau = 1e-4F}},
    {"Group8FewFields", {.group = 8, .kv_heads = 1, .key_bits = 20, .value_bits = 28, .seed = 43}, {}},
    {"Group5OneField", {.group = 5, .kv_heads = 1, .key_bits = 4, .value_bits = 8, .seed = 44, .decay = 0.1}, {.tau = 1e-4F}},
    // Weights of one query ten decades apart, none at all, and segments that matter little.
    {"Group1Decades", {.group = 1, .seed = 45, .decades = 10}, {.tau = 1e-4F}},
    {"Group5Decades", {.group = 5, .kv_heads = 1, .seed = 46, .decades = 10}, {.tau = 1e-4F}},
    {"Group16Decades", {.group = 16, .kv_heads = 1, .seed = 47, .decades = 10}, {.tau = 1e-4F}},
    {"Group4NoWeights", {.group = 4, .kv_heads = 1, .seed = 48, .basis = 0}, {.tau = 1e-4F}},
    {"Group8FarSegments", {.group = 8, .kv_heads = 1, .seed = 49, .means = 4}, {.tau = 1e-5F}},
    {"Group1CapOfOne", {.group = 1, .patterns = 40, .seed = 25}, {.tau = 2e-4F, .cap = 1}},
};
INSTANTIATE_TEST_SUITE_P(Shapes, Route, testing::ValuesIn(scenarios), [](const auto& i) { return std::string(i.param.name); });

TEST(RouteRules, EveryWidthIsTried) {
    world w({.kv_heads = 1});
    std::set<int> widths;
    for (const double decay : {0.5, 0.85}) {
        const auto codes = make_codes(w, 64, 80, decay);
        widths.insert(codes.sketch.bits.begin(), codes.sketch.bits.end());
    }
    for (const int width : {0, 1, 2, 4, 8}) EXPECT_TRUE(widths.contains(width)) << width;
}

TEST(RouteRules, NothingZoomsWithoutCapOrTau) {
    for (const auto& rules : {policy{.tau = 1e-4F, .cap = 0}, policy{.tau = 1}}) {
        world w({.slots = 32});
        const sealed_sequence a(w, 4, 0);
        step s(w, {{&a, a.length, 2}}, rules);
        s.run();
        EXPECT_EQ(check_step(s).tokens, 0U);
    }
}

// What a query sees is sinks, which are read elsewhere.
TEST(RouteRules, SinksAloneAreNoZoom) {
    world w({});
    const sealed_sequence a(w, 4, 0);
    step s(w, {{&a, 2, 1}}, {});
    s.run();
    EXPECT_EQ(check_step(s).zooms, 0U);
}

TEST(RouteRules, WhatAFullListTurnsAwayStaysInTheRest) {
    world w({.kv_heads = 1});
    const sealed_sequence a(w, 4, 0);
    step s(w, {{&a, a.length, 1}}, {.tau = 1e-4F, .room = 20});
    s.run();
    EXPECT_EQ(check_step(s).tokens, 20U);
}

// Bounds make it impossible; were they wrong, nothing outside the row's own runs may be written.
TEST(RouteRules, RunsStayInTheirPlace) {
    world w({.kv_heads = 1});
    const sealed_sequence a(w, 4, 0);
    step s(w, {{&a, a.length, 1}}, {.tau = 5e-4F});
    const auto all = s.ws.runs;
    s.ws.runs = 2;
    s.run();
    EXPECT_EQ(s.read(s.ws.run_count, 0, 0, 1)[0], 2);
    const auto runs = s.read(s.ws.refine_runs, 0, 0, all);
    EXPECT_GT(all, 2);
    EXPECT_EQ(runs[1].first, runs[0].count);
    EXPECT_LE(runs[1].count, refine_tokens);
    for (std::size_t i = 2; i < runs.size(); ++i) EXPECT_EQ(runs[i].first, -1) << "run " << i;
}

// Fields by their count of a tile's 16, and of 64: steps and tiles end within and at their ends.
TEST(RouteRules, FieldsEndWithinAndAtTheEndOfSteps) {
    std::set<std::size_t> ends;
    for (const auto& p : scenarios) {
        if (p.shape.decades > 0 || p.shape.basis == 0) continue;
        world w(p.shape);
        const sealed_sequence a(w, 4, 0);
        ends.insert(a.keys(0, 0).sketch.fields.size() % 16);
        ends.insert(16 + a.statistics(0).values(w.index(0)).sketch.fields.size() % 16);
    }
    EXPECT_TRUE(ends.contains(0) && ends.contains(16)) << "no count is a multiple of 16";
    EXPECT_GT(ends.size(), 8U);
}

// fp16 holds 65,504 at most and 6e-8 at least: units make up for it.
TEST(RouteRules, WeightsOfAnySize) {
    for (const std::int32_t group : {1, 3, 5, 8, 16}) {
        for (const float scale : {1e-6F, 1.0F, 1e4F}) {
            SCOPED_TRACE("group " + std::to_string(group) + " scale " + std::to_string(scale));
            world w({.group = group, .kv_heads = 1, .epochs = {3, 2}, .seed = 51, .code_scale = scale, .decades = 10});
            const sealed_sequence a(w, 0, 0);
            step s(w, {{&a, a.length, 1}}, {});
            s.run();
            check_matrices(s, 0, 0);
        }
    }
}

// Either part of a weight and of a probability counts: fp16 alone would give 11 bits.
TEST(RouteRules, LogitsAndSumsKeepTheirLowParts) {
    for (const std::int32_t group : {1, 3, 8, 16}) {
        SCOPED_TRACE("group " + std::to_string(group));
        world w({.group = group, .kv_heads = 1, .seed = 52});
        const sealed_sequence a(w, 4, 0);
        step s(w, {{&a, a.length, 1}}, {.tau = 1e-4F});
        s.run();
        const auto e = expect(s, 0, 0);
        check_sums(s, e, 0, 0, 1e-5);
        check_rest(s, e, candidates_of(s, 0, 0), 0, 0, 2e-5);
    }
}

TEST(RouteRules, TheSameBitsUnderEverySchedule) {
    std::vector<std::uint8_t> first;
    rows_tests::under_schedules(5, [&] {
        world w({.group = 3, .slots = 64, .seed = 31});
        const sealed_sequence a(w, 4, 11);
        step s(w, {{&a, a.length - 70, 2}}, {.tau = 5e-4F, .cap = 60});
        s.run();
        std::vector<std::uint8_t> bits;
        const auto add = [&](const auto& values) { bits.insert(bits.end(), reinterpret_cast<const std::uint8_t*>(values.data()), reinterpret_cast<const std::uint8_t*>(values.data() + values.size())); };
        for (std::int32_t row = 0; row < 2; ++row) {
            for (std::int32_t head = 0; head < 2; ++head) {
                const std::int64_t parts = static_cast<std::int64_t>(a.view.segment_count) * s.ws.group;
                auto rest = s.read(s.ws.rest, row, head, s.ws.segments * s.ws.group);
                auto codes = s.read(s.ws.rest_codes, row, head, s.ws.segments * s.ws.group * 64);
                rest.resize(static_cast<std::size_t>(parts)), codes.resize(static_cast<std::size_t>(parts * 64));
                add(rest), add(codes), add(s.read(s.ws.log_sum, row, head, s.ws.group)), add(candidates_of(s, row, head));
                auto runs = s.read(s.ws.refine_runs, row, head, s.ws.runs);
                runs.resize(static_cast<std::size_t>(s.read(s.ws.run_count, row, head, 1)[0]));
                add(runs);
                auto zoomed = s.read(s.ws.zoomed, row, head, s.ws.candidates);
                zoomed.resize(candidates_of(s, row, head).size());
                for (auto& z : zoomed) z.line = reinterpret_cast<const std::uint8_t*>(z.line != nullptr ? 1 : 0), z.unused = 0;
                add(zoomed);
            }
        }
        add(a.cache());
        if (first.empty()) first = bits;
        EXPECT_EQ(bits, first);
    });
}

}  // namespace
}  // namespace sekv::cuda::route_tests
