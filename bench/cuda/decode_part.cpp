// sekv's own decode step over the public interface: sequences filled on the device, one step (append and attend) captured in a graph, the graph timed as a whole and kernel by kernel; zooms at chosen hit rates.
#include <cmath>
#include <cstdint>
#include <map>
#include <random>

#include "bench/cuda/device.hpp"
#include "bench/cuda/full_kv.hpp"
#include "sekv/cuda.hpp"
#include "src/cuda/context.hpp"

namespace sekv::bench {
namespace {

struct case_shape {
    std::int64_t tokens = 0;
    std::int32_t batch = 1, kv_heads = 8, group = 4;
    double zoomed = 200;  ///< tokens per KV head and query that the queries' size is chosen for
};
constexpr std::int32_t d = full_kv_size;

model_shape model_of(const case_shape& c) {
    model_shape m;
    m.layers = {layer_shape{.kv_heads = c.kv_heads, .group = c.group, .key_size = d, .value_size = d}};
    m.fingerprint = "device check";
    return m;
}

rows_view bf16_rows(const void* data, std::int64_t tokens, std::int32_t heads) { return {data, dtype::bf16, tokens, heads, d, std::int64_t{heads} * d, d}; }

/// A batch of filled sequences and one captured decode step.
class decode_case {
public:
    decode_case(const case_shape& c, const stopwatch& watch, bool small) : shape_(c), watch_(watch), small_(small) {
        cuda_options where;
        where.stream = watch.stream();
        if (small) where.device_slab = where.pinned_slab = std::size_t{1} << 20;
        cache_options options;
        options.max_sequences = c.batch;
        progressive_options codec;
        if (small) codec.tau = 2e-3F;  // a share of few tokens is large
        cache_ = std::make_unique<cuda_cache>(model_of(c), options, codec, cuda_backend(where));
        const std::int64_t chunk = std::min<std::int64_t>(c.tokens, 4096);
        const auto row = static_cast<std::size_t>(c.kv_heads) * d;
        keys_ = device_memory(static_cast<std::size_t>(chunk) * row * 2);
        values_ = device_memory(static_cast<std::size_t>(chunk) * row * 2);
        prompt_queries_ = device_memory(static_cast<std::size_t>(chunk) * row * static_cast<std::size_t>(c.group) * 2);
        const auto heads = static_cast<std::size_t>(c.batch * c.kv_heads * c.group);
        queries_ = device_memory(heads * d * 4), out_ = device_memory(heads * d * 4);
        direction_.resize(heads * d);
        for (auto& x : direction_) x = normal_(random_);
        for (std::int32_t i = 0; i < c.batch; ++i) sequences_.push_back(fill(chunk, static_cast<std::uint32_t>(i)));
        capture();
    }
    ~decode_case() {
        if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
        if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
    }
    decode_case(const decode_case&) = delete;
    decode_case& operator=(const decode_case&) = delete;

    /// Queries for the next step: `memory` of the last ones, the rest new. 1 keeps them.
    void turn_queries(double memory) {
        const auto fresh = static_cast<float>(std::sqrt(1 - memory * memory));
        for (auto& x : direction_) x = static_cast<float>(memory) * x + fresh * normal_(random_);
        send_queries();
    }
    /// One decode step: the graph, and the begin of the next one, which also brings the counters to the host. Returns the graph's microseconds with a cold L2.
    double step() {
        const double us = watch_.once([&] { cuda::check(cudaGraphLaunch(exec_, watch_.stream()), "cudaGraphLaunch"); });
        cache_->replayed(plan_);
        cache_->begin_step(plan_);
        finish();
        return us;
    }
    /// Median microseconds of `count` steps whose queries keep `memory` of the last ones'.
    double steps(int count, double memory) {
        std::vector<double> us;
        for (int i = 0; i < count; ++i) {
            if (memory < 1) turn_queries(memory);
            us.push_back(step());
        }
        return median(std::move(us));
    }
    /// Brings ahead what the next step's queries will zoom; returns its microseconds, with nothing beside it.
    double prefetch() {
        return watch_.once([&] {
            cache_->prefetch(plan_, 0, rows(queries_.as<float>(), shape_.batch, shape_.kv_heads * shape_.group, d));
            (void)cache_->where().context().joined();
        });
    }
    void finish() const { cuda::check(cudaStreamSynchronize(watch_.stream()), "cudaStreamSynchronize"); }

    /// Chooses the queries' size so that about shape.zoomed tokens per list are zoomed; returns how many are.
    double choose_size(int tries) {
        double low = 0.1, high = 8, zoomed = 0;
        for (int i = 0; i < tries; ++i) {
            size_ = std::sqrt(low * high);
            send_queries();
            zoomed = zoomed_now();
            (zoomed < shape_.zoomed ? low : high) = size_;
        }
        return zoomed;
    }
    /// Tokens per list of one step with these queries.
    double zoomed_now() {
        const auto before = cache_->zooms();
        (void)step();
        const auto& after = cache_->zooms();
        const auto lists = after.zooms - before.zooms;
        return lists == 0 ? 0.0 : static_cast<double>(after.tokens - before.tokens) / static_cast<double>(lists);
    }

    /// Kernels of the step with the median of their times; each is launched with the others of the graph turned off.
    [[nodiscard]] json kernel_times(int rounds) const;

    [[nodiscard]] cuda_cache& cache() { return *cache_; }
    [[nodiscard]] std::int64_t sealed() const { return cache_->sealed(sequences_[0]); }
    [[nodiscard]] double share() const { return share_; }

private:
    /// A sequence whose quota leaves everything but the window sealed: the smallest that the cache accepts, and room for the sketches of some hundred steps.
    sequence fill(std::int64_t chunk, std::uint32_t seed) {
        for (;;) {
            const auto quota = static_cast<std::uint64_t>(share_ * static_cast<double>(model_of(shape_).full_cache_bytes(shape_.tokens))) + spare_;
            sequence s{};
            try {
                s = cache_->open({.device_quota = quota, .capacity = shape_.tokens + (small_ ? 256 : 4096)});
                append_prompt(s, chunk, seed);
                cache_->end_prefill(s);
                cache_->reserve(s, 1);
                if (spare_ > 0) return s;
                spare_ = std::uint64_t{small_ ? 32U : 512U} << 10;
            } catch (const budget_error&) {
                if (share_ > 1.5) throw;
                share_ *= 1.2;
            }
            if (s != sequence{}) cache_->close(s);
        }
    }
    void append_prompt(sequence s, std::int64_t chunk, std::uint32_t seed) {
        for (std::int64_t begin = 0; begin < shape_.tokens; begin += chunk) {
            const auto count = std::min(chunk, shape_.tokens - begin);
            const auto part = seed * 4096 + static_cast<std::uint32_t>(begin / chunk);
            fill_uniform(keys_.as<void>(), element::bf16, count * shape_.kv_heads * d, 3 * part, watch_.stream());
            fill_uniform(values_.as<void>(), element::bf16, count * shape_.kv_heads * d, 3 * part + 1, watch_.stream());
            fill_uniform(prompt_queries_.as<void>(), element::bf16, count * shape_.kv_heads * shape_.group * d, 3 * part + 2, watch_.stream());
            const auto queries = bf16_rows(prompt_queries_.as<void>(), count, shape_.kv_heads * shape_.group);
            cache_->append(s, 0, bf16_rows(keys_.as<void>(), count, shape_.kv_heads), bf16_rows(values_.as<void>(), count, shape_.kv_heads), -1, &queries);
        }
    }
    void send_queries() {
        std::vector<float> q(direction_.size());
        for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(size_) * direction_[i];
        finish();
        cuda::check(cudaMemcpy(queries_.as<void>(), q.data(), q.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    void capture() {
        std::vector<batch_item> items;
        for (const auto s : sequences_) items.push_back({s, 1});
        plan_ = cache_->make_plan(items, resolution::adaptive);
        send_queries();
        cache_->begin_step(plan_);
        const auto heads = shape_.kv_heads * shape_.group;
        cuda::check(cudaStreamBeginCapture(watch_.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        try {
            cache_->append(plan_, 0, bf16_rows(keys_.as<void>(), shape_.batch, shape_.kv_heads), bf16_rows(values_.as<void>(), shape_.batch, shape_.kv_heads));
            cache_->attend(plan_, 0, rows(queries_.as<float>(), shape_.batch, heads, d), out_rows(out_.as<float>(), shape_.batch, heads, d));
        } catch (...) {
            (void)cudaStreamEndCapture(watch_.stream(), &graph_);
            throw;
        }
        cuda::check(cudaStreamEndCapture(watch_.stream(), &graph_), "cudaStreamEndCapture");
        cuda::check(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
        // The captured calls counted as this step's.
        cuda::check(cudaGraphLaunch(exec_, watch_.stream()), "cudaGraphLaunch");
        cache_->begin_step(plan_);
        finish();
    }

    case_shape shape_;
    const stopwatch& watch_;
    bool small_;
    std::unique_ptr<cuda_cache> cache_;
    device_memory keys_, values_, prompt_queries_, queries_, out_;
    std::vector<sequence> sequences_;
    plan plan_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t exec_ = nullptr;
    std::mt19937 random_{1};
    std::normal_distribution<float> normal_;
    std::vector<float> direction_;
    double size_ = 1, share_ = 0.04;
    std::uint64_t spare_ = 0;
};

#if defined(SEKV_SIMT)
json decode_case::kernel_times(int) const { return json::array(); }
#else
json decode_case::kernel_times(int rounds) const {
    std::size_t count = 0;
    cuda::check(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    std::vector<cudaGraphNode_t> nodes(count);
    cuda::check(cudaGraphGetNodes(graph_, nodes.data(), &count), "cudaGraphGetNodes");
    std::vector<cudaGraphExec_t> alone(count, nullptr);
    std::vector<std::string> names(count, "memory");
    std::vector<std::vector<double>> times(count);
    for (std::size_t i = 0; i < count; ++i) {
        cuda::check(cudaGraphInstantiate(&alone[i], graph_, 0), "cudaGraphInstantiate");
        for (std::size_t j = 0; j < count; ++j) {
            if (i != j) cuda::check(cudaGraphNodeSetEnabled(alone[i], nodes[j], 0), "cudaGraphNodeSetEnabled");
        }
        cudaKernelNodeParams parameters{};
        const char* name = nullptr;
        if (cudaGraphKernelNodeGetParams(nodes[i], &parameters) == cudaSuccess && cudaFuncGetName(&name, parameters.func) == cudaSuccess) names[i] = name;
        (void)cudaGetLastError();
    }
    // In the step's order, since each works on what the one before it left.
    for (int r = 0; r <= rounds; ++r) {
        for (std::size_t i = 0; i < count; ++i) {
            const double us = watch_.once([&] { cuda::check(cudaGraphLaunch(alone[i], watch_.stream()), "cudaGraphLaunch"); });
            if (r > 0) times[i].push_back(us);
        }
    }
    json all = json::array();
    for (std::size_t i = 0; i < count; ++i) {
        all.push_back({{"kernel", names[i]}, {"us", median(times[i])}});
        (void)cudaGraphExecDestroy(alone[i]);
    }
    return all;
}
#endif

/// Of the tokens zoomed between two readings of the counters.
double hit_rate(const zoom_metrics& before, const zoom_metrics& after) { return static_cast<double>(after.hits - before.hits) / std::max(1.0, static_cast<double>(after.tokens - before.tokens)); }

case_shape shape_of(const part_options& o, std::int64_t tokens, std::int32_t batch) {
    case_shape c{.tokens = tokens, .batch = batch};
    if (o.small) c.kv_heads = 1, c.group = 2, c.zoomed = 20;
    return c;
}

}  // namespace

void measure_decode(const part_options& o) {
    const stopwatch watch(o.small);
    for (const auto tokens : o.tokens) {
        for (const auto batch : o.batches) {
            attempt({{"part", "decode"}, {"tokens", tokens}, {"batch", batch}}, [&](json& row) {
                decode_case c(shape_of(o, tokens, batch), watch, o.small);
                row["zoomed"] = c.choose_size(o.small ? 2 : 10);
                row["sealed"] = c.sealed(), row["quota_share"] = c.share();
                row["device_bytes"] = c.cache().used().total(tier::device), row["host_bytes"] = c.cache().used().total(tier::host);
                row["us"] = c.steps(o.rounds, 1.0);
                row["kernels"] = c.kernel_times(std::min(o.rounds, 7));
                // The queries of a next step: mostly the same lines.
                const auto before = c.cache().zooms();
                row["moving_us"] = c.steps(o.rounds, 0.99);
                const auto& after = c.cache().zooms();
                row["moving_hits"] = hit_rate(before, after);
            });
        }
    }
}

void measure_zoom(const part_options& o) {
    const stopwatch watch(o.small);
    const auto tokens = o.small ? o.tokens[0] : std::int64_t{32768};
    const auto batch = o.small ? 1 : 8;
    for (const double memory : {1.0, 0.999, 0.99, 0.9, 0.5, 0.0}) {
        if (o.small && memory != 1.0 && memory != 0.0) continue;
        attempt({{"part", "zoom"}, {"tokens", tokens}, {"batch", batch}, {"query_memory", memory}}, [&](json& row) {
            decode_case c(shape_of(o, tokens, batch), watch, o.small);
            row["zoomed"] = c.choose_size(o.small ? 2 : 10);
            // The histogram holds the search for the size too: a few steps beside these.
            const auto before = c.cache().zooms();
            (void)c.steps(o.small ? 3 : 300, memory);
            const auto& z = c.cache().zooms();
            row["hits"] = hit_rate(before, z);
            row["tokens_per_list"] = static_cast<double>(z.tokens - before.tokens) / std::max(1.0, static_cast<double>(z.zooms - before.zooms));
            row["bytes"] = z.bytes - before.bytes;
            row["p50_us"] = static_cast<double>(z.latency.percentile(0.5)) / 1e3, row["p99_us"] = static_cast<double>(z.latency.percentile(0.99)) / 1e3, row["max_us"] = static_cast<double>(z.latency.max()) / 1e3;
            // The same with hints that are the queries themselves: what a prefetch costs, and what the step after it finds.
            const auto steps_before = c.cache().zooms();
            std::vector<double> ahead;
            for (int i = 0; i < (o.small ? 2 : 50); ++i) {
                if (memory < 1) c.turn_queries(memory);
                ahead.push_back(c.prefetch());
                (void)c.step();
            }
            row["prefetch_us"] = median(std::move(ahead));
            const auto& hinted = c.cache().zooms();
            row["prefetched"] = hinted.prefetched - steps_before.prefetched;
            row["prefetched_hits"] = hit_rate(steps_before, hinted);
        });
    }
}

}  // namespace sekv::bench
