#include "text_file.hpp"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "sekv/core/error.hpp"

namespace sekv::example {

std::string read_text(const std::string& path, const std::string& what) {
    const auto named = "The " + what + " '" + path + "' ";
    std::error_code failed;
    const auto status = std::filesystem::status(path, failed);
    if (!std::filesystem::exists(status)) throw io_error(named + "doesn't exist.");
    if (std::filesystem::is_directory(status)) throw io_error(named + "is a directory.");
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    if (in.peek() != std::ifstream::traits_type::eof()) text << in.rdbuf();
    if (in.bad() || !in.is_open() || text.fail()) throw io_error(named + "can't be read.");
    if (text.str().find_first_not_of(" \t\r\n\f\v") == std::string::npos) throw invalid_argument(named + "is empty.");
    return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
        if (line.find_first_not_of(" \t\r") != std::string::npos) lines.push_back(line);
    }
    return lines;
}

void write_text(const std::string& path, const std::string& text) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out << text;
    out.close();
    if (!out) throw io_error("The file '" + path + "' can't be written: " + std::strerror(errno) + ".");
}

}  // namespace sekv::example
