// A progress bar on stderr.
#pragma once

#include <fmt/core.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace sekv::example {

/// Redrawn in place on a terminal; elsewhere a line at every tenth.
class progress_bar {
public:
    progress_bar(std::string label, std::int64_t total, bool shown)
        : label_(std::move(label)), total_(total), shown_(shown), terminal_(isatty(STDERR_FILENO) == 1) {}

    void update(std::int64_t done, double seconds) {
        const bool complete = done >= total_;
        const auto tenth = total_ > 0 ? done * 10 / total_ : 10;
        if (!shown_ || (!terminal_ && tenth == tenth_)) return;
        tenth_ = tenth;
        constexpr std::int64_t width = 30;
        const auto filled = static_cast<std::size_t>(total_ > 0 ? done * width / total_ : width);
        const auto bar = std::string(filled, '#') + std::string(static_cast<std::size_t>(width) - filled, '.');
        const auto rate = seconds > 0 ? static_cast<double>(done) / seconds : 0.0;
        fmt::print(stderr, "{}{:<28} [{}] {}/{} tokens, {:.0f}/s{}", terminal_ ? "\r" : "", label_, bar, done, total_, rate,
                   complete || !terminal_ ? "\n" : "");
        std::fflush(stderr);
    }

private:
    std::string label_;
    std::int64_t total_;
    std::int64_t tenth_ = 0;
    bool shown_, terminal_;
};

}  // namespace sekv::example
