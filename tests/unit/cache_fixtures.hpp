// What the cache's tests share: tokens whose K, V and queries follow from a number, steps over them, and full attention in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#ifdef SEKV_TEST_CUDA
#include "sekv/cuda.hpp"
#else
#include "sekv/sekv.hpp"
#endif

namespace sekv_test {

// The cache's tests run on every backend: their sources are compiled once for each.
#ifdef SEKV_TEST_CUDA
/// Takes what the tests give the host's cache: of a host backend, its executor.
class float_cache : public sekv::cuda_fp16_cache {
public:
    static constexpr bool on_device = true;
    explicit float_cache(const sekv::model_shape& model, const sekv::cache_options& o = {}, const sekv::progressive_options& codec = {}, const sekv::host_backend& where = sekv::host_backend(1))
        : sekv::cuda_fp16_cache(model, o, codec, sekv::cuda_backend({.device_slab = std::size_t{4} << 20, .pinned_slab = std::size_t{4} << 20}, where.shared_exec())) {}
};
#else
class float_cache : public sekv::basic_cache<float, sekv::host_backend, sekv::progressive_codec> {
public:
    static constexpr bool on_device = false;
    using sekv::basic_cache<float, sekv::host_backend, sekv::progressive_codec>::basic_cache;
};
#endif

/// A sequence's quota in the tests is meant for fp32 rows and what the host backend keeps beside them; elsewhere the same pressure takes other bytes.
[[nodiscard]] inline std::uint64_t quota(float_cache& c, std::uint64_t bytes, std::int64_t capacity = 4000) {
    if (!float_cache::on_device) return bytes;
    const auto probe = c.open({sekv::memory::unlimited - 1, capacity});
    const auto u = c.used(probe);
    c.close(probe);
    return bytes * 6 / 10 + u.total(sekv::tier::device) - u.at(sekv::tier::device, sekv::kind::line_cache);
}
/// A cache's budget likewise: a device backend's cache holds the seal's workspace.
[[nodiscard]] inline std::uint64_t budget(std::uint64_t bytes) { return float_cache::on_device ? bytes + (std::uint64_t{24} << 20) : bytes; }
/// What attention over exact rows may differ from attention in double. On the device, full resolution multiplies on tensor cores, weights in fp16.
[[nodiscard]] inline double exact_error(sekv::resolution how) { return !float_cache::on_device ? 2e-6 : how == sekv::resolution::full ? 2e-3 : 5e-6; }
[[nodiscard]] inline double exact_lse_error(sekv::resolution how) { return float_cache::on_device && how == sekv::resolution::full ? 1e-2 : 1e-5; }

/// Repetitions of a test's body: fewer where the emulation makes each a thousand times as slow.
[[nodiscard]] inline std::uint64_t turns(std::uint64_t most, std::uint64_t least = 1) {
    const bool sanitized = std::getenv("SEKV_TEST_SHORT") != nullptr;
    return float_cache::on_device && sanitized ? std::max(least, most / 12) : most;
}

using uid = std::uint64_t;  ///< names a token's content
using uids = std::vector<uid>;

[[nodiscard]] inline std::uint64_t mixed(std::uint64_t x) noexcept {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/// Near-normal numbers of variance 1 that follow from `seed`.
inline void fill_normal(std::uint64_t seed, float* out, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) {
        const auto h = mixed(seed * 0x100000001b3u + i);
        const auto sum = static_cast<float>((h & 0xffffu) + (h >> 16 & 0xffffu) + (h >> 32 & 0xffffu) + (h >> 48));
        out[i] = std::round((sum - 131070.0F) / 37837.0F * 64.0F) / 64.0F;  // exact in fp16, so that backends that store it can be held to the same figures
    }
}

[[nodiscard]] inline sekv::layer_shape layer(std::int32_t kv_heads, std::int32_t group, std::int32_t window = 0, std::int32_t size = 64) {
    sekv::layer_shape l;
    l.kv_heads = kv_heads;
    l.group = group;
    l.key_size = l.value_size = size;
    l.sliding_window = window;
    return l;
}

[[nodiscard]] inline uids fresh(uid first, std::int64_t count) {
    uids out(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = first + i;
    return out;
}

[[nodiscard]] inline std::int64_t ssize(const uids& u) noexcept { return static_cast<std::int64_t>(u.size()); }

struct world {
    sekv::model_shape model;
    float query_gain = 1.0F;  ///< more makes attention sharper

    explicit world(std::vector<sekv::layer_shape> layers, std::int32_t sinks = 4) { model = {std::move(layers), "test", sinks}; }

    [[nodiscard]] const sekv::layer_shape& at(std::int32_t l) const { return model.layers[static_cast<std::size_t>(l)]; }
    [[nodiscard]] std::int32_t layers() const noexcept { return static_cast<std::int32_t>(model.layers.size()); }
    [[nodiscard]] std::vector<float> rows_of(int what, std::int32_t l, const uids& tokens, std::int32_t heads, std::int32_t size, float gain) const {
        const auto row = static_cast<std::size_t>(heads) * static_cast<std::size_t>(size);
        std::vector<float> out(tokens.size() * row);
        for (std::size_t i = 0; i < tokens.size(); ++i) fill_normal(mixed(tokens[i] * 64 + static_cast<std::uint64_t>(l)) * 4 + static_cast<std::uint64_t>(what), out.data() + i * row, row);
        for (auto& x : out) x *= gain;
        return out;
    }
    [[nodiscard]] std::vector<float> keys(std::int32_t l, const uids& t) const { return rows_of(0, l, t, at(l).kv_heads, at(l).key_size, 1); }
    [[nodiscard]] std::vector<float> values(std::int32_t l, const uids& t) const { return rows_of(1, l, t, at(l).kv_heads, at(l).value_size, 1); }
    [[nodiscard]] std::vector<float> queries(std::int32_t l, const uids& t) const { return rows_of(2, l, t, at(l).query_heads(), at(l).key_size, query_gain); }
    [[nodiscard]] std::vector<float> surprisal(const uids& t) const {
        std::vector<float> out;
        for (const auto u : t) out.push_back(static_cast<float>(mixed(u) % 1000) * 0.008F);
        return out;
    }
    [[nodiscard]] std::uint64_t page_bytes(std::size_t element = float_cache::on_device ? 2 : 4) const {
        std::uint64_t sum = 0;
        for (const auto& l : model.layers) sum += l.kv_source < 0 && !l.windowed() ? 64 * sekv::kv_row_bytes(l, element) : 0;
        return sum;
    }
};

/// Outputs of some query tokens, all layers: compared bit for bit.
struct result {
    std::vector<std::vector<float>> out, lse;
    bool operator==(const result& o) const { return same(out, o.out) && same(lse, o.lse); }
    static bool same(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0; });
    }
};

template <class Cache>
void append(Cache& c, const world& w, sekv::sequence s, std::int32_t l, const uids& tokens) {
    const auto k = w.keys(l, tokens);
    const auto v = w.values(l, tokens);
    c.append(s, l, sekv::rows(k.data(), ssize(tokens), w.at(l).kv_heads, w.at(l).key_size), sekv::rows(v.data(), ssize(tokens), w.at(l).kv_heads, w.at(l).value_size));
}

template <class Cache>
void append_all(Cache& c, const world& w, sekv::sequence s, const uids& tokens) {
    for (std::int32_t l = 0; l < w.layers(); ++l) {
        if (w.at(l).kv_source < 0) append(c, w, s, l, tokens);
    }
}

/// Attends one layer; the query tokens are `tokens`, at `position` on (-1: the last).
template <class Cache>
void attend_layer(Cache& c, const world& w, sekv::sequence s, std::int32_t l, const uids& tokens, sekv::resolution how, result& r, std::int64_t position = -1) {
    const auto& shape = w.at(l);
    const auto q = w.queries(l, tokens);
    const sekv::batch_item item{s, ssize(tokens), position};
    r.out.emplace_back(tokens.size() * static_cast<std::size_t>(shape.query_heads() * shape.value_size), NAN);
    r.lse.emplace_back(tokens.size() * static_cast<std::size_t>(shape.query_heads()), NAN);
    c.attend({&item, 1}, l, sekv::rows(q.data(), ssize(tokens), shape.query_heads(), shape.key_size), how, sekv::out_rows(r.out.back().data(), ssize(tokens), shape.query_heads(), shape.value_size), r.lse.back().data());
}

template <class Cache>
result attend_all(Cache& c, const world& w, sekv::sequence s, const uids& tokens, sekv::resolution how, std::int64_t position = -1) {
    result r;
    for (std::int32_t l = 0; l < w.layers(); ++l) attend_layer(c, w, s, l, tokens, how, r, position);
    return r;
}

/// One engine step: append and attend layer by layer, then observe.
template <class Cache>
result step(Cache& c, const world& w, sekv::sequence s, const uids& tokens, sekv::resolution how = sekv::resolution::adaptive) {
    c.reserve(s, ssize(tokens));
    result r;
    for (std::int32_t l = 0; l < w.layers(); ++l) {
        if (w.at(l).kv_source < 0) append(c, w, s, l, tokens);
        attend_layer(c, w, s, l, tokens, how, r);
    }
    if (c.spans(s).options().policy != sekv::span_policy::key_novelty) c.observe(s, w.surprisal(tokens));
    return r;
}

/// A prompt in chunks, then end_prefill.
template <class Cache>
void prefill(Cache& c, const world& w, sekv::sequence s, const uids& tokens, std::size_t chunk = 128) {
    for (std::size_t at = 0; at < tokens.size(); at += chunk)
        (void)step(c, w, s, uids(tokens.begin() + static_cast<std::ptrdiff_t>(at), tokens.begin() + static_cast<std::ptrdiff_t>(std::min(tokens.size(), at + chunk))), sekv::resolution::full);
    c.end_prefill(s);
}

/// One step per token.
template <class Cache>
std::vector<result> decode(Cache& c, const world& w, sekv::sequence s, const uids& tokens) {
    std::vector<result> out;
    for (const auto u : tokens) out.push_back(step(c, w, s, {u}));
    return out;
}

/// Full attention in double of one query token, whose queries are those of `query`, at `position` of a sequence: out [query_heads, value_size] and lse [query_heads].
inline void full_attention(const world& w, std::int32_t l, const uids& sequence, std::int64_t position, uid query, std::vector<double>& out, std::vector<double>& lse) {
    const auto& s = w.at(l);
    const auto owner = s.kv_source >= 0 ? s.kv_source : l;
    const auto begin = s.windowed() ? std::max<std::int64_t>(0, position + 1 - s.sliding_window) : 0;
    const uids seen(sequence.begin() + begin, sequence.begin() + position + 1);
    const auto k = w.keys(owner, seen), v = w.values(owner, seen), q = w.queries(l, {query});
    const auto dk = static_cast<std::size_t>(s.key_size), dv = static_cast<std::size_t>(s.value_size), heads = static_cast<std::size_t>(s.kv_heads), group = static_cast<std::size_t>(s.group);
    out.assign(heads * group * dv, 0.0);
    lse.assign(heads * group, 0.0);
    for (std::size_t h = 0; h < heads * group; ++h) {
        std::vector<double> logits(seen.size());
        for (std::size_t t = 0; t < seen.size(); ++t) {
            double dot = 0;
            for (std::size_t j = 0; j < dk; ++j) dot += static_cast<double>(q[h * dk + j]) * static_cast<double>(k[(t * heads + h / group) * dk + j]);
            logits[t] = dot * static_cast<double>(s.logit_scale());
            if (s.soft_cap > 0) logits[t] = static_cast<double>(s.soft_cap) * std::tanh(logits[t] / static_cast<double>(s.soft_cap));
        }
        const double top = *std::max_element(logits.begin(), logits.end());
        double sum = 0;
        for (const double x : logits) sum += std::exp(x - top);
        lse[h] = top + std::log(sum);
        for (std::size_t t = 0; t < seen.size(); ++t) {
            const double p = std::exp(logits[t] - lse[h]);
            for (std::size_t j = 0; j < dv; ++j) out[h * dv + j] += p * static_cast<double>(v[(t * heads + h / group) * dv + j]);
        }
    }
}

/// Relative rms distance of a step's outputs from full attention, the worst over layers and tokens; tokens: the query tokens, at `position` on.
inline double distance_from_full(const world& w, const result& r, const uids& sequence, const uids& tokens, std::int64_t position, double* lse_error = nullptr) {
    double worst = 0;
    for (std::int32_t l = 0; l < w.layers(); ++l) {
        const auto n = static_cast<std::size_t>(w.at(l).query_heads());
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            std::vector<double> out, lse;
            full_attention(w, l, sequence, position + static_cast<std::int64_t>(t), tokens[t], out, lse);
            double error = 0, norm = 0;
            for (std::size_t i = 0; i < out.size(); ++i) {
                const double e = static_cast<double>(r.out[static_cast<std::size_t>(l)][t * out.size() + i]) - out[i];
                error += e * e;
                norm += out[i] * out[i];
            }
            const double d = std::sqrt(error / norm);
            worst = std::isnan(d) ? INFINITY : std::max(worst, d);
            for (std::size_t h = 0; lse_error != nullptr && h < n; ++h) {
                const double e = std::abs(static_cast<double>(r.lse[static_cast<std::size_t>(l)][t * n + h]) - lse[h]);
                *lse_error = std::isnan(e) ? INFINITY : std::max(*lse_error, e);
            }
        }
    }
    return worst;
}

struct token_rows {
    std::vector<float> keys, values;
    bool operator==(const token_rows&) const = default;
};

template <class Cache>
token_rows materialize(const Cache& c, const world& w, sekv::sequence s, std::int32_t l, std::int64_t begin, std::int64_t count) {
    const auto& shape = w.at(l);
    token_rows r;
    r.keys.assign(static_cast<std::size_t>(count * shape.kv_heads * shape.key_size), NAN);
    r.values.assign(static_cast<std::size_t>(count * shape.kv_heads * shape.value_size), NAN);
    c.materialize(s, l, begin, count, sekv::out_rows(r.keys.data(), count, shape.kv_heads, shape.key_size), sekv::out_rows(r.values.data(), count, shape.kv_heads, shape.value_size));
    return r;
}

/// Relative distance of row i (of `size` floats) of two arrays.
inline double row_distance(const std::vector<float>& a, const std::vector<float>& b, std::size_t i, std::size_t size) {
    double error = 0, norm = 0;
    for (std::size_t j = i * size; j < (i + 1) * size; ++j) {
        error += static_cast<double>(a[j] - b[j]) * static_cast<double>(a[j] - b[j]);
        norm += static_cast<double>(b[j]) * static_cast<double>(b[j]);
    }
    return std::sqrt(error / norm);
}

/// Counts allocations, and fails the one numbered `fail_at`.
class faulty_resource final : public sekv::memory_resource {
public:
    void* allocate(sekv::tier, std::size_t bytes, std::size_t alignment) override {
        if (++calls == fail_at) {
            if (throws) throw std::bad_alloc();
            return nullptr;
        }
        void* p = ::operator new(bytes, std::align_val_t{alignment});
        live[p] = bytes;
        return p;
    }
    void deallocate(sekv::tier, void* p, std::size_t bytes, std::size_t alignment) noexcept override {
        const auto it = live.find(p);
        if (it == live.end() || it->second != bytes) ++mismatches;
        if (it != live.end()) live.erase(it);
        ::operator delete(p, std::align_val_t{alignment});
    }
    std::int64_t calls = 0, fail_at = -1, mismatches = 0;
    bool throws = false;
    std::map<void*, std::size_t> live;
};

/// Small numbers, so that short sequences reach every level.
[[nodiscard]] inline sekv::progressive_options small_codec() {
    sekv::progressive_options o;
    o.epoch_tokens = 256;
    o.line_slots = 32;
    o.horizon = 512;
    return o;
}

[[nodiscard]] inline sekv::cache_options small_options() {
    sekv::cache_options o;
    o.window = 32;
    o.rejectable = 32;
    return o;
}

[[nodiscard]] inline bool short_run() { return std::getenv("SEKV_TEST_SHORT") != nullptr; }

}  // namespace sekv_test

#ifdef SEKV_TEST_CUDA
extern template class sekv::basic_cache<sekv::fp16, sekv::cuda_backend, sekv::cuda_progressive_codec>;
#else
extern template class sekv::basic_cache<float, sekv::host_backend, sekv::progressive_codec>;
#endif
