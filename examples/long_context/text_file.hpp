// Text files of the example.
#pragma once

#include <string>
#include <vector>

namespace sekv::example {

/// The bytes of a regular file, UTF-8 or not; `what` names it in messages. Throws io_error where it can't be read, and
/// invalid_argument where it holds nothing but white space.
[[nodiscard]] std::string read_text(const std::string& path, const std::string& what);

/// Its lines that aren't empty.
[[nodiscard]] std::vector<std::string> lines_of(const std::string& text);

/// Throws io_error where it can't be written.
void write_text(const std::string& path, const std::string& text);

}  // namespace sekv::example
