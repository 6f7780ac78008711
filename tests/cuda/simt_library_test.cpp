// The stand-ins of cuBLAS and cuSOLVER against plain loops.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cusolverDn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "simt/fakecuda.hpp"

namespace {

template <class T>
class device_array {
public:
    explicit device_array(const std::vector<T>& values) : size_(values.size()) {
        EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(T)), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
    }
    ~device_array() { (void)cudaFree(data_); }
    device_array(const device_array&) = delete;
    device_array& operator=(const device_array&) = delete;
    [[nodiscard]] T* get() const { return static_cast<T*>(data_); }
    [[nodiscard]] std::vector<T> read(cudaStream_t s) const {
        std::vector<T> out(size_);
        EXPECT_EQ(cudaMemcpyAsync(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost, s), cudaSuccess);
        return out;
    }

private:
    void* data_ = nullptr;
    std::size_t size_;
};

template <class T>
std::vector<T> random_values(std::size_t n, unsigned seed) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal;
    std::vector<T> out(n);
    for (T& v : out) v = static_cast<T>(normal(bits));
    return out;
}

class Libraries : public testing::Test {
protected:
    void SetUp() override {
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        ASSERT_EQ(cublasCreate(&blas), CUBLAS_STATUS_SUCCESS);
        ASSERT_EQ(cublasSetStream(blas, stream), CUBLAS_STATUS_SUCCESS);
        ASSERT_EQ(cusolverDnCreate(&solver), CUSOLVER_STATUS_SUCCESS);
        ASSERT_EQ(cusolverDnSetStream(solver, stream), CUSOLVER_STATUS_SUCCESS);
    }
    void TearDown() override {
        (void)cublasDestroy(blas);
        (void)cusolverDnDestroy(solver);
        (void)cudaStreamDestroy(stream);
    }
    cudaStream_t stream = nullptr;
    cublasHandle_t blas = nullptr;
    cusolverDnHandle_t solver = nullptr;
};

struct shape {
    int m, n, k, lda, ldb, ldc;
    cublasOperation_t a, b;
};

template <class T>
void expect_product(const shape& s, const std::vector<T>& a, const std::vector<T>& b, const std::vector<float>& got, std::size_t apart_a, std::size_t apart_b,
                    std::size_t apart_c, int batches, float alpha) {
    for (int i = 0; i < batches; ++i)
        for (int row = 0; row < s.m; ++row)
            for (int column = 0; column < s.n; ++column) {
                double sum = 0;
                for (int k = 0; k < s.k; ++k) {
                    const int at_a = s.a == CUBLAS_OP_N ? k * s.lda + row : row * s.lda + k;
                    const int at_b = s.b == CUBLAS_OP_N ? column * s.ldb + k : k * s.ldb + column;
                    const auto n = static_cast<std::size_t>(i);
                    sum += static_cast<double>(static_cast<float>(a[n * apart_a + static_cast<std::size_t>(at_a)])) *
                           static_cast<double>(static_cast<float>(b[n * apart_b + static_cast<std::size_t>(at_b)]));
                }
                const float value = got[static_cast<std::size_t>(i) * apart_c + static_cast<std::size_t>(column * s.ldc + row)];
                EXPECT_NEAR(value, alpha * sum, 1e-4) << "batch " << i << " row " << row << " column " << column;
            }
}

const shape shapes[] = {{3, 4, 5, 6, 7, 8, CUBLAS_OP_N, CUBLAS_OP_N},
                        {3, 4, 5, 6, 7, 8, CUBLAS_OP_T, CUBLAS_OP_N},
                        {3, 4, 5, 6, 7, 8, CUBLAS_OP_N, CUBLAS_OP_T},
                        {3, 4, 5, 6, 7, 8, CUBLAS_OP_T, CUBLAS_OP_T}};

TEST_F(Libraries, BatchedProductsInFloat) {
    for (const shape& s : shapes) {
        const auto a = random_values<float>(3 * 60, 1), b = random_values<float>(3 * 60, 2);
        const device_array<float> da(a), db(b), dc(std::vector<float>(3 * 60, NAN));  // beta 0 doesn't read C
        const float alpha = 0.5f, beta = 0.0f;
        ASSERT_EQ(cublasSgemmStridedBatched(blas, s.a, s.b, s.m, s.n, s.k, &alpha, da.get(), s.lda, 60, db.get(), s.ldb, 60, &beta, dc.get(), s.ldc, 60, 3),
                  CUBLAS_STATUS_SUCCESS);
        expect_product(s, a, b, dc.read(stream), 60, 60, 60, 3, alpha);
    }
}

template <class T>
void check_half_product(cublasHandle_t blas, cudaStream_t stream, cudaDataType type) {
    for (const shape& s : shapes) {
        const auto a = random_values<T>(2 * 60, 1), b = random_values<T>(2 * 60, 2);
        const device_array<T> da(a), db(b);
        const device_array<float> dc(std::vector<float>(2 * 60, NAN));
        const float alpha = 1.0f, beta = 0.0f;
        ASSERT_EQ(cublasGemmStridedBatchedEx(blas, s.a, s.b, s.m, s.n, s.k, &alpha, da.get(), type, s.lda, 60, db.get(), type, s.ldb, 60, &beta, dc.get(),
                                             CUDA_R_32F, s.ldc, 60, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                  CUBLAS_STATUS_SUCCESS);
        expect_product(s, a, b, dc.read(stream), 60, 60, 60, 2, alpha);
    }
}

TEST_F(Libraries, BatchedProductsOfHalfTypes) {
    check_half_product<__half>(blas, stream, CUDA_R_16F);
    check_half_product<__nv_bfloat16>(blas, stream, CUDA_R_16BF);
}

TEST_F(Libraries, AddsToWhatIsThere) {
    const device_array<double> a({1, 2, 3, 4}), c({10, 20, 30, 40});
    const double alpha = 2, beta = 1;
    ASSERT_EQ(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_T, 2, 2, 2, &alpha, a.get(), 2, a.get(), 2, &beta, c.get(), 2), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(c.read(stream), (std::vector<double>{30, 48, 58, 80}));
    ASSERT_EQ(cublasDsyrk(blas, CUBLAS_FILL_MODE_LOWER, CUBLAS_OP_N, 2, 2, &alpha, a.get(), 2, &beta, c.get(), 2), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(c.read(stream), (std::vector<double>{50, 76, 58, 120}));  // the upper triangle stays
}

TEST_F(Libraries, RefusesBadArguments) {
    const device_array<float> a(std::vector<float>(16, 1.0f));
    const float one = 1;
    EXPECT_EQ(cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, a.get(), 3, a.get(), 4, &one, a.get(), 4), CUBLAS_STATUS_INVALID_VALUE);
    std::vector<float> host(16);
    EXPECT_NE(cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, a.get(), 4, host.data(), 4, &one, a.get(), 4), CUBLAS_STATUS_SUCCESS);
    EXPECT_NE(cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 5, &one, a.get(), 4, a.get(), 5, &one, a.get(), 4), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(fakecuda::take_problems().size(), 2u);
    fakecuda::fail_after(fakecuda::call::launch, 0, cudaErrorLaunchOutOfResources);
    EXPECT_EQ(cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, a.get(), 4, a.get(), 4, &one, a.get(), 4), CUBLAS_STATUS_EXECUTION_FAILED);
}

/// Symmetric [n, n], one per batch.
std::vector<double> symmetric(int n, int batches) {
    std::vector<double> m = random_values<double>(static_cast<std::size_t>(n * n * batches), 5);
    for (int b = 0; b < batches; ++b)
        for (int i = 0; i < n; ++i)
            for (int j = 0; j < i; ++j) m[static_cast<std::size_t>((b * n + i) * n + j)] = m[static_cast<std::size_t>((b * n + j) * n + i)];
    return m;
}

/// A v = w v for every pair, w ascending, v orthonormal.
void expect_eigen(const std::vector<double>& a, const std::vector<double>& v, const std::vector<double>& w, int n, int batches) {
    for (int b = 0; b < batches; ++b) {
        const double* A = &a[static_cast<std::size_t>(b * n * n)];
        const double* V = &v[static_cast<std::size_t>(b * n * n)];
        const double* W = &w[static_cast<std::size_t>(b * n)];
        for (int j = 0; j < n; ++j) {
            if (j > 0) {
                EXPECT_LE(W[j - 1], W[j]);
            }
            for (int i = 0; i < n; ++i) {
                double image = 0, inner = 0;
                for (int k = 0; k < n; ++k) {
                    image += A[i * n + k] * V[j * n + k];
                    inner += V[i * n + k] * V[j * n + k];
                }
                EXPECT_NEAR(image, W[j] * V[j * n + i], 1e-9);
                EXPECT_NEAR(inner, i == j ? 1.0 : 0.0, 1e-9);
            }
        }
    }
}

TEST_F(Libraries, EigenvectorsOfABatch) {
    constexpr int n = 9, batches = 3;
    const auto a = symmetric(n, batches);
    const device_array<double> da(a), dw(std::vector<double>(n * batches));
    const device_array<int> info(std::vector<int>(batches, -1));
    cusolverDnParams_t params = nullptr;
    ASSERT_EQ(cusolverDnCreateParams(&params), CUSOLVER_STATUS_SUCCESS);
    std::size_t device = 0, host = 0;
    ASSERT_EQ(cusolverDnXsyevBatched_bufferSize(solver, params, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n, CUDA_R_64F, da.get(), n, CUDA_R_64F,
                                                dw.get(), CUDA_R_64F, &device, &host, batches),
              CUSOLVER_STATUS_SUCCESS);
    const device_array<char> scratch{std::vector<char>(device)};
    std::vector<char> host_scratch(host);
    ASSERT_EQ(cusolverDnXsyevBatched(solver, params, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n, CUDA_R_64F, da.get(), n, CUDA_R_64F, dw.get(),
                                     CUDA_R_64F, scratch.get(), device, host_scratch.data(), host, info.get(), batches),
              CUSOLVER_STATUS_SUCCESS);
    EXPECT_EQ(info.read(stream), (std::vector<int>(batches, 0)));
    expect_eigen(a, da.read(stream), dw.read(stream), n, batches);
    EXPECT_EQ(cusolverDnDestroyParams(params), CUSOLVER_STATUS_SUCCESS);
}

TEST_F(Libraries, EigenvectorsByJacobiAndByDivideAndConquer) {
    constexpr int n = 6, batches = 2;
    const auto a = symmetric(n, batches);
    const device_array<double> da(a), db(a), dw(std::vector<double>(n * batches));
    const device_array<int> info(std::vector<int>(batches, -1));
    syevjInfo_t params = nullptr;
    ASSERT_EQ(cusolverDnCreateSyevjInfo(&params), CUSOLVER_STATUS_SUCCESS);
    int elements = 0;
    ASSERT_EQ(
        cusolverDnDsyevjBatched_bufferSize(solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_UPPER, n, da.get(), n, dw.get(), &elements, params, batches),
        CUSOLVER_STATUS_SUCCESS);
    const device_array<double> scratch(std::vector<double>(static_cast<std::size_t>(elements)));
    ASSERT_EQ(cusolverDnDsyevjBatched(solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_UPPER, n, da.get(), n, dw.get(), scratch.get(), elements, info.get(),
                                      params, batches),
              CUSOLVER_STATUS_SUCCESS);
    expect_eigen(a, da.read(stream), dw.read(stream), n, batches);
    ASSERT_EQ(cusolverDnDsyevd_bufferSize(solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n, db.get(), n, dw.get(), &elements),
              CUSOLVER_STATUS_SUCCESS);
    ASSERT_EQ(cusolverDnDsyevd(solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n, db.get(), n, dw.get(), scratch.get(), elements, info.get()),
              CUSOLVER_STATUS_SUCCESS);
    expect_eigen(a, db.read(stream), dw.read(stream), n, 1);
    EXPECT_EQ(cusolverDnDestroySyevjInfo(params), CUSOLVER_STATUS_SUCCESS);
}

TEST_F(Libraries, SaysWhenAMatrixIsNotFinite) {
    const device_array<double> a({1, NAN, NAN, 1}), w({0, 0}), scratch(std::vector<double>(8));
    const device_array<int> info({0});
    ASSERT_EQ(cusolverDnDsyevd(solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, 2, a.get(), 2, w.get(), scratch.get(), 8, info.get()),
              CUSOLVER_STATUS_SUCCESS);
    EXPECT_GT(info.read(stream)[0], 0);
}

TEST_F(Libraries, WorkIsLate) {
    fakecuda::set_policy(fakecuda::policy::lazy);
    const device_array<float> a({2.0f}), c({0.0f});
    const float one = 1, zero = 0;
    ASSERT_EQ(cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, a.get(), 1, a.get(), 1, &zero, c.get(), 1), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(fakecuda::pending_operations(), 1u);
    EXPECT_EQ(c.read(stream), std::vector<float>{4.0f});
}

}  // namespace
