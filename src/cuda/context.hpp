// What one CUDA backend object owns: its device, stream and memory.
#pragma once

#include <memory>

#include "sekv/exec/cuda_backend.hpp"
#include "src/cuda/resource.hpp"
#include "src/cuda/runtime.hpp"

namespace sekv::cuda {

class context {
public:
    explicit context(const cuda_options& options);
    context(const context&) = delete;
    context& operator=(const context&) = delete;
    ~context();

    [[nodiscard]] int device() const noexcept { return device_; }
    /// Where the cache enqueues its own work: behind what prefetches hold.
    [[nodiscard]] cudaStream_t joined() const { return resource_->joined(); }
    [[nodiscard]] cuda_resource& memory() const noexcept { return *resource_; }
    [[nodiscard]] const std::shared_ptr<cuda_resource>& shared_memory() const noexcept { return resource_; }
    /// Whether the stream is being captured: then nothing may be allocated, copied from the host or waited for.
    [[nodiscard]] bool capturing() const;

private:
    int device_;
    std::unique_ptr<owned_stream> own_;
    std::shared_ptr<cuda_resource> resource_;
};

/// Whether kernels may take the address as device memory (managed memory too); else it is the host's.
[[nodiscard]] bool on_device(const void* p);

}  // namespace sekv::cuda
