// The knobs of the progressive preset, with the defaults that design.md section 2 settles.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "sekv/codec/calibration.hpp"
#include "sekv/core/error.hpp"

namespace sekv {

/// Which statistic of a GQA group's probabilities decides on a zoom.
enum class zoom_rule : std::uint8_t { mean, max };

/// One query token's zoom list in one KV head. The spans are valid during the call.
struct zoom_event {
    std::int32_t layer = 0, kv_head = 0;
    std::int64_t position = 0;             ///< of the query
    std::span<const std::int64_t> tokens;  ///< positions, ascending
    std::span<const float> mass;           ///< probability of each: the group's sum under zoom_rule::mean, else its largest
};
using zoom_observer = std::function<void(const zoom_event&)>;

struct progressive_options {
    /// R1 bits per token for the key and for the value; multiples of 4. 0 means the default of the head size: 80 + 32 below 128, 96 + 32 from 128 on.
    std::int32_t key_sketch_bits = 0;
    std::int32_t value_sketch_bits = 0;
    /// R2 bytes per token and KV head as a multiple of the head size, 0.75 to 2; 0 means the default of the head size: 1.25 below 128 (80-byte lines at 64), 1 from 128 on.
    float line_factor = 0.0F;
    /// A sealed token whose probability (group mean or max) exceeds tau is read at R2; in (0, 1].
    float tau = 2e-4F;
    zoom_rule rule = zoom_rule::mean;
    /// At most this many zoomed tokens per KV head and query token; the largest win.
    std::int32_t cap = 1024;
    /// Line cache slots per KV head and sequence, a multiple of 32; 0 turns the cache off.
    std::int32_t line_slots = 256;
    /// R1 is made anew from R2 when it was made this many tokens ago; 0 means never.
    std::int32_t horizon = 1024;
    /// Identity share of the query metric. See blend_metric.
    float shrinkage = 0.01F;
    /// Power p of W = M'^(p/2): 1 weighs by the queries, 0 is plain PCA.
    float metric_power = 1.0F;
    /// Queries enter the metric with weight exp(-age / memory), age in tokens.
    std::int32_t metric_memory = 1024;
    /// Key and value statistics are fitted per position range of max(epoch_tokens, n / 8) tokens.
    std::int32_t epoch_tokens = 4096;
    /// Keeps raw K and V on the host after sealing (R3); zooms read it in place of R2.
    bool exact_tier = false;
    /// Pre-RoPE query moments of this model (`model` metric); null means the sequence's own queries only.
    std::shared_ptr<const calibration> prior;
    /// Told of every list that isn't empty, to see what a model reads or how large a line cache pays. Called from the executor's threads, several at once; must not throw. Host backend only.
    zoom_observer observer;

    void validate() const {
        const auto bits = [](std::int32_t b, std::int32_t most) { return b >= 0 && b <= most && b % 4 == 0; };
        if (!bits(key_sketch_bits, 512)) throw invalid_argument("key_sketch_bits must be a multiple of 4 from 0 (default) to 512, not " + std::to_string(key_sketch_bits) + ".");
        if (!bits(value_sketch_bits, 512)) throw invalid_argument("value_sketch_bits must be a multiple of 4 from 0 (default) to 512, not " + std::to_string(value_sketch_bits) + ".");
        if (!(line_factor == 0.0F || (line_factor >= 0.75F && line_factor <= 2.0F))) throw invalid_argument("line_factor must be 0 (default) or 0.75 to 2, not " + std::to_string(line_factor) + ".");
        if (!(tau > 0.0F && tau <= 1.0F)) throw invalid_argument("tau must be above 0 and at most 1, not " + std::to_string(tau) + ".");
        if (cap < 0) throw invalid_argument("cap must be 0 or more tokens, not " + std::to_string(cap) + ".");
        if (line_slots < 0 || line_slots % 32 != 0) throw invalid_argument("line_slots must be a multiple of 32, not " + std::to_string(line_slots) + ".");
        if (horizon < 0) throw invalid_argument("horizon must be 0 (never) or more tokens, not " + std::to_string(horizon) + ".");
        if (!(shrinkage > 0.0F && shrinkage <= 1.0F)) throw invalid_argument("shrinkage must be above 0 and at most 1, not " + std::to_string(shrinkage) + ".");
        if (!(metric_power >= 0.0F && metric_power <= 2.0F)) throw invalid_argument("metric_power must be 0 to 2, not " + std::to_string(metric_power) + ".");
        if (metric_memory < 1) throw invalid_argument("metric_memory must be 1 token or more, not " + std::to_string(metric_memory) + ".");
        if (epoch_tokens < 256) throw invalid_argument("epoch_tokens must be 256 or more, not " + std::to_string(epoch_tokens) + ".");
    }
};

}  // namespace sekv
