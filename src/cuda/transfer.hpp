// Bulk copies between the tiers: on a copy stream of their own, beside the kernels, or in line with them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "sekv/exec/latency.hpp"
#include "src/cuda/pinned_arena.hpp"
#include "src/cuda/runtime.hpp"

namespace sekv::cuda {

enum class direction : std::uint8_t { to_device, to_host, on_device };
inline constexpr std::size_t direction_count = 3;

/// `rows` runs of `width` bytes, their starts `pitch` bytes apart (pitches are not read when rows is 1).
struct copy_shape {
    void* to = nullptr;
    const void* from = nullptr;
    std::size_t width = 0, rows = 1;
    std::size_t to_pitch = 0, from_pitch = 0;
};

/// Where a copy runs, and who waits for whom.
enum class lane : std::uint8_t {
    in_line,  ///< on the caller's stream
    beside,   ///< on the copy stream: after what the caller's stream holds, and before what it gets next
    ahead,    ///< on the copy stream, after what the caller's stream holds; nobody waits for it until `order`
    alone,    ///< on the copy stream, where `follow` and `order` alone tie it to others; the caller's stream isn't looked at
};

struct transfer_options {
    std::size_t chunk_bytes = std::size_t{1} << 20;  ///< of a staging buffer, two of which carry copies from and to pageable memory
    std::size_t timed_bytes = std::size_t{64} << 10; ///< copies on the copy stream of at least this many bytes enter the latency histogram
};

struct transfer_metrics {
    std::array<std::uint64_t, direction_count> bytes{}, copies{};
    std::uint64_t staged_bytes = 0;  ///< of them, through a staging buffer
    std::uint64_t waits = 0;         ///< times that the host waited for a staging buffer
    std::uint64_t untimed = 0;       ///< bulk copies that the histogram lacks: too many were in flight
    latency_histogram latency;       ///< of bulk copies on the copy stream, from their start to their end
};

/// Enqueues copies. One caller at a time, on the device that was current at construction; metrics from any thread. Host memory outside the arena counts as pageable: it is staged through pinned
/// buffers, which are taken from the arena once, so that no copy fails for want of memory.
class transfer {
public:
    /// Throws budget_error when the arena can't give the staging buffers, and device_error.
    explicit transfer(pinned_arena& arena, const transfer_options& options = {});
    /// Waits for the copies.
    ~transfer();
    transfer(const transfer&) = delete;
    transfer& operator=(const transfer&) = delete;

    /// A copy on the copy stream; 0: none (the copy was in line).
    using ticket = std::uint64_t;

    /// Enqueues a copy; `compute` is the caller's stream. Pinned host memory must stay as it is until the copy has run. Pageable memory to the device: it was read when the call returns. Device to
    /// pageable memory: the call waits for the copy. Throws invalid_argument for pitches below the width, and device_error; what was enqueued before an error may still run.
    ticket copy(direction d, const copy_shape& shape, cudaStream_t compute, lane l = lane::beside);
    ticket to_device(void* to, const void* from, std::size_t bytes, cudaStream_t compute, lane l = lane::beside) { return copy(direction::to_device, {to, from, bytes}, compute, l); }
    ticket to_host(void* to, const void* from, std::size_t bytes, cudaStream_t compute, lane l = lane::beside) { return copy(direction::to_host, {to, from, bytes}, compute, l); }
    ticket on_device(void* to, const void* from, std::size_t bytes, cudaStream_t compute, lane l = lane::in_line) { return copy(direction::on_device, {to, from, bytes}, compute, l); }
    /// Fills device memory with zeros, in line.
    void zero(void* device, std::size_t bytes, cudaStream_t compute);

    /// What is enqueued on s later waits for the copy (or for a newer one).
    void order(ticket t, cudaStream_t s) const;
    /// What is copied later waits for what s holds now.
    void follow(cudaStream_t s);
    [[nodiscard]] bool done(ticket t) const;
    /// The host waits for the copy: after it the host may read what came from the device.
    void wait(ticket t) const;

    [[nodiscard]] cudaStream_t copy_stream() const noexcept { return copy_stream_.get(); }
    /// Never waits for the device: copies that have not finished are left for the next call.
    [[nodiscard]] transfer_metrics metrics() const;

private:
    static constexpr std::size_t staging_buffers = 2;
    static constexpr std::size_t tickets_kept = 32;
    static constexpr std::size_t most_timed = 32;
    struct staging {
        std::byte* bytes = nullptr;
        owned_event used;
    };
    struct timed_copy {
        owned_event start{owned_event::timing::on}, end{owned_event::timing::on};
        bool running = false;
    };

    void stage_in(const copy_shape& shape, cudaStream_t s);
    void stage_out(const copy_shape& shape, cudaStream_t s);
    staging& next_staging();
    timed_copy* begin_timing(std::size_t bytes, cudaStream_t s);
    void poll_timing() const;
    void count(direction d, std::uint64_t bytes, std::uint64_t staged);
    ticket finish(cudaStream_t compute, lane l);

    pinned_arena& arena_;
    transfer_options options_;
    owned_stream copy_stream_;
    owned_event edge_;  ///< from a compute stream to the copy stream
    std::array<staging, staging_buffers> staging_;
    std::size_t staging_next_ = 0;
    std::array<owned_event, tickets_kept> finished_;  ///< of ticket t: at t % tickets_kept, until a newer one takes its place
    ticket last_ = 0;
    mutable std::mutex metrics_mutex_;  ///< for the three below
    mutable transfer_metrics metrics_;
    mutable std::array<timed_copy, most_timed> timed_;
};

}  // namespace sekv::cuda
