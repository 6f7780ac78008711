// CUDA kernels compiled by a host compiler: every CUDA thread becomes a coroutine, blocks run one after another. Include in place of <cuda_runtime.h>. See
// tests/simt/README.md.
#pragma once

#if defined(__CUDACC__)
#error "nvcc has the real thing; simt.hpp is for host compilers"
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <new>

// NVIDIA's headers leave these empty or as attributes that g++ doesn't know.
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static_shared_memory_is_not_emulated_use_dynamic_shared

#include "simt/engine.hpp"
#include "simt/sanitizers.hpp"

/// Set at every change of thread.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

#include "simt/atomics.hpp"
#include "simt/half.hpp"
#include "simt/intrinsics.hpp"
#include "simt/warp.hpp"
