// The memory of the CUDA backend when CUDA calls fail, and planted bugs that the other tests must see.
#include <gmock/gmock.h>

#include <array>
#include <optional>
#include <type_traits>

#include "cuda/memory_scenarios.hpp"
#include "simt/fakecuda.hpp"
#include "src/cuda/resource.hpp"
#include "src/cuda/strip.hpp"

namespace sekv::cuda {
namespace {

using fakecuda::call;

void expect_same(const slab_usage& now, const slab_usage& before, const std::string& what) {
    EXPECT_EQ(now.asked, before.asked) << what;
    EXPECT_EQ(now.held, before.held) << what;
    EXPECT_EQ(now.pending, before.pending) << what;
    EXPECT_EQ(now.reserved, before.reserved) << what;
    EXPECT_EQ(now.slabs, before.slabs) << what;
    EXPECT_EQ(now.ranges, before.ranges) << what;
}

class Faults : public in_every_mode {};
INSTANTIATE_TEST_SUITE_P(Modes, Faults, testing::ValuesIn(runtime_modes()), name_of_mode);

template <class Heap>
std::byte* take(Heap& heap, std::size_t bytes, cudaStream_t s) {
    if constexpr (std::is_same_v<Heap, device_pool>)
        return heap.allocate(bytes, s);
    else
        return heap.allocate(bytes);
}

template <class Heap>
void out_of_memory_at_every_slab() {
    const auto before = fakecuda::live_allocations();
    {
        const owned_stream s;
        Heap heap({.slab_bytes = 4 * kib});
        std::vector<std::byte*> live;
        for (int slabs = 0; slabs < 5; ++slabs) {
            const auto usage = heap.usage();
            fakecuda::fail_after(call::allocation, 0, cudaErrorMemoryAllocation);
            fakecuda::fail_after(call::allocation, 0, cudaErrorMemoryAllocation);
            EXPECT_EQ(take(heap, 3 * kib, s.get()), nullptr);
            fakecuda::clear_faults();
            expect_same(heap.usage(), usage, "after out of memory");
            EXPECT_EQ(cudaGetLastError(), cudaSuccess);
            fakecuda::fail_after(call::allocation, 0, cudaErrorMemoryAllocation);
            auto* p = take(heap, 3 * kib, s.get());
            EXPECT_NE(p, nullptr) << "a slab of the size asked for is tried next";
            EXPECT_EQ(heap.usage().reserved - usage.reserved, 3 * kib);
            live.push_back(p);
            fakecuda::clear_faults();
        }
        fakecuda::fail_after(call::allocation, 0, cudaErrorNotSupported);
        const auto usage = heap.usage();
        EXPECT_THROW((void)take(heap, 3 * kib, s.get()), device_error);
        expect_same(heap.usage(), usage, "after a refused call");
        for (auto* p : live) heap.free(p, std::array{s.get()});
    }
    EXPECT_EQ(fakecuda::live_allocations(), before);
}

TEST_P(Faults, PinnedMemoryThatRunsOutGivesNullAndChangesNothing) { out_of_memory_at_every_slab<pinned_arena>(); }
TEST_P(Faults, DeviceMemoryThatRunsOutGivesNullAndChangesNothing) { out_of_memory_at_every_slab<device_pool>(); }

TEST_P(Faults, TheDeviceItselfMayBeFull) {
    fakecuda::set_memory(40 * kib, 24 * kib);
    {
        const owned_stream s;
        device_pool pool({.slab_bytes = 16 * kib});
        pinned_arena arena({.slab_bytes = 16 * kib});
        std::vector<std::byte*> device, host;
        while (auto* p = pool.allocate(4 * kib, s.get())) device.push_back(p);
        while (auto* p = arena.allocate(4 * kib)) host.push_back(p);
        EXPECT_EQ(device.size(), 10U);
        EXPECT_EQ(host.size(), 6U);
        for (auto* p : device) pool.free(p, std::array{s.get()});
        for (auto* p : host) arena.free(p, std::array{s.get()});
        auto* large = pool.allocate(40 * kib, s.get());  // the slabs go back for it
        EXPECT_NE(large, nullptr);
        pool.free(large, {});
    }
    fakecuda::set_memory(std::size_t{8} << 30, std::size_t{8} << 30);
}

/// Everything that the memory does, once. Takes back what it took even when a call throws.
void workload(cuda_resource& r, const owned_stream& first, const owned_stream& second) {
    struct taken {
        cuda_resource& r;
        std::vector<std::pair<tier, std::byte*>> ranges;
        std::byte* take(tier t, std::size_t bytes) {
            ranges.reserve(ranges.size() + 1);
            auto* p = static_cast<std::byte*>(r.allocate(t, bytes, 64));
            if (p == nullptr) throw budget_error("nothing", bytes, 0);
            ranges.emplace_back(t, p);
            return p;
        }
        ~taken() {
            for (const auto& [t, p] : ranges) r.deallocate(t, p, 0, 64);
        }
    };
    for (int round = 0; round < 3; ++round) {
        taken t{r, {}};
        r.use(round % 2 == 0 ? first.get() : second.get());
        auto *a = t.take(tier::host, 3 * kib), *x = t.take(tier::device, 3 * kib), *y = t.take(tier::device, 4 * kib);
        r.zero(tier::host, a, 3 * kib);
        std::memset(a, 0x40 + round, 3 * kib);
        r.zero(tier::device, y, 4 * kib);
        r.copy(x, tier::device, a, tier::host, 3 * kib);
        strip s(r.copies(), y, 2 * kib, 2, r.stream());
        s.acquire(0);
        const page_range page{a, 0, 2 * kib};
        s.prefetch(0, {&page, 1});
        s.ready(0, r.stream());
        std::vector<std::byte> back(2 * kib);
        r.copy(back.data(), tier::host, y, tier::device, back.size());
        s.release(0, r.stream());
        EXPECT_EQ(back, pattern(back.size(), static_cast<unsigned>(0x40 + round)));
    }
    r.synchronize();
}

resource_options small_options() {
    return {.device = {.slab_bytes = 2 * kib, .limit = 16 * kib}, .host = {.slab_bytes = kib, .limit = 12 * kib}, .copies = {.chunk_bytes = 512, .timed_bytes = 512}};
}

// Fails the n-th call of a kind, for every n (n a multiple of `step`) until nothing fails any more.
void fail_every_call(const runtime_mode& mode, call kind, cudaError_t error, bool sticky, int step, bool (*expected)(const sekv::error&)) {
    int failures = 0;
    for (int n = 0; n < 2000; n += step) {
        const auto before = fakecuda::live_allocations();
        bool failed = false, reached = false;
        const owned_stream first, second;
        {
            const auto calls = fakecuda::calls(kind);
            fakecuda::fail_after(kind, n, error, sticky);
            if (kind == call::allocation) fakecuda::fail_after(kind, n, error, sticky);  // the second, smaller try too
            std::optional<cuda_resource> r;
            try {
                r.emplace(first.get(), small_options());
                workload(*r, first, second);
            } catch (const sekv::error& e) {
                failed = true;
                EXPECT_TRUE(expected(e)) << e.what();
            }
            reached = fakecuda::calls(kind) - calls > static_cast<std::uint64_t>(n);
            if (!sticky) fakecuda::clear_faults();
            if (r) {
                EXPECT_EQ(r->pool().usage().held, 0U);
                EXPECT_EQ(r->arena().usage().ranges, 2U) << "the staging buffers";
                EXPECT_LE(r->pool().usage().pending, 16 * kib);
                if (failed && !sticky) {
                    EXPECT_NO_THROW(workload(*r, first, second)) << "call " << n;
                }
            }
        }
        fakecuda::reset();
        apply(mode);
        EXPECT_EQ(fakecuda::live_allocations(), before) << "call " << n;
        failures += failed;
        if (!reached) break;  // a call that fails unnoticed (of a destructor, of the timing) does not end the search
    }
    EXPECT_GT(failures, 3);
}

TEST_P(Faults, AllocationsThatFailInTurnLeakNothing) {
    fail_every_call(GetParam(), call::allocation, cudaErrorMemoryAllocation, false, 1, [](const sekv::error& e) { return e.code() == errc::budget; });
}
TEST_P(Faults, CallsThatAreRefusedInTurnLeakNothing) {
    fail_every_call(GetParam(), call::any, cudaErrorNotSupported, false, 1, [](const sekv::error& e) { return e.code() == errc::device && !dynamic_cast<const device_error&>(e).lost(); });
}
TEST_P(Faults, AContextThatIsLostAtAnyCallIsSaidToBe) {
    fail_every_call(GetParam(), call::any, cudaErrorECCUncorrectable, true, GetParam().policy == fakecuda::policy::lazy ? 1 : 11, [](const sekv::error& e) { return e.code() == errc::device && dynamic_cast<const device_error&>(e).lost(); });
}

// With the fences off, the scenarios of the other tests have to go wrong: else they would prove nothing.
class PlantedBugs : public testing::Test {
protected:
    void SetUp() override {
#if defined(__SANITIZE_THREAD__)
        GTEST_SKIP() << "ThreadSanitizer reports these races, as it should, and would end the run in red.";
#endif
    }
};

TEST_F(PlantedBugs, PinnedMemoryThatIsReusedEarlyIsSeen) {
    constexpr std::size_t bytes = 32 * kib;
    fakecuda::set_policy(fakecuda::policy::lazy);
    const owned_stream s;
    pinned_arena arena({.slab_bytes = bytes, .limit = bytes});
    arena.ignore_fences_for_test(true);
    const device_bytes device(bytes);
    reuse_of_pinned_memory(arena, s.get(), device.data(), bytes);
    EXPECT_EQ(device.read(), pattern(bytes, 0x22));
}

TEST_F(PlantedBugs, DeviceMemoryThatIsReusedEarlyIsSeen) {
    constexpr std::size_t bytes = 8 * kib;
    fakecuda::set_policy(fakecuda::policy::lazy);
    const owned_stream a, b;
    device_pool pool({.slab_bytes = bytes, .limit = bytes});
    pool.ignore_fences_for_test(true);
    EXPECT_EQ(reuse_of_device_memory(pool, a.get(), b.get(), bytes), pattern(bytes, 0x52));
}

TEST_F(PlantedBugs, SequencesThatOverwriteEachOtherAreSeen) {
    for (const auto& m : runtime_modes()) {
        if (m.policy == fakecuda::policy::eager) continue;
        apply(m);
        const owned_stream streams[2];
        EXPECT_GT(two_sequences(11, streams, false).wrong, 0) << m.name << " " << m.seed;
    }
}

}  // namespace
}  // namespace sekv::cuda
