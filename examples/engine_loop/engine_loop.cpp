// The decode loop of a minimal engine on sekv. The "model" is random projections; what matters is the order of the calls, which is the same on every backend: copy it.
//
//   engine_loop        on the host
//   engine_loop_cuda   on a GPU: K, V, queries and outputs stay in device memory, and the step is captured in a CUDA graph
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "tensors.hpp"  // engine_cache, make_backend, tensor, step_graph: what differs between the two

constexpr int layers = 4, kv_heads = 2, group = 4, head_size = 64;

// Stands for the engine's own layers: fills K, V and queries of `tokens` tokens.
struct toy_model {
    std::mt19937 random{7};

    void project(int tokens, tensor& k, tensor& v, tensor& q) {
        std::normal_distribution<float> normal;
        for (auto* t : {&k, &v, &q}) {
            std::vector<float> x(static_cast<std::size_t>(tokens) * t->row());
            for (auto& y : x) y = normal(random);
            t->upload(x);
        }
    }
};

int main() try {
    // 1. Describe the model, set a hard device budget, choose the backend.
    sekv::model_shape model;
    model.layers.assign(layers, {.kv_heads = kv_heads, .group = group, .key_size = head_size, .value_size = head_size});
    model.fingerprint = "toy";
    sekv::cache_options options;
    options.device_budget = std::size_t{64} << 20;
    options.max_sequences = 2;
    engine_cache cache(model, options, {}, make_backend());

    // 2. Prompts. Chunks are attended at full resolution; nothing is sealed before end_prefill.
    toy_model engine;
    constexpr int chunk = 256, steps = 24;
    tensor k(chunk, kv_heads, head_size), v(chunk, kv_heads, head_size), q(chunk, kv_heads * group, head_size), out(chunk, kv_heads * group, head_size);
    std::array<sekv::sequence, 2> sequences;
    const std::array<int, 2> chunks{4, 1};
    for (std::size_t s = 0; s < sequences.size(); ++s) {
        sequences[s] = cache.open({.device_quota = 1'900'000, .capacity = 4096});  // 0: its share of the budget
        for (int c = 0; c < chunks[s]; ++c) {
            const std::array item{sekv::batch_item{sequences[s], chunk}};
            sekv::plan plan = cache.make_plan(item, sekv::resolution::full);
            cache.begin_step(plan);
            for (int layer = 0; layer < layers; ++layer) {
                engine.project(chunk, k, v, q);
                cache.append(plan, layer, k.rows(), v.rows());
                cache.attend(plan, layer, q.rows(), out.out());
            }
            cache.observe(sequences[s], std::vector<float>(chunk, 2.0F));  // the engine's -ln p per token, if it has them
        }
        cache.end_prefill(sequences[s]);  // past the quota, the oldest blocks are sealed
    }

    // 3. Decoding: one plan for the whole batch. begin_step makes room and sends the step's positions; after it nothing waits for the device, so a step can be captured once and replayed.
    const std::array batch{sekv::batch_item{sequences[0], 1}, sekv::batch_item{sequences[1], 1}};
    std::vector<tensor> ks, vs, qs, outs;  // a captured step's addresses are fixed
    for (int layer = 0; layer < layers; ++layer) {
        ks.emplace_back(2, kv_heads, head_size), vs.emplace_back(2, kv_heads, head_size);
        qs.emplace_back(2, kv_heads * group, head_size), outs.emplace_back(2, kv_heads * group, head_size);
    }
    sekv::plan plan = cache.make_plan(batch, sekv::resolution::adaptive);
    step_graph graph(cache);
    for (int step = 0; step < steps; ++step) {
        for (std::size_t layer = 0; layer < layers; ++layer) engine.project(2, ks[layer], vs[layer], qs[layer]);  // a real engine computes layer by layer, inside the graph
        try {
            cache.begin_step(plan);
        } catch (const sekv::budget_error& e) {  // nothing changed: close a sequence, or stop here
            std::fprintf(stderr, "Out of memory at step %d: %s\n", step, e.what());
            break;
        }
        graph.run(plan, [&] {
            for (int layer = 0; layer < layers; ++layer) {
                const auto l = static_cast<std::size_t>(layer);
                cache.append(plan, layer, ks[l].rows(), vs[l].rows());
                cache.attend(plan, layer, qs[l].rows(), outs[l].out());
                // Optional, for large batches (docs/performance.md): lines cross while this layer's MLP runs. A real engine gives the next layer's projection of its residual stream as it is now.
                if (layer + 1 < layers) cache.prefetch(plan, layer + 1, qs[l + 1].rows());
            }
        });
    }

    // 4. What it cost. A plan outlives about a thousand steps; when begin_step throws state_error, make a new one and capture anew.
    const auto last = outs.back().download();
    double norm = 0;
    for (const float x : last) norm += static_cast<double>(x) * static_cast<double>(x);
    const auto used = cache.used();
    const auto& zooms = cache.zooms();
    std::printf("lengths %lld and %lld, sealed %lld tokens; device %.1f KiB, host %.1f KiB\n", static_cast<long long>(cache.length(sequences[0])), static_cast<long long>(cache.length(sequences[1])),
                static_cast<long long>(cache.sealed(sequences[0])), static_cast<double>(used.total(sekv::tier::device)) / 1024, static_cast<double>(used.total(sekv::tier::host)) / 1024);
    std::printf("zoomed %llu tokens in %llu lists, %.0f%% of them in the line cache; |out| = %.4f\n", static_cast<unsigned long long>(zooms.tokens), static_cast<unsigned long long>(zooms.zooms), 100 * zooms.hit_rate(), std::sqrt(norm));
    for (const auto s : sequences) cache.close(s);
    return std::isfinite(norm) && norm > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const sekv::error& e) {
    std::fprintf(stderr, "engine_loop: %s\n", e.what());
    return EXIT_FAILURE;
}
