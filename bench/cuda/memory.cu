// What the measurements need of memory: data that no cache can guess, and reads of lines in pinned host memory.
#include "kernels/device.cuh"
// The includes below need the one above.
#include <cuda_fp8.h>

#include <algorithm>

#include "bench/cuda/full_kv.hpp"

namespace sekv::bench {
namespace {

using namespace sekv::cuda;

__device__ __forceinline__ std::uint32_t hash(std::uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
    return static_cast<std::uint32_t>(x >> 32);
}
__device__ __forceinline__ float uniform(std::uint64_t index, std::uint32_t seed) { return static_cast<float>(hash(index + (static_cast<std::uint64_t>(seed) << 40))) * 0x1p-31f - 1.0f; }

__device__ __forceinline__ void store(float* to, float x) { *to = x; }
__device__ __forceinline__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store(__nv_fp8_storage_t* to, float x) { *to = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

template <class T>
__global__ void fill(T* to, std::int64_t count, std::uint32_t seed) {
    const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) store(to + i, uniform(static_cast<std::uint64_t>(i), seed));
}

template <class T>
void launch_fill(T* to, std::int64_t count, std::uint32_t seed, stream s) {
    launch("fill", s, dim3(static_cast<unsigned>(std::min<std::int64_t>((count + 255) / 256, 4096))), dim3(256), 0, &fill<T>, to, count, seed);
}

// A warp reads 512 bytes at once: several lines, or a part of one. Four loads of a lane are under way together.
__global__ void __launch_bounds__(256) read_lines_kernel(const std::byte* memory, std::int64_t line_count, std::int32_t line_bytes, std::int64_t lines, std::uint32_t seed, std::uint32_t* sums) {
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % 32;
    const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32, warp_count = static_cast<std::int64_t>(gridDim.x) * blockDim.x / 32;
    const std::int64_t pieces = lines * line_bytes / 512;
    std::uint32_t sum = 0;
#pragma unroll 4
    for (std::int64_t p = warp; p < pieces; p += warp_count) {
        const std::int64_t byte = p * 512 + lane * 16, line = byte / line_bytes, within = byte % line_bytes;
        const auto place = static_cast<std::int64_t>(hash(static_cast<std::uint64_t>(line) + (static_cast<std::uint64_t>(seed) << 40)) % static_cast<std::uint32_t>(line_count));
        const uint4 x = *reinterpret_cast<const uint4*>(memory + place * line_bytes + within);
        sum += x.x ^ x.y ^ x.z ^ x.w;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) sums[warp] = sum;
}

}  // namespace

void fill_uniform(void* to, element type, std::int64_t count, std::uint32_t seed, stream s) {
    if (type == element::bf16) launch_fill(static_cast<__nv_bfloat16*>(to), count, seed, s);
    else launch_fill(static_cast<__nv_fp8_storage_t*>(to), count, seed, s);
}
void fill_uniform(float* to, std::int64_t count, std::uint32_t seed, stream s) { launch_fill(to, count, seed, s); }

void read_lines(const std::byte* memory, std::int64_t line_count, std::int32_t line_bytes, std::int64_t lines, std::uint32_t seed, std::uint32_t* sums, std::int32_t warps, stream s) {
    launch("read_lines", s, dim3(static_cast<unsigned>(warps / 8)), dim3(256), 0, &read_lines_kernel, memory, line_count, line_bytes, lines, seed, sums);
}

}  // namespace sekv::bench
