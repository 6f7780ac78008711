// What a thread block of exact prefill attention does with its 64 queries: the steps between the barriers of kernels/prefill.cu.
#pragma once

#include "kernels/device.cuh"
// The includes below need the one above.
#include "kernels/rows.hpp"
#include "kernels/scalar.cuh"
#include "kernels/warp.cuh"

#if !SEKV_ON_GPU
#include <cmath>
#endif

namespace sekv::cuda::prefill {

constexpr int tile_rows = 64, warp_rows = 16, prefill_threads = 128;
constexpr float nothing = -INFINITY;  // maximum of no logits

/// Elements from one row of queries or values to the next: an odd number of 16-byte pieces, so that the eight rows of an ldmatrix lie in different banks.
template <int size>
constexpr int pitch = size + 8;

/// size: of keys and values, the larger, padded with zeros to one that is instantiated.
template <class T, int size>
struct prefill_shared {
    shared_array<T, tile_rows * pitch<size>> queries;
    shared_array<T, size * block_tokens> keys;  // piece p of row j at p ^ j % 8: again no two of eight rows in the same banks
    shared_array<T, block_tokens * pitch<size>> values;
};

/// The 64 flattened rows of a thread block, and what they may see.
struct query_tile {
    std::int32_t first, rows;  ///< of the flattened rows; rows of them up to 64
    std::int64_t begin, end;   ///< positions that some row sees: [begin, end)
};

__device__ __forceinline__ query_tile make_tile(const prefill_step& step) {
    query_tile t{};
    t.first = static_cast<std::int32_t>(blockIdx.x) * tile_rows;
    t.rows = min(tile_rows, step.tokens * step.layer.group - t.first);
    t.end = step.position + (t.first + t.rows - 1) / step.layer.group + 1;
    t.begin = step.layer.window > 0 ? step.position + t.first / step.layer.group + 1 - step.layer.window : 0;
    return t;
}

/// Walks the blocks that a tile sees. Each warp looks at 32 blocks at once; all warps of a thread block get the same answers.
struct block_walk {
    std::int32_t base = -32;
    unsigned ahead = 0;

    /// Index of the next one, -1 behind the last.
    __device__ __forceinline__ std::int32_t next(const prefill_step& step, const query_tile& tile) {
        while (ahead == 0) {
            base += 32;
            if (base >= step.block_count) return -1;
            const std::int32_t i = base + lane_of(static_cast<int>(threadIdx.x));
            bool seen = false;
            if (i < step.block_count) {
                const exact_block& b = step.blocks[i];
                seen = b.count > 0 && b.begin < tile.end && b.begin + b.count > tile.begin;
            }
            ahead = __ballot_sync(whole_warp, seen);
        }
        const std::int32_t found = base + __ffs(static_cast<int>(ahead)) - 1;
        ahead &= ahead - 1;
        return found;
    }
};

template <class T, int size>
__device__ __forceinline__ void load_queries(prefill_shared<T, size>& shared, const prefill_step& step, const query_tile& tile) {
    const std::int32_t group = step.layer.group, head = static_cast<std::int32_t>(blockIdx.y) * group;
    for (int i = static_cast<int>(threadIdx.x); i < tile_rows * (size / 8); i += prefill_threads) {
        const int row = i / (size / 8), j = i % (size / 8) * 8;
        float x[8] = {};
        if (row < tile.rows && j < step.layer.key_size) {
            const std::int32_t flat = tile.first + row;
            load8_any(step.queries.data, step.queries.type,
                      (step.row + flat / group) * step.queries.token_stride + (head + flat % group) * step.queries.head_stride + j, x);
        }
        bool finite = true;
#pragma unroll
        for (int k = 0; k < 8; ++k) finite = finite && is_finite(rounded_to(step.layer.stored, x[k]));
        if (!finite && step.flags != nullptr) atomicExch(&step.flags->queries_not_finite, 1);
        store8(&shared.queries[row * pitch<size> + j], x);
    }
}

/// Starts the copy of a page's keys; rows past the key size are zeros. Tokens past the block's count come along, whatever they are: their logits are replaced.
template <class T, int size>
__device__ __forceinline__ void copy_keys(prefill_shared<T, size>& shared, const std::byte* page, const layer_layout& layer) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < size * 8; i += prefill_threads) {
        const int row = i / 8, piece = i % 8;
        const bool there = row < layer.key_size;
        cp_async16(&shared.keys[row * block_tokens + (piece ^ (row & 7)) * 8], page + (there ? i * 16 : 0), there ? 16 : 0);
    }
    cp_async_commit();
}

/// Starts the copy of a page's values; rows from `count` on are zeros, since 0 times what lies there may be NaN.
template <class T, int size>
__device__ __forceinline__ void copy_values(prefill_shared<T, size>& shared, const std::byte* page, const layer_layout& layer, std::int32_t count) {
    const std::byte* rows = page + layer.key_size * block_tokens * 2;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < block_tokens * (size / 8); i += prefill_threads) {
        const int row = i / (size / 8), j = i % (size / 8) * 8;
        const bool there = row < count && j < layer.value_size;
        cp_async16(&shared.values[row * pitch<size> + j], rows + (there ? (row * layer.value_size + j) * 2 : 0), there ? 16 : 0);
    }
    cp_async_commit();
}

/// Logits of 16 queries for 64 tokens: [i][0, 1] row lane / 4, tokens 8 i + lane % 4 * 2 and the next; [i][2, 3] the same of row lane / 4 + 8.
using tile_logits = float[8][4];

/// The 16 x 16 piece of a warp's queries that multiplies key components [16 k, 16 k + 16).
template <class T, int size>
__device__ __forceinline__ void query_fragment(unsigned (&a)[4], const prefill_shared<T, size>& shared, int k) {
    const int lane = lane_of(static_cast<int>(threadIdx.x)), row = warp_of(static_cast<int>(threadIdx.x)) * warp_rows + lane % 16;
    ldmatrix_x4(a, &shared.queries[row * pitch<size> + k * 16 + lane / 16 * 8]);
}

template <class T, int size>
__device__ __forceinline__ void multiply_keys(tile_logits& s, const prefill_shared<T, size>& shared, const unsigned (&held)[size / 16][4]) {
    const int lane = lane_of(static_cast<int>(threadIdx.x));
#pragma unroll
    for (auto& x : s) x[0] = x[1] = x[2] = x[3] = 0;
#pragma unroll
    for (int k = 0; k < size / 16; ++k) {
        unsigned a[4] = {held[k][0], held[k][1], held[k][2], held[k][3]};
        if constexpr (size > 128) query_fragment(a, shared, k);  // their registers are needed for the sums
        const int row = k * 16 + lane % 16;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            ldmatrix_x4_trans(b, &shared.keys[row * block_tokens + ((n * 2 + lane / 16) ^ (row & 7)) * 8]);
            mma_m16n8k16<T>(s[2 * n], a, b[0], b[1]);
            mma_m16n8k16<T>(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/// Scale, soft-cap, and -infinity for what a row doesn't see: tokens outside [low, high) of the page, for the thread's two rows.
__device__ __forceinline__ void finish_logits(tile_logits& s, const layer_layout& layer, const int (&low)[2], const int (&high)[2]) {
    const int column = lane_of(static_cast<int>(threadIdx.x)) % 4 * 2;
    const float scale = layer.soft_cap > 0 ? layer.scale / layer.soft_cap : layer.scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[i][e] *= scale;
            if (layer.soft_cap > 0) s[i][e] = layer.soft_cap * tanhf(s[i][e]);
            const int token = i * 8 + column + e % 2;
            if (token < low[e / 2] || token >= high[e / 2]) s[i][e] = nothing;
        }
    }
}

/// Two rows' running state; weight is this thread's part of the row's sum.
struct row_state {
    float max[2] = {nothing, nothing}, weight[2] = {0, 0};
};

/// Logits become weights exp(logit - max) in place; returns by how much earlier sums shrink.
__device__ __forceinline__ float2 softmax_step(tile_logits& s, row_state& state) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float most = state.max[r];
#pragma unroll
        for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
        most = warp_max<4>(most);
        const float offset = most == nothing ? 0.0F : most * log2_e;  // a row that sees nothing yet
        shrink[r] = exp2_approx(fmaf(state.max[r], log2_e, -offset));
        state.max[r] = most;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                s[i][e] = exp2_approx(fmaf(s[i][e], log2_e, -offset));
                sum += s[i][e];
            }
        }
        state.weight[r] = state.weight[r] * shrink[r] + sum;
    }
    return float2{shrink[0], shrink[1]};
}

template <class T, int size>
__device__ __forceinline__ void multiply_values(float (&sums)[size / 8][4], const tile_logits& p, const float2& shrink, const prefill_shared<T, size>& shared) {
    const int lane = lane_of(static_cast<int>(threadIdx.x));
#pragma unroll
    for (auto& x : sums) x[0] *= shrink.x, x[1] *= shrink.x, x[2] *= shrink.y, x[3] *= shrink.y;
#pragma unroll
    for (int k = 0; k < block_tokens / 16; ++k) {
        const unsigned a[4] = {pack2<T>(p[2 * k][0], p[2 * k][1]), pack2<T>(p[2 * k][2], p[2 * k][3]), pack2<T>(p[2 * k + 1][0], p[2 * k + 1][1]),
                               pack2<T>(p[2 * k + 1][2], p[2 * k + 1][3])};
        const int row = k * 16 + lane % 16;
#pragma unroll
        for (int n = 0; n < size / 16; ++n) {
            unsigned b[4];
            ldmatrix_x4_trans(b, &shared.values[row * pitch<size> + (n * 2 + lane / 16) * 8]);
            mma_m16n8k16<T>(sums[2 * n], a, b[0], b[1]);
            mma_m16n8k16<T>(sums[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/// Where the state of the thread's row r (0 or 1) lies: its index in [rows, query_heads], -1 past the tile's rows.
__device__ __forceinline__ std::int64_t state_index(const prefill_step& step, const query_tile& tile, int r) {
    const int thread = static_cast<int>(threadIdx.x), row = warp_of(thread) * warp_rows + lane_of(thread) / 4 + r * 8;
    if (row >= tile.rows) return -1;
    const std::int32_t flat = tile.first + row, group = step.layer.group;
    return static_cast<std::int64_t>(step.row + flat / group) * (step.layer.kv_heads * group) + static_cast<std::int32_t>(blockIdx.y) * group + flat % group;
}

template <int size>
__device__ __forceinline__ void load_state(row_state& state, float (&sums)[size / 8][4], const prefill_step& step, const query_tile& tile) {
    const int column = lane_of(static_cast<int>(threadIdx.x)) % 4 * 2, dv = step.layer.value_size;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const std::int64_t at = state_index(step, tile, r);
        if (at >= 0) state.max[r] = step.state.max[at];
        if (at >= 0 && column == 0) state.weight[r] = step.state.weight[at];
#pragma unroll
        for (int n = 0; n < size / 8; ++n) {
            float2 x{0, 0};
            if (at >= 0 && n * 8 < dv) x = *reinterpret_cast<const float2*>(step.state.sums + at * dv + n * 8 + column);
            sums[n][2 * r] = x.x, sums[n][2 * r + 1] = x.y;
        }
    }
}

template <int size>
__device__ __forceinline__ void store_state(const row_state& state, const float (&sums)[size / 8][4], const prefill_step& step, const query_tile& tile) {
    const int column = lane_of(static_cast<int>(threadIdx.x)) % 4 * 2, dv = step.layer.value_size;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float weight = warp_sum<4>(state.weight[r]);
        const std::int64_t at = state_index(step, tile, r);
        if (at < 0) continue;
        if (column == 0) step.state.max[at] = state.max[r], step.state.weight[at] = weight;
#pragma unroll
        for (int n = 0; n < size / 8; ++n) {
            if (n * 8 < dv) *reinterpret_cast<float2*>(step.state.sums + at * dv + n * 8 + column) = float2{sums[n][2 * r], sums[n][2 * r + 1]};
        }
    }
}

/// Which tokens [low, high) of a block the thread's two rows see.
__device__ __forceinline__ void seen_tokens(int (&low)[2], int (&high)[2], const exact_block& b, const prefill_step& step, const query_tile& tile) {
    const int thread = static_cast<int>(threadIdx.x), row = tile.first + warp_of(thread) * warp_rows + lane_of(thread) / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const std::int64_t behind = step.position + (row + r * 8) / step.layer.group + 1 - b.begin;  // the query's own position is the last that it sees
        high[r] = static_cast<int>(min(behind, static_cast<std::int64_t>(b.count)));
        low[r] = step.layer.window > 0 ? static_cast<int>(max(behind - step.layer.window, std::int64_t{0})) : 0;
    }
}

}  // namespace sekv::cuda::prefill
