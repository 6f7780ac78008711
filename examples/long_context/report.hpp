// What a run found, as text and as JSON (keys: docs/json.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "cache_reader.hpp"
#include "comparison.hpp"

namespace sekv::example {

struct run_report {
    std::int64_t document_tokens = 0;
    std::int64_t capacity = 0;           ///< tokens that shares are of
    std::uint64_t full_cache_bytes = 0;  ///< bf16 KV at that capacity
    std::uint64_t device_budget = 0;
    std::uint64_t model_parameters = 0, learned_parameters = 0;
    throughput full_prefill, full_decode, our_prefill, our_decode;
    std::vector<answer_comparison> answers;
    continuation_comparison continuation;  ///< no positions where none was measured
    cache_state prefilled;                 ///< right behind the document
    cache_state longest;                   ///< when the device tier held most after that, looked at between tasks
    cache_state last;                      ///< at the end: peaks and zooms of the whole run
    double seconds = 0;

    [[nodiscard]] double share(std::uint64_t bytes) const noexcept { return static_cast<double>(bytes) / static_cast<double>(full_cache_bytes); }
    [[nodiscard]] divergence over_answers() const;
};

/// One question and its two answers, on stdout.
void print_answer(const answer_comparison& c);
void print_report(const arguments& a, const run_report& r);
[[nodiscard]] std::string json_report(const arguments& a, const run_report& r);

}  // namespace sekv::example
