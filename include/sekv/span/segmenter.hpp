// Streaming segmentation of a sequence into spans.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "sekv/core/error.hpp"
#include "sekv/span/span.hpp"

namespace sekv {

/// Mean and population deviation of a stream (Welford 1962), in double.
struct running_moments {
    std::int64_t count = 0;
    double mean = 0.0;
    double squares = 0.0;  ///< sum of squared distances from the mean

    void add(double x) noexcept {
        ++count;
        const double step = x - mean;
        mean += step / static_cast<double>(count);
        squares += step * (x - mean);
    }
    [[nodiscard]] double deviation() const noexcept { return count == 0 ? 0.0 : std::sqrt(squares / static_cast<double>(count)); }
    friend bool operator==(const running_moments&, const running_moments&) = default;
};

/// What decides where spans end.
enum class span_policy : std::uint8_t {
    surprisal,    ///< signal = -ln p of the token, nats
    key_novelty,  ///< signal = 1 - cos(key, mean key of the open span): where an engine has no prompt logits (see key_novelty)
    fixed,        ///< every fixed_length tokens; signals are recorded only
    dictated,     ///< only where cut() says; signals are recorded only
};

struct segmenter_options {
    span_policy policy = span_policy::surprisal;
    double alpha = 1.0;              ///< deviations above the mean that end a span, >= 0
    std::int32_t l_min = 8;          ///< tokens that a span has at least, 1 to l_max
    std::int32_t l_max = 64;         ///< tokens that a span has at most, up to 2^20
    std::int32_t fixed_length = 16;  ///< under `fixed`, 1 to 2^20

    /// Throws invalid_argument naming the option.
    void validate() const;
    friend bool operator==(const segmenter_options&, const segmenter_options&) = default;
};

/// Cuts a stream of per-token signals into spans that partition [0, length). A plain value: a fork copies it.
///
/// With mu and sigma the running mean and deviation of the signals before a token, a span of at least l_min tokens closes
/// before a token whose signal is above mu + alpha * sigma. A span that has l_max tokens when the next one arrives closes
/// before the largest signal among the places that leave it l_min to l_max tokens (the last one of equals); the tokens from
/// there on begin the new open span. A token enters mu and sigma after its own test. So all closed spans have l_min to
/// l_max tokens, but for those that cut() ends or begins, and the result doesn't depend on how the stream is chunked.
class segmenter {
public:
    /// Throws invalid_argument as segmenter_options::validate does.
    explicit segmenter(const segmenter_options& options = {});

    /// One token's signal, finite and >= 0 (0 for the first token of a sequence). Throws invalid_argument; strong guarantee.
    void push(float signal) { push(std::span<const float>(&signal, 1)); }
    /// A chunk of them, all or nothing.
    void push(std::span<const float> signals);

    /// Ends spans at these positions, whatever the policy: strictly ascending, each > open_begin() and <= length(). Lengths
    /// are then the engine's business. Tensor parallel ranks stay equal by `dictated` and one rank's cuts.
    /// Throws invalid_argument; strong guarantee.
    void cut(std::span<const std::int64_t> positions);

    /// Forgets the tokens from `length` on: the state is then equal (operator==) to that of a segmenter which saw only those
    /// before, and only the cuts at or before `length`, those made later being made at `length`. Closed spans may open again.
    /// Costs as much as the tokens since the last span that stays closed. Throws invalid_argument past length().
    void truncate(std::int64_t length);

    [[nodiscard]] const segmenter_options& options() const noexcept { return options_; }
    [[nodiscard]] std::int64_t length() const noexcept { return static_cast<std::int64_t>(signals_.size()); }
    /// Closed spans, in order: they partition [0, open_begin()).
    [[nodiscard]] std::span<const span> spans() const noexcept { return spans_; }
    /// Where the open span begins; equals length() while it is empty.
    [[nodiscard]] std::int64_t open_begin() const noexcept { return spans_.empty() ? 0 : spans_.back().end; }
    /// The open span, possibly empty.
    [[nodiscard]] span open_span() const noexcept { return make_span(open_begin(), length(), cut_reason::open); }
    /// Closed spans and, where it isn't empty, the open one: they partition [0, length()).
    [[nodiscard]] std::vector<span> all_spans() const;
    /// The span, closed or open, that holds a token. Throws invalid_argument outside [0, length()).
    [[nodiscard]] span span_at(std::int64_t token) const;

    /// A token's signal as pushed. Throws invalid_argument outside [0, length()).
    [[nodiscard]] float signal(std::int64_t token) const { return signals_[checked(token)]; }
    [[nodiscard]] std::span<const float> signals() const noexcept { return signals_; }
    /// mu + alpha * sigma that the next token will be held against; +inf before the first token.
    [[nodiscard]] double threshold() const noexcept {
        return moments_.count == 0 ? std::numeric_limits<double>::infinity() : moments_.mean + options_.alpha * moments_.deviation();
    }
    [[nodiscard]] const running_moments& moments() const noexcept { return moments_; }

    /// Whether a token's signal was above the threshold when it came, cut or no cut: the tokens that the paper preset keeps exact.
    [[nodiscard]] bool is_anchor(std::int64_t token) const { return anchors_[checked(token)]; }
    /// All anchors, ascending.
    [[nodiscard]] std::vector<std::int64_t> anchors() const;

    /// Bytes that the state needs, spare capacity not counted: ~4.1 per token and 64 per closed span.
    [[nodiscard]] std::size_t bytes() const noexcept;

    friend bool operator==(const segmenter&, const segmenter&) = default;

private:
    /// What truncate needs of a closed span: the length at which it was first seen closed, and moments of then or one token before.
    struct closing {
        std::int64_t at = 0;
        running_moments moments;
        friend bool operator==(const closing&, const closing&) = default;
    };

    [[nodiscard]] std::size_t checked(std::int64_t token) const;
    [[nodiscard]] span make_span(std::int64_t begin, std::int64_t end, cut_reason reason) const noexcept;
    [[nodiscard]] std::int64_t largest_since_l_min(float arriving) const noexcept;
    void reserve_for(std::size_t tokens, std::size_t cuts);
    void step(float signal) noexcept;
    void close(std::int64_t end, cut_reason reason, std::int64_t at) noexcept;

    segmenter_options options_;
    running_moments moments_;
    std::vector<float> signals_;
    std::vector<bool> anchors_;
    std::vector<span> spans_;
    std::vector<closing> closings_;  // one per closed span
};

}  // namespace sekv
