// Runs a kernel's tests once per instruction set that this machine supports.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "hwy/targets.h"

namespace sekv::oracle {

/// INSTANTIATE_TEST_SUITE_P(Targets, SUITE, oracle::all_targets(), oracle::name_of_target) for a suite derived from this.
class each_target : public ::testing::TestWithParam<std::int64_t> {
protected:
    void SetUp() override { use(GetParam()); }
    void TearDown() override { use(0); }

private:
    static void use(std::int64_t target) {
        hwy::SetSupportedTargetsForTest(target);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    }
};

[[nodiscard]] inline auto all_targets() { return ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()); }
[[nodiscard]] inline std::string name_of_target(const ::testing::TestParamInfo<std::int64_t>& info) { return hwy::TargetName(info.param); }

}  // namespace sekv::oracle
