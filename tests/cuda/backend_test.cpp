// What the CUDA backend promises beyond the cache's own tests: device memory in and out, no synchronisation in a step, graphs, streams.
#include <gmock/gmock.h>

#include "cuda/backend_world.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;
using sekv::tier;
using ::testing::HasSubstr;

constexpr std::uint64_t pressed = 760'000;

sekv::sequence sealed_sequence(float_cache& c, const world& w, uid first = 1, std::int64_t tokens = 650, std::uint64_t bytes = pressed) {
    const auto s = c.open({quota(c, bytes), 4000});
    prefill(c, w, s, fresh(first, tokens));
    EXPECT_GT(c.sealed(s), 100);
    return s;
}

sekv::plan step_plan(float_cache& c, const std::vector<sekv::batch_item>& items) { return c.make_plan(items, resolution::adaptive); }

TEST(CudaBackend, DeviceMemoryGivesWhatHostMemoryGives) {
    const auto w = backend_world();
    float_cache device(w.model, small_options(), zooming_codec()), host(w.model, small_options(), zooming_codec());
    const auto s = sealed_sequence(device, w), t = sealed_sequence(host, w);
    auto p = step_plan(device, {{s, 3, -1}});
    device_step memory(w, 3);
    for (uid i = 0; i < 20; ++i) {
        const auto tokens = fresh(9000 + 10 * i, 3);
        memory.put(tokens, device.where().stream());
        device.begin_step(p);
        memory.layers(device, p);
        ASSERT_EQ(memory.get(device.where().stream()), step(host, w, t, tokens)) << "step " << i;
        if (i == 10) p = step_plan(device, {{s, 3, -1}});
    }
}

TEST(CudaBackend, AStepNeitherWaitsNorAllocates) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), zooming_codec());
    const auto a = sealed_sequence(c, w), b = sealed_sequence(c, w, 50'000, 600);
    auto p = step_plan(c, {{a, 1, -1}, {{}, 1, -1}, {b, 2, -1}});
    device_step memory(w, 4);
    memory.put(fresh(9000, 4), c.where().stream());
    c.begin_step(p);
    const auto waits = fakecuda::synchronisations();
    const auto blocks = fakecuda::live_allocations();
    memory.layers(c, p);
    EXPECT_EQ(fakecuda::synchronisations(), waits);
    EXPECT_EQ(fakecuda::live_allocations(), blocks);
    (void)c.zooms();
    EXPECT_EQ(fakecuda::synchronisations(), waits) << "metrics are read without stopping the device";
    const auto r = memory.get(c.where().stream());
    EXPECT_EQ(r.out[0][2 * 64], 0.0F) << "padding";
    EXPECT_EQ(r.lse[0][2], -INFINITY);
}

TEST(CudaBackend, ACapturedStepReplaysAsTheCallsThemselves) {
    const auto w = backend_world();
    float_cache graphs(w.model, small_options(), zooming_codec()), plain(w.model, small_options(), zooming_codec());
    const auto s = sealed_sequence(graphs, w, 1, 780, 950'000), t = sealed_sequence(plain, w, 1, 780, 950'000), s2 = graphs.open({0, 4000}), t2 = plain.open({0, 4000});
    auto p = step_plan(graphs, {{s, 1, -1}, {s2, 2, -1}}), q = step_plan(plain, {{t, 1, -1}, {t2, 2, -1}});
    device_step a(w, 3), b(w, 3);
    const auto stream = graphs.where().stream();
    captured_graph graph;
    const auto sealed = graphs.sealed(s);
    for (uid i = 0; i < 150; ++i) {
        const auto tokens = fresh(9000 + 10 * i, 3);
        a.put(tokens, stream);
        b.put(tokens, plain.where().stream());
        graphs.begin_step(p);
        if (graph.captured()) {
            graphs.replayed(p);
        } else {
            graph.capture(stream, [&] { a.layers(graphs, p); });
        }
        graph.launch(stream);
        plain.begin_step(q);
        b.layers(plain, q);
        ASSERT_EQ(a.get(stream), b.get(plain.where().stream())) << "step " << i;
    }
    EXPECT_GT(graphs.sealed(s), sealed) << "sealed while a graph was in use";
    EXPECT_EQ(graphs.used(s), plain.used(t));
}

TEST(CudaBackend, AGraphWhosePlanIsOutgrownIsNotReplayed) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), zooming_codec());
    const auto s = c.open({0, 4000});
    append_all(c, w, s, fresh(1, 700));
    auto p = step_plan(c, {{s, 1, -1}});
    c.begin_step(p);
    for (std::int32_t l = 0; l < w.layers(); ++l) append(c, w, s, l, {9000});
    append_all(c, w, s, fresh(10'000, 700));
    EXPECT_THROW(c.begin_step(p), sekv::state_error);
    p = step_plan(c, {{s, 1, -1}});
    c.begin_step(p);
}

TEST(CudaBackend, AForksPlansHoldItsHistory) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), zooming_codec());
    const auto s = sealed_sequence(c, w);
    const auto t = c.fork(s);
    const auto q = w.queries(0, {77});
    std::vector<float> a(128), b(128);
    const sekv::batch_item parent{s, 1, -1}, child{t, 1, -1};
    c.attend({&child, 1}, 0, sekv::rows(q.data(), 1, 2, 64), resolution::adaptive, sekv::out_rows(b.data(), 1, 2, 64));
    c.attend({&parent, 1}, 0, sekv::rows(q.data(), 1, 2, 64), resolution::adaptive, sekv::out_rows(a.data(), 1, 2, 64));
    EXPECT_EQ(a, b);
    const auto u = c.fork(s);
    auto p = step_plan(c, {{u, 1, -1}});
    c.begin_step(p);
    append_all(c, w, u, {9000});
    c.attend(p, 0, sekv::rows(q.data(), 1, 2, 64), sekv::out_rows(b.data(), 1, 2, 64));
}

TEST(CudaBackend, WhatCannotBeCapturedSaysSo) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), zooming_codec());
    const auto s = sealed_sequence(c, w);
    auto p = step_plan(c, {{s, 1, -1}});
    auto full = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::full);
    device_step memory(w, 1);
    memory.put({9000}, c.where().stream());
    c.reserve(s, 1);
    const auto refused = [&](const char* words, auto&& body) {
        ASSERT_EQ(cudaStreamBeginCapture(c.where().stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
        try {
            body();
            ADD_FAILURE() << "accepted: " << words;
        } catch (const sekv::error& e) {
            EXPECT_THAT(e.what(), HasSubstr(words));
        }
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(c.where().stream(), &graph), cudaSuccess);
        if (graph != nullptr) (void)cudaGraphDestroy(graph);
    };
    refused("call begin_step before", [&] { memory.append(c, p, 0); });
    c.begin_step(p);
    const device_array<sekv::fp16> row(64);
    const device_array<float> q(128);
    refused("append(plan", [&] {
        c.append(s, 0, sekv::rows(row.data(), 1, 1, 64), sekv::rows(row.data(), 1, 1, 64));
    });
    memory.layers(c, p);
    refused("device memory", [&] {
        std::vector<float> out(128);
        c.attend(p, 0, sekv::rows(q.data(), 1, 2, 64), sekv::out_rows(out.data(), 1, 2, 64));
    });
    memory.attend(c, full, 0);
    refused("can't be captured", [&] { memory.attend(c, full, 0); });
    EXPECT_EQ(c.length(s), 651);
}

// The ring of queries is full when begin_step comes, in a capture, to take them.
TEST(CudaBackend, ACaptureThatRefusesBeginStepCountsNoQuery) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), zooming_codec()), undisturbed(w.model, small_options(), zooming_codec());
    const auto s = sealed_sequence(c, w, 1, 650, 850'000), t = sealed_sequence(undisturbed, w, 1, 650, 850'000);
    auto p = step_plan(c, {{s, 1, -1}}), q = step_plan(undisturbed, {{t, 1, -1}});
    device_step memory(w, 1);
    const auto sealed = c.sealed(s);
    for (uid i = 0; i < 132; ++i) {
        if (i % 64 == 0 && i > 0) {
            const auto other = c.open({0, 64});  // fences what was freed so far, which would refuse the capture too
            ASSERT_EQ(cudaStreamBeginCapture(c.where().stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
            EXPECT_THROW(c.begin_step(p), sekv::error);
            cudaGraph_t graph = nullptr;
            (void)cudaStreamEndCapture(c.where().stream(), &graph);
            if (graph != nullptr) (void)cudaGraphDestroy(graph);
            (void)cudaGetLastError();
            c.close(other);
        }
        const auto each = [&](float_cache& cache, sekv::plan& plan) {
            memory.put({9000 + i}, cache.where().stream());
            cache.begin_step(plan);
            memory.layers(cache, plan);
            return memory.get(cache.where().stream());
        };
        ASSERT_EQ(each(c, p), each(undisturbed, q)) << "step " << i;
    }
    EXPECT_GT(c.sealed(s), sealed);
}

TEST(CudaBackend, StreamsMayAlternate) {
    const auto w = backend_world();
    std::vector<result> expected;
    for (const int mode : {0, 1, 2, 3, 4}) {
        mode == 0 ? fakecuda::set_policy(fakecuda::policy::eager) : mode == 1 ? fakecuda::set_policy(fakecuda::policy::lazy) : fakecuda::set_policy(fakecuda::policy::random, static_cast<std::uint64_t>(mode));
        cudaStream_t streams[2] = {nullptr, nullptr};
        for (auto& x : streams) ASSERT_EQ(cudaStreamCreateWithFlags(&x, cudaStreamNonBlocking), cudaSuccess);
        std::vector<result> got;
        {
            float_cache c(w.model, small_options(), zooming_codec());
            const auto a = sealed_sequence(c, w), b = sealed_sequence(c, w, 50'000, 600);
            auto p = step_plan(c, {{a, 1, -1}}), q = step_plan(c, {{b, 1, -1}});
            device_step first(w, 1), second(w, 1);
            for (uid i = 0; i < 70; ++i) {
                // Two sequences on two streams, nothing waited for in between; then each on the other's stream.
                first.put({9000 + i}, streams[i % 2]);
                second.put({19'000 + i}, streams[1 - i % 2]);
                if (mode > 0) c.where().use(streams[i % 2]);
                c.begin_step(p);
                first.layers(c, p);
                if (mode > 0) c.where().use(streams[1 - i % 2]);
                c.begin_step(q);
                second.layers(c, q);
                c.where().synchronize();
                got.push_back(first.get(streams[i % 2]));
                got.push_back(second.get(streams[1 - i % 2]));
            }
            c.where().synchronize();
        }
        if (mode == 0) expected = got;
        EXPECT_TRUE(got == expected) << "mode " << mode;
        for (auto& x : streams) ASSERT_EQ(cudaStreamDestroy(x), cudaSuccess);
    }
    fakecuda::reset();
}

TEST(CudaBackend, ValuesThatAreNotFiniteAreReportedBetweenSteps) {
    const auto w = backend_world();
    float_cache c(w.model, small_options(), zooming_codec());
    const auto s = sealed_sequence(c, w);
    auto p = step_plan(c, {{s, 1, -1}});
    device_step memory(w, 1);
    memory.put({9000}, c.where().stream());
    device_array<sekv::fp16> bad(64);
    auto row = halves(w.keys(0, {1}));
    row[5] = sekv::fp16(INFINITY);
    bad.put(row, c.where().stream());
    c.begin_step(p);
    c.append(p, 0, sekv::rows(bad.data(), 1, 1, 64), sekv::rows(bad.data(), 1, 1, 64));
    for (std::int32_t l = 1; l < w.layers(); ++l) memory.append(c, p, l);
    c.where().synchronize();
    EXPECT_THROW(c.begin_step(p), sekv::invalid_argument);
    c.truncate(s, 650);
    c.begin_step(p);
    memory.layers(c, p);
    const auto r = memory.get(c.where().stream());
    EXPECT_TRUE(std::isfinite(r.out[0][0]));
    for (const auto& out : step(c, w, s, fresh(9100, 2), resolution::full).out) {  // nor is what was taken back multiplied by 0
        for (const float x : out) ASSERT_TRUE(std::isfinite(x));
    }
}

// A step whose queries of one layer hold x, then `more` single tokens: from 120 on the sequence is sealed further.
std::vector<result> steps_after_a_query(const world& w, resolution how, std::int32_t layer, float x, std::int64_t more) {
    float_cache c(w.model, small_options(), zooming_codec());
    const auto s = sealed_sequence(c, w, 1, 780, 950'000);
    const auto sealed = c.sealed(s);
    auto p = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, how);
    device_step memory(w, 1);
    memory.put({9000}, c.where().stream());
    auto q = w.queries(layer, {9000});
    q[70] = x;
    device_array<float> queries(q.size()), out(128);
    queries.put(q, c.where().stream());
    c.begin_step(p);
    for (std::int32_t l = 0; l < w.layers(); ++l) {
        memory.append(c, p, l);
        l == layer ? c.attend(p, l, sekv::rows(queries.data(), 1, 2, 64), sekv::out_rows(out.data(), 1, 2, 64)) : memory.attend(c, p, l);
    }
    c.where().synchronize();
    if (!std::isfinite(x)) {
        try {
            c.reserve(s, 1);
            ADD_FAILURE() << "not reported: " << x << " in layer " << layer << ", " << (how == resolution::full ? "full" : "adaptive");
        } catch (const sekv::invalid_argument& e) {
            EXPECT_THAT(e.what(), HasSubstr("queries"));
        }
    }
    auto r = decode(c, w, s, fresh(9100, more));
    EXPECT_EQ(c.sealed(s) > sealed, more >= 120);
    return r;
}

TEST(CudaBackend, QueriesThatAreNotFiniteAreReportedBetweenSteps) {
    const auto w = backend_world();
    for (const auto how : {resolution::adaptive, resolution::full}) {
        for (const std::int32_t layer : {0, 1}) {  // the second has a sliding window, and no metric
            for (const auto& x : steps_after_a_query(w, how, layer, -INFINITY, 2)) {
                for (const auto& out : x.out) EXPECT_TRUE(std::isfinite(out[0]));
            }
        }
    }
}

TEST(CudaBackend, QueriesThatAreNotFiniteCountAsZeros) {
    const auto w = backend_world();
    EXPECT_TRUE(steps_after_a_query(w, resolution::adaptive, 0, NAN, 120) == steps_after_a_query(w, resolution::adaptive, 0, 0.0F, 120));
}

TEST(CudaBackend, AgreesWithTheHostBackend) {
    const auto w = backend_world();
    for (const bool exact_tier : {false, true}) {
        auto codec = zooming_codec();
        codec.exact_tier = exact_tier;
        float_cache device(w.model, small_options(), codec);
        sekv::basic_cache<sekv::fp16, sekv::host_backend, sekv::progressive_codec> host(w.model, small_options(), codec);
        constexpr std::uint64_t bytes = 880'000;  // quota() gives the device six tenths beside what only it keeps
        const auto s = device.open({quota(device, bytes), 4000}), t = host.open({bytes * 6 / 10, 4000});
        prefill(device, w, s, fresh(1, 750));
        prefill(host, w, t, fresh(1, 750));
        ASSERT_GT(host.sealed(t), 100);
        ASSERT_EQ(device.sealed(s), host.sealed(t));
        double error = 0, norm = 0;
        for (uid i = 0; i < 120; ++i) {
            const auto x = step(device, w, s, {9000 + i});
            const auto y = step(host, w, t, {9000 + i});
            for (std::size_t l = 0; l < x.out.size(); ++l) {
                for (std::size_t k = 0; k < x.out[l].size(); ++k) {
                    const double e = static_cast<double>(x.out[l][k]) - static_cast<double>(y.out[l][k]);
                    error += e * e;
                    norm += static_cast<double>(y.out[l][k]) * static_cast<double>(y.out[l][k]);
                }
            }
        }
        // The metric's ring is bf16, and bits, steps and codes follow it; each backend is as far from full attention as the other.
        EXPECT_LT(std::sqrt(error / norm), exact_tier ? 0.06 : 0.12);
        const auto a = device.zooms(), b = host.zooms();
        EXPECT_EQ(a.zooms, b.zooms);
        EXPECT_NEAR(static_cast<double>(a.tokens), static_cast<double>(b.tokens), 0.03 * static_cast<double>(b.tokens));
        EXPECT_NEAR(a.hit_rate(), b.hit_rate(), 0.05);
    }
}

TEST(CudaBackend, WhatItDoesNotTake) {
    EXPECT_THROW(float_cache(world({layer(1, 17)}).model), sekv::unsupported);
    EXPECT_THROW(sekv::cuda_backend({.device = 7}), sekv::invalid_argument);
}

}  // namespace
