// The caller's rows on the host, on their way into a cache: converted, and refused where they aren't finite.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sekv/core/error.hpp"
#include "sekv/core/view.hpp"
#include "sekv/exec/row_ops.hpp"

namespace sekv {

/// Copies v to a contiguous [tokens, heads, size] array of T. refuse(token, head) is called for a row that isn't finite once it is a T; it throws.
template <scalar T, class Refuse>
void convert_rows(const rows_view& v, T* to, Refuse&& refuse) {
    const auto size = static_cast<std::size_t>(v.size);
    std::vector<float> row(size);
    for (std::int64_t t = 0; t < v.tokens; ++t) {
        for (std::int32_t h = 0; h < v.heads; ++h, to += size) {
            host::to_float(v.row(t, h), v.type, size, row.data());
            host::from_float(row.data(), size, to);
            if constexpr (!std::same_as<T, float>) host::to_float(to, dtype_of<T>, size, row.data());
            if (!host::all_finite(row.data(), size)) refuse(t, h);
        }
    }
}

/// The same for the keys or values that `what` names. Throws invalid_argument.
template <scalar T>
void convert_appended(const char* what, const rows_view& v, T* to) {
    convert_rows(v, to, [&](std::int64_t t, std::int32_t h) {
        throw invalid_argument(std::string(what) + " of token " + std::to_string(t) + ", head " + std::to_string(h) + " are not finite, or leave the range of the stored type; nothing was appended.");
    });
}

[[noreturn]] inline void refuse_queries() { throw invalid_argument("Some queries are not finite; check the model's activations."); }

}  // namespace sekv
