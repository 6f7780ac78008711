// Memory that is freed while the device still uses it, and given out again.
#pragma once

#include <array>
#include <cstring>

#include "cuda/memory_fixtures.hpp"
#include "oracle/random.hpp"
#include "src/cuda/device_pool.hpp"
#include "src/cuda/pinned_arena.hpp"

namespace sekv::cuda {

inline constexpr std::size_t kib = 1024;

// A copy still reads a pinned range that was freed; its place is asked for, and written by the host at once.
inline void reuse_of_pinned_memory(pinned_arena& arena, cudaStream_t s, std::byte* device, std::size_t bytes) {
    auto* old = arena.allocate(bytes);
    ASSERT_NE(old, nullptr);
    std::memset(old, 0x11, bytes);
    enqueue(device, old, bytes, cudaMemcpyHostToDevice, s);
    arena.free(old, std::array{s});
    EXPECT_EQ(arena.usage().pending, size_class(bytes));
    auto* next = arena.allocate(bytes);
    ASSERT_EQ(next, old) << "the arena has room for one";
    std::memset(next, 0x22, bytes);
    check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    arena.free(next, {});
}

// Stream a still reads a range that was freed; stream b gets it and writes. Returns what a read.
inline std::vector<std::byte> reuse_of_device_memory(device_pool& pool, cudaStream_t a, cudaStream_t b, std::size_t bytes) {
    const pinned_bytes ones(bytes, 0x51), twos(bytes, 0x52), read_a(bytes), read_b(bytes);
    auto* x = pool.allocate(bytes, a);
    EXPECT_NE(x, nullptr);
    enqueue(x, ones.data(), bytes, cudaMemcpyHostToDevice, a);
    check(cudaStreamSynchronize(a), "cudaStreamSynchronize");
    for (int i = 0; i < 8; ++i) enqueue(read_a.data(), x, bytes, cudaMemcpyDeviceToHost, a);  // more than an event query lets pass
    pool.free(x, std::array{a});
    auto* y = pool.allocate(bytes, b);
    EXPECT_EQ(y, x) << "the pool has room for one";
    enqueue(y, twos.data(), bytes, cudaMemcpyHostToDevice, b);
    enqueue(read_b.data(), y, bytes, cudaMemcpyDeviceToHost, b);
    pool.free(y, std::array{b});
    check(cudaStreamSynchronize(b), "cudaStreamSynchronize");
    EXPECT_TRUE(read_b.all(0x52));
    check(cudaStreamSynchronize(a), "cudaStreamSynchronize");
    return read_a.read();
}

struct outcome {
    int wrong = 0;
    slab_usage device, host;
};

// Two sequences on streams of their own share both heaps, which are far too small for all their pages: each page is staged in, moved, read back, and freed while all that is still in flight.
inline outcome two_sequences(std::uint32_t seed, const owned_stream (&streams)[2], bool fenced) {
    oracle::draws random(seed);
    device_pool pool({.slab_bytes = 32 * kib, .limit = 64 * kib});
    pinned_arena arena({.slab_bytes = 32 * kib, .limit = 64 * kib});
    pool.ignore_fences_for_test(!fenced);
    arena.ignore_fences_for_test(!fenced);
    constexpr int pages = 60;
    constexpr std::size_t most = 9 * kib;
    const pinned_bytes results(pages * most);
    std::vector<std::size_t> sizes(pages);
    outcome o;
    for (std::size_t page = 0; page < pages; ++page) {
        const auto s = streams[random.below(2)].get();
        const auto bytes = sizes[page] = 1 + random.below(most - 1);
        auto* staged = arena.allocate(bytes);
        auto* x = pool.allocate(bytes, s);
        auto* y = pool.allocate(bytes, s);
        EXPECT_TRUE(staged != nullptr && x != nullptr && y != nullptr);
        std::memset(staged, static_cast<int>(page + 1), bytes);
        enqueue(x, staged, bytes, cudaMemcpyHostToDevice, s);
        enqueue(y, x, bytes, cudaMemcpyDeviceToDevice, s);
        enqueue(results.data() + page * most, y, bytes, cudaMemcpyDeviceToHost, s);
        arena.free(staged, std::array{s});
        pool.free(x, std::array{s});
        pool.free(y, std::array{s});
    }
    for (const auto& s : streams) s.synchronize();
    for (std::size_t page = 0; page < pages; ++page)
        o.wrong += !std::all_of(results.data() + page * most, results.data() + page * most + sizes[page], [&](std::byte b) { return b == static_cast<std::byte>(page + 1); });
    o.device = pool.usage();
    o.host = arena.usage();
    return o;
}

}  // namespace sekv::cuda
