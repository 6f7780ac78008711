// What the benchmarks share: the threads and memory of a run, and one layer's cache filled with synthetic tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "full_kv.hpp"
#include "read_bandwidth.hpp"
#include "synthetic.hpp"
#include "tunable_codec.hpp"

namespace sekv::bench {

/// One of a run, made at its first use, which checks the opponent: the threads (SEKV_BENCH_THREADS, default 2) and the pass that empties the caches.
struct environment {
    std::shared_ptr<executor> threads;
    read_pass cold;

    /// Per benchmark (SEKV_BENCH_ROUNDS, default 11).
    [[nodiscard]] static std::int64_t rounds();

    [[nodiscard]] static environment& get();

private:
    environment();
};

/// A layer as models have it; name is part of the benchmarks' names.
struct layer_case {
    const char* name;
    std::int32_t kv_heads, group, d;
    [[nodiscard]] layer_shape shape() const;
};
inline constexpr layer_case layer_cases[] = {{"H32/8_d128", 8, 4, 128}, {"H9/3_d64", 3, 3, 64}};
inline constexpr std::int64_t lengths[] = {8192, 32768, 131072};

/// Everything outside the window sealed, or everything exact.
enum class filling : std::uint8_t { sealed, exact };

/// One layer's cache of n synthetic tokens, and its decode queries.
class subject {
public:
    subject(const layer_case& layer, std::int64_t n, filling how);
    /// The latest one is kept: the benchmarks of one case come one after the other.
    [[nodiscard]] static subject& get(const layer_case& layer, std::int64_t n, filling how);
    /// Filled anew.
    [[nodiscard]] static subject& fresh(const layer_case& layer, std::int64_t n, filling how);
    static void drop();

    /// One decode step's attention with the next query; seconds.
    double attend();
    /// Share of sealed tokens that `steps` attends read at full resolution, per KV head.
    [[nodiscard]] double zoom_rate(int steps);
    /// Finds a tau for this zoom rate, the cap out of the way; returns the tau.
    float turn_to_rate(double rate);
    /// Exact prefill attention of all n tokens, estimated from tiles at four depths; seconds. 0 where everything stays exact.
    [[nodiscard]] double prefill_seconds() const noexcept { return prefill_seconds_; }
    [[nodiscard]] double append_seconds() const noexcept { return append_seconds_; }
    [[nodiscard]] double seal_seconds() const noexcept { return seal_seconds_; }
    [[nodiscard]] std::uint64_t full_bytes() const noexcept { return cache_.model().full_cache_bytes(n_); }
    [[nodiscard]] std::int64_t tokens() const noexcept { return n_; }
    [[nodiscard]] const layer_shape& shape() const noexcept { return cache_.model().layers.front(); }
    [[nodiscard]] bench_cache& cache() noexcept { return cache_; }
    [[nodiscard]] sequence id() const noexcept { return sequence_; }
    [[nodiscard]] dial& zoom_dial() noexcept { return *dial_; }
    [[nodiscard]] const float* next_query();

private:
    [[nodiscard]] std::uint64_t tightest_quota() const;
    void fill(const synthetic_layer& data);
    void measure_prefill(const synthetic_layer& data);

    std::int64_t n_;
    std::shared_ptr<dial> dial_ = std::make_shared<dial>();
    bench_cache cache_;
    sequence sequence_;
    plan plan_;
    std::vector<float> queries_, out_;
    std::int64_t step_ = 0;
    double append_seconds_ = 0, seal_seconds_ = 0, prefill_seconds_ = 0;
};

/// The opponent for a case, kept as subjects are.
[[nodiscard]] full_kv_attention& opponent(const layer_case& layer, std::int64_t n);

[[nodiscard]] double median(std::vector<double> values);

}  // namespace sekv::bench
