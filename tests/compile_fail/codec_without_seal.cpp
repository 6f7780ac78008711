// A codec that lacks a member is refused where the cache is named, not where the member is called.
// expect: constraint failure
// expect: codec
// expect: seal
#include "sekv/sekv.hpp"

// All of progressive_codec but the means to seal.
struct unsealing : sekv::progressive_codec {
    using progressive_codec::progressive_codec;
#ifndef SEKV_EXPECT_OK
    void seal() = delete;
#endif
};

using refused = sekv::basic_cache<float, sekv::host_backend, unsealing>;
sekv::sequence open(refused& c) { return c.open(); }
