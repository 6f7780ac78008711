// Second moments of queries, decayed by position: src/metric.cpp is the reference.
#include <algorithm>
#include <cmath>

#include "kernels/device.cuh"
#include "kernels/scalar.cuh"
#include "kernels/seal.hpp"

namespace sekv::cuda {
namespace {

constexpr int threads = 256;
constexpr int tile = 32;          // rows and columns of the matrix per thread block
constexpr int stage = 32;         // query vectors in shared memory at once
constexpr int parts = 4;          // of a stage, each summed by 64 threads of 4 x 4 elements
constexpr int part_threads = threads / parts;

struct moment_shared {
    shared_array<float, stage * tile> weighted, plain;  // [query vector][element]: times its weight, for the tile's rows, and as it is, for its columns
    shared_array<float, parts * tile * tile> sums;
};

// Element (vector, j) of the stage, zero past the last vector and past the head.
__device__ __forceinline__ float query_at(const moment_step& step, std::int32_t head, std::int64_t vector, std::int32_t j, deferred_flags* flags) {
    if (vector >= step.tokens * step.group || j >= step.key_size) return 0;
    const std::int64_t token = vector / step.group, query_head = head * step.group + vector % step.group;
    const float x = load_element(step.queries.data, step.queries.type, token * step.queries.token_stride + query_head * step.queries.head_stride + j) * step.scale;
    if (is_summable(x)) return x;
    if (flags != nullptr) atomicExch(&flags->queries_not_finite, 1);
    return 0;  // moments would never lose it again
}

__host__ __device__ constexpr std::int32_t tiles_of(std::int32_t key_size) { return (key_size + tile - 1) / tile; }

__device__ __forceinline__ void load_stage(const moment_step& step, moment_shared& shared, double log2_decay, std::int64_t first, deferred_flags* flags) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const std::int32_t tiles = tiles_of(step.key_size);
    const auto row0 = static_cast<std::int32_t>(blockIdx.z) / tiles * tile, column0 = static_cast<std::int32_t>(blockIdx.z) % tiles * tile;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < stage * tile; i += threads) {
        const std::int64_t vector = first + i / tile;
        const std::int64_t age = step.tokens - 1 - vector / step.group;
        const float weight = age > 0 ? exp2f(static_cast<float>(log2_decay * static_cast<double>(age))) : 1.0F;
        shared.weighted[i] = query_at(step, head, vector, row0 + i % tile, flags) * weight;
        shared.plain[i] = query_at(step, head, vector, column0 + i % tile, flags);
    }
}

// One step's sum over its queries, of four neighbouring elements per thread.
__device__ __forceinline__ float4 sum_queries(const moment_step& step, moment_shared& shared, double log2_decay, deferred_flags* flags) {
    const int thread = static_cast<int>(threadIdx.x), part = thread / part_threads;
    const int r = thread % part_threads / 8 * 4, c = thread % 8 * 4;
    float sums[4][4] = {};
    const std::int64_t vectors = step.tokens * step.group;
    if (vectors == 0) return {};
    for (std::int64_t first = 0; first < vectors; first += stage) {
        if (first > 0) __syncthreads();  // the stage before is summed
        load_stage(step, shared, log2_decay, first, flags);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < stage / parts; ++k) {
            const int at = (part * (stage / parts) + k) * tile;
            const float4 a = *reinterpret_cast<const float4*>(shared.weighted.data() + at + r), b = *reinterpret_cast<const float4*>(shared.plain.data() + at + c);
            const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += x[i] * y[j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<float4*>(shared.sums.data() + (part * tile + r + i) * tile + c) = float4{sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
    __syncthreads();
    float4 total{0, 0, 0, 0};
#pragma unroll
    for (int p = 0; p < parts; ++p) {
        const float4 x = *reinterpret_cast<const float4*>(shared.sums.data() + (p * tile + thread / 8) * tile + thread % 8 * 4);
        total = float4{total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w};
    }
    return total;
}

// Thread block (step, KV head, tile of the matrix): takes the steps in turn that have the same moments, the first of which is its own.
__global__ void __launch_bounds__(threads) add_moments(const moment_step* steps, std::int32_t count, double log2_decay, deferred_flags* flags) {
    auto i = static_cast<std::int32_t>(blockIdx.x);
    moment_step step = steps[i];
    const std::int32_t d = step.key_size, tiles = tiles_of(d);
    if (static_cast<std::int32_t>(blockIdx.y) >= step.kv_heads || static_cast<std::int32_t>(blockIdx.z) >= tiles * tiles) return;
    if (i > 0 && steps[i - 1].moments == step.moments) return;
    auto& shared = dynamic_shared<moment_shared>();
    const int thread = static_cast<int>(threadIdx.x);
    const auto row = static_cast<std::int32_t>(blockIdx.z) / tiles * tile + thread / 8, column = static_cast<std::int32_t>(blockIdx.z) % tiles * tile + thread % 8 * 4;
    const bool inside = row < d && column < d;
    float4* at = reinterpret_cast<float4*>(step.moments + (static_cast<std::int64_t>(blockIdx.y) * d + row) * d + column);
    float4 moment = inside ? *at : float4{0, 0, 0, 0};
    for (;;) {
        const float4 total = sum_queries(step, shared, log2_decay, flags);
        moment = float4{step.faded * moment.x + total.x, step.faded * moment.y + total.y, step.faded * moment.z + total.z, step.faded * moment.w + total.w};
        if (++i == count || steps[i].moments != step.moments) break;
        step = steps[i];
    }
    if (inside) *at = moment;
}

// Grid-stride: enough threads to keep PCIe busy.
__global__ void __launch_bounds__(threads) copy_kernel(float4* to, const float4* from, std::int64_t count) {
    const auto step = static_cast<std::int64_t>(gridDim.x) * threads;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < count; i += step) to[i] = from[i];
}

}  // namespace

void add_queries(std::span<const moment_step> steps, double decay, deferred_flags* flags, stream s) {
    std::int32_t heads = 0, tiles = 0;
    for (const auto& x : steps) heads = std::max(heads, x.kv_heads), tiles = std::max(tiles, tiles_of(x.key_size));
    const dim3 grid(static_cast<unsigned>(steps.size()), static_cast<unsigned>(heads), static_cast<unsigned>(tiles * tiles));
    launch("add_moments", s, grid, dim3(threads), sizeof(moment_shared), &add_moments, steps.data(), static_cast<std::int32_t>(steps.size()), std::log2(decay), flags);
}

void copy_floats(float* to, const float* from, std::int64_t count, stream s) {
    const auto vectors = count / 4;
    const auto blocks = std::min<std::int64_t>((vectors + threads - 1) / threads, 256);
    launch("copy_floats", s, dim3(static_cast<unsigned>(blocks)), dim3(threads), 0, &copy_kernel, reinterpret_cast<float4*>(to), reinterpret_cast<const float4*>(from), vectors);
}

}  // namespace sekv::cuda
