// The orders in which the emulated runtime carries out what was enqueued. On a device there is one.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#if defined(SEKV_SIMT)
#include "simt/fakecuda.hpp"
#endif

namespace sekv::cuda {

#if defined(SEKV_SIMT)
struct runtime_mode {
    const char* name;
    fakecuda::policy policy;
    std::uint64_t seed = 0;
};
inline std::vector<runtime_mode> runtime_modes() {
    using fakecuda::policy;
    return {{"eager", policy::eager}, {"lazy", policy::lazy}, {"random", policy::random, 1}, {"random", policy::random, 2}, {"random", policy::random, 3}};
}
inline void apply(const runtime_mode& m) { fakecuda::set_policy(m.policy, m.seed); }
inline std::uint64_t host_waits() { return fakecuda::synchronisations(); }
#else
struct runtime_mode {
    const char* name;
    std::uint64_t seed = 0;
};
inline std::vector<runtime_mode> runtime_modes() { return {{"device"}}; }
inline void apply(const runtime_mode&) {}
inline std::uint64_t host_waits() { return 0; }  // a device doesn't tell
#endif

inline std::string name_of_mode(const testing::TestParamInfo<runtime_mode>& i) { return std::string(i.param.name) + (i.param.seed != 0 ? std::to_string(i.param.seed) : ""); }

/// Sets the order of its parameter for the test; printed as its name.
class in_every_mode : public testing::TestWithParam<runtime_mode> {
protected:
    in_every_mode() { apply(GetParam()); }  // before the members of fixtures
};

inline void PrintTo(const runtime_mode& m, std::ostream* out) { *out << m.name << " " << m.seed; }

}  // namespace sekv::cuda
