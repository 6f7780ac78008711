// What host code hands to the kernels: plain structs that both sides understand. No CUDA header, nothing owned.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sekv/core/scalar.hpp"
#include "sekv/exec/sketch_ops.hpp"

struct CUstream_st;

namespace sekv::cuda {

using stream = CUstream_st*;  ///< cudaStream_t

using host::block_tokens;  ///< tokens of a page of exact rows, of a sealed block
using host::plane_bytes;   ///< of a sketch plane; byte i: the nibble of token i (low) and of token i + 32 (high)
inline constexpr std::int32_t segment_blocks = 16;  ///< sealed blocks of a segment, at most
inline constexpr std::int32_t most_group = 16;      ///< query heads per KV head

/// Where the KV heads of one layer lie in a page or buffer: head h at byte first + h * stride.
struct head_stride {
    std::uint64_t first = 0;
    std::uint64_t stride = 0;
};

/// Byte offsets inside one head's part of a key_bases device buffer (see tier/bases.hpp): A [dk, dk] fp16 row-major, error [dk] float, step [dk] float, bits [dk] uint8,
/// fields host::sketch_field[key_bits], field_count int32.
struct key_place {
    std::uint32_t a = 0, error = 0, step = 0, bits = 0, fields = 0, field_count = 0;
};

/// Byte offsets inside one head's part of an epoch's device buffer: key_mean [dk] float, value_basis [dv, dv] fp16 (row j is component j), value_mean [dv] float, typical_scale float, the value
/// sketch's step [dv] float, bits [dv] uint8, fields, field_count int32, then widths [d / 8] uint8 and steps [d] float of the lines' two halves.
struct epoch_place {
    std::uint32_t key_mean = 0, value_basis = 0, value_mean = 0, typical_scale = 0, step = 0, bits = 0, fields = 0, field_count = 0, key_widths = 0, key_step = 0, value_widths = 0, value_step = 0;
};

/// Shape, codes and places of one layer; the same for every sequence of a cache.
struct layer_layout {
    std::int32_t kv_heads = 0, group = 0, key_size = 0, value_size = 0;
    float scale = 1, soft_cap = 0;   ///< factor on q . k; soft_cap 0: none
    std::int32_t window = 0;         ///< sliding window, 0: none
    dtype stored = dtype::bf16;      ///< of exact rows and R3 lines: bf16 or f16
    // R1: planes of 32 bytes per block of 64 tokens, the keys' first. R2: a line per token, [key codes][scale byte][value codes].
    std::int32_t key_planes = 0, value_planes = 0, key_bits = 0, value_bits = 0;
    std::int32_t key_line_bytes = 0, value_line_bytes = 0, line_bytes = 0, line_stride = 0;
    std::int32_t exact_line_bytes = 0;  ///< R3: [key][value] as stored; 0 without the exact tier
    // Pages. Exact page: per head keys transposed [dk, 64], then values [64, dv]; the sink page likewise with sink_capacity in place of 64.
    head_stride exact_page, sink_page, sketch_page, line_page, exact_line_page;
    std::int32_t sink_capacity = 0;
    // Basis buffers.
    head_stride key_buffer, epoch_buffer, encoder_buffer;  ///< encoder: host-tier B [dk, dk] float per head
    key_place key;
    epoch_place epoch;
    // Line cache of a sequence: per head [slots * cache_stride lines][slots uint16 tags][slots uint8 clocks][uint8 now], see src/line_cache.cpp.
    head_stride line_cache;
    std::int32_t cache_stride = 0;
    // Query ring of a sequence: [ring_tokens, query_heads, dk] bf16 from this byte on.
    std::uint64_t query_ring = 0;
};

/// A run of exact rows in one page. The page may lie in pinned host memory.
struct exact_block {
    const std::byte* rows = nullptr;
    std::int64_t begin = 0;
    std::int32_t count = 0;
    std::int32_t unused = 0;
};

/// A sealed block: its pages, positions, and which of the sequence's epochs and key bases its codes are in.
struct sealed_block {
    const std::uint8_t* sketch = nullptr;  ///< device
    const std::uint8_t* lines = nullptr;   ///< pinned host, mapped
    const std::uint8_t* exact = nullptr;   ///< pinned host, mapped; null without R3
    std::int64_t begin = 0;
    std::int32_t count = 0;  ///< up to 64; what lies behind was truncated
    std::int32_t epoch = 0, keys = 0;
    std::int32_t unused = 0;
};

/// Device buffers of one epoch: its statistics, and the key bases that its R2 lines are coded in.
struct epoch_ref {
    const std::byte* statistics = nullptr;
    const std::byte* keys = nullptr;
};

/// A run of at most segment_blocks sealed blocks that share epoch and R1 key basis: the unit of work over sealed tokens.
struct segment {
    std::int32_t first = 0, count = 0, epoch = 0, keys = 0;
};

/// One sequence as the kernels see it; lies in device memory, changed between steps only.
struct sequence_view {
    const exact_block* exact[2] = {nullptr, nullptr};  ///< by layer class: whole-context, sliding-window
    std::int32_t exact_count[2] = {0, 0};
    const std::byte* sinks = nullptr;  ///< page of the leading tokens' exact rows, once they are sealed
    std::int32_t sink_count = 0;       ///< sealed tokens below it are read there, and never from their codes
    std::int32_t sealed_count = 0;
    const sealed_block* sealed = nullptr;
    const segment* segments = nullptr;
    const epoch_ref* epochs = nullptr;
    const std::byte* const* key_bases = nullptr;  ///< device buffers, by sealed_block::keys
    std::int32_t segment_count = 0, epoch_count = 0, key_bases_count = 0;
    std::int32_t line_slots = 0;
    std::byte* line_cache = nullptr;  ///< device, null when line_slots is 0
    std::byte* query_ring = nullptr;  ///< device
};

/// An item of a batch: consecutive query tokens of one sequence. Lies in device memory, changed between steps only.
struct batch_entry {
    const sequence_view* sequence = nullptr;  ///< null: padding rows
    std::int64_t position = 0;                ///< of the first query token; rows up to and including a query's own position are seen
    std::int32_t tokens = 0;
    std::int32_t row = 0;    ///< of the first query token in the batch
    std::int32_t first = 0;  ///< of a longer item's tokens, the first that is among these
    std::int32_t unused = 0;
};

/// The item that a query row belongs to, and which of its tokens it is.
struct batch_row {
    std::int32_t item = 0;
    std::int32_t index = 0;
};

/// Device-memory tensors of the engine: element (token, head, j) at data[token * token_stride + head * head_stride + j].
struct tensor_in {
    const void* data = nullptr;
    dtype type = dtype::bf16;
    std::int64_t token_stride = 0, head_stride = 0;
};
struct tensor_out {
    float* data = nullptr;
    std::int64_t token_stride = 0, head_stride = 0;
};

/// Errors that kernels find, in memory that they write; the host reads it between steps.
struct deferred_flags {
    std::int32_t not_finite = 0;          ///< 1 once a K or V that is not finite (after conversion to the stored type) was appended
    std::int32_t queries_not_finite = 0;  ///< 1 once a query was not finite, left the range of the type that full resolution rounds it to, or was 2^56 or more; in rings and moments such elements count as zeros
};

/// Zoom counters, added to by kernels; buckets are those of latency_histogram.
struct zoom_counters {
    unsigned long long zooms = 0, tokens = 0, capped = 0, hits = 0, misses = 0, bytes = 0, most_tokens = 0, prefetched = 0;
    unsigned long long latency_most = 0;
    unsigned long long latency[512] = {};
};

}  // namespace sekv::cuda
