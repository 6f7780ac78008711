// Launching an emulated kernel: at once, or on a stream of the fake runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>

#include "simt/engine.hpp"

namespace simt {

namespace detail {

/// Checks the launch and puts `work` on the stream (or into the graph being captured).
cudaError_t enqueue_launch(cudaStream_t stream, dim3 grid, dim3 block, std::size_t shared_bytes, std::function<void()> work);

template <class... P>
struct call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
    static void one_thread(const void* self) {
        const auto& c = *static_cast<const call*>(self);
        std::apply(c.kernel, c.arguments);
    }
};

}  // namespace detail

/// Runs the kernel to its end on the calling thread; throws simt::error. For tests of kernels on host memory.
template <class... P>
void launch(dim3 grid, dim3 block, std::size_t shared_bytes, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
    const detail::call<P...> c{kernel, {arguments...}};
    detail::run(grid, block, shared_bytes, &detail::call<P...>::one_thread, &c);
}

/// As cudaLaunchKernelEx: arguments are copied now, the kernel runs when the stream gets there. What the kernel breaks is reported then.
template <class... P>
cudaError_t launch_on(cudaStream_t stream, dim3 grid, dim3 block, std::size_t shared_bytes, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
    const detail::call<P...> c{kernel, {arguments...}};
    return detail::enqueue_launch(stream, grid, block, shared_bytes, [=] { detail::run(grid, block, shared_bytes, &detail::call<P...>::one_thread, &c); });
}

}  // namespace simt
