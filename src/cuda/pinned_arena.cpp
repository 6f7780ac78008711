#include "src/cuda/pinned_arena.hpp"

namespace sekv::cuda {

namespace {

void* allocate_slab(std::size_t bytes) {
    void* slab = nullptr;
    const auto result = cudaHostAlloc(&slab, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    return slab_or_null(result, slab, "cudaHostAlloc");
}

void release_slab(void* slab) noexcept {
    if (cudaFreeHost(slab) != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace

pinned_arena::pinned_arena(const slab_options& options) : slab_heap({allocate_slab, release_slab}, options) {}

}  // namespace sekv::cuda
