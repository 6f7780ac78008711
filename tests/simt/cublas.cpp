// The cuBLAS functions that the project calls or may call, as plain loops (Eigen's products would take minutes to compile under the sanitizers). Link-time
// stand-in: the header is NVIDIA's.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "simt/library_calls.hpp"

struct cublasContext {
    cudaStream_t stream = nullptr;
    cublasMath_t math = CUBLAS_DEFAULT_MATH;
    cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;
};

namespace {

using fakecuda::detail::matrix;

cublasStatus_t status_of(cudaError_t e) {
    if (e == cudaSuccess) return CUBLAS_STATUS_SUCCESS;
    if (e == cudaErrorMemoryAllocation) return CUBLAS_STATUS_ALLOC_FAILED;
    return e == cudaErrorStreamCaptureUnsupported ? CUBLAS_STATUS_INTERNAL_ERROR : CUBLAS_STATUS_EXECUTION_FAILED;
}

float widen(float v) { return v; }
double widen(double v) { return v; }
float widen(__half v) { return __half2float(v); }
float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
void narrow(float v, float& out) { out = v; }
void narrow(double v, double& out) { out = v; }
void narrow(float v, __half& out) { out = __float2half_rn(v); }
void narrow(float v, __nv_bfloat16& out) { out = __float2bfloat16_rn(v); }

/// op(A), of `rows` x `columns`.
template <class T>
struct operand {
    const T* data;
    std::int64_t stride, apart;
    cublasOperation_t op;
    std::int64_t rows, columns;
    [[nodiscard]] matrix<const T> stored(std::int64_t batch) const {
        const bool straight = op == CUBLAS_OP_N;
        return {data + batch * apart, straight ? rows : columns, straight ? columns : rows, stride};
    }
    [[nodiscard]] bool valid() const { return rows >= 0 && columns >= 0 && stride >= std::max<std::int64_t>(1, stored(0).rows); }
};

template <class T>
struct result {
    T* data;
    std::int64_t stride, apart;
    std::int64_t rows, columns;
    [[nodiscard]] matrix<T> stored(std::int64_t batch) const { return {data + batch * apart, rows, columns, stride}; }
};

/// op(A), column-major without gaps, in the type that it's summed in.
template <class T>
auto dense(const operand<T>& a, std::int64_t batch) {
    using wide = decltype(widen(T{}));
    const matrix<const T> m = a.stored(batch);
    fakecuda::detail::note_reads(m);
    std::vector<wide> out(static_cast<std::size_t>(a.rows * a.columns));
    for (std::int64_t j = 0; j < m.columns; ++j)
        for (std::int64_t i = 0; i < m.rows; ++i)
            out[static_cast<std::size_t>(a.op == CUBLAS_OP_N ? j * a.rows + i : i * a.rows + j)] = widen(m.data[j * m.stride + i]);
    return out;
}

/// rows x columns, of rows x inner times inner x columns; all column-major without gaps.
template <class W>
std::vector<W> product_of(const std::vector<W>& left, const std::vector<W>& right, std::int64_t rows, std::int64_t inner, std::int64_t columns) {
    std::vector<W> out(static_cast<std::size_t>(rows * columns), W{0});
    for (std::int64_t j = 0; j < columns; ++j)
        for (std::int64_t k = 0; k < inner; ++k) {
            const W factor = right[static_cast<std::size_t>(j * inner + k)];
            const W* from = left.data() + k * rows;
            W* to = out.data() + j * rows;
            for (std::int64_t i = 0; i < rows; ++i) to[i] += from[i] * factor;
        }
    return out;
}

template <class T, class C, class W>
void multiply(const operand<T>& a, const operand<T>& b, W alpha, W beta, const result<C>& c, std::int64_t batch) {
    const std::vector<W> product = product_of<W>(dense(a, batch), dense(b, batch), a.rows, a.columns, b.columns);
    const matrix<C> m = c.stored(batch);
    if (beta != W{0}) fakecuda::detail::note_reads(m);
    fakecuda::detail::note_writes(m);
    for (std::int64_t j = 0; j < m.columns; ++j)
        for (std::int64_t i = 0; i < m.rows; ++i) {
            C& out = m.data[j * m.stride + i];
            W v = alpha * product[static_cast<std::size_t>(j * m.rows + i)];
            if (beta != W{0}) v += beta * widen(out);  // beta 0: C may be uninitialised
            narrow(v, out);
        }
}

template <class T, class C, class W>
cublasStatus_t gemm(cublasHandle_t h, const operand<T>& a, const operand<T>& b, const W* alpha, const W* beta, const result<C>& c, std::int64_t batches) {
    if (h == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!a.valid() || !b.valid() || batches < 0 || c.stride < std::max<std::int64_t>(1, c.rows) || alpha == nullptr || beta == nullptr)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (c.rows == 0 || c.columns == 0 || batches == 0) return CUBLAS_STATUS_SUCCESS;
    const bool reached = fakecuda::detail::reachable(a.stored(0), a.apart, batches, "cuBLAS, A") &&
                         fakecuda::detail::reachable(b.stored(0), b.apart, batches, "cuBLAS, B") &&
                         fakecuda::detail::reachable(c.stored(0), c.apart, batches, "cuBLAS, C");
    if (!reached) return CUBLAS_STATUS_EXECUTION_FAILED;
    const bool on_host = h->pointers == CUBLAS_POINTER_MODE_HOST;
    const W alpha_now = on_host ? *alpha : W{};
    const W beta_now = on_host ? *beta : W{};
    return status_of(fakecuda::enqueue(h->stream, [=] {
        for (std::int64_t i = 0; i < batches; ++i) multiply<T, C, W>(a, b, on_host ? alpha_now : *alpha, on_host ? beta_now : *beta, c, i);
    }));
}

template <class T, class C = T, class W = T>
cublasStatus_t gemm_pointers(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, std::int64_t m, std::int64_t n, std::int64_t k, const W* alpha,
                             const void* a, std::int64_t lda, std::int64_t apart_a, const void* b, std::int64_t ldb, std::int64_t apart_b, const W* beta,
                             void* c, std::int64_t ldc, std::int64_t apart_c, std::int64_t batches) {
    return gemm<T, C, W>(h, {static_cast<const T*>(a), lda, apart_a, ta, m, k}, {static_cast<const T*>(b), ldb, apart_b, tb, k, n}, alpha, beta,
                         {static_cast<C*>(c), ldc, apart_c, m, n}, batches);
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* out) {
    return status_of(fakecuda::detail::creating_call([&] { *out = new cublasContext; }));
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
    if (h == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t stream) {
    h->stream = stream;
    h->workspace = nullptr;  // cuBLAS goes back to its own
    h->workspace_bytes = 0;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t h, cudaStream_t* out) {
    *out = h->stream;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void* workspace, std::size_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (!fakecuda::detail::reachable(workspace, bytes, "cublasSetWorkspace")) return CUBLAS_STATUS_INVALID_VALUE;
    h->workspace = workspace;
    h->workspace_bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t mode) {
    h->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t mode) {
    h->pointers = mode;
    return CUBLAS_STATUS_SUCCESS;
}

const char* cublasGetStatusName(cublasStatus_t s) {
    switch (s) {
        case CUBLAS_STATUS_SUCCESS:
            return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED:
            return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_EXECUTION_FAILED:
            return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_INTERNAL_ERROR:
            return "CUBLAS_STATUS_INTERNAL_ERROR";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "CUBLAS_STATUS_NOT_SUPPORTED";
        default:
            return "an unknown cuBLAS status";
    }
}
const char* cublasGetStatusString(cublasStatus_t s) { return cublasGetStatusName(s); }

cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float* alpha, const float* a, int lda,
                              const float* b, int ldb, const float* beta, float* c, int ldc) {
    return gemm_pointers<float>(h, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);
}
cublasStatus_t cublasDgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double* alpha, const double* a, int lda,
                              const double* b, int ldb, const double* beta, double* c, int ldc) {
    return gemm_pointers<double>(h, ta, tb, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1);
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float* alpha, const float* a,
                                         int lda, long long apart_a, const float* b, int ldb, long long apart_b, const float* beta, float* c, int ldc,
                                         long long apart_c, int batches) {
    return gemm_pointers<float>(h, ta, tb, m, n, k, alpha, a, lda, apart_a, b, ldb, apart_b, beta, c, ldc, apart_c, batches);
}
cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double* alpha,
                                         const double* a, int lda, long long apart_a, const double* b, int ldb, long long apart_b, const double* beta,
                                         double* c, int ldc, long long apart_c, int batches) {
    return gemm_pointers<double>(h, ta, tb, m, n, k, alpha, a, lda, apart_a, b, ldb, apart_b, beta, c, ldc, apart_c, batches);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void* alpha, const void* a,
                                          cudaDataType type_a, int lda, long long apart_a, const void* b, cudaDataType type_b, int ldb, long long apart_b,
                                          const void* beta, void* c, cudaDataType type_c, int ldc, long long apart_c, int batches, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
    const auto call = [&]<class T, class C>(T, C) {
        return gemm_pointers<T, C, float>(h, ta, tb, m, n, k, static_cast<const float*>(alpha), a, lda, apart_a, b, ldb, apart_b,
                                          static_cast<const float*>(beta), c, ldc, apart_c, batches);
    };
    if (type_a != type_b || (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_PEDANTIC)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (type_a == CUDA_R_32F && type_c == CUDA_R_32F) return call(float{}, float{});
    if (type_a == CUDA_R_16F && type_c == CUDA_R_32F) return call(__half{}, float{});
    if (type_a == CUDA_R_16F && type_c == CUDA_R_16F) return call(__half{}, __half{});
    if (type_a == CUDA_R_16BF && type_c == CUDA_R_32F) return call(__nv_bfloat16{}, float{});
    if (type_a == CUDA_R_16BF && type_c == CUDA_R_16BF) return call(__nv_bfloat16{}, __nv_bfloat16{});
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void* alpha, const void* a,
                            cudaDataType type_a, int lda, const void* b, cudaDataType type_b, int ldb, const void* beta, void* c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c, ldc, 0, 1, compute, algorithm);
}

// C = alpha op(A) op(A)^T + beta C, one triangle of it; op(A) is n x k.
cublasStatus_t cublasDsyrk_v2(cublasHandle_t h, cublasFillMode_t triangle, cublasOperation_t op, int n, int k, const double* alpha, const double* a, int lda,
                              const double* beta, double* c, int ldc) {
    if (h == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    const operand<double> left{a, lda, 0, op, n, k};
    const matrix<double> out{c, n, n, ldc};
    if (!left.valid() || ldc < std::max(1, n) || h->pointers != CUBLAS_POINTER_MODE_HOST) return CUBLAS_STATUS_INVALID_VALUE;
    if (!fakecuda::detail::reachable(left.stored(0), 0, 1, "cuBLAS, A") || !fakecuda::detail::reachable(out, 0, 1, "cuBLAS, C"))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    return status_of(fakecuda::enqueue(h->stream, [=, alpha_now = *alpha, beta_now = *beta] {
        operand<double> right = left;
        right.op = op == CUBLAS_OP_N ? CUBLAS_OP_T : CUBLAS_OP_N;
        std::swap(right.rows, right.columns);
        const std::vector<double> product = product_of(dense(left, 0), dense(right, 0), n, k, n);
        fakecuda::detail::note_writes(out);
        for (int j = 0; j < n; ++j)
            for (int i = triangle == CUBLAS_FILL_MODE_LOWER ? j : 0; i < (triangle == CUBLAS_FILL_MODE_LOWER ? n : j + 1); ++i) {
                double& v = c[static_cast<std::int64_t>(j) * ldc + i];
                v = alpha_now * product[static_cast<std::size_t>(j) * static_cast<std::size_t>(n) + static_cast<std::size_t>(i)] +
                    (beta_now != 0 ? beta_now * v : 0.0);
            }
    }));
}
}
