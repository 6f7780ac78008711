// Device memory that blocks of host pages stream through, while kernels read what came before.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "src/cuda/transfer.hpp"

namespace sekv::cuda {

/// Bytes of a host page, and where in a slot they go.
struct page_range {
    const std::byte* from = nullptr;
    std::size_t to = 0;
    std::size_t bytes = 0;
};

/// Slots of device memory, filled on a transfer's copy stream. For each filling: acquire, prefetch (any number), ready, kernels that read the slot, release. While kernels read one slot, another is being
/// filled; all waiting is done by the device. Calls out of this order throw state_error and change nothing.
class strip {
public:
    /// memory: device, slots * slot_bytes, usable by what is enqueued on `owner` from now on. The strip doesn't own it: free it for the owner, the readers and transfer::copy_stream.
    strip(transfer& copies, std::byte* memory, std::size_t slot_bytes, std::size_t slots, cudaStream_t owner);

    /// The slot's memory; copies into it wait for the kernels that read it last. `writer`: null, or a stream whose kernels fill the slot too; they wait as well, and are ordered before readers of the same
    /// stream only.
    std::byte* acquire(std::size_t slot, const cudaStream_t* writer = nullptr);
    /// Enqueues copies of pages; neighbours that stay neighbours are one copy. Pinned pages must stay as they are until `ready`'s event has passed; throws invalid_argument past the slot's end.
    void prefetch(std::size_t slot, std::span<const page_range> pages);
    /// What is enqueued on `reader` from now on sees the slot's content.
    void ready(std::size_t slot, cudaStream_t reader);
    /// What `reader` holds now was the last to read the slot.
    void release(std::size_t slot, cudaStream_t reader);

    [[nodiscard]] std::byte* slot(std::size_t i) const noexcept { return memory_ + i * slot_bytes_; }
    [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }
    [[nodiscard]] std::size_t slots() const noexcept { return slots_.size(); }

private:
    enum class phase : std::uint8_t { released, filling, reading };
    struct state {
        phase now = phase::released;
        owned_event released, filled;
    };
    state& at(std::size_t slot, phase expected, const char* call);

    transfer& copies_;
    std::byte* memory_;
    std::size_t slot_bytes_;
    std::vector<state> slots_;
};

}  // namespace sekv::cuda
