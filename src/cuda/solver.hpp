// cuBLAS and cuSOLVER as owners and typed errors: the batched products and eigenproblems of a seal, one matrix per KV head.
#pragma once

#include <cublas_v2.h>
#include <cusolverDn.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/seal_kernels.hpp"

namespace sekv::cuda {

/// Throws budget_error when the library ran out of memory, else device_error, naming the call.
void check(cublasStatus_t result, const char* call);
void check(cusolverStatus_t result, const char* call);

class owned_blas {
public:
    owned_blas() { check(cublasCreate(&handle_), "cublasCreate"); }
    ~owned_blas() {
        if (handle_ != nullptr) (void)cublasDestroy(handle_);
    }
    owned_blas(const owned_blas&) = delete;
    owned_blas& operator=(const owned_blas&) = delete;
    [[nodiscard]] cublasHandle_t get() const noexcept { return handle_; }

private:
    cublasHandle_t handle_ = nullptr;
};

/// A cuSOLVER handle with parameters.
class owned_eigen {
public:
    owned_eigen();
    ~owned_eigen();
    owned_eigen(const owned_eigen&) = delete;
    owned_eigen& operator=(const owned_eigen&) = delete;
    [[nodiscard]] cusolverDnHandle_t get() const noexcept { return handle_; }
    [[nodiscard]] cusolverDnParams_t parameters() const noexcept { return parameters_; }
    /// Bytes of device and of host scratch for the eigenproblems of `heads` matrices of this size.
    [[nodiscard]] std::pair<std::size_t, std::size_t> scratch_bytes(std::int32_t size, std::int32_t heads) const;

private:
    cusolverDnHandle_t handle_ = nullptr;
    cusolverDnParams_t parameters_ = nullptr;
};

/// Matrices are [heads, size, size] without gaps. Everything is enqueued on one stream.
class solver {
public:
    /// Device memory of the libraries, all of it the caller's, so that it is counted.
    struct scratch {
        std::byte* blas = nullptr;
        std::size_t blas_bytes = 0;
        std::byte* eigen = nullptr;
        std::size_t eigen_bytes = 0;
        int* info = nullptr;  ///< [heads]
    };
    solver(const scratch& memory, stream s);
    void use(stream s);

    /// codes[h] = rows[h] * matrix[h], all row-major; transposed: matrix holds its transpose. codes are as far apart as rows.
    void project(const seal_rows_view& rows, const float* matrix, bool transposed, float* codes);
    /// sums[h] += rows[h]^T rows[h] for rows [heads, capacity, size], of which the first `count` are taken.
    void add_moments(const double* rows, std::int32_t heads, std::int32_t size, std::int32_t capacity, std::int32_t count, double* sums);
    /// out[h] = factor * left[h] * right[h], or * right[h]^T, column-major.
    void multiply(const double* left, const double* right, bool transposed, std::int32_t heads, std::int32_t size, double factor, double* out);
    /// Replaces symmetric matrices by their eigenvectors, one per column (column-major), by ascending eigenvalue; values [heads, size]. Synchronises with the host.
    /// Throws device_error too when the iteration didn't converge.
    void eigen(double* matrices, double* values, std::int32_t heads, std::int32_t size);

private:
    scratch memory_;
    stream stream_;
    owned_blas blas_;
    owned_eigen eigen_;
    std::vector<std::byte> host_scratch_;
};

}  // namespace sekv::cuda
