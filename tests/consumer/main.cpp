// An engine's use of sekv, as an outside project: a prompt, a few decode steps, and the bytes.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "sekv/sekv.hpp"

int main() {
    const sekv::layer_shape layer{.kv_heads = 1, .group = 3, .key_size = 64, .value_size = 64};
    const sekv::model_shape model{.layers = {layer, layer}, .fingerprint = "consumer"};
    sekv::cache_options options;
    options.device_budget = 8 << 20;
    sekv::cache cache(model, options, {}, sekv::host_backend(2));
    const auto seq = cache.open({.capacity = 4096});

    std::vector<float> keys(32 * 64), values(32 * 64), queries(32 * 3 * 64), out(queries.size());
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = std::sin(static_cast<float>(i)), values[i] = 0.5F;
    for (std::size_t i = 0; i < queries.size(); ++i) queries[i] = std::cos(static_cast<float>(i));

    const auto step = [&](std::int64_t tokens, sekv::resolution how) {
        const sekv::batch_item item{seq, tokens};
        cache.reserve(seq, tokens);
        for (std::int32_t l = 0; l < 2; ++l) {
            cache.append(seq, l, sekv::rows(keys.data(), tokens, 1, 64), sekv::rows(values.data(), tokens, 1, 64));
            cache.attend({&item, 1}, l, sekv::rows(queries.data(), tokens, 3, 64), how, sekv::out_rows(out.data(), tokens, 3, 64));
        }
        cache.observe(seq, std::vector<float>(static_cast<std::size_t>(tokens), 1.0F));
    };
    step(32, sekv::resolution::full);
    cache.end_prefill(seq);
    for (int i = 0; i < 8; ++i) step(1, sekv::resolution::adaptive);

    if (cache.length(seq) != 40 || std::abs(out[0] - 0.5F) > 1e-4F) return 1;
    cache.close(seq);
    std::puts("sekv consumer: ok");
}
