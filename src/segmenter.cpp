#include "sekv/span/segmenter.hpp"

#include <algorithm>
#include <string>
#include <type_traits>

namespace sekv {

static_assert(std::is_copy_constructible_v<segmenter> && std::is_nothrow_move_constructible_v<segmenter>);

namespace {

constexpr std::int32_t longest_span = 1 << 20;

// Grows by doubling: reserve() alone would move the whole vector on every token.
template <class T>
void grow(std::vector<T>& v, std::size_t extra) {
    const std::size_t need = v.size() + extra;
    if (need > v.capacity()) v.reserve(std::max(need, 2 * v.capacity()));
}

}  // namespace

void segmenter_options::validate() const {
    if (!std::isfinite(alpha) || alpha < 0) throw invalid_argument("segmenter_options::alpha must be finite and >= 0, not " + std::to_string(alpha) + ".");
    if (l_max < 1 || l_max > longest_span) throw invalid_argument("segmenter_options::l_max must be 1 to 1048576 tokens, not " + std::to_string(l_max) + ".");
    if (l_min < 1 || l_min > l_max)
        throw invalid_argument("segmenter_options::l_min must be 1 to l_max = " + std::to_string(l_max) + " tokens, not " + std::to_string(l_min) + ".");
    if (fixed_length < 1 || fixed_length > longest_span)
        throw invalid_argument("segmenter_options::fixed_length must be 1 to 1048576 tokens, not " + std::to_string(fixed_length) + ".");
    if (policy > span_policy::dictated)
        throw invalid_argument("segmenter_options::policy has no policy numbered " + std::to_string(static_cast<int>(policy)) + ".");
}

segmenter::segmenter(const segmenter_options& options) : options_(options) { options_.validate(); }

void segmenter::push(std::span<const float> signals) {
    for (std::size_t i = 0; i < signals.size(); ++i) {
        if (!std::isfinite(signals[i]) || signals[i] < 0)
            throw invalid_argument("The signal of token " + std::to_string(signals_.size() + i) + " is " + std::to_string(signals[i]) +
                                   "; it must be finite and not negative.");
    }
    const auto shortest = static_cast<std::size_t>(options_.policy == span_policy::fixed ? options_.fixed_length : options_.l_min);
    const auto open = static_cast<std::size_t>(length() - open_begin());
    reserve_for(signals.size(), options_.policy == span_policy::dictated ? 0 : (open + signals.size()) / shortest);
    for (const float s : signals) step(s);
}

void segmenter::reserve_for(std::size_t tokens, std::size_t cuts) {
    grow(signals_, tokens);
    grow(anchors_, tokens);
    grow(spans_, cuts);
    grow(closings_, cuts);
}

// Room was reserved, so that nothing here can fail halfway.
void segmenter::step(float signal) noexcept {
    const std::int64_t token = length();
    const std::int64_t open = token - open_begin();
    const bool above = static_cast<double>(signal) > threshold();
    const bool adaptive = options_.policy == span_policy::surprisal || options_.policy == span_policy::key_novelty;
    if (adaptive && above && open >= options_.l_min) {
        close(token, cut_reason::threshold, token + 1);
    } else if (adaptive && open >= options_.l_max) {
        close(largest_since_l_min(signal), cut_reason::length, token + 1);
    } else if (options_.policy == span_policy::fixed && open >= options_.fixed_length) {
        close(token, cut_reason::length, token + 1);
    }
    signals_.push_back(signal);
    anchors_.push_back(above);
    moments_.add(static_cast<double>(signal));
}

// Of equal signals the last one: a flat stream then gives spans of l_max, not of l_min.
std::int64_t segmenter::largest_since_l_min(float arriving) const noexcept {
    std::int64_t best = length();
    float largest = arriving;
    for (std::int64_t i = length() - 1; i >= open_begin() + options_.l_min; --i) {
        const float s = signals_[static_cast<std::size_t>(i)];
        if (s > largest) {
            largest = s;
            best = i;
        }
    }
    return best;
}

span segmenter::make_span(std::int64_t begin, std::int64_t end, cut_reason reason) const noexcept {
    double sum = 0.0;
    for (std::int64_t i = begin; i < end; ++i) sum += static_cast<double>(signals_[static_cast<std::size_t>(i)]);
    return {begin, end, static_cast<float>(sum), reason};
}

void segmenter::close(std::int64_t end, cut_reason reason, std::int64_t at) noexcept {
    spans_.push_back(make_span(open_begin(), end, reason));
    closings_.push_back({at, moments_});
}

void segmenter::cut(std::span<const std::int64_t> positions) {
    std::int64_t last = open_begin();
    for (const std::int64_t p : positions) {
        if (p <= last || p > length())
            throw invalid_argument("A cut at position " + std::to_string(p) + " must lie after " + std::to_string(last) +
                                   " (the cut or closed span before it) and at or before the length " + std::to_string(length()) + ".");
        last = p;
    }
    reserve_for(0, positions.size());
    for (const std::int64_t p : positions) close(p, cut_reason::dictated, length());
}

void segmenter::truncate(std::int64_t length) {
    if (length < 0 || length > this->length())
        throw invalid_argument("Can't truncate to " + std::to_string(length) + " tokens; the segmenter has seen " + std::to_string(this->length()) + ".");
    // Closings happen in the order of `at`, so those that stay are a prefix, and none lies between the last of them and `length`.
    const auto later = std::partition_point(closings_.begin(), closings_.end(), [&](const closing& c) { return c.at <= length; });
    auto kept = static_cast<std::size_t>(later - closings_.begin());
    moments_ = kept == 0 ? running_moments{} : closings_[kept - 1].moments;
    for (std::int64_t i = moments_.count; i < length; ++i) moments_.add(static_cast<double>(signals_[static_cast<std::size_t>(i)]));
    // The engine's cuts outlive a rollback to before they were made, if their positions do. In place: nothing is allocated.
    for (std::size_t from = kept; from < spans_.size(); ++from) {
        const span s = spans_[from];
        if (s.reason != cut_reason::dictated || s.end > length) continue;
        spans_[kept] = make_span(kept == 0 ? 0 : spans_[kept - 1].end, s.end, cut_reason::dictated);
        closings_[kept] = {length, moments_};
        ++kept;
    }
    spans_.resize(kept);
    closings_.resize(kept);
    signals_.resize(static_cast<std::size_t>(length));
    anchors_.resize(static_cast<std::size_t>(length));
}

std::size_t segmenter::checked(std::int64_t token) const {
    if (token < 0 || token >= length()) throw invalid_argument("Token " + std::to_string(token) + " is outside [0, " + std::to_string(length()) + ").");
    return static_cast<std::size_t>(token);
}

std::vector<span> segmenter::all_spans() const {
    std::vector<span> all(spans_);
    if (open_begin() < length()) all.push_back(open_span());
    return all;
}

span segmenter::span_at(std::int64_t token) const {
    static_cast<void>(checked(token));
    if (token >= open_begin()) return open_span();
    return *std::upper_bound(spans_.begin(), spans_.end(), token, [](std::int64_t t, const span& s) { return t < s.end; });
}

std::vector<std::int64_t> segmenter::anchors() const {
    std::vector<std::int64_t> found;
    for (std::size_t i = 0; i < anchors_.size(); ++i) {
        if (anchors_[i]) found.push_back(static_cast<std::int64_t>(i));
    }
    return found;
}

std::size_t segmenter::bytes() const noexcept {
    return sizeof(segmenter) + signals_.size() * sizeof(float) + (anchors_.size() + 7) / 8 + spans_.size() * sizeof(span) + closings_.size() * sizeof(closing);
}

}  // namespace sekv
