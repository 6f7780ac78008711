// The emulation's interface: schedules, failures, and what the CUDA built-ins are made of.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace simt {

/// A kernel broke a rule of CUDA. The message names the rule, the thread, the schedule and its seed.
struct error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// In which order the threads of a block, and the blocks of a grid, take their turns.
enum class order { forward, reverse, random };

struct options {
    order schedule = order::forward;
    std::uint64_t seed = 1;  ///< of the random schedule
    int late_copies = -1;    ///< cp.async: 0 copies at issue, 1 at the wait, -1 as the schedule has it (forward: late, reverse: at issue, random: either)
    std::size_t most_shared = 227 * 1024;    ///< dynamic shared memory of a block
    std::size_t stack_bytes = 256 * 1024;    ///< of a thread; read once, by the first launch
    std::uint64_t most_spins = 100'000'000;  ///< warp operations and atomics that may pass without any thread exiting or passing a barrier
};
/// Begin as SEKV_SIMT_SEED says: 0 forward, 1 reverse, otherwise random with that seed.
[[nodiscard]] options& current_options();
/// Sets schedule and seed the way SEKV_SIMT_SEED does.
void set_seed(std::uint64_t seed);
/// For messages: "random schedule, seed 7".
[[nodiscard]] std::string schedule_name();

/// Work done since the program began. A step is one turn of a thread.
struct counters {
    std::uint64_t steps = 0, threads = 0, blocks = 0, barriers = 0, warp_operations = 0;
};
[[nodiscard]] counters& work_done();

/// Marks bytes of shared memory that no kernel may touch: ASan reports an access; otherwise a write is found when the block ends.
void poison(void* bytes, std::size_t count);

namespace detail {

/// Where a thread waits.
struct site {
    const char* file;
    int line;
    const char* what;
};

[[noreturn]] void fail(const std::string& message);
[[noreturn]] void fail_index(std::int64_t index, std::int64_t size);

using body = void (*)(const void* arguments);
/// Runs every thread of the grid to its end.
void run(dim3 grid, dim3 block, std::size_t shared_bytes, body kernel, const void* arguments);

void block_barrier(site where);
/// As block_barrier; returns how many threads passed true.
int block_barrier_count(bool predicate, site where);

/// All lanes of `mask` meet; the last to come runs `together` once over what each passed, indexed by lane. order_memory: as __syncwarp does, and shuffles do
/// not.
using warp_function = void (*)(void** lane_argument, unsigned mask);
void warp_collective(unsigned mask, void* argument, warp_function together, site where, bool order_memory);

[[nodiscard]] int lane_id();
/// A point at which another thread may take over. Called by every atomic, so that a spin loop lets others run.
void preempt();
void sleep();

[[nodiscard]] void* shared_bytes();
[[nodiscard]] std::size_t shared_size();
/// True for the block's first caller; a second type in one block is an error.
[[nodiscard]] bool claim_shared(const void* type);

/// cp.async of the calling thread: the bytes arrive at some time between the call and the wait. The last bytes - source_bytes are zeros.
void cp_async(void* shared, const void* global, int bytes, int source_bytes);
void cp_commit();
/// Until at most `pending` of the thread's groups are on their way.
void cp_wait(int pending);

}  // namespace detail

/// `index` if it lies in [0, size).
template <class I, class N>
constexpr I checked_index(I index, N size) {
    if (index < I{0} || static_cast<std::int64_t>(index) >= static_cast<std::int64_t>(size))
        detail::fail_index(static_cast<std::int64_t>(index), static_cast<std::int64_t>(size));
    return index;
}

/// The block's dynamic shared memory as one T, constructed (without initialising) by the first thread to ask.
template <class T>
T& dynamic_shared() {
    static const char type = 0;
    if (sizeof(T) > detail::shared_size())
        detail::fail("the kernel's shared memory takes " + std::to_string(sizeof(T)) + " bytes, it was launched with " + std::to_string(detail::shared_size()));
    void* memory = detail::shared_bytes();
    if (detail::claim_shared(&type)) new (memory) T;
    asm volatile("" : "+r"(memory) : : "memory");  // the compiler must not take what was there before T for undefined
    return *static_cast<T*>(memory);
}

[[nodiscard]] inline unsigned char* dynamic_bytes(std::size_t bytes) {
    if (bytes > detail::shared_size())
        detail::fail("the kernel takes " + std::to_string(bytes) + " bytes of shared memory, it was launched with " + std::to_string(detail::shared_size()));
    return static_cast<unsigned char*>(detail::shared_bytes());
}

}  // namespace simt
