#include "widened_file.hpp"

#include <llama.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "sekv/core/error.hpp"

namespace sekv::example {

widened_file::widened_file(const std::string& source) {
    std::error_code failure;
    const auto directory = std::filesystem::temp_directory_path(failure);
    path_ = (directory / "sekv-fp32-XXXXXX").string();
    const auto descriptor = failure ? -1 : mkstemp(path_.data());
    if (descriptor < 0)
        throw io_error("A temporary file for fp32 weights can't be made at '" + path_ + "': " + std::strerror(errno) +
                       ". Set TMPDIR to a folder that can be written.");
    close(descriptor);
    auto params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    params.nthread = 1;
    if (llama_model_quantize(source.c_str(), path_.c_str(), &params) == 0) return;
    const auto space = std::filesystem::space(directory, failure);
    std::remove(path_.c_str());
    throw io_error("The weights of '" + source + "' couldn't be widened to fp32 in '" + path_ + "' (" + std::to_string(failure ? 0 : space.available >> 20) +
                   " MiB free there); llama.cpp's message above says why.");
}

widened_file::~widened_file() { std::remove(path_.c_str()); }

}  // namespace sekv::example
