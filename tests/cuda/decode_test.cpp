// A whole decode step on the device against the host cache's own attention, and against double precision over the same codes.
#include <gtest/gtest.h>

#include "cuda/decode_world.hpp"

namespace sekv::cuda::decode_tests {
namespace {

// The oracle reads the same codes at the same levels: what differs is fp32 rounding, 4e-6 at most here. (A token whose probability is within rounding of tau could be read at another level; no seed here has one.)
constexpr double oracle_tolerance = 2e-5;
// The host rounds R1's partial logits to steps of up to 0.05 nat in each of 20 planes: 0.06 nat in a logit's root mean square, for what isn't zoomed. Where that is nearly nothing, and where it is all.
constexpr double host_tolerance = 0.05, unzoomed_tolerance = 0.2;

template <class T>
void check(const world_shape& s, const std::vector<sequence_shape>& sequences, const std::vector<item_shape>& items, double host_most = host_tolerance) {
    world<T> w(s, sequences);
    const auto got = w.attend(items);
    const auto precise = compare(got, w.oracle_attend(items));
    EXPECT_LT(precise.out, oracle_tolerance);
    EXPECT_LT(precise.lse, oracle_tolerance);
    const auto host = compare(got, w.host_attend(items));
    EXPECT_LT(host.out, host_most);
    EXPECT_LT(host.lse, host_most);
}

// Two epochs, a tail, and a last sealed block that the first split's sinks stand beside.
sequence_shape sealed(std::int64_t prompt = 700, std::int64_t decoded = 5) { return {prompt, decoded, 0.45, -1}; }

TEST(Decode, AllGroups) {
    for (const std::int32_t group : {1, 2, 3, 4, 5, 7, 8, 16}) {
        SCOPED_TRACE(group);
        world_shape s;
        s.group = group, s.kv_heads = 1, s.seed = static_cast<std::uint32_t>(group);
        group % 2 == 0 ? check<bf16>(s, {sealed()}, {{0, 1}}) : check<fp16>(s, {sealed()}, {{0, 1}});
    }
}

TEST(Decode, AllHeadSizes) {
    const std::int32_t sizes[][2] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {64, 128}, {128, 64}};
    for (const auto& d : sizes) {
        SCOPED_TRACE(std::to_string(d[0]) + " " + std::to_string(d[1]));
        world_shape s;
        s.dk = d[0], s.dv = d[1], s.group = 2, s.kv_heads = 1, s.query = dtype::bf16;
        check<bf16>(s, {sealed()}, {{0, 1}});
    }
}

TEST(Decode, Batches) {
    world_shape s;
    s.group = 3;
    check<bf16>(s, {sealed(700, 9), {30, 2, 2.0, -1}, sealed(1100, 0), {0, 0, 2.0, -1}, sealed(333, 70)}, {{0, 1}, {-1, 2}, {1, 1}, {2, 3}, {3, 1}, {4, 2}, {-1, 1}});
}

// Drafts whose first queries don't see the last sealed block whole: a truncation has brought the sequence's end back to it.
TEST(Decode, DraftsIntoSealedHistory) {
    world_shape s;
    s.group = 2;
    check<bf16>(s, {{700, 0, 0.45, 250}, {700, 0, 0.45, 230}}, {{0, 9}, {1, 40}});
}

TEST(Decode, SoftCapAndSinks) {
    for (const std::int32_t sinks : {0, 1, 3, 7}) {
        SCOPED_TRACE(sinks);
        world_shape s;
        s.sinks = sinks, s.soft_cap = 8, s.group = 4, s.kv_heads = 1;
        check<bf16>(s, {sealed()}, {{0, 2}});
    }
}

TEST(Decode, LargestOfGroupAndCap) {
    world_shape s;
    s.codec.rule = zoom_rule::max, s.group = 4;
    check<bf16>(s, {sealed()}, {{0, 1}});
    for (const std::int32_t cap : {0, 7, 40}) {
        SCOPED_TRACE(cap);
        s.codec.rule = zoom_rule::mean, s.codec.cap = cap;
        check<bf16>(s, {sealed()}, {{0, 2}}, unzoomed_tolerance);
    }
    s.codec.cap = 1024, s.codec.tau = 1;  // never
    check<bf16>(s, {sealed()}, {{0, 1}}, unzoomed_tolerance);
    s.codec.cap = 1024, s.codec.tau = 1e-6F;  // nearly always
    check<bf16>(s, {sealed(400)}, {{0, 1}});
}

TEST(Decode, ExactTier) {
    for (const std::int32_t cap : {1024, 10}) {
        world_shape s;
        s.codec.exact_tier = true, s.codec.cap = cap, s.group = 3;
        check<fp16>(s, {sealed()}, {{0, 2}}, unzoomed_tolerance);
    }
}

TEST(Decode, LineCacheChangesTimeOnly) {
    world_shape s;
    s.codec.line_slots = 32, s.group = 2;
    const world<bf16> w(s, {sealed()});
    const std::vector<item_shape> items{{0, 1}};
    const auto cold = w.attend(items);
    const auto batch = w.make_batch(items, w.bounds(items));
    for (int i = 0; i < 2; ++i) {  // warm now
        attend_decode(batch.step, nullptr);
        EXPECT_EQ(world<bf16>::read(batch), cold);
    }
    s.codec.line_slots = 0;
    EXPECT_EQ(world<bf16>(s, {sealed()}).attend(items), cold);
}

TEST(Decode, LargerBoundsChangeNothing) {
    world_shape s;
    s.kv_heads = 1;
    const world<bf16> w(s, {sealed()});
    const std::vector<item_shape> items{{0, 1}};
    auto b = w.bounds(items);
    b.exact_blocks += 30, b.segments += 20, b.epochs += 3, b.key_bases += 2;
    EXPECT_EQ(w.attend(items, b), w.attend(items));
}

TEST(Decode, SameBitsUnderAllSchedules) {
    world_shape s;
    s.kv_heads = 1, s.group = 3, s.codec.cap = 20;
    const world<bf16> w(s, {sealed(500)});
    const std::vector<item_shape> items{{0, 2}, {-1, 1}};
    const auto expected = w.attend(items);
    rows_tests::under_schedules(5, [&] { EXPECT_EQ(w.attend(items), expected); });
}

}  // namespace
}  // namespace sekv::cuda::decode_tests
