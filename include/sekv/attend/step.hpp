// One attention step of a batch: the plan, which sizes the workspace, and the host's attention of one KV head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sekv/attend/exact.hpp"
#include "sekv/attend/residency.hpp"
#include "sekv/core/view.hpp"
#include "sekv/exec/backend.hpp"

namespace sekv {

/// A batch's layout and its workspace. Make it once per step (or keep it while lengths stay below the planned ones) and use it for every layer.
class plan {
public:
    plan() = default;
    [[nodiscard]] const std::vector<batch_item>& items() const noexcept { return items_; }
    [[nodiscard]] resolution how() const noexcept { return how_; }
    /// Query rows of the batch, padding included.
    [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
    /// Device bytes of the workspace.
    [[nodiscard]] std::size_t workspace_bytes() const noexcept { return workspace_.size(); }

private:
    template <scalar, backend, codec>
    friend class basic_cache;
    template <scalar, backend, codec>
    friend class engine;
    /// So that a plan outlives some steps of decoding.
    void round_longest() noexcept {
        constexpr std::int64_t rounding = 1024;
        longest_ = (longest_ + rounding - 1) / rounding * rounding;
    }

    const void* owner_ = nullptr;  ///< the memory of the cache that made it
    std::vector<batch_item> items_;
    resolution how_ = resolution::adaptive;
    std::int64_t tokens_ = 0;
    std::int64_t longest_ = 0;  ///< sequence_record::scored_tokens that the workspace was sized for
    std::size_t workspace_bytes_ = 0;
    std::size_t query_bytes_ = 0;   ///< of the workspace: scaled queries (host backend)
    std::size_t worker_bytes_ = 0;  ///< of the workspace: each worker's or task's scratch (host backend)
    bool scratch_per_task_ = false;
    buffer workspace_;
    std::shared_ptr<void> own_;     ///< what a device backend's engine keeps for the plan
};

/// One item of a batch, resolved: its record, its first query's position and its rows in the batch.
template <codec Codec>
struct step_item {
    sequence_record<Codec>* record = nullptr;
    std::int64_t tokens = 0;
    std::int64_t position = 0;
    std::int64_t row = 0;
};

/// Attends one KV head of one item. Holds what all heads of a layer share.
template <scalar Scalar, host_codec Codec>
class head_step {
public:
    using item = step_item<Codec>;

    head_step(const model_shape& model, const residency<Scalar, Codec>& where, const Codec& codec, std::int32_t layer) : shape_(model.layers[static_cast<std::size_t>(layer)]), where_(where), codec_(codec), owner_(shape_.kv_source >= 0 ? shape_.kv_source : layer) {}

    /// Cuts what either of the functions below needs; longest: sealed tokens at most.
    void layout_scratch(arena& a, resolution how, std::int64_t longest) const {
        if (how == resolution::full) {
            prefill_tile t;
            t.layout(a, prefill_tile::tokens_for(shape_.group), shape_.group, shape_.key_size, shape_.value_size);
        } else {
            (void)take_state(a);
            (void)a.take<float>(shape_.group * host::block_tokens);
            codec_.layout_scratch(a, owner_, shape_.group, longest);
        }
    }

    /// Query tokens one by one. queries: the batch's, scaled, [tokens, query_heads, key_size].
    void adaptive(const item& it, std::int32_t head, const float* queries, const out_view& out, float* lse, arena a, zoom_metrics& metrics) const {
        auto state = take_state(a);
        auto* logits = a.take<float>(shape_.group * host::block_tokens);
        for (std::int64_t i = 0; i < it.tokens; ++i) {
            const auto row = it.row + i;
            state.clear();
            head_query q{owner_, head, queries + (row * shape_.query_heads() + head * shape_.group) * shape_.key_size, it.position + i, it.record->sink_count, shape_.soft_cap, &state, shape_.logit_scale()};
            exact_rows(*it.record, q, logits);
            if (!it.record->sealed.empty() && !shape_.windowed()) codec_.attend(it.record->own, it.record->sealed, q, a, metrics);
            for (std::int32_t g = 0; g < shape_.group; ++g) store(state, g, row, head * shape_.group + g, out, lse);
        }
    }

    /// A tile of query tokens [first, first + count) of the item, everything at full resolution.
    void full(const item& it, std::int32_t head, std::int64_t first, std::int64_t count, const float* queries, const out_view& out, float* lse, arena a) const {
        prefill_tile t;
        t.layout(a, count, shape_.group, shape_.key_size, shape_.value_size);
        t.state.clear();
        const auto g = shape_.group;
        for (std::int64_t i = 0; i < count; ++i) {
            const float* from = queries + ((it.row + first + i) * shape_.query_heads() + head * g) * shape_.key_size;
            std::copy_n(from, g * shape_.key_size, t.queries + i * g * shape_.key_size);
        }
        const auto p = it.position + first;
        if (!shape_.windowed()) {
            for (const auto& u : it.record->sealed) {
                if (u.begin > p + count - 1) break;
                for (auto at = u.begin; at < std::min(u.end(), p + count); at += host::block_tokens) {
                    const token_range part{at, std::min<std::int64_t>(host::block_tokens, u.end() - at)};
                    codec_.decode(u, owner_, head, part, t.keys, t.values);
                    restore_sinks(*it.record, part, head, t);
                    t.attend(at, part.count, p, 0, shape_.soft_cap);
                }
            }
        }
        const auto c = where_.class_of(owner_);
        for (const auto& b : it.record->of(c).blocks()) {
            const auto n = std::min<std::int64_t>(b.count, p + count - b.begin);
            if (n <= 0 || (shape_.windowed() && b.end() <= p - shape_.sliding_window)) continue;
            where_.read_rows(it.record->of(c), c, owner_, head, {b.begin, n}, t.keys, t.values);
            t.attend(b.begin, n, p, shape_.sliding_window, shape_.soft_cap);
        }
        for (std::int64_t i = 0; i < count; ++i) {
            for (std::int32_t j = 0; j < g; ++j) store(t.state, static_cast<std::int32_t>(i * g + j), it.row + first + i, head * g + j, out, lse);
        }
    }

private:
    [[nodiscard]] softmax_state take_state(arena& a) const {
        return {shape_.group, shape_.value_size, a.take<float>(shape_.group), a.take<float>(shape_.group), a.take<float>(shape_.group * shape_.value_size)};
    }

    // Sinks of sealed history, then the exact blocks, as far as the query sees them.
    void exact_rows(const sequence_record<Codec>& r, const head_query& q, float* logits) const {
        const auto c = where_.class_of(owner_);
        if (r.sink_count > 0 && !shape_.windowed()) {
            add_rows(where_.sink_layout(), *r.sinks, 0, std::min<std::int64_t>(r.sink_count, q.position + 1), q, logits);
        }
        const auto first = shape_.windowed() ? std::max<std::int64_t>(0, q.position + 1 - shape_.sliding_window) : 0;
        const auto& blocks = r.of(c).blocks();
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            const auto& b = blocks[i];
            const auto from = std::max(first, b.begin);
            const auto to = std::min(q.position + 1, b.end());
            if (from >= to) continue;
            const auto* next = i + 1 < blocks.size() ? blocks[i + 1].rows.get() : nullptr;
            add_rows(where_.layout(c), *b.rows, from - b.begin, to - from, q, logits, next);
        }
    }

    void add_rows(const row_layout& layout, const page& p, std::int64_t first, std::int64_t count, const head_query& q, float* logits, const page* next = nullptr) const {
        const page_rows<Scalar> rows{reinterpret_cast<const Scalar*>(layout.keys(p, owner_, q.head)), reinterpret_cast<const Scalar*>(layout.values(p, owner_, q.head)), layout.capacity(), first, count,
                                     next != nullptr ? reinterpret_cast<const Scalar*>(layout.keys(*next, owner_, q.head)) : nullptr};
        attend_rows(rows, shape_.key_size, q.queries, q.soft_cap, *q.state, logits);
    }

    // Sinks stay exact at full resolution too.
    void restore_sinks(const sequence_record<Codec>& r, token_range part, std::int32_t head, prefill_tile& t) const {
        const auto n = std::min<std::int64_t>(r.sink_count, part.count);
        if (part.begin > 0 || n == 0) return;
        where_.read_page(where_.sink_layout(), *r.sinks, owner_, head, {0, n}, t.keys, t.values);
    }

    void store(const softmax_state& state, std::int32_t g, std::int64_t row, std::int32_t head, const out_view& out, float* lse) const {
        state.finish(g, out.row(row, head));
        if (lse != nullptr) lse[row * shape_.query_heads() + head] = state.log_sum_exp(g);
    }

    const layer_shape& shape_;
    const residency<Scalar, Codec>& where_;
    const Codec& codec_;
    std::int32_t owner_;
};

}  // namespace sekv
