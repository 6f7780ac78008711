// The slab heap under both tiers: what it gives, what it counts, and that nothing is reused early.
#include <gmock/gmock.h>

#include <map>
#include <optional>

#include "cuda/memory_scenarios.hpp"

namespace sekv::cuda {
namespace {

TEST(SizeClasses, AreMultiplesOf256AndWasteAtMostASixteenth) {
    std::size_t before = 0;
    for (std::size_t bytes = 0; bytes < 300 * kib; bytes += 37) {
        const auto size = size_class(bytes);
        EXPECT_EQ(size % range_alignment, 0U) << bytes;
        EXPECT_GE(size, std::max<std::size_t>(bytes, 1));
        EXPECT_GE(size, before);
        EXPECT_EQ(size_class(size), size);
        EXPECT_LE(size - bytes, std::max<std::size_t>(range_alignment, bytes / 16)) << bytes;
        before = size;
    }
    EXPECT_EQ(size_class(~std::size_t{0}), 0U);
    EXPECT_EQ(size_class(std::size_t{1} << 60), std::size_t{1} << 60);
}

class Heaps : public in_every_mode {
protected:
    owned_stream first_, second_;
    [[nodiscard]] std::vector<cudaStream_t> both() const { return {first_.get(), second_.get()}; }
    [[nodiscard]] std::vector<cudaStream_t> only(const owned_stream& s) const { return {s.get()}; }
};
INSTANTIATE_TEST_SUITE_P(Modes, Heaps, testing::ValuesIn(runtime_modes()), name_of_mode);

TEST_P(Heaps, GiveAlignedRangesThatDoNotOverlapAndCountEveryByte) {
    constexpr std::uint32_t seed = 731;
    SCOPED_TRACE("seed " + std::to_string(seed));
    oracle::draws random(seed);
    pinned_arena arena({.slab_bytes = 64 * kib, .limit = 512 * kib});
    std::map<std::byte*, std::size_t> live;
    std::uint64_t asked = 0, held = 0;
    for (int i = 0; i < 2000; ++i) {
        if (live.empty() || random.uniform() < 0.55) {
            const auto bytes = 1 + random.below<std::size_t>(random.uniform() < 0.1 ? 100 * kib : 5 * kib);
            auto* p = arena.allocate(bytes);
            if (p == nullptr) {
                EXPECT_GT(held + size_class(bytes), 256 * kib) << "refused " << bytes << " bytes while " << held << " are held";
                continue;
            }
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % range_alignment, 0U);
            const auto behind = live.lower_bound(p);
            EXPECT_TRUE(behind == live.end() || p + bytes <= behind->first);
            EXPECT_TRUE(behind == live.begin() || std::prev(behind)->first + std::prev(behind)->second <= p);
            EXPECT_TRUE(arena.contains(p) && arena.contains(p + bytes - 1));
            live[p] = bytes;
            asked += bytes;
            held += size_class(bytes);
        } else {
            auto victim = live.begin();
            std::advance(victim, random.below(live.size()));
            arena.free(victim->first, {});
            asked -= victim->second;
            held -= size_class(victim->second);
            live.erase(victim);
        }
        const auto use = arena.usage();
        ASSERT_EQ(use.asked, asked);
        ASSERT_EQ(use.held, held);
        ASSERT_EQ(use.ranges, live.size());
        ASSERT_LE(use.reserved, 512 * kib);
        ASSERT_LE(use.held + use.pending, use.reserved);
        ASSERT_GE(use.most_held, use.held);
    }
    for (const auto& [p, bytes] : live) arena.free(p, {});
    arena.trim();
    const auto end = arena.usage();
    EXPECT_EQ(end.asked, 0U);
    EXPECT_EQ(end.held, 0U);
    EXPECT_EQ(end.pending, 0U);
    EXPECT_EQ(end.reserved, 0U);
    EXPECT_EQ(end.slabs, 0U);
    EXPECT_EQ(end.waits, 0U);
}

TEST_P(Heaps, JoinUnusedNeighbours) {
    pinned_arena arena({.slab_bytes = 64 * kib, .limit = 64 * kib});
    std::vector<std::byte*> quarters(4);
    for (auto& q : quarters) q = arena.allocate(16 * kib);
    EXPECT_THAT(quarters, testing::Each(testing::NotNull()));
    EXPECT_EQ(arena.allocate(1), nullptr);
    for (const auto i : {2, 0, 1, 3}) arena.free(quarters[static_cast<std::size_t>(i)], {});
    auto* whole = arena.allocate(64 * kib);
    EXPECT_NE(whole, nullptr);
    arena.free(whole, {});
}

TEST_P(Heaps, TakeLargeSlabsSmallRestsAndGiveUnusedSlabsBack) {
    pinned_arena arena({.slab_bytes = 16 * kib, .limit = 100 * kib});
    auto* large = arena.allocate(60 * kib);
    ASSERT_NE(large, nullptr);
    EXPECT_EQ(arena.usage().reserved, size_class(60 * kib));
    auto* small = arena.allocate(kib);
    auto* rest = arena.allocate(20 * kib);  // a slab of its own, too
    ASSERT_NE(rest, nullptr);
    EXPECT_EQ(arena.usage().slabs, 3U);
    EXPECT_EQ(arena.allocate(60 * kib), nullptr);
    arena.free(large, {});
    EXPECT_EQ(arena.allocate(65 * kib), nullptr) << "16 + 20 KiB are in use";
    auto* other = arena.allocate(64 * kib);  // fits because the unused slab goes back
    EXPECT_NE(other, nullptr);
    EXPECT_EQ(arena.usage().reserved, (16 + 20 + 64) * kib);
    for (auto* p : {small, other, rest}) arena.free(p, {});
    EXPECT_EQ(arena.trim(), (16 + 20 + 64) * kib);
    EXPECT_FALSE(arena.contains(rest));
}

TEST_P(Heaps, PinnedMemoryWaitsForTheCopiesThatReadIt) {
    constexpr std::size_t bytes = 32 * kib;
    pinned_arena arena({.slab_bytes = bytes, .limit = bytes});
    const device_bytes device(bytes);
    reuse_of_pinned_memory(arena, first_.get(), device.data(), bytes);
    EXPECT_EQ(device.read(), pattern(bytes, 0x11));
    EXPECT_LE(arena.usage().waits, 1U);
    EXPECT_EQ(arena.usage().reordered, 0U);
}

TEST_P(Heaps, AFullArenaWaitsForTheOldestAndRefusesOnlyWhenNothingIsPending) {
    constexpr std::size_t bytes = 16 * kib;
    pinned_arena arena({.slab_bytes = 4 * bytes, .limit = 4 * bytes + kib});  // the rest is too small for a slab that helps
    const device_bytes device(bytes), other(bytes);
    std::vector<std::byte*> ranges(4);
    for (auto& r : ranges) {
        r = arena.allocate(bytes);
        ASSERT_NE(r, nullptr);
        std::memset(r, 0x33, bytes);
    }
    EXPECT_EQ(arena.allocate(bytes), nullptr);
    EXPECT_EQ(arena.usage().waits, 0U) << "nothing is pending";
    enqueue(device.data(), ranges[0], bytes, cudaMemcpyHostToDevice, first_.get());
    arena.free(ranges[0], only(first_));
    ranges[0] = arena.allocate(bytes);
    EXPECT_NE(ranges[0], nullptr);
    enqueue(device.data(), ranges[1], bytes, cudaMemcpyHostToDevice, first_.get());
    enqueue(other.data(), ranges[2], bytes, cudaMemcpyHostToDevice, second_.get());
    arena.free(ranges[1], only(first_));
    arena.free(ranges[2], both());
    auto* two = arena.allocate(2 * bytes);  // both have to be waited for
    EXPECT_NE(two, nullptr);
    EXPECT_EQ(arena.usage().pending, 0U);
    EXPECT_EQ(arena.allocate(bytes), nullptr);
    EXPECT_EQ(arena.usage().slabs, 1U);
    first_.synchronize();
    second_.synchronize();
}

TEST_P(Heaps, DeviceMemoryIsReusedAtOnceOnTheSameStream) {
    constexpr std::size_t bytes = 8 * kib;
    device_pool pool({.slab_bytes = bytes, .limit = bytes});
    const pinned_bytes a(bytes, 0x41), b(bytes, 0x42), out_a(bytes), out_b(bytes);
    auto* x = pool.allocate(bytes, first_.get());
    ASSERT_NE(x, nullptr);
    enqueue(x, a.data(), bytes, cudaMemcpyHostToDevice, first_.get());
    enqueue(out_a.data(), x, bytes, cudaMemcpyDeviceToHost, first_.get());
    pool.free(x, only(first_));
    auto* y = pool.allocate(bytes, first_.get());
    EXPECT_EQ(y, x);
    EXPECT_EQ(pool.usage().waits, 0U);
    enqueue(y, b.data(), bytes, cudaMemcpyHostToDevice, first_.get());
    enqueue(out_b.data(), y, bytes, cudaMemcpyDeviceToHost, first_.get());
    pool.free(y, only(first_));
    first_.synchronize();
    EXPECT_TRUE(out_a.all(0x41));
    EXPECT_TRUE(out_b.all(0x42));
}

TEST_P(Heaps, DeviceMemoryThatOneStreamReadsIsNotOverwrittenByAnother) {
    constexpr std::size_t bytes = 8 * kib;
    device_pool pool({.slab_bytes = bytes, .limit = bytes});
    EXPECT_EQ(reuse_of_device_memory(pool, first_.get(), second_.get(), bytes), pattern(bytes, 0x51));
    EXPECT_EQ(pool.usage().waits, 0U) << "the device orders the streams, the host doesn't wait";
}

TEST_P(Heaps, RangesOfOtherSizesAreWaitedForAndJoined) {
    constexpr std::size_t bytes = 8 * kib;
    device_pool pool({.slab_bytes = 2 * bytes, .limit = 2 * bytes});
    const pinned_bytes ones(2 * bytes, 0x61), read(2 * bytes);
    auto* x = pool.allocate(bytes, first_.get());
    auto* y = pool.allocate(bytes, second_.get());
    enqueue(x, ones.data(), bytes, cudaMemcpyHostToDevice, first_.get());
    enqueue(read.data(), x, bytes, cudaMemcpyDeviceToHost, first_.get());
    enqueue(y, ones.data(), bytes, cudaMemcpyHostToDevice, second_.get());
    enqueue(read.data() + bytes, y, bytes, cudaMemcpyDeviceToHost, second_.get());
    pool.free(x, only(first_));
    pool.free(y, only(second_));
    auto* z = pool.allocate(2 * bytes, first_.get());
    ASSERT_NE(z, nullptr);
    check(cudaMemsetAsync(z, 0, 2 * bytes, first_.get()), "cudaMemsetAsync");
    first_.synchronize();
    second_.synchronize();
    EXPECT_TRUE(read.all(0x61));
    pool.free(z, only(first_));
}

TEST_P(Heaps, TwoSequencesOnTwoStreamsNeverSeeEachOthersPages) {
    for (const std::uint32_t seed : {11U, 12U, 13U}) {
        const owned_stream streams[2];
        const auto o = two_sequences(seed, streams, true);
        EXPECT_EQ(o.wrong, 0) << "seed " << seed;
        EXPECT_EQ(o.device.held + o.host.held, 0U);
    }
}

TEST_P(Heaps, AStreamThatIsForgottenMayBeDestroyed) {
    constexpr std::size_t bytes = 8 * kib;
    device_pool pool({.slab_bytes = 2 * bytes, .limit = 2 * bytes});
    const pinned_bytes ones(bytes, 0x71), read(bytes);
    std::optional<owned_stream> passing(std::in_place);
    auto* x = pool.allocate(bytes, passing->get());
    auto* y = pool.allocate(bytes, second_.get());
    enqueue(x, ones.data(), bytes, cudaMemcpyHostToDevice, passing->get());
    enqueue(read.data(), x, bytes, cudaMemcpyDeviceToHost, passing->get());
    pool.free(x, std::array{passing->get(), first_.get()});
    pool.free(y, both());
    pool.forget(passing->get());
    EXPECT_TRUE(read.all(0x71));
    passing.reset();
    auto* z = pool.allocate(2 * bytes, second_.get());
    EXPECT_NE(z, nullptr);
    pool.free(z, both());
    pool.forget(first_.get());
    z = pool.allocate(2 * bytes, second_.get());
    EXPECT_NE(z, nullptr);
    pool.free(z, only(second_));
}

TEST_P(Heaps, MoreStreamsThanAreToldApartAreWaitedFor) {
    constexpr std::size_t bytes = kib;
    device_pool pool({.slab_bytes = bytes, .limit = bytes});
    const pinned_bytes ones(bytes, 0x81), twos(bytes, 0x82), read(bytes);
    std::vector<owned_stream> streams(slab_heap::most_streams + 3);
    for (auto& s : streams) {
        auto* x = pool.allocate(bytes, s.get());
        ASSERT_NE(x, nullptr);
        enqueue(x, ones.data(), bytes, cudaMemcpyHostToDevice, s.get());
        s.synchronize();
        enqueue(read.data(), x, bytes, cudaMemcpyDeviceToHost, s.get());
        pool.free(x, std::array{s.get()});
    }
    auto* x = pool.allocate(bytes, first_.get());
    enqueue(x, twos.data(), bytes, cudaMemcpyHostToDevice, first_.get());
    first_.synchronize();
    for (auto& s : streams) s.synchronize();
    EXPECT_TRUE(read.all(0x81));
    pool.free(x, only(first_));
}

TEST(HeapsDeathTest, ADoubleFreeEndsTheProgram) {
    pinned_arena arena({.slab_bytes = 4 * kib, .limit = 4 * kib});
    auto* p = arena.allocate(kib);
    arena.free(p, {});
    EXPECT_DEATH(arena.free(p, {}), "");
    EXPECT_DEATH(arena.free(p + 256, {}), "");
    arena.free(nullptr, {});
}

}  // namespace
}  // namespace sekv::cuda
