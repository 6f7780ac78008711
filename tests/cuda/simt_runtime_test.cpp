// The fake CUDA runtime itself: late work, missing events, capture, faults, and bad calls that it reports.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "simt/fakecuda.hpp"
#include "simt/launch.hpp"
#include "simt/sanitizers.hpp"
#include "simt/simt.hpp"

namespace {

using fakecuda::policy;
using testing::ElementsAre;
using testing::HasSubstr;

__global__ void add(int* to, const int* from, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) to[i] += from[i];
}
__global__ void fill(int* to, int value, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) to[i] = value;
}
__global__ void exit_early() {
    if (threadIdx.x == 0) return;
    __syncthreads();
}

constexpr int count = 100;
constexpr std::size_t bytes = count * sizeof(int);

struct buffers {
    int* device = nullptr;
    int* other = nullptr;
    int* host = nullptr;
    cudaStream_t a = nullptr, b = nullptr;
    cudaEvent_t event = nullptr;
    buffers() {
        EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&device), bytes), cudaSuccess);
        EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&other), bytes), cudaSuccess);
        EXPECT_EQ(cudaHostAlloc(reinterpret_cast<void**>(&host), bytes, cudaHostAllocMapped), cudaSuccess);
        EXPECT_EQ(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking), cudaSuccess);
        EXPECT_EQ(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking), cudaSuccess);
        EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
        for (int i = 0; i < count; ++i) host[i] = i;
    }
    ~buffers() {
        (void)cudaFree(device);
        (void)cudaFree(other);
        (void)cudaFreeHost(host);
        (void)cudaStreamDestroy(a);
        (void)cudaStreamDestroy(b);
        (void)cudaEventDestroy(event);
    }
    buffers(const buffers&) = delete;
    buffers& operator=(const buffers&) = delete;

    /// host -> device on a, device += device on b, back to host on b.
    void double_on_two_streams(bool ordered) const {
        EXPECT_EQ(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, a), cudaSuccess);
        EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
        if (ordered) {
            EXPECT_EQ(cudaStreamWaitEvent(b, event, 0), cudaSuccess);
        }
        EXPECT_EQ(simt::launch_on(b, 1, 128, 0, &add, device, device, count), cudaSuccess);
        EXPECT_EQ(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, b), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
    }
    [[nodiscard]] bool doubled() const {
        for (int i = 0; i < count; ++i)
            if (host[i] != 2 * i) return false;
        return true;
    }
};

struct mode {
    policy when;
    std::uint64_t seed;
};
class FakeCuda : public testing::TestWithParam<mode> {
protected:
    void SetUp() override { fakecuda::set_policy(GetParam().when, GetParam().seed); }
};
INSTANTIATE_TEST_SUITE_P(Policies, FakeCuda,
                         testing::Values(mode{policy::eager, 1}, mode{policy::lazy, 1}, mode{policy::random, 1}, mode{policy::random, 2},
                                         mode{policy::random, 3}));

TEST_P(FakeCuda, AnEventOrdersTwoStreams) {
    {
        const buffers x;
        x.double_on_two_streams(true);
        EXPECT_TRUE(x.doubled());
    }
    EXPECT_EQ(fakecuda::live_allocations(), 0u);
}

#if !defined(__SANITIZE_THREAD__)
TEST(FakeCudaRaces, AMissingEventIsSeenWhenWorkIsLate) {
    fakecuda::set_policy(policy::lazy);
    const buffers x;
    x.double_on_two_streams(false);
    EXPECT_FALSE(x.doubled());
}

TEST(FakeCudaRaces, AMissingEventIsSeenBySomeRandomOrder) {
    int wrong = 0;
    for (std::uint64_t seed = 2; seed < 12; ++seed) {
        fakecuda::set_policy(policy::random, seed);
        const buffers x;
        x.double_on_two_streams(false);
        wrong += x.doubled() ? 0 : 1;
    }
    EXPECT_GT(wrong, 0);
}

TEST(FakeCudaRaces, TheHostSeesALateCopyOnlyOnceItWaited) {
    fakecuda::set_policy(policy::lazy);
    const buffers x;
    ASSERT_EQ(cudaMemsetAsync(x.device, 0, bytes, x.a), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(x.host, x.device, bytes, cudaMemcpyDeviceToHost, x.a), cudaSuccess);
    EXPECT_EQ(x.host[5], 5);
    EXPECT_EQ(fakecuda::pending_operations(), 2u);
    ASSERT_EQ(cudaStreamSynchronize(x.a), cudaSuccess);
    EXPECT_EQ(x.host[5], 0);
}
#else
// Run by SimtRaces.ThreadSanitizerSees, which expects ThreadSanitizer to end them.
TEST(FakeCudaRaces, DISABLED_MissingEvent) {
    const buffers x;
    x.double_on_two_streams(false);
}

TEST(FakeCudaRaces, DISABLED_HostDoesNotWait) {
    const buffers x;
    ASSERT_EQ(cudaMemsetAsync(x.device, 0, bytes, x.a), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(x.host, x.device, bytes, cudaMemcpyDeviceToHost, x.a), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(x.b), cudaSuccess);
    x.host[5] = 1;
    ASSERT_EQ(cudaStreamSynchronize(x.a), cudaSuccess);
}
#endif

TEST_P(FakeCuda, AQueryInALoopSeesTheEndOfTheWork) {
    const buffers x;
    ASSERT_EQ(cudaMemsetAsync(x.device, 1, bytes, x.a), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(x.event, x.a), cudaSuccess);
    int polls = 0;
    while (cudaEventQuery(x.event) == cudaErrorNotReady) ASSERT_LT(++polls, 100);
    EXPECT_EQ(cudaStreamQuery(x.a), cudaSuccess);
    EXPECT_EQ(fakecuda::synchronisations(), 0u);
}

TEST_P(FakeCuda, TimesBetweenEvents) {
    cudaEvent_t from = nullptr, to = nullptr;
    ASSERT_EQ(cudaEventCreate(&from), cudaSuccess);
    ASSERT_EQ(cudaEventCreate(&to), cudaSuccess);
    float ms = -1;
    EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaErrorInvalidResourceHandle);
    ASSERT_EQ(cudaEventRecord(from, nullptr), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(to, nullptr), cudaSuccess);
    ASSERT_EQ(cudaEventSynchronize(to), cudaSuccess);
    EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaSuccess);
    EXPECT_GE(ms, 0.0f);
    EXPECT_EQ(cudaEventDestroy(from), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(to), cudaSuccess);
}

TEST_P(FakeCuda, PageableCopiesWait) {
    const buffers x;
    std::vector<int> pageable(count, 3);
    EXPECT_EQ(cudaMemcpyAsync(x.device, pageable.data(), bytes, cudaMemcpyHostToDevice, x.a), cudaSuccess);
    pageable.assign(count, 0);
    EXPECT_EQ(cudaMemcpyAsync(pageable.data(), x.device, bytes, cudaMemcpyDeviceToHost, x.a), cudaSuccess);
    EXPECT_THAT(pageable, testing::Each(3));
    EXPECT_EQ(fakecuda::synchronisations(), 2u);
}

TEST_P(FakeCuda, CopiesRowsOfAMatrix) {
    const buffers x;
    ASSERT_EQ(cudaMemsetAsync(x.device, 0, bytes, x.a), cudaSuccess);
    ASSERT_EQ(cudaMemcpy2DAsync(x.device, 40, x.host, 20, 8, 4, cudaMemcpyHostToDevice, x.a), cudaSuccess);
    std::vector<int> out(count);
    ASSERT_EQ(cudaMemcpyAsync(out.data(), x.device, bytes, cudaMemcpyDeviceToHost, x.a), cudaSuccess);
    EXPECT_EQ(out[10], 5);
    EXPECT_EQ(out[11], 6);
    EXPECT_EQ(out[12], 0);
    EXPECT_EQ(out[31], 16);
}

TEST_P(FakeCuda, ReportsBadCopies) {
    const buffers x;
    EXPECT_EQ(cudaMemcpyAsync(x.device, x.host, bytes + 4, cudaMemcpyHostToDevice, x.a), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpyAsync(x.host, x.device, bytes, cudaMemcpyHostToDevice, x.a), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemsetAsync(x.device + 1, 0, bytes, x.a), cudaErrorInvalidValue);
    const auto problems = fakecuda::take_problems();
    EXPECT_THAT(problems, ElementsAre(HasSubstr("destination is 404 bytes"), HasSubstr("host to device"), HasSubstr("a fill")));
}

TEST_P(FakeCuda, ReportsUseAfterFree) {
    const buffers x;
    int* gone = nullptr;
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&gone), bytes), cudaSuccess);
    ASSERT_EQ(cudaFree(gone), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(gone, x.host, bytes, cudaMemcpyHostToDevice, x.a), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(gone), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(x.host), cudaErrorInvalidValue);
    EXPECT_EQ(fakecuda::take_problems().size(), 3u);
}

#if SIMT_ASAN
TEST(FakeCudaDeathTest, TheHostCannotReadDeviceMemory) {
    const buffers x;
    EXPECT_DEATH(
        {
            volatile int v = x.device[0];
            (void)v;
        },
        "AddressSanitizer");
}

TEST(FakeCudaDeathTest, AKernelCannotReadFreedMemory) {
    const buffers x;
    int* gone = nullptr;
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&gone), bytes), cudaSuccess);
    ASSERT_EQ(cudaFree(gone), cudaSuccess);
    EXPECT_DEATH(
        {
            (void)simt::launch_on(x.a, 1, 128, 0, &fill, gone, 1, count);
            (void)cudaStreamSynchronize(x.a);
        },
        "AddressSanitizer");
}

TEST(FakeCudaDeathTest, AKernelCannotWritePastAnAllocation) {
    const buffers x;
    EXPECT_DEATH(
        {
            (void)simt::launch_on(x.a, 1, 128, 0, &fill, x.device, 1, count + 1);
            (void)cudaStreamSynchronize(x.a);
        },
        "AddressSanitizer");
}
#else
TEST_P(FakeCuda, ReportsAWritePastAnAllocationWhenItIsFreed) {
    {
        const buffers x;
        ASSERT_EQ(simt::launch_on(x.a, 1, 128, 0, &fill, x.device, 1, count + 1), cudaSuccess);
    }
    EXPECT_THAT(fakecuda::take_problems(), ElementsAre(HasSubstr("behind an allocation")));
}
#endif

TEST_P(FakeCuda, RefusesLaunchesOutOfRange) {
    EXPECT_EQ(simt::launch_on(nullptr, 1, 1025, 0, &exit_early), cudaErrorInvalidConfiguration);
    EXPECT_EQ(simt::launch_on(nullptr, dim3(1, 65536), 32, 0, &exit_early), cudaErrorInvalidConfiguration);
    EXPECT_EQ(simt::launch_on(nullptr, 1, 32, 228 * 1024, &exit_early), cudaErrorInvalidValue);
    EXPECT_EQ(fakecuda::take_problems().size(), 3u);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_P(FakeCuda, AFailingKernelLosesTheContext) {
    {
        const buffers x;
        (void)simt::launch_on(x.a, 1, 64, 0, &exit_early);
        EXPECT_EQ(cudaStreamSynchronize(x.a), cudaErrorLaunchFailure);
        EXPECT_EQ(cudaMemsetAsync(x.device, 0, 4, x.a), cudaErrorLaunchFailure);
        EXPECT_THAT(std::string(cudaGetErrorString(cudaErrorLaunchFailure)), HasSubstr("exited before a barrier"));
        EXPECT_EQ(fakecuda::take_problems().size(), 1u);
    }
    EXPECT_EQ(fakecuda::live_allocations(), 0u);
    fakecuda::reset();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// --- capture

struct graph {
    cudaGraph_t captured = nullptr;
    cudaGraphExec_t executable = nullptr;
    graph() = default;
    graph(const graph&) = delete;
    graph& operator=(const graph&) = delete;
    ~graph() {
        if (executable != nullptr) (void)cudaGraphExecDestroy(executable);
        if (captured != nullptr) (void)cudaGraphDestroy(captured);
    }
};

TEST_P(FakeCuda, CapturesAndReplays) {
    const buffers x;
    graph g;
    ASSERT_EQ(cudaStreamBeginCapture(x.a, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(x.device, x.host, bytes, cudaMemcpyHostToDevice, x.a), cudaSuccess);
    EXPECT_EQ(simt::launch_on(x.a, 1, 128, 0, &add, x.device, x.device, count), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(x.host, x.device, bytes, cudaMemcpyDeviceToHost, x.a), cudaSuccess);
    cudaStreamCaptureStatus status{};
    EXPECT_EQ(cudaStreamIsCapturing(x.a, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    ASSERT_EQ(cudaStreamEndCapture(x.a, &g.captured), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&g.executable, g.captured, 0), cudaSuccess);
    EXPECT_EQ(x.host[7], 7);  // nothing has run
    for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaGraphLaunch(g.executable, x.b), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(x.b), cudaSuccess);
    EXPECT_EQ(x.host[7], 56);
}

TEST_P(FakeCuda, CapturesAForkAndItsJoin) {
    const buffers x;
    graph g;
    cudaEvent_t back = nullptr;
    ASSERT_EQ(cudaEventCreateWithFlags(&back, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(x.a, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(simt::launch_on(x.a, 1, 128, 0, &fill, x.device, 1, count), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(x.event, x.a), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(x.b, x.event, 0), cudaSuccess);
    EXPECT_EQ(simt::launch_on(x.b, 1, 128, 0, &fill, x.other, 5, count), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(back, x.b), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(x.a, back, 0), cudaSuccess);
    EXPECT_EQ(simt::launch_on(x.a, 1, 128, 0, &add, x.device, x.other, count), cudaSuccess);
    ASSERT_EQ(cudaStreamEndCapture(x.a, &g.captured), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&g.executable, g.captured, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(g.executable, x.a), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(x.host, x.device, bytes, cudaMemcpyDeviceToHost, x.a), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(x.a), cudaSuccess);
    EXPECT_EQ(x.host[3], 6);
    EXPECT_EQ(cudaEventDestroy(back), cudaSuccess);
}

TEST_P(FakeCuda, RefusesACaptureWithABranchLeftOpen) {
    const buffers x;
    graph g;
    ASSERT_EQ(cudaStreamBeginCapture(x.a, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(x.event, x.a), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(x.b, x.event, 0), cudaSuccess);
    EXPECT_EQ(simt::launch_on(x.b, 1, 128, 0, &fill, x.other, 5, count), cudaSuccess);
    EXPECT_EQ(cudaStreamEndCapture(x.a, &g.captured), cudaErrorStreamCaptureUnjoined);
}

TEST_P(FakeCuda, RefusesUnsafeCallsDuringACapture) {
    const buffers x;
    void* p = nullptr;
    const std::vector<std::function<cudaError_t()>> unsafe = {
        [&] { return cudaMalloc(&p, 16); },
        [&] { return cudaFree(x.device); },
        [&] { return cudaDeviceSynchronize(); },
        [&] { return cudaStreamSynchronize(x.a); },
        [&] { return cudaStreamQuery(x.a); },
        [&] { return cudaEventSynchronize(x.event); },
        [&] { return cudaMemcpy(x.device, x.host, bytes, cudaMemcpyHostToDevice); },
    };
    for (const auto& call : unsafe) {
        graph g;
        ASSERT_EQ(cudaStreamBeginCapture(x.a, cudaStreamCaptureModeGlobal), cudaSuccess);
        EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported);
        EXPECT_EQ(cudaStreamEndCapture(x.a, &g.captured), cudaErrorStreamCaptureInvalidated);
    }
}

// --- faults and limits

TEST_P(FakeCuda, FailsTheCallThatThePlanNames) {
    void* p = nullptr;
    void* q = nullptr;
    fakecuda::fail_after(fakecuda::call::allocation, 1, cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaMalloc(&p, 16), cudaSuccess);
    EXPECT_EQ(cudaMallocHost(&q, 16), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaMallocHost(&q, 16), cudaSuccess);
    fakecuda::fail_after(fakecuda::call::copy, 0, cudaErrorUnknown);
    EXPECT_EQ(cudaMemcpyAsync(p, q, 16, cudaMemcpyHostToDevice, nullptr), cudaErrorUnknown);
    fakecuda::fail_after(fakecuda::call::launch, 0, cudaErrorLaunchOutOfResources);
    EXPECT_EQ(simt::launch_on(nullptr, 1, 32, 0, &fill, static_cast<int*>(p), 0, 4), cudaErrorLaunchOutOfResources);
    EXPECT_EQ(cudaFree(p), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(q), cudaSuccess);
}

TEST_P(FakeCuda, ALostContextFailsEveryCall) {
    void* p = nullptr;
    ASSERT_EQ(cudaMalloc(&p, 16), cudaSuccess);
    fakecuda::fail_after(fakecuda::call::any, 2, cudaErrorECCUncorrectable, true);
    EXPECT_EQ(cudaMemsetAsync(p, 0, 16, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorECCUncorrectable);
    EXPECT_EQ(cudaMemsetAsync(p, 0, 16, nullptr), cudaErrorECCUncorrectable);
    EXPECT_EQ(cudaGetLastError(), cudaErrorECCUncorrectable);
    EXPECT_EQ(cudaFree(p), cudaErrorECCUncorrectable);
    EXPECT_EQ(fakecuda::live_allocations(), 0u);
    fakecuda::reset();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_P(FakeCuda, RunsOutOfMemory) {
    fakecuda::set_memory(1000, 500);
    void* p = nullptr;
    void* q = nullptr;
    std::size_t left = 0, total = 0;
    EXPECT_EQ(cudaMalloc(&p, 900), cudaSuccess);
    EXPECT_EQ(cudaMemGetInfo(&left, &total), cudaSuccess);
    EXPECT_EQ(left, 100u);
    EXPECT_EQ(total, 1000u);
    EXPECT_EQ(cudaMalloc(&q, 101), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaMallocHost(&q, 501), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaFree(p), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&q, 1000), cudaSuccess);
    EXPECT_EQ(cudaFree(q), cudaSuccess);
    fakecuda::set_memory(std::size_t{8} << 30, std::size_t{8} << 30);
}

TEST_P(FakeCuda, KnowsItsPointers) {
    const buffers x;
    cudaPointerAttributes known{};
    ASSERT_EQ(cudaPointerGetAttributes(&known, x.device + 3), cudaSuccess);
    EXPECT_EQ(known.type, cudaMemoryTypeDevice);
    ASSERT_EQ(cudaPointerGetAttributes(&known, x.host), cudaSuccess);
    EXPECT_EQ(known.type, cudaMemoryTypeHost);
    ASSERT_EQ(cudaPointerGetAttributes(&known, &known), cudaSuccess);
    EXPECT_EQ(known.type, cudaMemoryTypeUnregistered);
    void* mapped = nullptr;
    EXPECT_EQ(cudaHostGetDevicePointer(&mapped, x.host, 0), cudaSuccess);
    EXPECT_EQ(mapped, x.host);
}

TEST_P(FakeCuda, HostFunctionsRunInStreamOrderAndMayNotCallCuda) {
    const buffers x;
    ASSERT_EQ(cudaMemsetAsync(x.device, 0, bytes, x.a), cudaSuccess);
    cudaError_t inside = cudaSuccess;
    ASSERT_EQ(cudaLaunchHostFunc(
                  x.a, [](void* out) { *static_cast<cudaError_t*>(out) = cudaDeviceSynchronize(); }, &inside),
              cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(x.a), cudaSuccess);
    EXPECT_EQ(inside, cudaErrorNotPermitted);
    EXPECT_EQ(fakecuda::take_problems().size(), 1u);
}

}  // namespace
