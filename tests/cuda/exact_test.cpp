// Decode attention over exact rows alone: the whole attention while a sequence fits its quota.
#include <gtest/gtest.h>

#include "cuda/decode_world.hpp"

namespace sekv::cuda::decode_tests {
namespace {

// fp32 sums of products of rounded inputs, over some hundreds of tokens, and exponentials to 2 ulp: 1e-6 and a little.
constexpr double tolerance = 4e-6;

template <class T>
void check(const world_shape& s, const std::vector<sequence_shape>& sequences, const std::vector<item_shape>& items, double most = tolerance) {
    const world<T> w(s, sequences);
    const auto got = w.attend(items);
    const auto d = compare(got, w.oracle_attend(items));
    EXPECT_LT(d.out, most);
    EXPECT_LT(d.lse, most * 4);
}

// Share 2: everything stays exact.
sequence_shape exact(std::int64_t tokens) { return {tokens, 0, 2.0, -1}; }

TEST(DecodeExact, AllGroupsAndTypes) {
    for (const std::int32_t group : {1, 2, 3, 4, 5, 7, 8, 11, 16}) {
        SCOPED_TRACE(group);
        world_shape s;
        s.group = group, s.seed = static_cast<std::uint32_t>(group);
        check<bf16>(s, {exact(233)}, {{0, 1}});
        s.query = dtype::f16;
        check<fp16>(s, {exact(105)}, {{0, 1}});
    }
}

TEST(DecodeExact, AllHeadSizes) {
    const std::int32_t sizes[][2] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {64, 128}, {128, 64}, {256, 80}, {80, 256}, {96, 64}};
    for (const auto& d : sizes) {
        SCOPED_TRACE(std::to_string(d[0]) + " " + std::to_string(d[1]));
        world_shape s;
        s.dk = d[0], s.dv = d[1], s.group = 3, s.query = dtype::bf16;
        s.kv_heads = 1;
        check<bf16>(s, {exact(430)}, {{0, 1}});
        s.group = 16;
        check<fp16>(s, {exact(105)}, {{0, 1}});
    }
}

// Lengths that end anywhere in a page, a split, a batch; padding rows before, between and behind.
TEST(DecodeExact, RaggedBatches) {
    world_shape s;
    s.group = 2, s.kv_heads = 3;
    check<bf16>(s, {exact(1), exact(41), exact(42), exact(104), exact(233), exact(234), exact(650), exact(489)}, {{-1, 2}, {0, 1}, {1, 1}, {2, 1}, {-1, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1}, {7, 1}, {-1, 3}});
}

// Queries of a draft, the first of which see none of the last page.
TEST(DecodeExact, Drafts) {
    world_shape s;
    s.group = 5;
    check<bf16>(s, {exact(300), exact(12)}, {{0, 9}, {1, 12}});
}

TEST(DecodeExact, SlidingWindows) {
    for (const std::int32_t window : {1, 9, 64, 200, 1000}) {
        SCOPED_TRACE(window);
        world_shape s;
        s.window = window, s.group = 4;
        check<bf16>(s, {exact(400), exact(30)}, {{0, 3}, {1, 2}, {-1, 1}});
    }
}

TEST(DecodeExact, SoftCap) {
    world_shape s;
    s.soft_cap = 5, s.query_gain = 3;
    check<fp16>(s, {exact(300)}, {{0, 2}});
    s.window = 100;
    check<bf16>(s, {exact(300)}, {{0, 2}});
}

// Sharp attention: maxima that grow from page to page.
TEST(DecodeExact, LargeLogits) {
    world_shape s;
    s.query_gain = 30;
    check<bf16>(s, {exact(700)}, {{0, 4}}, 2e-4);  // a logit of some hundreds has an ulp of 3e-5
}

TEST(DecodeExact, EmptyAndPadding) {
    const world<bf16> w({}, {{0, 0, 2.0, -1}, {30, 0, 2.0, -1}});
    const auto r = w.attend({{-1, 1}, {0, 1}, {1, 1}});
    const auto n = static_cast<std::size_t>(w.query_heads());
    for (std::size_t i = 0; i < 2 * n; ++i) EXPECT_EQ(r.lse[i], -std::numeric_limits<float>::infinity());
    for (std::size_t i = 0; i < 2 * n * 64; ++i) EXPECT_EQ(r.out[i], 0.0F);
    for (std::size_t i = 2 * n; i < 3 * n; ++i) EXPECT_TRUE(std::isfinite(r.lse[i]));
}

// A plan made for longer sequences and more history gives the same bits, and a null lse writes none.
TEST(DecodeExact, LargerBoundsChangeNothing) {
    const world<bf16> w({}, {exact(333)});
    const std::vector<item_shape> items{{0, 2}};
    const auto expected = w.attend(items);
    auto b = w.bounds(items);
    b.exact_blocks += 40;
    EXPECT_EQ(w.attend(items, b), expected);
    auto batch = w.make_batch(items, b);
    batch.step.lse = nullptr;
    attend_decode(batch.step, nullptr);
    const auto r = world<bf16>::read(batch);
    EXPECT_EQ(r.out, expected.out);
    EXPECT_TRUE(std::isnan(r.lse[0]));
}

TEST(DecodeExact, SameBitsUnderAllSchedules) {
    for (const std::int32_t size : {64, 256}) {
        world_shape s;
        s.dk = s.dv = size, s.group = 16, s.kv_heads = 1;
        const world<bf16> w(s, {exact(300)});
        const std::vector<item_shape> items{{0, 1}};
        const auto expected = w.attend(items);
        EXPECT_LT(compare(expected, w.oracle_attend(items)).out, tolerance);
        rows_tests::under_schedules(4, [&] { EXPECT_EQ(w.attend(items), expected); });
    }
}

// Each split's partial sums are its own rows' alone, and those past a sequence's end say that they are empty.
TEST(DecodeExact, SplitsAreIndependent) {
    world_shape s;
    s.kv_heads = 1, s.group = 2;
    const world<bf16> w(s, {exact(41 + 64 * 3), exact(20)});
    const std::vector<item_shape> items{{0, 1}, {1, 1}};
    auto b = w.bounds(items);
    b.exact_blocks = 9;
    const auto batch = w.make_batch(items, b);
    const auto ws = cut_workspace(w.layer, b, batch.step.workspace);
    ASSERT_EQ(ws.exact_splits, 3);
    launch_score_exact(batch.step, ws, nullptr);
    rows_tests::finish();
    std::vector<partial_sum> sums(2 * 3 * 2);
    ASSERT_EQ(cudaMemcpy(sums.data(), ws.sums, sums.size() * sizeof(partial_sum), cudaMemcpyDefault), cudaSuccess);
    for (std::size_t i = 0; i < sums.size(); ++i) {
        const auto split = i / 2 % 3;
        EXPECT_EQ(sums[i].weight > 0, split == 0) << i;
        EXPECT_EQ(std::isinf(sums[i].max), split > 0) << i;
    }
}

}  // namespace
}  // namespace sekv::cuda::decode_tests
