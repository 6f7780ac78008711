// Lines that are fetched ahead of a layer's attend: beside the stream, and without a trace in the outputs.
#include <gmock/gmock.h>

#include <array>

#include "cuda/backend_world.hpp"
#include "cuda/runtime_modes.hpp"
#include "oracle/random.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;
using ::testing::HasSubstr;

sekv::progressive_options roomy_codec() {
    auto o = zooming_codec();
    o.line_slots = 512;
    return o;
}

sekv::sequence sealed_sequence(float_cache& c, const world& w, uid first = 1, std::int64_t tokens = 650, std::uint64_t bytes = 700'000) {
    const auto empty = c.open({sekv::memory::unlimited - 1, 4000});
    const auto lines = c.used(empty).at(sekv::tier::device, sekv::kind::line_cache);
    c.close(empty);
    const auto s = c.open({quota(c, bytes) + lines, 4000});
    prefill(c, w, s, fresh(first, tokens));
    EXPECT_GT(c.sealed(s), 100);
    return s;
}

// One step as an engine runs it: each layer's lines are asked for, by `hints`, before its K and V are there.
void step_with_hints(float_cache& c, sekv::plan& p, const world& w, device_step& memory, const device_step& hints) {
    for (std::int32_t l = 0; l < w.layers(); ++l) {
        hints.prefetch(c, p, l);
        memory.append(c, p, l);
        memory.attend(c, p, l);
    }
}

class CudaBackendPrefetch : public sekv::cuda::in_every_mode {
protected:
    world w_ = backend_world();
    device_step memory_{w_, 4}, plain_memory_{w_, 4}, hints_{w_, 4};

    // Steps of two caches, one of them hinted at by the tokens that `hint` names; returns both counters.
    std::array<sekv::zoom_metrics, 2> compare(const sekv::progressive_options& o, const std::function<uids(const uids&)>& hint, uid steps) {
        float_cache hinted(w_.model, small_options(), o), plain(w_.model, small_options(), o);
        std::vector<sekv::plan> plans;
        for (auto* c : {&hinted, &plain}) {
            const auto a = sealed_sequence(*c, w_), b = sealed_sequence(*c, w_, 50'000, 600);
            plans.push_back(c->make_plan(std::vector<sekv::batch_item>{{a, 2, -1}, {{}, 1, -1}, {b, 1, -1}}, resolution::adaptive));
        }
        for (uid i = 0; i < steps; ++i) {
            const auto tokens = fresh(9000 + 10 * i, 4);
            memory_.put(tokens, hinted.where().stream());
            hints_.put(hint(tokens), hinted.where().stream());
            plain_memory_.put(tokens, plain.where().stream());
            hinted.begin_step(plans[0]);
            step_with_hints(hinted, plans[0], w_, memory_, hints_);
            plain.begin_step(plans[1]);
            plain_memory_.layers(plain, plans[1]);
            EXPECT_EQ(memory_.get(hinted.where().stream()), plain_memory_.get(plain.where().stream())) << "step " << i;
        }
        hinted.begin_step(plans[0]), plain.begin_step(plans[1]);
        hinted.where().synchronize(), plain.where().synchronize();
        return {hinted.zooms(), plain.zooms()};
    }
};
INSTANTIATE_TEST_SUITE_P(Orders, CudaBackendPrefetch, testing::ValuesIn(sekv::cuda::runtime_modes()), sekv::cuda::name_of_mode);

TEST_P(CudaBackendPrefetch, TheVeryQueriesLeaveNextToNoMiss) {
    const auto [hinted, plain] = compare(roomy_codec(), [](const uids& tokens) { return tokens; }, 3);
    EXPECT_EQ(plain.prefetched, 0U);
    EXPECT_GT(plain.misses, 100U);
    // A hint doesn't see its own token, so its probabilities are a little larger; several tokens of an item may be the first to zoom a line, and it crosses once.
    EXPECT_LE(hinted.misses, plain.misses / 50);
    EXPECT_GE(hinted.prefetched, plain.misses / 2);
    EXPECT_EQ(hinted.bytes * plain.misses, plain.bytes * (hinted.misses + hinted.prefetched));
    EXPECT_EQ(hinted.tokens, plain.tokens);
    EXPECT_EQ(hinted.zooms, plain.zooms);
    EXPECT_EQ(hinted.capped, plain.capped);
    EXPECT_EQ(hinted.most_tokens, plain.most_tokens);
    EXPECT_EQ(hinted.latency.count(), plain.latency.count());
    EXPECT_EQ(hinted.hits + hinted.misses, hinted.tokens);
}

// Lines are evicted for nothing, those of the list that is about to be read too.
TEST_P(CudaBackendPrefetch, WrongHintsChangeTimeOnly) {
    const auto [hinted, plain] = compare(zooming_codec(), [](const uids& tokens) { return fresh(tokens[0] + 777'000, ssize(tokens)); }, 6);
    EXPECT_GT(hinted.prefetched, 0U);
    EXPECT_EQ(hinted.tokens, plain.tokens);
}

TEST_P(CudaBackendPrefetch, OfATightCapTheLargest) {
    auto o = roomy_codec();
    o.cap = 5;
    const auto [hinted, plain] = compare(o, [](const uids& tokens) { return tokens; }, 2);
    EXPECT_GT(plain.capped, 0U);
    EXPECT_LE(hinted.misses, plain.misses / 4);
}

TEST_P(CudaBackendPrefetch, ACapturedStepFetchesAtEachLaunch) {
    float_cache graphs(w_.model, small_options(), roomy_codec()), plain(w_.model, small_options(), roomy_codec());
    const auto s = sealed_sequence(graphs, w_), t = sealed_sequence(plain, w_);
    auto p = graphs.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive), q = plain.make_plan(std::vector<sekv::batch_item>{{t, 1, -1}}, resolution::adaptive);
    const auto stream = graphs.where().stream();
    captured_graph graph;
    std::uint64_t before = 0;
    for (uid i = 0; i < 4; ++i) {
        const auto tokens = fresh(9000 + 10 * i, 1);
        memory_.put(tokens, stream);
        plain_memory_.put(tokens, plain.where().stream());
        graphs.begin_step(p);
        if (graph.captured()) {
            graphs.replayed(p);
        } else {
            graph.capture(stream, [&] { step_with_hints(graphs, p, w_, memory_, memory_); });
        }
        graph.launch(stream);
        plain.begin_step(q);
        plain_memory_.layers(plain, q);
        ASSERT_EQ(memory_.get(stream), plain_memory_.get(plain.where().stream())) << "step " << i;
        graphs.begin_step(p);
        graphs.where().synchronize();
        EXPECT_GT(graphs.zooms().prefetched, before) << "step " << i;
        before = graphs.zooms().prefetched;
    }
}

// Plan and sequence are gone while the fetch is under way, and others take their memory.
TEST_P(CudaBackendPrefetch, WhatIsClosedMeanwhileIsNotReused) {
    auto o = small_options();
    float_cache c(w_.model, o, roomy_codec()), calm(w_.model, o, roomy_codec());
    for (uid round = 0; round < 2; ++round) {
        const auto s = sealed_sequence(c, w_, 1 + 1000 * round), t = sealed_sequence(calm, w_, 1 + 1000 * round);
        const auto tokens = fresh(9000, 4);
        memory_.put(tokens, c.where().stream());
        ASSERT_EQ(step(c, w_, s, tokens), step(calm, w_, t, tokens)) << "round " << round;
        {
            auto p = c.make_plan(std::vector<sekv::batch_item>{{s, 4, -1}}, resolution::adaptive);
            c.begin_step(p);
            memory_.prefetch(c, p, 0);
        }
        c.close(s);
        calm.close(t);
    }
}

// A cache in the middle of a step of one token.
struct begun_step {
    explicit begun_step(world model = backend_world(), std::uint64_t bytes = 700'000) : w(std::move(model)), s(sealed_sequence(c, w, 1, 650, bytes)) {
        memory.put({9000}, stream);
        c.begin_step(p);
    }
    world w;
    float_cache c{w.model, small_options(), roomy_codec()};
    sekv::sequence s;
    sekv::plan p = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive);
    device_step memory{w, 1};
    cudaStream_t stream = c.where().stream();
};

TEST(CudaBackendPrefetchCalls, NeitherWaitNorAllocateNorHoldUpTheStream) {
    begun_step x;
    auto& [w, c, s, p, memory, stream] = x;
    c.where().synchronize();
    fakecuda::set_policy(fakecuda::policy::lazy);
    const auto waits = fakecuda::synchronisations();
    const auto blocks = fakecuda::live_allocations();
    memory.prefetch(c, p, 2);
    EXPECT_EQ(fakecuda::synchronisations(), waits);
    EXPECT_EQ(fakecuda::live_allocations(), blocks);
    const auto under_way = fakecuda::pending_operations();
    EXPECT_GE(under_way, 5U);
    EXPECT_EQ(cudaStreamSynchronize(c.where().stream()), cudaSuccess);
    EXPECT_GE(fakecuda::pending_operations() + 1, under_way) << "the engine's own work on the stream doesn't wait for the fetch";
    memory.append(c, p, 2);
    EXPECT_EQ(cudaStreamSynchronize(c.where().stream()), cudaSuccess);
    EXPECT_EQ(fakecuda::pending_operations(), 0U) << "the cache's next call does";
    fakecuda::reset();
}

TEST(CudaBackendPrefetchCalls, FetchNothingWhereThereIsNothingToFetch) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), roomy_codec());
    const auto s = sealed_sequence(c, w);
    device_step memory(w, 2);
    memory.put(fresh(9000, 2), c.where().stream());
    auto full = c.make_plan(std::vector<sekv::batch_item>{{s, 2, -1}}, resolution::full);
    const auto launches = fakecuda::calls(fakecuda::call::launch);
    memory.prefetch(c, full, 0);
    auto p = c.make_plan(std::vector<sekv::batch_item>{{s, 2, -1}}, resolution::adaptive);
    c.begin_step(p);
    memory.prefetch(c, p, 1);
    EXPECT_EQ(fakecuda::calls(fakecuda::call::launch), launches) << "plans of full resolution, sliding windows";
    auto o = roomy_codec();
    o.line_slots = 0;
    float_cache uncached(w.model, small_options(), o);
    const auto t = sealed_sequence(uncached, w);
    auto q = uncached.make_plan(std::vector<sekv::batch_item>{{t, 2, -1}}, resolution::adaptive);
    const auto before = fakecuda::calls(fakecuda::call::launch);
    memory.prefetch(uncached, q, 0);
    EXPECT_EQ(fakecuda::calls(fakecuda::call::launch), before) << "no line cache";
}

// A hint's own token isn't there yet; what a rejected draft left in its row would outweigh everything else.
TEST(CudaBackendPrefetchCalls, SeeNothingOfRejectedDrafts) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), roomy_codec());
    const auto s = sealed_sequence(c, w);
    constexpr std::int32_t drafts = 40;  // more rows than kernels take at once, so that the item comes in two pieces
    const auto tokens = fresh(9000, drafts);
    for (std::int32_t l = 0; l < w.layers(); ++l) {
        const auto& shape = w.at(l);
        std::vector<float> k;
        const auto q = w.queries(l, tokens), v = w.values(l, tokens);
        for (std::size_t t = 0; t < tokens.size(); ++t) {
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                const auto* first = q.data() + (static_cast<std::int32_t>(t) * shape.kv_heads + h) * shape.group * shape.key_size;
                for (std::int32_t j = 0; j < shape.key_size; ++j) k.push_back(8 * (first[j] + (shape.group > 1 ? first[shape.key_size + j] : 0)));
            }
        }
        c.append(s, l, sekv::rows(k.data(), drafts, shape.kv_heads, shape.key_size), sekv::rows(v.data(), drafts, shape.kv_heads, shape.value_size));
    }
    c.truncate(s, c.length(s) - drafts);
    auto p = c.make_plan(std::vector<sekv::batch_item>{{s, drafts, -1}}, resolution::adaptive);
    device_step memory(w, drafts);
    memory.put(tokens, c.where().stream());
    c.begin_step(p);
    memory.prefetch(c, p, 0);
    memory.prefetch(c, p, 2);
    memory.layers(c, p);
    c.begin_step(p);
    c.where().synchronize();
    const auto& z = c.zooms();
    EXPECT_GT(z.tokens, 100U);
    EXPECT_LE(z.misses, z.tokens / 10);
}

TEST(CudaBackendPrefetchCalls, AGraphWaitsForHintsBeforeIt) {
    begun_step x;
    auto& [w, c, s, p, memory, stream] = x;
    captured_graph graph;
    graph.capture(stream, [&] { memory.layers(c, p); });
    graph.launch(stream);
    c.begin_step(p);
    c.where().synchronize();
    fakecuda::set_policy(fakecuda::policy::lazy);
    memory.prefetch(c, p, 0);  // outside the graph
    const auto hint = fakecuda::pending_operations();
    EXPECT_GE(hint, 5U);
    c.replayed(p);
    graph.launch(stream);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(fakecuda::pending_operations(), 0U);
    fakecuda::reset();
}

TEST(CudaBackendPrefetchCalls, ACaptureRefusesWhatBeganBeforeIt) {
    begun_step x;
    auto& [w, c, s, p, memory, stream] = x;
    memory.prefetch(c, p, 0);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_THROW(memory.prefetch(c, p, 2), sekv::state_error);
    EXPECT_THROW(memory.append(c, p, 0), sekv::state_error);
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << "refused before the runtime was asked";
    (void)cudaGraphDestroy(graph);
    c.begin_step(p);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    step_with_hints(c, p, w, memory, memory);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    (void)cudaGraphDestroy(graph);
}

// The last layer attends the K and V of the first: its tokens are there when it is hinted at, in a capture too.
TEST(CudaBackendPrefetchCalls, TakeHintsOfLayersThatShareKeysAndValues) {
    world w({layer(1, 2), layer(1, 2)});
    w.model.layers[1].kv_source = 0;
    w.query_gain = 2.0F;
    begun_step x(w, 200'000);
    auto& [own, c, s, p, memory, stream] = x;
    const auto copies = fakecuda::calls(fakecuda::call::copy);
    memory.append(c, p, 0);
    memory.attend(c, p, 0);
    memory.prefetch(c, p, 1);
    memory.attend(c, p, 1);
    EXPECT_EQ(fakecuda::calls(fakecuda::call::copy), copies) << "nothing is sent again";
    c.begin_step(p);
    c.where().synchronize();
    EXPECT_GT(c.zooms().prefetched, 0U);
}

// Hints of no meaning: not finite, or so large that nothing but they would be seen.
TEST(CudaBackendPrefetchCalls, HintsMayBeAnything) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), roomy_codec()), plain(w.model, small_options(), roomy_codec());
    const auto s = sealed_sequence(c, w), t = sealed_sequence(plain, w);
    for (const float x : {NAN, INFINITY, -INFINITY, 3e38F, 0.0F}) {
        const auto tokens = fresh(9000, 1);
        auto p = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive);
        c.begin_step(p);
        for (const std::int32_t l : {0, 2}) {
            const auto& shape = w.at(l);
            device_array<float> hints(static_cast<std::size_t>(shape.query_heads() * shape.key_size));
            hints.put(std::vector<float>(static_cast<std::size_t>(shape.query_heads() * shape.key_size), x), c.where().stream());
            c.prefetch(p, l, sekv::rows(hints.data(), 1, shape.query_heads(), shape.key_size));
            c.where().synchronize();
        }
        ASSERT_EQ(step(c, w, s, tokens), step(plain, w, t, tokens)) << x;
        c.reserve(s, 0);  // reports nothing
    }
}

TEST(CudaBackendPrefetchCalls, RefuseWhatAttendRefuses) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), roomy_codec()), other(w.model, small_options(), roomy_codec());
    const auto s = sealed_sequence(c, w);
    auto p = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive);
    const std::vector<float> q(4 * 64);
    const auto refused = [](const char* words, const auto& call) {
        try {
            call();
            ADD_FAILURE() << "accepted: " << words;
        } catch (const sekv::error& e) {
            EXPECT_THAT(e.what(), HasSubstr(words));
        }
    };
    refused("no layer 3", [&] { c.prefetch(p, 3, sekv::rows(q.data(), 1, 2, 64)); });
    refused("queries must be [1, 2, 64]", [&] { c.prefetch(p, 0, sekv::rows(q.data(), 1, 4, 64)); });
    refused("another cache", [&] { other.prefetch(p, 0, sekv::rows(q.data(), 1, 2, 64)); });
    c.begin_step(p);
    ASSERT_EQ(cudaStreamBeginCapture(c.where().stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    refused("device memory", [&] { c.prefetch(p, 0, sekv::rows(q.data(), 1, 2, 64)); });
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(c.where().stream(), &graph), cudaSuccess);
    (void)cudaGraphDestroy(graph);
    c.prefetch(p, 0, sekv::rows(q.data(), 1, 2, 64));  // outside a capture the host's are taken too
    const auto t = c.open({0, 4000});
    auto outgrown = c.make_plan(std::vector<sekv::batch_item>{{t, 1, -1}}, resolution::adaptive);
    append_all(c, w, t, fresh(20'000, 1500));
    refused("make a new plan", [&] { c.prefetch(outgrown, 0, sekv::rows(q.data(), 1, 2, 64)); });
    auto closed = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive);
    c.close(s);
    refused("closed", [&] { c.prefetch(closed, 0, sekv::rows(q.data(), 1, 2, 64)); });
}

}  // namespace
