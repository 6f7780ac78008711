// Prefill attention under many schedules of its threads.
#include <gtest/gtest.h>

#include "prefill_oracle.hpp"
#include "simt/engine.hpp"

namespace sekv::cuda::prefill_tests {
namespace {

TEST(PrefillSchedules, SameBitsUnderAll) {
    const auto before = simt::current_options();
    for (const std::int32_t size : {64, 256}) {
        prefill_case c;
        c.stored = size == 64 ? dtype::bf16 : dtype::f16, c.dk = c.dv = size, c.kv_heads = 1, c.group = 3, c.tokens = 30, c.position = 210,
        c.counts = {64, 64, 20, 64, 33};
        const auto first = check_case(c);
        for (std::uint64_t seed = 0; seed < 8; ++seed) {
            simt::set_seed(seed);
            const auto again = check_case(c);
            EXPECT_EQ(first.out, again.out) << simt::schedule_name();
            EXPECT_EQ(first.lse, again.lse) << simt::schedule_name();
        }
    }
    simt::current_options() = before;
}

}  // namespace
}  // namespace sekv::cuda::prefill_tests
