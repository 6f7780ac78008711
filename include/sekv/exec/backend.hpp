// Where a cache's memory lives and its work runs.
#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include "sekv/exec/executor.hpp"
#include "sekv/exec/memory.hpp"

namespace sekv {

/// A backend names itself and owns the executor and the memory resource of its caches.
template <class B>
concept backend = std::movable<B> && requires(B b) {
    { B::name } -> std::convertible_to<const char*>;
    { b.exec() } -> std::same_as<executor&>;
    { b.resource() } -> std::same_as<std::shared_ptr<memory_resource>>;
};

/// A backend whose device tier is memory that the host can't read: its work is enqueued on a stream.
template <class B>
concept device_backend = backend<B> && requires(B b) { b.stream(); };

/// Both tiers in DRAM, kernels by Highway. The reference that other backends answer to. Every call is synchronous.
class host_backend {
public:
    static constexpr const char* name = "host";

    /// threads >= 1 workers of its own, the caller among them.
    explicit host_backend(std::int32_t threads = 1) : host_backend(make_thread_pool(threads)) {}
    /// An engine's own executor and memory; neither may be null.
    explicit host_backend(std::shared_ptr<executor> exec, std::shared_ptr<memory_resource> resource = make_heap_resource()) : executor_(std::move(exec)), resource_(std::move(resource)) {
        if (!executor_ || !resource_) throw invalid_argument("host_backend needs an executor and a memory resource; one of them is null.");
    }
    [[nodiscard]] executor& exec() const noexcept { return *executor_; }
    [[nodiscard]] const std::shared_ptr<executor>& shared_exec() const noexcept { return executor_; }
    [[nodiscard]] std::shared_ptr<memory_resource> resource() const noexcept { return resource_; }

private:
    std::shared_ptr<executor> executor_;
    std::shared_ptr<memory_resource> resource_;
};
static_assert(backend<host_backend>);

}  // namespace sekv
