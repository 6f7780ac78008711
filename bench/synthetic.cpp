#include "synthetic.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "sekv/exec/row_ops.hpp"

namespace sekv::bench {
namespace {

constexpr std::int64_t rows_at_once = 256;

/// splitmix64 (Steele et al. 2014).
class random_stream {
public:
    explicit random_stream(std::uint64_t seed) : state_(seed) { (void)next(); }
    std::uint64_t next() {
        auto z = (state_ += 0x9e3779b97f4a7c15U);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
        return z ^ (z >> 31);
    }
    /// Nearly normal, deviation 1: the sum of four uniforms of 16 bits.
    float normal() {
        const auto x = next();
        const auto sum = static_cast<std::int32_t>((x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48));
        return static_cast<float>(sum - 2 * 0xffff) * (1.7320508F / 0x1p16F);
    }

private:
    std::uint64_t state_;
};

std::uint64_t seed_of(std::uint64_t seed, std::uint64_t part, std::int64_t head, std::int64_t token) {
    return seed ^ (part << 60) ^ (static_cast<std::uint64_t>(head) << 48) ^ (static_cast<std::uint64_t>(token) * 0xd1342543de82ef95U);
}

std::vector<float> spectrum(std::int32_t heads, std::int32_t size, float decay, float gain, std::uint64_t seed) {
    std::vector<float> mix(static_cast<std::size_t>(heads) * static_cast<std::size_t>(size * size));
    random_stream r(seed);
    for (std::size_t i = 0; i < mix.size(); ++i) {
        const auto row = static_cast<std::int32_t>(i / static_cast<std::size_t>(size)) % size;
        mix[i] = gain * r.normal() * std::pow(decay, static_cast<float>(row));
    }
    return mix;
}

}  // namespace

synthetic_layer::synthetic_layer(const layer_shape& shape, std::uint64_t seed)
    : shape_(shape),
      seed_(seed),
      // Logits of a query that points at a key grow with sqrt(d): the gain keeps their spread that of d = 64.
      key_mix_(spectrum(shape.kv_heads, shape.key_size, 0.9F, 4.0F / static_cast<float>(std::sqrt(shape.key_size)), seed + 1)),
      value_mix_(spectrum(shape.kv_heads, shape.value_size, 0.97F, 1.0F / 6.0F, seed + 2)) {}

void synthetic_layer::make_row(part which, std::int64_t head, std::int64_t begin, std::int64_t count, std::int32_t size, const std::vector<float>& mix,
                               std::vector<float>& noise, float* out, std::int64_t stride) const {
    noise.resize(static_cast<std::size_t>(count * size));
    for (std::int64_t i = 0; i < count; ++i) {
        random_stream r(seed_of(seed_, static_cast<std::uint64_t>(which), head, begin + i));
        for (std::int32_t j = 0; j < size; ++j) noise[static_cast<std::size_t>(i * size + j)] = r.normal();
    }
    host::gemm(noise.data(), size, mix.data() + head * size * size, size, out, stride, count, size, size, false);
}

void synthetic_layer::rows(part which, std::int64_t begin, std::int64_t count, std::int32_t size, const std::vector<float>& mix, float* out,
                           executor& threads) const {
    const auto stride = static_cast<std::int64_t>(shape_.kv_heads) * size;
    threads.run((count + rows_at_once - 1) / rows_at_once, [&](std::int64_t i, std::int32_t) {
        std::vector<float> noise;
        const auto first = i * rows_at_once;
        for (std::int64_t h = 0; h < shape_.kv_heads; ++h)
            make_row(which, h, begin + first, std::min(rows_at_once, count - first), size, mix, noise, out + first * stride + h * size, stride);
    });
}

void synthetic_layer::keys(std::int64_t begin, std::int64_t count, float* out, executor& threads) const {
    rows(part::key, begin, count, shape_.key_size, key_mix_, out, threads);
}

void synthetic_layer::values(std::int64_t begin, std::int64_t count, float* out, executor& threads) const {
    rows(part::value, begin, count, shape_.value_size, value_mix_, out, threads);
}

std::vector<float> synthetic_layer::queries(std::int64_t length, std::int64_t count, std::uint64_t seed) const {
    constexpr float kept = 0.8F;
    const auto size = shape_.key_size;
    const auto row = static_cast<std::size_t>(shape_.query_heads() * size);
    std::vector<float> out(static_cast<std::size_t>(count) * row), direction(row), target(static_cast<std::size_t>(size)), noise;
    random_stream r(seed);
    for (std::int32_t h = 0; h < shape_.query_heads(); ++h) {
        float* d = direction.data() + h * size;
        for (std::int32_t j = 0; j < size; ++j) d[j] = r.normal();
        for (std::int64_t t = 0; t < count; ++t) {
            if (t == 0 || r.next() % 4 == 0) {
                const auto at = static_cast<std::int64_t>(r.next() % static_cast<std::uint64_t>(length));
                make_row(part::key, h / shape_.group, at, 1, size, key_mix_, noise, target.data(), size);
            }
            float* q = out.data() + static_cast<std::size_t>(t) * row + static_cast<std::size_t>(h * size);
            for (std::int32_t j = 0; j < size; ++j) {
                d[j] = kept * d[j] + std::sqrt(1 - kept * kept) * r.normal();
                q[j] = d[j] + target[static_cast<std::size_t>(j)];
            }
        }
    }
    return out;
}

}  // namespace sekv::bench
