// SeKV beside the full cache: answers, and KL per token on given text.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "prompt.hpp"
#include "reader.hpp"

namespace sekv::example {

class stopwatch {
public:
    [[nodiscard]] double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct throughput {
    std::int64_t tokens = 0;
    double seconds = 0;
    [[nodiscard]] double rate() const noexcept { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0; }
};

/// How far one run's next-token distributions are from the full cache's, over positions of the same text.
struct divergence {
    std::int64_t positions = 0;
    double kl_sum = 0, kl_max = 0;  ///< KL(full || ours), nats
    std::int64_t same_top = 0;      ///< positions with the same most likely token

    void add(const logits_row& full, const logits_row& ours);
    divergence& operator+=(const divergence& o) noexcept;
    [[nodiscard]] double kl() const noexcept { return positions > 0 ? kl_sum / static_cast<double>(positions) : 0.0; }
    [[nodiscard]] double agreement() const noexcept { return positions > 0 ? static_cast<double>(same_top) / static_cast<double>(positions) : 0.0; }
};

struct answer {
    std::string text;
    bool right = false;  ///< contains the expected string; false where none is known
};

struct answer_comparison {
    std::string question, expected;
    answer full, ours;
    bool agree = false;     ///< token by token
    divergence difference;  ///< along the full cache's answer
};

struct continuation_comparison {
    divergence difference;
    double full_surprisal = 0, our_surprisal = 0;  ///< mean, nats per token
};

/// A reader and how long its decode steps took.
struct timed_reader {
    reader& run;
    throughput decode{};

    logits_row step(token t);
};

/// Greedy answers of both; ours is forced along the full cache's answer first, and answers by itself where it would differ.
[[nodiscard]] answer_comparison compare_answers(const llama_host& host, timed_reader& full, timed_reader& ours, const question& q, std::int32_t max_tokens);

/// Both read the continuation token by token; full_first and our_first are the logits behind the document.
[[nodiscard]] continuation_comparison compare_continuation(timed_reader& full, timed_reader& ours, const std::vector<token>& continuation,
                                                           const logits_row& full_first, const logits_row& our_first);

}  // namespace sekv::example
