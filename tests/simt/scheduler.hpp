// State of the launch that runs. One at a time in the process.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "simt/engine.hpp"
#include "simt/fiber.hpp"

namespace simt::detail {

inline constexpr int warp_lanes = 32;
inline constexpr int most_threads = 1024;

enum class status : unsigned char { fresh, ready, at_barrier, at_warp, done };

struct thread {
    fiber* stack = nullptr;  ///< null before it starts
    uint3 index{};
    int id = 0;
    status now = status::done;
    bool predicate = false;  ///< of __syncthreads_count
    site where{};
};

struct warp {
    unsigned exists = 0, exited = 0, arrived = 0;
    std::array<unsigned, warp_lanes> mask{};
    std::array<void*, warp_lanes> argument{};
    std::array<warp_function, warp_lanes> together{};
    std::array<site, warp_lanes> where{};
    std::array<char, warp_lanes> order{};  ///< addresses for the race detector
};

/// Threads that can run now, as bits.
class ready_set {
public:
    void insert(int id) { words_[static_cast<std::size_t>(id) >> 6] |= 1ull << (id & 63); }
    void erase(int id) { words_[static_cast<std::size_t>(id) >> 6] &= ~(1ull << (id & 63)); }
    void clear() { words_.fill(0); }
    /// -1: empty.
    [[nodiscard]] int lowest(int from = 0) const;
    [[nodiscard]] int highest() const;
    /// The first at or after a bit drawn at random, cyclically.
    [[nodiscard]] int near(std::uint64_t drawn, int words) const;

private:
    std::array<std::uint64_t, most_threads / 64> words_{};
};

struct engine {
    bool active = false, unwinding = false;
    body kernel = nullptr;
    const void* arguments = nullptr;
    std::exception_ptr failure;

    int count = 0, live = 0, waiting = 0, voted = 0;
    unsigned generation = 0;  ///< barriers passed by this block
    std::uint64_t spins = 0;
    std::uint64_t draws = 1;  ///< state of the random schedule
    std::array<thread, most_threads> threads;
    std::array<warp, most_threads / warp_lanes> warps;
    ready_set ready;

    fiber launcher;
    thread* current = nullptr;  ///< null: the launcher runs
    fiber* running = nullptr;
    std::vector<std::unique_ptr<fiber>> fibers[2];
    std::vector<fiber*> idle;
    unsigned block_number = 0;

    std::array<char, 2> barrier_order{};
    char start_order = 0, end_order = 0;
};
[[nodiscard]] engine& the_engine();

[[nodiscard]] std::uint64_t draw();
/// "__syncthreads at file.cu:12"
[[nodiscard]] std::string describe(const site& where);
[[nodiscard]] std::string describe_block();
/// How many threads wait where.
[[nodiscard]] std::string describe_waiters();

// block_memory.cpp
void open_shared(std::size_t bytes);
/// Throws when a byte past the end, or a poisoned one, was written.
void check_shared();
void close_shared();
void forget_copies(int threads);
[[nodiscard]] bool copies_pending(int id);

}  // namespace simt::detail
