// Learns from the graph that llama.cpp builds what every attention layer looks like, whatever the architecture calls it.
#pragma once

#include <string_view>
#include <vector>

#include "sekv/core/shape.hpp"

struct llama_model;
struct ggml_tensor;

namespace sekv::example {

struct attention_graph {
    model_shape shape;                      ///< layers in the order in which the graph attends; no fingerprint
    std::vector<std::int32_t> cache_layer;  ///< per layer, the number in the name of the llama.cpp cache tensor that it reads
};

/// Which of llama.cpp's cache tensors `t` is, or is a view of: N for `prefix` + N in its name (cache_k_l, cache_v_l), else -1.
[[nodiscard]] std::int32_t cache_number(const ggml_tensor* t, std::string_view prefix) noexcept;

/// Has llama.cpp build the graph of one batch, a token longer than the sliding window, and reads it without computing
/// anything: sizes, scale, soft-cap, rotary embedding and, from the masks, the window of each layer. Throws unsupported,
/// saying why, for attention that isn't causal softmax over keys and values per head.
[[nodiscard]] attention_graph probe_attention(llama_model* model);

}  // namespace sekv::example
