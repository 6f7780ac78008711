#include "kernels/device.cuh"
#include "kernels/line_cache.cuh"

namespace sekv::cuda {
namespace {

constexpr int invalidate_threads = 256;

__global__ void __launch_bounds__(invalidate_threads) invalidate(std::byte* cache, line_cache_shape shape, std::size_t head_bytes, std::int64_t position) {
    const auto c = view_cache(cache + blockIdx.x * head_bytes, shape.slots, shape.stride);
    for (int slot = static_cast<int>(threadIdx.x); slot < shape.slots; slot += invalidate_threads) {
        if (c.tags[slot] != 0 && c.position_of(slot) >= position) c.tags[slot] = 0;
    }
}

}  // namespace

void invalidate_lines(std::byte* cache, const line_cache_shape& shape, std::int64_t position, stream s) {
    if (shape.slots == 0) return;
    launch("invalidate_lines", s, dim3(static_cast<unsigned>(shape.heads)), dim3(invalidate_threads), 0, &invalidate, cache, shape, line_cache_head_bytes(shape.slots, shape.stride), position);
}

}  // namespace sekv::cuda
