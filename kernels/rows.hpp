// Exact rows on the device: appending, exact prefill attention, reconstruction to token-level rows, reading back.
#pragma once

#include "kernels/types.hpp"

namespace sekv::cuda {

/// Writes K [rows, kv_heads, dk] and V [rows, kv_heads, dv] of a batch at its items' positions into the exact pages of `layer_class` (0 whole-context, 1 sliding-window), rounded to the stored type.
/// Padding rows write nothing.
struct append_step {
    layer_layout layer;
    std::int32_t layer_class = 0;
    std::int32_t row_count = 0;
    const batch_entry* items = nullptr;
    const batch_row* rows = nullptr;
    tensor_in keys, values;
    deferred_flags* flags = nullptr;
};
void append_rows(const append_step& step, stream s);

/// Puts queries [rows, query_heads, dk] of a batch into the sequences' query rings, scaled by layer.scale, as bf16; slot = position % ring_tokens. Elements that aren't finite, or are 2^56 or more once scaled, become zeros.
struct ring_step {
    layer_layout layer;
    std::int32_t row_count = 0, ring_tokens = 0;
    const batch_entry* items = nullptr;
    const batch_row* rows = nullptr;
    tensor_in queries;
    deferred_flags* flags = nullptr;
};
void ring_queries(const ring_step& step, stream s);

/// Running state of exact prefill attention, [rows, query_heads] and [rows, query_heads, dv], kept in fp32 from call to call.
struct prefill_state {
    float* max = nullptr;
    float* weight = nullptr;
    float* sums = nullptr;
};
void prefill_begin(const prefill_state& state, std::int64_t rows, std::int32_t query_heads, std::int32_t value_size, stream s);

/// Adds blocks of exact rows to the state of one item's query tokens: tensor cores, stored type inputs, fp32 sums. Queries are rounded to the stored type; the scale enters the logits in fp32.
struct prefill_step {
    layer_layout layer;
    head_stride page;                      ///< where heads lie in the blocks' pages: layer.exact_page, or a strip's
    const exact_block* blocks = nullptr;   ///< device array of block_count
    std::int32_t block_count = 0;
    std::int64_t position = 0;             ///< of the first query token
    std::int32_t tokens = 0, row = 0;      ///< query tokens, and the batch row of the first
    tensor_in queries;
    prefill_state state;
    deferred_flags* flags = nullptr;       ///< where queries that aren't finite are reported; null: nowhere
};
void prefill_attend(const prefill_step& step, stream s);

/// out = sums / weight (zeros when empty), lse = max + ln weight (-infinity when empty).
void prefill_end(const prefill_state& state, std::int64_t rows, std::int32_t query_heads, std::int32_t value_size, const tensor_out& out, float* lse, stream s);

/// Token-level rows of sealed blocks [first, first + count) at their best level (R3 if they have it, else R2; sinks from the sink page), as exact pages of the stored type: block i of the range goes to
/// strip + i * strip_stride, heads at `page`. Low-rank reconstruction: k = mean + A c, v = mean + scale U c (kernels/reconstruct.cu).
struct reconstruct_step {
    layer_layout layer;
    const sequence_view* sequence = nullptr;  ///< device
    std::int32_t first = 0, count = 0;
    std::byte* strip = nullptr;
    std::uint64_t strip_stride = 0;
    head_stride page;
};
void reconstruct_blocks(const reconstruct_step& step, stream s);

/// The same for fp32 key rows of R2 alone, [count * 64, dk] per head at keys + head * head_elements: what a new sketch generation is fitted on. Rows past a block's count are zeros.
void reconstruct_keys(const reconstruct_step& step, float* keys, std::int64_t head_elements, stream s);

/// Token-major fp32 copies of rows [first, first + count) of one page: keys to (token, head) of out views.
struct read_step {
    layer_layout layer;
    head_stride page;
    const std::byte* rows = nullptr;
    std::int32_t capacity = block_tokens;  ///< of the page: tokens per transposed key row
    std::int32_t first = 0, count = 0;
    tensor_out keys, values;
};
void read_rows(const read_step& step, stream s);

}  // namespace sekv::cuda
