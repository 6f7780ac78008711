// Flash decoding over a full cache. A warp takes every fourth tile of 16 tokens of its split through a ring of asynchronous copies; queries of the group are the rows of the products, padded to 16.
#include "kernels/device.cuh"
// The includes below need the one above.
#include <cuda_fp8.h>

#include <algorithm>

#include "bench/cuda/full_kv.hpp"
#include "kernels/scalar.cuh"
#include "kernels/warp.cuh"

namespace sekv::bench {
namespace {

using namespace sekv::cuda;

constexpr int d = full_kv_size, tile = 16, warps = 4, threads = 32 * warps;
constexpr float nothing = -1e30f;  // finite, so that differences are numbers

template <element E>
constexpr int row_bytes = E == element::bf16 ? 2 * d : d;
/// 16 more than the row's bytes: the rows that one load touches lie in different banks.
template <element E>
constexpr int pitch = row_bytes<E> + 16;
template <element E>
constexpr int stages = E == element::bf16 ? 3 : 4;
template <element E>
constexpr int tile_bytes = 2 * tile * pitch<E>;  // keys, then values
template <element E>
constexpr int ring_bytes = warps * stages<E> * tile_bytes<E>;
constexpr int merge_floats = warps * 8 * (d + 2);
template <element E>
constexpr int shared_bytes = ring_bytes<E> > merge_floats * 4 ? ring_bytes<E> : merge_floats * 4;

/// What a warp's four lanes of a query hold: maximum, weight and 128 / 8 column tiles of the output.
struct warp_state {
    float max = nothing, weight = 0;
    float out[d / 8][4] = {};
};

__device__ __forceinline__ unsigned half2_of_fp8(unsigned two) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return static_cast<unsigned>(h.x) | static_cast<unsigned>(h.y) << 16;
}

/// Queries as the A operand. FP8: which of a step's 16 components a lane holds is chosen so that it finds a key's four in one word; queries follow.
template <element E>
__device__ __forceinline__ void load_queries(const full_kv_step& s, int head, int row, int lane, unsigned (&a)[d / 16][4]) {
    const int g = lane / 4, i = lane % 4;
    const auto* q = static_cast<const __nv_bfloat16*>(s.queries) + (static_cast<std::int64_t>(row) * s.kv_heads * s.group + head * s.group + g) * d;
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
        a[step][0] = a[step][1] = a[step][2] = a[step][3] = 0;
        if (g >= s.group) continue;
        if constexpr (E == element::bf16) {
            a[step][0] = *reinterpret_cast<const unsigned*>(q + step * 16 + 2 * i);
            a[step][2] = *reinterpret_cast<const unsigned*>(q + step * 16 + 2 * i + 8);
        } else {
            const auto* at = q + step * 16 + 4 * i;
            a[step][0] = pack2<__half>(__bfloat162float(at[0]), __bfloat162float(at[1]));
            a[step][2] = pack2<__half>(__bfloat162float(at[2]), __bfloat162float(at[3]));
        }
    }
}

template <element E>
__device__ __forceinline__ void begin_tile(const full_kv_step& s, std::int64_t rows_at, std::int64_t first, std::int64_t last, int lane, unsigned char* to) {
    constexpr int pieces = row_bytes<E> / 16;
    const auto* keys = static_cast<const unsigned char*>(s.keys) + rows_at * row_bytes<E>;
    const auto* values = static_cast<const unsigned char*>(s.values) + rows_at * row_bytes<E>;
#pragma unroll
    for (int p = 0; p < tile * pieces / 32; ++p) {
        const int piece = p * 32 + lane, row = piece / pieces, at = piece % pieces * 16;
        const bool there = first + row < last;
        const std::int64_t from = there ? (first + row) * row_bytes<E> + at : 0;
        cp_async16(to + row * pitch<E> + at, keys + from, there ? 16 : 0);
        cp_async16(to + (tile + row) * pitch<E> + at, values + from, there ? 16 : 0);
    }
}

template <element E>
__device__ __forceinline__ void logits_of(const unsigned char* keys, const unsigned (&a)[d / 16][4], int lane, float (&s)[2][4]) {
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
        unsigned b[4];
        if constexpr (E == element::bf16) {
            ldmatrix_x4(b, keys + (lane / 16 * 8 + lane % 8) * pitch<E> + step * 32 + lane / 8 % 2 * 16);
            mma_m16n8k16<__nv_bfloat16>(s[0], a[step], b[0], b[1]);
            mma_m16n8k16<__nv_bfloat16>(s[1], a[step], b[2], b[3]);
        } else {
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const unsigned word = *reinterpret_cast<const unsigned*>(keys + (lane / 4 + 8 * t) * pitch<E> + step * 16 + lane % 4 * 4);
                b[2 * t] = half2_of_fp8(word & 0xffffu), b[2 * t + 1] = half2_of_fp8(word >> 16);
                mma_m16n8k16<__half>(s[t], a[step], b[2 * t], b[2 * t + 1]);
            }
        }
    }
}

template <element E>
__device__ __forceinline__ void add_values(const unsigned char* values, const unsigned (&p)[4], int lane, float (&out)[d / 8][4]) {
    if constexpr (E == element::bf16) {
#pragma unroll
        for (int n = 0; n < d / 8; n += 2) {
            unsigned b[4];
            ldmatrix_x4_trans(b, values + (lane / 8 % 2 * 8 + lane % 8) * pitch<E> + n * 16 + lane / 16 * 16);
            mma_m16n8k16<__nv_bfloat16>(out[n], p, b[0], b[1]);
            mma_m16n8k16<__nv_bfloat16>(out[n + 1], p, b[2], b[3]);
        }
    } else {
#pragma unroll
        for (int block = 0; block < d / 32; ++block) {
            unsigned w[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) w[t] = *reinterpret_cast<const unsigned*>(values + (lane % 4 * 2 + t % 2 + t / 2 * 8) * pitch<E> + block * 32 + lane / 4 * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned low = (w[0] >> 8 * j & 0xffu) | (w[1] >> 8 * j & 0xffu) << 8, high = (w[2] >> 8 * j & 0xffu) | (w[3] >> 8 * j & 0xffu) << 8;
                mma_m16n8k16<__half>(out[block * 4 + j], p, half2_of_fp8(low), half2_of_fp8(high));
            }
        }
    }
}

/// The output's component that column `column` of tile n holds.
template <element E>
__device__ __forceinline__ int component_of(int n, int column) {
    return E == element::bf16 ? n * 8 + column : n / 4 * 32 + column * 4 + n % 4;
}

/// One tile's logits into the running softmax.
template <element E>
__device__ __forceinline__ void attend_tile(const unsigned char* at, const unsigned (&a)[d / 16][4], int lane, std::int64_t left, float scale, warp_state& state) {
    float s[2][4] = {};
    logits_of<E>(at, a, lane, s);
    float top = nothing;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s[t][i] = t * 8 + lane % 4 * 2 + i < left ? s[t][i] * scale * log2_e : nothing;
            top = fmaxf(top, s[t][i]);
        }
    }
    const float max = fmaxf(state.max, warp_max<4>(top)), shrink = exp2_approx(state.max - max);
    unsigned p[4] = {};
    float sum = 0;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        const float x = exp2_approx(s[t][0] - max), y = exp2_approx(s[t][1] - max);
        sum += x + y;
        if constexpr (E == element::bf16) p[2 * t] = pack2<__nv_bfloat16>(x, y);
        else p[2 * t] = pack2<__half>(x, y);
    }
    state.weight = state.weight * shrink + sum;
    state.max = max;
#pragma unroll
    for (int n = 0; n < d / 8; ++n) state.out[n][0] *= shrink, state.out[n][1] *= shrink;
    add_values<E>(at + tile * pitch<E>, p, lane, state.out);
}

template <element E>
__global__ void __launch_bounds__(threads) full_kv_split(full_kv_step s) {
    unsigned char* ring = dynamic_bytes(static_cast<std::size_t>(shared_bytes<E>));
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int split = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
    const std::int64_t per = ((s.tokens + s.splits - 1) / s.splits + tile - 1) / tile * tile;
    const std::int64_t first = split * per, last = first + per < s.tokens ? first + per : s.tokens;
    const std::int64_t rows_at = (static_cast<std::int64_t>(row) * s.kv_heads + head) * s.tokens;
    unsigned char* mine = ring + warp * stages<E> * tile_bytes<E>;

    unsigned a[d / 16][4];
    load_queries<E>(s, head, row, lane, a);
    warp_state state;
    const std::int64_t tiles = first < last ? (last - first + tile - 1) / tile : 0;
#pragma unroll
    for (int k = 0; k < stages<E> - 1; ++k) {
        const std::int64_t t = warp + k * warps;
        if (t < tiles) begin_tile<E>(s, rows_at, first + t * tile, last, lane, mine + k * tile_bytes<E>);
        cp_async_commit();
    }
    int slot = 0;
    for (std::int64_t t = warp; t < tiles; t += warps) {
        cp_async_wait<stages<E> - 2>();
        __syncwarp();
        const std::int64_t next = t + (stages<E> - 1) * warps;
        const int free = slot == 0 ? stages<E> - 1 : slot - 1;
        if (next < tiles) begin_tile<E>(s, rows_at, first + next * tile, last, lane, mine + free * tile_bytes<E>);
        cp_async_commit();
        attend_tile<E>(mine + slot * tile_bytes<E>, a, lane, last - first - t * tile, s.scale, state);
        slot = slot + 1 == stages<E> ? 0 : slot + 1;
        __syncwarp();
    }
    cp_async_wait<0>();
    __syncthreads();

    // The warps' states, merged: [warp][8 queries][max, weight, 128].
    float* merged = reinterpret_cast<float*>(ring);
    const float weight = warp_sum<4>(state.weight);
    float* at = merged + (warp * 8 + lane / 4) * (d + 2);
    if (lane % 4 == 0) at[0] = state.max, at[1] = weight;
#pragma unroll
    for (int n = 0; n < d / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) at[2 + component_of<E>(n, lane % 4 * 2 + i)] = state.out[n][i];
    }
    __syncthreads();
    float* to = s.workspace + ((static_cast<std::int64_t>(row) * s.kv_heads + head) * s.splits + split) * s.group * (d + 2);
    for (int x = thread; x < s.group * (d + 2); x += threads) {
        const int g = x / (d + 2), j = x % (d + 2);
        float max = nothing, sum = 0;
        for (int w = 0; w < warps; ++w) max = fmaxf(max, merged[(w * 8 + g) * (d + 2)]);
        for (int w = 0; w < warps; ++w) sum += merged[(w * 8 + g) * (d + 2) + j] * exp2_approx(merged[(w * 8 + g) * (d + 2)] - max);
        to[x] = j == 0 ? max : sum;
    }
}

__global__ void __launch_bounds__(d) full_kv_combine(full_kv_step s) {
    const int head = static_cast<int>(blockIdx.x) / s.group, g = static_cast<int>(blockIdx.x) % s.group, row = static_cast<int>(blockIdx.y), j = static_cast<int>(threadIdx.x);
    const float* from = s.workspace + (static_cast<std::int64_t>(row) * s.kv_heads + head) * s.splits * s.group * (d + 2) + g * (d + 2);
    const std::int64_t next = static_cast<std::int64_t>(s.group) * (d + 2);
    float max = nothing, weight = 0, sum = 0;
    for (int k = 0; k < s.splits; ++k) max = fmaxf(max, from[k * next]);
    for (int k = 0; k < s.splits; ++k) {
        const float factor = exp2_approx(from[k * next] - max);
        weight += from[k * next + 1] * factor, sum += from[k * next + 2 + j] * factor;
    }
    s.out[(static_cast<std::int64_t>(row) * s.kv_heads * s.group + blockIdx.x) * d + j] = sum / weight;
}

}  // namespace

std::int32_t full_kv_splits(const full_kv_step& s, std::int32_t processors) {
    const std::int64_t wanted = (static_cast<std::int64_t>(processors) * 4 + s.batch * s.kv_heads - 1) / (s.batch * s.kv_heads);
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, s.tokens / 256)));
}

std::size_t full_kv_workspace(const full_kv_step& s) { return static_cast<std::size_t>(s.batch) * static_cast<std::size_t>(s.kv_heads * s.splits * s.group) * (d + 2); }

void attend_full_kv(const full_kv_step& s, stream at) {
    const dim3 grid(static_cast<unsigned>(s.splits), static_cast<unsigned>(s.kv_heads), static_cast<unsigned>(s.batch));
    if (s.stored == element::bf16) launch("full_kv_split", at, grid, dim3(threads), shared_bytes<element::bf16>, &full_kv_split<element::bf16>, s);
    else launch("full_kv_split", at, grid, dim3(threads), shared_bytes<element::fp8>, &full_kv_split<element::fp8>, s);
    launch("full_kv_combine", at, dim3(static_cast<unsigned>(s.kv_heads * s.group), static_cast<unsigned>(s.batch)), dim3(d), 0, &full_kv_combine, s);
}

}  // namespace sekv::bench
