// Query moments on the device against metric.hpp's on the host: 2e-5 of the geometric mean of the diagonal elements in the row and column.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "kernels/seal.hpp"
#include "rows_world.hpp"
#include "sekv/codec/metric.hpp"
#include "src/cuda/runtime.hpp"

namespace sekv::cuda {
namespace {

using rows_tests::array;

struct moment_case {
    std::int32_t d, group;
    std::int64_t tokens;
    dtype type;
    double decay;
    bool pinned;
};

std::string name_of(const testing::TestParamInfo<moment_case>& i) {
    const auto& c = i.param;
    return "d" + std::to_string(c.d) + "_g" + std::to_string(c.group) + "_n" + std::to_string(c.tokens) + (c.type == dtype::f32 ? "_f32" : c.type == dtype::f16 ? "_f16" : "_bf16") + "_" + std::to_string(i.index);
}

constexpr std::int32_t heads = 3;
constexpr float scale = 0.125F;

// A layer's tensor with gaps behind heads and tokens that begins at an odd element.
struct query_tensor {
    query_tensor(oracle::draws& random, const moment_case& c) : head_stride(c.d + 3), token_stride(heads * c.group * (c.d + 3) + 5), type(c.type), values(random.normals(1 + c.tokens * token_stride)) {
        std::vector<std::uint16_t> bits;
        for (auto& x : values) {
            bits.push_back(type == dtype::f32 ? std::uint16_t{0} : rows_tests::bits_of(type, x));
            if (type != dtype::f32) x = rows_tests::value_of(type, bits.back());
        }
        if (type == dtype::f32) wide = std::make_unique<array<float>>(values);
        if (type != dtype::f32) narrow = std::make_unique<array<std::uint16_t>>(bits);
    }
    [[nodiscard]] tensor_in in() const {
        const void* first = type == dtype::f32 ? static_cast<const void*>(wide->get() + 1) : static_cast<const void*>(narrow->get() + 1);
        return {first, type, token_stride, head_stride};
    }
    [[nodiscard]] float at(std::int64_t token, std::int32_t head, std::int32_t j) const { return values[static_cast<std::size_t>(1 + token * token_stride + head * head_stride + j)]; }
    std::int64_t head_stride, token_stride;
    dtype type;
    std::vector<float> values;
    std::unique_ptr<array<float>> wide;
    std::unique_ptr<array<std::uint16_t>> narrow;
};

std::vector<float> host_moments(const moment_case& c, const query_tensor& q, std::vector<float> moments) {
    const auto d = static_cast<std::size_t>(c.d);
    for (std::int32_t h = 0; h < heads; ++h) {
        std::vector<float> own;
        for (std::int64_t t = 0; t < c.tokens; ++t) {
            for (std::int32_t g = 0; g < c.group; ++g) {
                for (std::int32_t j = 0; j < c.d; ++j) own.push_back(scale * q.at(t, h * c.group + g, j));
            }
        }
        sekv::add_queries({moments.data() + static_cast<std::size_t>(h) * d * d, c.d}, own.data(), static_cast<std::int64_t>(c.group) * c.d, c.tokens, c.group, c.decay);
    }
    return moments;
}

moment_step step_of(const moment_case& c, const query_tensor& q, float* moments) {
    moment_step step;
    step.moments = moments, step.queries = q.in(), step.tokens = c.tokens, step.scale = scale;
    step.kv_heads = heads, step.group = c.group, step.key_size = c.d;
    step.faded = static_cast<float>(std::pow(c.decay, static_cast<double>(c.tokens)));
    return step;
}

class Moments : public testing::TestWithParam<moment_case> {};
INSTANTIATE_TEST_SUITE_P(Cases, Moments,
                         testing::Values(moment_case{64, 3, 1, dtype::bf16, 0.999, true}, moment_case{80, 5, 37, dtype::f16, 0.99, true}, moment_case{96, 1, 96, dtype::f32, 0.9, false}, moment_case{128, 7, 20, dtype::bf16, 0.999, true},
                                         moment_case{256, 16, 5, dtype::bf16, 0.97, false}, moment_case{64, 2, 300, dtype::f32, 0.5, true}, moment_case{64, 4, 64, dtype::bf16, 1.0, true}, moment_case{64, 4, 0, dtype::bf16, 0.9, true}),
                         name_of);

TEST_P(Moments, AgreeWithTheHost) {
    const auto& c = GetParam();
    oracle::draws random(static_cast<std::uint32_t>(c.d * 100 + c.group));
    const query_tensor q(random, c);
    const auto start = random.normals(heads * c.d * c.d);
    const auto want = host_moments(c, q, start);
    std::vector<std::vector<float>> all;
    rows_tests::under_schedules(3, [&] {
        const array<float> moments(start, c.pinned);
        const owned_stream s;
        const array<moment_step> steps({step_of(c, q, moments.get())}, true);
        add_queries({steps.get(), 1}, c.decay, nullptr, s.get());
        s.synchronize();
        all.push_back(moments.read());
        EXPECT_EQ(all.back(), all.front());
    });
    for (std::int32_t h = 0; h < heads; ++h) {
        const auto at = [&](std::int32_t i, std::int32_t j) { return static_cast<std::size_t>((h * c.d + i) * c.d + j); };
        for (std::int32_t i = 0; i < c.d; ++i) {
            for (std::int32_t j = 0; j < c.d; ++j) {
                const auto size = std::sqrt(std::abs(want[at(i, i)] - start[at(i, i)]) * std::abs(want[at(j, j)] - start[at(j, j)])) + std::abs(want[at(i, j)]) + 1e-3F;
                ASSERT_LE(std::abs(all.front()[at(i, j)] - want[at(i, j)]), 2e-5F * size) << "head " << h << ", element " << i << ", " << j;
            }
        }
    }
}

// Layers of other sizes beside one another, and the same moments up to three times in a row.
TEST(MomentSteps, InOneLaunchAreAsInOneEach) {
    constexpr double decay = 0.97;
    oracle::draws random(20261130);
    const std::vector<std::vector<moment_case>> runs{{{96, 2, 37, dtype::bf16, decay, true}, {96, 3, 70, dtype::f32, decay, true}, {96, 1, 5, dtype::f16, decay, true}},
                                                     {{64, 4, 64, dtype::bf16, decay, true}},
                                                     {{128, 1, 9, dtype::f32, decay, true}, {128, 1, 0, dtype::f32, decay, true}, {128, 5, 40, dtype::bf16, decay, true}}};
    std::vector<std::vector<float>> start;
    std::vector<query_tensor> queries;
    for (const auto& run : runs) {
        start.push_back(random.normals(heads * run.front().d * run.front().d));
        for (const auto& c : run) queries.emplace_back(random, c);
    }
    std::vector<std::vector<float>> want;
    rows_tests::under_schedules(4, [&] {
        const owned_stream s;
        std::vector<array<float>> alone, together;
        std::vector<moment_step> steps;
        auto q = queries.begin();
        for (std::size_t i = 0; i < runs.size(); ++i) {
            alone.emplace_back(start[i], true), together.emplace_back(start[i], true);
            for (const auto& c : runs[i]) {
                const array<moment_step> one({step_of(c, *q, alone.back().get())}, true);
                add_queries({one.get(), 1}, decay, nullptr, s.get());
                s.synchronize();
                steps.push_back(step_of(c, *q++, together.back().get()));
            }
        }
        const array<moment_step> all(steps, true);
        add_queries({all.get(), all.size()}, decay, nullptr, s.get());
        s.synchronize();
        for (std::size_t i = 0; i < runs.size(); ++i) {
            if (want.size() < runs.size()) want.push_back(alone[i].read());
            ASSERT_EQ(alone[i].read(), want[i]) << i;
            ASSERT_EQ(together[i].read(), want[i]) << i;
        }
    });
}

TEST(MomentSteps, LeaveOutWhatIsNotFinite) {
    const moment_case c{80, 3, 40, dtype::f32, 0.99, true};
    oracle::draws random(7);
    query_tensor q(random, c);
    const auto start = random.normals(heads * c.d * c.d);
    const owned_stream s;
    const auto run = [&](const std::vector<float>& values, bool reported) {
        q.wide = std::make_unique<array<float>>(values);
        const array<float> moments(start, true);
        const array<moment_step> steps({step_of(c, q, moments.get())}, true);
        const array<deferred_flags> flags(std::vector<deferred_flags>(1), true);
        add_queries({steps.get(), 1}, c.decay, flags.get(), s.get());
        s.synchronize();
        EXPECT_EQ(flags.read()[0].queries_not_finite != 0, reported);
        EXPECT_EQ(flags.read()[0].not_finite, 0);
        return moments.read();
    };
    for (const float x : {INFINITY, -INFINITY, NAN}) {
        for (const auto& [token, head, j] : {std::array{0, 0, 0}, std::array{39, 8, 79}, std::array{20, 4, 33}}) {
            auto bad = q.values, zero = q.values;
            const auto at = static_cast<std::size_t>(1 + token * q.token_stride + head * q.head_stride + j);
            bad[at] = x, zero[at] = 0;
            ASSERT_EQ(run(bad, true), run(zero, false)) << x << " at " << token << ", " << head << ", " << j;
        }
    }
    auto gap = q.values;
    gap[static_cast<std::size_t>(1 + c.d)] = NAN;  // behind the first head
    (void)run(gap, false);
}

}  // namespace
}  // namespace sekv::cuda
