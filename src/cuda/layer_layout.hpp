// The kernels' view of a layer, from what the host library knows of it.
#pragma once

#include "kernels/types.hpp"
#include "sekv/core/shape.hpp"
#include "sekv/tier/bases.hpp"

namespace sekv::cuda {

inline constexpr std::int32_t ring_tokens = 64;  ///< queries that a sequence holds back for its metric

/// Where heads lie in an exact page of one layer alone, and the page's bytes: how strips hold rows.
[[nodiscard]] inline head_stride strip_heads(const layer_layout& l) noexcept { return {0, static_cast<std::uint64_t>(block_tokens) * static_cast<std::uint64_t>(l.key_size + l.value_size) * size_of(l.stored)}; }
[[nodiscard]] inline std::size_t strip_page_bytes(const layer_layout& l) noexcept { return static_cast<std::size_t>(l.kv_heads) * strip_heads(l).stride; }

/// What a cache's layers share: the formats of its pages and buffers.
struct cache_layout {
    cache_layout(const model_shape& model, const progressive_options& options, dtype stored);
    std::vector<layer_layout> layers;  ///< kv_source layers take their owner's places, and their own scale and soft-cap
    std::size_t ring_bytes = 0;        ///< of a sequence's query ring
    std::size_t exact_line_block_bytes = 0;  ///< of an R3 page

private:
    void place_ring(layer_layout& l);
};

}  // namespace sekv::cuda
