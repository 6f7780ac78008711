// Ranges cut out of slabs; a freed range is given out again only when the streams that may still use it have passed.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "src/cuda/runtime.hpp"

namespace sekv::cuda {

inline constexpr std::size_t range_alignment = 256;  ///< of every range, so that 128-byte lines stay aligned

/// Bytes that a request takes: the next multiple of 256 up to 8 KiB, above it the next of sixteen steps per doubling. Steps this fine cost at most 6.25%
/// (buffer's 64 bytes of padding put every power of two just past its class), and neighbours that are free again become one range, so that classes don't strand memory.
/// 0 when it can't be represented.
[[nodiscard]] constexpr std::size_t size_class(std::size_t bytes) noexcept {
    std::size_t step = range_alignment;
    while (bytes / step >= 32 && step < (std::size_t{1} << 62)) step *= 2;
    if (bytes > ~std::size_t{0} - step) return 0;
    return bytes == 0 ? range_alignment : (bytes + step - 1) / step * step;
}

struct slab_options {
    std::size_t slab_bytes = std::size_t{64} << 20;  ///< taken from the driver at once; a larger request gets a slab of its own
    std::size_t limit = ~std::size_t{0};             ///< of all slabs together
};

/// Bytes now, and counts since the start. Consistent with themselves only while no other thread allocates.
struct slab_usage {
    std::uint64_t asked = 0;       ///< bytes asked for, of live ranges
    std::uint64_t held = 0;        ///< bytes of live ranges, rounded to their classes
    std::uint64_t pending = 0;     ///< freed, not yet reusable
    std::uint64_t reserved = 0;    ///< of all slabs
    std::uint64_t slabs = 0;
    std::uint64_t most_held = 0;   ///< the largest value of held
    std::uint64_t ranges = 0;      ///< live
    std::uint64_t waits = 0;       ///< times that an allocation made the host wait for streams: back-pressure
    std::uint64_t reordered = 0;   ///< times that a range was reused in stream order, without waiting
};

/// Where slabs come from. allocate gives nullptr when there is no memory, and throws device_error for anything else.
struct slab_source {
    void* (*allocate)(std::size_t bytes);
    void (*release)(void* slab) noexcept;
};

/// What an allocating call gave: nullptr when there was no memory, which is no error yet; throws device_error for any other failure.
[[nodiscard]] inline void* slab_or_null(cudaError_t result, void* slab, const char* call) {
    if (result == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return nullptr;
    }
    check(result, call);
    return slab;
}

/// Best-fit over slabs of one device, with deferred reuse. Thread-safe. Addresses are never dereferenced.
///
/// free() calls nothing of CUDA: events are recorded by the next allocation, on the streams that free() was told of. That is later than needed, thus safe; it lets a thousand frees share one event, and
/// lets a destructor run while a stream is being captured. Allocations are not allowed during capture. A stream named in a free must stay alive until `forget`.
class slab_heap {
public:
    static constexpr std::size_t most_streams = 64;  ///< told apart; a free that names more waits for the surplus ones

    slab_heap(slab_source source, const slab_options& options) : source_(source), options_(options), device_(current_device()) {}
    /// Waits for the device. Ranges must not be used after it.
    ~slab_heap();
    slab_heap(const slab_heap&) = delete;
    slab_heap& operator=(const slab_heap&) = delete;

    /// A range whose former users have all finished: the host may touch it at once. Waits for the oldest frees when the limit is reached; nullptr only when there is nothing to wait for.
    /// Throws device_error; whatever it throws, no range has changed hands.
    [[nodiscard]] std::byte* allocate(std::size_t bytes);
    /// A range whose former users come before what is enqueued on s from now on; the host, and other streams, must be ordered behind s.
    [[nodiscard]] std::byte* allocate(std::size_t bytes, cudaStream_t s);
    /// Takes back a live range (anything else ends the program); `users`: the streams on which work that touches it may be enqueued. p null: nothing.
    void free(std::byte* p, std::span<const cudaStream_t> users) noexcept;

    /// Waits for s, so that it may be destroyed.
    void forget(cudaStream_t s);
    /// Gives back slabs without a range in use. Returns the bytes.
    std::size_t trim();
    /// True for addresses inside a live or pending range's slab.
    [[nodiscard]] bool contains(const void* p) const;
    [[nodiscard]] slab_usage usage() const noexcept;
    [[nodiscard]] const slab_options& options() const noexcept { return options_; }

    /// Plants the bug that tests must see: freed ranges count as reusable at once.
    void ignore_fences_for_test(bool on) noexcept { unfenced_ = on; }

private:
    enum class state : std::uint8_t { unused, live, pending };
    using by_size = std::set<std::pair<std::size_t, std::byte*>>;
    struct range {
        std::size_t bytes = 0, asked = 0;
        std::byte* slab = nullptr;
        std::byte* next = nullptr;   ///< of the same list of pending ranges
        std::uint64_t users = 0;     ///< bit i: stream i of streams_
        state now = state::unused;
        by_size::node_type entry{};  ///< of unused_, kept while the range isn't in it: becoming unused never allocates
    };
    using ranges = std::map<std::byte*, range>;
    /// Ranges freed between two allocations, and the events behind which they are reusable.
    struct batch {
        std::byte* head = nullptr;
        std::vector<std::pair<std::size_t, owned_event>> fences;  ///< by stream
    };
    /// A counter that other threads may read.
    using counter = std::atomic<std::uint64_t>;

    std::byte* allocate_range(std::size_t bytes, const cudaStream_t* order);
    std::byte* cut(std::size_t size, std::size_t asked);
    std::byte* take_in_order(std::size_t size, std::size_t asked, cudaStream_t s);
    void make_live(ranges::iterator r, std::size_t asked);
    bool grow(std::size_t size);
    std::byte* add_slab(std::size_t bytes);
    std::size_t release_unused_slabs();
    void close_open();
    void reuse_finished();
    void reuse_oldest();
    void reuse_front();
    void reuse(std::byte* head) noexcept;
    void merge(ranges::iterator r) noexcept;
    [[nodiscard]] std::size_t slot_of(cudaStream_t s) noexcept;
    owned_event take_event();

    slab_source source_;
    slab_options options_;
    int device_;
    mutable std::mutex mutex_;
    ranges ranges_;  ///< every byte of every slab is in one
    by_size unused_;
    std::map<std::byte*, std::size_t> slabs_;
    batch open_;  ///< not yet fenced
    std::deque<batch> closed_;  ///< oldest first
    std::vector<owned_event> events_;  ///< to be used again
    std::array<cudaStream_t, most_streams> streams_{};
    std::size_t stream_count_ = 0;
    bool unfenced_ = false;
    counter asked_{0}, held_{0}, pending_{0}, reserved_{0}, slab_count_{0}, most_held_{0}, live_{0}, waits_{0}, reordered_{0};
};

}  // namespace sekv::cuda
