// CUDA errors as the library's own, and the owners of streams and events.
#include "src/cuda/runtime.hpp"

#include <gmock/gmock.h>

#include <type_traits>

#include "cuda/memory_fixtures.hpp"

namespace sekv::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(RuntimeErrors, SuccessReturns) { EXPECT_NO_THROW(check(cudaSuccess, "cudaMalloc")); }

TEST(RuntimeErrors, OutOfMemoryIsABudgetError) {
    try {
        check(cudaErrorMemoryAllocation, "cudaMalloc");
        FAIL() << "nothing was thrown";
    } catch (const budget_error& e) {
        EXPECT_EQ(e.code(), errc::budget);
        EXPECT_THAT(e.what(), AllOf(HasSubstr("cudaMalloc failed with cudaErrorMemoryAllocation"), HasSubstr("lower the budgets.")));
    }
}

TEST(RuntimeErrors, ErrorsThatEndTheContextAreLost) {
    for (const auto result : {cudaErrorIllegalAddress, cudaErrorMisalignedAddress, cudaErrorLaunchFailure, cudaErrorLaunchTimeout, cudaErrorAssert, cudaErrorHardwareStackError,
                              cudaErrorIllegalInstruction, cudaErrorInvalidPc, cudaErrorInvalidAddressSpace, cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorContextIsDestroyed,
                              cudaErrorDeviceUninitialized, cudaErrorCudartUnloading, cudaErrorUnknown}) {
        try {
            check(result, "cudaEventQuery");
            FAIL() << "nothing was thrown for " << result;
        } catch (const device_error& e) {
            EXPECT_TRUE(e.lost()) << e.what();
            EXPECT_EQ(e.code(), errc::device);
            EXPECT_THAT(e.what(), AllOf(HasSubstr("cudaEventQuery failed with "), HasSubstr("lost"), HasSubstr("destroy the cache")));
        }
    }
}

TEST(RuntimeErrors, RefusedCallsLoseNothing) {
    for (const auto result : {cudaErrorInvalidValue, cudaErrorInvalidConfiguration, cudaErrorInvalidDevice, cudaErrorInvalidResourceHandle, cudaErrorNotReady, cudaErrorNotSupported,
                              cudaErrorLaunchOutOfResources, cudaErrorNoKernelImageForDevice, cudaErrorStreamCaptureUnsupported, cudaErrorNoDevice, cudaErrorInsufficientDriver}) {
        try {
            check(result, "a launch");
            FAIL() << "nothing was thrown for " << result;
        } catch (const device_error& e) {
            EXPECT_FALSE(e.lost()) << e.what();
            EXPECT_THAT(e.what(), HasSubstr("a launch failed with "));
        }
    }
}

class Owners : public in_every_mode {};
INSTANTIATE_TEST_SUITE_P(Modes, Owners, testing::ValuesIn(runtime_modes()), name_of_mode);

TEST_P(Owners, MoveAndAreNotCopied) {
    static_assert(!std::is_copy_constructible_v<owned_stream> && !std::is_copy_constructible_v<owned_event> && std::is_nothrow_move_constructible_v<owned_event>);
    owned_stream a;
    const auto handle = a.get();
    owned_stream b(std::move(a));
    EXPECT_EQ(a.get(), nullptr);
    EXPECT_EQ(b.get(), handle);
    owned_event e, f;
    const auto event = e.get();
    f = std::move(e);
    EXPECT_EQ(f.get(), event);
    EXPECT_TRUE(f.done()) << "never recorded";
    f.order(b.get());
    f.wait();
}

TEST_P(Owners, EventsOrderStreamsAndTellWhenTheyArePassed) {
    constexpr std::size_t bytes = 1024;
    const owned_stream a, b;
    const device_bytes x(bytes);
    const pinned_bytes ones(bytes, 1), twos(bytes, 2), read(bytes);
    x.write(pattern(bytes, 9));
    owned_event written;
    enqueue(x.data(), ones.data(), bytes, cudaMemcpyHostToDevice, a.get());
    written.record(a.get());
    written.order(b.get());
    written.record(a.get());  // anew: b waits for the first record, which the second covers
    enqueue(read.data(), x.data(), bytes, cudaMemcpyDeviceToHost, b.get());
    b.synchronize();
    EXPECT_TRUE(read.all(1));
    enqueue(read.data(), twos.data(), bytes, cudaMemcpyHostToHost, a.get());
    written.record(a.get());
    written.wait();
    EXPECT_TRUE(written.done());
    EXPECT_TRUE(read.all(2));
}

TEST(DeviceGuards, PutTheDeviceBack) {
    const auto before = current_device();
    { const device_guard same(before); }
    EXPECT_EQ(current_device(), before);
    EXPECT_THROW(device_guard(1 << 20), device_error);
    EXPECT_EQ(current_device(), before);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a refused call must not show up in the next one";
}

}  // namespace
}  // namespace sekv::cuda
