// What the tests of the llama.cpp host share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>

#include "llama_host.hpp"

namespace sekv::example {

class scratch_directory {
public:
    scratch_directory() : path_(std::filesystem::temp_directory_path() / ("sekv_hook_" + std::to_string(getpid()))) {
        std::filesystem::create_directories(path_);
    }
    scratch_directory(const scratch_directory&) = delete;
    scratch_directory& operator=(const scratch_directory&) = delete;
    ~scratch_directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }

private:
    std::filesystem::path path_;
};

inline host_options one_thread(std::int64_t context = 0, std::int32_t chunk = 512) { return {.context = context, .threads = 1, .chunk = chunk}; }

inline std::vector<token> some_tokens(const llama_host& host, std::int32_t count) {
    std::vector<token> tokens;
    for (std::int32_t i = 0; i < count; ++i) tokens.push_back((i * i * 31 + i * 7) % host.vocabulary());
    return tokens;
}

/// What the exception of kind Error says that `call` must throw.
template <class Error>
std::string message_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& e) {
        return e.what();
    } catch (const std::exception& e) {
        ADD_FAILURE() << "another exception: " << e.what();
        return {};
    }
    ADD_FAILURE() << "nothing was thrown";
    return {};
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

/// SEKV_TEST_MODEL names a GGUF (SmolLM2-135M-Instruct).
class RealModel : public testing::Test {
protected:
    void SetUp() override {
        const char* path = std::getenv("SEKV_TEST_MODEL");
        if (path == nullptr) GTEST_SKIP() << "SEKV_TEST_MODEL isn't set";
        path_ = path;
    }
    std::string path_;
    scratch_directory directory_;
};

}  // namespace sekv::example
