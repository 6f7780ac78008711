// The paper preset on the host backend: SeKV as published (arXiv 2606.31145), the baseline that the progressive preset is measured against.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sekv/attend/codec.hpp"
#include "sekv/codec/calibration.hpp"
#include "sekv/codec/svd.hpp"
#include "sekv/config.hpp"

namespace sekv {

/// The knobs of the paper preset. Those of its spans are the cache's: see paper_cache_options.
struct paper_options {
    /// A span whose relevance exceeds tau is zoomed, in (0, 1); 0 means the router's own threshold of each layer (untrained 0.05).
    float tau = 0.0F;
    /// Components that a span's K and V keep on the host, each, 1 to 64; spans of fewer tokens keep as many as they have.
    std::int32_t rank = 32;
    /// W and tau of each layer, of this model. Null means paper_weights::untrained. These are parameters of the model, not of a sequence: no tier counts them.
    std::shared_ptr<const paper_weights> router;

    /// Throws invalid_argument naming the option.
    void validate() const {
        if (!(tau >= 0.0F && tau < 1.0F))
            throw invalid_argument("tau must be above 0 and below 1, or 0 for the router's own, not " + std::to_string(tau) + ".");
        if (rank < 1 || rank > 64) throw invalid_argument("rank must be 1 to 64 components, not " + std::to_string(rank) + ".");
    }
};

/// `base` with the paper's segmentation: surprisal, alpha 1, l_min 4.
[[nodiscard]] inline cache_options paper_cache_options(cache_options base = {}) {
    base.spans.policy = span_policy::surprisal;
    base.spans.alpha = 1.0;
    base.spans.l_min = 4;
    return base;
}

/// Whole spans, 256 tokens of them or a little more. A token is a sink (exact elsewhere in the cache), an exact row, or one of its span's own tokens.
struct paper_block {
    std::int32_t exact_rows = 0;  ///< anchors, and tokens that are alone in their span
    std::int32_t spans = 0;       ///< spans with a summary
    std::int32_t sinks = 0;       ///< leading tokens of the sequence: factored like a span, for decode, and never attended
    std::int32_t own_tokens = 0;  ///< factored tokens, sinks included
    std::int32_t ranks = 0;       ///< sum of the factored spans' ranks
    std::int32_t area = 0;        ///< sum of tokens times rank
    page_ref exact;               ///< device: offsets of exact rows, then per head K and V rows as stored
    page_ref summaries;           ///< device: count and last offset of each span, then per head mean K, mean V as stored and routing keys
    page_ref factors;             ///< host: offsets of own tokens and where spans begin, then per head the SVD factors of K and V

    [[nodiscard]] std::int32_t factored() const noexcept { return spans + (sinks > 0 ? 1 : 0); }
};

/// Seals whole spans and attends them as published: relevant spans token by token out of their SVD, the others through their mean.
///
/// Anchors (surprisal above mu + alpha sigma when they came) and spans with a single own token stay exact on the device. A span's own tokens are the others;
/// |S| counts them, its mean K and V weigh them by surprisal (evenly where there is none, or where it sums to 0), and a routing key s = W mean(K) / |W mean(K)|
/// stands for it. For a query, q' = W times the mean of the group's queries as they were before scaling: a KV head's span is read for all its queries or for
/// none. Where sigmoid(q'.s / sqrt(32) + ln|S|) > tau, K and V of the whole span are rebuilt from its factors; elsewhere the span is one row of its mean K and
/// V, ln|S| added to its logit (after the soft-cap).
///
/// Spans are cut at the borders of a seal; tokens that the segmenter hasn't seen form spans of l_max. A span that a truncation, or the query's own position,
/// cuts is always read token by token, so that what was removed is never attended. Zooms have no cache: each one crosses from the host tier. Thread-safe only
/// where said.
class paper_codec {
public:
    using options = paper_options;
    using payload = paper_block;
    using unit = sealed_unit<payload>;
    static constexpr const char* name = "paper";

    /// Everything that a sequence owns is in its units.
    struct sequence {};

    /// stored: the element type of exact rows and means. Throws invalid_argument, and format_error for a router of another model.
    paper_codec(const model_shape& model, const options& o, dtype stored, block_pool& pool, executor& exec);

    [[nodiscard]] sequence open(std::int64_t) noexcept { return {}; }
    [[nodiscard]] sequence fork(const sequence&, std::int64_t) noexcept { return {}; }
    void truncate(sequence&, std::int64_t) noexcept {}

    /// Learned parameters of the router: W and tau of every layer.
    [[nodiscard]] std::uint64_t parameters() const noexcept { return router_->parameters(); }
    /// Bytes of the units' pages, whether shared or not.
    [[nodiscard]] usage sequence_usage(const sequence& s, const std::vector<unit>& units) const;
    /// Exactly the bytes that sealing `range` adds. Costs time in proportion to the range.
    [[nodiscard]] demand seal_bytes(const sequence& s, const std::vector<unit>& before, token_range range, std::int64_t blocks, const segmenter& spans) const;
    [[nodiscard]] std::int64_t least_seal(const sequence&) const noexcept { return host::block_tokens; }
    /// Encodes blocks. Throws budget_error, the sequence unchanged.
    [[nodiscard]] std::vector<unit> seal(sequence& s, const std::vector<unit>& before, const seal_request& request);
    bool advance(sequence&, std::vector<unit>&, std::int64_t, std::uint64_t) noexcept { return false; }
    void observe(sequence&, std::int32_t, const float*, std::int32_t, std::int64_t) noexcept {}

    /// Cuts the scratch that attend needs, whatever the number of tokens.
    void layout_scratch(arena& a, std::int32_t layer, std::int32_t group, std::int64_t tokens) const;
    /// Adds the sealed tokens up to q.position to q.state, which holds the exact rows, sinks among them. Different heads may run on different threads.
    void attend(sequence& s, const std::vector<unit>& units, const head_query& q, arena a, zoom_metrics& metrics) const;
    /// Token-level rows of `range`, which lies inside the unit: exact ones as they were, others out of their span's factors. Thread-safe.
    void decode(const unit& u, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const;

private:
    struct scratch;
    struct unit_plan;
    struct head_place {
        std::int32_t layer, head, key_size, value_size;
        std::int64_t before;  ///< sum of key_size + value_size over the heads before this one
    };
    /// Where one head's parts of a unit lie.
    struct head_view {
        std::int32_t* exact_offsets;  ///< [exact_rows], from the unit's begin, ascending; of own tokens too
        std::byte *exact_keys, *exact_values;
        std::int32_t *span_tokens, *span_last;  ///< [spans]: |S|, and the offset of the last own token
        std::byte *mean_keys, *mean_values;
        fp16* routes;                                                     ///< [spans, 32]
        std::int32_t *own_offsets, *first_own, *first_rank, *first_area;  ///< [own_tokens], and [factored + 1] each
        std::byte* factors;
    };
    struct span_factors {
        svd_view keys, values;
        const std::int32_t* offsets;  ///< [keys.count]
    };

    [[nodiscard]] std::int32_t head_index(std::int32_t layer, std::int32_t head) const noexcept;
    [[nodiscard]] std::vector<unit_plan> plan_units(token_range range, const segmenter& spans) const;
    [[nodiscard]] unit make_unit(const unit_plan& p);
    [[nodiscard]] std::size_t exact_bytes(const payload& p) const noexcept;
    [[nodiscard]] std::size_t summary_bytes(const payload& p) const noexcept;
    [[nodiscard]] std::size_t factor_bytes(const payload& p) const noexcept;
    [[nodiscard]] head_view view(const payload& p, std::int32_t index) const noexcept;
    /// Where the factors of one span begin: [scale K, scale V][left K][left V][right K][right V].
    [[nodiscard]] std::byte* factors_at(const head_view& v, std::int32_t span, std::int32_t index) const noexcept;
    [[nodiscard]] span_factors factors(const head_view& v, std::int32_t span, std::int32_t index) const noexcept;

    void encode_exact(const unit& u, const row_reader& rows, std::int32_t index) const;
    void encode_span(const unit& u, std::int32_t span, const row_reader& rows, const segmenter& spans, std::int32_t index) const;
    void summarise(const unit& u, std::int32_t summary, const std::vector<double>& weights, const float* keys, const float* values, std::int32_t index) const;

    void route(const head_query& q, scratch& x) const;
    void attend_exact(const unit& u, const head_view& v, std::int64_t limit, const head_query& q, scratch& x) const;
    void attend_spans(const unit& u, const head_view& v, std::int64_t limit, const head_query& q, scratch& x, zoom_metrics& metrics) const;
    void attend_means(const head_view& v, std::int32_t first, std::int32_t count, const head_query& q, scratch& x) const;
    void attend_tokens(const span_factors& f, std::int64_t limit, const head_query& q, scratch& x, zoom_metrics& metrics) const;

    model_shape model_;
    options options_;
    dtype stored_;
    block_pool* pool_;
    executor* executor_;
    std::shared_ptr<const paper_weights> router_;
    std::vector<std::int32_t> first_head_;  ///< by layer; -1 where a layer has nothing to seal
    std::vector<head_place> heads_;
    std::int64_t row_size_ = 0;  ///< sum of key_size + value_size over all heads
};
static_assert(codec<paper_codec>);

}  // namespace sekv
