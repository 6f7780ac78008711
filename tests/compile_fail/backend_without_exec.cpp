// A backend must own an executor; one without exec() is refused by the backend concept.
// expect: constraint failure
// expect: backend
// expect: exec
#include "sekv/sekv.hpp"

struct threadless {
    static constexpr const char* name = "threadless";
    std::shared_ptr<sekv::memory_resource> memory = sekv::make_heap_resource();
    [[nodiscard]] std::shared_ptr<sekv::memory_resource> resource() const { return memory; }
#ifdef SEKV_EXPECT_OK
    std::shared_ptr<sekv::executor> threads = sekv::make_thread_pool(1);
    [[nodiscard]] sekv::executor& exec() const { return *threads; }
#endif
};

using refused = sekv::basic_cache<float, threadless, sekv::progressive_codec>;
sekv::sequence open(refused& c) { return c.open(); }
