// Streams and events of the fake runtime. No worker thread: work is done inside the calls of the host, when the policy says so.
#include <chrono>
#include <cstring>

#include "simt/engine.hpp"
#include "simt/fakecuda_state.hpp"
#include "simt/sanitizers.hpp"

namespace fakecuda::detail {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool runnable(const stream_state& s) {
    if (s.queue.empty()) return false;
    const operation& o = s.queue.front();
    return !o.waits || o.waits->done >= o.wait_for;
}

void do_work(const operation& o) {
    in_device = true;
    try {
        o.work();
    } catch (const std::exception& e) {
        in_device = false;
        problem(e.what());
        lose_context(cudaErrorLaunchFailure, e.what());
    }
    in_device = false;
}

// The operation at hand, as the stream sees it.
void work_on(stream_state& s) {
    const operation& o = s.at_work;
    simt::detail::tsan_acquire(o.submitted.get());
    if (o.waits) simt::detail::tsan_acquire(&o.waits->order);
    if (o.work && the_runtime().lost == cudaSuccess) do_work(o);
    if (o.records) {
        o.records->done = o.record_as;
        o.records->seconds = now();
        simt::detail::tsan_release(&o.records->order);
    }
    simt::detail::tsan_release(&s.order);
}

#if SIMT_TSAN
stream_state* stepping = nullptr;

void stream_loop() {
    simt::detail::fiber::arrived();
    for (;;) {
        work_on(*stepping);
        auto& thread = *stepping->thread;
        thread.host.resume_from(thread.own);
    }
}

void work_aside(stream_state& s) {
    stepping = &s;
    s.thread->host.adopt_current();
    s.thread->own.resume_from(s.thread->host);
}
#else
void work_aside(stream_state& s) { work_on(s); }
#endif

void step(stream_state& s) {
    s.at_work = std::move(s.queue.front());
    s.queue.pop_front();
    show_device_memory();
    work_aside(s);
    const simt::detail::ignore_races quiet;
    s.at_work = operation{};
}

std::vector<stream_state*> runnable_streams() {
    std::vector<stream_state*> found;
    for (auto& [handle, s] : the_runtime().streams)
        if (runnable(*s)) found.push_back(s.get());
    return found;
}

std::uint64_t hash(std::uint64_t v) {
    v = (v ^ v >> 31) * 0x7fb5d329728ea185ull;
    v = (v ^ v >> 27) * 0x81dadef4bc2dd44dull;
    return v ^ v >> 33;
}

/// One of the streams that can run. For a stretch of choices one of them is mostly preferred, so that others fall far behind.
stream_state& choose(const std::vector<stream_state*>& choice) {
    constexpr std::uint64_t stretch = 8;
    runtime& r = the_runtime();
    const std::uint64_t key = hash(r.seed * 1024 + r.choices++ / stretch);
    return *choice[(draw() % 4 != 0 ? key : draw()) % choice.size()];
}

/// Operations to do when one is enqueued: by the seed, mostly none or up to two.
std::uint64_t early_steps() {
    const std::uint64_t drawn = draw() % 16;
    if (the_runtime().seed % 2 == 0) return drawn == 0 ? 1 : 0;
    return drawn % 3;
}

/// The stream whose next operation `wanted` depends on, if that one can run.
stream_state* dependency(stream_state* wanted) {
    for (std::size_t depth = 0; wanted != nullptr && depth <= the_runtime().streams.size(); ++depth) {
        if (runnable(*wanted)) return wanted;
        if (wanted->queue.empty()) return nullptr;
        const event_state* needed = wanted->queue.front().waits.get();
        stream_state* next = nullptr;
        for (auto& [handle, s] : the_runtime().streams)
            for (const operation& o : s->queue)
                if (o.records.get() == needed) next = s.get();
        wanted = next;
    }
    return nullptr;
}

/// Works until `reached`; lazily: on nothing that `wanted` doesn't depend on.
template <class F>
void drive(stream_state* wanted, F reached) {
    while (!reached()) {
        stream_state* chosen = the_runtime().when == policy::random ? nullptr : dependency(wanted);
        if (chosen == nullptr) {
            const std::vector<stream_state*> choice = runnable_streams();
            if (choice.empty()) {
                problem("the host waits for work that can never run");
                return;
            }
            chosen = &choose(choice);
        }
        step(*chosen);
    }
}

void forget_empty_streams() {
    runtime& r = the_runtime();
    for (auto i = r.streams.begin(); i != r.streams.end();) {
        stream_state& s = *i->second;
        const bool over = s.destroyed && s.queue.empty();
        if (over && s.thread) r.spare_threads.push_back(std::move(s.thread));
        i = over ? r.streams.erase(i) : std::next(i);
    }
}

std::unique_ptr<stream_state> new_stream() {
    auto s = std::make_unique<stream_state>();
#if SIMT_TSAN
    constexpr std::size_t stack_bytes = std::size_t{1} << 20;
    auto& spare = the_runtime().spare_threads;  // ThreadSanitizer has room for some thousands in all
    if (spare.empty()) spare.push_back(std::make_unique<stream_thread>(stack_bytes, stream_loop));
    s->thread = std::move(spare.back());
    spare.pop_back();
#endif
    return s;
}

cudaError_t create_stream(cudaStream_t* out) {
    const auto handle = new_handle<cudaStream_t>();
    the_runtime().streams[handle] = new_stream();
    *out = handle;
    return cudaSuccess;
}

}  // namespace

stream_state* find_stream(cudaStream_t handle) {
    runtime& r = the_runtime();
    if (handle == cudaStreamLegacy || handle == cudaStreamPerThread) handle = nullptr;
    if (handle == nullptr && !r.streams.contains(nullptr)) r.streams[nullptr] = new_stream();
    const auto found = r.streams.find(handle);
    if (found != r.streams.end() && !found->second->destroyed) return found->second.get();
    problem("a stream that was never created, or is destroyed");
    return nullptr;
}

std::shared_ptr<event_state> find_event(cudaEvent_t handle) {
    const auto found = the_runtime().events.find(handle);
    if (found != the_runtime().events.end()) return found->second;
    problem("an event that was never created, or is destroyed");
    return nullptr;
}

void make_progress() {
    const std::vector<stream_state*> choice = runnable_streams();
    if (!choice.empty()) step(choose(choice));
}

void push(stream_state& s, operation o) {
    simt::detail::tsan_release(o.submitted.get());
    s.queue.push_back(std::move(o));
    if (the_runtime().when == policy::eager) drive(&s, [&] { return s.queue.empty(); });  // the host has not waited: no order for the race detector
    if (the_runtime().when == policy::random)
        for (std::uint64_t n = early_steps(); n != 0; --n) make_progress();
}

cudaError_t submit(cudaStream_t handle, std::function<void()> work) {
    stream_state* s = find_stream(handle);
    if (s == nullptr) return cudaErrorInvalidResourceHandle;
    if (s->capture) {
        capture_node(*s, std::move(work));
        return cudaSuccess;
    }
    operation o;
    o.work = std::move(work);
    push(*s, std::move(o));
    return the_runtime().lost;
}

void drain(stream_state& s) {
    drive(&s, [&] { return s.queue.empty(); });
    simt::detail::tsan_acquire(&s.order);
}

void drain_all() {
    for (auto& [handle, s] : the_runtime().streams) drain(*s);
    forget_empty_streams();
}

}  // namespace fakecuda::detail

using namespace fakecuda::detail;
using fakecuda::call;

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* s) {
    return api(call::other, capture_rule::safe, [&] { return create_stream(s); });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return cudaStreamCreate(s); }

// Work already enqueued is still done.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    return api(call::other, capture_rule::safe, [&] {
        stream_state* s = handle == nullptr ? nullptr : find_stream(handle);
        if (s == nullptr) return cudaErrorInvalidResourceHandle;
        s->destroyed = true;
        forget_empty_streams();
        return cudaSuccess;
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    return api(call::synchronise, capture_rule::unsafe, [&] {
        stream_state* s = find_stream(handle);
        if (s == nullptr) return cudaErrorInvalidResourceHandle;
        if (s->capture) return cudaErrorStreamCaptureUnsupported;
        ++the_runtime().waits;
        drain(*s);
        return the_runtime().lost;
    });
}

cudaError_t cudaDeviceSynchronize() {
    return api(call::synchronise, capture_rule::unsafe, [&] {
        ++the_runtime().waits;
        drain_all();
        return the_runtime().lost;
    });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return api(call::other, capture_rule::unsafe, [&] {
        stream_state* s = find_stream(handle);
        if (s == nullptr) return cudaErrorInvalidResourceHandle;
        if (!s->queue.empty()) make_progress();
        if (!s->queue.empty()) return cudaErrorNotReady;
        simt::detail::tsan_acquire(&s->order);
        return the_runtime().lost;
    });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    return api(call::other, capture_rule::safe, [&] {
        const auto handle = new_handle<cudaEvent_t>();
        auto e = std::make_shared<event_state>();
        e->timed = (flags & cudaEventDisableTiming) == 0;
        the_runtime().events[handle] = std::move(e);
        *out = handle;
        return cudaSuccess;
    });
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    return api(call::other, capture_rule::safe, [&] {
        if (!find_event(handle)) return cudaErrorInvalidResourceHandle;
        the_runtime().events.erase(handle);
        return cudaSuccess;
    });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    return api(call::other, capture_rule::safe, [&] {
        const auto e = find_event(handle);
        stream_state* s = find_stream(stream);
        if (!e || s == nullptr) return cudaErrorInvalidResourceHandle;
        e->capture = s->capture.get();
        if (s->capture) {
            e->after = s->after;
            return cudaSuccess;
        }
        operation o;
        o.records = e;
        o.record_as = ++e->recorded;
        push(*s, std::move(o));
        return cudaSuccess;
    });
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
    return api(call::other, capture_rule::safe, [&] {
        const auto e = find_event(handle);
        stream_state* s = find_stream(stream);
        if (!e || s == nullptr) return cudaErrorInvalidResourceHandle;
        if (e->capture != nullptr) {  // the stream joins the capture, or a branch of it comes back
            for (auto& [other, t] : the_runtime().streams)
                if (!s->capture && t->capture.get() == e->capture) s->capture = t->capture;
            if (s->capture.get() != e->capture) return cudaErrorStreamCaptureIsolation;
            s->after.insert(s->after.end(), e->after.begin(), e->after.end());
            return cudaSuccess;
        }
        if (s->capture) return cudaErrorStreamCaptureIsolation;  // an event from outside the graph
        operation o;
        o.waits = e;
        o.wait_for = e->recorded;
        push(*s, std::move(o));
        return cudaSuccess;
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    return api(call::synchronise, capture_rule::unsafe, [&] {
        const auto e = find_event(handle);
        if (!e) return cudaErrorInvalidResourceHandle;
        ++the_runtime().waits;
        stream_state* recorder = nullptr;
        for (auto& [stream, s] : the_runtime().streams)
            for (const operation& o : s->queue)
                if (o.records == e) recorder = s.get();
        const std::uint64_t wanted = e->recorded;
        drive(recorder, [&] { return e->done >= wanted; });
        simt::detail::tsan_acquire(&e->order);
        return the_runtime().lost;
    });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    return api(call::other, capture_rule::unsafe, [&] {
        const auto e = find_event(handle);
        if (!e) return cudaErrorInvalidResourceHandle;
        if (e->done < e->recorded) make_progress();
        if (e->done < e->recorded) return cudaErrorNotReady;
        simt::detail::tsan_acquire(&e->order);
        return the_runtime().lost;
    });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    return api(call::other, capture_rule::safe, [&] {
        const auto a = find_event(from), b = find_event(to);
        if (!a || !b || !a->timed || !b->timed || a->recorded == 0 || b->recorded == 0) return cudaErrorInvalidResourceHandle;
        if (a->done < a->recorded || b->done < b->recorded) return cudaErrorNotReady;
        *milliseconds = static_cast<float>((b->seconds - a->seconds) * 1e3);
        return cudaSuccess;
    });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void* data) {
    return api(call::other, capture_rule::safe, [&] { return submit(stream, [=] { f(data); }); });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
}
