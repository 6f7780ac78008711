// A temporary copy of a GGUF with every weight in fp32.
#pragma once

#include <string>

namespace sekv::example {

/// Written by the constructor, removed by the destructor.
class widened_file {
public:
    /// Throws io_error if the copy cannot be written or the weights cannot be widened.
    explicit widened_file(const std::string& source);
    widened_file(const widened_file&) = delete;
    widened_file& operator=(const widened_file&) = delete;
    ~widened_file();

    [[nodiscard]] const std::string& path() const noexcept { return path_; }

private:
    std::string path_;
};

}  // namespace sekv::example
