#include "src/cuda/device_pool.hpp"

namespace sekv::cuda {

namespace {

void* allocate_slab(std::size_t bytes) {
    void* slab = nullptr;
    const auto result = cudaMalloc(&slab, bytes);
    return slab_or_null(result, slab, "cudaMalloc");
}

void release_slab(void* slab) noexcept {
    if (cudaFree(slab) != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace

device_pool::device_pool(const slab_options& options) : slab_heap({allocate_slab, release_slab}, options) {}

}  // namespace sekv::cuda
