// A small model's cache under the paper preset, the rows that went into it, and the oracle's view of both.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "oracle/paper.hpp"
#include "sekv/sekv.hpp"

namespace sekv::paper_test {

using float_cache = basic_cache<float, host_backend, paper_codec>;

inline constexpr float everything = 1e-7F;    // a threshold that every span passes
inline constexpr float nothing = 0.9999999F;  // and one that none does
inline constexpr std::int64_t all_tokens = 700;
inline constexpr double zoomed_tolerance = 5e-3;  // factors in fp16, rows of about unit deviation
inline constexpr double coarse_tolerance = 2e-5;

struct setup {
    std::int32_t group = 3, size = 64;
    float soft_cap = 0, scale = 0;
    std::int32_t sinks = 4;
    std::int32_t sliding_window = 96;  ///< of layer 1
    std::int32_t window_rows = 320;    ///< of that layer, that the quota has room for beside its share of the others
};

inline model_shape model_of(const setup& s) {
    layer_shape whole{2, s.group, s.size, s.size};
    whole.soft_cap = s.soft_cap;
    whole.scale = s.scale;
    auto windowed = whole;
    windowed.sliding_window = s.sliding_window;
    model_shape m{{whole, windowed, whole}, "paper-test", s.sinks};
    m.layers[2].value_size = s.size == 64 ? 128 : 64;  // K and V of different sizes
    return m;
}

inline paper_options codec_of(float tau, std::shared_ptr<const paper_weights> router = nullptr) { return {tau, 64, std::move(router)}; }

// A cache with one sequence, the rows that went in, and what the oracle says of them.
class world {
public:
    world(const setup& s, const paper_options& o, std::uint32_t seed = 1, double share = 0.6, std::int32_t threads = 1, cache_options c = small())
        : model(model_of(s)),
          weights(o.router ? *o.router : paper_weights::untrained(model)),
          tau(o.tau > 0 ? o.tau : paper_weights::initial_tau),
          cache(model, c, o, host_backend(threads)),
          random_(seed) {
        const auto quota =
            static_cast<std::uint64_t>(share * static_cast<double>(2 * model.full_bytes_per_token() * all_tokens)) + 2 * model.windowed_bytes_per_token() * static_cast<std::uint64_t>(s.window_rows);
        seq = cache.open({quota, 4096});
        for (const auto& l : model.layers) {
            keys.push_back(noise(all_tokens * l.kv_heads * l.key_size));
            values.push_back(noise(all_tokens * l.kv_heads * l.value_size));
        }
        std::exponential_distribution<float> surprise(0.5F);
        for (std::int64_t t = 0; t < all_tokens; ++t) signals.push_back(t == 0 ? 0.0F : surprise(random_));
    }
    static cache_options small() {
        auto c = paper_cache_options();
        c.window = 64;
        c.rejectable = 16;
        return c;
    }
    std::vector<float> noise(std::int64_t n) {
        std::normal_distribution<float> normal;
        std::vector<float> v(static_cast<std::size_t>(n));
        for (auto& x : v) x = normal(random_);
        return v;
    }
    void append(std::int64_t from, std::int64_t to, bool observed = true) {
        for (std::size_t i = 0; i < model.layers.size(); ++i) {
            const auto& l = model.layers[i];
            cache.append(seq, static_cast<std::int32_t>(i), rows(keys[i].data() + from * l.kv_heads * l.key_size, to - from, l.kv_heads, l.key_size),
                         rows(values[i].data() + from * l.kv_heads * l.value_size, to - from, l.kv_heads, l.value_size));
        }
        if (observed) cache.observe(seq, {signals.data() + from, static_cast<std::size_t>(to - from)});
    }
    void fill(std::int64_t tokens, bool observed = true) {
        append(0, tokens, observed);
        const auto before = cache.sealed(seq);
        cache.end_prefill(seq);
        borders = {before, cache.sealed(seq)};
    }
    // Appends one by one and remembers where seals began.
    void decode(std::int64_t from, std::int64_t to) {
        for (auto t = from; t < to; ++t) {
            append(t, t + 1);
            if (cache.sealed(seq) != borders.back()) borders.push_back(cache.sealed(seq));
        }
    }
    [[nodiscard]] oracle::paper_spans spans() const { return oracle::split_spans(cache.spans(seq), borders, model.sinks); }

    struct answer {
        std::vector<float> out, lse, queries;
    };
    answer attend(std::int32_t layer, std::int64_t position = -1, resolution how = resolution::adaptive, std::int64_t tokens = 1) {
        const auto& l = model.layers[static_cast<std::size_t>(layer)];
        answer a{std::vector<float>(static_cast<std::size_t>(tokens * l.query_heads() * l.value_size)),
                 std::vector<float>(static_cast<std::size_t>(tokens * l.query_heads())), noise(tokens * l.query_heads() * l.key_size)};
        const batch_item item{seq, tokens, position};
        cache.attend({&item, 1}, layer, rows(a.queries.data(), tokens, l.query_heads(), l.key_size), how,
                     out_rows(a.out.data(), tokens, l.query_heads(), l.value_size), a.lse.data());
        return a;
    }
    oracle::paper_answer expect(std::int32_t layer, std::int32_t head, const oracle::paper_spans& s, const float* queries, std::int64_t length) const {
        const auto i = static_cast<std::size_t>(layer);
        const auto segments = cache.spans(seq);
        return oracle::attend_paper({&model.layers[i], &keys[i], &values[i], &segments, &weights.layers[i].weight, static_cast<double>(tau)}, s, head, queries,
                                    length);
    }
    // One decode query of a whole-context layer against the oracle; false where a decision is too close to call.
    bool agrees(std::int32_t layer, const oracle::paper_spans& s, std::int64_t length, double tolerance, std::int64_t position = -1) {
        const auto& l = model.layers[static_cast<std::size_t>(layer)];
        const auto a = attend(layer, position);
        bool sure = true;
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
            const auto e = expect(layer, h, s, a.queries.data() + h * l.group * l.key_size, length);
            zoomed += e.zoomed;
            coarse += e.coarse;
            if (e.margin < 3e-3) {
                sure = false;
                continue;
            }
            for (std::int32_t g = 0; g < l.group; ++g) {
                const auto q = static_cast<std::size_t>(h * l.group + g);
                EXPECT_NEAR(a.lse[q], e.lse[static_cast<std::size_t>(g)], tolerance);
                for (std::size_t j = 0; j < static_cast<std::size_t>(l.value_size); ++j)
                    EXPECT_NEAR(a.out[q * static_cast<std::size_t>(l.value_size) + j],
                                e.out[static_cast<std::size_t>(g) * static_cast<std::size_t>(l.value_size) + j], tolerance)
                        << "layer " << layer << ", head " << q;
            }
        }
        return sure;
    }

    model_shape model;
    paper_weights weights;
    float tau;
    float_cache cache;
    sequence seq;
    std::vector<std::vector<float>> keys, values;
    std::vector<float> signals;
    std::vector<std::int64_t> borders;
    std::int64_t zoomed = 0, coarse = 0;

private:
    std::mt19937 random_;
};

}  // namespace sekv::paper_test
