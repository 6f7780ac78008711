// The progressive preset: each token coded twice, coarse on the device and fine on the host, and read at the resolution that the query needs.
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

/// What one sequence owns beside its blocks.
struct progressive_sequence {
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

/// The books of sealing, the same on every backend: which blocks belong to which epoch and sketch generation, and what that costs. A backend's codec fits, encodes and attends.
class progressive_books {
public:
    using options = progressive_options;
    using payload = progressive_block;
    using unit = sealed_unit<payload>;

    /// stored: the element type of exact rows, R3's too. Throws invalid_argument, and format_error for a prior of another model.
    progressive_books(const model_shape& model, const options& o, dtype stored, block_pool& pool);
    progressive_books(const progressive_books&) = delete;
    progressive_books& operator=(const progressive_books&) = delete;
    virtual ~progressive_books() = default;

    /// Bytes that the sequence refers to by way of this codec, whether it shares them or not.
    [[nodiscard]] usage sequence_usage(const progressive_sequence& s, const std::vector<unit>& units) const;
    /// Bytes that sealing `range` in `blocks` blocks behind the units `before` adds, the spare for a later sketch generation included.
    [[nodiscard]] demand seal_bytes(const progressive_sequence& s, const std::vector<unit>& before, token_range range, std::int64_t blocks, const segmenter& spans) const;
    /// A first seal takes at least this many tokens, where there are so many: a basis wants samples.
    [[nodiscard]] std::int64_t least_seal(const progressive_sequence& s) const noexcept { return s.newest ? host::block_tokens : options_.epoch_tokens; }
    /// Encodes blocks. Throws budget_error, the sequence unchanged.
    [[nodiscard]] std::vector<unit> seal(progressive_sequence& s, const std::vector<unit>& before, const seal_request& request);
    [[nodiscard]] const options& settings() const noexcept { return options_; }

protected:
    /// A run of units of one epoch, and the key bases of its new sketch generation.
    struct sketch_run {
        std::size_t first, last;
        std::shared_ptr<key_bases> bases;
    };

    [[nodiscard]] progressive_sequence open_books(std::int64_t capacity);
    /// A copy whose line cache starts empty; truncate_books follows.
    [[nodiscard]] progressive_sequence fork_books(const progressive_sequence& from);
    void truncate_books(progressive_sequence& s, std::int64_t length) noexcept;
    /// Called between steps: snapshots the moments, and makes sketches anew (true) where the present ones are `horizon` tokens old and `device_room` bytes suffice.
    bool advance_books(progressive_sequence& s, std::vector<unit>& units, std::int64_t length, std::uint64_t device_room);
    /// Gives s moments that no fork or snapshot shares. Throws budget_error.
    void own_moments(progressive_sequence& s);
    /// Accounts for `tokens` positions of `group` queries each that enter a layer's moments.
    void count_queries(progressive_sequence& s, std::size_t owner, std::int32_t group, std::int64_t tokens) const;
    [[nodiscard]] std::vector<double> metric_of(const progressive_sequence& s, std::int32_t layer, std::int32_t head, std::int64_t length) const;
    [[nodiscard]] std::int64_t exact_stride(std::int32_t index) const noexcept;
    /// Epochs that sealing so many tokens fits on their rows.
    [[nodiscard]] std::int64_t epochs_for(const progressive_sequence& s, std::int64_t tokens) const noexcept;

    /// Whether the sequence can live to see its sketches made anew, once `range` is sealed.
    [[nodiscard]] bool outlives_sketches(const progressive_sequence& s, token_range range) const noexcept;
    /// Whether sketches would be made anew now.
    [[nodiscard]] bool sketches_due(const progressive_sequence& s, const std::vector<unit>& units, std::int64_t length, std::uint64_t device_room) const noexcept;
    virtual void copy_moments(const page& from, page& to);
    /// Fits epochs on ranges[i] of the request's rows and encodes the units, which name their epoch.
    virtual void fit_and_encode(const progressive_sequence& s, const std::vector<std::shared_ptr<epoch>>& epochs, const std::vector<token_range>& ranges, std::vector<unit>& units, const seal_request& request) = 0;
    /// Fits an epoch on what sealed units decode to, over `range`.
    virtual void fit_decoded(const progressive_sequence& s, epoch& e, const std::vector<unit>& units, token_range range, std::int64_t length) = 0;
    /// Encodes units in the epoch and key bases that they name.
    virtual void encode_units(std::vector<unit>& units, const seal_request& request) = 0;
    /// Fits each run's key bases in the present metric and writes new key planes: those of unit i to planes + i * the bytes of a sketch page, host memory, laid out like the page.
    virtual void sketch_anew(const progressive_sequence& s, const std::vector<unit>& units, const std::vector<sketch_run>& runs, std::byte* planes, std::int64_t length) = 0;

    model_shape model_;
    options options_;
    dtype stored_;
    basis_layout layout_;
    block_pool* pool_;
    std::vector<std::int32_t> layer_of_, head_of_;  ///< by head index
    std::vector<std::size_t> exact_offset_;  ///< of R3 lines, by head index
    std::size_t exact_block_bytes_ = 0;      ///< 0 without the exact tier
    std::int32_t widest_line_ = 0;

private:
    void resketch(progressive_sequence& s, std::vector<unit>& units, std::int64_t length);
    void copy_key_planes(std::byte* page, const std::byte* planes);
};

/// The progressive preset on the host backend. Seals blocks of 64 tokens and attends them: R1 for all, R2 (or R3) for those that matter. Thread-safe only where said.
class progressive_codec : public progressive_books {
public:
    using sequence = progressive_sequence;
    static constexpr const char* name = "progressive";

    progressive_codec(const model_shape& model, const options& o, dtype stored, block_pool& pool, executor& exec) : progressive_books(model, o, stored, pool), executor_(&exec) {}

    [[nodiscard]] sequence open(std::int64_t capacity) { return open_books(capacity); }
    [[nodiscard]] sequence fork(const sequence& from, std::int64_t length) {
        auto s = fork_books(from);
        truncate(s, length);
        return s;
    }
    void truncate(sequence& s, std::int64_t length) noexcept {
        s.cache.invalidate_from(length);
        truncate_books(s, length);
    }
    bool advance(sequence& s, std::vector<unit>& units, std::int64_t length, std::uint64_t device_room) { return advance_books(s, units, length, device_room); }
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

protected:
    void fit_and_encode(const progressive_sequence& s, const std::vector<std::shared_ptr<epoch>>& epochs, const std::vector<token_range>& ranges, std::vector<unit>& units, const seal_request& request) override;
    void fit_decoded(const progressive_sequence& s, epoch& e, const std::vector<unit>& units, token_range range, std::int64_t length) override;
    void encode_units(std::vector<unit>& units, const seal_request& request) override;
    void sketch_anew(const progressive_sequence& s, const std::vector<unit>& units, const std::vector<sketch_run>& runs, std::byte* planes, std::int64_t length) override;

private:
    struct scratch;
    void fit_epoch(const sequence& s, epoch& e, const row_reader& rows, token_range range, std::int64_t length, std::int32_t index, std::vector<unit>* units) const;
    void encode_rows(const epoch& e, const key_bases& bases, std::int32_t index, const float* keys, const float* values, unit& u) const;
    void score(const std::vector<unit>& units, const head_query& q, scratch& x) const;
    void zoom(sequence& s, const std::vector<unit>& units, const head_query& q, scratch& x, zoom_metrics& metrics) const;
    void attend_sketch(const std::vector<unit>& units, const head_query& q, scratch& x) const;
    void attend_lines(const std::vector<unit>& units, const head_query& q, scratch& x) const;
    void attend_exact_lines(const head_query& q, scratch& x) const;
    void refine(const epoch& e, const head_query& q, scratch& x, std::int64_t first, std::int64_t count) const;

    executor* executor_;
};

}  // namespace sekv
