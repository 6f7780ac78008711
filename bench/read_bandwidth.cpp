#include "read_bandwidth.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "full_kv.hpp"

namespace sekv::bench {
namespace {

constexpr std::int64_t piece = std::int64_t{4} << 20;  // bytes that a worker claims at a time

std::uint64_t sum_of(const std::uint64_t* words, std::int64_t count) {
    std::uint64_t sums[16] = {};
    for (std::int64_t i = 0; i + 16 <= count; i += 16) {
        __builtin_prefetch(words + i + 256);
        __builtin_prefetch(words + i + 264);
        for (int j = 0; j < 16; ++j) sums[j] += words[i + j];
    }
    std::uint64_t sum = 0;
    for (const auto s : sums) sum += s;
    return sum;
}

}  // namespace

double read_bandwidth(executor& threads, std::size_t bytes, int repeats) {
    const auto pieces = std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes) / piece);
    const auto words = piece / static_cast<std::int64_t>(sizeof(std::uint64_t));
    const auto buffer = allocate_huge<std::uint64_t>(static_cast<std::size_t>(pieces * words));
    std::fill_n(buffer.get(), pieces * words, std::uint64_t{1});
    std::atomic<std::uint64_t> total = 0;  // keeps the reads from being optimised away
    double best = 0.0;
    for (int r = 0; r < repeats; ++r) {
        const auto start = std::chrono::steady_clock::now();
        threads.run(pieces, [&](std::int64_t i, std::int32_t) { total += sum_of(buffer.get() + i * words, words); });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(pieces * piece) / seconds.count());
    }
    return total == static_cast<std::uint64_t>(repeats) * static_cast<std::uint64_t>(pieces * words) ? best : 0.0;
}

}  // namespace sekv::bench
