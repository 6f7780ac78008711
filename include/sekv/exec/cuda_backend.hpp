// The CUDA backend: a device, a stream, pinned host memory. Includes no CUDA header; link sekv::cuda.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sekv/exec/backend.hpp"
#include "sekv/exec/latency.hpp"

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
/// Calls enqueue work and return. K, V, queries, outputs and log-sum-exps may lie in device memory: then append and attend never synchronise with the host, and a step's calls can be captured in a CUDA
/// graph (a capture counts as the step: launch the graph once for it, on stream()). Inputs must be there, and stay as they are, in the order of stream(); outputs are valid in that order. Host memory is
/// taken too: inputs are copied before the call returns, and a call with host outputs waits for them (kernels may still read what lies on the device).
///
/// Between steps, reserve and begin_step wait for the device when they seal, make sketches anew, or follow keys for key novelty; end_prefill, materialize, fork and close may too. K, V and queries in
/// device memory that aren't finite are reported by the next call between steps that finds out, as invalid_argument, once: after K or V, truncate the sequences to where that step began, or close them;
/// after queries, don't use that step's outputs (in the metric, elements that aren't finite, or are 2^56 or more once scaled, count as zero). zooms() is as of the last begin_step. Budgets bound the bytes asked for; slabs
/// and size classes come on top. units() holds device addresses.
class cuda_backend {
public:
    static constexpr const char* name = "cuda";

    /// Throws device_error without such a device, budget_error without memory. exec runs what stays on the CPU (bit allotment, metrics); null: a thread of its own, the caller's.
    explicit cuda_backend(const cuda_options& options = {}, std::shared_ptr<executor> exec = nullptr);

    [[nodiscard]] executor& exec() const noexcept { return *executor_; }
    [[nodiscard]] std::shared_ptr<memory_resource> resource() const noexcept;
    /// The stream that calls use from now on; it first waits for what was enqueued on the stream before. Every stream used must live as long as the cache: memory is fenced on it.
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
