// Which tokens of a segment become candidates for the zoom: masses, flags, and their place in the list.
#pragma once

#include "kernels/segment_work.cuh"

namespace sekv::cuda::routing {

/// The statistic of a group's probabilities that decides on a zoom, and by which candidates are ranked: their mean, or their largest. Entries past the group are 0.
struct largest {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct total {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
__device__ __forceinline__ float mass_unit(const decode_step& step) { return step.bounds.largest_of_group ? 1.0f : 1.0f / static_cast<float>(step.layer.group); }

template <int G>
using quad_mass = float[G < 8 ? 1 : 2][word_tokens];  ///< of a lane's tokens

/// A lane's own queries first, then those of the lanes that hold the others.
template <int G, class F>
__device__ __forceinline__ void merge_masses(const quads<G>& p, F merged, quad_mass<G>& mass) {
#pragma unroll
    for (int t = 0; t < word_tokens; ++t) {
#pragma unroll
        for (int i = 0; i < lane_quads<G>; ++i) {
#pragma unroll
            for (const auto& head : p[i]) mass[i % 2][t] = merged(mass[i % 2][t], head[t]);
        }
#pragma unroll
        for (int step = 1; step < head_lanes<G>; step *= 2) {
#pragma unroll
            for (auto& quad : mass) quad[t] = merged(quad[t], __shfl_xor_sync(whole_warp, quad[t], step));
        }
    }
}

/// Which of block b's tokens exceed tau, a bit each. Most blocks have none, and keep their zeros.
template <int G>
__device__ __forceinline__ void put_flags(const work& x, int b, int lane, const quad_mass<G>& mass) {
    const float tau = x.step.bounds.tau, unit = mass_unit(x.step);
    bool any = false;
#pragma unroll
    for (const auto& quad : mass) any = any || fmaxf(fmaxf(quad[0], quad[1]), fmaxf(quad[2], quad[3])) * unit > tau;
    if (!__any_sync(whole_warp, any)) return;
    unsigned first = 0, second = 0;
#pragma unroll
    for (int t = 0; t < word_tokens; ++t) {
        // Lane 4 r has token 4 r + t; the token 32 behind it is in lane 4 r + 2, or in the same lane's second quad.
        const unsigned low = __ballot_sync(whole_warp, mass[0][t] * unit > tau), high = G < 8 ? low >> 2 : __ballot_sync(whole_warp, mass[G < 8 ? 0 : 1][t] * unit > tau);
        first |= (low & 0x11111111u) << t;
        second |= (high & 0x11111111u) << t;
    }
    if (lane != 0) return;
    x.of<unsigned>(x.cut.flags)[2 * b] = first;
    x.of<unsigned>(x.cut.flags)[2 * b + 1] = second;
}

/// What the reservation leaves: offsets[0, 32) of each word of flags, then where the segment's part of the list begins and how many of its candidates fit.
inline constexpr int list_first = 32, list_kept = 33;

/// One warp: reserves room in the list. Probabilities sum up to 1, so that the list can't overflow but for faulty rounding; whoever comes last then stays at R1.
__device__ __forceinline__ void reserve(const work& x, int lane) {
    const int own = __popc(x.of<unsigned>(x.cut.flags)[lane]);
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(whole_warp, sum, static_cast<unsigned>(step));
        if (lane >= step) sum += below;
    }
    int* offsets = x.of<int>(x.cut.offsets);
    offsets[lane] = sum - own;
    if (lane != 31) return;
    const int first = sum > 0 ? atomicAdd(x.w.cursor + x.place(1), sum) : 0;
    const int kept = max(0, min(sum, x.w.candidates - first));
    offsets[list_first] = first;
    offsets[list_kept] = kept;
    x.w.candidate_runs[x.place(x.w.segments) + x.index] = {first, kept};
}

/// Takes a token's probabilities out of those that are attended here; returns its mass.
template <int G>
__device__ __forceinline__ float take_out(const work& x, int b, bool high, int token) {
    const bool most = x.step.bounds.largest_of_group;
    float mass = 0.0f;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        __half* p = reinterpret_cast<__half*>(x.of<uint2>(x.cut.probability) + probability_at<G>(b, high, token / word_tokens, g)) + token % 2 * 2 + token % word_tokens / 2;
        __half& rest = p[4 * G * word_tokens];
        const float own = (__half2float(*p) + __half2float(rest)) / x.of<float>(x.cut.factor)[g];
        mass = most ? fmaxf(mass, own) : mass + own;
        *p = rest = __float2half_rn(0.0f);
    }
    return mass * mass_unit(x.step);
}

/// Writes block b's candidates in order, and takes them out of the tokens that are attended here.
template <int G>
__device__ __forceinline__ void list_block(const work& x, int b, int lane) {
    const int* offsets = x.of<int>(x.cut.offsets);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned flags = x.of<unsigned>(x.cut.flags)[2 * b + half];
        if ((flags >> lane & 1u) == 0) continue;
        const int rank = offsets[2 * b + half] + __popc(flags & ((1u << lane) - 1u));
        if (rank >= offsets[list_kept]) continue;
        x.w.list[x.place(x.w.candidates) + offsets[list_first] + rank] = {(x.part.first + b) * block_tokens + half * 32 + lane, take_out<G>(x, b, half == 1, lane)};
    }
}

}  // namespace sekv::cuda::routing
