// The smallest program that needs both sekv's headers and its compiled library.
#include <atomic>
#include <cstdint>
#include <cstdio>

#include "sekv/core/shape.hpp"
#include "sekv/exec/executor.hpp"

int main() {
    sekv::layer_shape layer;
    layer.kv_heads = 3;
    layer.group = 3;
    layer.key_size = layer.value_size = 64;
    const sekv::model_shape model{.layers = {layer, layer}, .fingerprint = "consumer"};
    model.validate();

    std::atomic<std::int64_t> sum = 0;
    sekv::make_thread_pool(2)->run(100, [&](std::int64_t index, std::int32_t) { sum += index; });
    if (model.full_bytes_per_token() != 1536 || sum != 4950) return 1;
    std::puts("sekv consumer: ok");
}
