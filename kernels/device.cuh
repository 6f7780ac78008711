// The one header that every kernel file includes first. nvcc: CUDA. A host compiler with SEKV_SIMT: the emulation of tests/simt.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define SEKV_ON_GPU 1
#else
#include "simt/simt.hpp"
#define SEKV_ON_GPU 0
#endif

#include "kernels/launch.cuh"
#include "kernels/shared_memory.cuh"
#include "kernels/types.hpp"
