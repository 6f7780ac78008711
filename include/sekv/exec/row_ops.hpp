// Host kernels over exact rows: conversion, decode attention, and the matrix product that exact prefill is made of.
// Compiled for several instruction sets in src/row_ops.cpp, src/row_products.cpp and src/gemm.cpp, and dispatched at run
// time (Highway). Sums of products are kept in fp32. Nothing here allocates, throws or checks its arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sekv/core/scalar.hpp"

namespace sekv::host {

/// dst[i] = float(src[i]) for count elements of `type`.
void to_float(const void* src, dtype type, std::size_t count, float* dst);
/// dst[i] = T(src[i]) rounded to nearest even; NaN stays NaN, and what is too large becomes infinite. T: float, bf16, fp16.
template <scalar T>
void from_float(const float* src, std::size_t count, T* dst);
/// True when no element is NaN or infinite.
[[nodiscard]] bool all_finite(const float* src, std::size_t count);

/// logits[g * logit_stride + i] = dot(queries + g * size, rows + i * size) for i < count, g < group: the
/// keys of one KV head against its group's queries (already scaled). Rows are contiguous, [count, size]; any size >= 1,
/// fastest for multiples of 32. Memory shortly past the rows is prefetched, never read.
template <scalar T>
void row_logits(const T* rows, std::int64_t count, std::int32_t size, const float* queries, std::int32_t group, float* logits, std::int64_t logit_stride);

/// sums[g * size + j] += sum_i weights[g * weight_stride + i] * rows[i * size + j]. Rows of weight 0 are read too: their
/// NaN and infinities reach the sums.
/// next: what the caller reads after these rows, fetched meanwhile; null means what lies behind them.
template <scalar T>
void row_accumulate(const T* rows, std::int64_t count, std::int32_t size, const float* weights, std::int64_t weight_stride, std::int32_t group, float* sums, const T* next = nullptr);

/// Largest of count values, none of them NaN; -infinity when count is 0.
[[nodiscard]] float max_of(const float* values, std::int64_t count);
/// values[i] = exp(values[i] - shift); returns their sum. Relative error below 1e-6, after the difference is rounded to
/// fp32. Results that would be subnormal (difference below -87.33), exp(-infinity) among them, are 0. `shift` is finite,
/// and no difference exceeds 88: shift by the values' maximum.
float exp_sum(float* values, std::int64_t count, float shift);
/// values[i] *= factor.
void scale(float* values, std::int64_t count, float factor);
/// values[i] = cap * tanh(values[i] / cap), cap > 0: the soft-cap of gemma2-like layers. Relative error below 2e-6.
void soft_cap(float* values, std::int64_t count, float cap);

/// C[m, n] (+)= A[m, k] * B[k, n], row-major with leading dimensions; adds to C when `accumulate`. Any m, n, k >= 0;
/// fastest when n is a multiple of 64 and A and B have at most 256 KiB. C overlaps neither. This is Q K^T (B = keys transposed) and P V of exact prefill.
void gemm(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t ldc, std::int64_t m, std::int64_t n, std::int64_t k,
          bool accumulate);

/// y[j] = sum_i x[i] * a[i * columns + j] for a row-major fp16 matrix [rows, columns]: x^T A, for `count` vectors x
/// that lie x_stride apart and results y_stride apart.
void vector_matrix(const float* x, std::int64_t x_stride, std::int32_t count, const fp16* a, std::int32_t rows, std::int32_t columns, float* y,
                   std::int64_t y_stride);

/// Name of the instruction set that the kernels above run with here ("AVX3", "AVX2", "NEON", ...).
[[nodiscard]] const char* target_name();

}  // namespace sekv::host
