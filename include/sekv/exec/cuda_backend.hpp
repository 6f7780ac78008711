// The CUDA backend: a device, a stream, pinned host memory. Includes no CUDA header; link sekv::cuda.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sekv/exec/backend.hpp"
#include "sekv/tier/transfer.hpp"

struct CUstream_st;

namespace sekv {

namespace cuda {
class context;
}

struct cuda_options {
    int device = 0;
    CUstream_st* stream = nullptr;                       ///< cudaStream_t that work is enqueued on; null: a non-blocking one of the backend's own
    std::size_t device_slab = std::size_t{64} << 20;     ///< bytes taken from cudaMalloc at once
    std::size_t pinned_slab = std::size_t{256} << 20;    ///< bytes taken from cudaHostAlloc at once
    std::size_t pinned_limit = ~std::size_t{0};          ///< of all pinned slabs; when it is reached, allocation waits for what is still in flight
};

/// What crosses by bulk copies, beside the zooms that kernels read themselves. See cuda_backend::transfers.
struct transfer_counters {
    std::uint64_t to_device = 0, to_host = 0, on_device = 0;  ///< bytes
    std::uint64_t waits = 0;       ///< times that the host waited for memory in flight: back-pressure
    latency_histogram latency;     ///< of bulk copies
};

/// Device tier in GPU memory, host tier in pinned, mapped memory that kernels read without a copy. One cache per backend object; copies of a backend share its stream and memory.
///
/// Calls enqueue work and return. K, V, queries, outputs and log-sum-exps may lie in device memory: then no call of a decode step synchronises with the host, and a step can be captured in a CUDA graph.
/// Host memory is taken too: inputs are copied before the call returns, and a call with host outputs waits for them.
class cuda_backend {
public:
    static constexpr const char* name = "cuda";

    /// Throws device_error without such a device, budget_error without memory. exec runs what stays on the CPU (bit allotment, metrics); null: a thread of its own, the caller's.
    explicit cuda_backend(const cuda_options& options = {}, std::shared_ptr<executor> exec = nullptr);

    [[nodiscard]] executor& exec() const noexcept { return *executor_; }
    [[nodiscard]] std::shared_ptr<memory_resource> resource() const noexcept;
    /// The stream that calls use from now on; it first waits for what was enqueued on the stream before. The stream must outlive its use here.
    void use(CUstream_st* stream);
    [[nodiscard]] CUstream_st* stream() const noexcept;
    /// Waits until everything enqueued has run. Throws device_error for what failed since.
    void synchronize();
    /// Never waits for the device.
    [[nodiscard]] transfer_counters transfers() const;

    /// The library's own use.
    [[nodiscard]] cuda::context& context() const noexcept { return *context_; }

private:
    std::shared_ptr<cuda::context> context_;
    std::shared_ptr<executor> executor_;
};
static_assert(backend<cuda_backend>);

}  // namespace sekv
