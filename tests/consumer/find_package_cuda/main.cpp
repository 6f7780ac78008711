// An outside project on the CUDA backend, with no CUDA compiler of its own. Where there is no device, the backend says so.
#include <cstdio>

#include "sekv/cuda.hpp"

int main() {
    try {
        const sekv::layer_shape layer{.kv_heads = 1, .group = 3, .key_size = 64, .value_size = 64};
        const sekv::model_shape model{.layers = {layer}, .fingerprint = "consumer"};
        sekv::cuda_cache cache(model);
        cache.close(cache.open({.capacity = 4096}));
        std::puts("sekv consumer: ok on a device");
    } catch (const sekv::device_error& e) {
        std::printf("sekv consumer: ok, without a device: %s\n", e.what());
    }
}
