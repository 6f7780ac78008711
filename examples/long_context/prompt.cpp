#include "prompt.hpp"

#include <algorithm>

#include "sekv/core/error.hpp"

namespace sekv::example {
namespace {

constexpr const char* instruction = "Answer questions about the document in one short sentence.";
// Stand for the texts while the chat format is applied; those are tokenised apart, so that nothing in them becomes a control token.
constexpr std::string_view document_mark = "[[document]]", question_mark = "[[question]]";

/// Text around the document and the question.
struct frame {
    std::string before, between, after;
};

frame frame_of(const llama_host& host) {
    const std::string body = std::string(document_mark) + "\n\nQuestion: " + std::string(question_mark);
    std::string text = body + "\nAnswer:";
    if (host.has_chat_template()) {
        const std::vector<chat_message> messages{{"system", instruction}, {"user", body}};
        text = host.chat_prompt(messages, true);
    }
    const auto d = text.find(document_mark);
    const auto q = text.find(question_mark);
    if (d == std::string::npos || q == std::string::npos || q < d) throw unsupported("This model's chat template loses the user's text.");
    return {text.substr(0, d), text.substr(d + document_mark.size(), q - d - document_mark.size()), text.substr(q + question_mark.size())};
}

void append(std::vector<token>& to, const std::vector<token>& from) { to.insert(to.end(), from.begin(), from.end()); }

void check_lengths(const prompt& p, std::int32_t max_tokens, std::int64_t context) {
    if (const auto needed = p.longest(max_tokens); needed > context)
        throw invalid_argument("The document of " + std::to_string(p.document.size()) + " tokens, with a question and an answer of up to " +
                               std::to_string(max_tokens) + " tokens or the continuation behind it, takes " + std::to_string(needed) +
                               " tokens, and the model's context holds " + std::to_string(context) + "; shorten the document or --max-tokens.");
}

}  // namespace

std::int64_t prompt::longest(std::int32_t max_tokens) const {
    auto behind = continuation.size();
    for (const auto& q : questions) behind = std::max(behind, q.tokens.size() + static_cast<std::size_t>(max_tokens));
    return static_cast<std::int64_t>(document.size() + behind);
}

prompt make_prompt(const llama_host& host, const std::string& document, const std::vector<std::string>& questions, const std::string& continuation,
                   std::size_t continuation_tokens, std::int32_t max_tokens) {
    const auto around = frame_of(host);
    prompt p;
    p.document = host.tokenise(around.before, true, true);
    append(p.document, host.tokenise(document, false, false));
    for (const auto& line : questions) {
        const auto bar = line.rfind('|');
        question q{line.substr(0, bar), bar == std::string::npos ? "" : line.substr(bar + 1), {}};
        if (q.text.empty()) throw invalid_argument("A question is empty ('" + line + "').");
        q.tokens = host.tokenise(around.between + q.text, false, false);
        append(q.tokens, host.tokenise(around.after, false, true));
        p.questions.push_back(std::move(q));
    }
    if (!continuation.empty()) p.continuation = host.tokenise(continuation, false, false);
    if (p.continuation.size() > continuation_tokens) p.continuation.resize(continuation_tokens);
    check_lengths(p, max_tokens, host.options().context);
    return p;
}

}  // namespace sekv::example
