// What an engine has anyway: tensors, here in host memory or, with SEKV_EXAMPLE_CUDA, on the device, and a captured step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#ifdef SEKV_EXAMPLE_CUDA
#include <cuda_runtime_api.h>

#include "sekv/cuda.hpp"

using engine_cache = sekv::cuda_cache;
inline sekv::cuda_backend make_backend() { return sekv::cuda_backend(); }

inline void cuda_check(cudaError_t e) {
    if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}
#else
#include "sekv/sekv.hpp"

using engine_cache = sekv::cache;
inline sekv::host_backend make_backend() { return sekv::host_backend(2); }
#endif

/// fp32 [tokens, heads, size]; engines pass bf16 or fp16 the same way.
class tensor {
public:
    tensor(std::int64_t tokens, std::int32_t heads, std::int32_t size) : tokens_(tokens), heads_(heads), size_(size), count_(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads * size)) { allocate(); }
    tensor(tensor&& o) noexcept : tokens_(o.tokens_), heads_(o.heads_), size_(o.size_), count_(o.count_), data_(std::exchange(o.data_, nullptr)) {}
    tensor& operator=(tensor&&) = delete;
    [[nodiscard]] std::size_t row() const noexcept { return static_cast<std::size_t>(heads_ * size_); }
    [[nodiscard]] sekv::rows_view rows() const noexcept { return sekv::rows(data_, tokens_, heads_, size_); }
    [[nodiscard]] sekv::out_view out() const noexcept { return sekv::out_rows(data_, tokens_, heads_, size_); }

#ifdef SEKV_EXAMPLE_CUDA
    ~tensor() { (void)cudaFree(data_); }
    void upload(const std::vector<float>& x) {
        cuda_check(cudaDeviceSynchronize());  // kernels that read the last content; an engine computes on the cache's stream instead
        cuda_check(cudaMemcpy(data_, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice));
    }
    [[nodiscard]] std::vector<float> download() const {
        std::vector<float> x(count_);
        cuda_check(cudaDeviceSynchronize());
        cuda_check(cudaMemcpy(x.data(), data_, count_ * sizeof(float), cudaMemcpyDeviceToHost));
        return x;
    }

private:
    void allocate() { cuda_check(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(float))); }
#else
    ~tensor() { delete[] data_; }
    void upload(const std::vector<float>& x) { std::copy(x.begin(), x.end(), data_); }
    [[nodiscard]] std::vector<float> download() const { return {data_, data_ + count_}; }

private:
    void allocate() { data_ = new float[count_](); }
#endif

    std::int64_t tokens_;
    std::int32_t heads_, size_;
    std::size_t count_;
    float* data_ = nullptr;
};

/// Runs a step: on the device captured the first time, then replayed.
class step_graph {
public:
#ifdef SEKV_EXAMPLE_CUDA
    explicit step_graph(engine_cache& cache) : cache_(cache) {}
    ~step_graph() {
        if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    }
    template <class Step>
    void run(sekv::plan& plan, Step&& step) {
        const auto stream = cache_.where().stream();
        cuda_check(cudaDeviceSynchronize());  // the toy model's uploads are on another stream
        if (exec_ == nullptr) {
            cudaGraph_t graph = nullptr;
            cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            step();
            cuda_check(cudaStreamEndCapture(stream, &graph));
            cuda_check(cudaGraphInstantiate(&exec_, graph, 0));
            cuda_check(cudaGraphDestroy(graph));
        } else {
            cache_.replayed(plan);
        }
        cuda_check(cudaGraphLaunch(exec_, stream));
    }

private:
    engine_cache& cache_;
    cudaGraphExec_t exec_ = nullptr;
#else
    explicit step_graph(engine_cache&) {}
    template <class Step>
    void run(sekv::plan&, Step&& step) {
        step();
    }
#endif
};
