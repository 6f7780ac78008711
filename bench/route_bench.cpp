// Routing alone: the scores of all sealed tokens over R1, and the zoom list, by the library's kernels; nothing is fetched. The stages' shares tell where the
// time goes.
#include <benchmark/benchmark.h>

#include <array>
#include <chrono>
#include <cmath>

#include "subject.hpp"

namespace sekv::bench {

void route(benchmark::State& state, const layer_case& layer, std::int64_t n);

namespace {

enum stage : std::size_t { tables, scores, softmax, choose, values, stages };
constexpr std::array<const char*, stages> stage_names{"tables_ms", "scores_ms", "softmax_ms", "choose_ms", "values_ms"};

class clock_by_stage {
public:
    void lap(stage s) {
        const auto now = std::chrono::steady_clock::now();
        spent_[s] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }
    void start() { last_ = std::chrono::steady_clock::now(); }
    [[nodiscard]] double spent(stage s) const { return spent_[s]; }

private:
    std::chrono::steady_clock::time_point last_;
    std::array<double, stages> spent_{};
};

/// One worker's scratch.
struct scratch {
    std::vector<float> t, query_mean, scores, factors, mass, largest, sums, totals;
    std::vector<std::int32_t> tokens;
    std::vector<const std::uint8_t*> blocks;
    std::vector<std::byte> memory;
    clock_by_stage clock;
};

using unit_list = std::vector<progressive_codec::unit>;

class router {
public:
    router(subject& s, const progressive_options& o) : subject_(s), options_(o), layout_(s.cache().model(), o), units_(s.cache().units(s.id())) {
        work_.resize(static_cast<std::size_t>(environment::get().threads->workers()));
        const auto group = s.shape().group;
        const auto stride = units_.size() * host::block_tokens;
        for (auto& x : work_) {
            x.t.resize(static_cast<std::size_t>(group * s.shape().key_size));
            for (auto* v : {&x.query_mean, &x.factors, &x.totals}) v->resize(static_cast<std::size_t>(group));
            x.scores.resize(static_cast<std::size_t>(group) * stride);
            x.mass.resize(stride), x.tokens.resize(stride), x.blocks.resize(units_.size());
            x.largest.resize(static_cast<std::size_t>(o.cap));
            x.sums.resize(static_cast<std::size_t>(group * 1024));
            x.memory.resize(std::size_t{1} << 20);
        }
    }
    /// Sum of the lists' lengths. queries: scaled.
    std::int64_t run(const float* queries) {
        std::vector<std::int64_t> found(static_cast<std::size_t>(subject_.shape().kv_heads));
        environment::get().threads->run(subject_.shape().kv_heads, [&](std::int64_t h, std::int32_t worker) {
            const auto& l = subject_.shape();
            found[static_cast<std::size_t>(h)] =
                head(static_cast<std::int32_t>(h), queries + h * l.group * l.key_size, work_[static_cast<std::size_t>(worker)]);
        });
        std::int64_t sum = 0;
        for (const auto f : found) sum += f;
        return sum;
    }
    [[nodiscard]] double spent(stage s) const {
        double sum = 0;
        for (const auto& x : work_) sum += x.clock.spent(s);
        return sum / static_cast<double>(work_.size());
    }
    /// Times the value sums over R1 too, which attend adds.
    bool with_values = false;

private:
    std::int64_t head(std::int32_t index, const float* q, scratch& x) const;
    void score(std::int32_t index, const float* q, scratch& x, std::size_t first, std::size_t last) const;

    subject& subject_;
    progressive_options options_;
    basis_layout layout_;
    const unit_list& units_;
    std::vector<scratch> work_;
};

void router::score(std::int32_t index, const float* q, scratch& x, std::size_t first, std::size_t last) const {
    const auto group = subject_.shape().group;
    const auto size = subject_.shape().key_size;
    const auto keys = units_[first].payload.keys->view(index);
    host::vector_matrix(q, size, group, keys.a, size, size, x.t.data(), size);
    arena a(x.memory.data(), x.memory.size());
    routing_tables t;
    t.layout(a, layout_.format(index).key_planes(), group);
    fill_tables(t, keys, x.t.data(), x.query_mean.data(), size);
    for (auto u = first; u < last; ++u) x.blocks[u] = units_[u].payload.sketch->as<std::uint8_t>(layout_.sketch_offset(index));
    x.clock.lap(tables);
    host::sketch_scores(x.blocks.data() + first, static_cast<std::int64_t>(last - first), t.view, x.scores.data() + first * host::block_tokens,
                        static_cast<std::int64_t>(units_.size()) * host::block_tokens);
    x.clock.lap(scores);
}

std::int64_t router::head(std::int32_t index, const float* q, scratch& x) const {
    const auto group = subject_.shape().group;
    const auto stride = static_cast<std::int64_t>(units_.size()) * host::block_tokens;
    x.clock.start();
    for (std::size_t first = 0; first < units_.size();) {
        auto last = first + 1;
        while (last < units_.size() && units_[last].payload.keys == units_[first].payload.keys) ++last;
        score(index, q, x, first, last);
        first = last;
    }
    for (std::int32_t g = 0; g < group; ++g) {
        float* row = x.scores.data() + g * stride;
        x.factors[static_cast<std::size_t>(g)] = 1.0F / host::exp_sum(row, stride, host::max_of(row, stride));
    }
    x.clock.lap(softmax);
    zoom_list list{x.tokens.data(), x.mass.data(), 0, false};
    choose_zoom(list, x.scores.data(), stride, group, x.factors.data(), stride, options_, x.largest.data());
    x.clock.lap(choose);
    if (with_values) {
        const auto planes = layout_.format(index).key_planes() * host::plane_bytes;
        for (auto& b : x.blocks) b += planes;
        for (std::size_t first = 0; first < units_.size();) {
            auto last = first + 1;
            while (last < units_.size() && units_[last].payload.statistics == units_[first].payload.statistics) ++last;
            const auto v = units_[first].payload.statistics->values(index);
            host::sketch_values(x.blocks.data() + first, static_cast<std::int64_t>(last - first), v.sketch.fields.data(),
                                static_cast<std::int32_t>(v.sketch.fields.size()), x.scores.data() + first * host::block_tokens, stride, group, x.sums.data(),
                                x.totals.data());
            first = last;
        }
        x.clock.lap(values);
    }
    return list.count;
}

}  // namespace

void route(benchmark::State& state, const layer_case& layer, std::int64_t n) {
    auto& env = environment::get();
    auto& s = subject::get(layer, n, filling::sealed);
    router r(s, progressive_options{});
    std::vector<float> scaled(static_cast<std::size_t>(s.shape().query_heads() * s.shape().key_size));
    std::vector<double> seconds, bandwidth;
    double bytes = 0;
    for (std::int32_t h = 0; h < s.shape().kv_heads; ++h)
        bytes += static_cast<double>(s.cache().units(s.id()).size()) * static_cast<double>(make_head_format(s.shape(), {}).key_planes() * host::plane_bytes);
    for (auto _ : state) {
        bandwidth.push_back(env.cold.run(*env.threads));
        const auto* q = s.next_query();
        for (std::size_t i = 0; i < scaled.size(); ++i) scaled[i] = q[i] * s.shape().logit_scale();
        const auto start = std::chrono::steady_clock::now();
        benchmark::DoNotOptimize(r.run(scaled.data()));
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        state.SetIterationTime(seconds.back());
    }
    const auto bound = static_cast<double>(s.full_bytes()) / median(bandwidth);
    state.counters["route_ms"] = 1e3 * median(seconds);
    state.counters["bound_ms"] = 1e3 * bound;
    state.counters["read_GBps"] = 1e-9 * median(bandwidth);
    state.counters["vs_bandwidth_bound"] = bound / median(seconds);
    state.counters["sketch_key_bytes"] = bytes;
    router staged(s, progressive_options{});
    staged.with_values = true;
    for (std::int64_t i = 0; i < env.rounds(); ++i) {
        (void)env.cold.run(*env.threads);
        const auto* q = s.next_query();
        for (std::size_t j = 0; j < scaled.size(); ++j) scaled[j] = q[j] * s.shape().logit_scale();
        (void)staged.run(scaled.data());
    }
    for (std::size_t i = 0; i < stages; ++i) state.counters[stage_names[i]] = 1e3 * staged.spent(static_cast<stage>(i)) / static_cast<double>(env.rounds());
}

}  // namespace sekv::bench
