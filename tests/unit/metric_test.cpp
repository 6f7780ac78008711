#include "sekv/codec/metric.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "oracle/random.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240803;

// sum_i decay^(tokens - 1 - i) sum_g q q^T over tokens of `stride` floats, in double.
std::vector<double> naive_moment(const std::vector<float>& queries, std::size_t d, std::int64_t stride, std::int64_t tokens, std::int32_t group, double decay) {
    std::vector<double> m(d * d, 0.0);
    for (std::int64_t t = 0; t < tokens; ++t) {
        const double w = std::pow(decay, static_cast<double>(tokens - 1 - t));
        for (std::int32_t g = 0; g < group; ++g) {
            const float* q = queries.data() + t * stride + static_cast<std::int64_t>(g) * static_cast<std::int64_t>(d);
            for (std::size_t i = 0; i < d; ++i) {
                for (std::size_t j = 0; j < d; ++j) m[i * d + j] += w * q[i] * q[j];
            }
        }
    }
    return m;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& expected, double tolerance) {
    double largest = 0;
    for (const auto x : expected) largest = std::max(largest, std::abs(x));
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], tolerance * largest) << i;
}

TEST(Metric, WeighsQueriesExponentially) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    const double decay = std::exp(-1.0 / 50);
    for (const std::int32_t d : {64, 80}) {
        for (const std::int32_t group : {1, 3, 8}) {
            for (const std::int64_t tokens : {1, 63, 64, 65, 300}) {
                const std::int64_t stride = static_cast<std::int64_t>(group) * d + 5;
                const auto queries = random.normals(tokens * stride);
                const auto size = static_cast<std::size_t>(d);
                std::vector<float> m(size * size, 0.0F);
                const double faded = add_queries({m.data(), d}, queries.data(), stride, tokens, group, decay);
                EXPECT_NEAR(faded, std::pow(decay, static_cast<double>(tokens)), 1e-12);
                expect_near(m, naive_moment(queries, size, stride, tokens, group, decay), 1e-5);
            }
        }
    }
}

TEST(Metric, ChunksAddUpToTheWhole) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 1);
    const std::int64_t tokens = 500, stride = 2 * 64;
    const auto queries = random.normals(tokens * stride);
    for (const double decay : {1.0, 0.99}) {
        std::vector<float> m(64 * 64, 0.0F);
        for (std::int64_t at = 0; at < tokens;) {
            const auto n = std::min<std::int64_t>(1 + random.below<std::int64_t>(90), tokens - at);
            (void)add_queries({m.data(), 64}, queries.data() + at * stride, stride, n, 2, decay);
            at += n;
        }
        expect_near(m, naive_moment(queries, 64, stride, tokens, 2, decay), 2e-5);
    }
}

// Cholesky without pivoting succeeds exactly on positive definite matrices.
bool positive_definite(std::vector<double> m, std::size_t d) {
    for (std::size_t k = 0; k < d; ++k) {
        if (!(m[k * d + k] > 0)) return false;
        const double root = std::sqrt(m[k * d + k]);
        for (std::size_t i = k; i < d; ++i) m[i * d + k] /= root;
        for (std::size_t i = k + 1; i < d; ++i) {
            for (std::size_t j = k + 1; j <= i; ++j) m[i * d + j] -= m[i * d + k] * m[j * d + k];
        }
    }
    return true;
}

double trace_of(const std::vector<double>& m, std::size_t d) {
    double sum = 0;
    for (std::size_t i = 0; i < d; ++i) sum += m[i * d + i];
    return sum;
}

TEST(Metric, BlendIsSymmetricDefiniteAndKeepsTheTrace) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 2);
    for (const std::int64_t tokens : {1, 5, 100, 2000}) {
        const auto queries = random.normals(tokens * 64);
        std::vector<float> own(64 * 64, 0.0F);
        (void)add_queries({own.data(), 64}, queries.data(), 64, tokens, 1, 1.0);
        const auto m = blend_metric(own.data(), static_cast<double>(tokens), nullptr, 64, 0.01);
        EXPECT_TRUE(positive_definite(m, 64)) << tokens;
        for (std::size_t i = 0; i < 64; ++i) {
            for (std::size_t j = 0; j < i; ++j) EXPECT_EQ(m[i * 64 + j], m[j * 64 + i]);
        }
        double trace = 0;
        for (std::size_t i = 0; i < 64; ++i) trace += static_cast<double>(own[i * 65]) / static_cast<double>(tokens);
        EXPECT_NEAR(trace_of(m, 64), trace, 1e-6 * trace);
        const double l = std::max(0.01, 64 / (64 + 8.0 * static_cast<double>(tokens)));
        EXPECT_NEAR(m[1], (1 - l) * 0.5 * (static_cast<double>(own[1]) + own[64]) / static_cast<double>(tokens), 1e-9);
        EXPECT_NEAR(m[0], (1 - l) * own[0] / static_cast<double>(tokens) + l * trace / 64, 1e-9 * trace);
    }
}

TEST(Metric, ElementsWhoseSquaresOverflowCountAsZero) {
    const std::vector<float> queries{1.0F, 1e25F, 2.0F, -0x1p56F, 3.0F, -INFINITY, NAN, 0x1p55F};  // two tokens of one query of four
    std::vector<float> m(16, 0.0F), expected(16, 0.0F);
    (void)add_queries({m.data(), 4}, queries.data(), 4, 2, 1, 1.0);
    const float kept[2][4] = {{1, 0, 2, 0}, {3, 0, 0, 0x1p55F}};
    for (std::size_t i = 0; i < 16; ++i) {
        for (const auto& q : kept) expected[i] += q[i / 4] * q[i % 4];
    }
    EXPECT_EQ(m, expected);
}

TEST(Metric, WithoutSamplesItIsTheIdentityOrThePrior) {
    const std::vector<float> own(64 * 64, 0.0F);
    const auto identity = blend_metric(own.data(), 0, nullptr, 64, 0.01);
    for (std::size_t i = 0; i < 64; ++i) {
        for (std::size_t j = 0; j < 64; ++j) EXPECT_EQ(identity[i * 64 + j], i == j ? 1.0 : 0.0);
    }
    const auto zero_queries = blend_metric(own.data(), 40, nullptr, 64, 0.01);
    EXPECT_EQ(zero_queries, identity);

    std::vector<double> prior(64 * 64, 0.0);
    for (std::size_t i = 0; i < 64; ++i) prior[i * 65] = static_cast<double>(i + 1);
    const auto m = blend_metric(own.data(), 0, prior.data(), 64, 0.05);
    const double l = std::max(0.05, 64 / (64 + 8.0 * 256));
    for (std::size_t i = 0; i < 64; ++i) EXPECT_NEAR(m[i * 65], (1 - l) * static_cast<double>(i + 1) + l * 32.5, 1e-12);
}

TEST(Metric, MixesThePriorBySampleCount) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 3);
    const auto queries = random.normals(1000 * 64);
    std::vector<float> own(64 * 64, 0.0F);
    (void)add_queries({own.data(), 64}, queries.data(), 64, 1000, 1, 1.0);
    std::vector<double> prior(64 * 64, 0.0);
    for (std::size_t i = 0; i < 64; ++i) prior[i * 65] = 3.0;
    for (const double samples : {1.0, 256.0, 10000.0}) {
        auto scaled = own;
        for (auto& x : scaled) x *= static_cast<float>(samples / 1000);
        const auto m = blend_metric(scaled.data(), samples, prior.data(), 64, 0.01);
        const double w = samples / (samples + 256);
        double trace = 0;
        for (std::size_t i = 0; i < 64; ++i) trace += w * own[i * 65] / 1000 + (1 - w) * 3;
        EXPECT_NEAR(trace_of(m, 64), trace, 1e-5 * trace) << samples;
        EXPECT_TRUE(positive_definite(m, 64));
    }
}

}  // namespace
}  // namespace sekv
