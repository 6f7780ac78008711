// Rows in and out, and attention, on the CUDA backend.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sekv/attend/cuda_codec.hpp"
#include "sekv/attend/engine.hpp"

namespace sekv {

namespace cuda {
class output;
struct decode_step;
}

/// What does not depend on the stored type's C++ name; compiled in src/cuda/engine*.cpp.
class cuda_engine {
public:
    using record = sequence_record<cuda_progressive_codec>;
    using item = step_item<cuda_progressive_codec>;

    /// Rows where kernels can read them: the caller's own device memory, or a pinned copy of host memory.
    struct staged {
        rows_view view;
        buffer copy;
    };
    /// Upper bounds that a plan's launch shapes and workspace are made for, and where its parts lie in the workspace.
    struct step_tables;

    cuda_engine(const model_shape& model, cuda_backend& where, block_pool& pool, cuda_progressive_codec& coder, dtype stored);
    ~cuda_engine();
    cuda_engine(const cuda_engine&) = delete;
    cuda_engine& operator=(const cuda_engine&) = delete;

    /// Host rows are converted, checked and copied; device rows are taken as they are, and values that aren't finite are reported by a later call between steps.
    [[nodiscard]] staged stage(const char* what, const rows_view& v) const;
    void write(std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values);
    void write(step_tables& t, std::byte* workspace, std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values);
    void observe(const item& i, std::int32_t layer, const rows_view& queries);

    [[nodiscard]] std::shared_ptr<step_tables> size(std::span<const batch_item> items, std::int64_t tokens, std::int64_t longest, resolution how, const std::vector<const record*>& records) const;
    [[nodiscard]] static std::size_t bytes_of(const step_tables& t) noexcept;
    [[nodiscard]] static bool covers(const step_tables& t, const record& r) noexcept;
    void begin_step(step_tables& t, std::byte* workspace, const std::vector<item>& items);
    void replayed(step_tables& t, const std::vector<item>& items);
    void attend(step_tables& t, std::byte* workspace, std::int32_t layer, const std::vector<item>& items, const rows_view& queries, const out_view& out, float* lse);
    void prefetch(step_tables& t, std::byte* workspace, std::int32_t layer, const std::vector<item>& items, const rows_view& queries);
    void read(const record& r, std::int32_t layer, token_range range, const out_view& keys, const out_view& values) const;
    /// Sends what kernels read of a sequence, if it changed.
    void settle(record& r) const;
    /// The keys of one layer's rows [begin, begin + count) as floats on the host, [count, kv_heads * key_size]. Waits.
    [[nodiscard]] std::vector<float> keys_of(const record& r, std::int32_t layer, token_range range) const;
    void collect(zoom_metrics& zooms) const;
    /// Throws what the device noticed since the last call: invalid_argument for appended values or queries that weren't finite.
    void check_deferred();

private:
    struct state;
    [[nodiscard]] staged stage_queries(const rows_view& v) const;
    void send(step_tables& t, std::byte* workspace, std::span<const item> items) const;
    [[nodiscard]] static bool takes_many(const step_tables& t, std::span<const item> items) noexcept;
    void ready_metric(const step_tables& t, std::int32_t layer, std::span<const item> items);
    void take_queries(step_tables& t, std::byte* workspace, std::int32_t layer, std::span<const item> items, const rows_view& queries);
    static void cut_windows(step_tables& t);
    [[nodiscard]] static std::vector<item> as_sent(const step_tables& t, std::vector<item> items);
    [[nodiscard]] cuda::decode_step decode_step_of(const step_tables& t, std::size_t window, std::byte* workspace, std::int32_t layer, const rows_view& queries) const;
    void attend_adaptive(const step_tables& t, std::byte* workspace, std::int32_t layer, const rows_view& queries, const cuda::output& to) const;
    void attend_full(const step_tables& t, std::byte* workspace, std::int32_t layer, std::span<const item> items, const rows_view& queries, const cuda::output& to) const;
    class full_pass;
    std::unique_ptr<state> state_;
};

/// See cuda_backend for what synchronises.
template <scalar Scalar>
    requires(!std::same_as<Scalar, float>)
class engine<Scalar, cuda_backend, cuda_progressive_codec> {
public:
    using Codec = cuda_progressive_codec;
    using record = sequence_record<Codec>;
    using item = step_item<Codec>;
    using staged = cuda_engine::staged;

    engine(const model_shape& model, const cache_options&, cuda_backend& where, block_pool& pool, residency<Scalar, Codec>& rows, Codec& coder)
        : model_(&model), residency_(&rows), core_(std::make_unique<cuda_engine>(model, where, pool, coder, dtype_of<Scalar>)) {}

    [[nodiscard]] staged stage(const char* what, const rows_view& v) const { return core_->stage(what, v); }
    void write(std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values) { core_->write(items, layer, keys, values); }
    void write(plan& p, std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values) { core_->write(tables(p), p.workspace_.data(), items, layer, keys, values); }
    void observe(const item& i, std::int32_t layer, const rows_view& queries) { core_->observe(i, layer, queries); }
    // Not here but in follow, between steps, since the keys are on the device.
    void follow_novelty(record&, std::int32_t, const staged&, std::int64_t, std::int64_t) noexcept {}
    void restart_novelty(record& r);
    void check() { core_->check_deferred(); }
    void follow(record& r);
    void settle(record& r);

    void size(plan& p, const std::vector<const record*>& records) const;
    [[nodiscard]] bool covers(const plan& p, const record& r) const noexcept { return !p.own_ || cuda_engine::covers(tables(p), r); }
    void begin_step(plan& p, const std::vector<item>& items) { core_->begin_step(tables(p), p.workspace_.data(), items); }
    void replayed(plan& p, const std::vector<item>& items) { core_->replayed(tables(p), items); }
    void attend(plan& p, std::int32_t layer, const std::vector<item>& items, const rows_view& queries, const out_view& out, float* lse, zoom_metrics&) {
        core_->attend(tables(p), p.workspace_.data(), layer, items, queries, out, lse);
    }
    void prefetch(plan& p, std::int32_t layer, const std::vector<item>& items, const rows_view& queries) { core_->prefetch(tables(p), p.workspace_.data(), layer, items, queries); }
    void read(const record& r, std::int32_t layer, token_range range, const out_view& keys, const out_view& values) const { core_->read(r, layer, range, keys, values); }
    [[nodiscard]] const zoom_metrics& collect(zoom_metrics& zooms) const {
        core_->collect(zooms);
        return zooms;
    }

private:
    [[nodiscard]] static cuda_engine::step_tables& tables(const plan& p) noexcept { return *static_cast<cuda_engine::step_tables*>(p.own_.get()); }

    const model_shape* model_;
    residency<Scalar, Codec>* residency_;
    std::unique_ptr<cuda_engine> core_;
};

template <scalar S>
    requires(!std::same_as<S, float>)
void engine<S, cuda_backend, cuda_progressive_codec>::size(plan& p, const std::vector<const record*>& records) const {
    p.round_longest();
    auto t = core_->size(p.items_, p.tokens_, p.longest_, p.how_, records);
    p.workspace_bytes_ = cuda_engine::bytes_of(*t);
    p.own_ = std::move(t);
}

// The record has changed already, so what is refused here isn't the caller's failure: whoever reads the tables next sends them first.
template <scalar S>
    requires(!std::same_as<S, float>)
void engine<S, cuda_backend, cuda_progressive_codec>::settle(record& r) {
    try {
        core_->settle(r);
    } catch (const budget_error&) {
    } catch (const device_error& e) {
        if (e.lost()) throw;
    }
}

// Spans take the keys that came since.
template <scalar S>
    requires(!std::same_as<S, float>)
void engine<S, cuda_backend, cuda_progressive_codec>::follow(record& r) {
    if (!r.novelty) return;
    const auto layer = residency_->novelty_layer();
    const auto& l = model_->layers[static_cast<std::size_t>(layer)];
    const auto begin = r.spans.length();
    r.follow_keys(core_->keys_of(r, layer, {begin, r.lengths[static_cast<std::size_t>(layer)] - begin}), static_cast<std::size_t>(l.kv_heads * l.key_size));
}

template <scalar S>
    requires(!std::same_as<S, float>)
void engine<S, cuda_backend, cuda_progressive_codec>::restart_novelty(record& r) {
    if (!r.novelty) return;
    const auto layer = residency_->novelty_layer();
    const auto& l = model_->layers[static_cast<std::size_t>(layer)];
    const auto begin = std::max(r.spans.open_begin(), residency_->first_held(r, layer));
    r.restart_keys(begin, core_->keys_of(r, layer, {begin, r.spans.length() - begin}), static_cast<std::size_t>(l.kv_heads * l.key_size));
}

}  // namespace sekv
