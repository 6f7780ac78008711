// The command line of long_context.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sekv/attend/paper.hpp"
#include "sekv/codec/options.hpp"
#include "sekv/config.hpp"

namespace sekv::example {

/// Bytes, or a share of what a full cache takes.
struct byte_amount {
    double value = 0;
    bool percent = false;

    /// "N", "N K", "N M", "N G" (powers of 1024) or "N%". Throws invalid_argument.
    [[nodiscard]] static byte_amount parse(const std::string& flag, const std::string& text);
    [[nodiscard]] std::uint64_t bytes(std::uint64_t full_cache) const;
};

enum class preset : std::uint8_t { progressive, paper };
enum class kv_type : std::uint8_t { f32, f16, bf16 };

struct arguments {
    std::string model, document;
    bool shipped_document = false;       ///< the user named none
    std::vector<std::string> questions;  ///< "question" or "question|expected"
    std::string teacher_forced;          ///< file; empty: none
    std::int32_t max_tokens = 48;
    std::int64_t context = 0;
    std::int32_t threads = 2;
    bool quantised_weights = false, self_test = true, skip_answers = false, skip_continuation = false, quiet = false;
    preset method = preset::progressive;
    kv_type stored = kv_type::bf16;
    byte_amount device_budget;
    std::optional<byte_amount> host_budget;
    cache_options cache;              ///< but for the budgets
    progressive_options progressive;  ///< but for the prior
    paper_options paper;              ///< but for the router
    std::string calibration, router, write_calibration, trace_zooms, json;
};

/// Returns nothing where help was asked for and printed. Throws invalid_argument for what it can't take.
[[nodiscard]] std::optional<arguments> parse_arguments(int argc, const char* const* argv);

}  // namespace sekv::example
