// A sequence's line cache on the device: copies of recently zoomed lines (src/line_cache.cpp has the layout and the rule). Its state changes time, never output.
#pragma once

#include "kernels/types.hpp"

namespace sekv::cuda {

inline constexpr std::int32_t cache_ways = 32;

/// Bytes of one KV head: [slots lines][slots uint16 tags][slots uint8 clocks][uint8 now], to a multiple of 64; as sekv::line_cache. All zeros is an empty cache.
[[nodiscard]] constexpr std::size_t line_cache_head_bytes(std::int32_t slots, std::int32_t stride) noexcept {
    return slots == 0 ? 0 : (static_cast<std::size_t>(slots) * (static_cast<std::size_t>(stride) + 3) + 1 + 63) / 64 * 64;
}

/// What is the same for all layers of a cache.
struct line_cache_shape {
    std::int32_t heads = 0;   ///< of all layers together
    std::int32_t slots = 0;   ///< per head, a multiple of 32
    std::int32_t stride = 0;  ///< bytes of a slot
};

/// Forgets lines of positions from `position` on, in all heads of the cache at `cache` (device). Enqueued on s; throws device_error when the launch fails.
void invalidate_lines(std::byte* cache, const line_cache_shape& shape, std::int64_t position, stream s);

}  // namespace sekv::cuda
