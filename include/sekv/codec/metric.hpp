// The query metric: the second moment of the queries that will read the keys (design.md section 2, "Basis").
#pragma once

#include <cstdint>
#include <vector>

namespace sekv {

/// Exponentially weighted second moment of one KV head's scaled queries. `matrix` is [size, size], row-major, and not normalised.
struct moment_view {
    float* matrix = nullptr;
    std::int32_t size = 0;
};

/// Adds `tokens` positions of `group` queries each to a moment: matrix = decay^tokens * matrix + sum_i decay^(tokens-1-i) sum_g q q^T.
/// queries: token i's group lies at queries + i * token_stride, contiguous [group, size]; elements of 2^56 or more count as zero. Returns the factor decay^tokens for the caller's sample count.
double add_queries(moment_view moment, const float* queries, std::int64_t token_stride, std::int64_t tokens, std::int32_t group, double decay);

/// M' of design.md: the own moment (weight: its decayed count of query vectors), mixed with a prior of [size, size] (already turned to the positions that will read; null for
/// none) by sample count, then shrunk to (1 - l) M + l tr(M) / d I. Without any query the result is the identity. Returns [size, size].
///
/// l grows from `shrinkage` as samples run short: l = max(shrinkage, d / (d + 8 samples)), the order of an estimate's own noise.
[[nodiscard]] std::vector<double> blend_metric(const float* own, double samples, const double* prior, std::int32_t size, double shrinkage);

}  // namespace sekv
