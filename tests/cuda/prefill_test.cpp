#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "prefill_oracle.hpp"
#include "sekv/core/error.hpp"

namespace sekv::cuda::prefill_tests {
namespace {

// 3 full pages, short ones that begin anywhere, the chunk's own rows with its end inside a page.
std::vector<std::int32_t> ragged() { return {64, 17, 64, 64, 1, 40, 64, 23}; }

TEST(Prefill, EveryHeadSizeAndType) {
    for (const auto stored : {dtype::bf16, dtype::f16}) {
        for (const std::int32_t size : {64, 80, 96, 128, 256}) {
            prefill_case c;
            c.stored = stored, c.dk = c.dv = size, c.counts = ragged(), c.position = 230, c.tokens = 37, c.seed = static_cast<std::uint64_t>(size);
            check_case(c);
        }
    }
}

TEST(Prefill, KeysAndValuesOfDifferentSizes) {
    const std::pair<std::int32_t, std::int32_t> sizes[] = {{64, 128}, {128, 64}, {80, 96}, {96, 64}, {256, 128}, {64, 256}, {72, 40}, {8, 8}};
    for (const auto& [dk, dv] : sizes) {
        for (const auto stored : {dtype::bf16, dtype::f16}) {
            prefill_case c;
            c.stored = stored, c.dk = dk, c.dv = dv, c.counts = {64, 64, 64, 30}, c.position = 205, c.tokens = 17, c.seed = static_cast<std::uint64_t>(dk + dv);
            check_case(c);
        }
    }
}

TEST(Prefill, EveryGroup) {
    for (std::int32_t group = 1; group <= 16; ++group) {
        prefill_case c;
        c.stored = group % 2 == 0 ? dtype::bf16 : dtype::f16, c.group = group, c.kv_heads = group < 4 ? 3 : 1, c.counts = ragged(), c.begin = 11,
        c.position = 300, c.tokens = 29, c.seed = static_cast<std::uint64_t>(group);
        check_case(c);
    }
}

TEST(Prefill, ChunksOfEveryKind) {
    for (const std::int32_t tokens : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 200}) {
        prefill_case c;
        c.kv_heads = 1, c.group = 1 + tokens % 3, c.tokens = tokens, c.counts = {64, 64, 64, 7, 64, 64, 64, 64, 64}, c.position = 200,
        c.seed = static_cast<std::uint64_t>(tokens);
        check_case(c);
    }
}

// Every edge between a query's position and a page's: the last row seen is the query's own.
TEST(Prefill, CausalEdges) {
    for (std::int64_t position = 124; position <= 132; ++position) {
        prefill_case c;
        c.kv_heads = 1, c.group = 3, c.tokens = 66, c.counts = {64, 64, 64, 64}, c.position = position, c.seed = static_cast<std::uint64_t>(position);
        check_case(c);
    }
}

// 55, 106 and 119 reach just the last token of a block.
TEST(Prefill, SlidingWindows) {
    for (const std::int32_t window : {1, 2, 55, 63, 64, 65, 100, 106, 119, 4096}) {
        for (const std::int64_t begin : {0, 13}) {
            prefill_case c;
            c.stored = dtype::f16, c.kv_heads = 1, c.group = 5, c.window = window, c.begin = begin, c.counts = {64, 64, 9, 64, 64, 64, 12}, c.position = 254,
            c.tokens = 41, c.seed = static_cast<std::uint64_t>(window);
            check_case(c);
        }
    }
}

// More blocks than a warp looks at in one go, most of them out of the window's reach.
TEST(Prefill, LongHistoryOfShortBlocks) {
    for (const std::int32_t window : {0, 100}) {
        prefill_case c;
        c.kv_heads = 1, c.window = window, c.counts.assign(100, 5), c.position = 480, c.tokens = 15, c.seed = 3;
        check_case(c);
    }
}

TEST(Prefill, SoftCap) {
    for (const float cap : {1.0F, 20.0F, 50.0F}) {
        prefill_case c;
        c.soft_cap = cap, c.spread = 8, c.window = cap > 30 ? 90 : 0, c.counts = ragged(), c.position = 240, c.tokens = 20, c.dk = c.dv = 128,
        c.seed = static_cast<std::uint64_t>(cap);
        check_case(c);
    }
}

// One token of far more weight than others, and logits in the hundreds.
TEST(Prefill, SharpLogits) {
    prefill_case c;
    c.spread = 60, c.counts = ragged(), c.position = 240, c.tokens = 33, c.stored = dtype::f16;
    check_case(c);
}

TEST(Prefill, QueryTypesAndStrides) {
    for (const auto query : {dtype::f32, dtype::f16, dtype::bf16}) {
        for (const auto stored : {dtype::bf16, dtype::f16}) {
            for (const std::int32_t gap : {0, 3, 8}) {
                prefill_case c;
                c.query = query, c.stored = stored, c.query_gap = gap, c.counts = {64, 64, 50}, c.position = 170, c.tokens = 9, c.group = 3,
                c.seed = static_cast<std::uint64_t>(gap + 1);
                check_case(c);
            }
        }
    }
}

TEST(Prefill, NothingToSee) {
    prefill_case c;
    c.counts = {64, 64}, c.begin = 1000, c.position = 10;  // all in the future
    check_case(c);
    c.begin = 0, c.position = 4000, c.window = 50;  // all behind the window
    check_case(c);
    c.counts = {}, c.window = 0;
    check_case(c);
    c.counts = {0, 64, 0, 64, 64, 0};  // empty blocks without a page
    check_case(c);
    c.counts = {64, 64, 64}, c.begin = 12, c.position = 0, c.tokens = 100;  // the first rows see nothing
    check_case(c);
}

// Strips of history, then device pages: what one call does, up to the order in which four lanes' sums are added.
TEST(Prefill, ChainedCallsEqualOne) {
    for (const auto& cuts : std::vector<std::vector<std::int32_t>>{{1}, {4}, {2, 5}, {1, 2, 3, 4, 5, 6, 7}, {0, 8}}) {
        prefill_case c;
        c.counts = ragged(), c.position = 250, c.tokens = 50, c.group = 7, c.kv_heads = 1, c.cuts = cuts, c.dk = c.dv = 96;
        const auto several = check_case(c);
        c.cuts = {};
        const auto one = check_case(c);
        for (std::size_t i = 0; i < one.lse.size(); ++i) ASSERT_TRUE(several.lse[i] == one.lse[i] || std::abs(several.lse[i] - one.lse[i]) < 2e-6F) << i;
        for (std::size_t i = 0; i < one.out.size(); ++i) ASSERT_NEAR(several.out[i], one.out[i], 2e-6F) << i;
    }
}

TEST(Prefill, SameInputSameBits) {
    prefill_case c;
    c.counts = ragged(), c.position = 250, c.tokens = 50, c.group = 5;
    const prefill_problem problem(c);
    const auto a = problem.run({}), b = problem.run({});
    EXPECT_EQ(a.out, b.out);
    EXPECT_EQ(a.lse, b.lse);
}

TEST(Prefill, RandomCases) {
    for (std::uint64_t seed = 1; seed <= 24; ++seed) {
        std::mt19937_64 random(seed);
        const auto pick = [&](std::int64_t low, std::int64_t high) { return std::uniform_int_distribution<std::int64_t>(low, high)(random); };
        const std::int32_t sizes[] = {64, 80, 96, 128, 256};
        prefill_case c;
        c.seed = seed + 100;
        c.stored = pick(0, 1) == 0 ? dtype::bf16 : dtype::f16, c.query = static_cast<dtype>(pick(0, 2));
        c.dk = c.dv = sizes[pick(0, 3)];
        c.kv_heads = static_cast<std::int32_t>(pick(1, 3)), c.group = static_cast<std::int32_t>(pick(1, 8)), c.tokens = static_cast<std::int32_t>(pick(1, 40));
        c.counts.clear();
        for (auto n = pick(1, 9); n > 0; --n) c.counts.push_back(pick(0, 1) == 0 ? 64 : static_cast<std::int32_t>(pick(0, 64)));
        c.begin = pick(0, 1) == 0 ? 0 : pick(0, 1'000'000'000'000);
        c.position = c.begin + pick(0, 400), c.window = pick(0, 1) == 0 ? 0 : static_cast<std::int32_t>(pick(1, 300));
        c.soft_cap = pick(0, 3) == 0 ? 15.0F : 0.0F, c.query_gap = static_cast<std::int32_t>(pick(0, 2) * 4);
        if (pick(0, 1) == 0 && !c.counts.empty()) c.cuts = {static_cast<std::int32_t>(pick(0, static_cast<std::int64_t>(c.counts.size())))};
        check_case(c);
        if (HasFailure()) return;
    }
}

TEST(Prefill, RefusesShapes) {
    prefill_step step;
    step.layer.key_size = 264, step.layer.value_size = 64;
    EXPECT_THROW(prefill_attend(step, nullptr), invalid_argument);
    step.layer.key_size = 64, step.layer.value_size = 60;
    EXPECT_THROW(prefill_attend(step, nullptr), invalid_argument);
    step.layer.value_size = 64, step.layer.stored = dtype::f32;
    EXPECT_THROW(prefill_attend(step, nullptr), invalid_argument);
}

}  // namespace
}  // namespace sekv::cuda::prefill_tests
