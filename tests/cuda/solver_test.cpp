// Batched products and eigenproblems, and what their failures become.
#include "src/cuda/solver.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "rows_world.hpp"
#include "src/cuda/runtime.hpp"
#include "src/cuda/seal_space.hpp"

namespace sekv::cuda {
namespace {

using rows_tests::array;

struct bench {
    bench(std::int32_t heads, std::int32_t size)
        : bytes(owned_eigen().scratch_bytes(size, heads).first), blas(std::size_t{1} << 20), eigen(bytes), info(static_cast<std::size_t>(heads)), solve({blas.get(), blas.size(), eigen.get(), bytes, info.get()}, stream.get()) {}
    owned_stream stream;
    std::size_t bytes;
    array<std::byte> blas, eigen;
    array<int> info;
    solver solve;
};

std::vector<double> doubles(oracle::draws& random, std::size_t count) {
    std::vector<double> v(count);
    for (auto& x : v) x = random.normal();
    return v;
}

// [heads, size, size] symmetric.
std::vector<double> symmetric(oracle::draws& random, std::size_t heads, std::size_t size) {
    auto m = doubles(random, heads * size * size);
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < size; ++i) {
            for (std::size_t j = 0; j < i; ++j) m[(h * size + i) * size + j] = m[(h * size + j) * size + i];
        }
    }
    return m;
}

TEST(Solver, FindsEigenvectorsOfEveryHead) {
    constexpr std::size_t heads = 3;
    for (const std::size_t d : {64U, 80U}) {
        oracle::draws random(7);
        bench b(heads, static_cast<std::int32_t>(d));
        const auto m = symmetric(random, heads, d);
        const array<double> matrices(m), values(heads * d);
        b.solve.eigen(matrices.get(), values.get(), heads, static_cast<std::int32_t>(d));
        const auto vectors = matrices.read(), w = values.read();
        for (std::size_t h = 0; h < heads; ++h) {
            for (std::size_t k = 0; k < d; ++k) {  // M v = w v, |v| = 1, w ascending
                const double* v = vectors.data() + (h * d + k) * d;
                double length = 0, off = 0;
                for (std::size_t i = 0; i < d; ++i) {
                    double x = -w[h * d + k] * v[i];
                    for (std::size_t j = 0; j < d; ++j) x += m[(h * d + i) * d + j] * v[j];
                    off += x * x, length += v[i] * v[i];
                }
                ASSERT_NEAR(length, 1, 1e-12);
                ASSERT_LE(std::sqrt(off), 1e-10);
                ASSERT_TRUE(k == 0 || w[h * d + k - 1] <= w[h * d + k]);
            }
        }
    }
}

TEST(Solver, MultipliesEveryHead) {
    constexpr std::size_t heads = 2, d = 64;
    oracle::draws random(8);
    bench b(heads, d);
    const auto left = doubles(random, heads * d * d), right = doubles(random, heads * d * d);
    const array<double> l(left), r(right), out(heads * d * d);
    for (const bool transposed : {false, true}) {
        b.solve.multiply(l.get(), r.get(), transposed, heads, d, 0.5, out.get());
        b.stream.synchronize();
        const auto got = out.read();
        for (std::size_t h = 0; h < heads; ++h) {
            for (std::size_t i = 0; i < d; i += 7) {
                for (std::size_t j = 0; j < d; j += 5) {
                    double want = 0;
                    for (std::size_t k = 0; k < d; ++k) want += left[(h * d + k) * d + i] * (transposed ? right[(h * d + k) * d + j] : right[(h * d + j) * d + k]);
                    ASSERT_NEAR(got[(h * d + j) * d + i], 0.5 * want, 1e-11);
                }
            }
        }
    }
}

// Rows lie `capacity` apart; what is behind the last row is neither read into the sums nor written.
TEST(Solver, ProjectsAndSumsRaggedChunks) {
    constexpr std::int32_t heads = 2, d = 64, capacity = 96, rows = 41;
    oracle::draws random(9);
    bench b(heads, d);
    auto data = random.normals(heads * capacity * d);
    const auto matrix = random.normals(heads * d * d);
    std::vector<double> wide(data.begin(), data.end());
    for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t i = rows * d; i < capacity * d; ++i) {
            data[static_cast<std::size_t>(h * capacity * d + i)] = std::numeric_limits<float>::quiet_NaN();
            wide[static_cast<std::size_t>(h * capacity * d + i)] = std::numeric_limits<double>::quiet_NaN();
        }
    }
    const array<float> x(data), m(matrix), codes(data.size());
    const array<double> y(wide), sums(std::vector<double>(static_cast<std::size_t>(heads * d * d), 1.0));
    for (const bool transposed : {false, true}) {
        b.solve.project({x.get(), heads, d, capacity, rows}, m.get(), transposed, codes.get());
        b.stream.synchronize();
        const auto got = codes.read();
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t i = 0; i < capacity; ++i) {
                for (std::int32_t j = 0; j < d; ++j) {
                    const auto at = static_cast<std::size_t>((h * capacity + i) * d + j);
                    double want = 0;
                    for (std::int32_t k = 0; k < d; ++k) want += static_cast<double>(data[static_cast<std::size_t>((h * capacity + i) * d + k)]) * matrix[static_cast<std::size_t>((h * d + (transposed ? j : k)) * d + (transposed ? k : j))];
                    if (i < rows) {
                        ASSERT_NEAR(got[at], want, 1e-4);
                    } else {
                        ASSERT_EQ(std::bit_cast<std::uint32_t>(got[at]), 0xa5a5a5a5U);
                    }
                }
            }
        }
    }
    b.solve.add_moments(y.get(), heads, d, capacity, rows, sums.get());
    b.stream.synchronize();
    const auto got = sums.read();
    for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t i = 0; i < d; ++i) {
            for (std::int32_t j = 0; j < d; ++j) {
                double want = 1;
                for (std::int32_t r = 0; r < rows; ++r) want += wide[static_cast<std::size_t>((h * capacity + r) * d + i)] * wide[static_cast<std::size_t>((h * capacity + r) * d + j)];
                ASSERT_NEAR(got[static_cast<std::size_t>((h * d + i) * d + j)], want, 1e-10);
            }
        }
    }
}

TEST(Solver, SaysWhichHeadDidNotConverge) {
    constexpr std::size_t heads = 3, d = 64;
    oracle::draws random(10);
    bench b(heads, d);
    auto m = symmetric(random, heads, d);
    m[d * d + 5 * d + 5] = std::numeric_limits<double>::quiet_NaN();
    const array<double> matrices(m), values(heads * d);
#if defined(SEKV_SIMT)  // what a device makes of NaN is not specified
    try {
        b.solve.eigen(matrices.get(), values.get(), heads, d);
        FAIL() << "no error";
    } catch (const device_error& e) {
        EXPECT_NE(std::string(e.what()).find("KV head 1 didn't converge"), std::string::npos) << e.what();
        EXPECT_FALSE(e.lost());
    }
#endif
}

TEST(Solver, RefusesTooSmallAScratch) {
    bench b(1, 64);
    const array<double> matrices(std::vector<double>(4 * 80 * 80, 0.0)), values(4 * 80);
    EXPECT_THROW(b.solve.eigen(matrices.get(), values.get(), 4, 80), device_error);
}

TEST(Solver, NamesTheCallThatFailed) {
    const auto sentence = [](auto status) -> std::string {
        try {
            check(status, "theCall");
        } catch (const device_error& e) {
            return e.what();
        }
        return "";
    };
    EXPECT_NE(sentence(CUBLAS_STATUS_EXECUTION_FAILED).find("theCall failed with"), std::string::npos);
    EXPECT_NE(sentence(CUSOLVER_STATUS_INTERNAL_ERROR).find("theCall failed with CUSOLVER_STATUS_INTERNAL_ERROR"), std::string::npos);
    EXPECT_NE(sentence(CUSOLVER_STATUS_MAPPING_ERROR).find("cuSOLVER status 5"), std::string::npos);
    EXPECT_THROW(check(CUBLAS_STATUS_ALLOC_FAILED, "theCall"), budget_error);
    EXPECT_THROW(check(CUSOLVER_STATUS_ALLOC_FAILED, "theCall"), budget_error);
    check(CUBLAS_STATUS_SUCCESS, "theCall");
    check(CUSOLVER_STATUS_SUCCESS, "theCall");
}

TEST(SealSpace, PartsDoNotOverlapAndAreCounted) {
    const seal_shape shape{3, 96, 192};
    const auto bytes = seal_workspace_bytes(shape);
    const array<std::byte> memory(bytes);
    const auto s = cut_seal_space(shape, memory.get());
    EXPECT_EQ(s.size, bytes);
    const auto rows = static_cast<std::size_t>(3 * 96 * 192);
    EXPECT_EQ(s.value_codes, s.key_codes + rows);  // `wide` lies over both
    EXPECT_EQ(static_cast<void*>(s.wide), static_cast<void*>(s.key_codes));
    EXPECT_LE(reinterpret_cast<std::byte*>(s.scratch.info + 3), memory.get() + bytes);
    for (const auto* p : {s.keys, s.values, s.key_codes, s.value_codes, s.encoder, s.basis}) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % 256, reinterpret_cast<std::uintptr_t>(memory.get()) % 256);
}

}  // namespace
}  // namespace sekv::cuda
