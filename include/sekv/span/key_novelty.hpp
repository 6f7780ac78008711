// The segmenter's signal where an engine has no logits for prompt tokens: how far a key turns from its span's mean.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sekv/core/error.hpp"

namespace sekv {

/// Novelty 1 - cos(k_t, mean key of the open span), in [0, 2], averaged over the chosen heads.
///
/// It follows a segmenter, token by token, since each signal depends on the cuts before it:
///
///     segments.push(novelty.push(keys));
///     novelty.cut(segments.open_begin());
///
/// The keys of the open span are held (at most l_max of them), because a cut at l_max goes back and the mean is then over
/// the tokens that stay. The mean is always summed from the span's first token on, so equal histories agree bit for bit.
/// segmenter::truncate may open a closed span again, whose keys are gone here: see truncate.
class key_novelty {
public:
    /// Throws invalid_argument unless heads and size (of a key) are positive.
    key_novelty(std::int32_t heads, std::int32_t size) : heads_(heads), size_(size) {
        if (heads < 1 || size < 1)
            throw invalid_argument("Key novelty needs at least one head of at least one element, not " + std::to_string(heads) + " of " + std::to_string(size) +
                                   ".");
        sum_.assign(row(), 0.0);
    }

    /// Takes the next token's keys [heads, size]; returns its novelty against the tokens held, 0 if there are none. A key or
    /// mean of length 0 has no direction and counts as 1. Throws invalid_argument for a wrong size or values that are not
    /// finite; strong guarantee.
    [[nodiscard]] float push(std::span<const float> keys) {
        if (keys.size() != row())
            throw invalid_argument("Key novelty takes " + std::to_string(row()) + " elements per token, not " + std::to_string(keys.size()) + ".");
        for (const float k : keys) {
            if (!std::isfinite(k))
                throw invalid_argument("A key of token " + std::to_string(length()) + " holds " + std::to_string(k) + "; keys must be finite.");
        }
        const float novelty = against_mean(keys);
        keys_.insert(keys_.end(), keys.begin(), keys.end());
        add(keys.data());
        return novelty;
    }

    /// The open span begins at `position` now, begin() <= position <= length(); costs the tokens that stay. Throws invalid_argument.
    void cut(std::int64_t position) {
        if (position == begin_) return;
        if (position < begin_ || position > length())
            throw invalid_argument("Key novelty holds tokens [" + std::to_string(begin_) + ", " + std::to_string(length()) +
                                   "); the open span can't begin at " + std::to_string(position) + ".");
        keys_.erase(keys_.begin(), keys_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(position - begin_) * row()));
        begin_ = position;
        resum();
    }

    /// Forgets the tokens from `length` on. Where the segmenter's open span then begins before begin(), its keys are not here:
    /// restart(open_begin) and push the keys of [open_begin, length) again (their return values are not needed); they are in
    /// the exact tail as long as `length` lies in what the engine may reject. Throws state_error below begin().
    void truncate(std::int64_t length) {
        if (length > this->length())
            throw invalid_argument("Can't truncate to " + std::to_string(length) + " tokens; there are " + std::to_string(this->length()) + ".");
        if (length < begin_)
            throw state_error("The keys before token " + std::to_string(begin_) + " are gone; restart from the open span's begin and push them again.");
        keys_.resize(static_cast<std::size_t>(length - begin_) * row());
        resum();
    }

    /// Holds nothing, and takes `position` for the next token's. Throws invalid_argument if it is negative.
    void restart(std::int64_t position) {
        if (position < 0) throw invalid_argument("A token's position can't be negative (" + std::to_string(position) + ").");
        keys_.clear();
        begin_ = position;
        resum();
    }

    [[nodiscard]] std::int64_t begin() const noexcept { return begin_; }
    [[nodiscard]] std::int64_t length() const noexcept { return begin_ + static_cast<std::int64_t>(keys_.size() / row()); }
    [[nodiscard]] std::size_t bytes() const noexcept { return sizeof(key_novelty) + keys_.size() * sizeof(float) + sum_.size() * sizeof(double); }
    friend bool operator==(const key_novelty&, const key_novelty&) = default;

private:
    [[nodiscard]] std::size_t row() const noexcept { return static_cast<std::size_t>(heads_) * static_cast<std::size_t>(size_); }

    [[nodiscard]] float against_mean(std::span<const float> keys) const noexcept {
        if (keys_.empty()) return 0.0F;
        const auto d = static_cast<std::size_t>(size_);
        double total = 0.0;
        for (std::size_t first = 0; first < keys.size(); first += d) {
            double dot = 0.0, key = 0.0, mean = 0.0;
            for (std::size_t i = first; i < first + d; ++i) {
                const double k = static_cast<double>(keys[i]);
                dot += k * sum_[i];
                key += k * k;
                mean += sum_[i] * sum_[i];
            }
            const double norm = std::sqrt(key) * std::sqrt(mean);
            total += norm > 0 ? 1.0 - std::clamp(dot / norm, -1.0, 1.0) : 1.0;
        }
        return static_cast<float>(total / static_cast<double>(heads_));
    }

    void add(const float* keys) noexcept {
        for (std::size_t i = 0; i < row(); ++i) sum_[i] += static_cast<double>(keys[i]);
    }

    void resum() noexcept {
        std::fill(sum_.begin(), sum_.end(), 0.0);
        for (std::size_t at = 0; at < keys_.size(); at += row()) add(keys_.data() + at);
    }

    std::int32_t heads_;
    std::int32_t size_;
    std::int64_t begin_ = 0;
    std::vector<float> keys_;  // of the open span, [tokens, heads, size]
    std::vector<double> sum_;  // [heads, size]; cos(k, mean) = cos(k, sum)
};

}  // namespace sekv
