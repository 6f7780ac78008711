// Appending: the engine's keys and values become rows of exact pages, and its queries rows of the ring that feeds the metric.
#include "kernels/rows.hpp"
#include "kernels/scalar.cuh"

namespace sekv::cuda {
namespace {

constexpr std::int32_t threads = 256;
constexpr std::int32_t tile_rows = 32;   // batch rows of a thread block
constexpr std::int32_t most_size = 256;  // of a key or value
constexpr std::int32_t tile_pad = 2;     // makes a row an odd number of words, so that 32 rows' elements lie in 32 banks

struct destination {
    std::byte* page;  // null: the row is not written
    std::int64_t token;
};

struct append_tile {
    shared_array<destination, tile_rows> to;
    shared_array<std::uint16_t, tile_rows*(most_size + tile_pad)> keys;  // [row, key_size + tile_pad], as stored
};

// The last block that begins at or before `position`. The end of the list is looked at first: decoding appends there.
__device__ __forceinline__ const exact_block* find_block(const exact_block* blocks, std::int32_t count, std::int64_t position) {
    std::int32_t low = 0, high = count;  // blocks below low begin at or before position, those from high on behind it
    for (std::int32_t probe = count - 1; low < high; probe = (low + high) / 2) {
        if (blocks[probe].begin <= position) {
            low = probe + 1;
        } else {
            high = probe;
        }
    }
    if (low == 0 || position - blocks[low - 1].begin >= blocks[low - 1].count) return nullptr;
    return blocks + (low - 1);
}

__device__ __forceinline__ destination find_row(const batch_entry* items, const batch_row& row, std::int32_t layer_class) {
    const batch_entry& item = items[row.item];
    if (item.sequence == nullptr) return {nullptr, 0};
    const std::int64_t position = item.position + row.index;
    const auto* block = find_block(item.sequence->exact[layer_class], item.sequence->exact_count[layer_class], position);
    if (block == nullptr) return {nullptr, 0};
    return {const_cast<std::byte*>(block->rows), position - block->begin};
}

__device__ __forceinline__ std::int64_t tensor_index(const tensor_in& x, std::int64_t token, std::int64_t head) {
    return token * x.token_stride + head * x.head_stride;
}

// x, rounded to the stored type, as its bits.
__device__ __forceinline__ std::uint16_t stored_bits(dtype stored, float x) {
    return stored == dtype::f16 ? __half_as_ushort(from_float<__half>(x)) : __bfloat16_as_ushort(from_float<__nv_bfloat16>(x));
}

__device__ __forceinline__ bool is_finite(dtype stored, std::uint16_t bits) {
    const std::uint32_t exponent = stored == dtype::f16 ? 0x7c00U : 0x7f80U;
    return (bits & exponent) != exponent;
}

__device__ __forceinline__ void stage_keys(const append_step& step, append_tile& s, std::int32_t first, std::int32_t rows, std::int32_t head) {
    const std::int32_t octets = step.layer.key_size / 8, stride = step.layer.key_size + tile_pad;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < rows * octets; i += threads) {
        const std::int32_t row = i / octets, j = i % octets * 8;
        float x[8];
        load8_any(step.keys.data, step.keys.type, tensor_index(step.keys, first + row, head) + j, x);
#pragma unroll
        for (std::int32_t e = 0; e < 8; ++e) s.keys[row * stride + j + e] = stored_bits(step.layer.stored, x[e]);
    }
}

// Neighbouring threads take neighbouring rows, which mostly are neighbouring tokens of one page. False if an element is not finite.
__device__ __forceinline__ bool scatter_keys(const append_step& step, append_tile& s, std::int32_t rows, std::int32_t head) {
    const std::int32_t size = step.layer.key_size, stride = size + tile_pad;
    const std::int32_t log_rows = rows > 1 ? 32 - __clz(rows - 1) : 0;
    bool finite = true;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < size << log_rows; i += threads) {
        const std::int32_t row = i & ((1 << log_rows) - 1), j = i >> log_rows;
        if (row >= rows || s.to[row].page == nullptr) continue;
        const std::uint16_t bits = s.keys[row * stride + j];
        auto* column =
            reinterpret_cast<std::uint16_t*>(s.to[row].page + step.layer.exact_page.first + static_cast<std::uint64_t>(head) * step.layer.exact_page.stride);
        column[static_cast<std::int64_t>(j) * block_tokens + s.to[row].token] = bits;
        finite = finite && is_finite(step.layer.stored, bits);
    }
    return finite;
}

__device__ __forceinline__ bool copy_values(const append_step& step, append_tile& s, std::int32_t first, std::int32_t rows, std::int32_t head) {
    const std::int32_t size = step.layer.value_size, octets = size / 8;
    const std::int64_t skip = static_cast<std::int64_t>(step.layer.key_size) * block_tokens;
    bool finite = true;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < rows * octets; i += threads) {
        const std::int32_t row = i / octets, j = i % octets * 8;
        if (s.to[row].page == nullptr) continue;
        float x[8];
        load8_any(step.values.data, step.values.type, tensor_index(step.values, first + row, head) + j, x);
        std::uint16_t bits[8];
#pragma unroll
        for (std::int32_t e = 0; e < 8; ++e) {
            bits[e] = stored_bits(step.layer.stored, x[e]);
            finite = finite && is_finite(step.layer.stored, bits[e]);
        }
        const auto word = [&](std::int32_t e) { return static_cast<unsigned>(bits[e]) | static_cast<unsigned>(bits[e + 1]) << 16; };
        auto* page =
            reinterpret_cast<std::uint16_t*>(s.to[row].page + step.layer.exact_page.first + static_cast<std::uint64_t>(head) * step.layer.exact_page.stride);
        store16(page + skip + s.to[row].token * size + j, uint4{word(0), word(2), word(4), word(6)});
    }
    return finite;
}

// Thread block (rows / 32, KV head, 0: keys, 1: values).
__global__ void __launch_bounds__(threads, 4) append_kernel(append_step step) {
    auto& s = dynamic_shared<append_tile>();
    const auto first = static_cast<std::int32_t>(blockIdx.x) * tile_rows, head = static_cast<std::int32_t>(blockIdx.y);
    const std::int32_t rows = min(tile_rows, step.row_count - first);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (thread < rows) s.to[thread] = find_row(step.items, step.rows[first + thread], step.layer_class);
    if (blockIdx.z == 0) stage_keys(step, s, first, rows, head);
    __syncthreads();
    const bool finite = blockIdx.z == 0 ? scatter_keys(step, s, rows, head) : copy_values(step, s, first, rows, head);
    if (!finite) atomicExch(&step.flags->not_finite, 1);
}

// One thread per eight elements of a query row; thread block (row, part of the row).
__global__ void __launch_bounds__(threads) ring_kernel(ring_step step) {
    const auto r = static_cast<std::int64_t>(blockIdx.x);
    const std::int32_t octets = step.layer.key_size / 8, i = static_cast<std::int32_t>(blockIdx.y) * threads + static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t query_head = i / octets, j = i % octets * 8, query_heads = step.layer.kv_heads * step.layer.group;
    if (query_head >= query_heads) return;
    const batch_row row = step.rows[r];
    const batch_entry item = step.items[row.item];
    if (item.sequence == nullptr) return;
    if (row.index < item.tokens - step.ring_tokens) return;  // a later token of this step takes the slot
    const auto slot = (item.position + row.index) % step.ring_tokens;
    float x[8];
    load8_any(step.queries.data, step.queries.type, tensor_index(step.queries, r, query_head) + j, x);
    bool finite = true;
#pragma unroll
    for (std::int32_t e = 0; e < 8; ++e) {
        x[e] *= step.layer.scale;
        if (is_summable(x[e])) continue;
        x[e] = 0;  // moments would never lose it again
        finite = false;
    }
    if (!finite) atomicExch(&step.flags->queries_not_finite, 1);
    auto* ring = reinterpret_cast<__nv_bfloat16*>(item.sequence->query_ring + step.layer.query_ring);
    store8(ring + (slot * query_heads + query_head) * step.layer.key_size + j, x);
}

}  // namespace

void append_rows(const append_step& step, stream s) {
    const dim3 grid(static_cast<unsigned>((step.row_count + tile_rows - 1) / tile_rows), static_cast<unsigned>(step.layer.kv_heads), 2);
    launch("append_rows", s, grid, dim3(threads), sizeof(append_tile), &append_kernel, step);
}

void ring_queries(const ring_step& step, stream s) {
    const std::int32_t octets = step.layer.kv_heads * step.layer.group * step.layer.key_size / 8;
    launch("ring_queries", s, dim3(static_cast<unsigned>(step.row_count), static_cast<unsigned>((octets + threads - 1) / threads)), dim3(threads), 0,
           &ring_kernel, step);
}

}  // namespace sekv::cuda
