// Which rows of a sequence are exact, where they live, and when they step down (design.md section 2, "Settled").
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "sekv/attend/record.hpp"
#include "sekv/core/view.hpp"
#include "sekv/exec/row_ops.hpp"

namespace sekv {

/// Grows, seals, forks and truncates sequence records. Every decision is a function of the record's own history and quota; the cache-wide budget can only refuse.
template <scalar Scalar, codec Codec>
class residency {
public:
    using record = sequence_record<Codec>;

    residency(const model_shape& model, const cache_options& options, block_pool& pool, Codec& codec)
        : model_(&model),
          options_(&options),
          pool_(&pool),
          codec_(&codec),
          layouts_{row_layout(model, false, sizeof(Scalar), host::block_tokens), row_layout(model, true, sizeof(Scalar), host::block_tokens)},
          sink_layout_(model, false, sizeof(Scalar), model.sinks) {
        std::vector<std::int32_t> owners;
        for (std::size_t i = 0; i < model.layers.size(); ++i) {
            widest_window_ = std::max<std::int64_t>(widest_window_, model.layers[i].sliding_window);
            if (layout(whole).holds(static_cast<std::int32_t>(i))) owners.push_back(static_cast<std::int32_t>(i));
        }
        if (!owners.empty()) novelty_layer_ = owners[owners.size() / 2];
    }

    [[nodiscard]] const row_layout& layout(layer_class c) const noexcept { return layouts_[static_cast<std::size_t>(c)]; }
    [[nodiscard]] const row_layout& sink_layout() const noexcept { return sink_layout_; }
    [[nodiscard]] layer_class class_of(std::int32_t layer) const noexcept { return model_->layers[static_cast<std::size_t>(layer)].windowed() ? layer_class::windowed : layer_class::whole; }
    /// Tokens that all owning layers hold; -1 while a step is under way and they differ.
    [[nodiscard]] std::int64_t common_length(const record& r) const noexcept;
    /// Tokens that every owning layer holds, in the middle of a step too.
    [[nodiscard]] std::int64_t least_length(const record& r) const noexcept {
        std::int64_t least = r.capacity;
        for (std::size_t l = 0; l < model_->layers.size(); ++l) least = model_->layers[l].kv_source < 0 ? std::min(least, r.lengths[l]) : least;
        return least;
    }
    [[nodiscard]] usage used_by(const record& r) const;

    /// Makes room for tokens [length, length + tokens): allocates rows, seals or moves older blocks where the quota presses. Throws budget_error, the record's content unchanged.
    void reserve(record& r, std::int64_t length, std::int64_t tokens);
    /// Prefill is over: if not everything fits the quota, the oldest blocks are sealed. Throws budget_error likewise.
    void end_prefill(record& r, std::int64_t length);
    /// The record's state at `length`; sealed blocks are cut short, never encoded again.
    void truncate(record& r, std::int64_t length);
    [[nodiscard]] record fork(const record& from, std::int64_t length);

    /// Moves up to `bytes` of a sequence that is still prefilling from the device to the host, for a workspace that doesn't fit beside it.
    void relieve(record& r, std::uint64_t bytes);

    /// Exact rows as floats, for sealing and reconstruction; the range lies in the exact blocks.
    void read_rows(const row_list& list, layer_class c, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const;

    /// Some rows of one page as floats: keys [count, key_size], values [count, value_size].
    void read_page(const row_layout& layout, const page& p, std::int32_t layer, std::int32_t head, token_range rows, float* keys, float* values) const;
    /// The first position whose rows a layer still has.
    [[nodiscard]] std::int64_t first_held(const record& r, std::int32_t layer) const noexcept {
        const auto& blocks = r.of(class_of(layer)).blocks();
        return class_of(layer) == layer_class::whole || blocks.empty() ? 0 : blocks.front().begin;
    }
    /// Token-level rows of a held range, sealed or exact, at the best level: keys and values [count, kv_heads, size].
    void read(const record& r, std::int32_t layer, token_range range, const out_view& keys, const out_view& values) const;
    /// The layer whose keys drive key novelty: the middle one of those that own whole-context keys, else the first.
    [[nodiscard]] std::int32_t novelty_layer() const noexcept { return novelty_layer_; }

private:
    class reader;
    static constexpr auto whole = layer_class::whole;
    static constexpr auto windowed = layer_class::windowed;

    struct growth {  // what reserve adds to one class
        bool copy_last = false;
        std::size_t on_host = 0;  // of the new blocks, the oldest
        std::vector<row_block> blocks;
        [[nodiscard]] std::size_t device_pages() const noexcept { return blocks.size() - on_host + (copy_last ? 1 : 0); }
    };
    [[nodiscard]] growth plan_growth(const record& r, layer_class c, std::int64_t target) const;
    [[nodiscard]] std::size_t overflow(const record& r, const growth& g, std::uint64_t other) const;
    void allocate(growth& g, layer_class c, const record& r);
    void commit(growth& g, layer_class c, record& r, std::int64_t target);
    [[nodiscard]] std::int64_t eligible_blocks(const record& r, std::int64_t length) const noexcept;
    [[nodiscard]] std::int64_t blocks_to_seal(const record& r, std::int64_t length, std::uint64_t extra, std::int64_t least_left, const char* purpose) const;
    [[nodiscard]] std::uint64_t device_bytes(const record& r) const { return used_by(r).total(tier::device); }
    [[nodiscard]] std::uint64_t host_resident_bytes(const record& r) const noexcept { return r.of(whole).bytes(tier::host); }
    void make_room(record& r, const demand& need, std::uint64_t replaced, std::int64_t most_blocks, const char* purpose);
    // A block on the device counts against the quota of each sequence that refers to it; only one that no fork shares gives the cache bytes back when it moves.
    [[nodiscard]] static bool is_movable(const row_block& b) noexcept { return b.rows->where() == tier::device; }
    [[nodiscard]] static bool is_own(const row_block& b) noexcept { return is_movable(b) && b.rows.use_count() == 1; }
    using block_test = bool (*)(const row_block&) noexcept;
    [[nodiscard]] static std::uint64_t count_blocks(const record& r, std::int64_t most_blocks, block_test test) noexcept;
    void demote(record& r, std::uint64_t count, block_test test);
    struct pending_seal {
        std::int64_t blocks = 0;
        std::vector<typename record::unit> units;
        page_ref sinks;
    };
    [[nodiscard]] demand seal_demand(const record& r, std::int64_t blocks) const;
    [[nodiscard]] pending_seal prepare_seal(record& r, std::int64_t length, std::int64_t blocks);
    void commit(pending_seal&& p, record& r) noexcept;
    void drop_behind_window(record& r, std::int64_t length) noexcept;
    class window_drop;
    [[nodiscard]] page_ref copy_sinks(const record& r);
    void copy_page(const page& from, page& to);

    const model_shape* model_;
    const cache_options* options_;
    block_pool* pool_;
    Codec* codec_;
    std::array<row_layout, layer_classes> layouts_;
    row_layout sink_layout_;
    std::int64_t widest_window_ = 0;
    std::int32_t novelty_layer_ = 0;
};

}  // namespace sekv

#include "sekv/attend/residency_impl.hpp"
