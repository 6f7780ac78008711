// Options of a cache and of a sequence.
#pragma once

#include <cstdint>
#include <string>

#include "sekv/core/error.hpp"
#include "sekv/exec/memory.hpp"
#include "sekv/span/segmenter.hpp"

namespace sekv {

struct cache_options {
    /// Hard limits of each tier, bytes over all sequences. Exceeding one is a budget_error, before anything changes.
    std::uint64_t device_budget = memory::unlimited;
    std::uint64_t host_budget = memory::unlimited;
    /// Sequences that the device budget is meant for: a sequence's default quota is its share. At least 1.
    std::int32_t max_sequences = 1;
    /// The last tokens before a query that are always exact, 1 to 65,536. Sliding-window layers keep their own window.
    std::int32_t window = 128;
    /// Tokens behind the window that sealing leaves alone, so that truncation by so many never meets a sealed block.
    std::int32_t rejectable = 64;
    segmenter_options spans;

    void validate() const {
        if (max_sequences < 1) throw invalid_argument("max_sequences must be at least 1, not " + std::to_string(max_sequences) + ".");
        if (window < 1 || window > 65536) throw invalid_argument("window must be 1 to 65536 tokens, not " + std::to_string(window) + ".");
        if (rejectable < 0 || rejectable > 65536) throw invalid_argument("rejectable must be 0 to 65536 tokens, not " + std::to_string(rejectable) + ".");
        spans.validate();
    }
};

struct sequence_options {
    /// Device bytes that this sequence may use; 0 means (device_budget - a decode step's workspace at
    /// `capacity`) / max_sequences. While everything fits, everything stays exact.
    std::uint64_t device_quota = 0;
    /// The longest length that will be asked for, tokens; appending past it is an error.
    std::int64_t capacity = 1 << 18;
};

/// Names an open sequence of one cache. Never reused after close.
struct sequence {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;  ///< 0 names no sequence: a padding row of a batch
    bool operator==(const sequence&) const = default;
};

/// How queries read sealed tokens: at full resolution (prompt chunks), or as each query needs (decode, draft verification).
enum class resolution : std::uint8_t { full, adaptive };

/// Consecutive query tokens of one sequence, whose K and V are already appended.
struct batch_item {
    sequence seq;
    std::int64_t tokens = 1;
    std::int64_t position = -1;  ///< of the first query token; -1 means the last `tokens` positions
};

}  // namespace sekv
