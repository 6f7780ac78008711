#include "zoom_trace.hpp"

#include <bit>

#include "sekv/core/error.hpp"

namespace sekv::example {

zoom_trace::zoom_trace(const std::string& path, const model_shape& model) : path_(path), file_(std::fopen(path.c_str(), "wb")) {
    if (file_ == nullptr) throw io_error("The trace '" + path + "' can't be written.");
    for (const auto& l : model.layers) groups_.push_back(l.group);
}

zoom_trace::~zoom_trace() {
    const bool written = std::ferror(file_) == 0;
    if (std::fclose(file_) != 0 || !written) std::fprintf(stderr, "The trace '%s' is incomplete; is the disk full?\n", path_.c_str());
}

void zoom_trace::add(const zoom_event& e) {
    std::vector<std::int32_t> words{e.layer, e.kv_head, static_cast<std::int32_t>(e.position), static_cast<std::int32_t>(e.tokens.size())};
    for (const auto t : e.tokens) words.push_back(static_cast<std::int32_t>(t));
    const auto group = static_cast<float>(groups_[static_cast<std::size_t>(e.layer)]);
    for (const auto m : e.mass) words.push_back(std::bit_cast<std::int32_t>(m / group));
    const std::lock_guard guard(mutex_);
    std::fwrite(words.data(), sizeof words[0], words.size(), file_);
}

}  // namespace sekv::example
