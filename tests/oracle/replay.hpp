// A synthetic model's keys, values and queries, and a cache that they are replayed through.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "oracle/progressive.hpp"
#include "oracle/random.hpp"
#include "sekv/sekv.hpp"

namespace sekv::oracle {

using fp32_cache = basic_cache<float, host_backend, progressive_codec>;

[[nodiscard]] inline model_shape make_model(std::int32_t layers, layer_shape layer, std::int32_t sinks = 4) {
    model_shape m;
    m.layers.assign(static_cast<std::size_t>(layers), layer);
    m.fingerprint = "synthetic";
    m.sinks = sinks;
    return m;
}

/// Keys with a falling spectrum, and queries that each look for one earlier key of their own head.
struct stream {
    struct layer {
        std::vector<float> keys, values, queries;  ///< [tokens, heads, size]
    };
    model_shape model;
    std::int64_t tokens = 0;
    std::vector<layer> layers;

    stream(const model_shape& m, std::int64_t n, std::uint32_t seed) : model(m), tokens(n) {
        draws random(seed);
        for (const auto& l : model.layers) {
            layer x;
            x.keys = falling_rows(random, n * l.kv_heads, l.key_size);
            x.values = falling_rows(random, n * l.kv_heads, l.value_size, 0.97);
            x.queries = random.normals(n * l.query_heads() * l.key_size);
            const float pull = 5.0F / std::sqrt(static_cast<float>(l.key_size));
            for (std::int64_t t = 0; t < n; ++t) {
                for (std::int32_t h = 0; h < l.query_heads(); ++h) {
                    const float* key = x.keys.data() + (random.below(t + 1) * l.kv_heads + h / l.group) * l.key_size;
                    float* q = x.queries.data() + (t * l.query_heads() + h) * l.key_size;
                    for (std::int32_t j = 0; j < l.key_size; ++j) q[j] += pull * key[j];
                }
            }
            layers.push_back(std::move(x));
        }
    }
    void scale_queries(float factor) {
        for (auto& l : layers) {
            for (auto& q : l.queries) q *= factor;
        }
    }
    [[nodiscard]] rows_view keys(std::int32_t l, std::int64_t at, std::int64_t n) const { return rows(layers[index(l)].keys.data() + at * shape(l).kv_heads * shape(l).key_size, n, shape(l).kv_heads, shape(l).key_size); }
    [[nodiscard]] rows_view values(std::int32_t l, std::int64_t at, std::int64_t n) const {
        return rows(layers[index(l)].values.data() + at * shape(l).kv_heads * shape(l).value_size, n, shape(l).kv_heads, shape(l).value_size);
    }
    [[nodiscard]] rows_view queries(std::int32_t l, std::int64_t at, std::int64_t n) const {
        return rows(layers[index(l)].queries.data() + at * shape(l).query_heads() * shape(l).key_size, n, shape(l).query_heads(), shape(l).key_size);
    }
    /// One head's group of queries at a position, scaled.
    [[nodiscard]] std::vector<double> group(std::int32_t l, std::int32_t head, std::int64_t position) const {
        const auto& s = shape(l);
        const float* q = layers[index(l)].queries.data() + (position * s.query_heads() + head * s.group) * s.key_size;
        std::vector<double> out(q, q + s.group * s.key_size);
        for (auto& x : out) x *= s.logit_scale();
        return out;
    }

private:
    [[nodiscard]] static std::size_t index(std::int32_t l) { return static_cast<std::size_t>(l); }
    [[nodiscard]] const layer_shape& shape(std::int32_t l) const { return model.layers[index(l)]; }
};

struct replay_options {
    cache_options cache{};
    progressive_options codec{};
    std::int32_t threads = 1;
    double share = 0.6;  ///< of the whole stream's exact bytes, which the sequence's quota is beside its line cache
};

/// A cache with one open sequence whose quota makes it seal.
class replay {
public:
    struct step {
        std::vector<float> out, lse;
    };

    replay(const stream& s, const replay_options& o) : stream_(&s), cache(std::make_unique<fp32_cache>(s.model, o.cache, o.codec, host_backend(o.threads))), share_(o.share) { seq = open(); }

    [[nodiscard]] sequence open() {
        const auto probe = cache->open({0, stream_->tokens});
        const auto fixed = cache->used(probe).total(tier::device);
        cache->close(probe);
        std::uint64_t exact = 0;
        for (const auto& l : stream_->model.layers) exact += kv_row_bytes(l, sizeof(float)) * static_cast<std::uint64_t>(stream_->tokens);
        return cache->open({fixed + static_cast<std::uint64_t>(share_ * static_cast<double>(exact)), stream_->tokens});
    }
    void prefill(std::int64_t tokens) { prefill(seq, tokens); }
    void prefill(sequence s, std::int64_t tokens) {
        for (std::int64_t at = 0; at < tokens; at += 256) (void)chunk(s, at, std::min<std::int64_t>(256, tokens - at), resolution::full);
        cache->end_prefill(s);
    }
    /// Appends and attends tokens [at, at + n) in all layers; a step per layer.
    std::vector<step> chunk(sequence s, std::int64_t at, std::int64_t n, resolution how) {
        cache->reserve(s, n);
        std::vector<step> out;
        for (std::int32_t l = 0; l < static_cast<std::int32_t>(stream_->model.layers.size()); ++l) {
            cache->append(s, l, stream_->keys(l, at, n), stream_->values(l, at, n), at);
            out.push_back(attend(s, l, at, n, how));
        }
        return out;
    }
    step attend(sequence s, std::int32_t l, std::int64_t at, std::int64_t n, resolution how) {
        const auto& shape = stream_->model.layers[static_cast<std::size_t>(l)];
        step x;
        x.out.resize(static_cast<std::size_t>(n * shape.query_heads() * shape.value_size));
        x.lse.resize(static_cast<std::size_t>(n * shape.query_heads()));
        const batch_item item{s, n, at};
        cache->attend({&item, 1}, l, stream_->queries(l, at, n), how, out_rows(x.out.data(), n, shape.query_heads(), shape.value_size), x.lse.data());
        return x;
    }
    std::vector<step> decode(std::int64_t at) { return chunk(seq, at, 1, resolution::adaptive); }

private:
    const stream* stream_;

public:
    std::unique_ptr<fp32_cache> cache;
    sequence seq;

private:
    double share_;
};

/// What the query at `position` sees of one head, from the codes that the cache holds.
[[nodiscard]] inline head_history read_head(const fp32_cache& cache, sequence s, const stream& x, std::int32_t layer, std::int32_t head, std::int64_t position) {
    const auto& shape = cache.model().layers[static_cast<std::size_t>(layer)];
    head_history h;
    h.key_size = static_cast<std::size_t>(shape.key_size);
    h.value_size = static_cast<std::size_t>(shape.value_size);
    std::vector<float> keys(64 * h.key_size), values(64 * h.value_size);
    const auto put = [](std::vector<double>& to, const std::vector<float>& from, std::int64_t first, std::int64_t last, std::size_t size) {
        to.insert(to.end(), from.begin() + first * static_cast<std::int64_t>(size), from.begin() + last * static_cast<std::int64_t>(size));
    };
    const key_bases* last = nullptr;
    for (const auto& u : cache.units(s)) {
        const auto end = std::min<std::int64_t>(u.end(), position + 1) - u.begin;
        const auto begin = u.begin == 0 ? std::min<std::int64_t>(cache.model().sinks, end) : 0;
        if (end <= begin) continue;
        if (u.payload.keys.get() != last) {
            last = u.payload.keys.get();
            const auto view = last->view(layer * shape.kv_heads + head);
            head_history::decoder d;
            for (std::size_t i = 0; i < h.key_size * h.key_size; ++i) d.a.push_back(static_cast<float>(view.a[i]));
            d.error.assign(view.error, view.error + h.key_size);
            h.decoders.push_back(std::move(d));
        }
        h.basis.insert(h.basis.end(), static_cast<std::size_t>(end - begin), h.decoders.size() - 1);
        cache.coder().decode_sketch(u, layer, head, {u.begin, u.count}, keys.data(), values.data());
        put(h.k1, keys, begin, end, h.key_size);
        put(h.v1, values, begin, end, h.value_size);
        cache.coder().decode(u, layer, head, {u.begin, u.count}, keys.data(), values.data());
        put(h.k2, keys, begin, end, h.key_size);
        put(h.v2, values, begin, end, h.value_size);
    }
    const auto sealed = cache.sealed(s);
    for (std::int64_t t = 0; t <= position; ++t) {
        if (t < sealed && t >= cache.model().sinks) continue;
        const auto* k = static_cast<const float*>(x.keys(layer, t, 1).row(0, head));
        const auto* v = static_cast<const float*>(x.values(layer, t, 1).row(0, head));
        h.exact_keys.insert(h.exact_keys.end(), k, k + h.key_size);
        h.exact_values.insert(h.exact_values.end(), v, v + h.value_size);
    }
    return h;
}

/// The same with every token exact: plain attention.
[[nodiscard]] inline head_history exact_head(const stream& x, std::int32_t layer, std::int32_t head, std::int64_t position) {
    const auto& shape = x.model.layers[static_cast<std::size_t>(layer)];
    head_history h;
    h.key_size = static_cast<std::size_t>(shape.key_size);
    h.value_size = static_cast<std::size_t>(shape.value_size);
    for (std::int64_t t = 0; t <= position; ++t) {
        const auto* k = static_cast<const float*>(x.keys(layer, t, 1).row(0, head));
        const auto* v = static_cast<const float*>(x.values(layer, t, 1).row(0, head));
        h.exact_keys.insert(h.exact_keys.end(), k, k + h.key_size);
        h.exact_values.insert(h.exact_values.end(), v, v + h.value_size);
    }
    return h;
}

/// Relative root mean square of the difference, and the largest difference of the log-sum-exps, gathered over many heads.
struct deviation {
    double error = 0, norm = 0, lse = 0;

    void add(const replay::step& got, const attention& expected, std::size_t first_query_head, std::size_t size) {
        for (std::size_t i = 0; i < expected.out.size(); ++i) {
            const double x = got.out[first_query_head * size + i];
            error += (x - expected.out[i]) * (x - expected.out[i]);
            norm += expected.out[i] * expected.out[i];
        }
        for (std::size_t g = 0; g < expected.lse.size(); ++g) lse = std::max(lse, std::abs(got.lse[first_query_head + g] - expected.lse[g]));
    }
    [[nodiscard]] double relative() const { return std::sqrt(error / norm); }
};

}  // namespace sekv::oracle
