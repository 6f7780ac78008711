// The thread pool: workers spin briefly for the next loop, then sleep; indices are claimed one at a time.
#include "sekv/exec/executor.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sekv/core/error.hpp"

namespace sekv {
namespace {

using loop_body = std::function<void(std::int64_t, std::int32_t)>;

void pause_briefly() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// Spins until `ready` or for about 20 us: longer than the gap between a decode step's loops, shorter than a wake-up.
template <class Ready>
bool spin_until(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
    do {
        for (int i = 0; i < 16; ++i) {
            if (ready()) return true;
            pause_briefly();
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

class thread_pool;

/// The loops that the current thread is inside of, innermost first, to find a nested run's worker number.
struct frame {
    const thread_pool* pool;
    std::int32_t worker;
    const frame* outer;
};
thread_local const frame* innermost = nullptr;

class frame_scope {
public:
    frame_scope(const thread_pool* pool, std::int32_t worker) : frame_{pool, worker, innermost} { innermost = &frame_; }
    frame_scope(const frame_scope&) = delete;
    frame_scope& operator=(const frame_scope&) = delete;
    ~frame_scope() { innermost = frame_.outer; }

private:
    frame frame_;
};

class thread_pool final : public executor {
public:
    explicit thread_pool(std::int32_t threads);
    ~thread_pool() override { stop(); }
    void run(std::int64_t count, const loop_body& body) override;
    [[nodiscard]] std::int32_t workers() const noexcept override { return workers_; }

private:
    void work(std::int32_t worker);
    void claim_all(std::int32_t worker) noexcept;
    void open(std::int64_t count, const loop_body& body);
    void close() noexcept;
    void stop() noexcept;
    void announce() noexcept;
    [[nodiscard]] bool wait_for_news(std::uint64_t seen);

    const std::int32_t workers_;
    std::mutex running_;  // one loop at a time; callers on other threads queue

    // The loop. Written only while it is closed and nobody is inside.
    const loop_body* body_ = nullptr;
    std::int64_t count_ = 0;
    std::exception_ptr failure_;
    std::mutex failing_;
    alignas(64) std::atomic<std::int64_t> next_{0};

    // A worker raises inside_ before it reads open_, and the caller lowers open_ before it waits for inside_ == 0, all
    // sequentially consistent: so a worker that wakes late sees either a closed loop or one that waits for it.
    alignas(64) std::atomic<bool> open_{false};
    std::atomic<std::int32_t> inside_{0};
    std::atomic<bool> caller_sleeps_{false};
    alignas(64) std::atomic<std::uint64_t> round_{0};
    std::atomic<std::int32_t> sleepers_{0};
    std::atomic<bool> stopping_{false};

    std::mutex sleeping_;
    std::condition_variable wake_workers_;
    std::condition_variable wake_caller_;
    std::vector<std::thread> threads_;
};

thread_pool::thread_pool(std::int32_t threads) : workers_(threads) {
    try {
        threads_.reserve(static_cast<std::size_t>(threads - 1));
        for (std::int32_t worker = 1; worker < threads; ++worker) threads_.emplace_back([this, worker] { work(worker); });
    } catch (...) {
        stop();
        throw;
    }
}

void thread_pool::stop() noexcept {
    stopping_ = true;
    announce();
    for (auto& thread : threads_) thread.join();
}

/// Tells the workers that a loop opened or the pool stops.
void thread_pool::announce() noexcept {
    ++round_;
    if (sleepers_ == 0) return;
    // A sleeper that counted itself but missed this round holds the mutex until it waits.
    { const std::lock_guard lock(sleeping_); }
    wake_workers_.notify_all();
}

/// Returns when round_ has left `seen`; false when the pool stops.
bool thread_pool::wait_for_news(std::uint64_t seen) {
    const auto news = [&] { return round_ != seen; };
    if (!spin_until(news)) {
        std::unique_lock lock(sleeping_);
        ++sleepers_;
        wake_workers_.wait(lock, news);
        --sleepers_;
    }
    return !stopping_;
}

void thread_pool::work(std::int32_t worker) {
    std::uint64_t seen = 0;
    while (wait_for_news(seen)) {
        seen = round_;
        ++inside_;
        if (open_) claim_all(worker);
        if (--inside_ == 0 && caller_sleeps_) {
            { const std::lock_guard lock(sleeping_); }
            wake_caller_.notify_one();
        }
    }
}

void thread_pool::claim_all(std::int32_t worker) noexcept {
    const frame_scope scope(this, worker);
    try {
        for (auto i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) (*body_)(i, worker);
    } catch (...) {
        const std::lock_guard lock(failing_);
        if (!failure_) failure_ = std::current_exception();
        next_ = count_;  // the rest isn't started
    }
}

void thread_pool::open(std::int64_t count, const loop_body& body) {
    body_ = &body;
    count_ = count;
    failure_ = nullptr;
    next_ = 0;
    open_ = true;
    announce();
}

/// Lets no worker in any more and waits for those inside.
void thread_pool::close() noexcept {
    open_ = false;
    const auto left = [&] { return inside_ == 0; };
    if (spin_until(left)) return;
    std::unique_lock lock(sleeping_);
    caller_sleeps_ = true;
    wake_caller_.wait(lock, left);
    caller_sleeps_ = false;
}

void thread_pool::run(std::int64_t count, const loop_body& body) {
    for (const auto* f = innermost; f != nullptr; f = f->outer) {
        if (f->pool != this) continue;
        for (std::int64_t i = 0; i < count; ++i) body(i, f->worker);
        return;
    }
    if (count <= 0) return;
    const std::lock_guard one_loop(running_);
    if (count == 1 || workers_ == 1) {
        const frame_scope scope(this, 0);
        for (std::int64_t i = 0; i < count; ++i) body(i, 0);
        return;
    }
    open(count, body);
    claim_all(0);
    close();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace

std::shared_ptr<executor> make_thread_pool(std::int32_t threads) {
    if (threads < 1) throw invalid_argument("A thread pool needs at least 1 thread, not " + std::to_string(threads) + ".");
    return std::make_shared<thread_pool>(threads);
}

}  // namespace sekv
