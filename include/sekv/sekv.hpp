// sekv: a resolution-adaptive, tiered KV cache. This is the header that an engine includes.
#pragma once

#include "sekv/attend/paper.hpp"
#include "sekv/cache.hpp"

namespace sekv {

/// The cache on the host, exact rows in bf16, the progressive preset.
using cache = basic_cache<bf16, host_backend, progressive_codec>;
/// The same with the method as published; open it with paper_cache_options.
using paper_cache = basic_cache<bf16, host_backend, paper_codec>;

}  // namespace sekv
