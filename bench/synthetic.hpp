// Synthetic keys, values and queries of one layer, with the traits of real ones that the timings depend on.
#pragma once

#include <cstdint>
#include <vector>

#include "sekv/core/shape.hpp"
#include "sekv/exec/executor.hpp"

namespace sekv::bench {

/// Keys of a falling spectrum (component j of each head's random basis has deviation 0.9^j), and queries that each point partly at one key: attention is
/// peaked, and a head's logits spread over some nats. Token t's rows depend on (seed, head, t) only, so any range can be made at any time.
class synthetic_layer {
public:
    synthetic_layer(const layer_shape& shape, std::uint64_t seed);

    /// [count, kv_heads, key_size] of positions from `begin` on.
    void keys(std::int64_t begin, std::int64_t count, float* out, executor& threads) const;
    /// [count, kv_heads, value_size].
    void values(std::int64_t begin, std::int64_t count, float* out, executor& threads) const;
    /// [count, query_heads, key_size] of consecutive steps over a context of `length` tokens: from one step to the next a query keeps 0.8 of its direction, and
    /// its key with probability 3/4.
    [[nodiscard]] std::vector<float> queries(std::int64_t length, std::int64_t count, std::uint64_t seed) const;

private:
    enum class part : std::uint64_t { key = 1, value = 2 };
    void rows(part which, std::int64_t begin, std::int64_t count, std::int32_t size, const std::vector<float>& mix, float* out, executor& threads) const;
    void make_row(part which, std::int64_t head, std::int64_t begin, std::int64_t count, std::int32_t size, const std::vector<float>& mix,
                  std::vector<float>& noise, float* out, std::int64_t stride) const;

    layer_shape shape_;
    std::uint64_t seed_;
    std::vector<float> key_mix_, value_mix_;  ///< [kv_heads, size, size]
};

}  // namespace sekv::bench
