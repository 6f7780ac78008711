// Seeded draws for property tests, and how many of them to make.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>
#include <vector>

namespace sekv::oracle {

/// Iterations of a property test: 100 times fewer under SEKV_TEST_SHORT=1, at least one.
[[nodiscard]] inline std::int64_t iterations(std::int64_t full) {
    const char* s = std::getenv("SEKV_TEST_SHORT");
    return s != nullptr && std::string_view(s) == "1" ? std::max<std::int64_t>(1, full / 100) : full;
}

class draws {
public:
    explicit draws(std::uint32_t seed) : engine_(seed) {}

    [[nodiscard]] float normal(float spread = 1.0F) { return spread * std::normal_distribution<float>()(engine_); }
    [[nodiscard]] std::vector<float> normals(std::int64_t count, float spread = 1.0F) {
        std::vector<float> v(static_cast<std::size_t>(count));
        for (auto& x : v) x = normal(spread);
        return v;
    }
    /// Uniform in [0, 1).
    [[nodiscard]] double uniform() { return std::uniform_real_distribution<double>()(engine_); }
    /// Uniform integer in [0, count).
    template <class T>
    [[nodiscard]] T below(T count) {
        return static_cast<T>(std::uniform_int_distribution<std::int64_t>(0, static_cast<std::int64_t>(count) - 1)(engine_));
    }
    [[nodiscard]] std::vector<std::uint8_t> bytes(std::int64_t count) {
        std::vector<std::uint8_t> v(static_cast<std::size_t>(count));
        for (auto& x : v) x = static_cast<std::uint8_t>(below(256));
        return v;
    }

private:
    std::mt19937 engine_;
};

/// Rows [count, size] whose components fall off like decay^j before a random rotation-free mix: the spectrum of real keys.
[[nodiscard]] inline std::vector<float> falling_rows(draws& random, std::int64_t count, std::int32_t size, double decay = 0.9) {
    const auto d = static_cast<std::size_t>(size);
    auto mix = random.normals(static_cast<std::int64_t>(d * d));
    for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = 0; j < d; ++j) mix[i * d + j] *= static_cast<float>(std::pow(decay, static_cast<double>(i)));
    }
    std::vector<float> rows(static_cast<std::size_t>(count) * d, 0.0F);
    for (std::size_t r = 0; r < static_cast<std::size_t>(count); ++r) {
        for (std::size_t i = 0; i < d; ++i) {
            const float z = random.normal(0.5F);
            for (std::size_t j = 0; j < d; ++j) rows[r * d + j] += z * mix[i * d + j];
        }
    }
    return rows;
}

}  // namespace sekv::oracle
