// Exact rows are fp32, fp16 or bf16; a cache of double is refused by the scalar concept.
// expect: constraint failure
// expect: scalar
#include "sekv/sekv.hpp"

#ifdef SEKV_EXPECT_OK
using element = float;
#else
using element = double;
#endif

using refused = sekv::basic_cache<element, sekv::host_backend, sekv::progressive_codec>;
sekv::sequence open(refused& c) { return c.open(); }
