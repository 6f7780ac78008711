// A CUDA cache that is fed from device memory, as an engine feeds it.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "simt/fakecuda.hpp"
#include "unit/cache_fixtures.hpp"

namespace sekv_test {

/// Device memory of the test's own.
template <class T>
class device_array {
public:
    explicit device_array(std::size_t count) : count_(count) { EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), cudaSuccess); }
    ~device_array() { (void)cudaFree(data_); }
    device_array(const device_array&) = delete;
    device_array& operator=(const device_array&) = delete;
    void put(const std::vector<T>& values, cudaStream_t s) {
        ASSERT_LE(values.size(), count_);
        ASSERT_EQ(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, s), cudaSuccess);
    }
    [[nodiscard]] std::vector<T> get(std::size_t count, cudaStream_t s) const {
        std::vector<T> out(count);
        EXPECT_EQ(cudaMemcpyAsync(out.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost, s), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(s), cudaSuccess);
        return out;
    }
    [[nodiscard]] T* data() const noexcept { return data_; }

private:
    T* data_ = nullptr;
    std::size_t count_;
};

[[nodiscard]] inline std::vector<sekv::fp16> halves(const std::vector<float>& v) {
    std::vector<sekv::fp16> out;
    for (const auto x : v) out.push_back(sekv::fp16(x));
    return out;
}

/// K, V, queries and outputs of every layer for steps of up to `rows` query tokens, at fixed device addresses.
class device_step {
public:
    device_step(const world& w, std::size_t rows) : world_(w) {
        for (std::int32_t l = 0; l < w.layers(); ++l) {
            const auto& s = w.at(l);
            const auto row = [&](std::int32_t heads, std::int32_t size) { return rows * static_cast<std::size_t>(heads * size); };
            layers_.push_back(std::make_unique<layer_memory>(row(s.kv_heads, s.key_size), row(s.kv_heads, s.value_size), row(s.query_heads(), s.key_size), row(s.query_heads(), s.value_size), row(s.query_heads(), 1)));
        }
    }
    /// The rows' inputs, a token each.
    void put(const uids& tokens, cudaStream_t s) {
        rows_ = ssize(tokens);
        for (std::int32_t l = 0; l < world_.layers(); ++l) {
            auto& m = *layers_[static_cast<std::size_t>(l)];
            m.keys.put(halves(world_.keys(l, tokens)), s);
            m.values.put(halves(world_.values(l, tokens)), s);
            m.queries.put(world_.queries(l, tokens), s);
        }
        ASSERT_EQ(cudaStreamSynchronize(s), cudaSuccess);
    }
    template <class Cache>
    void append(Cache& c, sekv::plan& p, std::int32_t l) {
        const auto& s = world_.at(l);
        const auto& m = *layers_[static_cast<std::size_t>(l)];
        c.append(p, l, sekv::rows(m.keys.data(), rows_, s.kv_heads, s.key_size), sekv::rows(m.values.data(), rows_, s.kv_heads, s.value_size));
    }
    /// The layer's queries as a hint.
    template <class Cache>
    void prefetch(Cache& c, sekv::plan& p, std::int32_t l) const {
        const auto& s = world_.at(l);
        c.prefetch(p, l, sekv::rows(layers_[static_cast<std::size_t>(l)]->queries.data(), rows_, s.query_heads(), s.key_size));
    }
    template <class Cache>
    void attend(Cache& c, sekv::plan& p, std::int32_t l) {
        const auto& s = world_.at(l);
        const auto& m = *layers_[static_cast<std::size_t>(l)];
        c.attend(p, l, sekv::rows(m.queries.data(), rows_, s.query_heads(), s.key_size), sekv::out_rows(m.out.data(), rows_, s.query_heads(), s.value_size), m.lse.data());
    }
    template <class Cache>
    void layers(Cache& c, sekv::plan& p) {
        for (std::int32_t l = 0; l < world_.layers(); ++l) {
            if (world_.at(l).kv_source < 0) append(c, p, l);
            attend(c, p, l);
        }
    }
    [[nodiscard]] result get(cudaStream_t s) const {
        result r;
        for (std::int32_t l = 0; l < world_.layers(); ++l) {
            const auto heads = static_cast<std::size_t>(rows_ * world_.at(l).query_heads());
            const auto& m = *layers_[static_cast<std::size_t>(l)];
            r.out.push_back(m.out.get(heads * static_cast<std::size_t>(world_.at(l).value_size), s));
            r.lse.push_back(m.lse.get(heads, s));
        }
        return r;
    }

private:
    struct layer_memory {
        layer_memory(std::size_t k, std::size_t v, std::size_t q, std::size_t o, std::size_t l) : keys(k), values(v), queries(q), out(o), lse(l) {}
        device_array<sekv::fp16> keys, values;
        device_array<float> queries, out, lse;
    };
    const world& world_;
    std::vector<std::unique_ptr<layer_memory>> layers_;
    std::int64_t rows_ = 0;
};

/// A graph of what `calls` enqueued on s.
class captured_graph {
public:
    captured_graph() = default;
    ~captured_graph() {
        if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
        if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
    }
    captured_graph(const captured_graph&) = delete;
    captured_graph& operator=(const captured_graph&) = delete;
    template <class Calls>
    void capture(cudaStream_t s, Calls&& calls) {
        ASSERT_EQ(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        calls();
        ASSERT_EQ(cudaStreamEndCapture(s, &graph_), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&exec_, graph_, 0), cudaSuccess);
    }
    void launch(cudaStream_t s) const { ASSERT_EQ(cudaGraphLaunch(exec_, s), cudaSuccess); }
    [[nodiscard]] bool captured() const noexcept { return exec_ != nullptr; }

private:
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t exec_ = nullptr;
};

/// Two whole-context layers and a sliding-window one between, sharp enough to zoom.
[[nodiscard]] inline world backend_world() {
    world w({layer(1, 2), layer(2, 1, 24), layer(2, 2)});
    w.query_gain = 2.0F;
    return w;
}

[[nodiscard]] inline sekv::progressive_options zooming_codec() {
    auto o = small_codec();
    o.tau = 2e-3F;
    o.horizon = 96;
    return o;
}

}  // namespace sekv_test
