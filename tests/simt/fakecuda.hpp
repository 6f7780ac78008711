// Knobs of the fake CUDA runtime: a stand-in for libcudart at link time, with the real <cuda_runtime_api.h>. See tests/simt/README.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fakecuda {

/// When the work of a stream is done. eager: at once. lazy: when the host waits for it, and no sooner. random: at any time that CUDA allows, as the seed says.
enum class policy { eager, lazy, random };
void set_policy(policy p, std::uint64_t seed = 1);
/// Policy and kernel schedule as SEKV_SIMT_SEED has them: 0 lazy and forward, 1 eager and reverse, otherwise both random.
void set_seed(std::uint64_t seed);

/// What a fault plan can aim at; any: each call that can fail, the other kinds among them.
enum class call { allocation, copy, launch, synchronise, other, any };
/// Of the calls of this kind from now on, `successes` pass and the next returns `error`. A sticky error is a lost context: every later call returns it too, and
/// what was enqueued is dropped. An error from synchronise is reported after the work is done. Several plans may be set.
void fail_after(call kind, int successes, cudaError_t error, bool sticky = false);
void clear_faults();
/// Calls of the kind since the last reset.
[[nodiscard]] std::uint64_t calls(call kind);

/// Times the host waited for the device since the last reset: synchronise calls, blocking copies, frees.
[[nodiscard]] std::uint64_t synchronisations();
/// Device and pinned allocations not yet freed.
[[nodiscard]] std::size_t live_allocations();
[[nodiscard]] std::size_t live_bytes();
/// Work enqueued and not done.
[[nodiscard]] std::size_t pending_operations();

/// Sizes of the device's memory, and of host memory that can be pinned.
void set_memory(std::size_t device_bytes, std::size_t pinned_bytes);

/// Broken rules of CUDA found so far: bad copies, use after free, failing kernels. A test that expects one takes it; the others turn their test red
/// (gtest_problems.cpp).
[[nodiscard]] std::vector<std::string> take_problems();
/// Drops the fault plan, a lost context, counters and problems; policy as SEKV_SIMT_SEED says. Allocations and pending work stay, but for a lost context's
/// work.
void reset();

/// Enqueues host code that acts as a kernel, in stream order (or into the graph being captured). For stand-ins of libraries.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

}  // namespace fakecuda
