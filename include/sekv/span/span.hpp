// A span: a run of consecutive tokens, found by surprisal, novelty, count, or as the engine dictates.
#pragma once

#include <cstdint>

namespace sekv {

/// Why a span ends where it does.
enum class cut_reason : std::uint8_t {
    open,       ///< it has not ended: tokens may still join
    threshold,  ///< the next token's signal was above mean + alpha * deviation
    length,     ///< it reached l_max (or the fixed length)
    dictated,   ///< the engine cut here
};

/// Tokens [begin, end) of a sequence.
struct span {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    float surprisal_sum = 0.0F;  ///< nats; under key_novelty the sum of novelties
    cut_reason reason = cut_reason::open;

    [[nodiscard]] std::int64_t size() const noexcept { return end - begin; }
    friend bool operator==(const span&, const span&) = default;
};

}  // namespace sekv
