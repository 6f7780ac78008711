// Tells a GGUF that llama.cpp and sekv can run from one that they can't, before anything is loaded.
#pragma once

#include <string>

namespace sekv::example {

struct gguf_identity {
    std::string architecture;  ///< general.architecture
    std::string fingerprint;   ///< of the metadata, the tensor table and samples of the weights
    bool long_rope = false;    ///< two sets of rotary factors, chosen by the length of the context
};

/// Reads the header of the file at `path`. Throws io_error for a file that can't be read, format_error for one that is no
/// GGUF, is damaged or cut short or holds no language model, and unsupported for a model whose memory isn't keys and values
/// of a causal decoder (recurrent, hybrid, latent attention, encoder). Each says why.
[[nodiscard]] gguf_identity check_gguf(const std::string& path);

}  // namespace sekv::example
