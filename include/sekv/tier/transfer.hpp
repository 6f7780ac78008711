// What crosses from the host tier to the device tier, and how long it takes.
#pragma once

#include <cstdint>

#include "sekv/exec/latency.hpp"

namespace sekv {

/// Counters of zooming. A "zoom" is one KV head's list for one query token.
struct zoom_metrics {
    std::uint64_t zooms = 0;       ///< lists made
    std::uint64_t tokens = 0;      ///< tokens read at full resolution
    std::uint64_t capped = 0;      ///< lists that the cap shortened
    std::uint64_t hits = 0;        ///< tokens whose line was in the line cache
    std::uint64_t misses = 0;      ///< tokens whose line crossed from the host tier
    std::uint64_t bytes = 0;       ///< that crossed, prefetched lines' too
    std::uint64_t most_tokens = 0; ///< the longest list
    std::uint64_t prefetched = 0;  ///< lines that crossed ahead of their query, and count among its hits if it asks for them
    latency_histogram latency;     ///< of resolving and fetching one list

    zoom_metrics& operator+=(const zoom_metrics& o) noexcept {
        zooms += o.zooms;
        tokens += o.tokens;
        capped += o.capped;
        hits += o.hits;
        misses += o.misses;
        bytes += o.bytes;
        if (o.most_tokens > most_tokens) most_tokens = o.most_tokens;
        prefetched += o.prefetched;
        latency += o.latency;
        return *this;
    }
    [[nodiscard]] double hit_rate() const noexcept { return tokens > 0 ? static_cast<double>(hits) / static_cast<double>(hits + misses) : 0.0; }
};

}  // namespace sekv
