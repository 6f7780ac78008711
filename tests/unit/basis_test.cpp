#include "sekv/codec/basis.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "oracle/random.hpp"
#include "sekv/core/scalar.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240802;
using matrix = std::vector<double>;

// A metric with eigenvalues of many sizes, plus `floor` on the diagonal.
matrix random_metric(oracle::draws& random, std::int32_t size, double decay, double floor) {
    const auto d = static_cast<std::size_t>(size);
    const auto queries = oracle::falling_rows(random, 4 * size, size, decay);
    matrix m(d * d, 0.0);
    for (std::size_t r = 0; r < queries.size(); r += d) {
        for (std::size_t i = 0; i < d; ++i) {
            for (std::size_t j = 0; j < d; ++j) m[i * d + j] += static_cast<double>(queries[r + i]) * queries[r + j] / static_cast<double>(4 * size);
        }
    }
    for (std::size_t i = 0; i < d; ++i) m[i * d + i] += floor;
    return m;
}

// Codes c = B^T (k - mean) in double.
matrix codes_of(const key_basis& basis, const std::vector<float>& keys) {
    const auto d = static_cast<std::size_t>(basis.size);
    matrix codes(keys.size(), 0.0);
    for (std::size_t r = 0; r < keys.size(); r += d) {
        for (std::size_t i = 0; i < d; ++i) {
            const double x = static_cast<double>(keys[r + i]) - basis.mean[i];
            for (std::size_t j = 0; j < d; ++j) codes[r + j] += x * basis.b[i * d + j];
        }
    }
    return codes;
}

void expect_inverse(const key_basis& basis) {
    const auto d = static_cast<std::size_t>(basis.size);
    for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = 0; j < d; ++j) {
            double sum = 0, mass = 0;
            for (std::size_t k = 0; k < d; ++k) {
                const double term = static_cast<double>(basis.b[k * d + i]) * basis.a[k * d + j];
                sum += term;
                mass += std::abs(term);
            }
            ASSERT_NEAR(sum, i == j ? 1.0 : 0.0, 3e-7 * mass + 1e-9) << "B^T A at " << i << ", " << j;
        }
    }
}

void expect_variances(const key_basis& basis, const std::vector<float>& keys) {
    const auto d = static_cast<std::size_t>(basis.size);
    const auto codes = codes_of(basis, keys);
    const auto n = static_cast<double>(keys.size() / d);
    for (std::size_t i = 0; i < d; ++i) {
        ASSERT_LE(basis.variance[i], basis.variance[i > 0 ? i - 1 : 0]);
        for (std::size_t j = 0; j <= i; ++j) {
            double sum = 0;
            for (std::size_t r = 0; r < codes.size(); r += d) sum += codes[r + i] * codes[r + j];
            ASSERT_NEAR(sum / n, i == j ? basis.variance[i] : 0.0, 3e-6 * basis.variance[0]) << i << ", " << j;
        }
    }
}

void expect_logits(oracle::draws& random, const key_basis& basis, const std::vector<float>& keys) {
    const auto d = static_cast<std::size_t>(basis.size);
    const auto codes = codes_of(basis, keys);
    const auto q = random.normals(basis.size);
    matrix t(d, 0.0);
    for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = 0; j < d; ++j) t[j] += static_cast<double>(q[i]) * basis.a[i * d + j];
    }
    for (std::size_t r = 0; r < keys.size(); r += d) {
        double logit = 0, coded = 0, mass = 0;
        for (std::size_t j = 0; j < d; ++j) {
            logit += static_cast<double>(q[j]) * keys[r + j];
            coded += static_cast<double>(q[j]) * basis.mean[j] + t[j] * codes[r + j];
            for (std::size_t k = 0; k < d; ++k) mass += std::abs(static_cast<double>(basis.a[k * d + j]) * codes[r + j] * q[k]);
        }
        ASSERT_NEAR(coded, logit, 1e-6 * mass + 1e-6);
    }
}

TEST(Basis, InvertsDecorrelatesAndKeepsLogits) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    for (const std::int32_t d : {64, 80, 128}) {
        const auto keys = oracle::falling_rows(random, 500, d);
        const auto metric = random_metric(random, d, 0.95, 1e-2);
        for (const double power : {0.0, 0.5, 1.0, 2.0}) {
            SCOPED_TRACE(testing::Message() << "size " << d << " power " << power);
            const auto basis = fit_keys(keys.data(), 500, d, metric, power);
            expect_inverse(basis);
            expect_variances(basis, keys);
            expect_logits(random, basis, keys);
        }
    }
}

TEST(Basis, PowerZeroIsPlainPca) {
    oracle::draws random(seed + 1);
    const auto keys = oracle::falling_rows(random, 300, 64);
    const auto basis = fit_keys(keys.data(), 300, 64, random_metric(random, 64, 0.8, 1e-3), 0.0);
    double trace = 0;
    for (std::size_t r = 0; r < keys.size(); ++r) trace += std::pow(static_cast<double>(keys[r]) - basis.mean[r % 64], 2) / 300;
    EXPECT_NEAR(std::accumulate(basis.variance.begin(), basis.variance.end(), 0.0), trace, 1e-5 * trace);
    for (std::size_t i = 0; i < basis.a.size(); ++i) ASSERT_NEAR(basis.a[i], basis.b[i], 1e-6);  // orthonormal: A = B = U
}

// E[((A^T q) . e)^2] over the metric's own queries is proportional to |e|^2: the reason for uniform steps.
TEST(Basis, CodeErrorIsLogitError) {
    oracle::draws random(seed + 2);
    const auto keys = oracle::falling_rows(random, 300, 64);
    const auto m = random_metric(random, 64, 0.95, 1e-2);
    const auto basis = fit_keys(keys.data(), 300, 64, m, 1.0);
    double scale = 0;
    for (std::size_t i = 0; i < 64; ++i) {
        for (std::size_t j = 0; j < 64; ++j) {
            double sum = 0;  // (A^T M A)_ij
            for (std::size_t k = 0; k < 64; ++k) {
                for (std::size_t l = 0; l < 64; ++l) sum += basis.a[k * 64 + i] * m[k * 64 + l] * basis.a[l * 64 + j];
            }
            if (i == 0 && j == 0) scale = sum;
            ASSERT_NEAR(sum / scale, i == j ? 1.0 : 0.0, 1e-4) << i << ", " << j;
        }
    }
}

TEST(Basis, RankDeficientKeysAndOneKey) {
    oracle::draws random(seed + 3);
    const auto metric = random_metric(random, 64, 0.9, 1e-2);
    const auto directions = random.normals(5 * 64);
    std::vector<float> keys(200 * 64, 0.0F);
    for (std::size_t r = 0; r < 200; ++r) {
        for (std::size_t k = 0; k < 5; ++k) {
            const float z = random.normal();
            for (std::size_t j = 0; j < 64; ++j) keys[r * 64 + j] += z * directions[k * 64 + j];
        }
    }
    const auto basis = fit_keys(keys.data(), 200, 64, metric, 1.0);
    expect_inverse(basis);
    expect_variances(basis, keys);
    EXPECT_GT(basis.variance[4], 1e-3 * basis.variance[0]);
    EXPECT_LT(basis.variance[5], 1e-10 * basis.variance[0]);

    const std::vector<float> one(keys.begin(), keys.begin() + 64);
    const auto single = fit_keys(one.data(), 1, 64, metric, 1.0);
    EXPECT_EQ(single.mean, one);
    expect_inverse(single);
    for (const auto v : single.variance) EXPECT_EQ(v, 0.0);
}

TEST(Basis, IllConditionedMetric) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 4);
    const auto keys = oracle::falling_rows(random, 300, 64);
    for (const double floor : {0.0, 1e-14}) {
        const auto basis = fit_keys(keys.data(), 300, 64, random_metric(random, 64, 0.5, floor), 1.0);
        for (const auto x : basis.a) ASSERT_TRUE(std::isfinite(x));
        expect_inverse(basis);
        expect_variances(basis, keys);
    }
    matrix rank_one(64 * 64, 1.0);
    expect_inverse(fit_keys(keys.data(), 300, 64, rank_one, 1.0));
}

// A is stored in fp16: queries of any magnitude must leave it there.
TEST(Basis, DecoderFitsFp16ForQueriesOfAnyScale) {
    oracle::draws random(seed + 5);
    const auto keys = oracle::falling_rows(random, 300, 64);
    const auto metric = random_metric(random, 64, 0.95, 1e-2);
    for (const double scale : {1e-20, 1e-8, 1.0, 1e8, 1e20}) {
        auto m = metric;
        for (auto& x : m) x *= scale;
        for (const double power : {0.0, 1.0, 2.0}) {
            const auto basis = fit_keys(keys.data(), 300, 64, m, power);
            double error = 0, norm = 0;
            for (const auto x : basis.a) {
                const double rounded = static_cast<float>(fp16(x));
                ASSERT_TRUE(std::isfinite(rounded)) << x << " scale " << scale << " power " << power;
                error += (rounded - x) * (rounded - x);
                norm += static_cast<double>(x) * x;
            }
            EXPECT_LT(std::sqrt(error / norm), 5e-4) << "scale " << scale << " power " << power;
            expect_inverse(basis);
        }
    }
}

TEST(Basis, ValuesAreDecorrelatedAtPerTokenScale) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 6);
    for (const std::int32_t size : {64, 96}) {
        const auto d = static_cast<std::size_t>(size);
        auto values = oracle::falling_rows(random, 400, size);
        for (std::size_t r = 0; r < 400; ++r) {
            const auto s = static_cast<float>(std::exp2(4 * random.uniform()));
            for (std::size_t j = 0; j < d; ++j) values[r * d + j] = s * values[r * d + j] + 0.3F;
        }
        const auto basis = fit_values(values.data(), 400, size);
        std::vector<double> codes(values.size(), 0.0);
        double scales = 0;
        for (std::size_t r = 0; r < values.size(); r += d) {
            const double s = scale_of(scale_byte(values.data() + r, basis.mean.data(), size));
            scales += s * s;
            for (std::size_t i = 0; i < d; ++i) {
                for (std::size_t j = 0; j < d; ++j) codes[r + j] += (static_cast<double>(values[r + i]) - basis.mean[i]) / s * basis.u[i * d + j];
            }
        }
        EXPECT_NEAR(basis.typical_scale, std::sqrt(scales / 400), 1e-5 * basis.typical_scale);
        EXPECT_NEAR(std::accumulate(basis.variance.begin(), basis.variance.end(), 0.0), static_cast<double>(d), 0.1 * static_cast<double>(d));
        for (std::size_t i = 0; i < d; ++i) {
            for (std::size_t j = 0; j <= i; ++j) {
                double sum = 0, dot = 0;
                for (std::size_t r = 0; r < codes.size(); r += d) sum += codes[r + i] * codes[r + j] / 400;
                for (std::size_t k = 0; k < d; ++k) dot += static_cast<double>(basis.u[k * d + i]) * basis.u[k * d + j];
                ASSERT_NEAR(sum, i == j ? basis.variance[i] : 0.0, 1e-5 * basis.variance[0]);
                ASSERT_NEAR(dot, i == j ? 1.0 : 0.0, 1e-5);
            }
        }
    }
}

TEST(Basis, ScaleBytesAreMonotoneAndWithinASixteenthOfAnOctave) {
    const std::vector<float> mean(64, 0.25F);
    int last = 0;
    for (double exponent = -25; exponent < 14; exponent += 0.01) {
        std::vector<float> value(mean);
        const double rms = std::exp2(exponent);
        for (std::size_t j = 0; j < 64; ++j) value[j] = static_cast<float>(j % 2 == 0 ? rms : -rms);
        const std::vector<float> zero(64, 0.0F);
        const auto byte = scale_byte(value.data(), zero.data(), 64);
        EXPECT_GE(byte, last);
        last = byte;
        const bool coded = exponent > -19.9 && exponent < 11.8;
        EXPECT_LE(coded ? std::abs(std::log2(scale_of(byte)) - exponent) : 0.0, 1.0 / 16 + 1e-5) << exponent;
    }
    EXPECT_EQ(last, 255);
    EXPECT_EQ(scale_byte(mean.data(), mean.data(), 64), 0);
    for (int b = 1; b < 256; ++b) EXPECT_GT(scale_of(static_cast<std::uint8_t>(b)), scale_of(static_cast<std::uint8_t>(b - 1)));
}

TEST(Basis, ZeroValuesStayFinite) {
    const std::vector<float> zeros(10 * 64, 0.0F);
    const auto basis = fit_values(zeros.data(), 10, 64);
    for (const auto x : basis.u) EXPECT_TRUE(std::isfinite(x));
    for (const auto x : basis.variance) EXPECT_EQ(x, 0.0);
    EXPECT_GT(basis.typical_scale, 0.0F);
    EXPECT_TRUE(std::isfinite(1.0F / basis.typical_scale));
}

}  // namespace
}  // namespace sekv
