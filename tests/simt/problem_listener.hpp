// Include in one source file of a GoogleTest binary: a test during which the emulation found a problem fails, unless it took it (fakecuda::take_problems).
// Each test begins with no fault planned, and policy and schedule as SEKV_SIMT_SEED says.
#pragma once

#include <gtest/gtest.h>

#include "simt/fakecuda.hpp"

namespace fakecuda {

class problem_listener : public testing::EmptyTestEventListener {
    void OnTestStart(const testing::TestInfo&) override { reset(); }
    void OnTestEnd(const testing::TestInfo&) override {
        for (const std::string& problem : take_problems()) ADD_FAILURE() << problem;
    }
};

inline const bool problem_listener_installed = [] {
    testing::UnitTest::GetInstance()->listeners().Append(new problem_listener);
    return true;
}();

}  // namespace fakecuda
