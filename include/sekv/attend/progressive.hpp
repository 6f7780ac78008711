// The progressive preset on the host backend: each token coded twice, coarse on the device and fine on the host, and read at the resolution that the query needs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sekv/attend/codec.hpp"
#include "sekv/codec/options.hpp"
#include "sekv/tier/bases.hpp"
#include "sekv/tier/line_cache.hpp"
#include "sekv/zoom/router.hpp"

namespace sekv {

/// Codes of one block of up to 64 tokens: R1 on the device, R2 (and R3) on the host.
struct progressive_block {
    std::shared_ptr<const epoch> statistics;
    std::shared_ptr<const key_bases> keys;  ///< the basis of R1; R2's is statistics->keys
    page_ref sketch, lines, exact;          ///< exact, R3, is null unless that tier is kept: a line of [key][value] per token
};

/// Seals blocks of 64 tokens and attends them: R1 for all, R2 (or R3) for those that matter. Thread-safe only where said.
class progressive_codec {
public:
    using options = progressive_options;
    using payload = progressive_block;
    using unit = sealed_unit<payload>;
    static constexpr const char* name = "progressive";

    /// What one sequence owns beside its blocks.
    struct sequence {
        struct snapshot {
            std::int64_t length;
            page_ref moments;
            std::vector<double> samples;
        };
        line_cache cache;
        page_ref moments;                  ///< second moments of queries, all heads; shared between forks until written
        std::vector<double> samples;       ///< decayed count of query vectors, by layer
        std::vector<snapshot> snapshots;   ///< of the moments at earlier lengths, for truncation
        std::shared_ptr<epoch> newest;     ///< serves blocks that are sealed while decoding
        std::shared_ptr<key_bases> newest_keys;
        std::int64_t since_fit = 0;        ///< tokens sealed with `newest` that it was not fitted on
        std::int64_t epochs = 0;           ///< fitted so far
        std::int64_t sketched_at = 0;      ///< length when the present generation of sketches was made
        std::int64_t sealed_end = 0;       ///< where the sealed blocks end
        std::int64_t capacity = 0;         ///< the longest length asked for
    };

    /// stored: the element type of exact rows, R3's too. Throws invalid_argument, and format_error for a prior of another model.
    progressive_codec(const model_shape& model, const options& o, dtype stored, block_pool& pool, executor& exec);

    [[nodiscard]] sequence open(std::int64_t capacity);
    [[nodiscard]] sequence fork(const sequence& from, std::int64_t length);
    void truncate(sequence& s, std::int64_t length) noexcept;

    /// Bytes that the sequence refers to by way of this codec, whether it shares them or not.
    [[nodiscard]] usage sequence_usage(const sequence& s, const std::vector<unit>& units) const;
    /// Bytes that sealing `range` in `blocks` blocks adds, the spare for a later sketch generation included.
    [[nodiscard]] demand seal_bytes(const sequence& s, token_range range, std::int64_t blocks, const segmenter& spans) const;
    /// A first seal takes at least this many tokens, where there are so many: a basis wants samples.
    [[nodiscard]] std::int64_t least_seal(const sequence& s) const noexcept { return s.newest ? host::block_tokens : options_.epoch_tokens; }
    /// Encodes blocks. Throws budget_error, the sequence unchanged.
    [[nodiscard]] std::vector<unit> seal(sequence& s, const std::vector<unit>& before, const seal_request& request);
    /// Called between steps: snapshots the moments, and makes sketches anew where the present ones are `horizon` tokens old and `device_room` bytes suffice.
    void advance(sequence& s, std::vector<unit>& units, std::int64_t length, std::uint64_t device_room);
    /// Takes scaled queries [tokens, group * kv_heads, key_size] of one layer into the metric. Throws budget_error, and only the first time since a fork or snapshot; tokens 0 to have that behind.
    void observe(sequence& s, std::int32_t layer, const float* queries, std::int32_t group, std::int64_t tokens);

    /// Cuts the scratch that attend needs for up to `tokens` sealed tokens.
    void layout_scratch(arena& a, std::int32_t layer, std::int32_t group, std::int64_t tokens) const;
    /// Adds the sealed tokens up to q.position to q.state, which holds the exact rows. Different heads may run on different threads.
    void attend(sequence& s, const std::vector<unit>& units, const head_query& q, arena a, zoom_metrics& metrics) const;
    /// Token-level rows of `range`, which lies inside the unit, at its best level (R3 or R2). Thread-safe.
    void decode(const unit& u, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const;
    /// The same at R1.
    void decode_sketch(const unit& u, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const;

private:
    struct scratch;
    void fit_epoch(const sequence& s, epoch& e, const row_reader& rows, token_range range, std::int64_t length, std::int32_t index, std::vector<unit>* units) const;
    void encode(const epoch& e, const key_bases& bases, const row_reader& rows, std::int32_t index, unit& u) const;
    void encode_rows(const epoch& e, const key_bases& bases, std::int32_t index, const float* keys, const float* values, unit& u) const;
    void resketch(sequence& s, std::vector<unit>& units, std::int64_t length);
    [[nodiscard]] std::vector<double> metric_of(const sequence& s, std::int32_t layer, std::int32_t head, std::int64_t length) const;
    [[nodiscard]] std::int64_t epochs_for(const sequence& s, std::int64_t tokens) const noexcept;
    void score(const std::vector<unit>& units, const head_query& q, scratch& x) const;
    void zoom(sequence& s, const std::vector<unit>& units, const head_query& q, scratch& x, zoom_metrics& metrics) const;
    void attend_sketch(const std::vector<unit>& units, const head_query& q, scratch& x) const;
    void attend_lines(const std::vector<unit>& units, const head_query& q, scratch& x) const;
    void attend_exact_lines(const head_query& q, scratch& x) const;
    void refine(const epoch& e, const head_query& q, scratch& x, std::int64_t first, std::int64_t count) const;
    [[nodiscard]] std::int64_t exact_stride(std::int32_t index) const noexcept;

    model_shape model_;
    options options_;
    dtype stored_;
    basis_layout layout_;
    block_pool* pool_;
    executor* executor_;
    std::vector<std::int32_t> layer_of_, head_of_;  ///< by head index
    std::vector<std::size_t> exact_offset_;  ///< of R3 lines, by head index
    std::size_t exact_block_bytes_ = 0;      ///< 0 without the exact tier
    std::int32_t widest_line_ = 0;
};

}  // namespace sekv
