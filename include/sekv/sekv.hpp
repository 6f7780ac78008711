// sekv: a resolution-adaptive, tiered KV cache. This is the header that an engine includes.
#pragma once

#include "sekv/cache.hpp"

namespace sekv {

/// The cache on the host, exact rows in bf16, the progressive preset.
using cache = basic_cache<bf16, host_backend, progressive_codec>;

}  // namespace sekv
