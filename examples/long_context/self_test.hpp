// Whether the hook computes what llama.cpp computes, for the model at hand.
#pragma once

#include "llama_host.hpp"

namespace sekv::example {

/// Relative rms = rms of a difference / rms of what llama.cpp has, fp32 cache and no flash attention.
struct hook_agreement {
    double attention = 0;  ///< of the attention outputs, in the layer where it is worst
    double logits = 0;     ///< of the logits of all tokens
    std::int64_t tokens = 0;
};

/// Up to which both count as equal: rounding of fp32 attention, nothing more.
inline constexpr double agreement_bound = 1e-5;

/// A prompt of at most 48 tokens in two chunks, then four single tokens, through llama.cpp alone and through the hook.
/// In every layer exact_provider's output, from the keys, values and queries that the hook took, is compared with
/// llama.cpp's, which is then what the hook puts into the graph; so the inputs of every layer are the same in both runs.
/// Without that, a model of quantised weights would amplify the last bit: llama.cpp rounds its activations to 8 bits,
/// and one activation that rounds the other way moves the logits by percents.
[[nodiscard]] hook_agreement measure_agreement(const llama_host& host);

/// The same, each run on its own outputs; meaningful for unquantised weights only.
[[nodiscard]] hook_agreement measure_free_agreement(const llama_host& host);

/// measure_agreement; throws unsupported, with the figures, if one is above agreement_bound or not finite.
hook_agreement self_test(const llama_host& host);

}  // namespace sekv::example
