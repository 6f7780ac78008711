// What the CUDA engine's files share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/decode.hpp"
#include "kernels/rows.hpp"
#include "sekv/attend/cuda_engine.hpp"
#include "src/cuda/context.hpp"
#include "src/cuda/layer_layout.hpp"
#include "src/cuda/strip.hpp"

namespace sekv {

/// Where a plan's parts lie in its workspace, and what was last sent to them.
struct cuda_engine::step_tables {
    resolution how = resolution::adaptive;
    cuda::decode_bounds bounds;
    /// Some of the batch's rows: decode kernels take so many at once, which bounds their workspace.
    struct window {
        std::int32_t row = 0, rows = 0, entry = 0, entries = 0;
    };
    /// Some of an item's tokens, in a window.
    struct piece {
        std::size_t item = 0;
        std::int32_t first = 0, tokens = 0, row = 0;
    };
    std::vector<batch_item> items;  ///< as the plan has them; sequences without one are padding
    std::vector<window> windows;
    std::vector<piece> pieces;      ///< of all windows
    std::size_t rows_at = 0, work_at = 0, bytes = 0;       ///< batch_entry[items + pieces] lies first, then batch_row[rows] twice: of the batch, of the windows
    std::size_t strips_at = 0, strip_bytes = 0;            ///< full resolution: two strips behind the prefill state
    std::int32_t strip_blocks = 0;
    std::vector<cuda::batch_entry> sent;  ///< of items, then of pieces
    bool rows_sent = false;
    std::vector<char> attended;  ///< layers whose queries entered the rings since begin_step
};

struct cuda_engine::state {
    const model_shape& model;
    cuda_backend where;
    cuda::context& context;
    memory& budget;
    cuda_progressive_codec& coder;
    const cuda::cache_layout& places;
    dtype stored;
    buffer counters;         ///< device zoom_counters
    buffer counters_landed;  ///< pinned copy of them, as of some earlier point of the stream

    [[nodiscard]] const layer_shape& shape(std::int32_t layer) const noexcept { return model.layers[static_cast<std::size_t>(layer)]; }
    [[nodiscard]] const cuda::layer_layout& layout(std::int32_t layer) const noexcept { return places.layers[static_cast<std::size_t>(layer)]; }
    [[nodiscard]] layer_class class_of(std::int32_t layer) const noexcept { return shape(layer).windowed() ? layer_class::windowed : layer_class::whole; }
    [[nodiscard]] cudaStream_t joined() const { return context.joined(); }
    [[nodiscard]] cuda::deferred_flags* flags() const noexcept { return reinterpret_cast<cuda::deferred_flags*>(coder.flags()); }
    [[nodiscard]] buffer pinned(std::size_t bytes) const { return budget.allocate(tier::host, kind::workspace, std::max<std::size_t>(bytes, 1)); }
    /// Enqueues a copy of the counters to where the host reads them.
    void land_counters() const;
};

namespace cuda {

[[nodiscard]] inline tensor_in tensor(const rows_view& v) noexcept { return {v.data, v.type, v.token_stride, v.head_stride}; }

/// Outputs as kernels write them: the caller's device memory, or pinned memory that `deliver` copies out of.
class output {
public:
    output(const out_view& out, float* lse, memory& budget);

    tensor_out rows;
    float* lse = nullptr;
    /// Whether the caller's memory is the host's: then the stream must be waited for.
    [[nodiscard]] bool on_host() const noexcept { return copy_.data() != nullptr || lse_copy_.data() != nullptr; }
    void deliver() const;

private:
    out_view to_;
    float* lse_to_;
    buffer copy_, lse_copy_;
};

}  // namespace cuda
}  // namespace sekv
