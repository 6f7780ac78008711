// The bound that decode attention is measured against: how fast this machine reads memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "full_kv.hpp"
#include "sekv/exec/executor.hpp"

namespace sekv::bench {

/// A buffer that all workers together read once, front to back. A pass measures the read bandwidth, and leaves the caches full of what nobody wants:
/// so the next timed piece of work finds its data in memory, as a layer of a deep model does. Take 512 MiB or more, above the last-level cache.
class read_pass {
public:
    explicit read_pass(std::size_t bytes);
    /// Bytes per second of one pass. Throws std::runtime_error if memory doesn't hold what was written.
    double run(executor& threads);

private:
    std::int64_t pieces_;
    huge_buffer<std::uint64_t> buffer_;
};

/// The best of `repeats` passes over `bytes`, bytes per second.
[[nodiscard]] double read_bandwidth(executor& threads, std::size_t bytes = std::size_t{1} << 30, int repeats = 7);

}  // namespace sekv::bench
