#include "sekv/exec/row_ops.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "hwy/targets.h"

namespace sekv::host {
namespace {

constexpr auto infinity = std::numeric_limits<float>::infinity();
constexpr auto nan = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint32_t seed = 20240711;

/// Runs every test once per instruction set that this machine supports.
class RowOps : public ::testing::TestWithParam<std::int64_t> {
protected:
    void SetUp() override { use(GetParam()); }
    void TearDown() override { use(0); }
    static void use(std::int64_t target) {
        hwy::SetSupportedTargetsForTest(target);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }

    std::vector<float> normal(std::size_t count, float spread = 1.0F) {
        std::normal_distribution<float> draw(0.0F, spread);
        std::vector<float> v(count);
        for (auto& x : v) x = draw(random_);
        return v;
    }
    template <class T>
    std::vector<T> rows_of(std::int64_t count) {
        std::vector<T> v(static_cast<std::size_t>(count));
        const auto exact = normal(v.size());
        std::transform(exact.begin(), exact.end(), v.begin(), [](float x) { return T(x); });
        return v;
    }

    std::mt19937 random_{seed};
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// |difference| allowed for an fp32 sum whose terms have absolute values that add up to `mass`.
double fp32_sum_error(double mass) { return 4e-6 * mass + 1e-30; }

template <class T>
double exact(T x) {
    return static_cast<double>(static_cast<float>(x));
}

constexpr std::int64_t ragged_counts[] = {0, 1, 7, 63, 64, 65, 1000};
constexpr std::int32_t head_sizes[] = {64, 80, 96, 128, 256};
constexpr std::int32_t groups[] = {1, 2, 3, 4, 5, 8, 16};

TEST_P(RowOps, NamesTheTarget) { EXPECT_STREQ(target_name(), hwy::TargetName(GetParam())); }

template <class T>
bool same(T a, T b) {
    if (std::isnan(static_cast<float>(a))) return std::isnan(static_cast<float>(b));
    return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
void expect_conversions(std::vector<float> source) {
    for (const float x :
         {0.0F, -0.0F, infinity, -infinity, nan, -nan, 65504.0F, 65520.0F, -70000.0F, 6e-8F, 2.9e-8F, -3.1e-8F, 1e-40F, 3.4028235e38F, 3.39e38F})
        source.push_back(x);
    source.push_back(std::bit_cast<float>(0x7f800001U));  // a signalling NaN whose payload bf16 would cut off
    source.push_back(std::bit_cast<float>(0x3f808000U));  // halfway between bf16 neighbours, to even
    source.push_back(std::bit_cast<float>(0x3f818000U));
    for (std::size_t count = 0; count <= source.size(); count += count < 40 ? 1 : 97) {
        std::vector<T> narrow(count + 1);
        const auto* const from = source.data() + (source.size() - count);
        from_float(from, count, narrow.data());
        std::vector<float> wide(count + 1, -7.0F);
        to_float(narrow.data(), dtype_of<T>, count, wide.data());
        for (std::size_t i = 0; i < count; ++i) {
            ASSERT_TRUE(same(narrow[i], T(from[i]))) << from[i] << " seed " << seed;
            ASSERT_TRUE(same(wide[i], static_cast<float>(narrow[i]))) << from[i] << " seed " << seed;
        }
        EXPECT_TRUE(same(narrow[count], T{}));
        EXPECT_EQ(wide[count], -7.0F);
    }
}

TEST_P(RowOps, ConvertsLikeTheScalars) {
    auto source = normal(500, 3.0F);
    for (auto& x : normal(300)) source.push_back(std::exp(12.0F * x));  // overflow and subnormals of fp16
    expect_conversions<float>(source);
    expect_conversions<bf16>(source);
    expect_conversions<fp16>(source);
}

TEST_P(RowOps, WidensEveryFp16AndBf16) {
    std::vector<fp16> halves(65536);
    std::vector<bf16> brains(65536);
    for (std::size_t i = 0; i < 65536; ++i) halves[i].bits = brains[i].bits = static_cast<std::uint16_t>(i);
    std::vector<float> wide(65536);
    to_float(halves.data(), dtype::f16, wide.size(), wide.data());
    for (std::size_t i = 0; i < 65536; ++i) ASSERT_TRUE(same(wide[i], static_cast<float>(halves[i]))) << i;
    to_float(brains.data(), dtype::bf16, wide.size(), wide.data());
    for (std::size_t i = 0; i < 65536; ++i) ASSERT_TRUE(same(wide[i], static_cast<float>(brains[i]))) << i;
}

TEST_P(RowOps, FindsAnyNonFiniteElement) {
    for (const std::size_t count : {0U, 1U, 7U, 16U, 65U}) {
        auto v = normal(count);
        EXPECT_TRUE(all_finite(v.data(), count));
        for (std::size_t i = 0; i < count; ++i) {
            for (const float bad : {nan, infinity, -infinity}) {
                const auto kept = std::exchange(v[i], bad);
                EXPECT_FALSE(all_finite(v.data(), count)) << i << " of " << count;
                v[i] = kept;
            }
        }
    }
    const float most = std::numeric_limits<float>::max();
    EXPECT_TRUE(all_finite(&most, 1));
}

TEST_P(RowOps, FindsTheLargest) {
    EXPECT_EQ(max_of(nullptr, 0), -infinity);
    for (const auto count : ragged_counts) {
        auto v = normal(at(count));
        for (auto& x : v) x -= 10.0F;
        if (count == 0) continue;
        EXPECT_EQ(max_of(v.data(), count), *std::max_element(v.begin(), v.end()));
        std::fill(v.begin(), v.end(), -infinity);
        EXPECT_EQ(max_of(v.data(), count), -infinity);
    }
}

TEST_P(RowOps, ExponentiatesAccurately) {
    for (const auto count : {0L, 1L, 7L, 16L, 65L, 1000L, 20001L}) {
        auto v = normal(at(count), 25.0F);
        for (auto& x : v) x = std::min(x, 40.0F);
        if (count > 6) v[3] = -infinity, v[5] = -3e38F;
        const auto source = v;
        const float shift = 3.25F;
        const auto sum = exp_sum(v.data(), count, shift);
        double expected = 0;
        for (std::size_t i = 0; i < at(count); ++i) {
            const auto e = std::exp(static_cast<double>(source[i] - shift));
            expected += e;
            ASSERT_NEAR(v[i], e, 1e-6 * e + 1e-38) << source[i] << " seed " << seed;
        }
        EXPECT_NEAR(sum, expected, 2e-6 * expected);
        if (count > 6) {
            EXPECT_EQ(v[3], 0.0F);
        }
    }
}

TEST_P(RowOps, ScalesAndCaps) {
    for (const auto count : ragged_counts) {
        auto v = normal(at(count), 40.0F);
        if (count > 7) v[1] = 1e9F, v[2] = -infinity;
        auto capped = v;
        soft_cap(capped.data(), count, 30.0F);
        for (std::size_t i = 0; i < v.size(); ++i) {
            const auto e = 30.0 * std::tanh(static_cast<double>(v[i]) / 30.0);
            ASSERT_NEAR(capped[i], e, 2e-6 * std::abs(e)) << v[i];
        }
        auto scaled = v;
        scale(scaled.data(), count, 0.3F);
        for (std::size_t i = 0; i < v.size(); ++i) ASSERT_EQ(scaled[i], v[i] * 0.3F);
    }
}

template <class T>
void expect_logits(const std::vector<T>& rows, const std::vector<float>& queries, std::int64_t count, std::int32_t size, std::int32_t group) {
    const auto stride = count + 3;
    std::vector<float> logits(at(stride * group), -9.0F);
    row_logits(rows.data(), count, size, queries.data(), group, logits.data(), stride);
    for (std::int32_t g = 0; g < group; ++g) {
        for (std::int64_t i = 0; i < count; ++i) {
            double sum = 0, mass = 0;
            for (std::int32_t j = 0; j < size; ++j) {
                const auto term = exact(rows[at(i * size + j)]) * exact(queries[at(g * size + j)]);
                sum += term;
                mass += std::abs(term);
            }
            ASSERT_NEAR(logits[at(g * stride + i)], sum, fp32_sum_error(mass)) << "row " << i << " query " << g << " size " << size << " seed " << seed;
        }
        for (auto i = count; i < stride; ++i) ASSERT_EQ(logits[at(g * stride + i)], -9.0F) << "written past count";
    }
}

template <class T>
void expect_sums(const std::vector<T>& rows, const std::vector<float>& weights, std::int64_t count, std::int32_t size, std::int32_t group) {
    const auto stride = count + 2;
    std::vector<float> sums(at(size * group) + 1, 0.5F);
    row_accumulate(rows.data(), count, size, weights.data(), stride, group, sums.data());
    for (std::int32_t g = 0; g < group; ++g) {
        for (std::int32_t j = 0; j < size; ++j) {
            double sum = 0.5, mass = 0.5;
            for (std::int64_t i = 0; i < count; ++i) {
                const auto term = exact(rows[at(i * size + j)]) * exact(weights[at(g * stride + i)]);
                sum += term;
                mass += std::abs(term);
            }
            ASSERT_NEAR(sums[at(g * size + j)], sum, fp32_sum_error(mass)) << "column " << j << " vector " << g << " size " << size << " seed " << seed;
        }
    }
    EXPECT_EQ(sums.back(), 0.5F);
}

template <class T>
class typed {};

template <class Check>
void for_each_scalar(Check check) {
    check(typed<float>());
    check(typed<bf16>());
    check(typed<fp16>());
}

TEST_P(RowOps, LogitsAndSumsEqualTheOracle) {
    for (const auto size : head_sizes) {
        const auto queries = normal(at(16 * size));
        const auto weights = normal(at(16 * 1002));
        for_each_scalar([&]<class T>(typed<T>) {
            const auto rows = rows_of<T>(1000 * size);
            for (const auto count : ragged_counts) {
                for (const auto group : groups) {
                    if (count == 1000 && group != 1 && group != 4 && group != 16) continue;
                    expect_logits(rows, queries, count, size, group);
                    expect_sums(rows, weights, count, size, group);
                }
            }
        });
    }
}

TEST_P(RowOps, LogitsAndSumsTakeOddSizes) {
    for (const std::int32_t size : {1, 5, 17, 33, 47, 1100}) {
        const auto queries = normal(at(5 * size));
        const auto weights = normal(at(5 * 12));
        for_each_scalar([&]<class T>(typed<T>) {
            const auto rows = rows_of<T>(10 * size);
            expect_logits(rows, queries, 10, size, 5);
            expect_sums(rows, weights, 10, size, 5);
        });
    }
}

TEST_P(RowOps, ZeroWeightsStillPropagateNaN) {
    std::vector<bf16> rows(64, bf16(1.0F));
    rows[9] = bf16(nan);
    const float weight = 0.0F;
    std::vector<float> sums(64, 0.0F);
    row_accumulate(rows.data(), 1, 64, &weight, 1, 1, sums.data());
    EXPECT_TRUE(std::isnan(sums[9]));
    EXPECT_EQ(sums[8], 0.0F);
}

struct product_shape {
    std::int64_t m, n, k;
};

void expect_product(product_shape s, bool accumulate, std::int64_t pad, const std::vector<float>& values) {
    const auto lda = s.k + pad, ldb = s.n + pad, ldc = s.n + 2 * pad;
    const auto* const a = values.data();
    const auto* const b = values.data() + 1000;
    std::vector<float> c(at(s.m * ldc) + 1, 0.25F);
    gemm(a, lda, b, ldb, c.data(), ldc, s.m, s.n, s.k, accumulate);
    for (std::int64_t i = 0; i < s.m; ++i) {
        for (std::int64_t j = 0; j < s.n; ++j) {
            double sum = accumulate ? 0.25 : 0.0, mass = sum;
            for (std::int64_t p = 0; p < s.k; ++p) {
                const auto term = exact(a[i * lda + p]) * exact(b[p * ldb + j]);
                sum += term;
                mass += std::abs(term);
            }
            ASSERT_NEAR(c[at(i * ldc + j)], sum, fp32_sum_error(mass)) << s.m << " x " << s.n << " x " << s.k << " at " << i << ", " << j << " seed " << seed;
        }
        for (auto j = s.n; j < ldc; ++j) ASSERT_EQ(c[at(i * ldc + j)], 0.25F) << "written past n";
    }
    EXPECT_EQ(c.back(), 0.25F);
}

TEST_P(RowOps, GemmEqualsTheOracle) {
    const auto values = normal(200000);
    constexpr product_shape shapes[] = {{0, 5, 3},   {5, 0, 3},    {3, 4, 0},   {1, 1, 1},    {7, 16, 64},    {64, 64, 64},   {65, 64, 128}, {5, 63, 31},
                                        {6, 17, 33}, {64, 80, 96}, {13, 96, 7}, {100, 33, 5}, {40, 200, 300}, {33, 257, 129}, {130, 7, 600}, {2, 128, 64}};
    for (const auto& s : shapes) {
        for (const bool accumulate : {false, true}) {
            expect_product(s, accumulate, 0, values);
            expect_product(s, accumulate, 5, values);
        }
    }
}

TEST_P(RowOps, GemmOverwritesNaNUnlessItAccumulates) {
    const float a = 2.0F, b = 3.0F;
    float c = nan;
    gemm(&a, 1, &b, 1, &c, 1, 1, 1, 1, false);
    EXPECT_EQ(c, 6.0F);
}

TEST_P(RowOps, VectorMatrixEqualsTheOracle) {
    for (const std::int32_t rows : {0, 1, 64, 100}) {
        for (const std::int32_t columns : {1, 16, 40, 72, 128, 513}) {
            for (const std::int32_t count : {1, 3, 8}) {
                const auto a = rows_of<fp16>(static_cast<std::int64_t>(rows) * columns);
                const auto x_stride = rows + 4, y_stride = columns + 3;
                const auto x = normal(at(x_stride * count));
                std::vector<float> y(at(y_stride * count), nan);
                vector_matrix(x.data(), x_stride, count, a.data(), rows, columns, y.data(), y_stride);
                for (std::int32_t v = 0; v < count; ++v) {
                    for (std::int32_t j = 0; j < columns; ++j) {
                        double sum = 0, mass = 0;
                        for (std::int32_t i = 0; i < rows; ++i) {
                            const auto term = exact(x[at(v * x_stride + i)]) * exact(a[at(i * columns + j)]);
                            sum += term;
                            mass += std::abs(term);
                        }
                        ASSERT_NEAR(y[at(v * y_stride + j)], sum, fp32_sum_error(mass)) << rows << " x " << columns << " seed " << seed;
                    }
                    for (auto j = columns; j < y_stride; ++j) ASSERT_TRUE(std::isnan(y[at(v * y_stride + j)])) << "written past columns";
                }
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, RowOps, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const ::testing::TestParamInfo<std::int64_t>& info) { return std::string(hwy::TargetName(info.param)); });

}  // namespace
}  // namespace sekv::host
