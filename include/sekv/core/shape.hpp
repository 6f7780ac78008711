// What the library has to know of a model.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "sekv/core/error.hpp"

namespace sekv {

/// Rotary embedding of a layer, needed only by the `model` metric, which turns pre-RoPE moments to a position range.
struct rope_shape {
    enum class pairing : std::uint8_t { none, half, interleaved };  ///< (i, i + d/2), or (2i, 2i + 1)
    pairing pairs = pairing::none;
    std::vector<float> inverse_frequency;  ///< radians per position, one per rotated pair, scaling applied
};

/// One attention layer. Only key_size, value_size, kv_heads and group are always needed.
struct layer_shape {
    std::int32_t kv_heads = 0;
    std::int32_t group = 1;       ///< query heads per KV head (GQA group)
    std::int32_t key_size = 0;    ///< 64, 80, 96, 128 or 256
    std::int32_t value_size = 0;  ///< likewise
    float scale = 0.0F;           ///< factor on q.k; 0 means 1 / sqrt(key_size)
    std::int32_t sliding_window = 0;  ///< tokens that a query sees, itself included; 0 means all
    float soft_cap = 0.0F;            ///< s -> cap * tanh(s / cap); 0 means none
    std::int32_t kv_source = -1;      ///< a layer whose K and V this one reads instead of its own; -1 means its own
    bool sink_logits = false;         ///< learned sink logits (not supported yet)
    rope_shape rope{};

    [[nodiscard]] std::int32_t query_heads() const noexcept { return kv_heads * group; }
    [[nodiscard]] float logit_scale() const noexcept { return scale > 0 ? scale : 1.0F / std::sqrt(static_cast<float>(key_size)); }
    [[nodiscard]] bool windowed() const noexcept { return sliding_window > 0; }
};

struct model_shape {
    std::vector<layer_shape> layers;
    std::string fingerprint;  ///< names the weights; calibration files of another model are refused
    std::int32_t sinks = 4;   ///< leading tokens that stay exact on the device, in layers without a sliding window

    /// bf16 bytes of K and V of one token, over the layers that keep the whole context.
    [[nodiscard]] std::uint64_t full_bytes_per_token() const noexcept { return bytes_per_token(false); }
    /// The same over sliding-window layers.
    [[nodiscard]] std::uint64_t windowed_bytes_per_token() const noexcept { return bytes_per_token(true); }
    /// bf16 KV of a full cache that holds `tokens` tokens; sliding-window layers count at most their window.
    [[nodiscard]] std::uint64_t full_cache_bytes(std::int64_t tokens) const noexcept;

    /// Throws invalid_argument, or unsupported, naming the layer and the offending value.
    void validate() const;

private:
    [[nodiscard]] std::uint64_t bytes_per_token(bool windowed) const noexcept;
};

[[nodiscard]] inline std::uint64_t kv_row_bytes(const layer_shape& l, std::size_t element) noexcept {
    return static_cast<std::uint64_t>(l.kv_heads) * static_cast<std::uint64_t>(l.key_size + l.value_size) * element;
}

inline std::uint64_t model_shape::bytes_per_token(bool windowed) const noexcept {
    std::uint64_t sum = 0;
    for (const auto& l : layers) {
        if (l.kv_source < 0 && l.windowed() == windowed) sum += kv_row_bytes(l, 2);
    }
    return sum;
}

inline std::uint64_t model_shape::full_cache_bytes(std::int64_t tokens) const noexcept {
    std::uint64_t sum = 0;
    for (const auto& l : layers) {
        if (l.kv_source >= 0) continue;
        const auto held = l.windowed() && l.sliding_window < tokens ? l.sliding_window : tokens;
        sum += kv_row_bytes(l, 2) * static_cast<std::uint64_t>(held);
    }
    return sum;
}

inline void model_shape::validate() const {
    const auto head_size = [](std::int32_t d) { return d == 64 || d == 80 || d == 96 || d == 128 || d == 256; };
    if (layers.empty()) throw invalid_argument("A model needs at least one layer; model_shape::layers is empty.");
    if (sinks < 0 || sinks > 64) throw invalid_argument("model_shape::sinks must be 0 to 64, not " + std::to_string(sinks) + ".");
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const auto& l = layers[i];
        const auto at = "Layer " + std::to_string(i) + ": ";
        if (l.kv_heads < 1 || l.kv_heads > 1024) throw invalid_argument(at + "kv_heads must be 1 to 1024, not " + std::to_string(l.kv_heads) + ".");
        if (l.group < 1 || l.group > 64) throw invalid_argument(at + "group must be 1 to 64 query heads per KV head, not " + std::to_string(l.group) + ".");
        if (!head_size(l.key_size)) throw invalid_argument(at + "key_size must be 64, 80, 96, 128 or 256, not " + std::to_string(l.key_size) + ".");
        if (!head_size(l.value_size)) throw invalid_argument(at + "value_size must be 64, 80, 96, 128 or 256, not " + std::to_string(l.value_size) + ".");
        if (!std::isfinite(l.scale) || l.scale < 0) throw invalid_argument(at + "scale must be positive, or 0 for 1 / sqrt(key_size).");
        if (l.sliding_window < 0) throw invalid_argument(at + "sliding_window must be 0 (none) or more, not " + std::to_string(l.sliding_window) + ".");
        if (!std::isfinite(l.soft_cap) || l.soft_cap < 0) throw invalid_argument(at + "soft_cap must be positive, or 0 for none.");
        if (l.sink_logits) throw unsupported(at + "learned sink logits are not supported yet.");
        if (l.kv_source >= 0) {
            const auto source = static_cast<std::size_t>(l.kv_source);
            if (source >= i || layers[source].kv_source >= 0) throw invalid_argument(at + "kv_source must name an earlier layer that owns its K and V, not " + std::to_string(l.kv_source) + ".");
            const auto& s = layers[source];
            if (s.kv_heads != l.kv_heads || s.key_size != l.key_size || s.value_size != l.value_size || s.sliding_window != l.sliding_window)
                throw invalid_argument(at + "its shape must equal that of kv_source layer " + std::to_string(l.kv_source) + ".");
        }
        const auto& r = l.rope;
        if (r.pairs != rope_shape::pairing::none && 2 * r.inverse_frequency.size() > static_cast<std::size_t>(l.key_size))
            throw invalid_argument(at + "rope has more pairs than key_size / 2.");
    }
}

}  // namespace sekv
