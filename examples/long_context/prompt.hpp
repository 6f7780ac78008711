// The tokens that a run reads: one document, shared by every question about it.
#pragma once

#include <string>
#include <vector>

#include "llama_host.hpp"

namespace sekv::example {

struct question {
    std::string text;
    std::string expected;       ///< string that a right answer contains; may be empty
    std::vector<token> tokens;  ///< behind the document, up to where the answer begins
};

struct prompt {
    std::vector<token> document;  ///< with what a chat puts before it
    std::vector<question> questions;
    std::vector<token> continuation;  ///< may be empty

    /// Tokens that the longest task needs in all, an answer of max_tokens included.
    [[nodiscard]] std::int64_t longest(std::int32_t max_tokens) const;
};

/// `questions` are lines "text" or "text|expected". The model's chat format is used where it has one: system message, document
/// and question as the user's turn, the answer as the assistant's. At most `continuation_tokens` of the continuation are taken.
/// Throws invalid_argument where document, question and answer are longer than the context, naming both.
[[nodiscard]] prompt make_prompt(const llama_host& host, const std::string& document, const std::vector<std::string>& questions,
                                 const std::string& continuation, std::size_t continuation_tokens, std::int32_t max_tokens);

}  // namespace sekv::example
