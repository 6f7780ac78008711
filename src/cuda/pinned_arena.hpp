// The host tier's memory: pinned, and mapped so that kernels read it by the host's own addresses.
#pragma once

#include "src/cuda/slab_heap.hpp"

namespace sekv::cuda {

/// A heap over cudaHostAlloc (mapped, portable). A range that it gives out may be written by the host at once: kernels and copies that read the range's former content have finished, for which
/// allocate waits when the arena is full (slab_usage::waits). nullptr: full, and nothing to wait for. Host and device addresses are the same (unified addressing, which 64-bit Linux has).
class pinned_arena : private slab_heap {
public:
    explicit pinned_arena(const slab_options& options = {});
    [[nodiscard]] std::byte* allocate(std::size_t bytes) { return slab_heap::allocate(bytes); }
    using slab_heap::contains;
    using slab_heap::forget;
    using slab_heap::free;
    using slab_heap::ignore_fences_for_test;
    using slab_heap::options;
    using slab_heap::trim;
    using slab_heap::usage;
};

}  // namespace sekv::cuda
