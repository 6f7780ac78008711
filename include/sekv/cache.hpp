// The cache: what an engine links against.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sekv/attend/progressive.hpp"
#include "sekv/attend/engine.hpp"
#include "sekv/config.hpp"
#include "sekv/core/shape.hpp"
#include "sekv/core/view.hpp"
#include "sekv/exec/backend.hpp"

namespace sekv {

/// A resolution-adaptive, tiered KV cache for many sequences of one model.
///
/// Scalar: how exact rows are stored. Backend: where memory lives and work runs. Codec: what sealed tokens become.
/// One thread at a time may call a cache; calls parallelise inside, over the backend's executor, and return when their work is done (a device backend's when it is enqueued: see cuda_backend).
/// Every function throws errors of sekv::error only, and a call that throws leaves each sequence's content as it was, unless said otherwise.
///
/// A step: reserve, then for each layer append and attend, then observe. A prompt: attend with resolution::full, then end_prefill.
template <scalar Scalar, backend Backend, codec Codec>
class basic_cache {
    static_assert(host_codec<Codec> != device_backend<Backend>, "A host's codec needs a backend whose memory the host reads; a device's codec needs that device's backend (cuda_progressive_codec: cuda_backend).");

public:
    using codec_options = typename Codec::options;

    /// Throws invalid_argument or unsupported for a shape or option that it can't take, format_error for files of another model.
    explicit basic_cache(model_shape model, const cache_options& options = {}, const codec_options& codec = {}, Backend where = Backend());
    basic_cache(const basic_cache&) = delete;
    basic_cache& operator=(const basic_cache&) = delete;

    // Sequences.

    /// A new, empty sequence. Throws budget_error when its fixed parts (line cache, moments) don't fit.
    [[nodiscard]] sequence open(const sequence_options& options = {});
    /// Ends a sequence and frees what no fork shares. Throws state_error if it isn't open.
    void close(sequence s);
    /// A new sequence with the first `length` tokens of s (-1: all that it has). Pages are shared until one side writes them; the child's line cache starts empty.
    /// Throws state_error in the middle of a step.
    [[nodiscard]] sequence fork(sequence s, std::int64_t length = -1);
    /// Forgets the tokens from `length` on; in the middle of a step it takes back what some layers already have. Levels stay: a sealed block that is cut becomes shorter.
    /// Throws invalid_argument past the length that every layer holds, and state_error where a sliding-window layer no longer has the rows that the shorter sequence would see.
    void truncate(sequence s, std::int64_t length);
    /// Tokens that every layer holds. Throws state_error in the middle of a step.
    [[nodiscard]] std::int64_t length(sequence s) const;

    // Filling.

    /// Makes room for `tokens` more tokens in all layers, between steps: the appends that follow can't fail for memory. (On a device backend calls also take pinned memory for their time, which isn't
    /// held here and comes out of the host's budget: for rows in host memory, and a few bytes per token and block for kernels to read. A plan's appends from device memory take none after begin_step.)
    /// Oldest blocks are sealed (or, before end_prefill, moved to the host) where the quota presses; sketches are made anew where the horizon asks. Throws budget_error before anything changes, but for
    /// sketches already brought to the generation of this length.
    void reserve(sequence s, std::int64_t tokens);
    /// Appends keys [tokens, kv_heads, key_size] and values [tokens, kv_heads, value_size] of one layer, after RoPE. position: of the first token, checked against the layer's length when >= 0.
    /// queries: for engines that never call attend, the scaled-by-nothing queries [tokens, query_heads, key_size] of the same tokens, taken into the metric.
    /// Reserves by itself at the first layer of a step. Throws invalid_argument for shapes, order or values that are not finite once stored.
    void append(sequence s, std::int32_t layer, const rows_view& keys, const rows_view& values, std::int64_t position = -1, const rows_view* queries = nullptr);
    /// The same for a whole batch, K and V of the plan's tokens [tokens, kv_heads, size], after begin_step; rows of padding items are ignored.
    void append(plan& p, std::int32_t layer, const rows_view& keys, const rows_view& values);
    /// Surprisal in nats (-ln p) of the next unobserved tokens, at most as many as were appended; see segmenter. Throws invalid_argument.
    void observe(sequence s, std::span<const float> surprisal);
    /// Ends spans at these positions; see segmenter::cut.
    void cut(sequence s, std::span<const std::int64_t> positions);
    /// From now on, until end_prefill, everything appended is held exactly: a further prompt. Sealed history stays sealed.
    void begin_prefill(sequence s);
    /// The prompt is in: where it doesn't fit the quota exactly, the oldest blocks are sealed. Throws state_error in the middle of a step, budget_error if it can't fit.
    void end_prefill(sequence s);

    // Steps of a batch.

    /// Begins a step of a plan whose items follow their sequences (position -1): reserves its tokens in every sequence, and on a device backend sends it the step's positions.
    /// Throws as reserve does; sequences before the one that failed keep their reservation.
    void begin_step(plan& p);
    /// Device backends only (else unsupported): tells the cache that a graph of this plan's append and attend calls, captured in an earlier step, is launched after begin_step. Lengths grow by the
    /// plan's tokens in every layer, as the captured calls themselves would have it. Where hints were given outside the graph, call it before the launch.
    void replayed(plan& p);

    // Attention.

    /// Lays out a step and allocates its workspace (device tier). Items of sequence{} are padding rows; a sequence is in at most one item.
    /// Throws invalid_argument, budget_error, state_error for a closed sequence.
    [[nodiscard]] plan make_plan(std::span<const batch_item> items, resolution how);
    /// Attention of the plan's query tokens [tokens, query_heads, key_size] over their sequences up to and including their own positions: out [tokens, query_heads, value_size], and lse
    /// [tokens, query_heads] (natural log-sum-exp of the scaled logits) unless null. Padding rows get zeros and -infinity. Queries are unscaled; they enter the metric.
    /// Throws invalid_argument for wrong shapes or queries that are not finite, state_error for positions not yet appended, or whose sliding window is gone, or a plan that lengths have outgrown.
    void attend(plan& p, std::int32_t layer, const rows_view& queries, const out_view& out, float* lse = nullptr);
    /// The same with a plan that the cache keeps for itself.
    void attend(std::span<const batch_item> items, std::int32_t layer, const rows_view& queries, resolution how, const out_view& out, float* lse = nullptr);
    /// A hint, between begin_step and the step's append to this layer: brings the lines that these queries would zoom into the line caches, so that the layer's attend finds them there. Changes time and
    /// counters, never output, whatever the queries are. They are [tokens, query_heads, key_size], an estimate of those that attend will be given: the layer's own projection (with its norm and RoPE)
    /// of the residual stream as it is before the MLP of the layer before; docs/performance.md has what that is worth, and what it costs. Enqueued beside what the engine enqueues on the backend's
    /// stream meanwhile (that MLP); what the cache itself enqueues next waits for it on the device, and the queries must stay as they are until then. Captured hints and their layers' attends belong to one
    /// capture, which throws state_error for hints that began before it. The host backend, the paper preset, sliding-window layers and plans of full resolution have no use for hints: they check and return.
    /// Throws as attend does for shapes, plans and layers, and on a device backend for queries in host memory that aren't finite.
    void prefetch(plan& p, std::int32_t layer, const rows_view& queries);
    /// Token-level rows of positions [begin, begin + count) at the best level held, for engines with their own attention: keys [count, kv_heads, key_size], values likewise.
    void materialize(sequence s, std::int32_t layer, std::int64_t begin, std::int64_t count, const out_view& keys, const out_view& values) const;

    // Looking.

    /// Bytes of the cache, what sequences share counted once; budgets bound their totals.
    [[nodiscard]] usage used() const;
    /// Bytes that one sequence refers to, shared or not; its quota bounds the device total.
    [[nodiscard]] usage used(sequence s) const;
    /// The most bytes that a tier held at once.
    [[nodiscard]] std::uint64_t peak(tier t) const noexcept { return memory_->peak(t); }
    /// Zoom counters since the cache was made.
    [[nodiscard]] const zoom_metrics& zooms() const { return engine_.collect(zooms_); }
    /// Tokens [0, sealed(s)) are sealed.
    [[nodiscard]] std::int64_t sealed(sequence s) const { return at(s).sealed_end(); }
    [[nodiscard]] const segmenter& spans(sequence s) const { return at(s).spans; }
    [[nodiscard]] const model_shape& model() const noexcept { return model_; }
    [[nodiscard]] const Codec& coder() const noexcept { return codec_; }
    [[nodiscard]] Backend& where() noexcept { return backend_; }
    /// The codec's units of a sequence, oldest first: for inspection and tests.
    [[nodiscard]] const auto& units(sequence s) const { return at(s).sealed; }

    /// Not supported yet: throw unsupported.
    void export_sequence(sequence s, const std::string& path) const;
    [[nodiscard]] sequence import_sequence(const std::string& path);

private:
    using record = sequence_record<Codec>;
    struct slot {
        std::uint32_t generation = 1;
        std::unique_ptr<record> state;
    };

    [[nodiscard]] const record& at(sequence s) const;
    [[nodiscard]] record& at(sequence s) { return const_cast<record&>(std::as_const(*this).at(s)); }
    [[nodiscard]] std::int64_t settled_length(const record& r, const char* call) const;
    [[nodiscard]] sequence admit(std::unique_ptr<record> r);
    [[nodiscard]] const layer_shape& checked_layer(std::int32_t layer) const;
    [[nodiscard]] std::uint64_t default_quota(std::int64_t capacity) const;
    void check_rows(const char* what, const rows_view& v, std::int64_t tokens, std::int32_t heads, std::int32_t size) const;
    void check_plan(const plan& p) const;
    [[nodiscard]] static state_error outgrown(const plan& p, const record& r);
    [[nodiscard]] std::int64_t checked_tokens(std::span<const batch_item> items) const;
    [[nodiscard]] Codec make_codec(const codec_options& o);
    [[nodiscard]] std::vector<step_item<Codec>> resolve(std::span<const batch_item> items, std::int32_t layer);
    [[nodiscard]] std::vector<step_item<Codec>> resolve_append(const plan& p, std::int32_t layer);
    [[nodiscard]] std::vector<const record*> resolve_sizes(const plan& p) const;

    model_shape model_;
    cache_options options_;
    Backend backend_;
    std::shared_ptr<memory> memory_;
    block_pool pool_;
    Codec codec_;
    residency<Scalar, Codec> residency_;
    engine<Scalar, Backend, Codec> engine_;
    std::uint64_t fixed_;  ///< device bytes that the cache takes before any sequence
    std::vector<slot> slots_;
    mutable zoom_metrics zooms_;
    plan own_plan_;
};

}  // namespace sekv

#include "sekv/cache_impl.hpp"
