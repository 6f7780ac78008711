// How long things take: percentiles out of a fixed number of counters.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace sekv {

/// Durations in logarithmic buckets, eight per doubling: a percentile is known within 9%.
class latency_histogram {
public:
    void add(std::uint64_t nanoseconds) noexcept {
        ++buckets_[bucket(nanoseconds)];
        ++count_;
        if (nanoseconds > most_) most_ = nanoseconds;
    }
    static constexpr std::size_t bucket_count = 512;
    /// Adds what was counted elsewhere: `count` durations in each bucket, the longest of `most` nanoseconds. Bucket i < 8: i ns; else 8 per doubling.
    template <class Count>
    void add_buckets(const Count* counts, std::uint64_t most) noexcept {
        for (std::size_t i = 0; i < bucket_count; ++i) buckets_[i] += counts[i], count_ += counts[i];
        if (most > most_) most_ = most;
    }
    latency_histogram& operator+=(const latency_histogram& o) noexcept {
        for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += o.buckets_[i];
        count_ += o.count_;
        if (o.most_ > most_) most_ = o.most_;
        return *this;
    }
    [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
    [[nodiscard]] std::uint64_t max() const noexcept { return most_; }
    /// Nanoseconds that a share p (0 to 1) of the additions did not exceed, up to the bucket's width; 0 when empty.
    [[nodiscard]] std::uint64_t percentile(double p) const noexcept {
        if (count_ == 0) return 0;
        const auto rank = static_cast<std::uint64_t>(p * static_cast<double>(count_ - 1)) + 1;
        std::uint64_t seen = 0;
        for (std::size_t i = 0; i < buckets_.size(); ++i) {
            seen += buckets_[i];
            if (seen >= rank) return upper(i) < most_ ? upper(i) : most_;
        }
        return most_;
    }

private:
    static constexpr std::size_t bucket(std::uint64_t ns) noexcept {
        if (ns < 8) return static_cast<std::size_t>(ns);
        const auto octave = static_cast<std::size_t>(std::bit_width(ns)) - 4;  // ns >> octave is 8 to 15
        return octave * 8 + static_cast<std::size_t>(ns >> octave);
    }
    static constexpr std::uint64_t upper(std::size_t i) noexcept {
        if (i < 16) return i;
        const auto octave = i / 8 - 1;
        return ((static_cast<std::uint64_t>(i % 8) + 9) << octave) - 1;
    }
    std::array<std::uint64_t, bucket_count> buckets_{};
    std::uint64_t count_ = 0;
    std::uint64_t most_ = 0;
};

}  // namespace sekv
