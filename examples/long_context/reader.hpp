// What the comparison runs: something that holds a document and reads on from its end, token by token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "decoder.hpp"

namespace sekv::example {

using logits_row = std::vector<float>;                       ///< [vocabulary]
using prefill_progress = std::function<void(std::int64_t)>;  ///< called with the tokens done so far

class reader {
public:
    reader() = default;
    reader(const reader&) = delete;
    reader& operator=(const reader&) = delete;
    virtual ~reader() = default;

    /// Takes the document, once, before anything else. Returns the logits behind its last token.
    virtual logits_row prefill(std::span<const token> document, const prefill_progress& progress) = 0;
    /// Forgets all but the document.
    virtual void rewind() = 0;
    /// Takes given text. Returns the logits behind its last token.
    virtual logits_row prompt(std::span<const token> tokens) = 0;
    /// Takes one token as a decode step. Returns the logits behind it.
    virtual logits_row step(token t) = 0;
};

/// llama.cpp's own attention over an fp32 cache: the reference.
class full_cache_reader final : public reader {
public:
    explicit full_cache_reader(const llama_host& host) : chunk_(host.options().chunk), decoder_(host, native_cache::f32_exact) {}

    logits_row prefill(std::span<const token> document, const prefill_progress& progress) override {
        logits_row last;
        while (!document.empty()) {
            const auto part = document.first(std::min(document.size(), static_cast<std::size_t>(chunk_)));
            document = document.subspan(part.size());
            last = decoder_.decode(part, decoder_.size(), document.empty() ? logits_of::last : logits_of::none);
            progress(decoder_.size());
        }
        document_ = decoder_.size();
        return last;
    }
    void rewind() override { decoder_.truncate(document_); }
    logits_row prompt(std::span<const token> tokens) override { return decoder_.decode(tokens, decoder_.size(), logits_of::last); }
    logits_row step(token t) override { return decoder_.decode({&t, 1}, decoder_.size(), logits_of::last); }

private:
    std::int32_t chunk_;
    native_decoder decoder_;
    std::int64_t document_ = 0;
};

}  // namespace sekv::example
