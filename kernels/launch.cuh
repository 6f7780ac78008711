// Launching a kernel on a stream; throws sekv::device_error when the launch is refused.
#pragma once

#include "kernels/types.hpp"
#include "src/cuda/runtime.hpp"

#if !SEKV_ON_GPU
#include "simt/launch.hpp"
#endif

namespace sekv::cuda {

template <class... P, class... A>
void launch(const char* name, stream s, dim3 grid, dim3 block, std::size_t shared_bytes, void (*kernel)(P...), const A&... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
#if SEKV_ON_GPU
    if (shared_bytes > 48 * 1024) check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), name);
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = s;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...), name);
#else
    check(simt::launch_on(s, grid, block, shared_bytes, kernel, static_cast<P>(arguments)...), name);
#endif
}

}  // namespace sekv::cuda
