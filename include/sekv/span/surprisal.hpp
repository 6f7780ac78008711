// Surprisal and entropy of a next-token distribution, from its logits.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "sekv/core/error.hpp"

namespace sekv {

namespace detail {

/// A softmax's normaliser, kept so that -ln p near 0 keeps its digits: sum of exp(l - peak) = 1 + rest.
struct softmax_sum {
    double peak = 0.0;      ///< largest logit
    double rest = 0.0;      ///< sum of exp(l - peak) over all but one largest logit
    double rest_gap = 0.0;  ///< sum of exp(l - peak) * (peak - l), for the entropy
};

inline softmax_sum sum_softmax(const float* logits, std::int64_t vocab) {
    if (logits == nullptr || vocab < 1) throw invalid_argument("A next-token distribution needs at least one logit, not " + std::to_string(vocab) + ".");
    std::int64_t top = -1;
    for (std::int64_t i = 0; i < vocab; ++i) {
        const float l = logits[i];
        if (std::isnan(l) || l == INFINITY)
            throw invalid_argument("Logit " + std::to_string(i) + " is " + std::to_string(l) + "; logits must be finite, or -inf for a masked token.");
        if (l != -INFINITY && (top < 0 || l > logits[top])) top = i;
    }
    if (top < 0) throw invalid_argument("All " + std::to_string(vocab) + " logits are -inf; at least one token must be possible.");
    softmax_sum s{static_cast<double>(logits[top]), 0.0, 0.0};
    for (std::int64_t i = 0; i < vocab; ++i) {
        if (i == top || logits[i] == -INFINITY) continue;
        const double gap = s.peak - static_cast<double>(logits[i]);
        const double e = std::exp(-gap);
        s.rest += e;
        s.rest_gap += e * gap;
    }
    return s;
}

}  // namespace detail

/// -ln p(token) in nats, >= 0, of the softmax over `logits` [vocab]; +inf where the token is masked (its logit is -inf).
/// The first token of a sequence has no prediction: its surprisal is 0 by convention, not by this function.
/// Throws invalid_argument for a token outside [0, vocab), for NaN or +inf among the logits, or where all are -inf.
[[nodiscard]] inline float surprisal(const float* logits, std::int64_t vocab, std::int64_t token) {
    if (token < 0 || token >= vocab) throw invalid_argument("Token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(vocab) + ".");
    const auto s = detail::sum_softmax(logits, vocab);
    return static_cast<float>(std::log1p(s.rest) + (s.peak - static_cast<double>(logits[token])));
}

/// Entropy in nats, in [0, ln vocab], of the softmax over `logits` [vocab]. Throws as surprisal does.
[[nodiscard]] inline float entropy(const float* logits, std::int64_t vocab) {
    const auto s = detail::sum_softmax(logits, vocab);
    return static_cast<float>(std::log1p(s.rest) + s.rest_gap / (1.0 + s.rest));
}

}  // namespace sekv
