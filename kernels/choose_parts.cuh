// What choosing is made of: the thread block's shared memory, scans over it, and the cap's boundary by radix select.
#pragma once

#include "kernels/decode_parts.cuh"
#include "kernels/line_cache.cuh"

namespace sekv::cuda::choosing {

inline constexpr int choose_threads = 256, choose_warps = choose_threads / 32;
inline constexpr int radix = 256;
inline constexpr int in_flight = 4;  // 16-byte reads of host memory per thread

enum line_state : std::int32_t { line_ready = 0, line_missing = 1 };  // zoomed_token::unused while lines are being found

struct choose_shared {
    shared_array<int, choose_threads + 1> offset;  // candidates before each of the segments at hand
    shared_array<int, choose_threads> first;       // where its part of the list begins
    shared_array<int, choose_threads> group;       // entry that its (epoch, keys) began with
    shared_array<int, radix> bins;
    shared_array<int, 2 * choose_warps> totals;
    shared_array<int, 2> digit;                    // the cut's next digit, and how many of the cut itself are still to keep
    shared_array<int, 1> hits;                     // of the row
    shared_array<int, 1> fetched;                  // lines that the item brought ahead
    shared_array<int, choose_threads> entry, slot;  // of misses at hand
    shared_array<std::int64_t, choose_threads> position;
    shared_array<const std::uint8_t*, choose_threads> source;
};

// What the row's steps share. `now`: the cache's clock during this launch.
struct chooser {
    const decode_step& step;
    const decode_workspace& w;
    choose_shared& s;
    const sequence_view* sequence;
    cache_view cache;
    std::int64_t place;  // of (row, head)
    int head, tid, lane, warp, candidates;
    std::uint8_t now;
};

struct sum_of {
    static __device__ __forceinline__ int apply(int a, int b) { return a + b; }
};
struct largest_of {
    static __device__ __forceinline__ int apply(int a, int b) { return a < b ? b : a; }
};

// Scan over the thread block, own value included; identity 0. totals: one int per warp, free again after the next barrier.
template <class Op>
__device__ __forceinline__ int scan(int value, int lane, int warp, int* totals) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(whole_warp, value, static_cast<unsigned>(step));
        if (lane >= step) value = Op::apply(below, value);
    }
    if (lane == 31) totals[warp] = value;
    __syncthreads();
    int before = 0;
    for (int i = 0; i < warp; ++i) before = Op::apply(before, totals[i]);
    return Op::apply(before, value);
}

// How many threads before this one have the flag, and how many have it in all.
struct flag_count {
    int before, all;
};
__device__ __forceinline__ flag_count count_flags(unsigned ballot, int lane, int warp, const int* totals) {
    flag_count c{__popc(ballot & ((1u << lane) - 1u)), 0};
    for (int i = 0; i < choose_warps; ++i) {
        const int n = totals[i];
        if (i < warp) c.before += n;
        c.all += n;
    }
    return c;
}

// The cap's boundary: masses above `bits` (as an integer; masses are not negative) stay, and of those equal to it the first `ties`.
struct mass_cut {
    unsigned bits;
    int ties;
};

// From the largest bin down: the one in which the `left`-th largest lies.
__device__ __forceinline__ void find_digit(const chooser& x, int left) {
    constexpr int per_lane = radix / 32;
    int sum = 0;
    for (int i = 0; i < per_lane; ++i) sum += x.s.bins[radix - 1 - (x.lane * per_lane + i)];
    int up_to = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(whole_warp, up_to, static_cast<unsigned>(step));
        if (x.lane >= step) up_to += below;
    }
    int before = up_to - sum;
    if (before >= left || up_to < left) return;
    int bin = radix - 1 - x.lane * per_lane;
    for (; before + x.s.bins[bin] < left; --bin) before += x.s.bins[bin];
    x.s.digit[0] = bin;
    x.s.digit[1] = left - before;
}

// The cap-th largest mass by radix select, a digit of 8 bits at a time. The list's order doesn't matter here.
__device__ __forceinline__ mass_cut find_cut(const chooser& x) {
    const candidate* list = x.w.list + x.place * x.w.candidates;
    unsigned bits = 0, known = 0;
    int left = x.step.bounds.cap;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = x.tid; i < radix; i += choose_threads) x.s.bins[i] = 0;
        __syncthreads();
        for (int i = x.tid; i < x.candidates; i += choose_threads) {
            const auto mass = static_cast<unsigned>(__float_as_int(list[i].mass));
            if ((mass & known) == bits) atomicAdd(&x.s.bins[static_cast<int>(mass >> shift & 255u)], 1);
        }
        __syncthreads();
        if (x.warp == 0) find_digit(x, left);
        __syncthreads();
        bits |= static_cast<unsigned>(x.s.digit[0]) << shift;
        known |= 255u << shift;
        left = x.s.digit[1];
    }
    return {bits, left};
}

}  // namespace sekv::cuda::choosing
