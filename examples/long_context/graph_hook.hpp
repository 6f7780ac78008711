// Puts an attention_provider in the place of llama.cpp's cache and attention, through its evaluation callback alone.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <vector>

#include "attention_provider.hpp"
#include "graph_probe.hpp"

struct ggml_tensor;
struct llama_context_params;

namespace sekv::example {

/// llama.cpp shows the callback every node before computing it. A node that stores keys or values in llama.cpp's cache is
/// turned into one that copies them here, where they are certain to be alive; llama.cpp's own attention is turned into a
/// no-op after which computing pauses, and the provider writes that node's output. So each layer costs one pause. The
/// graph may be reused by llama.cpp: turning a node is idempotent. Needs flash attention on, a half-precision cache (a
/// quantised one rotates Q, K and V) and activations in host memory.
class graph_hook {
public:
    explicit graph_hook(const attention_graph& graph);
    graph_hook(const graph_hook&) = delete;
    graph_hook& operator=(const graph_hook&) = delete;

    /// Sets what the hook needs in the parameters of a context. The hook must outlive the context.
    void configure(llama_context_params& params) noexcept;
    /// The next graph runs `tokens` tokens through `provider`.
    void arm(attention_provider& provider, std::int64_t tokens) noexcept;
    /// Rethrows what stopped the graph; else throws state_error if `status`, what llama_decode returned, isn't 0, or
    /// unsupported if the graph didn't attend in every layer.
    void finish(std::int32_t status);

private:
    struct copy {
        std::vector<float> rows;  // [tokens, width]
        std::int64_t width = 0;
        bool fresh = false;
    };
    struct stored {
        std::array<copy, 2> parts;  // K, V
    };

    static bool callback(ggml_tensor* t, bool ask, void* self);
    static void copy_rows(ggml_tensor* node, int thread, int threads, void* part);

    bool wants(ggml_tensor* t);
    bool turn_store(ggml_tensor* t);
    void attend(ggml_tensor* t);
    const float* contiguous_query(const ggml_tensor* q, const layer_shape& l);
    void check_node(const ggml_tensor* t, const layer_shape& l) const;

    attention_graph graph_;
    std::vector<stored> stored_;  // by the number of llama.cpp's cache tensor
    std::vector<float> query_;
    attention_provider* provider_ = nullptr;
    std::int64_t tokens_ = 0;
    std::size_t next_layer_ = 0;
    std::exception_ptr error_;
};

}  // namespace sekv::example
