// One KV head's line cache as kernels see it: set-associative, 32 ways, so that a set's tags are one 64-byte line and a warp holds a set.
#pragma once

#include "kernels/line_cache.hpp"
#include "kernels/warp.cuh"

namespace sekv::cuda {

struct cache_view {
    unsigned char* lines;
    std::uint16_t* tags;    ///< 0: empty
    std::uint8_t* clocks;
    std::uint8_t* now;
    std::int32_t sets, stride;

    [[nodiscard]] __device__ __forceinline__ int set_of(std::int64_t position) const { return static_cast<int>(position % sets); }
    [[nodiscard]] __device__ __forceinline__ std::uint16_t tag_of(std::int64_t position) const { return static_cast<std::uint16_t>(position / sets + 1); }
    [[nodiscard]] __device__ __forceinline__ std::int64_t position_of(int slot) const { return static_cast<std::int64_t>(tags[slot] - 1) * sets + slot / cache_ways; }
    [[nodiscard]] __device__ __forceinline__ unsigned char* line(int slot) const { return lines + static_cast<std::int64_t>(slot) * stride; }
};

/// base: of the head.
__device__ __forceinline__ cache_view view_cache(std::byte* base, std::int32_t slots, std::int32_t stride) {
    auto* lines = reinterpret_cast<unsigned char*>(base);
    auto* tags = lines + static_cast<std::int64_t>(slots) * stride;
    return {lines, reinterpret_cast<std::uint16_t*>(tags), tags + 2 * static_cast<std::int64_t>(slots), tags + 3 * static_cast<std::int64_t>(slots), slots / cache_ways, stride};
}

/// Slot of a position; -1 where the cache lacks it. For one thread.
__device__ __forceinline__ int find_line(const cache_view& c, std::int64_t position) {
    const int first = c.set_of(position) * cache_ways;
    const unsigned tag = c.tag_of(position);
    uint4 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = load16(c.tags + first + i * 8);
    int found = -1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if ((pairs[k] & 0xffffu) == tag) found = first + i * 8 + k * 2;
            if (pairs[k] >> 16 == tag) found = first + i * 8 + k * 2 + 1;
        }
    }
    return found;
}

/// Gives a position the slot of its set that was used longest ago, marked as used at `now`; -1 when every way serves this very call (clock == now). For a whole warp, a way per lane:
/// a lane reads only what it wrote itself, so that calls by one warp need nothing between them.
__device__ __forceinline__ int claim_line(const cache_view& c, std::int64_t position, std::uint8_t now, int lane) {
    const int slot = c.set_of(position) * cache_ways + lane;
    const int age = c.tags[slot] == 0 ? 256 : static_cast<std::uint8_t>(now - c.clocks[slot]);
    const int oldest = warp_max(age * cache_ways + cache_ways - 1 - lane);  // the first way among equals
    if (oldest < cache_ways) return -1;
    const int way = cache_ways - 1 - oldest % cache_ways;
    if (lane == way) {
        c.tags[slot] = c.tag_of(position);
        c.clocks[slot] = now;
    }
    return c.set_of(position) * cache_ways + way;
}

/// Bucket of latency_histogram (tier/transfer.hpp) for a duration, which is cut at 4.29 s.
__device__ __forceinline__ int latency_bucket(unsigned long long nanoseconds) {
    const unsigned ns = nanoseconds < 0xffffffffull ? static_cast<unsigned>(nanoseconds) : 0xffffffffu;
    if (ns < 8) return static_cast<int>(ns);
    const int octave = 28 - __clz(static_cast<int>(ns));  // ns >> octave is 8 to 15
    return octave * 8 + static_cast<int>(ns >> octave);
}

}  // namespace sekv::cuda
