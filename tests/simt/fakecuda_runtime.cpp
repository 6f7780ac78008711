// Policy, fault plan, counters and found problems of the fake runtime, and the launch of emulated kernels.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "simt/fakecuda_state.hpp"
#include "simt/launch.hpp"
#include "simt/sanitizers.hpp"

namespace fakecuda {
namespace detail {
namespace {

std::uint64_t environment_seed() {
    const char* seed = std::getenv("SEKV_SIMT_SEED");
    return seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10);
}

void apply_seed(runtime& r, std::uint64_t seed) {
    r.when = seed == 0 ? policy::lazy : seed == 1 ? policy::eager : policy::random;
    r.seed = seed;
    r.draws = seed * 0x9e3779b97f4a7c15ull | 1;
    r.choices = 0;
}

std::string policy_name() {
    const runtime& r = the_runtime();
    return r.when == policy::eager ? "eager streams" : r.when == policy::lazy ? "lazy streams" : "random streams, seed " + std::to_string(r.seed);
}

thread_local cudaError_t last_error = cudaSuccess;

/// The error of the first plan that this call sets off.
cudaError_t planned_fault(call kind) {
    runtime& r = the_runtime();
    for (std::size_t i = 0; i < r.faults.size(); ++i) {
        fault& f = r.faults[i];
        if (f.kind != kind && f.kind != call::any) continue;
        if (f.successes-- > 0) continue;
        const fault due = f;
        r.faults.erase(r.faults.begin() + static_cast<std::ptrdiff_t>(i));
        if (due.sticky) lose_context(due.error, "fault plan");
        return due.error;
    }
    return cudaSuccess;
}

}  // namespace

runtime& the_runtime() {
    static runtime* r = [] {
        auto* made = new runtime;
        apply_seed(*made, environment_seed());
        return made;
    }();
    return *r;
}

std::uint64_t draw() {
    std::uint64_t& x = the_runtime().draws;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

cudaError_t problem(const std::string& text, cudaError_t error) {
    const simt::detail::ignore_races quiet;
    const std::string full = "fake CUDA: " + text + " (" + policy_name() + ")";
    std::fprintf(stderr, "%s\n", full.c_str());
    the_runtime().problems.push_back(full);
    return error;
}

void lose_context(cudaError_t error, const std::string& reason) {
    const simt::detail::ignore_races quiet;
    the_runtime().lost = error;
    the_runtime().lost_reason = reason;
}

cudaError_t refusal(call kind, capture_rule rule) {
    runtime& r = the_runtime();
    ++r.calls[static_cast<int>(kind)];
    ++r.calls[static_cast<int>(call::any)];
    if (r.lost != cudaSuccess) return r.lost;
    if (const cudaError_t e = planned_fault(kind); e != cudaSuccess) return e;
    if (rule == capture_rule::unsafe && r.captures != 0) {
        invalidate_captures();
        return cudaErrorStreamCaptureUnsupported;
    }
    return cudaSuccess;
}

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

}  // namespace detail

void set_policy(policy p, std::uint64_t seed) {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    detail::apply_seed(r, seed);
    r.when = p;
}

void set_seed(std::uint64_t seed) {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    detail::apply_seed(r, seed);
    simt::set_seed(seed);
}

void fail_after(call kind, int successes, cudaError_t error, bool sticky) {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    r.faults.push_back({kind, successes, error, sticky});
}

void clear_faults() {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    r.faults.clear();
    r.lost = cudaSuccess;
    detail::last_error = cudaSuccess;
}

std::uint64_t calls(call kind) {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    return r.calls[static_cast<int>(kind)];
}

std::uint64_t synchronisations() {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    return r.waits;
}

std::size_t pending_operations() {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    std::size_t n = 0;
    for (const auto& [handle, s] : r.streams) n += s->queue.size();
    return n;
}

std::vector<std::string> take_problems() {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    return std::exchange(r.problems, {});
}

void reset() {
    detail::runtime& r = detail::the_runtime();
    const std::lock_guard lock(r.mutex);
    if (r.lost != cudaSuccess)
        for (auto& [handle, s] : r.streams) detail::drain(*s);  // nothing is done, but events pass
    clear_faults();
    for (auto& n : r.calls) n = 0;
    r.waits = 0;
    r.problems.clear();
    set_seed(detail::environment_seed());
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
    return detail::api(call::launch, detail::capture_rule::safe, [&] { return detail::submit(stream, std::move(work)); });
}

}  // namespace fakecuda

namespace simt::detail {

cudaError_t enqueue_launch(cudaStream_t stream, dim3 grid, dim3 block, std::size_t shared, std::function<void()> work) {
    namespace fake = fakecuda::detail;
    return fake::api(fakecuda::call::launch, fake::capture_rule::safe, [&] {
        const std::uint64_t threads = static_cast<std::uint64_t>(block.x) * block.y * block.z;
        const bool block_ok = threads >= 1 && threads <= 1024 && block.z <= 64;
        const bool grid_ok = grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
        if (!block_ok || !grid_ok)
            return fake::problem("a launch of " + std::to_string(threads) + " threads per block or with a grid out of range", cudaErrorInvalidConfiguration);
        if (shared > current_options().most_shared)
            return fake::problem("a launch with " + std::to_string(shared) + " bytes of shared memory", cudaErrorInvalidValue);
        return fake::submit(stream, std::move(work));
    });
}

}  // namespace simt::detail

extern "C" {

cudaError_t cudaPeekAtLastError() {
    const std::lock_guard lock(fakecuda::detail::the_runtime().mutex);
    const cudaError_t lost = fakecuda::detail::the_runtime().lost;
    return lost != cudaSuccess ? lost : fakecuda::detail::last_error;
}

cudaError_t cudaGetLastError() {
    const cudaError_t e = cudaPeekAtLastError();
    fakecuda::detail::last_error = cudaSuccess;
    return e;
}
}
