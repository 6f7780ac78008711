// The emulation itself: what it detects, and what its warp operations and copies give.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "kernels/device.cuh"
#include "simt/problem_listener.hpp"

namespace {

using sekv::cuda::dynamic_bytes;
using sekv::cuda::dynamic_shared;
using sekv::cuda::shared_array;

constexpr unsigned whole_warp = 0xffffffffu;

/// Message of the error that the launch throws; empty: none.
template <class... P>
std::string message_of(dim3 grid, dim3 block, std::size_t shared, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
    try {
        simt::launch(grid, block, shared, kernel, arguments...);
    } catch (const simt::error& e) {
        return e.what();
    }
    return "";
}

/// Every test runs under forward, reverse and two random schedules.
class Simt : public testing::TestWithParam<std::uint64_t> {
protected:
    void SetUp() override { simt::set_seed(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Schedules, Simt, testing::Values(0, 1, 2, 99));

struct sums {
    shared_array<float, 8> of_warp;
};

__global__ void block_sum(const float* in, float* out, int n) {
    auto& s = dynamic_shared<sums>();
    const int thread = static_cast<int>(threadIdx.x);
    float sum = 0;
    for (int i = thread; i < n; i += static_cast<int>(blockDim.x)) sum += in[i];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(whole_warp, sum, step);
    if (thread % 32 == 0) s.of_warp[thread / 32] = sum;
    __syncthreads();
    if (thread != 0) return;
    float total = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += s.of_warp[w];
    out[blockIdx.x] = total;
}

TEST_P(Simt, RunsABlockSum) {
    std::vector<float> in(1000);
    std::iota(in.begin(), in.end(), 1.0f);
    std::vector<float> out(3, 0.0f);
    simt::launch(3, 256, sizeof(sums), &block_sum, in.data(), out.data(), 1000);
    EXPECT_THAT(out, testing::Each(500500.0f));
}

__global__ void mark_place(int* out) {
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}

TEST_P(Simt, RunsEveryThreadOfA3dGridOnce) {
    std::vector<int> out(2 * 3 * 4 * 5 * 2 * 3, 0);
    simt::launch(dim3(2, 3, 4), dim3(5, 2, 3), 0, &mark_place, out.data());
    EXPECT_THAT(out, testing::Each(1));
}

// --- detectors

__global__ void exit_before_barrier() {
    if (threadIdx.x < 3) return;
    __syncthreads();
}

TEST_P(Simt, ReportsAThreadThatExitedBeforeABarrier) {
    const std::string message = message_of(1, 64, 0, &exit_before_barrier);
    EXPECT_THAT(message, testing::HasSubstr("exited before a barrier"));
    EXPECT_THAT(message, testing::HasSubstr("SEKV_SIMT_SEED=" + std::to_string(GetParam())));
}

__global__ void different_barriers() {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}

TEST_P(Simt, ReportsThreadsAtDifferentBarriers) { EXPECT_THAT(message_of(1, 64, 0, &different_barriers), testing::HasSubstr("different barriers")); }

__global__ void barrier_in_one_warp() {
    if (threadIdx.x < 32) __syncthreads();
    if (threadIdx.x < 32) return;
    __syncthreads();
}

TEST_P(Simt, ReportsABarrierThatOnlyOneWarpReaches) { EXPECT_NE(message_of(1, 64, 0, &barrier_in_one_warp), ""); }

__global__ void shuffle_within(unsigned mask, int source, int* out) {
    if ((mask >> threadIdx.x & 1) != 0) out[threadIdx.x] = __shfl_sync(mask, static_cast<int>(threadIdx.x), source);
}

TEST_P(Simt, ReportsAShuffleFromOutsideTheMask) {
    std::vector<int> out(32, -1);
    EXPECT_THAT(message_of(1, 32, 0, &shuffle_within, 0xffffu, 20, out.data()), testing::HasSubstr("shuffle from lane 20"));
    EXPECT_EQ(message_of(1, 32, 0, &shuffle_within, 0xffffu, 7, out.data()), "");
    EXPECT_EQ(out[15], 7);
}

__global__ void shuffle_after_exit(int* out) {
    if (threadIdx.x == 5) return;
    out[threadIdx.x] = __shfl_sync(whole_warp, 1, 0);
}

TEST_P(Simt, ReportsAMaskThatNamesAnExitedLane) {
    std::vector<int> out(32);
    EXPECT_NE(message_of(1, 32, 0, &shuffle_after_exit, out.data()), "");
}

__global__ void different_operations(int* out) {
    out[threadIdx.x] = threadIdx.x < 16 ? __shfl_sync(whole_warp, 1, 0) : static_cast<int>(__ballot_sync(whole_warp, 1));
}

TEST_P(Simt, ReportsLanesInDifferentOperations) {
    std::vector<int> out(32);
    EXPECT_THAT(message_of(1, 32, 0, &different_operations, out.data()), testing::HasSubstr("in one warp"));
}

__global__ void different_masks(int* out) { out[threadIdx.x] = __any_sync(threadIdx.x == 0 ? 0x3u : whole_warp, 1); }

TEST_P(Simt, ReportsLanesWithDifferentMasks) {
    std::vector<int> out(32);
    EXPECT_NE(message_of(1, 32, 0, &different_masks, out.data()), "");
}

__global__ void spin(int* flag) {
    while (atomicAdd(flag, 0) == 0) {
    }
}

TEST_P(Simt, StopsASpinLoop) {
    int flag = 0;
    const auto before = simt::current_options().most_spins;
    simt::current_options().most_spins = 10'000;
    EXPECT_THAT(message_of(1, 64, 0, &spin, &flag), testing::HasSubstr("watchdog"));
    simt::current_options().most_spins = before;
}

__global__ void wait_for_another_warp(int* flag, int* out) {
    if (threadIdx.x == 63) atomicExch(flag, 1);
    if (threadIdx.x == 0)
        while (atomicAdd(flag, 0) == 0) {
        }
    out[threadIdx.x] = 1;
}

TEST_P(Simt, LetsOthersRunDuringASpinLoop) {
    int flag = 0;
    std::vector<int> out(64, 0);
    EXPECT_EQ(message_of(1, 64, 0, &wait_for_another_warp, &flag, out.data()), "");
    EXPECT_THAT(out, testing::Each(1));
}

__global__ void shared_index(int i) {
    auto& s = dynamic_shared<sums>();
    s.of_warp[i] = 0;
}

TEST_P(Simt, ReportsASharedIndexOutOfBounds) {
    EXPECT_THAT(message_of(1, 1, sizeof(sums), &shared_index, 8), testing::HasSubstr("index 8 of a shared array of 8"));
    EXPECT_THAT(message_of(1, 1, sizeof(sums), &shared_index, -1), testing::HasSubstr("index -1"));
    EXPECT_EQ(message_of(1, 1, sizeof(sums), &shared_index, 7), "");
}

__global__ void write_raw(int byte) { *(dynamic_bytes(64) + byte) = 1; }

TEST_P(Simt, ReportsAWriteBehindTheSharedMemory) {
#if SIMT_ASAN
    EXPECT_DEATH(simt::launch(1, 1, 64, &write_raw, 64), "AddressSanitizer");
#elif !defined(__SANITIZE_THREAD__)
    EXPECT_THAT(message_of(1, 1, 64, &write_raw, 64), testing::HasSubstr("past the shared arrays"));
#endif
    EXPECT_EQ(message_of(1, 1, 64, &write_raw, 63), "");
}

struct two_arrays {
    shared_array<float, 4> first, second;
};

[[maybe_unused]] __global__ void write_between() { dynamic_shared<two_arrays>().first.data()[4] = 1; }

TEST_P(Simt, ReportsAWriteBetweenSharedArrays) {
#if SIMT_ASAN
    EXPECT_DEATH(simt::launch(1, 1, sizeof(two_arrays), &write_between), "AddressSanitizer");
#elif !defined(__SANITIZE_THREAD__)
    EXPECT_THAT(message_of(1, 1, sizeof(two_arrays), &write_between), testing::HasSubstr("past the shared arrays"));
#endif
}

TEST_P(Simt, ReportsALaunchWithTooLittleSharedMemory) {
    EXPECT_THAT(message_of(1, 1, sizeof(sums) - 1, &shared_index, 0), testing::HasSubstr("shared memory"));
    EXPECT_THAT(message_of(1, 1, 8, &write_raw, 0), testing::HasSubstr("64 bytes"));
    EXPECT_NE(message_of(1, 1, 228 * 1024, &shared_index, 0), "");
    EXPECT_NE(message_of(1, 1025, sizeof(sums), &shared_index, 0), "");
}

__global__ void two_types() {
    dynamic_shared<sums>().of_warp[0] = 0;
    dynamic_shared<two_arrays>().first[0] = 0;
}

TEST_P(Simt, ReportsSharedMemoryOfTwoTypes) { EXPECT_THAT(message_of(1, 1, 1024, &two_types), testing::HasSubstr("two types")); }

__global__ void read_fresh(float* out) {
    auto& s = dynamic_shared<sums>();
    out[8 * blockIdx.x + threadIdx.x] = s.of_warp[static_cast<int>(threadIdx.x)];
    s.of_warp[static_cast<int>(threadIdx.x)] = 1;
}

TEST_P(Simt, FillsFreshSharedMemoryWithNaN) {
    std::vector<float> out(16, 0.0f);
    for (int launches = 0; launches < 2; ++launches) {
        simt::launch(2, 8, sizeof(sums), &read_fresh, out.data());
        EXPECT_THAT(out, testing::Each(testing::IsNan()));
    }
}

[[maybe_unused]] __global__ void reverse_without_barrier(const int* in, int* out) {
    int* s = reinterpret_cast<int*>(dynamic_bytes(64 * sizeof(int)));
    s[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = s[63 - threadIdx.x];
}

#if !defined(__SANITIZE_THREAD__)
TEST_P(Simt, AMissingBarrierGivesAWrongResult) {
    std::vector<int> in(64), out(64);
    std::iota(in.begin(), in.end(), 0);
    simt::launch(1, 64, 64 * sizeof(int), &reverse_without_barrier, in.data(), out.data());
    EXPECT_THAT(out, testing::Contains(-1));
}
#else
__global__ void all_write(int* out) { *out = 1; }

/// Exit status of this program run anew with one disabled test. (A death test's fork would see nothing: ThreadSanitizer goes blind in a fork of a process with
/// fibers.)
int status_of(const std::string& test) {
    const std::string command = "TSAN_OPTIONS=halt_on_error=1:exitcode=66 /proc/" + std::to_string(getpid()) +
                                "/exe --gtest_also_run_disabled_tests --gtest_filter=" + test + " >/dev/null 2>&1";
    return WEXITSTATUS(std::system(command.c_str()));
}

TEST(SimtRaces, DISABLED_MissingBarrier) {
    const std::vector<int> in(64);
    std::vector<int> out(64);
    simt::launch(1, 64, 64 * sizeof(int), &reverse_without_barrier, in.data(), out.data());
}
TEST(SimtRaces, DISABLED_TwoBlocksWrite) {
    int out = 0;
    simt::launch(2, 1, 0, &all_write, &out);
}
TEST(SimtRaces, ThreadSanitizerSees) {
    EXPECT_EQ(status_of("SimtIntrinsics.GiveWhatCudaGives"), 0);
    for (const char* test : {"SimtRaces.DISABLED_MissingBarrier", "SimtRaces.DISABLED_TwoBlocksWrite", "FakeCudaRaces.DISABLED_MissingEvent",
                             "FakeCudaRaces.DISABLED_HostDoesNotWait"})
        EXPECT_EQ(status_of(test), 66) << test;
}
#endif

// --- warp operations

__global__ void shuffles(double* up, int* down, long long* across, float* part) {
    const int lane = static_cast<int>(threadIdx.x);
    up[lane] = __shfl_up_sync(whole_warp, lane * 1.5, 3);
    down[lane] = __shfl_down_sync(whole_warp, lane, 5, 8);
    across[lane] = __shfl_xor_sync(whole_warp, static_cast<long long>(lane) << 40, 17);
    part[lane] = __shfl_sync(whole_warp, static_cast<float>(lane), 2, 4);
}

TEST_P(Simt, ShufflesAsCudaDefinesThem) {
    std::vector<double> up(32);
    std::vector<int> down(32);
    std::vector<long long> across(32);
    std::vector<float> part(32);
    simt::launch(1, 32, 0, &shuffles, up.data(), down.data(), across.data(), part.data());
    for (int lane = 0; lane < 32; ++lane) {
        const auto i = static_cast<std::size_t>(lane);
        EXPECT_EQ(up[i], (lane < 3 ? lane : lane - 3) * 1.5);
        EXPECT_EQ(down[i], lane % 8 + 5 < 8 ? lane + 5 : lane);
        EXPECT_EQ(across[i], static_cast<long long>(lane ^ 17) << 40);
        EXPECT_EQ(part[i], static_cast<float>(lane / 4 * 4 + 2));
    }
}

__global__ void shuffle_halves(float* out) {
    const auto h = __float2half_rn(static_cast<float>(threadIdx.x));
    const auto b = __float2bfloat16_rn(static_cast<float>(threadIdx.x));
    const auto pair = __halves2half2(h, h);
    out[threadIdx.x] = __half2float(__shfl_xor_sync(whole_warp, h, 1)) + __bfloat162float(__shfl_xor_sync(whole_warp, b, 2)) * 100 +
                       __low2float(__shfl_xor_sync(whole_warp, pair, 4)) * 10000;
}

TEST_P(Simt, ShufflesHalfTypes) {
    std::vector<float> out(32);
    simt::launch(1, 32, 0, &shuffle_halves, out.data());
    for (unsigned lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], static_cast<float>((lane ^ 1) + (lane ^ 2) * 100 + (lane ^ 4) * 10000));
}

__global__ void votes(unsigned* out) {
    const bool odd = threadIdx.x % 2 != 0;
    out[threadIdx.x] = __ballot_sync(whole_warp, odd) + (__any_sync(whole_warp, threadIdx.x == 9) != 0) + (__all_sync(whole_warp, threadIdx.x < 31) != 0) +
                       static_cast<unsigned>(__syncthreads_count(odd));
}

TEST_P(Simt, VotesAndCounts) {
    std::vector<unsigned> out(64);
    simt::launch(1, 32, 0, &votes, out.data());
    EXPECT_EQ(out[0], 0xaaaaaaaau + 1 + 0 + 16);
    simt::launch(1, 20, 0, &votes, out.data());  // lanes that don't exist take no part
    EXPECT_EQ(out[0], 0x000aaaaau + 1 + 1 + 10);
}

__global__ void reductions(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    out[lane] = __reduce_add_sync(whole_warp, lane) + 1000 * __reduce_max_sync(whole_warp, -lane) + 100000 * __reduce_min_sync(whole_warp, lane + 2);
}

TEST_P(Simt, Reduces) {
    std::vector<int> out(32);
    simt::launch(1, 32, 0, &reductions, out.data());
    EXPECT_THAT(out, testing::Each(496 + 200000));
}

__global__ void atomics(int* count, unsigned long long* sum, float* real, unsigned* most, int* tickets) {
    tickets[atomicAdd(count, 1)] += 1;
    atomicAdd(sum, 1ull << 33);
    atomicAdd_block(real, 0.5f);
    atomicMax_system(most, threadIdx.x);
}

TEST_P(Simt, AtomicsAreAtomic) {
    int count = 0;
    unsigned long long sum = 0;
    float real = 0;
    unsigned most = 0;
    std::vector<int> tickets(256, 0);
    simt::launch(2, 128, 0, &atomics, &count, &sum, &real, &most, tickets.data());
    EXPECT_EQ(count, 256);
    EXPECT_EQ(sum, 256ull << 33);
    EXPECT_EQ(real, 128.0f);
    EXPECT_EQ(most, 127u);
    EXPECT_THAT(tickets, testing::Each(1));
}

// --- cp.async

__global__ void copy_tiles(const int* in, int* out, bool wait) {
    auto* s = reinterpret_cast<int*>(dynamic_bytes(128 * sizeof(int)));
    const unsigned t = threadIdx.x;
    simt::detail::cp_async(s + 4 * t, in + 4 * t, 16, t == 31 ? 8 : 16);
    simt::detail::cp_commit();
    if (wait) simt::detail::cp_wait(0);
    __syncthreads();
    for (unsigned i = 0; i < 4; ++i) out[4 * t + i] = s[(4 * t + i + 64) % 128];
    if (!wait) simt::detail::cp_wait(0);
}

TEST_P(Simt, AsynchronousCopiesArriveByTheWaitAndPadWithZeros) {
    std::vector<int> in(128), out(128);
    std::iota(in.begin(), in.end(), 1);
    simt::launch(1, 32, 512, &copy_tiles, in.data(), out.data(), true);
    for (int i = 0; i < 128; ++i) {
        const int from = (i + 64) % 128;
        EXPECT_EQ(out[static_cast<std::size_t>(i)], from >= 126 ? 0 : from + 1);
    }
}

#if !defined(__SANITIZE_THREAD__)
TEST_P(Simt, AsynchronousCopiesWithoutAWaitAreSeenLate) {
    simt::current_options().late_copies = 1;
    std::vector<int> in(128, 7), out(128);
    simt::launch(1, 32, 512, &copy_tiles, in.data(), out.data(), false);
    simt::current_options().late_copies = -1;
    EXPECT_THAT(out, testing::Contains(-1));
}
#endif

__global__ void forget_to_wait(const int* in) {
    simt::detail::cp_async(dynamic_bytes(16), in, 16, 16);
    simt::detail::cp_commit();
}
__global__ void misaligned_copy(const int* in) { simt::detail::cp_async(dynamic_bytes(64) + 4, in, 16, 16); }
__global__ void copy_outside(const int* in) { simt::detail::cp_async(dynamic_bytes(64) + 64, in, 16, 16); }

TEST_P(Simt, ReportsBadAsynchronousCopies) {
    alignas(16) const int in[4] = {};
    EXPECT_THAT(message_of(1, 1, 64, &forget_to_wait, in), testing::HasSubstr("cp.async"));
    EXPECT_THAT(message_of(1, 1, 64, &misaligned_copy, in), testing::HasSubstr("multiple of"));
    EXPECT_THAT(message_of(1, 1, 64, &copy_outside, in), testing::HasSubstr("outside"));
}

TEST_P(Simt, WorksAfterAFailedLaunch) {
    std::vector<float> in(64, 1.0f);
    float out = 0;
    EXPECT_NE(message_of(1, 64, 0, &exit_before_barrier), "");
    simt::launch(1, 64, sizeof(sums), &block_sum, in.data(), &out, 64);
    EXPECT_EQ(out, 64.0f);
}

TEST(SimtIntrinsics, GiveWhatCudaGives) {
    EXPECT_EQ(__popc(0xf0f0u), 8);
    EXPECT_EQ(__popcll(~0ull), 64);
    EXPECT_EQ(__ffs(0), 0);
    EXPECT_EQ(__ffs(8), 4);
    EXPECT_EQ(__clz(1), 31);
    EXPECT_EQ(__clz(0), 32);
    EXPECT_EQ(__clzll(1), 63);
    EXPECT_EQ(__brev(1u), 0x80000000u);
    EXPECT_EQ(__brev(0x12345678u), 0x1e6a2c48u);
    EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7410u), 0x77441100u);
    EXPECT_EQ(__funnelshift_r(0x80000001u, 3u, 1), 0xc0000000u);
    EXPECT_EQ(__funnelshift_l(0x80000001u, 3u, 1), 7u);
    EXPECT_EQ(__float_as_uint(1.0f), 0x3f800000u);
    EXPECT_EQ(__uint_as_float(0x40000000u), 2.0f);
    EXPECT_EQ(__float2int_rn(2.5f), 2);
    EXPECT_EQ(__dp4a(0x01020304, 0x01010101, 5), 15);
    EXPECT_EQ(min(3, 7u), 3u);
    EXPECT_EQ(max(2.0f, 5), 5.0f);
    EXPECT_FLOAT_EQ(__expf(1.0f), 2.7182817f);
    EXPECT_FLOAT_EQ(rsqrtf(4.0f), 0.5f);
    EXPECT_EQ(__half2float(__hfma(__float2half_rn(2.0f), __float2half_rn(3.0f), __float2half_rn(1.0f))), 7.0f);
}

__global__ void scale(float* x, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] *= 2;
}

template <class F>
void print_speed(const char* name, F run) {
    const auto before = simt::work_done();
    const auto start = std::chrono::steady_clock::now();
    run();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const auto after = simt::work_done();
    std::printf("%s: %.1f million turns/s, %.1f million threads/s, %.1f million warp operations/s\n", name,
                static_cast<double>(after.steps - before.steps) / seconds * 1e-6, static_cast<double>(after.threads - before.threads) / seconds * 1e-6,
                static_cast<double>(after.warp_operations - before.warp_operations) / seconds * 1e-6);
}

TEST_P(Simt, PrintsItsSpeed) {
    std::vector<float> values(100000, 1.0f), out(100);
    print_speed("independent threads", [&] { simt::launch(391, 256, 0, &scale, values.data(), 100000); });
    print_speed("block sums", [&] { simt::launch(100, 256, sizeof(sums), &block_sum, values.data(), out.data(), 1000); });
    EXPECT_EQ(values[99999], 2.0f);
}

}  // namespace
