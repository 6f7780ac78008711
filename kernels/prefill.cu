// Exact prefill attention, streamed: running softmax over pages of exact rows, on tensor cores.
//
// A thread block holds 64 queries of one KV head (query tokens x group, flattened; a warp holds 16) and walks the pages that any of them sees. Keys and values
// have one buffer each and take turns: a page's values arrive while its logits are computed, the next page's keys while its softmax and value sums are; two
// barriers a page. Keys are stored transposed, so both products find their B operand row-major. Queries, keys, values and probabilities are of the stored type,
// everything else is fp32. With e = 1e-5 * (1 + the largest scale * sum |q_j k_j| of a logit), and against double on the same stored inputs: an output is off
// by at most 2^-8 (bf16) or 2^-11 (fp16), the rounding of probabilities, plus 2 e of the largest |v| in sight, the log-sum-exp by e. With fp16, tokens that
// weigh less than 2^-25 of the heaviest count in the sum of weights alone.
#include "kernels/device.cuh"
// The includes below need the one above.
#include <algorithm>
#include <string>

#include "kernels/prefill_tile.cuh"
#include "sekv/core/error.hpp"

namespace sekv::cuda {
namespace {

using namespace prefill;

/// Grid (tiles, KV heads).
template <class T, int size>
__global__ void __launch_bounds__(prefill_threads) prefill_kernel(prefill_step step) {
    const query_tile tile = make_tile(step);
    block_walk walk;
    std::int32_t next = walk.next(step, tile);
    if (next < 0) return;
    auto& shared = dynamic_shared<prefill_shared<T, size>>();
    const std::uint64_t head = step.page.first + blockIdx.y * step.page.stride;
    exact_block block = step.blocks[next];
    copy_keys<T, size>(shared, block.rows + head, step.layer);
    load_queries<T, size>(shared, step, tile);
    row_state state;
    float sums[size / 8][4];
    load_state<size>(state, sums, step, tile);
    const bool active = warp_of(static_cast<int>(threadIdx.x)) * warp_rows < tile.rows;  // warps without queries only copy
    unsigned held[size / 16][4] = {};
    bool first = true;
    while (next >= 0) {
        cp_async_wait<0>();
        __syncthreads();  // the keys are there, and the values' buffer is free
        // Past the tile's last position too: rows there may be left of a step that was taken back, and not finite.
        const std::int64_t seen = tile.end - block.begin;
        copy_values<T, size>(shared, block.rows + head, step.layer, seen < block.count ? static_cast<std::int32_t>(seen) : block.count);
        if constexpr (size <= 128) {
            if (first) {
#pragma unroll
                for (int k = 0; k < size / 16; ++k) query_fragment(held[k], shared, k);
            }
            first = false;
        }
        tile_logits logits;
        if (active) multiply_keys<T, size>(logits, shared, held);
        int low[2], high[2];
        seen_tokens(low, high, block, step, tile);
        cp_async_wait<0>();
        __syncthreads();  // the values are there, and the keys' buffer is free
        next = walk.next(step, tile);
        if (next >= 0) {
            block = step.blocks[next];
            copy_keys<T, size>(shared, block.rows + head, step.layer);
        }
        if (!active) continue;
        finish_logits(logits, step.layer, low, high);
        const float2 shrink = softmax_step(logits, state);
        multiply_values<T, size>(sums, logits, shrink, shared);
    }
    if (active) store_state<size>(state, sums, step, tile);
}

/// Grid: threads over rows x query heads x (dv + 1), the last of each for maximum and weight.
__global__ void prefill_begin_kernel(prefill_state state, std::int64_t count, std::int32_t dv) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) state.max[i] = nothing, state.weight[i] = 0;
    if (i < count * dv) state.sums[i] = 0;
}

/// A warp per row and query head.
__global__ void prefill_end_kernel(prefill_state state, std::int64_t count, std::int32_t query_heads, std::int32_t dv, tensor_out out, float* lse) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * (prefill_threads / 32) + warp_of(thread);
    if (i >= count) return;
    const float weight = state.weight[i], factor = weight > 0 ? 1 / weight : 0.0F;
    float* to = out.data + i / query_heads * out.token_stride + i % query_heads * out.head_stride;
    for (int j = lane_of(thread); j < dv; j += 32) to[j] = state.sums[i * dv + j] * factor;
    if (lse != nullptr && lane_of(thread) == 0) lse[i] = weight > 0 ? state.max[i] + logf(weight) : nothing;
}

template <class T, int size>
void launch_prefill(const prefill_step& step, stream s) {
    const auto rows = static_cast<unsigned>(step.tokens * step.layer.group);
    launch("prefill_attend", s, dim3((rows + tile_rows - 1) / tile_rows, static_cast<unsigned>(step.layer.kv_heads)), dim3(prefill_threads),
           sizeof(prefill_shared<T, size>), &prefill_kernel<T, size>, step);
}

template <class T>
void launch_for_size(const prefill_step& step, stream s) {
    const auto size = std::max(step.layer.key_size, step.layer.value_size);
    if (size <= 64) return launch_prefill<T, 64>(step, s);
    if (size <= 80) return launch_prefill<T, 80>(step, s);
    if (size <= 96) return launch_prefill<T, 96>(step, s);
    if (size <= 128) return launch_prefill<T, 128>(step, s);
    launch_prefill<T, 256>(step, s);
}

void check_shape(const layer_layout& layer) {
    const auto fits = [](std::int32_t size) { return size >= 8 && size <= 256 && size % 8 == 0; };
    if (!fits(layer.key_size) || !fits(layer.value_size))
        throw invalid_argument("Prefill attention takes head sizes that are multiples of 8 up to 256, not " + std::to_string(layer.key_size) + " (keys) and " +
                               std::to_string(layer.value_size) + " (values).");
    if (layer.stored == dtype::f32) throw invalid_argument("Exact rows on the device are bf16 or fp16; choose one of them as the stored type.");
}

unsigned ceil_div(std::int64_t a, std::int64_t b) { return static_cast<unsigned>((a + b - 1) / b); }

}  // namespace

void prefill_begin(const prefill_state& state, std::int64_t rows, std::int32_t query_heads, std::int32_t value_size, stream s) {
    const auto count = rows * query_heads;
    launch("prefill_begin", s, dim3(ceil_div(count * value_size, 256)), dim3(256), 0, &prefill_begin_kernel, state, count, value_size);
}

void prefill_attend(const prefill_step& step, stream s) {
    check_shape(step.layer);
    if (step.tokens <= 0 || step.block_count <= 0) return;
    if (step.layer.stored == dtype::f16) return launch_for_size<__half>(step, s);
    launch_for_size<__nv_bfloat16>(step, s);
}

void prefill_end(const prefill_state& state, std::int64_t rows, std::int32_t query_heads, std::int32_t value_size, const tensor_out& out, float* lse,
                 stream s) {
    const auto count = rows * query_heads;
    launch("prefill_end", s, dim3(ceil_div(count, prefill_threads / 32)), dim3(prefill_threads), 0, &prefill_end_kernel, state, count, query_heads, value_size,
           out, lse);
}

}  // namespace sekv::cuda
