// Truncated singular value decomposition of a few rows: the paper preset's stored form of a span.
#pragma once

#include <cstdint>

#include "sekv/core/scalar.hpp"

namespace sekv {

/// rows [count, size] ~ scale * left [count, rank] * right [rank, size]. Nothing is owned.
struct svd_view {
    const fp16* left = nullptr;
    const fp16* right = nullptr;
    float scale = 1;
    std::int64_t count = 0;
    std::int32_t size = 0;
    std::int32_t rank = 0;
};

/// Fills left [count, rank] and right [rank, size] with the best approximation of rows [count, size] of that rank (Eckart-Young), and returns its scale, a
/// power of two that brings both into fp16's range. rank is 1 to min(count, size); at that many the rows come back to fp16's rounding, ~5e-4 of the largest
/// singular value. The factor of the shorter side is orthonormal, the other one carries the singular values: they come from the shorter side's Gram matrix, in
/// double, so that no division by a vanishing singular value is ever needed. Throws nothing but std::bad_alloc.
[[nodiscard]] float fit_svd(const float* rows, std::int64_t count, std::int32_t size, std::int32_t rank, fp16* left, fp16* right);

/// right [rank, size] as floats, the scale multiplied in; made once for all of a span's rows.
void expand_right(const svd_view& v, float* right);
/// rows [count, size] of tokens [first, first + count): left [count, rank] is scratch, right comes from expand_right.
void expand_rows(const svd_view& v, std::int64_t first, std::int64_t count, const float* right, float* left, float* rows);

}  // namespace sekv
