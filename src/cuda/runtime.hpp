// CUDA runtime calls as typed errors, and its handles as owners.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "sekv/core/error.hpp"

namespace sekv::cuda {

/// Throws device_error, or budget_error for cudaErrorMemoryAllocation, naming the call; cudaSuccess returns. The runtime's last error is cleared first,
/// so that a refused call is not reported again by the next launch.
void check(cudaError_t result, const char* call);

/// True for errors after which every later call of the context fails as well: device_error::lost.
[[nodiscard]] bool is_sticky(cudaError_t result) noexcept;

/// Makes `device` current, and the previous one again at the end of the scope.
class device_guard {
public:
    explicit device_guard(int device);
    ~device_guard();
    device_guard(const device_guard&) = delete;
    device_guard& operator=(const device_guard&) = delete;

private:
    int before_ = 0, now_ = 0;
};

/// The calling thread's current device.
[[nodiscard]] int current_device();

/// Whether what is enqueued on s becomes part of a graph.
[[nodiscard]] bool capturing(cudaStream_t s);

/// A non-blocking stream of the current device. Its destruction doesn't wait: CUDA ends the stream once its work is done.
class owned_stream {
public:
    enum class priority : bool { normal, least };
    explicit owned_stream(priority p = priority::normal);
    ~owned_stream();
    owned_stream(owned_stream&& o) noexcept : handle_(std::exchange(o.handle_, nullptr)) {}
    owned_stream& operator=(owned_stream&& o) noexcept {
        std::swap(handle_, o.handle_);
        return *this;
    }
    [[nodiscard]] cudaStream_t get() const noexcept { return handle_; }
    void synchronize() const;

private:
    cudaStream_t handle_ = nullptr;
};

/// An event, without timing unless asked for. Before its first record it counts as done.
class owned_event {
public:
    enum class timing : bool { off, on };
    explicit owned_event(timing t = timing::off);
    ~owned_event();
    owned_event(owned_event&& o) noexcept : handle_(std::exchange(o.handle_, nullptr)) {}
    owned_event& operator=(owned_event&& o) noexcept {
        std::swap(handle_, o.handle_);
        return *this;
    }
    [[nodiscard]] cudaEvent_t get() const noexcept { return handle_; }
    void record(cudaStream_t s);
    /// Makes what is enqueued on s later wait for the record. The event may be recorded anew at once: CUDA keeps what was waited for.
    void order(cudaStream_t s) const;
    [[nodiscard]] bool done() const;
    void wait() const;

private:
    cudaEvent_t handle_ = nullptr;
};

}  // namespace sekv::cuda
