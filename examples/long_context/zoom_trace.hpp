// Zoom lists in a file, for scripts/zoom_reuse.
#pragma once

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "sekv/codec/options.hpp"
#include "sekv/core/shape.hpp"

namespace sekv::example {

/// Writes per list, in the machine's byte order: int32 layer, KV head, query position, count; then count positions (int32) and as many probabilities (float: the group's mean).
/// Lists of one step follow each other, in any order within a layer.
class zoom_trace {
public:
    /// Throws io_error when the file can't be made.
    zoom_trace(const std::string& path, const model_shape& model);
    /// Says so on stderr where the file isn't whole.
    ~zoom_trace();
    zoom_trace(const zoom_trace&) = delete;
    zoom_trace& operator=(const zoom_trace&) = delete;
    void add(const zoom_event& e);

private:
    std::mutex mutex_;
    std::string path_;
    std::FILE* file_;
    std::vector<std::int32_t> groups_;  ///< query heads per KV head, by layer
};

}  // namespace sekv::example
