// Stream capture and graphs of the fake runtime.
#include <algorithm>

#include "simt/fakecuda_state.hpp"

namespace fakecuda::detail {
namespace {

void end_capture(const std::shared_ptr<graph>& g) {
    for (auto& [handle, s] : the_runtime().streams) {
        if (s->capture != g) continue;
        s->capture = nullptr;
        s->after.clear();
    }
    if (g->mode != cudaStreamCaptureModeRelaxed) --the_runtime().captures;
}

/// Whether every node comes before what `origin` would do next.
bool joined(const graph& g, const stream_state& origin) {
    std::vector<char> before(g.nodes.size(), 0);
    for (const std::size_t n : origin.after) before[n] = 1;
    for (std::size_t i = g.nodes.size(); i-- > 0;)
        if (before[i] != 0)
            for (const std::size_t n : g.nodes[i].after) before[n] = 1;
    return std::all_of(before.begin(), before.end(), [](char c) { return c != 0; });
}

/// Nodes in an order that their dependencies allow: as captured, last first (lazy), or drawn.
std::vector<std::size_t> node_order(const graph& g) {
    std::vector<std::size_t> order;
    std::vector<char> done(g.nodes.size(), 0);
    while (order.size() < g.nodes.size()) {
        std::vector<std::size_t> choice;
        for (std::size_t i = 0; i < g.nodes.size(); ++i) {
            const auto& after = g.nodes[i].after;
            if (done[i] == 0 && std::all_of(after.begin(), after.end(), [&](std::size_t n) { return done[n] != 0; })) choice.push_back(i);
        }
        const policy when = the_runtime().when;
        const std::size_t next = when == policy::eager ? choice.front() : when == policy::lazy ? choice.back() : choice[draw() % choice.size()];
        done[next] = 1;
        order.push_back(next);
    }
    return order;
}

}  // namespace

void capture_node(stream_state& s, std::function<void()> work) {
    s.capture->nodes.push_back({std::move(work), std::move(s.after)});
    s.after = {s.capture->nodes.size() - 1};
}

void invalidate_captures() {
    for (auto& [handle, s] : the_runtime().streams)
        if (s->capture) s->capture->invalid = true;
}

}  // namespace fakecuda::detail

using namespace fakecuda::detail;
using fakecuda::call;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    return api(call::other, capture_rule::safe, [&] {
        stream_state* s = find_stream(handle);
        if (s == nullptr) return cudaErrorInvalidResourceHandle;
        if (handle == nullptr || s->capture) return cudaErrorStreamCaptureUnsupported;
        s->capture = std::make_shared<graph>();
        s->capture->origin = handle;
        s->capture->mode = mode;
        s->after.clear();
        if (mode != cudaStreamCaptureModeRelaxed) ++the_runtime().captures;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
    return api(call::other, capture_rule::safe, [&] {
        *out = nullptr;
        stream_state* s = find_stream(handle);
        if (s == nullptr) return cudaErrorInvalidResourceHandle;
        if (!s->capture) return cudaErrorIllegalState;
        if (s->capture->origin != handle) return cudaErrorStreamCaptureUnmatched;
        const std::shared_ptr<graph> g = s->capture;
        const bool whole = joined(*g, *s);
        end_capture(g);
        if (g->invalid) return cudaErrorStreamCaptureInvalidated;
        if (!whole) return cudaErrorStreamCaptureUnjoined;
        *out = new_handle<cudaGraph_t>();
        the_runtime().graphs[*out] = g;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* out) {
    return api(call::other, capture_rule::safe, [&] {
        stream_state* s = find_stream(handle);
        if (s == nullptr) return cudaErrorInvalidResourceHandle;
        *out = !s->capture ? cudaStreamCaptureStatusNone : s->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t handle, unsigned long long) {
    return api(call::other, capture_rule::safe, [&] {
        const auto found = the_runtime().graphs.find(handle);
        if (found == the_runtime().graphs.end()) return problem("a graph that is destroyed or was never captured");
        *out = new_handle<cudaGraphExec_t>();
        the_runtime().executables[*out] = found->second;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    return api(call::launch, capture_rule::safe, [&] {
        const auto found = the_runtime().executables.find(handle);
        if (found == the_runtime().executables.end()) return problem("an executable graph that is destroyed or was never made");
        const std::shared_ptr<graph> g = found->second;
        return submit(stream, [g] {
            for (const std::size_t i : node_order(*g)) g->nodes[i].work();
        });
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    return api(call::other, capture_rule::safe, [&] { return the_runtime().graphs.erase(handle) != 0 ? cudaSuccess : problem("a graph destroyed twice"); });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    return api(call::other, capture_rule::safe,
               [&] { return the_runtime().executables.erase(handle) != 0 ? cudaSuccess : problem("an executable graph destroyed twice"); });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, std::size_t* count) {
    return api(call::other, capture_rule::safe, [&] {
        const auto found = the_runtime().graphs.find(handle);
        if (found == the_runtime().graphs.end() || nodes != nullptr) return cudaErrorInvalidValue;
        *count = found->second->nodes.size();
        return cudaSuccess;
    });
}
}
