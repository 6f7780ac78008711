// A model loaded by unmodified llama.cpp (C++ interface of the release in llama-cpp-python 0.3.36): its text functions
// and its description for sekv. What runs it: native_decoder and hosted_decoder in decoder.hpp.
#pragma once

#include <llama.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "graph_probe.hpp"
#include "sekv/core/shape.hpp"

struct ggml_threadpool;

namespace sekv::example {

using token = llama_token;

struct host_options {
    std::int64_t context = 0;  ///< positions that a sequence may take; 0 means what the model was trained with
    std::int32_t threads = 2;  ///< of llama.cpp
    std::int32_t chunk = 512;  ///< tokens that run through the network at once, 1 to 4096
    /// Widens quantised weights to fp32 while loading (4 bytes per weight of memory, and of temporary disk space meanwhile).
    /// In front of quantised weights llama.cpp rounds activations to 8 bits, so that the last bit of an attention output
    /// moves the logits by percents; without it two ways to run a model can be compared.
    bool fp32_weights = false;
};

struct chat_message {
    std::string role;  ///< "system", "user" or "assistant"
    std::string content;
};

struct model_free_fn {
    void operator()(llama_model* m) const noexcept { llama_model_free(m); }
};
struct threadpool_free_fn {
    void operator()(ggml_threadpool* p) const noexcept;
};
using model_handle = std::unique_ptr<llama_model, model_free_fn>;
using threadpool_handle = std::unique_ptr<ggml_threadpool, threadpool_free_fn>;

/// Owns the weights, shared by every decoder made from it, and must outlive them. Not thread-safe.
class llama_host {
public:
    /// Throws what check_gguf throws, unsupported for a model that llama.cpp can't load or whose attention can't be
    /// replaced, and invalid_argument for options out of range.
    llama_host(const std::string& path, host_options options);
    llama_host(const llama_host&) = delete;
    llama_host& operator=(const llama_host&) = delete;

    [[nodiscard]] const model_shape& shape() const noexcept { return graph_.shape; }
    [[nodiscard]] const attention_graph& graph() const noexcept { return graph_; }
    [[nodiscard]] const std::string& architecture() const noexcept { return architecture_; }
    [[nodiscard]] const host_options& options() const noexcept { return options_; }  ///< with the defaults filled in
    [[nodiscard]] std::int64_t trained_context() const noexcept { return llama_model_n_ctx_train(model_.get()); }
    [[nodiscard]] std::int32_t vocabulary() const noexcept { return llama_vocab_n_tokens(vocab_); }  ///< width of a row of logits
    [[nodiscard]] llama_model* model() const noexcept { return model_.get(); }
    [[nodiscard]] ggml_threadpool* threadpool() const noexcept { return threadpool_.get(); }

    [[nodiscard]] bool has_tokeniser() const noexcept { return llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_NONE; }
    /// `special_marks`: text such as <|im_start|> becomes the control token that it names. `frame`: adds BOS or EOS where the model wants them.
    /// Throws unsupported for a file without a tokeniser.
    [[nodiscard]] std::vector<token> tokenise(std::string_view text, bool frame, bool special_marks) const;
    [[nodiscard]] std::string detokenise(std::span<const token> tokens, bool special_marks = false) const;
    /// Whether the token ends a generation.
    [[nodiscard]] bool ends(token t) const noexcept { return llama_vocab_is_eog(vocab_, t); }
    [[nodiscard]] bool has_chat_template() const noexcept { return llama_model_chat_template(model_.get(), nullptr) != nullptr; }
    /// The messages in the model's own chat format; `reply` opens the assistant's turn. Throws unsupported if the file has
    /// no template or one that llama.cpp doesn't know.
    [[nodiscard]] std::string chat_prompt(std::span<const chat_message> messages, bool reply) const;

private:
    host_options options_;
    std::string architecture_;
    model_handle model_;
    threadpool_handle threadpool_;
    const llama_vocab* vocab_ = nullptr;
    attention_graph graph_;
};

}  // namespace sekv::example
