// The matrix product of exact prefill: a register-blocked kernel over panels of B that stay in the cache.
#include <algorithm>
#include <cstdint>

#include "sekv/exec/row_ops.hpp"

// Scalable vectors can't be kept in arrays, which the register block below is.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "../src/gemm.cpp"  // relative to the include directory
// The order matters: foreach_target.h includes this file once per instruction set and so comes first.
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lanes-inl.hpp"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace sekv::host::HWY_NAMESPACE {
constexpr int widest = many_registers ? 4 : 2;  // 6 accumulators for each
constexpr int tallest = 6;
constexpr std::int64_t panel_columns = widest * lanes;
constexpr std::int64_t panel_rows = 256;          // at most 64 KiB of B per panel
constexpr std::int64_t fewest_rows_to_pack = 32;  // below, copying B costs more than its strided reads

/// A [m, k], one panel B [k, n] and C [m, n], with leading dimensions.
struct product {
    const float* a;
    std::int64_t lda;
    const float* b;
    std::int64_t ldb;
    float* c;
    std::int64_t ldc;
    std::int64_t m;
    std::int64_t k;
    bool accumulate;
};

/// R rows by V vectors of C, held in registers over the whole panel.
template <int R, int V>
HWY_INLINE void block(const product& p, std::int64_t row) {
    vec sums[R][V];
    auto* const c = p.c + row * p.ldc;
    SEKV_UNROLL for (int r = 0; r < R; ++r) {
        SEKV_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = p.accumulate ? hn::LoadU(tag(), c + r * p.ldc + v * lanes) : hn::Zero(tag());
    }
    const float* a = p.a + row * p.lda;
    const float* b = p.b;
    for (std::int64_t i = 0; i < p.k; ++i, ++a, b += p.ldb) {
        vec x[V];
        SEKV_UNROLL for (int v = 0; v < V; ++v) x[v] = hn::LoadU(tag(), b + v * lanes);
        SEKV_UNROLL for (int r = 0; r < R; ++r) {
            const vec y = hn::Set(tag(), a[r * p.lda]);
            SEKV_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = hn::MulAdd(x[v], y, sums[r][v]);
        }
    }
    SEKV_UNROLL for (int r = 0; r < R; ++r) { SEKV_UNROLL for (int v = 0; v < V; ++v) hn::StoreU(sums[r][v], tag(), c + r * p.ldc + v * lanes); }
}

/// All rows of a panel of V vectors.
template <int V>
HWY_NOINLINE void panel(const product& p) {
    std::int64_t row = 0;
    for (; row + tallest <= p.m; row += tallest) block<tallest, V>(p, row);
    for (; row + 4 <= p.m; row += 4) block<4, V>(p, row);
    for (; row + 2 <= p.m; row += 2) block<2, V>(p, row);
    if (row < p.m) block<1, V>(p, row);
}

/// A panel narrower than a vector: computed in a padded copy of C.
void narrow_panel(const product& p, std::int64_t n) {
    constexpr std::int64_t most = 64;
    HWY_ALIGN float padded_b[panel_rows * lanes];
    HWY_ALIGN float padded_c[most * lanes];
    std::fill_n(padded_b, p.k * lanes, 0.0F);
    for (std::int64_t i = 0; i < p.k; ++i) std::copy_n(p.b + i * p.ldb, n, padded_b + i * lanes);
    for (std::int64_t row = 0; row < p.m; row += most) {
        const auto rows = std::min(most, p.m - row);
        std::fill_n(padded_c, rows * lanes, 0.0F);
        auto* const c = p.c + row * p.ldc;
        if (p.accumulate)
            for (std::int64_t r = 0; r < rows; ++r) std::copy_n(c + r * p.ldc, n, padded_c + r * lanes);
        panel<1>({p.a + row * p.lda, p.lda, padded_b, lanes, padded_c, lanes, rows, p.k, p.accumulate});
        for (std::int64_t r = 0; r < rows; ++r) std::copy_n(padded_c + r * lanes, n, c + r * p.ldc);
    }
}

/// A full-width panel; B is copied to contiguous memory where many rows of A read it, against cache-set conflicts.
void wide_panel(product p) {
    HWY_ALIGN float packed[panel_rows * panel_columns];
    if (p.ldb > 2 * panel_columns && p.m >= fewest_rows_to_pack) {
        for (std::int64_t i = 0; i < p.k; ++i) std::copy_n(p.b + i * p.ldb, panel_columns, packed + i * panel_columns);
        p.b = packed;
        p.ldb = panel_columns;
    }
    panel<widest>(p);
}

void gemm_kernel(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t ldc, std::int64_t m, std::int64_t n, std::int64_t k,
                 bool accumulate) {
    if (k == 0 && !accumulate) {
        for (std::int64_t i = 0; i < m; ++i) std::fill_n(c + i * ldc, n, 0.0F);
    }
    for (std::int64_t i = 0; i < k; i += panel_rows) {
        std::int64_t j = 0;
        product p{a + i, lda, b + i * ldb, ldb, c, ldc, m, std::min(panel_rows, k - i), accumulate || i > 0};
        const auto step = [&](std::int64_t width) {
            j += width;
            p.b += width;
            p.c += width;
        };
        for (; j + panel_columns <= n; step(panel_columns)) wide_panel(p);
        if constexpr (widest > 2)
            for (; j + 2 * lanes <= n; step(2 * lanes)) panel<2>(p);
        for (; j + lanes <= n; step(lanes)) panel<1>(p);
        if (j < n) narrow_panel(p, n - j);
    }
}

}  // namespace sekv::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sekv::host {

HWY_EXPORT(gemm_kernel);

void gemm(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t ldc, std::int64_t m, std::int64_t n, std::int64_t k,
          bool accumulate) {
    HWY_DYNAMIC_DISPATCH(gemm_kernel)(a, lda, b, ldb, c, ldc, m, n, k, accumulate);
}

}  // namespace sekv::host
#endif
