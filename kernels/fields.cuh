// R1 on the device: what a nibble's field adds to its component, and which tokens of a block are seen.
#pragma once

#include "kernels/decode_parts.cuh"
#include "kernels/warp.cuh"
#include "sekv/exec/sketch_ops.hpp"

namespace sekv::cuda::routing {

/// Threads of the kernels over segments, by padded group: a warp takes every fourth (eighth) block of 64 tokens. More would repeat what each warp does once; with 16 queries shared memory leaves room for
/// two thread blocks per multiprocessor, which need them.
__host__ __device__ constexpr int segment_threads(int padded) { return padded < 16 ? 128 : 256; }
template <int G>
constexpr int threads = segment_threads(G);
template <int G>
constexpr int warps = threads<G> / 32;

template <class T>
__device__ __forceinline__ const T* at(const std::byte* head, std::uint32_t offset) {
    return reinterpret_cast<const T*>(head + offset);
}

/// A field's contribution to its component: code * factor + offset, as the host's level_of (codec/sketch.hpp): an 8-bit component is two fields, its high nibble first.
struct level {
    float factor, offset;
};
__device__ __forceinline__ bool repeats(const host::sketch_field* fields, int f) { return f > 0 && fields[f - 1].component == fields[f].component; }
__device__ __forceinline__ level level_of(const host::sketch_field* fields, int f, const std::uint8_t* bits, const float* step) {
    const int j = fields[f].component, width = bits[j];
    const float s = step[j];
    if (width == 8) return repeats(fields, f) ? level{s, 0.0f} : level{16.0f * s, -127.5f * s};
    return {s, (0.5f - static_cast<float>(1 << (width - 1))) * s};
}

/// The tokens [first, last) of a block that a query attends by their codes: not the sinks, not what was truncated, nothing past the query.
struct seen_tokens {
    int first, last;
    __device__ __forceinline__ bool operator()(int i) const { return i >= first && i < last; }
};
__device__ __forceinline__ seen_tokens seen(const sealed_block& b, int sink_count, std::int64_t position) {
    const std::int64_t first = sink_count - b.begin, last = position + 1 - b.begin;
    return {static_cast<int>(first > 0 ? (first < block_tokens ? first : block_tokens) : 0), static_cast<int>(last < b.count ? last : b.count)};
}

}  // namespace sekv::cuda::routing
