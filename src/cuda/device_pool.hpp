// The device tier's memory.
#pragma once

#include "src/cuda/slab_heap.hpp"

namespace sekv::cuda {

/// A heap over cudaMalloc whose ranges are given out in stream order: memory that was freed behind work of stream s is reused on s at once, on other streams behind an event. nullptr: out of memory.
class device_pool : private slab_heap {
public:
    explicit device_pool(const slab_options& options = {});
    /// The range may be used by what is enqueued on s from now on, and by whatever is ordered behind that.
    [[nodiscard]] std::byte* allocate(std::size_t bytes, cudaStream_t s) { return slab_heap::allocate(bytes, s); }
    using slab_heap::contains;
    using slab_heap::forget;
    using slab_heap::free;
    using slab_heap::ignore_fences_for_test;
    using slab_heap::options;
    using slab_heap::trim;
    using slab_heap::usage;
};

}  // namespace sekv::cuda
