#include "sekv/exec/executor.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "sekv/core/error.hpp"

namespace sekv {
namespace {

class Executor : public ::testing::TestWithParam<std::int32_t> {
protected:
    std::shared_ptr<executor> pool_ = make_thread_pool(GetParam());
};

TEST(ExecutorArguments, RefusesPoolsWithoutThreads) {
    EXPECT_THROW((void)make_thread_pool(0), invalid_argument);
    EXPECT_THROW((void)make_thread_pool(-3), invalid_argument);
}

TEST_P(Executor, RunsEachIndexOnce) {
    EXPECT_EQ(pool_->workers(), GetParam());
    for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
        std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
        pool_->run(count, [&](std::int64_t i, std::int32_t) { ++runs[static_cast<std::size_t>(i)]; });
        for (const auto& n : runs) EXPECT_EQ(n, 1);
    }
}

TEST_P(Executor, NeverRunsOneWorkerTwiceAtATime) {
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(GetParam()));
    std::atomic<int> overlaps = 0;
    std::atomic<int> strangers = 0;
    pool_->run(500, [&](std::int64_t, std::int32_t worker) {
        if (worker < 0 || worker >= GetParam()) {
            ++strangers;
            return;
        }
        auto& mine = busy[static_cast<std::size_t>(worker)];
        if (mine.fetch_add(1) != 0) ++overlaps;
        std::this_thread::yield();
        --mine;
    });
    EXPECT_EQ(overlaps, 0);
    EXPECT_EQ(strangers, 0);
}

TEST_P(Executor, BlocksUntilWritesAreVisible) {
    std::vector<int> plain(64);
    for (int round = 1; round <= 10000; ++round) {
        const auto count = 1 + round % 5;
        pool_->run(count, [&](std::int64_t i, std::int32_t) { plain[static_cast<std::size_t>(i)] = round; });
        for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) ASSERT_EQ(plain[i], round);
    }
}

TEST_P(Executor, WakesSleepingWorkers) {
    std::atomic<int> total = 0;
    for (int round = 0; round < 50; ++round) {
        std::this_thread::sleep_for(std::chrono::microseconds(round * 10));
        pool_->run(8, [&](std::int64_t, std::int32_t) { ++total; });
    }
    EXPECT_EQ(total, 400);
}

TEST_P(Executor, WaitsForSlowBodies) {
    std::atomic<int> done = 0;
    pool_->run(4, [&](std::int64_t, std::int32_t) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        ++done;
    });
    EXPECT_EQ(done, 4);
}

TEST_P(Executor, RethrowsAndStaysUsable) {
    for (int round = 0; round < 100; ++round) {
        std::atomic<int> running = 0;
        try {
            pool_->run(50, [&](std::int64_t i, std::int32_t) {
                ++running;
                if (i % 10 == 7) {
                    --running;
                    throw std::runtime_error("body " + std::to_string(i));
                }
                --running;
            });
            ADD_FAILURE() << "no exception";
        } catch (const std::runtime_error& e) {
            EXPECT_EQ(std::string(e.what()).substr(0, 5), "body ");
        }
        EXPECT_EQ(running, 0);
        std::atomic<int> after = 0;
        pool_->run(20, [&](std::int64_t, std::int32_t) { ++after; });
        EXPECT_EQ(after, 20);
    }
    EXPECT_THROW(pool_->run(1, [](std::int64_t, std::int32_t) { throw std::logic_error("one"); }), std::logic_error);
}

TEST_P(Executor, RunsNestedLoopsInlineAsTheSameWorker) {
    std::atomic<int> inner = 0;
    std::atomic<int> mismatches = 0;
    pool_->run(20, [&](std::int64_t, std::int32_t outer_worker) {
        const auto thread = std::this_thread::get_id();
        pool_->run(5, [&](std::int64_t, std::int32_t worker) {
            ++inner;
            if (worker != outer_worker || std::this_thread::get_id() != thread) ++mismatches;
        });
    });
    EXPECT_EQ(inner, 100);
    EXPECT_EQ(mismatches, 0);
}

TEST_P(Executor, NestsThroughAnotherPool) {
    const auto other = make_thread_pool(2);
    std::atomic<int> inner = 0;
    pool_->run(6, [&](std::int64_t, std::int32_t) { other->run(6, [&](std::int64_t, std::int32_t) { ++inner; }); });
    EXPECT_EQ(inner, 36);
}

TEST_P(Executor, SerialisesCallersOnOtherThreads) {
    std::vector<std::thread> callers;
    std::atomic<int> total = 0;
    for (int c = 0; c < 3; ++c)
        callers.emplace_back([&] {
            for (int round = 0; round < 200; ++round) pool_->run(4, [&](std::int64_t, std::int32_t) { ++total; });
        });
    for (auto& c : callers) c.join();
    EXPECT_EQ(total, 2400);
}

INSTANTIATE_TEST_SUITE_P(Threads, Executor, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace sekv
