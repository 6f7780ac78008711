#include "comparison.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "sekv/span/surprisal.hpp"

namespace sekv::example {
namespace {

token most_likely(const logits_row& logits) { return static_cast<token>(std::max_element(logits.begin(), logits.end()) - logits.begin()); }

double log_normaliser(const logits_row& logits) {
    const double top = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    double sum = 0;
    for (const float l : logits) sum += std::exp(static_cast<double>(l) - top);
    return top + std::log(sum);
}

struct generated {
    std::vector<token> tokens;     // without the one that ends it
    std::vector<logits_row> rows;  // behind the question, then behind each token
};

// Greedy. Rows are kept only where asked for: they are large.
generated generate(const llama_host& host, timed_reader& r, const question& q, std::int32_t max_tokens, bool keep_rows) {
    r.run.rewind();
    generated g;
    auto logits = r.run.prompt(q.tokens);
    for (std::int32_t i = 0;; ++i) {
        const auto next = most_likely(logits);
        if (keep_rows) g.rows.push_back(std::move(logits));
        if (host.ends(next) || i == max_tokens) break;
        g.tokens.push_back(next);
        if (i + 1 == max_tokens) break;
        logits = r.step(next);
    }
    return g;
}

// Whether `ours` says what `expected` does, in any case.
bool contains(const std::string& text, const std::string& expected) {
    const auto same = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b)); };
    return !expected.empty() && std::search(text.begin(), text.end(), expected.begin(), expected.end(), same) != text.end();
}

answer read_answer(const llama_host& host, const std::vector<token>& tokens, const std::string& expected) {
    auto text = host.detokenise(tokens);
    std::replace(text.begin(), text.end(), '\n', ' ');
    text.erase(0, std::min(text.find_first_not_of(' '), text.size()));
    const bool right = contains(text, expected);
    return {std::move(text), right};
}

}  // namespace

void divergence::add(const logits_row& full, const logits_row& ours) {
    const double nf = log_normaliser(full), no = log_normaliser(ours);
    double kl = 0;
    for (std::size_t i = 0; i < full.size(); ++i) {
        const double lf = static_cast<double>(full[i]) - nf;
        kl += std::exp(lf) * (lf - (static_cast<double>(ours[i]) - no));
    }
    kl = std::max(kl, 0.0);  // rounding can leave it a hair below
    ++positions;
    kl_sum += kl;
    kl_max = std::max(kl_max, kl);
    same_top += most_likely(full) == most_likely(ours) ? 1 : 0;
}

divergence& divergence::operator+=(const divergence& o) noexcept {
    positions += o.positions;
    kl_sum += o.kl_sum;
    kl_max = std::max(kl_max, o.kl_max);
    same_top += o.same_top;
    return *this;
}

logits_row timed_reader::step(token t) {
    const stopwatch clock;
    auto logits = run.step(t);
    ++decode.tokens;
    decode.seconds += clock.seconds();
    return logits;
}

answer_comparison compare_answers(const llama_host& host, timed_reader& full, timed_reader& ours, const question& q, std::int32_t max_tokens) {
    answer_comparison c{q.text, q.expected, {}, {}, false, {}};
    const auto reference = generate(host, full, q, max_tokens, true);
    ours.run.rewind();
    auto logits = ours.run.prompt(q.tokens);
    for (std::size_t i = 0;; ++i) {
        c.difference.add(reference.rows[i], logits);
        if (i + 1 == reference.rows.size()) break;
        logits = ours.step(reference.tokens[i]);
    }
    c.agree = c.difference.same_top == c.difference.positions;
    c.full = read_answer(host, reference.tokens, q.expected);
    c.ours = c.agree ? c.full : read_answer(host, generate(host, ours, q, max_tokens, false).tokens, q.expected);
    return c;
}

continuation_comparison compare_continuation(timed_reader& full, timed_reader& ours, const std::vector<token>& continuation, const logits_row& full_first,
                                             const logits_row& our_first) {
    full.run.rewind();
    ours.run.rewind();
    continuation_comparison c;
    auto f = full_first, o = our_first;
    for (std::size_t i = 0; i < continuation.size(); ++i) {
        const auto t = continuation[i];
        const auto width = static_cast<std::int64_t>(f.size());
        c.difference.add(f, o);
        c.full_surprisal += static_cast<double>(surprisal(f.data(), width, t)) / static_cast<double>(continuation.size());
        c.our_surprisal += static_cast<double>(surprisal(o.data(), width, t)) / static_cast<double>(continuation.size());
        if (i + 1 == continuation.size()) break;  // nothing is predicted behind the last token
        f = full.step(t);
        o = ours.step(t);
    }
    return c;
}

}  // namespace sekv::example
