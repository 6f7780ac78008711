// Every CUDA call of a seal failing in turn, in emulation: a typed error each time, and the sealer serves the next call.
#include <gtest/gtest.h>

#include "seal_world.hpp"
#include "simt/fakecuda.hpp"

namespace sekv::cuda::seal_tests {
namespace {

seal_world::shape small() {
    seal_world::shape s;
    s.kv_heads = 1, s.counts = {64, 30}, s.chunk = 64;
    return s;
}

std::vector<std::byte> codes_of(const seal_world& w) {
    auto all = w.key_buffer.read();
    for (const auto& more : {w.epoch_buffer.read(), w.encoder_buffer.read()}) all.insert(all.end(), more.begin(), more.end());
    for (std::int32_t b = 0; b < 2; ++b) {
        for (const auto& more : {w.planes(0, b), w.block_lines(0, b)}) {
            for (const auto x : more) all.push_back(static_cast<std::byte>(x));
        }
    }
    return all;
}

TEST(SealFaults, EveryCallFailsInTurn) {
    seal_world w(small());
    const array<std::byte> workspace(seal_workspace_bytes(w.workspace_shape()));
    const owned_stream stream;
    sealer s(w.workspace_shape(), workspace.get(), stream.get());
    w.fit(s);
    w.encode(s);
    const auto want = codes_of(w);
    struct fault {
        fakecuda::call kind;
        cudaError_t error;
        int each;
    };
    for (const auto& f : {fault{fakecuda::call::launch, cudaErrorInvalidValue, 7}, fault{fakecuda::call::copy, cudaErrorInvalidValue, 3}, fault{fakecuda::call::synchronise, cudaErrorInvalidValue, 1}}) {
        int failed = 0;
        for (int successes = 0;; successes += f.each) {
            fakecuda::fail_after(f.kind, successes, f.error);
            bool threw = false;
            try {
                w.fit(s);
                w.encode(s);
            } catch (const device_error& e) {
                threw = true;
                EXPECT_FALSE(e.lost());
            }
            fakecuda::clear_faults();
            if (!threw) break;
            ++failed;
        }
        EXPECT_GT(failed, 1);
        w.fit(s);
        w.encode(s);
        EXPECT_EQ(codes_of(w), want);
    }
}

TEST(SealFaults, AnAllocationThatFailsIsABudgetError) {
    seal_world w(small());
    const auto shape = w.workspace_shape();
    const array<std::byte> workspace(seal_workspace_bytes(shape));
    const owned_stream stream;
    for (int successes = 0; successes < 2; ++successes) {
        fakecuda::fail_after(fakecuda::call::allocation, successes, cudaErrorMemoryAllocation);
        EXPECT_THROW((void)seal_workspace_bytes(shape), budget_error);
        fakecuda::clear_faults();
    }
    int failed = 0;
    for (int successes = 0;; ++successes) {
        fakecuda::fail_after(fakecuda::call::allocation, successes, cudaErrorMemoryAllocation);
        bool threw = false;
        try {
            const sealer s(shape, workspace.get(), stream.get());
        } catch (const budget_error&) {
            threw = true;
        }
        fakecuda::clear_faults();
        if (!threw) break;
        ++failed;
    }
    EXPECT_GE(failed, 3);  // the handles
}

TEST(SealFaults, ALostContextIsSaidToBeLost) {
    seal_world w(small());
    const array<std::byte> workspace(seal_workspace_bytes(w.workspace_shape()));
    const owned_stream stream;
    sealer s(w.workspace_shape(), workspace.get(), stream.get());
    for (const int successes : {1, 20}) {
        fakecuda::fail_after(fakecuda::call::launch, successes, cudaErrorIllegalAddress, true);
        try {
            w.fit(s);
            ADD_FAILURE() << "no error";
        } catch (const device_error& e) {
            EXPECT_TRUE(e.lost()) << e.what();
        }
        fakecuda::reset();
    }
}

// Keys that are not finite don't get past the eigenvectors.
TEST(SealFaults, KeysThatAreNotFinite) {
    seal_world w(small());
    auto page = w.pages.pages[0].read();
    page[rows_tests::key_index(w.layer.exact_page, 0, 3, 20)] = 0x7fc0;
    ASSERT_EQ(cudaMemcpy(w.pages.pages[0].get(), page.data(), page.size() * 2, cudaMemcpyDefault), cudaSuccess);
    const array<std::byte> workspace(seal_workspace_bytes(w.workspace_shape()));
    const owned_stream stream;
    sealer s(w.workspace_shape(), workspace.get(), stream.get());
    try {
        w.fit(s);
        FAIL() << "no error";
    } catch (const device_error& e) {
        EXPECT_NE(std::string(e.what()).find("didn't converge"), std::string::npos) << e.what();
    }
}

}  // namespace
}  // namespace sekv::cuda::seal_tests
