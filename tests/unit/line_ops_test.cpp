#include "sekv/exec/line_ops.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "oracle/random.hpp"
#include "oracle/targets.hpp"

namespace sekv::host {
namespace {

constexpr std::uint32_t seed = 20240807;
constexpr std::int64_t readable = 64;  // bytes past a line that the kernels may read

class LineOps : public oracle::each_target {
protected:
    oracle::draws random{seed};

    std::vector<std::uint8_t> random_widths(std::int32_t size) {
        std::vector<std::uint8_t> widths(static_cast<std::size_t>(size / line_group));
        for (auto& w : widths) w = static_cast<std::uint8_t>(random.below(9));
        return widths;
    }
};

int code_at(const std::uint8_t* codes, const std::vector<std::uint8_t>& widths, std::int32_t component) {
    const auto group = component / line_group;
    const auto* at = codes + std::accumulate(widths.begin(), widths.begin() + group, 0);
    const int w = widths[static_cast<std::size_t>(group)];
    int code = 0;
    for (int b = 0; b < w; ++b) {
        const int bit = (component % line_group) * w + b;
        code |= ((at[bit / 8] >> (bit % 8)) & 1) << b;
    }
    return code;
}

double level_at(const std::uint8_t* codes, const std::vector<std::uint8_t>& widths, std::int32_t component) {
    const int w = widths[static_cast<std::size_t>(component / line_group)];
    const double u = code_at(codes, widths, component) - 0.5 * ((1 << w) - 1);
    return u + static_cast<double>(line_curve[w]) * u * u * u;
}

// Random bytes, each line in a buffer that ends where reading may end.
struct lines {
    std::vector<std::vector<std::uint8_t>> bytes;
    std::vector<const std::uint8_t*> list;

    lines(oracle::draws& random, std::int64_t count, std::int64_t size) {
        for (std::int64_t i = 0; i < count; ++i) bytes.push_back(random.bytes(size + readable));
        for (const auto& b : bytes) list.push_back(b.data());
    }
};

TEST_P(LineOps, LogitsEqualTheOracle) {
    SCOPED_TRACE(seed);
    for (const std::int32_t size : {64, 80, 96, 128, 256}) {
        for (std::int32_t group = 1; group <= 16; ++group) {
            const auto widths = random_widths(size);
            const std::int64_t count = random.below(20), stride = count + random.below(5);
            const lines l(random, count, std::accumulate(widths.begin(), widths.end(), 0));
            const auto t = random.normals(group * size, 0.01F), base = random.normals(group);
            std::vector<float> logits(static_cast<std::size_t>(group * stride + 1), -7.0F);
            line_logits(l.list.data(), count, widths.data(), size, t.data(), base.data(), group, logits.data(), stride);
            EXPECT_EQ(logits.back(), -7.0F);
            for (std::int32_t g = 0; g < group; ++g) {
                for (std::int64_t i = 0; i < stride; ++i) {
                    double sum = i < count ? base[static_cast<std::size_t>(g)] : -7.0, mass = std::abs(sum);
                    for (std::int32_t j = 0; i < count && j < size; ++j) {
                        const double term = static_cast<double>(t[static_cast<std::size_t>(g * size + j)]) * level_at(l.list[static_cast<std::size_t>(i)], widths, j);
                        sum += term;
                        mass += std::abs(term);
                    }
                    ASSERT_NEAR(logits[static_cast<std::size_t>(g * stride + i)], sum, 2e-6 * mass) << "size " << size << " group " << group << " query " << g << " line " << i;
                }
            }
        }
    }
}

TEST_P(LineOps, AccumulateEqualsTheOracle) {
    SCOPED_TRACE(seed);
    for (const std::int32_t size : {64, 80, 96, 128, 256}) {
        for (std::int32_t group = 1; group <= 16; ++group) {
            const auto widths = random_widths(size);
            const std::int64_t count = random.below(20), stride = count + random.below(5), offset = random.below(70);
            const lines l(random, count, offset + std::accumulate(widths.begin(), widths.end(), 0));
            const auto weights = random.normals(group * stride + 1);
            std::vector<float> sums(static_cast<std::size_t>(group * size + 1), 0.5F);
            line_accumulate(l.list.data(), count, offset, widths.data(), size, weights.data(), stride, group, sums.data());
            EXPECT_EQ(sums.back(), 0.5F);
            for (std::int32_t g = 0; g < group; ++g) {
                for (std::int32_t j = 0; j < size; ++j) {
                    double sum = 0.5, mass = 0.5;
                    for (std::int64_t i = 0; i < count; ++i) {
                        const double term = static_cast<double>(weights[static_cast<std::size_t>(g * stride + i)]) * level_at(l.list[static_cast<std::size_t>(i)] + offset, widths, j);
                        sum += term;
                        mass += std::abs(term);
                    }
                    ASSERT_NEAR(sums[static_cast<std::size_t>(g * size + j)], sum, 2e-6 * mass) << "size " << size << " query " << g << " component " << j;
                }
            }
        }
    }
}

TEST_P(LineOps, LevelsEqualTheOracle) {
    SCOPED_TRACE(seed);
    for (const std::int32_t size : {64, 80, 96, 128, 256}) {
        for (int i = 0; i < 20; ++i) {
            const auto widths = random_widths(size);
            const auto bytes = std::accumulate(widths.begin(), widths.end(), 0);
            const std::int64_t count = random.below(9), offset = random.below(33), stride = offset + bytes + random.below(40);
            const auto data = random.bytes(count * stride + offset + readable);
            std::vector<float> codes(static_cast<std::size_t>(count * size + 1), -7.0F);
            line_levels(data.data(), stride, count, offset, widths.data(), size, codes.data());
            EXPECT_EQ(codes.back(), -7.0F);
            for (std::int64_t x = 0; x < count * size; ++x) {
                const auto j = static_cast<std::int32_t>(x % size);
                ASSERT_FLOAT_EQ(codes[static_cast<std::size_t>(x)], static_cast<float>(level_at(data.data() + x / size * stride + offset, widths, j))) << "component " << j;
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, LineOps, oracle::all_targets(), oracle::name_of_target);

}  // namespace
}  // namespace sekv::host
