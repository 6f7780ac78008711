// The CUDA backend's memory: device memory in stream order, pinned host memory, and what moves bytes between them.
#pragma once

#include <vector>

#include "sekv/exec/memory.hpp"
#include "src/cuda/device_pool.hpp"
#include "src/cuda/pinned_arena.hpp"
#include "src/cuda/transfer.hpp"

namespace sekv::cuda {

struct resource_options {
    slab_options device, host;
    transfer_options copies;
};

/// tier::device from a device_pool, tier::host from a pinned_arena. What zero and copy enqueue goes to the stream of the latest `use`, in order with the kernels that are enqueued there; freed memory is
/// fenced on every stream that was ever used, on the copy stream and on the one beside. One caller at a time. Nothing here may be called while a used stream is being captured, but for deallocate, beside and joined.
class cuda_resource final : public memory_resource {
public:
    explicit cuda_resource(cudaStream_t compute, const resource_options& options = {});
    /// Waits for the device.
    ~cuda_resource() override = default;

    /// Makes s the stream of what follows, behind what the stream before holds: memory allocated there can be used on s. s must live until forget, or as long as the resource.
    void use(cudaStream_t s);
    /// Waits for s, a stream other than the present one, and no longer fences on it.
    void forget(cudaStream_t s);
    /// The host waits for all streams that were used, and for the copies.
    void synchronize();
    [[nodiscard]] cudaStream_t stream() const noexcept { return streams_[current_]; }
    /// A stream for work that stream() doesn't wait for: behind what stream() holds now, and before what is enqueued on joined() next.
    [[nodiscard]] cudaStream_t beside();
    /// stream(), behind all that `beside` was given. Both throw state_error in a capture when work beside began before it.
    [[nodiscard]] cudaStream_t joined();

    void* allocate(tier t, std::size_t bytes, std::size_t alignment) override;
    void deallocate(tier t, void* p, std::size_t bytes, std::size_t alignment) noexcept override;

    /// Device: in line. Host: at once; unless p is what allocate gave last, after `synchronize`, since something in flight may use it.
    void zero(tier t, void* p, std::size_t bytes) override;
    /// In line when a side is on the device: a pinned source must stay as it is, and a pinned target isn't there, until `synchronize`. Pageable host memory is staged (transfer::copy). From host to host:
    /// memcpy after `synchronize`, which costs a stop of the device; it is seldom (copy-on-write of a shared host page).
    void copy(void* to, tier to_tier, const void* from, tier from_tier, std::size_t bytes) override;
    void copy_rows(void* to, tier to_tier, std::size_t to_pitch, const void* from, tier from_tier, std::size_t from_pitch, std::size_t width, std::size_t rows) override;

    [[nodiscard]] device_pool& pool() noexcept { return pool_; }
    [[nodiscard]] pinned_arena& arena() noexcept { return arena_; }
    [[nodiscard]] transfer& copies() noexcept { return copies_; }

private:
    void refuse_old_work() const;

    int device_;
    device_pool pool_;
    pinned_arena arena_;
    transfer copies_;
    owned_event edge_;
    owned_stream beside_{owned_stream::priority::least};  // who waits for stream() goes first
    bool apart_ = false;                 ///< beside_ holds work that stream() isn't behind
    std::vector<cudaStream_t> streams_;  ///< the copy stream first, then the one beside
    std::size_t current_ = 2;
    const void* fresh_ = nullptr;  ///< host memory that nothing can be using yet
};

}  // namespace sekv::cuda
