// What the stand-ins of cuBLAS and cuSOLVER share: their work runs in stream order, on memory that a device could reach.
#pragma once

#include <cstdint>
#include <string>

#include "simt/fakecuda_state.hpp"
#include "simt/sanitizers.hpp"

namespace fakecuda::detail {

/// A column-major matrix in device memory.
template <class T>
struct matrix {
    T* data = nullptr;
    std::int64_t rows = 0, columns = 0, stride = 0;
    [[nodiscard]] std::size_t bytes() const { return columns == 0 ? 0 : static_cast<std::size_t>((columns - 1) * stride + rows) * sizeof(T); }
};

/// Whether the device can reach [p, p + bytes); a problem otherwise.
[[nodiscard]] inline bool reachable(const void* p, std::size_t bytes, const char* what) {
    if (bytes == 0) return true;
    const std::lock_guard lock(the_runtime().mutex);
    if (find_allocation(p) == the_runtime().memory.end()) {
        problem(std::string(what) + ": memory that the device can't reach, or that is freed");
        return false;
    }
    const std::string fault = range_fault(p, bytes);
    if (!fault.empty()) problem(std::string(what) + ": " + fault);
    return fault.empty();
}

template <class T>
[[nodiscard]] bool reachable(const matrix<T>& m, std::int64_t apart, std::int64_t count, const char* what) {
    if (count == 0 || m.rows == 0 || m.columns == 0) return true;
    return reachable(m.data, static_cast<std::size_t>((count - 1) * apart) * sizeof(T) + m.bytes(), what);
}

/// Of the race detector, which doesn't see this library: columns read, columns written.
template <class T>
void note_reads(const matrix<T>& m) {
    for (std::int64_t j = 0; j < m.columns; ++j) simt::detail::tsan_reads(m.data + j * m.stride, static_cast<std::size_t>(m.rows) * sizeof(T));
}
template <class T>
void note_writes(const matrix<T>& m) {
    for (std::int64_t j = 0; j < m.columns; ++j)
        simt::detail::tsan_writes(const_cast<void*>(static_cast<const void*>(m.data + j * m.stride)), static_cast<std::size_t>(m.rows) * sizeof(T));
}

/// A call that makes a handle: device memory may be allocated, so a fault plan for allocations finds it.
template <class F>
cudaError_t creating_call(F make) {
    return api(call::allocation, capture_rule::unsafe, [&] {
        make();
        return cudaSuccess;
    });
}

}  // namespace fakecuda::detail
