// Decode attention on the device: project, score, route, choose, refine, combine. See kernels/README.md for how the kernels share the work.
#pragma once

#include "kernels/types.hpp"

namespace sekv::cuda {

/// What fixes a step's launch shapes and its workspace: upper bounds, while the counts themselves are read on the device. A captured graph stays valid while they hold.
struct decode_bounds {
    std::int32_t rows = 0;          ///< query tokens of the batch, padding included
    std::int32_t items = 0;
    std::int32_t exact_blocks = 0;  ///< of the longest sequence, either class
    std::int32_t segments = 0, epochs = 0, key_bases = 0;
    float tau = 1;
    bool largest_of_group = false;  ///< zoom_rule::max
    std::int32_t cap = 0;
};

struct decode_step {
    layer_layout layer;
    decode_bounds bounds;
    const batch_entry* items = nullptr;  ///< device, [bounds.items]
    const batch_row* rows = nullptr;     ///< device, [bounds.rows]
    tensor_in queries;                   ///< [rows, query_heads, dk], unscaled
    tensor_out out;                      ///< [rows, query_heads, dv]; padding rows get zeros
    float* lse = nullptr;                ///< [rows, query_heads] or null; padding rows get -infinity
    zoom_counters* counters = nullptr;   ///< device
    std::byte* workspace = nullptr;      ///< device, decode_workspace_bytes
    deferred_flags* flags = nullptr;     ///< where queries that aren't finite are reported; null: nowhere
    bool ahead = false;                  ///< of fetch_ahead: the items' own tokens aren't there yet, and nobody sees them
};

/// Bytes for the layers of these shapes (the largest over layers is what a plan needs).
[[nodiscard]] std::size_t decode_workspace_bytes(const layer_layout& layer, const decode_bounds& bounds);

/// Enqueues one layer's attention. No host synchronisation, no allocation; capturable. Throws device_error when a launch fails.
void attend_decode(const decode_step& step, stream s);

/// Brings the lines that these queries would zoom into the line caches: attend_decode up to its choice, which is all that it shares with it. step.ahead is set; out, lse and flags aren't looked at, and
/// of the counters only prefetched and bytes grow. As attend_decode otherwise.
void fetch_ahead(const decode_step& step, stream s);

}  // namespace sekv::cuda
