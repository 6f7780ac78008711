// Copies and fills of the fake runtime.
#include <cstring>

#include "simt/fakecuda_state.hpp"

namespace fakecuda::detail {
namespace {

struct copy_shape {
    std::size_t pitch_to = 0, pitch_from = 0, width = 0, height = 1;
    [[nodiscard]] std::size_t span_to() const { return height == 0 ? 0 : pitch_to * (height - 1) + width; }
    [[nodiscard]] std::size_t span_from() const { return height == 0 ? 0 : pitch_from * (height - 1) + width; }
};

enum class side { device, pinned, pageable };

side side_of(const void* p) {
    const auto i = find_allocation(p);
    if (i == the_runtime().memory.end()) return side::pageable;
    return i->second.where == place::device ? side::device : side::pinned;
}

/// What is wrong with the copy; empty: nothing.
std::string copy_fault(const void* to, const void* from, const copy_shape& shape, cudaMemcpyKind kind) {
    if (std::string f = range_fault(to, shape.span_to()); !f.empty()) return "the destination is " + f;
    if (std::string f = range_fault(from, shape.span_from()); !f.empty()) return "the source is " + f;
    if (shape.width > shape.pitch_to || shape.width > shape.pitch_from) return "rows are wider than their pitch";
    const bool to_device = side_of(to) == side::device;
    const bool from_device = side_of(from) == side::device;
    const bool mapped = (to_device || side_of(to) == side::pinned) && (from_device || side_of(from) == side::pinned);
    switch (kind) {
        case cudaMemcpyDefault:
            return "";
        case cudaMemcpyHostToHost:
            return to_device || from_device ? "host to host, but one is device memory" : "";
        case cudaMemcpyHostToDevice:
            return to_device && !from_device ? "" : "host to device doesn't fit the pointers";
        case cudaMemcpyDeviceToHost:
            return !to_device && from_device ? "" : "device to host doesn't fit the pointers";
        case cudaMemcpyDeviceToDevice:
            return mapped ? "" : "device to device, but one is pageable host memory";
    }
    return "an unknown direction";
}

void copy_rows(void* to, const void* from, const copy_shape& shape) {
    if (shape.width == shape.pitch_to && shape.width == shape.pitch_from) {
        std::memcpy(to, from, shape.width * shape.height);
        return;
    }
    for (std::size_t i = 0; i < shape.height; ++i)
        std::memcpy(static_cast<char*>(to) + i * shape.pitch_to, static_cast<const char*>(from) + i * shape.pitch_from, shape.width);
}

cudaError_t copy(void* to, const void* from, const copy_shape& shape, cudaMemcpyKind kind, cudaStream_t stream, bool blocking) {
    runtime& r = the_runtime();
    stream_state* s = find_stream(stream);
    if (s == nullptr) return cudaErrorInvalidResourceHandle;
    if (shape.width == 0 || shape.height == 0) return cudaSuccess;
    if (const std::string fault = copy_fault(to, from, shape, kind); !fault.empty())
        return problem("a copy of " + std::to_string(shape.width * shape.height) + " bytes: " + fault);
    const bool pageable = side_of(to) == side::pageable || side_of(from) == side::pageable;
    // A pageable copy in a capture would read or write the memory at every replay; nothing here means that.
    if (s->capture && (pageable || blocking)) {
        invalidate_captures();
        return cudaErrorStreamCaptureUnsupported;
    }
    const cudaError_t e = submit(stream, [=] { copy_rows(to, from, shape); });
    if (e != cudaSuccess || !(pageable || blocking)) return e;
    ++r.waits;
    drain(*s);
    return r.lost;
}

cudaError_t fill(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height, cudaStream_t stream) {
    if (width == 0 || height == 0) return cudaSuccess;
    const std::size_t span = pitch * (height - 1) + width;
    if (const std::string fault = range_fault(to, span); !fault.empty()) return problem("a fill: the destination is " + fault);
    if (side_of(to) == side::pageable) return problem("a fill of memory that the device can't reach");
    return submit(stream, [=] {
        for (std::size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(to) + i * pitch, value, width);
    });
}

}  // namespace
}  // namespace fakecuda::detail

using namespace fakecuda::detail;
using fakecuda::call;

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return api(call::copy, capture_rule::safe, [&] { return copy(to, from, {bytes, bytes, bytes, 1}, kind, stream, false); });
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    return api(call::copy, capture_rule::unsafe, [&] { return copy(to, from, {bytes, bytes, bytes, 1}, kind, nullptr, true); });
}

cudaError_t cudaMemcpy2DAsync(void* to, std::size_t pitch_to, const void* from, std::size_t pitch_from, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    return api(call::copy, capture_rule::safe, [&] { return copy(to, from, {pitch_to, pitch_from, width, height}, kind, stream, false); });
}

cudaError_t cudaMemcpy2D(void* to, std::size_t pitch_to, const void* from, std::size_t pitch_from, std::size_t width, std::size_t height, cudaMemcpyKind kind) {
    return api(call::copy, capture_rule::unsafe, [&] { return copy(to, from, {pitch_to, pitch_from, width, height}, kind, nullptr, true); });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
    return api(call::copy, capture_rule::safe, [&] { return fill(to, bytes, value, bytes, 1, stream); });
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
    return api(call::copy, capture_rule::unsafe, [&] { return fill(to, bytes, value, bytes, 1, nullptr); });
}

cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height, cudaStream_t stream) {
    return api(call::copy, capture_rule::safe, [&] { return fill(to, pitch, value, width, height, stream); });
}
}
