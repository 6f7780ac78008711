// Sealing on the device: statistics of exact rows, bases by cuSOLVER, projection by cuBLAS, quantisation and packing.
#pragma once

#include <memory>
#include <span>

#include "kernels/types.hpp"

namespace sekv::cuda {

/// Device scratch of a seal: fixed when the cache is made, so that sealing never allocates.
struct seal_shape {
    std::int32_t most_heads = 0;  ///< KV heads of the widest layer
    std::int32_t most_size = 0;   ///< of keys and values
    std::int32_t chunk = 1024;    ///< tokens gathered at once, a multiple of 64
};
/// 25 to 30 MiB for 8 heads of size 128 and chunks of 1024; cuBLAS' and cuSOLVER's own scratch is in it. Asks cuSOLVER, by a handle of its own. Throws device_error, budget_error or invalid_argument.
[[nodiscard]] std::size_t seal_workspace_bytes(const seal_shape& shape);

/// Rows of whole blocks in exact pages, which may lie in device or in pinned host memory.
struct seal_rows {
    const exact_block* blocks = nullptr;  ///< array that the device can read, oldest first, without gaps in position
    std::int32_t count = 0;               ///< blocks
    std::int32_t skip = 0;                ///< leading tokens that don't shape statistics (sinks of the sequence's first block)
    std::int64_t tokens = 0;              ///< sum of the blocks' counts
};

/// Fits and encodes one layer's heads at a time. Calls of one object are ordered on its stream; they synchronise with the host (bits are allotted there), and their work is done when they return.
/// Arrays of pages (`sketches`, `lines`, `exact`) are host arrays of pointers that the device can use. When a call throws, its buffers and pages hold an undefined mix of old and new; nothing else is touched,
/// and unless the context is lost the object serves the next call. Throws device_error (a failed call; eigenvectors that don't converge, as with rows that aren't finite), budget_error when a library runs out of
/// memory, and invalid_argument for blocks with gaps or a layer wider than the workspace.
class sealer {
public:
    /// workspace: device, aligned to 256 bytes, seal_workspace_bytes(shape). Makes cuBLAS and cuSOLVER handles for the current device.
    sealer(const seal_shape& shape, std::byte* workspace, stream s);
    ~sealer();
    sealer(const sealer&) = delete;
    sealer& operator=(const sealer&) = delete;
    /// What follows is enqueued on s, which the caller has ordered behind the stream before.
    void use(stream s);

    /// Fits the layer's statistics on rows and fills both device buffers and the encoder (pinned host): everything that the host's fit_epoch sets (src/progressive_seal.cpp), to the rounding of fp32.
    /// metric: [kv_heads, dk, dk] doubles on the host, M' of each head; power: of W = (M' / mean eigenvalue)^(power/2). Reads the keys twice and the values three times, and some samples again.
    void fit_epoch(const layer_layout& layer, const seal_rows& rows, const double* metric, double power, std::byte* key_buffer, std::byte* epoch_buffer, std::byte* encoder_buffer);
    /// Fits new R1 key bases in another metric on the keys that R2 decodes to, of sealed blocks [first, first + count) of one epoch, and writes the blocks' key planes anew to sketches[i]
    /// (pages of all layers that the device can write; only this layer's key planes are touched), once the whole fit has succeeded. sequence: readable by the device.
    void refit_keys(const layer_layout& layer, const sequence_view* sequence, std::int32_t first, std::int32_t count, std::int32_t skip, const double* metric, double power, std::byte* key_buffer,
                    std::byte* encoder_buffer, std::uint8_t* const* sketches);
    /// Encodes blocks with what the buffers hold: R1 planes in `sketch_keys`/`sketch_encoder` (key bases of the present generation), R2 lines in the epoch's own, R3 copies where exact[i] is set (exact may be null). Lines are
    /// written whole, zeros behind the last token. Where epoch_encoder is sketch_encoder, one projection serves both.
    void encode(const layer_layout& layer, const seal_rows& rows, const std::byte* epoch_buffer, const std::byte* epoch_encoder, const std::byte* sketch_keys,
                const std::byte* sketch_encoder, std::uint8_t* const* sketches, std::uint8_t* const* lines, std::uint8_t* const* exact);

private:
    struct state;
    std::unique_ptr<state> state_;
};

/// Queries of consecutive positions on their way into their layer's moments. moments[head] [dk, dk] = faded * moments + sum_i decay^(tokens-1-i) sum_g q q^T: metric.hpp's add_queries for all KV heads of a
/// layer. moments: fp32, device-accessible (pinned host is meant), head h at moments + h * dk * dk. queries: rows [0, tokens) of one item, unscaled; `scale` is applied.
struct moment_step {
    float* moments = nullptr;
    tensor_in queries;
    std::int64_t tokens = 0;
    std::int32_t kv_heads = 0, group = 0, key_size = 0;
    float scale = 1;
    float faded = 1;  ///< decay^tokens
};
/// Steps in one launch, so that all are taken or, when it is refused, none. steps: memory that host and device can read; those with the same moments lie next to each other and are taken in turn.
/// Elements that aren't finite, or are 2^56 or more once scaled, count as zeros and are reported to flags (null: not).
void add_queries(std::span<const moment_step> steps, double decay, deferred_flags* flags, stream s);

/// to[i] = from[i] for `count` floats, a multiple of 4; pinned host memory is meant.
void copy_floats(float* to, const float* from, std::int64_t count, stream s);

}  // namespace sekv::cuda
