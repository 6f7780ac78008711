#include "read_bandwidth.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

namespace sekv::bench {
namespace {

constexpr std::int64_t piece = std::int64_t{4} << 20;  // bytes that a worker claims at a time
constexpr std::int64_t piece_words = piece / static_cast<std::int64_t>(sizeof(std::uint64_t));

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

read_pass::read_pass(std::size_t bytes)
    : pieces_(std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes) / piece)),
      buffer_(allocate_huge<std::uint64_t>(static_cast<std::size_t>(pieces_ * piece_words))) {
    std::fill_n(buffer_.get(), pieces_ * piece_words, std::uint64_t{1});
}

double read_pass::run(executor& threads) {
    std::atomic<std::uint64_t> total = 0;  // keeps the reads from being optimised away
    const auto start = std::chrono::steady_clock::now();
    threads.run(pieces_, [&](std::int64_t i, std::int32_t) { total += sum_of(buffer_.get() + i * piece_words, piece_words); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (total != static_cast<std::uint64_t>(pieces_ * piece_words)) throw std::runtime_error("The bandwidth buffer doesn't hold what was written to it.");
    return static_cast<double>(pieces_ * piece) / seconds.count();
}

double read_bandwidth(executor& threads, std::size_t bytes, int repeats) {
    read_pass pass(bytes);
    double best = 0.0;
    for (int r = 0; r < repeats; ++r) best = std::max(best, pass.run(threads));
    return best;
}

}  // namespace sekv::bench
