// Decode attention's tests: sequences of a host cache put into device memory as the kernels see them, a batch over them, and what double precision makes of it.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/rows_world.hpp"
#include "kernels/decode_workspace.cuh"
#include "oracle/progressive.hpp"
#include "oracle/replay.hpp"
#include "sekv/sekv.hpp"
#include "src/cuda/layer_layout.hpp"

namespace sekv::cuda::decode_tests {

using rows_tests::array;

/// One layer and its options. Codes of few tokens: short epochs, small line cache.
struct world_shape {
    std::int32_t kv_heads = 2, group = 4, dk = 64, dv = 64, window = 0, sinks = 4;
    float soft_cap = 0, query_gain = 1;
    progressive_options codec = short_codec();
    dtype query = dtype::f32;  ///< of the batch's queries
    std::uint32_t seed = 1;

    static progressive_options short_codec() {
        progressive_options o;
        o.tau = 2e-3F;
        o.epoch_tokens = 256;
        o.line_slots = 64;
        o.horizon = 0;
        return o;
    }
};

/// How long a sequence becomes: a prompt, then tokens appended one by one.
struct sequence_shape {
    std::int64_t prompt = 0, decoded = 0;
    double share = 0.5;         ///< of the exact bytes of all its tokens, which its quota is beside its line cache; above 1 nothing is sealed
    std::int64_t truncate = -1; ///< length that it is cut to in the end
};

/// An item of the batch: query tokens at the end of a sequence. sequence -1: padding rows.
struct item_shape {
    std::int32_t sequence = 0;
    std::int32_t tokens = 1;
};

/// Sequences of one layer in a host cache of T, and their copies in device and pinned memory.
template <scalar T>
class world {
public:
    using cache_type = basic_cache<T, host_backend, progressive_codec>;
    struct result {
        std::vector<float> out, lse;  ///< [rows, query_heads, dv], [rows, query_heads]
        bool operator==(const result&) const = default;
    };

    world(const world_shape& s, const std::vector<sequence_shape>& sequences) : shape(s), model(make_model(s)), bases_(model, s.codec), layer(cache_layout(model, s.codec, dtype_of<T>).layers[0]) {
        cache_options o;
        o.window = 32, o.rejectable = 16;
        host_ = std::make_unique<cache_type>(model, o, s.codec, host_backend(1));
        for (const auto& x : sequences) add(x);
    }

    [[nodiscard]] std::int64_t length(std::int32_t i) const { return at(i).length; }
    [[nodiscard]] std::int64_t sealed(std::int32_t i) const { return host_->sealed(at(i).handle); }
    [[nodiscard]] const auto& units(std::int32_t i) const { return host_->units(at(i).handle); }
    [[nodiscard]] const auto& coder() const { return host_->coder(); }
    [[nodiscard]] const std::vector<sealed_block>& blocks(std::int32_t i) const { return at(i).blocks; }
    /// One head's group of scaled queries at a position.
    [[nodiscard]] std::vector<double> queries(std::int32_t i, std::int32_t head, std::int64_t position) const { return at(i).tokens.group(0, head, position); }
    [[nodiscard]] std::int32_t query_heads() const { return shape.kv_heads * shape.group; }

    /// Bounds that these sequences ask for; a plan may be made with larger ones.
    [[nodiscard]] decode_bounds bounds(const std::vector<item_shape>& items) const {
        decode_bounds b;
        b.tau = shape.codec.tau, b.largest_of_group = shape.codec.rule == zoom_rule::max, b.cap = shape.codec.cap;
        b.items = static_cast<std::int32_t>(items.size());
        for (const auto& x : items) {
            b.rows += x.tokens;
            if (x.sequence < 0) continue;
            const auto& v = at(x.sequence).view;
            b.exact_blocks = std::max({b.exact_blocks, v.exact_count[0], v.exact_count[1]});
            b.segments = std::max(b.segments, v.segment_count), b.epochs = std::max(b.epochs, v.epoch_count), b.key_bases = std::max(b.key_bases, v.key_bases_count);
        }
        return b;
    }

    /// A step over device memory: its batch, queries, outputs and workspace.
    struct batch {
        std::vector<item_shape> items;
        std::vector<float> queries;  ///< as rounded to the query type
        std::unique_ptr<array<batch_entry>> entries;
        std::unique_ptr<array<batch_row>> rows;
        std::unique_ptr<array<std::byte>> query_bytes, workspace;
        std::unique_ptr<array<float>> out, lse;
        std::unique_ptr<array<zoom_counters>> counters;
        decode_step step;
    };
    [[nodiscard]] batch make_batch(const std::vector<item_shape>& items, const decode_bounds& b) const;
    [[nodiscard]] static result read(const batch& b) {
        rows_tests::finish();
        return {b.out->read(), b.lse->read()};
    }
    /// attend_decode over fresh line caches.
    [[nodiscard]] result attend(const std::vector<item_shape>& items) const { return attend(items, bounds(items)); }
    [[nodiscard]] result attend(const std::vector<item_shape>& items, const decode_bounds& b) const {
        for (const auto& s : sequences_) s->clear_lines();
        const auto step = make_batch(items, b);
        attend_decode(step.step, nullptr);
        return read(step);
    }
    /// The host cache's own adaptive attention of the same queries. Enters them into its metric, so what it seals later may differ.
    [[nodiscard]] result host_attend(const std::vector<item_shape>& items);
    /// In double, from the codes. Padding rows: zeros and -infinity.
    [[nodiscard]] result oracle_attend(const std::vector<item_shape>& items) const;

    world_shape shape;
    model_shape model;

private:
    basis_layout bases_;

public:
    layer_layout layer;

private:
    struct held {
        explicit held(const oracle::stream& s) : tokens(s) {}
        void clear_lines() const {
            if (lines == nullptr) return;
            ASSERT_EQ(cudaMemset(lines->get(), 0, lines->size()), cudaSuccess);
        }
        oracle::stream tokens;
        sequence handle;
        std::int64_t length = 0;
        std::vector<array<std::byte>> storage;
        std::unique_ptr<array<std::byte>> lines;
        std::vector<sealed_block> blocks;
        sequence_view view;
        std::unique_ptr<array<sequence_view>> device_view;
    };

    static model_shape make_model(const world_shape& s) {
        layer_shape l;
        l.kv_heads = s.kv_heads, l.group = s.group, l.key_size = s.dk, l.value_size = s.dv, l.sliding_window = s.window, l.soft_cap = s.soft_cap;
        return oracle::make_model(1, l, s.sinks);
    }
    [[nodiscard]] const held& at(std::int32_t i) const { return *sequences_[static_cast<std::size_t>(i)]; }
    void add(const sequence_shape& s);
    void fill(held& h, const sequence_shape& s);
    void append(held& h, const sequence_shape& s);
    void upload(held& h);
    void upload_exact(held& h, std::int64_t begin);
    void upload_sinks(held& h);
    void upload_sealed(held& h);
    [[nodiscard]] oracle::head_history history(const held& h, std::int32_t head, std::int64_t position) const;
    template <class X>
    const X* put(held& h, const void* from, std::size_t bytes, bool pinned = false) {
        const auto* p = static_cast<const std::byte*>(from);
        h.storage.emplace_back(std::vector<std::byte>(p, p + bytes), pinned);
        return reinterpret_cast<const X*>(h.storage.back().get());
    }
    template <class X>
    const X* put(held& h, const std::vector<X>& from) {
        return from.empty() ? nullptr : put<X>(h, from.data(), from.size() * sizeof(X));
    }
    static float rounded(float x) { return static_cast<float>(T(x)); }
    [[nodiscard]] float key(const held& h, std::int64_t t, std::int32_t head, std::int32_t j) const { return h.tokens.layers[0].keys[static_cast<std::size_t>((t * shape.kv_heads + head) * shape.dk + j)]; }
    [[nodiscard]] float value(const held& h, std::int64_t t, std::int32_t head, std::int32_t j) const { return h.tokens.layers[0].values[static_cast<std::size_t>((t * shape.kv_heads + head) * shape.dv + j)]; }

    std::unique_ptr<cache_type> host_;
    std::vector<std::unique_ptr<held>> sequences_;
};

template <scalar T>
void world<T>::add(const sequence_shape& s) {
    oracle::stream tokens(model, std::max<std::int64_t>(s.prompt + s.decoded, 1), shape.seed + static_cast<std::uint32_t>(sequences_.size()));
    tokens.scale_queries(shape.query_gain);
    for (auto& q : tokens.layers[0].queries) q = shape.query == dtype::f32 ? q : rows_tests::value_of(shape.query, rows_tests::bits_of(shape.query, q));
    sequences_.push_back(std::make_unique<held>(tokens));
    fill(*sequences_.back(), s);
    upload(*sequences_.back());
}

// Bases of large heads need more than the share asked for: then the least that suffices, in steps.
template <scalar T>
void world<T>::fill(held& h, const sequence_shape& s) {
    const auto probe = host_->open({0, h.tokens.tokens});
    const auto fixed = host_->used(probe).total(tier::device);
    host_->close(probe);
    const auto exact = static_cast<double>(kv_row_bytes(model.layers[0], sizeof(T))) * static_cast<double>(h.tokens.tokens);
    for (auto share = s.share;; share += 0.05) {
        h.handle = host_->open({share > 1 ? std::uint64_t{1} << 40 : fixed + static_cast<std::uint64_t>(share * exact), h.tokens.tokens});
        try {
            append(h, s);
            break;
        } catch (const budget_error&) {
            if (share > 0.95) throw;
            host_->close(h.handle);
        }
    }
    h.length = s.prompt + s.decoded;
    if (s.truncate < 0) return;
    host_->truncate(h.handle, s.truncate);
    h.length = s.truncate;
}

template <scalar T>
void world<T>::append(held& h, const sequence_shape& s) {
    for (std::int64_t t = 0; t < s.prompt + s.decoded;) {
        const auto n = t < s.prompt ? std::min<std::int64_t>(256, s.prompt - t) : 1;
        const auto q = h.tokens.queries(0, t, n);
        host_->append(h.handle, 0, h.tokens.keys(0, t, n), h.tokens.values(0, t, n), t, &q);
        t += n;
        if (t == s.prompt) host_->end_prefill(h.handle);
    }
}

template <scalar T>
void world<T>::upload(held& h) {
    const auto sealed = host_->sealed(h.handle);
    upload_exact(h, shape.window > 0 ? std::max<std::int64_t>(0, h.length - shape.window - 90) : sealed);
    if (sealed > 0 && shape.window == 0) {
        upload_sinks(h);
        upload_sealed(h);
    }
    h.device_view = std::make_unique<array<sequence_view>>(std::vector<sequence_view>{h.view});
}

// Exact pages from `begin` on; the first holds fewer rows than it could, and what no row was written to is 0xff.
template <scalar T>
void world<T>::upload_exact(held& h, std::int64_t begin) {
    const auto bytes = static_cast<std::size_t>(layer.exact_page.first) + static_cast<std::size_t>(shape.kv_heads) * layer.exact_page.stride;
    std::vector<exact_block> blocks;
    for (auto t = begin; t < h.length;) {
        exact_block b;
        b.begin = t, b.count = static_cast<std::int32_t>(std::min<std::int64_t>(h.length - t, t == begin ? 41 : block_tokens));
        std::vector<std::uint16_t> page(bytes / 2, 0xffff);
        for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
            for (std::int32_t i = 0; i < b.count; ++i) {
                for (std::int32_t j = 0; j < shape.dk; ++j) page[rows_tests::key_index(layer.exact_page, head, j, i)] = T(key(h, t + i, head, j)).bits;
                for (std::int32_t j = 0; j < shape.dv; ++j) page[rows_tests::value_index(layer.exact_page, layer, head, i, j)] = T(value(h, t + i, head, j)).bits;
            }
        }
        b.rows = put<std::byte>(h, page.data(), bytes);
        t += b.count;
        blocks.push_back(b);
    }
    const auto which = shape.window > 0 ? 1U : 0U;
    h.view.exact[which] = put(h, blocks);
    h.view.exact_count[which] = static_cast<std::int32_t>(blocks.size());
}

template <scalar T>
void world<T>::upload_sinks(held& h) {
    h.view.sink_count = static_cast<std::int32_t>(std::min<std::int64_t>(model.sinks, host_->sealed(h.handle)));
    if (h.view.sink_count == 0) return;
    std::vector<std::uint16_t> page((layer.sink_page.first + static_cast<std::size_t>(shape.kv_heads) * layer.sink_page.stride) / 2, 0xffff);
    for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
        for (std::int32_t t = 0; t < h.view.sink_count; ++t) {
            for (std::int32_t j = 0; j < shape.dk; ++j) page[rows_tests::key_index(layer.sink_page, head, j, t, layer.sink_capacity)] = T(key(h, t, head, j)).bits;
            for (std::int32_t j = 0; j < shape.dv; ++j) page[rows_tests::value_index(layer.sink_page, layer, head, t, j, layer.sink_capacity)] = T(value(h, t, head, j)).bits;
        }
    }
    h.view.sinks = put<std::byte>(h, page.data(), page.size() * 2);
}

template <scalar T>
void world<T>::upload_sealed(held& h) {
    auto& blocks = h.blocks;
    std::vector<segment> segments;
    std::vector<epoch_ref> epochs;
    std::vector<const std::byte*> keys;
    std::map<const void*, std::int32_t> known_epochs, known_keys;
    const auto keys_of = [&](const key_bases& k) { return put<std::byte>(h, k.device(), bases_.key_device_bytes()); };
    for (const auto& u : host_->units(h.handle)) {
        const auto& p = u.payload;
        if (known_epochs.emplace(p.statistics.get(), static_cast<std::int32_t>(epochs.size())).second) epochs.push_back({put<std::byte>(h, p.statistics->device(), bases_.epoch_bytes()), keys_of(*p.statistics->keys)});
        if (known_keys.emplace(p.keys.get(), static_cast<std::int32_t>(keys.size())).second) keys.push_back(keys_of(*p.keys));
        sealed_block b;
        b.sketch = put<std::uint8_t>(h, p.sketch->data(), p.sketch->size());
        b.lines = put<std::uint8_t>(h, p.lines->data(), p.lines->size(), true);
        if (p.exact) b.exact = put<std::uint8_t>(h, p.exact->data(), p.exact->size(), true);
        b.begin = u.begin, b.count = u.count, b.epoch = known_epochs.at(p.statistics.get()), b.keys = known_keys.at(p.keys.get());
        const auto index = static_cast<std::int32_t>(blocks.size());
        if (segments.empty() || segments.back().count == segment_blocks || segments.back().epoch != b.epoch || segments.back().keys != b.keys) segments.push_back({index, 0, b.epoch, b.keys});
        ++segments.back().count;
        blocks.push_back(b);
    }
    auto& v = h.view;
    v.sealed = put(h, blocks), v.sealed_count = static_cast<std::int32_t>(blocks.size());
    v.segments = put(h, segments), v.segment_count = static_cast<std::int32_t>(segments.size());
    v.epochs = put(h, epochs), v.epoch_count = static_cast<std::int32_t>(epochs.size());
    v.key_bases = put(h, keys), v.key_bases_count = static_cast<std::int32_t>(keys.size());
    v.line_slots = shape.codec.line_slots;
    if (v.line_slots == 0) return;
    h.lines = std::make_unique<array<std::byte>>(static_cast<std::size_t>(layer.line_cache.first) + static_cast<std::size_t>(shape.kv_heads) * layer.line_cache.stride, false, 0);
    v.line_cache = h.lines->get();
}

template <scalar T>
typename world<T>::batch world<T>::make_batch(const std::vector<item_shape>& items, const decode_bounds& bounds) const {
    batch b;
    b.items = items;
    std::vector<batch_entry> entries;
    std::vector<batch_row> rows;
    for (const auto& x : items) {
        const auto* h = x.sequence < 0 ? nullptr : &at(x.sequence);
        const auto position = h == nullptr ? 0 : h->length - x.tokens;
        entries.push_back({h == nullptr ? nullptr : h->device_view->get(), position, x.tokens, static_cast<std::int32_t>(rows.size())});
        for (std::int32_t i = 0; i < x.tokens; ++i) rows.push_back({static_cast<std::int32_t>(entries.size()) - 1, i});
        const auto width = query_heads() * shape.dk;
        if (h == nullptr) {
            b.queries.insert(b.queries.end(), static_cast<std::size_t>(x.tokens * width), std::numeric_limits<float>::quiet_NaN());
        } else if (position < 0) {  // a sequence without tokens, so without queries of its own
            b.queries.insert(b.queries.end(), static_cast<std::size_t>(x.tokens * width), 1.0F);
        } else {
            const auto from = h->tokens.layers[0].queries.begin() + position * width;
            b.queries.insert(b.queries.end(), from, from + x.tokens * width);
        }
    }
    std::vector<std::byte> bytes(b.queries.size() * size_of(shape.query));
    for (std::size_t i = 0; i < b.queries.size(); ++i) {
        const auto half = shape.query == dtype::f32 ? std::uint16_t{0} : rows_tests::bits_of(shape.query, b.queries[i]);
        std::memcpy(bytes.data() + i * size_of(shape.query), shape.query == dtype::f32 ? static_cast<const void*>(&b.queries[i]) : &half, size_of(shape.query));
    }
    const auto count = rows.size() * static_cast<std::size_t>(query_heads());
    b.entries = std::make_unique<array<batch_entry>>(entries);
    b.rows = std::make_unique<array<batch_row>>(rows);
    b.query_bytes = std::make_unique<array<std::byte>>(bytes);
    b.out = std::make_unique<array<float>>(count * static_cast<std::size_t>(shape.dv), false, 0xff);
    b.lse = std::make_unique<array<float>>(count, false, 0xff);
    b.counters = std::make_unique<array<zoom_counters>>(1, false, 0);
    b.workspace = std::make_unique<array<std::byte>>(decode_workspace_bytes(layer, bounds), false, 0xff);
    b.step.layer = layer, b.step.bounds = bounds, b.step.items = b.entries->get(), b.step.rows = b.rows->get();
    b.step.queries = {b.query_bytes->get(), shape.query, query_heads() * shape.dk, shape.dk};
    b.step.out = {b.out->get(), query_heads() * shape.dv, shape.dv};
    b.step.lse = b.lse->get(), b.step.counters = b.counters->get(), b.step.workspace = b.workspace->get();
    return b;
}

template <scalar T>
typename world<T>::result world<T>::host_attend(const std::vector<item_shape>& items) {
    result r;
    for (const auto& x : items) {
        const auto n = static_cast<std::size_t>(x.tokens * query_heads()), size = static_cast<std::size_t>(shape.dv);
        result part{std::vector<float>(n * size), std::vector<float>(n, -std::numeric_limits<float>::infinity())};
        if (x.sequence >= 0 && at(x.sequence).length > 0) {
            const auto& h = at(x.sequence);
            const batch_item item{h.handle, x.tokens, h.length - x.tokens};
            host_->attend({&item, 1}, 0, h.tokens.queries(0, item.position, x.tokens), resolution::adaptive, out_rows(part.out.data(), x.tokens, query_heads(), shape.dv), part.lse.data());
        }
        r.out.insert(r.out.end(), part.out.begin(), part.out.end());
        r.lse.insert(r.lse.end(), part.lse.begin(), part.lse.end());
    }
    return r;
}

/// What the query at `position` sees of one head, from the codes; exact rows as stored.
template <scalar T>
oracle::head_history world<T>::history(const held& s, std::int32_t head, std::int64_t position) const {
    oracle::head_history h;
    h.key_size = static_cast<std::size_t>(shape.dk), h.value_size = static_cast<std::size_t>(shape.dv);
    std::vector<float> keys(64 * h.key_size), values(64 * h.value_size);
    const auto add = [](std::vector<double>& to, const std::vector<float>& from, std::int64_t first, std::int64_t last, std::size_t size) {
        to.insert(to.end(), from.begin() + first * static_cast<std::int64_t>(size), from.begin() + last * static_cast<std::int64_t>(size));
    };
    std::map<const void*, std::size_t> known;
    const auto sealed = shape.window > 0 ? 0 : host_->sealed(s.handle);
    for (const auto& u : host_->units(s.handle)) {
        const auto end = std::min<std::int64_t>(u.end(), position + 1) - u.begin, begin = std::max<std::int64_t>(0, std::min<std::int64_t>(model.sinks - u.begin, end));
        if (end <= begin || sealed == 0) continue;
        const auto [basis, fresh] = known.emplace(u.payload.keys.get(), h.decoders.size());
        if (fresh) {
            const auto view = u.payload.keys->view(head);
            oracle::head_history::decoder d;
            for (std::size_t i = 0; i < h.key_size * h.key_size; ++i) d.a.push_back(static_cast<float>(view.a[i]));
            d.error.assign(view.error, view.error + h.key_size);
            h.decoders.push_back(std::move(d));
        }
        h.basis.insert(h.basis.end(), static_cast<std::size_t>(end - begin), basis->second);
        host_->coder().decode_sketch(u, 0, head, {u.begin, u.count}, keys.data(), values.data());
        add(h.k1, keys, begin, end, h.key_size), add(h.v1, values, begin, end, h.value_size);
        host_->coder().decode(u, 0, head, {u.begin, u.count}, keys.data(), values.data());
        add(h.k2, keys, begin, end, h.key_size), add(h.v2, values, begin, end, h.value_size);
    }
    for (std::int64_t t = shape.window > 0 ? std::max<std::int64_t>(0, position + 1 - shape.window) : 0; t <= position; ++t) {
        if (t < sealed && t >= model.sinks) continue;
        for (std::int32_t j = 0; j < shape.dk; ++j) h.exact_keys.push_back(rounded(key(s, t, head, j)));
        for (std::int32_t j = 0; j < shape.dv; ++j) h.exact_values.push_back(rounded(value(s, t, head, j)));
    }
    return h;
}

template <scalar T>
typename world<T>::result world<T>::oracle_attend(const std::vector<item_shape>& items) const {
    result r;
    const oracle::zoom_policy policy{shape.codec.tau, static_cast<std::size_t>(shape.codec.cap), shape.codec.rule == zoom_rule::max, shape.soft_cap};
    for (const auto& x : items) {
        for (std::int32_t i = 0; i < x.tokens; ++i) {
            for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
                const auto n = static_cast<std::size_t>(shape.group);
                oracle::attention a{std::vector<double>(n * static_cast<std::size_t>(shape.dv)), std::vector<double>(n, -std::numeric_limits<double>::infinity()), {}};
                if (x.sequence >= 0 && at(x.sequence).length > 0) {
                    const auto& h = at(x.sequence);
                    const auto position = h.length - x.tokens + i;
                    a = oracle::attend(h.tokens.group(0, head, position), history(h, head, position), policy);
                }
                r.out.insert(r.out.end(), a.out.begin(), a.out.end());
                r.lse.insert(r.lse.end(), a.lse.begin(), a.lse.end());
            }
        }
    }
    return r;
}

/// Relative root mean square of a - b over b, and the largest difference of finite log-sum-exps; infinite where infinities differ or anything is NaN.
struct difference {
    double out = 0, lse = 0;
};
template <class Result>
difference compare(const Result& a, const Result& b) {
    difference d;
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < b.out.size(); ++i) {
        error += std::pow(static_cast<double>(a.out[i]) - static_cast<double>(b.out[i]), 2);
        norm += std::pow(static_cast<double>(b.out[i]), 2);
    }
    d.out = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
    for (std::size_t i = 0; i < b.lse.size(); ++i) {
        if (a.lse[i] == b.lse[i]) continue;
        const double e = std::abs(static_cast<double>(a.lse[i]) - static_cast<double>(b.lse[i]));
        d.lse = e <= 1e30 ? std::max(d.lse, e) : std::numeric_limits<double>::infinity();
    }
    if (std::isnan(d.out)) d.out = std::numeric_limits<double>::infinity();
    return d;
}

}  // namespace sekv::cuda::decode_tests
