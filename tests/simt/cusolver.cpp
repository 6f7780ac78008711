// The cuSOLVER functions that the project calls or may call, over Eigen. Link-time stand-in: the header is NVIDIA's.
#include <cusolverDn.h>

#include <Eigen/Dense>
#include <cstring>
#include <limits>

#include "simt/library_calls.hpp"

struct cusolverDnContext {
    cudaStream_t stream = nullptr;
};
struct cusolverDnParams {};
struct syevjInfo {
    double tolerance = 0;
    int sweeps = 0;
    bool sorted = true;
};

namespace {

using fakecuda::detail::matrix;
using fakecuda::detail::reachable;

constexpr std::size_t host_bytes_per_matrix = 64;

cusolverStatus_t status_of(cudaError_t e) {
    if (e == cudaSuccess) return CUSOLVER_STATUS_SUCCESS;
    if (e == cudaErrorMemoryAllocation) return CUSOLVER_STATUS_ALLOC_FAILED;
    return e == cudaErrorStreamCaptureUnsupported ? CUSOLVER_STATUS_INTERNAL_ERROR : CUSOLVER_STATUS_EXECUTION_FAILED;
}

struct eigen_job {
    cusolverEigMode_t mode;
    cublasFillMode_t triangle;
    std::int64_t n, stride, batches;
    void* scratch;
    std::size_t scratch_bytes;
    int* info;
    [[nodiscard]] std::size_t scratch_needed() const { return static_cast<std::size_t>(n * (n + 2) * batches) * sizeof(double); }
    [[nodiscard]] bool valid() const {
        const bool known_mode = mode == CUSOLVER_EIG_MODE_VECTOR || mode == CUSOLVER_EIG_MODE_NOVECTOR;
        return n >= 0 && batches >= 0 && stride >= std::max<std::int64_t>(1, n) && known_mode &&
               (triangle == CUBLAS_FILL_MODE_LOWER || triangle == CUBLAS_FILL_MODE_UPPER);
    }
};

/// Eigenvalues ascending into w; with vectors, a's columns become them. Returns info: 0, or that it didn't converge.
int decompose(const eigen_job& job, double* a, double* w) {
    const matrix<double> stored{a, job.n, job.n, job.stride};
    fakecuda::detail::note_reads(stored);
    fakecuda::detail::note_writes(stored);
    simt::detail::tsan_writes(w, static_cast<std::size_t>(job.n) * sizeof(double));
    Eigen::Map<Eigen::MatrixXd, 0, Eigen::OuterStride<>> view(a, job.n, job.n, Eigen::OuterStride<>(job.stride));
    Eigen::MatrixXd whole;
    if (job.triangle == CUBLAS_FILL_MODE_LOWER)
        whole = view.selfadjointView<Eigen::Lower>();
    else
        whole = view.selfadjointView<Eigen::Upper>();
    const bool vectors = job.mode == CUSOLVER_EIG_MODE_VECTOR;
    if (!whole.allFinite()) {
        view.setConstant(std::numeric_limits<double>::quiet_NaN());
        Eigen::Map<Eigen::VectorXd>(w, job.n).setConstant(std::numeric_limits<double>::quiet_NaN());
        return static_cast<int>(job.n);
    }
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solved(whole, vectors ? Eigen::ComputeEigenvectors : Eigen::EigenvaluesOnly);
    Eigen::Map<Eigen::VectorXd>(w, job.n) = solved.eigenvalues();
    if (vectors) view = solved.eigenvectors();
    if (!vectors) view.setConstant(std::numeric_limits<double>::quiet_NaN());  // A's contents are destroyed
    return solved.info() == Eigen::Success ? 0 : 1;
}

cusolverStatus_t enqueue_eigen(cusolverDnHandle_t h, const eigen_job& job, double* a, double* w) {
    if (h == nullptr) return CUSOLVER_STATUS_NOT_INITIALIZED;
    if (!job.valid() || job.scratch_bytes < job.scratch_needed()) return CUSOLVER_STATUS_INVALID_VALUE;
    if (job.n == 0 || job.batches == 0) return CUSOLVER_STATUS_SUCCESS;
    const std::int64_t apart = job.stride * job.n;
    const bool reached = reachable(matrix<double>{a, job.n, job.n, job.stride}, apart, job.batches, "cuSOLVER, A") &&
                         reachable(w, static_cast<std::size_t>(job.n * job.batches) * sizeof(double), "cuSOLVER, W") &&
                         reachable(job.scratch, job.scratch_bytes, "cuSOLVER, workspace") &&
                         reachable(job.info, static_cast<std::size_t>(job.batches) * sizeof(int), "cuSOLVER, info");
    if (!reached) return CUSOLVER_STATUS_EXECUTION_FAILED;
    return status_of(fakecuda::enqueue(h->stream, [=] {
        std::memset(job.scratch, 0xff, job.scratch_needed());  // what else lay there is lost, as with the real one
        for (std::int64_t i = 0; i < job.batches; ++i) {
            const int outcome = decompose(job, a + i * apart, w + i * job.n);
            std::memcpy(job.info + i, &outcome, sizeof outcome);
        }
    }));
}

int scratch_elements(std::int64_t n, std::int64_t batches) { return static_cast<int>(n * (n + 2) * batches); }

}  // namespace

extern "C" {

cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t* out) {
    return status_of(fakecuda::detail::creating_call([&] { *out = new cusolverDnContext; }));
}
cusolverStatus_t cusolverDnDestroy(cusolverDnHandle_t h) {
    if (h == nullptr) return CUSOLVER_STATUS_NOT_INITIALIZED;
    delete h;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t h, cudaStream_t stream) {
    h->stream = stream;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnGetStream(cusolverDnHandle_t h, cudaStream_t* out) {
    *out = h->stream;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnCreateParams(cusolverDnParams_t* out) {
    return status_of(fakecuda::detail::creating_call([&] { *out = new cusolverDnParams; }));
}
cusolverStatus_t cusolverDnDestroyParams(cusolverDnParams_t params) {
    delete params;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnCreateSyevjInfo(syevjInfo_t* out) {
    return status_of(fakecuda::detail::creating_call([&] { *out = new syevjInfo; }));
}
cusolverStatus_t cusolverDnDestroySyevjInfo(syevjInfo_t info) {
    delete info;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnXsyevjSetTolerance(syevjInfo_t info, double tolerance) {
    info->tolerance = tolerance;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnXsyevjSetMaxSweeps(syevjInfo_t info, int sweeps) {
    info->sweeps = sweeps;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnXsyevjSetSortEig(syevjInfo_t info, int sorted) {
    info->sorted = sorted != 0;
    return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnDsyevd_bufferSize(cusolverDnHandle_t, cusolverEigMode_t, cublasFillMode_t, int n, const double*, int, const double*, int* elements) {
    *elements = scratch_elements(n, 1);
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnDsyevd(cusolverDnHandle_t h, cusolverEigMode_t mode, cublasFillMode_t triangle, int n, double* a, int lda, double* w, double* work,
                                  int elements, int* info) {
    return enqueue_eigen(h, {mode, triangle, n, lda, 1, work, static_cast<std::size_t>(elements) * sizeof(double), info}, a, w);
}

cusolverStatus_t cusolverDnDsyevjBatched_bufferSize(cusolverDnHandle_t, cusolverEigMode_t, cublasFillMode_t, int n, const double*, int, const double*,
                                                    int* elements, syevjInfo_t, int batches) {
    *elements = scratch_elements(n, batches);
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnDsyevjBatched(cusolverDnHandle_t h, cusolverEigMode_t mode, cublasFillMode_t triangle, int n, double* a, int lda, double* w,
                                         double* work, int elements, int* info, syevjInfo_t, int batches) {
    return enqueue_eigen(h, {mode, triangle, n, lda, batches, work, static_cast<std::size_t>(elements) * sizeof(double), info}, a, w);
}

cusolverStatus_t cusolverDnXsyevBatched_bufferSize(cusolverDnHandle_t, cusolverDnParams_t, cusolverEigMode_t, cublasFillMode_t, std::int64_t n,
                                                   cudaDataType type, const void*, std::int64_t, cudaDataType, const void*, cudaDataType, std::size_t* device,
                                                   std::size_t* host, std::int64_t batches) {
    if (type != CUDA_R_64F) return CUSOLVER_STATUS_NOT_SUPPORTED;
    *device = static_cast<std::size_t>(scratch_elements(n, batches)) * sizeof(double);
    *host = static_cast<std::size_t>(batches) * host_bytes_per_matrix;
    return CUSOLVER_STATUS_SUCCESS;
}
cusolverStatus_t cusolverDnXsyevBatched(cusolverDnHandle_t h, cusolverDnParams_t, cusolverEigMode_t mode, cublasFillMode_t triangle, std::int64_t n,
                                        cudaDataType type, void* a, std::int64_t lda, cudaDataType type_w, void* w, cudaDataType, void* device,
                                        std::size_t device_bytes, void* host, std::size_t host_bytes, int* info, std::int64_t batches) {
    if (type != type_w || host_bytes < static_cast<std::size_t>(batches) * host_bytes_per_matrix || host == nullptr) return CUSOLVER_STATUS_INVALID_VALUE;
    const eigen_job job{mode, triangle, n, lda, batches, device, device_bytes, info};
    if (type != CUDA_R_64F) return CUSOLVER_STATUS_NOT_SUPPORTED;
    return enqueue_eigen(h, job, static_cast<double*>(a), static_cast<double*>(w));
}
}
