// Query moments on the device against metric.hpp's on the host: 2e-5 of the geometric mean of the diagonal elements in the row and column.
#include <gtest/gtest.h>

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
        moment_step step;
        step.layer.kv_heads = heads, step.layer.group = c.group, step.layer.key_size = c.d;
        step.moments = moments.get(), step.queries = q.in(), step.tokens = c.tokens, step.decay = c.decay, step.scale = scale;
        add_queries(step, s.get());
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

}  // namespace
}  // namespace sekv::cuda
