// The CUDA backend's caches. Link sekv::cuda beside sekv::sekv.
#pragma once

#include "sekv/attend/cuda_engine.hpp"
#include "sekv/sekv.hpp"

namespace sekv {

/// The cache on a CUDA device, exact rows in bf16, the progressive preset. The paper preset has the host backend only.
using cuda_cache = basic_cache<bf16, cuda_backend, cuda_progressive_codec>;
/// The same with exact rows in fp16.
using cuda_fp16_cache = basic_cache<fp16, cuda_backend, cuda_progressive_codec>;

}  // namespace sekv
