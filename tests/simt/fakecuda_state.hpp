// Inside of the fake CUDA runtime.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "simt/fakecuda.hpp"
#include "simt/fiber.hpp"

namespace fakecuda::detail {

enum class place { device, pinned };
struct allocation {
    std::size_t bytes = 0;
    place where = place::device;
};
struct freed_block {
    char* bytes = nullptr;
    allocation what;
    std::size_t reserved = 0;
};

struct graph;
struct event_state {
    std::uint64_t recorded = 0, done = 0;  ///< records so far, and how many of them the device has come to
    double seconds = 0;                    ///< when the last was
    bool timed = true;
    const graph* capture = nullptr;  ///< recorded into this graph, after these nodes
    std::vector<std::size_t> after;
    char order = 0;
};

struct operation {
    std::function<void()> work;
    std::shared_ptr<event_state> waits, records;
    std::uint64_t wait_for = 0, record_as = 0;
    std::unique_ptr<char> submitted = std::make_unique<char>('\0');
};

/// What a capture recorded: each node runs after the nodes it names, all of them before it in the list.
struct graph {
    struct node {
        std::function<void()> work;
        std::vector<std::size_t> after;
    };
    std::vector<node> nodes;
    cudaStream_t origin = nullptr;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    bool invalid = false;
};

/// Under ThreadSanitizer a stream is a thread of its own, stack included, ordered with others by submission, events and synchronisation alone.
struct stream_thread {
    stream_thread(std::size_t stack_bytes, void (*entry)()) : own(stack_bytes, entry) {}
    simt::detail::fiber own, host;
};

struct stream_state {
    std::deque<operation> queue;
    operation at_work;
    bool destroyed = false;
    std::unique_ptr<stream_thread> thread;  ///< null but for ThreadSanitizer
    char order = 0;
    std::shared_ptr<graph> capture;  ///< set while capturing
    std::vector<std::size_t> after;  ///< nodes that the next captured node follows
};

struct fault {
    call kind = call::any;
    int successes = 0;
    cudaError_t error = cudaSuccess;
    bool sticky = false;
};

struct runtime {
    std::recursive_mutex mutex;
    std::map<char*, allocation> memory;
    std::deque<freed_block> quarantine;
    std::size_t quarantined = 0, device_used = 0, pinned_used = 0;
    std::size_t device_total = std::size_t{8} << 30, pinned_total = std::size_t{8} << 30;
    bool device_hidden = true;  ///< from the host, under AddressSanitizer

    std::map<cudaStream_t, std::unique_ptr<stream_state>> streams;
    std::vector<std::unique_ptr<stream_thread>> spare_threads;
    std::map<cudaEvent_t, std::shared_ptr<event_state>> events;
    std::map<cudaGraph_t, std::shared_ptr<graph>> graphs;
    std::map<cudaGraphExec_t, std::shared_ptr<graph>> executables;
    std::uintptr_t next_handle = 0x100;
    int captures = 0;  ///< under way, but for relaxed ones

    policy when = policy::lazy;
    std::uint64_t seed = 0, draws = 1, choices = 0;

    std::vector<fault> faults;
    cudaError_t lost = cudaSuccess;
    std::string lost_reason;
    std::uint64_t calls[6] = {};
    std::uint64_t waits = 0;
    std::vector<std::string> problems;
};
[[nodiscard]] runtime& the_runtime();
/// The calling thread is at a stream's work, and so has the mutex.
inline thread_local bool in_device = false;
[[nodiscard]] std::uint64_t draw();

/// Records a broken rule; returns error, for the caller to pass on.
cudaError_t problem(const std::string& text, cudaError_t error = cudaErrorInvalidValue);
void lose_context(cudaError_t error, const std::string& reason);

/// unsafe: refused while anything is being captured, and the capture is lost.
enum class capture_rule { safe, unsafe };
[[nodiscard]] cudaError_t refusal(call kind, capture_rule rule);
cudaError_t remember(cudaError_t error);
void show_device_memory();
void hide_device_memory();

/// Body of an API function: refused by the fault plan, a lost context or a capture; otherwise f().
template <class F>
cudaError_t api(call kind, capture_rule rule, F f) {
    if (in_device) return problem("a CUDA call from a host function that a stream runs", cudaErrorNotPermitted);
    const std::lock_guard lock(the_runtime().mutex);
    cudaError_t e = refusal(kind, rule);
    if (e == cudaSuccess) e = f();
    hide_device_memory();
    return remember(e);
}

template <class H>
H new_handle() {
    return reinterpret_cast<H>(the_runtime().next_handle += 16);
}

// fakecuda_stream.cpp
/// Null for a handle that no stream has.
[[nodiscard]] stream_state* find_stream(cudaStream_t s);
[[nodiscard]] std::shared_ptr<event_state> find_event(cudaEvent_t e);
/// Enqueues, or records into the stream's capture.
cudaError_t submit(cudaStream_t s, std::function<void()> work);
void push(stream_state& s, operation o);
void drain(stream_state& s);
void drain_all();
/// One operation of any stream, if there is one that can run.
void make_progress();

// fakecuda_memory.cpp
[[nodiscard]] std::map<char*, allocation>::iterator find_allocation(const void* p);
/// Why [p, p + bytes) is not in one live allocation; empty if it is, or if p is no allocation's at all.
[[nodiscard]] std::string range_fault(const void* p, std::size_t bytes);

// fakecuda_capture.cpp
void capture_node(stream_state& s, std::function<void()> work);
void invalidate_captures();

}  // namespace fakecuda::detail
