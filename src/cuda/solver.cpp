#include "src/cuda/solver.hpp"

#include <string>

#include "src/cuda/runtime.hpp"

#if defined(CUSOLVER_VERSION) && CUSOLVER_VERSION < 11701
#error "sekv needs cuSOLVER 11.7.1 or later (CUDA 12.6 update 2), for cusolverDnXsyevBatched."
#endif

namespace sekv::cuda {
namespace {

[[noreturn]] void fail(const std::string& what, bool memory) {
    if (memory) throw budget_error(what + "; free device memory, close sequences, or lower the budgets.", 0, 0);
    const bool lost = is_sticky(cudaGetLastError());
    throw device_error(what + (lost ? "; the device context is lost, so nothing in its memory can be read any more: destroy the cache, and restart the process before using the device again."
                                    : "; check that cuBLAS, cuSOLVER, the CUDA runtime and the driver are of matching versions."),
                       lost);
}

const char* name_of(cusolverStatus_t result) {
    switch (result) {
        case CUSOLVER_STATUS_NOT_INITIALIZED: return "CUSOLVER_STATUS_NOT_INITIALIZED";
        case CUSOLVER_STATUS_ALLOC_FAILED: return "CUSOLVER_STATUS_ALLOC_FAILED";
        case CUSOLVER_STATUS_INVALID_VALUE: return "CUSOLVER_STATUS_INVALID_VALUE";
        case CUSOLVER_STATUS_ARCH_MISMATCH: return "CUSOLVER_STATUS_ARCH_MISMATCH";
        case CUSOLVER_STATUS_EXECUTION_FAILED: return "CUSOLVER_STATUS_EXECUTION_FAILED";
        case CUSOLVER_STATUS_INTERNAL_ERROR: return "CUSOLVER_STATUS_INTERNAL_ERROR";
        case CUSOLVER_STATUS_NOT_SUPPORTED: return "CUSOLVER_STATUS_NOT_SUPPORTED";
        default: return nullptr;
    }
}

std::int64_t elements(std::int32_t size) { return static_cast<std::int64_t>(size) * size; }

}  // namespace

void check(cublasStatus_t result, const char* call) {
    if (result != CUBLAS_STATUS_SUCCESS) fail(std::string(call) + " failed with " + cublasGetStatusString(result), result == CUBLAS_STATUS_ALLOC_FAILED);
}

void check(cusolverStatus_t result, const char* call) {
    if (result == CUSOLVER_STATUS_SUCCESS) return;
    const char* name = name_of(result);
    fail(std::string(call) + " failed with " + (name != nullptr ? name : "cuSOLVER status " + std::to_string(static_cast<int>(result))), result == CUSOLVER_STATUS_ALLOC_FAILED);
}

owned_eigen::owned_eigen() {
    check(cusolverDnCreate(&handle_), "cusolverDnCreate");
    const auto result = cusolverDnCreateParams(&parameters_);
    if (result == CUSOLVER_STATUS_SUCCESS) return;
    (void)cusolverDnDestroy(handle_);
    check(result, "cusolverDnCreateParams");
}

owned_eigen::~owned_eigen() {
    (void)cusolverDnDestroyParams(parameters_);
    (void)cusolverDnDestroy(handle_);
}

std::pair<std::size_t, std::size_t> owned_eigen::scratch_bytes(std::int32_t size, std::int32_t heads) const {
    std::size_t device = 0, host = 0;
    check(cusolverDnXsyevBatched_bufferSize(handle_, parameters_, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, size, CUDA_R_64F, nullptr, size, CUDA_R_64F, nullptr, CUDA_R_64F, &device, &host, heads),
          "cusolverDnXsyevBatched_bufferSize");
    return {device, host};
}

solver::solver(const scratch& memory, stream s) : memory_(memory) { use(s); }

void solver::use(stream s) {
    stream_ = s;
    check(cublasSetStream(blas_.get(), s), "cublasSetStream");
    check(cublasSetWorkspace(blas_.get(), memory_.blas, memory_.blas_bytes), "cublasSetWorkspace");  // after the stream, which resets it
    check(cusolverDnSetStream(eigen_.get(), s), "cusolverDnSetStream");
}

void solver::project(const seal_rows_view& rows, const float* matrix, bool transposed, float* codes) {
    const float one = 1, zero = 0;
    const auto d = rows.size;
    const auto apart = static_cast<std::int64_t>(rows.capacity) * d;
    // Row-major arrays are the transposes of column-major ones: codes^T = matrix^T rows^T.
    check(cublasSgemmStridedBatched(blas_.get(), transposed ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, d, rows.rows, d, &one, matrix, d, elements(d), rows.data, d, apart, &zero, codes, d, apart, rows.heads),
          "cublasSgemmStridedBatched");
}

void solver::add_moments(const double* rows, std::int32_t heads, std::int32_t size, std::int32_t capacity, std::int32_t count, double* sums) {
    const double one = 1;
    const auto apart = static_cast<std::int64_t>(capacity) * size;
    check(cublasDgemmStridedBatched(blas_.get(), CUBLAS_OP_N, CUBLAS_OP_T, size, size, count, &one, rows, size, apart, rows, size, apart, &one, sums, size, elements(size), heads), "cublasDgemmStridedBatched");
}

void solver::multiply(const double* left, const double* right, bool transposed, std::int32_t heads, std::int32_t size, double factor, double* out) {
    const double zero = 0;
    check(cublasDgemmStridedBatched(blas_.get(), CUBLAS_OP_N, transposed ? CUBLAS_OP_T : CUBLAS_OP_N, size, size, size, &factor, left, size, elements(size), right, size, elements(size), &zero, out, size,
                                    elements(size), heads),
          "cublasDgemmStridedBatched");
}

void solver::eigen(double* matrices, double* values, std::int32_t heads, std::int32_t size) {
    const auto [device, host] = eigen_.scratch_bytes(size, heads);
    if (device > memory_.eigen_bytes)
        throw device_error("cuSOLVER asks for " + std::to_string(device) + " bytes of scratch for " + std::to_string(heads) + " matrices of size " + std::to_string(size) + ", more than the " +
                               std::to_string(memory_.eigen_bytes) + " that seal_workspace_bytes measured; size the workspace for the widest layer.",
                           false);
    host_scratch_.resize(host);
    check(cusolverDnXsyevBatched(eigen_.get(), eigen_.parameters(), CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, size, CUDA_R_64F, matrices, size, CUDA_R_64F, values, CUDA_R_64F, memory_.eigen, device,
                                 host_scratch_.data(), host, memory_.info, heads),
          "cusolverDnXsyevBatched");
    std::vector<int> info(static_cast<std::size_t>(heads));
    check(cudaMemcpyAsync(info.data(), memory_.info, info.size() * sizeof(int), cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (std::size_t h = 0; h < info.size(); ++h) {
        if (info[h] != 0)
            throw device_error("The eigenvectors of KV head " + std::to_string(h) + " didn't converge (cusolverDnXsyevBatched reports info " + std::to_string(info[h]) +
                                   "); check that keys, values and queries are finite.",
                               false);
    }
}

}  // namespace sekv::cuda
