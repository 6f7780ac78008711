// The bound that decode attention is measured against: how fast this machine reads memory.
#pragma once

#include <cstddef>

#include "sekv/exec/executor.hpp"

namespace sekv::bench {

/// Bytes per second at which all workers of `threads` together read a buffer of `bytes` once, front to back; the best
/// of `repeats`. Take a buffer of 1 GiB or more, so that little of it stays in the last-level cache from one pass to the next.
[[nodiscard]] double read_bandwidth(executor& threads, std::size_t bytes = std::size_t{1} << 30, int repeats = 7);

}  // namespace sekv::bench
