// Who runs the parallel loops of the host backend.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace sekv {

/// Runs loops for the cache. Inject one to share an engine's own threads. A call blocks until every index has run.
class executor {
public:
    executor() = default;
    executor(const executor&) = delete;
    executor& operator=(const executor&) = delete;
    virtual ~executor() = default;

    /// Calls body(index, worker) once for each index in [0, count), worker < workers(); two calls with one worker
    /// number never overlap. The first exception that a body throws is rethrown after all running bodies ended.
    virtual void run(std::int64_t count, const std::function<void(std::int64_t, std::int32_t)>& body) = 0;
    [[nodiscard]] virtual std::int32_t workers() const noexcept = 0;
};

/// A pool of `threads` workers, the calling thread among them. threads >= 1.
[[nodiscard]] std::shared_ptr<executor> make_thread_pool(std::int32_t threads);

}  // namespace sekv
