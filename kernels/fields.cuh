// R1 on the device: what a nibble's field adds to its component, and the logits of a block's 64 tokens out of its planes.
#pragma once

#include "kernels/decode_parts.cuh"
#include "kernels/warp.cuh"
#include "sekv/exec/sketch_ops.hpp"

namespace sekv::cuda::routing {

inline constexpr int threads = 256;  ///< of the kernels over segments: a warp per block of 64 tokens, two of them
inline constexpr int warps = threads / 32;

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

/// A small integer as a float, by two full-rate instructions in place of a conversion.
__device__ __forceinline__ float small_float(unsigned x) { return __int_as_float(static_cast<int>(0x4b000000u | x)) - 8388608.0f; }

/// Adds the fields' logits of tokens `lane` (low nibbles) and `lane` + 32 (high) of one block. planes, fields, weights [count, G]: shared memory.
template <int G>
__device__ __forceinline__ void add_logits(const unsigned char* planes, const host::sketch_field* fields, const float* weights, int count, int lane, float (&low)[G], float (&high)[G]) {
#pragma unroll 2
    for (int f = 0; f < count; ++f) {
        const host::sketch_field x = fields[f];
        const unsigned code = static_cast<unsigned>(planes[x.plane * plane_bytes + lane]) >> x.shift;
        const float a = small_float(code & x.mask), b = small_float((code >> 4) & x.mask);
        float weight[G];
        load_group<G>(weights + f * G, weight);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            low[g] = fmaf(weight[g], a, low[g]);
            high[g] = fmaf(weight[g], b, high[g]);
        }
    }
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
