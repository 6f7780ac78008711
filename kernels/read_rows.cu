// Reading back: rows of an exact page as token-major floats, for refits, for tests and for engines that ask.
#include "kernels/rows.hpp"
#include "kernels/scalar.cuh"

namespace sekv::cuda {
namespace {

constexpr std::int32_t threads = 256;
constexpr std::int32_t tile_tokens = 64, tile_size = 32;

struct key_tile {
    shared_array<float, tile_size*(tile_tokens + 1)> keys;  // [component, token + 1]: a column's elements lie in different banks
};

// Thread block (components / 32, KV head, tokens / 64): reads along tokens, writes along components.
__global__ void __launch_bounds__(threads) read_keys_kernel(read_step step) {
    auto& s = dynamic_shared<key_tile>();
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const std::int32_t first_component = static_cast<std::int32_t>(blockIdx.x) * tile_size, first_token = static_cast<std::int32_t>(blockIdx.z) * tile_tokens;
    const std::int32_t components = min(tile_size, step.layer.key_size - first_component), tokens = min(tile_tokens, step.count - first_token);
    const std::byte* page = step.rows + step.page.first + static_cast<std::uint64_t>(head) * step.page.stride;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < components * tokens; i += threads) {
        const std::int32_t j = i / tokens, t = i % tokens;
        s.keys[j * (tile_tokens + 1) + t] =
            load_element(page, step.layer.stored, static_cast<std::int64_t>(first_component + j) * step.capacity + step.first + first_token + t);
    }
    __syncthreads();
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < tokens * tile_size; i += threads) {
        const std::int32_t t = i / tile_size, j = i % tile_size;
        if (j < components)
            step.keys.data[(first_token + t) * step.keys.token_stride + head * step.keys.head_stride + first_component + j] = s.keys[j * (tile_tokens + 1) + t];
    }
}

// One thread per element; thread block (elements / 256, KV head).
__global__ void __launch_bounds__(threads) read_values_kernel(read_step step) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const std::int32_t size = step.layer.value_size, i = static_cast<std::int32_t>(blockIdx.x * threads + threadIdx.x);
    if (i >= step.count * size) return;
    const std::byte* page = step.rows + step.page.first + static_cast<std::uint64_t>(head) * step.page.stride;
    const std::int64_t skip = static_cast<std::int64_t>(step.layer.key_size) * step.capacity + static_cast<std::int64_t>(step.first) * size;
    step.values.data[i / size * step.values.token_stride + head * step.values.head_stride + i % size] = load_element(page, step.layer.stored, skip + i);
}

}  // namespace

void read_rows(const read_step& step, stream s) {
    const auto parts = [](std::int32_t count, std::int32_t size) { return static_cast<unsigned>((count + size - 1) / size); };
    const auto heads = static_cast<unsigned>(step.layer.kv_heads);
    launch("read_rows (keys)", s, dim3(parts(step.layer.key_size, tile_size), heads, parts(step.count, tile_tokens)), dim3(threads), sizeof(key_tile),
           &read_keys_kernel, step);
    launch("read_rows (values)", s, dim3(parts(step.count * step.layer.value_size, threads), heads), dim3(threads), 0, &read_values_kernel, step);
}

}  // namespace sekv::cuda
