// What a backend does for a cache: rows in and out, and attention. Here: on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sekv/attend/residency.hpp"
#include "sekv/attend/staging.hpp"
#include "sekv/attend/step.hpp"

namespace sekv {

/// Specialised for each backend; basic_cache says what it asks of it, and checks arguments before it does.
template <scalar Scalar, backend Backend, codec Codec>
class engine;

/// On the host, for every backend whose memory is the host's: host_backend, or an engine's own. Every call is synchronous; loops run on the backend's executor.
template <scalar Scalar, backend Backend, host_codec Codec>
    requires(!device_backend<Backend>)
class engine<Scalar, Backend, Codec> {
public:
    using record = sequence_record<Codec>;
    using item = step_item<Codec>;
    using staged = std::vector<Scalar>;

    engine(const model_shape& model, const cache_options&, Backend& where, block_pool&, residency<Scalar, Codec>& rows, Codec& coder) : model_(&model), backend_(&where), residency_(&rows), codec_(&coder) {}

    /// K or V as stored, contiguous [tokens, heads, size]. Throws invalid_argument for what isn't finite.
    [[nodiscard]] staged stage(const char* what, const rows_view& v) const;
    void write(std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values);
    void write(const plan&, std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values) { write(items, layer, keys, values); }
    /// Takes one item's queries into the metric.
    void observe(const item& i, std::int32_t layer, const rows_view& queries);
    /// Lets the spans follow rows [first, first + count) of the novelty layer's keys.
    void follow_novelty(record& r, std::int32_t layer, const staged& keys, std::int64_t first, std::int64_t count);
    /// After a truncation or fork.
    void restart_novelty(record& r);

    /// Throws what a device noticed since the last call.
    void check() noexcept {}
    /// Between steps, before anything about the record changes: spans that lag behind the rows catch up.
    void follow(record&) noexcept {}
    /// Between steps, after anything about the record may have changed.
    void settle(record&) noexcept {}
    /// Rounds the plan's longest_ up and finds its workspace_bytes_. records: of its items, null for padding (only device backends look).
    void size(plan& p, const std::vector<const record*>& records) const;
    /// Whether the plan's workspace still serves the record, beyond longest_.
    [[nodiscard]] bool covers(const plan&, const record&) const noexcept { return true; }
    void begin_step(plan&, const std::vector<item>&) {}
    void replayed(plan&, const std::vector<item>&) { throw unsupported("Nothing is captured on the host backend: its calls run at once. Call append and attend in every step."); }
    void attend(plan& p, std::int32_t layer, const std::vector<item>& items, const rows_view& queries, const out_view& out, float* lse, zoom_metrics& zooms);
    /// Nothing crosses to the host.
    void prefetch(plan&, std::int32_t, const std::vector<item>&, const rows_view&) noexcept {}
    void read(const record& r, std::int32_t layer, token_range range, const out_view& keys, const out_view& values) const { residency_->read(r, layer, range, keys, values); }
    [[nodiscard]] const zoom_metrics& collect(zoom_metrics& zooms) const noexcept { return zooms; }

private:
    static void scale_queries(const rows_view& queries, float factor, float* out);
    void clear_padding(const plan& p, const layer_shape& l, const out_view& out, float* lse) const;
    void attend_full(plan& p, std::int32_t layer, const std::vector<item>& items, const float* scaled, const out_view& out, float* lse);
    [[nodiscard]] const layer_shape& shape(std::int32_t layer) const noexcept { return model_->layers[static_cast<std::size_t>(layer)]; }
    /// A step of fewer tasks than workers has scratch per task, else per worker.
    [[nodiscard]] static arena scratch(const plan& p, std::int64_t task, std::int32_t worker) {
        const auto place = static_cast<std::size_t>(p.scratch_per_task_ ? task : worker);
        return {p.workspace_.data() + p.query_bytes_ + p.worker_bytes_ * place, p.worker_bytes_};
    }

    const model_shape* model_;
    Backend* backend_;
    residency<Scalar, Codec>* residency_;
    Codec* codec_;
};

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
auto engine<S, B, C>::stage(const char* what, const rows_view& v) const -> staged {
    staged out(static_cast<std::size_t>(v.tokens * v.heads * v.size));
    convert_appended(what, v, out.data());
    return out;
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::write(std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values) {
    const auto& l = shape(layer);
    const auto c = residency_->class_of(layer);
    const auto& layout = residency_->layout(c);
    const auto dk = static_cast<std::size_t>(l.key_size), dv = static_cast<std::size_t>(l.value_size);
    for (const auto& i : items) {
        const auto& list = i.record->of(c);
        for (std::int64_t t = 0; t < i.tokens; ++t) {
            const auto& block = list.blocks()[list.find(i.position + t)];
            const auto row = static_cast<std::size_t>(i.position + t - block.begin);
            for (std::int32_t h = 0; h < l.kv_heads; ++h) {
                const auto from = static_cast<std::size_t>((i.row + t) * l.kv_heads + h);
                S* column = reinterpret_cast<S*>(layout.keys(*block.rows, layer, h)) + row;
                for (std::size_t j = 0; j < dk; ++j) column[j * host::block_tokens] = keys[from * dk + j];
                std::copy_n(values.data() + from * dv, dv, reinterpret_cast<S*>(layout.values(*block.rows, layer, h)) + row * dv);
            }
        }
    }
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::observe(const item& i, std::int32_t layer, const rows_view& queries) {
    std::vector<float> scaled(static_cast<std::size_t>(queries.tokens * queries.heads * queries.size));
    scale_queries(queries, shape(layer).logit_scale(), scaled.data());
    codec_->observe(i.record->own, layer, scaled.data(), shape(layer).group, queries.tokens);
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::follow_novelty(record& r, std::int32_t layer, const staged& keys, std::int64_t first, std::int64_t count) {
    const auto row = static_cast<std::size_t>(shape(layer).kv_heads * shape(layer).key_size);
    std::vector<float> floats(static_cast<std::size_t>(count) * row);
    host::to_float(keys.data() + static_cast<std::size_t>(first) * row, dtype_of<S>, floats.size(), floats.data());
    r.follow_keys(floats, row);
}

// From the rows that are held; a sliding-window layer may have dropped the open span's first.
template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::restart_novelty(record& r) {
    if (!r.novelty) return;
    const auto layer = residency_->novelty_layer();
    const auto& l = shape(layer);
    const auto begin = std::max(r.spans.open_begin(), residency_->first_held(r, layer));
    const auto count = r.spans.length() - begin;
    std::vector<float> keys(static_cast<std::size_t>(count * l.kv_heads * l.key_size));
    std::vector<float> values(static_cast<std::size_t>(count * l.kv_heads * l.value_size));
    read(r, layer, {begin, count}, out_rows(keys.data(), count, l.kv_heads, l.key_size), out_rows(values.data(), count, l.kv_heads, l.value_size));
    r.restart_keys(begin, keys, static_cast<std::size_t>(l.kv_heads * l.key_size));
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::size(plan& p, const std::vector<const record*>&) const {
    p.round_longest();
    std::size_t query = 0, tasks = 0;
    for (std::size_t l = 0; l < model_->layers.size(); ++l) {
        const auto& x = model_->layers[l];
        tasks = std::max(tasks, p.items_.size() * static_cast<std::size_t>(x.kv_heads));
        query = std::max(query, static_cast<std::size_t>(x.query_heads() * x.key_size));
        arena a;
        head_step<S, C>(*model_, *residency_, *codec_, static_cast<std::int32_t>(l)).layout_scratch(a, p.how_, p.longest_);
        p.worker_bytes_ = std::max(p.worker_bytes_, a.used());
    }
    p.query_bytes_ = (query * static_cast<std::size_t>(p.tokens_) * sizeof(float) + 127) / 64 * 64;
    const auto workers = static_cast<std::size_t>(backend_->exec().workers());
    p.scratch_per_task_ = p.how_ == resolution::adaptive && tasks < workers;
    p.workspace_bytes_ = p.query_bytes_ + p.worker_bytes_ * (p.scratch_per_task_ ? tasks : workers);
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::scale_queries(const rows_view& queries, float factor, float* out) {
    convert_rows(queries, out, [](std::int64_t, std::int32_t) { refuse_queries(); });
    host::scale(out, queries.tokens * queries.heads * queries.size, factor);
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::clear_padding(const plan& p, const layer_shape& l, const out_view& out, float* lse) const {
    std::int64_t row = 0;
    for (const auto& i : p.items_) {
        for (std::int64_t t = row; i.seq.generation == 0 && t < row + i.tokens; ++t) {
            for (std::int32_t h = 0; h < l.query_heads(); ++h) {
                std::fill_n(out.row(t, h), l.value_size, 0.0F);
                if (lse != nullptr) lse[t * l.query_heads() + h] = softmax_state::empty_max;
            }
        }
        row += i.tokens;
    }
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::attend(plan& p, std::int32_t layer, const std::vector<item>& items, const rows_view& queries, const out_view& out, float* lse, zoom_metrics& zooms) {
    const auto& l = shape(layer);
    float* scaled = p.workspace_.template as<float>();
    scale_queries(queries, l.logit_scale(), scaled);
    for (const auto& i : items) codec_->observe(i.record->own, layer, scaled, l.group, 0);  // what can fail, before any metric changes
    for (const auto& i : items) codec_->observe(i.record->own, layer, scaled + i.row * l.query_heads() * l.key_size, l.group, i.tokens);
    clear_padding(p, l, out, lse);
    if (p.how_ == resolution::full) return attend_full(p, layer, items, scaled, out, lse);
    const head_step<S, C> step(*model_, *residency_, *codec_, layer);
    auto& exec = backend_->exec();
    std::vector<zoom_metrics> counted(static_cast<std::size_t>(exec.workers()));
    exec.run(static_cast<std::int64_t>(items.size()) * l.kv_heads, [&](std::int64_t task, std::int32_t worker) {
        step.adaptive(items[static_cast<std::size_t>(task / l.kv_heads)], static_cast<std::int32_t>(task % l.kv_heads), scaled, out, lse, scratch(p, task, worker), counted[static_cast<std::size_t>(worker)]);
    });
    for (const auto& m : counted) zooms += m;
}

template <scalar S, backend B, host_codec C>
    requires(!device_backend<B>)
void engine<S, B, C>::attend_full(plan& p, std::int32_t layer, const std::vector<item>& items, const float* scaled, const out_view& out, float* lse) {
    const auto& l = shape(layer);
    const head_step<S, C> step(*model_, *residency_, *codec_, layer);
    struct tile {
        std::size_t item;
        std::int64_t first, count;
    };
    std::vector<tile> tiles;
    const auto width = prefill_tile::tokens_for(l.group);
    for (std::size_t i = 0; i < items.size(); ++i) {
        for (std::int64_t first = 0; first < items[i].tokens; first += width) tiles.push_back({i, first, std::min(width, items[i].tokens - first)});
    }
    backend_->exec().run(static_cast<std::int64_t>(tiles.size()) * l.kv_heads, [&](std::int64_t task, std::int32_t worker) {
        const auto& t = tiles[static_cast<std::size_t>(task / l.kv_heads)];
        step.full(items[t.item], static_cast<std::int32_t>(task % l.kv_heads), t.first, t.count, scaled, out, lse, scratch(p, task, worker));
    });
}

}  // namespace sekv
