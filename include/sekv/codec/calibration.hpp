// What is measured once per model, offline: pre-RoPE query moments for the `model` metric, and the paper preset's router.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "sekv/core/error.hpp"
#include "sekv/core/shape.hpp"

namespace sekv {

/// Turns a query or key by RoPE to a position >= 0: pair p by position * inverse_frequency[p], in double. Pairs are (p, p + P)
/// with P = the number of frequencies under `half` (P = d/2 where all is rotated), (2p, 2p + 1) under `interleaved`; elements
/// from 2P on stay. `in` and `out` [d] may be the same. Throws invalid_argument for sizes that differ or are below 2P, and for
/// frequencies that are not finite.
void turn_query(std::span<const double> in, const rope_shape& rope, std::int64_t position, std::span<double> out);

/// The inverse: a pre-RoPE query from a post-RoPE one. An engine that rounds its angles to float is undone only to that rounding.
void unturn_query(std::span<const double> in, const rope_shape& rope, std::int64_t position, std::span<double> out);

/// The mean of R_t M R_t^T over positions t in [position_begin, position_end): the second moment that queries of pre-RoPE
/// moment `m0` [d, d] (symmetric) have there, [d, d], exactly symmetric.
///
/// Closed form: with z_p the complex number of pair p, R_t multiplies E[z_j conj z_k] by exp(i (w_j - w_k) t) and E[z_j z_k] by
/// exp(i (w_j + w_k) t), and an unrotated element's E[z_j x] by exp(i w_j t); their means are geometric sums. O(d^2) for any
/// range; error ~1e-16 * position * |M|.
/// Throws invalid_argument for an empty or negative range, a size that is no square, more than d/2 pairs, or frequencies that
/// are not finite.
[[nodiscard]] std::vector<double> turn_moment(std::span<const double> m0, const rope_shape& rope, std::int64_t position_begin, std::int64_t position_end);
[[nodiscard]] std::vector<double> turn_moment(std::span<const float> m0, const rope_shape& rope, std::int64_t position_begin, std::int64_t position_end);

/// Pre-RoPE second moments of the scaled queries of each KV head's group. These are statistics, not learned parameters.
struct calibration {
    struct layer {
        std::int32_t kv_heads = 0;
        std::int32_t key_size = 0;
        std::vector<float> moments;  ///< [kv_heads, d, d], symmetric: mean of q q^T over all queries of the group; 0 without any
        std::vector<double> counts;  ///< [kv_heads], queries that went in

        [[nodiscard]] std::span<const float> moment(std::int32_t kv_head) const;
        friend bool operator==(const layer&, const layer&) = default;
    };

    std::string fingerprint;  ///< of the model that was measured
    std::vector<layer> layers;

    /// Reads a safetensors file with metadata {format: sekv-calibration-1, fingerprint} and per layer i "layer.i.moments"
    /// [kv_heads, d, d] and "layer.i.counts" [kv_heads]. Throws io_error, and format_error where the file is damaged, of
    /// another format, of a model with another fingerprint or shape, or holds what can't be a moment.
    [[nodiscard]] static calibration load(const std::filesystem::path& path, const model_shape& model);
    /// Throws invalid_argument where the fingerprint is empty or a size is inconsistent, io_error where the system refuses.
    void save(const std::filesystem::path& path) const;

    friend bool operator==(const calibration&, const calibration&) = default;
};

/// Gathers a calibration from the queries that an engine computes.
class calibration_collector {
public:
    /// Throws as model_shape::validate does, and invalid_argument where the model has no fingerprint.
    explicit calibration_collector(model_shape model);

    /// One query head's query of one token: `query` [d] after RoPE, times the logit scale; `kv_head` is the one that it reads.
    /// Call it for each head of the group. Throws invalid_argument for a layer, head, size or position out of range or values
    /// that are not finite; strong guarantee.
    void add(std::int32_t layer, std::int32_t kv_head, std::span<const float> query, std::int64_t position);

    /// The means so far, rounded to float; collecting may go on.
    [[nodiscard]] calibration finish() const;
    [[nodiscard]] std::size_t bytes() const noexcept;

private:
    struct head {
        std::vector<double> sum;  // upper triangle by rows
        double count = 0.0;
    };

    model_shape model_;
    std::vector<std::vector<head>> layers_;
    std::vector<double> turned_;
};

/// The paper preset's router: relevance = sigmoid((W q) . s / sqrt(d') + ln|S|) > tau, s = W times a span's mean key, normalised.
struct paper_weights {
    static constexpr std::int32_t route_size = 32;  ///< d'
    static constexpr float initial_tau = 0.05F;

    struct layer {
        std::int32_t key_size = 0;
        std::vector<float> weight;  ///< W [32, d], for post-RoPE queries and keys
        float tau = initial_tau;    ///< in (0, 1)
        friend bool operator==(const layer&, const layer&) = default;
    };

    std::string fingerprint;
    std::vector<layer> layers;

    /// Untrained weights: W picks the 32 elements that turn slowest under RoPE (unrotated ones first, then both elements of
    /// the pairs by ascending frequency; the first 32 without RoPE), so that its rows are orthonormal. Over a span's 10 to 60
    /// positions the fast pairs of post-RoPE keys average out: a mean key says little in them.
    [[nodiscard]] static paper_weights untrained(const model_shape& model);

    /// Learned parameters: (32 d + 1) per layer.
    [[nodiscard]] std::uint64_t parameters() const noexcept;

    /// As calibration::load and save; format sekv-paper-router-1, "layer.i.weight" [32, d] and "tau" [layers].
    [[nodiscard]] static paper_weights load(const std::filesystem::path& path, const model_shape& model);
    void save(const std::filesystem::path& path) const;

    friend bool operator==(const paper_weights&, const paper_weights&) = default;
};

}  // namespace sekv
