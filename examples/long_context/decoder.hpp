// Two ways to run one sequence through a loaded model: llama.cpp's own cache and attention, or a provider's.
#pragma once

#include <llama.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "graph_hook.hpp"
#include "llama_host.hpp"

namespace sekv::example {

struct context_free_fn {
    void operator()(llama_context* c) const noexcept { llama_free(c); }
};
using context_handle = std::unique_ptr<llama_context, context_free_fn>;

/// Of which tokens a decode returns the logits. `none` spares prefill the output layer.
enum class logits_of : std::uint8_t { none, last, all };

enum class native_cache : std::uint8_t {
    f16_flash,  ///< llama.cpp's default: fp16 keys and values, flash attention (which sums values in fp16 on CPUs)
    f32_exact,  ///< fp32 keys and values, attention as matrix products: the reference for comparisons
};

/// Sees the nodes of a decoder's graphs; see cb_eval in llama.h.
struct graph_observer {
    ggml_backend_sched_eval_callback callback = nullptr;
    void* userdata = nullptr;
};

/// Text of one sequence through llama.cpp alone. The host must outlive it.
class native_decoder {
public:
    native_decoder(const llama_host& host, native_cache cache, graph_observer observer = {});

    /// Runs `tokens`, the first at position `first_position`, which must be size(). Returns rows of vocabulary() logits:
    /// none, one, or one per token. Throws invalid_argument for no tokens, a foreign token, a position out of order or
    /// beyond the context; what was decoded before stays.
    std::vector<float> decode(std::span<const token> tokens, std::int64_t first_position, logits_of rows);
    /// Forgets every token but the first `tokens` (0 to size()), so that many questions can follow one document.
    void truncate(std::int64_t tokens);
    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    /// Bytes of one token's keys and values in this cache, over all layers.
    [[nodiscard]] std::uint64_t bytes_per_token() const noexcept { return bytes_per_token_; }

private:
    const llama_host& host_;
    context_handle context_;
    std::uint64_t bytes_per_token_ = 0;
    std::int64_t size_ = 0;
};

/// Text of one sequence with keys, values and attention in a provider. llama.cpp's own cache has room for one chunk and is
/// emptied after each, so its size doesn't grow. The provider and the host must outlive it.
class hosted_decoder {
public:
    hosted_decoder(const llama_host& host, attention_provider& provider);

    /// As native_decoder::decode; whether `first_position` is in order is the provider's to judge. What the provider
    /// throws comes out here, after provider.cancel(); chunks before the failing one stay in the provider.
    std::vector<float> decode(std::span<const token> tokens, std::int64_t first_position, logits_of rows);

private:
    void run_chunk(std::span<const token> tokens, std::int64_t position, logits_of rows, std::vector<float>& logits);

    const llama_host& host_;
    attention_provider& provider_;
    std::unique_ptr<graph_hook> hook_;  // its address is known to the context
    context_handle context_;
};

}  // namespace sekv::example
