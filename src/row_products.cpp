// Products of rows with the queries and weights of a group: row_logits, row_accumulate, vector_matrix.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "sekv/exec/row_ops.hpp"

// Scalable vectors can't be kept in arrays, which the register blocks below are.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "../src/row_products.cpp"  // relative to the include directory
// The order matters: foreach_target.h includes this file once per instruction set and so comes first.
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "lanes-inl.hpp"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace sekv::host::HWY_NAMESPACE {
constexpr int group_block = many_registers ? 4 : 2;  // 4 accumulators for each
constexpr int row_block = 4;
constexpr std::int64_t tile_bytes = 16384;   // of rows that several blocks of queries or columns read again, from L1
constexpr std::int64_t logits_ahead = 4096;  // bytes to prefetch ahead: the hardware's prefetcher stops at page ends
constexpr std::int64_t widest_arranged = 1024;

/// Puts a query's elements in the order in which load_pair yields those of a row.
HWY_INLINE void split_pairs(const float* from, std::int64_t size, float* to) {
    std::int64_t c = 0;
    for (; c + 2 * lanes <= size; c += 2 * lanes) {
        for (std::int64_t i = 0; i < lanes; ++i) {
            to[c + i] = from[c + 2 * i];
            to[c + lanes + i] = from[c + 2 * i + 1];
        }
    }
    for (; c < size; ++c) to[c] = from[c];
}

template <class T>
HWY_INLINE float dot(const T* row, const float* query, std::int64_t size) {
    vec a = hn::Zero(tag()), b = hn::Zero(tag());
    std::int64_t c = 0;
    for (; c + 2 * lanes <= size; c += 2 * lanes) {
        vec x, y;
        load_pair(row + c, x, y);
        a = hn::MulAdd(x, load(query + c), a);
        b = hn::MulAdd(y, load(query + c + lanes), b);
    }
    if (c + lanes <= size) {
        a = hn::MulAdd(load(row + c), load(query + c), a);
        c += lanes;
    }
    float sum = hn::GetLane(hn::SumOfLanes(tag(), hn::Add(a, b)));
    for (; c < size; ++c) sum += static_cast<float>(row[c]) * query[c];
    return sum;
}

#if HWY_TARGET != HWY_SCALAR
/// The sum of the 128-bit blocks of a vector of N lanes.
template <std::int64_t N, class V>
HWY_INLINE auto add_blocks(V v) {
    if constexpr (N == 4) {
        return v;
    } else {
        const hn::FixedTag<float, N / 2> half;
        return add_blocks<N / 2>(hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
    }
}

/// The sums of the lanes of four vectors, as one 128-bit vector.
HWY_INLINE auto sum_four(vec a, vec b, vec c, vec d) {
    const tag f;
    const hn::Repartition<std::uint64_t, tag> u;
    const vec ab = hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b));
    const vec cd = hn::Add(hn::InterleaveLower(f, c, d), hn::InterleaveUpper(f, c, d));
    const auto x = hn::BitCast(u, ab), y = hn::BitCast(u, cd);
    return add_blocks<lanes>(hn::Add(hn::BitCast(f, hn::InterleaveLower(u, x, y)), hn::BitCast(f, hn::InterleaveUpper(u, x, y))));
}

/// logits of four rows against G queries that lie `size` apart.
template <int G, class T>
HWY_INLINE void logits_of_block(const T* rows, std::int64_t size, const float* queries, float* logits, std::int64_t stride) {
    vec sums[G][row_block];
    SEKV_UNROLL for (auto& of_query : sums) { SEKV_UNROLL for (auto& sum : of_query) sum = hn::Zero(tag()); }
    std::int64_t c = 0;
    for (; c + 2 * lanes <= size; c += 2 * lanes) {
        vec x[row_block], y[row_block];
        SEKV_UNROLL for (int r = 0; r < row_block; ++r) load_pair(rows + r * size + c, x[r], y[r]);
        SEKV_UNROLL for (int g = 0; g < G; ++g) {
            const vec p = load(queries + g * size + c), q = load(queries + g * size + c + lanes);
            SEKV_UNROLL for (int r = 0; r < row_block; ++r) sums[g][r] = hn::MulAdd(x[r], p, sums[g][r]);
            SEKV_UNROLL for (int r = 0; r < row_block; ++r) sums[g][r] = hn::MulAdd(y[r], q, sums[g][r]);
        }
    }
    if (c + lanes <= size) {
        SEKV_UNROLL for (int r = 0; r < row_block; ++r) {
            const vec x = load(rows + r * size + c);
            SEKV_UNROLL for (int g = 0; g < G; ++g) sums[g][r] = hn::MulAdd(x, load(queries + g * size + c), sums[g][r]);
        }
        c += lanes;
    }
    SEKV_UNROLL for (int g = 0; g < G; ++g) { hn::StoreU(sum_four(sums[g][0], sums[g][1], sums[g][2], sums[g][3]), hn::Full128<float>(), logits + g * stride); }
    for (; c < size; ++c) {
        for (int g = 0; g < G; ++g)
            for (int r = 0; r < row_block; ++r) logits[g * stride + r] += static_cast<float>(rows[r * size + c]) * queries[g * size + c];
    }
}
#endif

template <int G, class T>
HWY_NOINLINE void logits_of_tile(const T* rows, std::int64_t count, std::int64_t size, const float* queries, float* logits, std::int64_t stride) {
    std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
    for (; i + row_block <= count; i += row_block) {
        prefetch(rows + i * size + logits_ahead / static_cast<std::int64_t>(sizeof(T)), row_block * size);
        logits_of_block<G>(rows + i * size, size, queries, logits + i, stride);
    }
#endif
    for (; i < count; ++i)
        for (int g = 0; g < G; ++g) logits[g * stride + i] = dot(rows + i * size, queries + g * size, size);
}

/// Reads rows in tiles, so that groups of more than group_block queries find them in the cache again.
template <class T>
void logits_of(const T* rows, std::int64_t count, std::int32_t width, const float* queries, std::int32_t group, float* logits, std::int64_t stride) {
    constexpr bool paired = std::is_same_v<T, bf16> && lanes > 1;
    const std::int64_t size = width;
    if (paired && size > widest_arranged) {
        for (std::int32_t g = 0; g < group; ++g)
            for (std::int64_t i = 0; i < count; ++i) {
                float sum = 0.0F;
                for (std::int64_t j = 0; j < size; ++j) sum += static_cast<float>(rows[i * size + j]) * queries[g * size + j];
                logits[g * stride + i] = sum;
            }
        return;
    }
    HWY_ALIGN float arranged[paired ? group_block * widest_arranged : 1];
    const auto fit = tile_bytes / std::max<std::int64_t>(1, size * static_cast<std::int64_t>(sizeof(T))) / row_block * row_block;
    const auto tile = group <= group_block ? std::max<std::int64_t>(count, 1) : std::max<std::int64_t>(fit, 2 * row_block);
    for (std::int64_t i = 0; i < count; i += tile) {
        const auto n = std::min(tile, count - i);
        for (std::int32_t g = 0; g < group; g += group_block) {
            const auto block = std::min(group_block, group - g);
            const float* q = queries + g * size;
            if constexpr (paired) {
                for (int b = 0; b < block; ++b) split_pairs(q + b * size, size, arranged + b * size);
                q = arranged;
            }
            auto* const to = logits + g * stride + i;
            if (block == 1) logits_of_tile<1>(rows + i * size, n, size, q, to, stride);
            if (block == 2) logits_of_tile<2>(rows + i * size, n, size, q, to, stride);
            if constexpr (group_block > 2) {
                if (block == 3) logits_of_tile<3>(rows + i * size, n, size, q, to, stride);
                if (block == 4) logits_of_tile<4>(rows + i * size, n, size, q, to, stride);
            }
        }
    }
}

/// Where the weights and the sums of a block of vectors lie, and how many elements ahead (or behind) rows are prefetched (0: not).
struct accumulation {
    const float* weights;
    std::int64_t weight_stride;
    float* sums;
    std::int64_t sum_stride;
    std::int64_t ahead;
};

HWY_INLINE void add_to(float* to, vec v) { hn::StoreU(hn::Add(load(to), v), tag(), to); }

/// Adds V vectors, in the order of load_pair, to 2 * lanes contiguous sums per pair.
template <bool paired, int V>
HWY_INLINE void add_vectors(const vec (&v)[V], float* to) {
    if constexpr (paired) {
        SEKV_UNROLL for (int i = 0; i < V; i += 2) {
            HWY_ALIGN float mixed[2 * lanes];
            hn::StoreInterleaved2(v[i], v[i + 1], tag(), mixed);
            add_to(to + i * lanes, hn::Load(tag(), mixed));
            add_to(to + (i + 1) * lanes, hn::Load(tag(), mixed + lanes));
        }
    } else {
        SEKV_UNROLL for (int i = 0; i < V; ++i) add_to(to + i * lanes, v[i]);
    }
}

/// Adds V vectors of columns of `count` rows to the sums of G weight vectors.
template <int G, int V, class T>
HWY_INLINE void accumulate_columns(const T* rows, std::int64_t count, std::int64_t size, const accumulation& a) {
    vec sums[G][V];
    SEKV_UNROLL for (auto& of_weights : sums) { SEKV_UNROLL for (auto& sum : of_weights) sum = hn::Zero(tag()); }
    for (std::int64_t i = 0; i < count; ++i) {
        const T* const row = rows + i * size;
        if (a.ahead != 0) prefetch(row + a.ahead, V * lanes);
        vec x[V];
        if constexpr (V >= 2) {
            SEKV_UNROLL for (int v = 0; v < V; v += 2) load_pair(row + v * lanes, x[v], x[v + 1]);
        } else {
            x[0] = load(row);
        }
        SEKV_UNROLL for (int g = 0; g < G; ++g) {
            const vec w = hn::Set(tag(), a.weights[g * a.weight_stride + i]);
            SEKV_UNROLL for (int v = 0; v < V; ++v) sums[g][v] = hn::MulAdd(w, x[v], sums[g][v]);
        }
    }
    constexpr bool paired = std::is_same_v<T, bf16> && V >= 2 && lanes > 1;
    SEKV_UNROLL for (int g = 0; g < G; ++g) add_vectors<paired>(sums[g], a.sums + g * a.sum_stride);
}

template <int G, class T>
HWY_NOINLINE void accumulate_tile(const T* rows, std::int64_t count, std::int64_t size, accumulation a) {
    std::int64_t c = 0;
    const auto step = [&](std::int64_t width) {
        c += width;
        a.sums += width;
    };
    for (; c + 4 * lanes <= size; step(4 * lanes)) accumulate_columns<G, 4>(rows + c, count, size, a);
    for (; c + 2 * lanes <= size; step(2 * lanes)) accumulate_columns<G, 2>(rows + c, count, size, a);
    for (; c + lanes <= size; step(lanes)) accumulate_columns<G, 1>(rows + c, count, size, a);
    for (; c < size; step(1))
        for (int g = 0; g < G; ++g) {
            float sum = 0.0F;
            for (std::int64_t i = 0; i < count; ++i) sum += a.weights[g * a.weight_stride + i] * static_cast<float>(rows[i * size + c]);
            a.sums[g * a.sum_stride] += sum;
        }
}

/// Elements from one array to another, for prefetching only.
template <class T>
std::int64_t distance(const T* from, const T* to) {
    return (static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(to)) - static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(from))) / static_cast<std::int64_t>(sizeof(T));
}

template <class T>
void accumulate(const T* rows, std::int64_t count, std::int64_t size, const accumulation& all, std::int32_t group, const T* next) {
    const auto fit = tile_bytes / std::max<std::int64_t>(1, size * static_cast<std::int64_t>(sizeof(T)));
    const auto tile = std::max<std::int64_t>(fit, 32);
    for (std::int64_t i = 0; i < count; i += tile) {
        const auto n = std::min(tile, count - i);
        const bool last = i + n == count && next != nullptr;
        const auto ahead = last ? distance(rows + i * size, next) : tile * size;
        for (std::int32_t g = 0; g < group; g += group_block) {
            const auto block = std::min(group_block, group - g);
            // Every pass over a tile fetches its columns of what is read next, so that memory is never idle.
            const accumulation a{all.weights + g * all.weight_stride + i, all.weight_stride, all.sums + g * all.sum_stride, all.sum_stride, g == 0 ? ahead : 0};
            if (block == 1) accumulate_tile<1>(rows + i * size, n, size, a);
            if (block == 2) accumulate_tile<2>(rows + i * size, n, size, a);
            if constexpr (group_block > 2) {
                if (block == 3) accumulate_tile<3>(rows + i * size, n, size, a);
                if (block == 4) accumulate_tile<4>(rows + i * size, n, size, a);
            }
        }
    }
}

#define SEKV_ROW_PRODUCTS(T)                                                                                                                              \
    void logits_##T(const T* rows, std::int64_t count, std::int32_t size, const float* queries, std::int32_t group, float* logits, std::int64_t stride) { \
        logits_of(rows, count, size, queries, group, logits, stride);                                                                                     \
    }                                                                                                                                                     \
    void accumulate_##T(const T* rows, std::int64_t count, std::int64_t size, const float* weights, std::int64_t weight_stride, std::int32_t group,       \
                        float* sums, std::int64_t sum_stride, const T* next) {                                                                            \
        accumulate(rows, count, size, accumulation{weights, weight_stride, sums, sum_stride, 0}, group, next);                                            \
    }
SEKV_ROW_PRODUCTS(float)
SEKV_ROW_PRODUCTS(bf16)
SEKV_ROW_PRODUCTS(fp16)
#undef SEKV_ROW_PRODUCTS

}  // namespace sekv::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sekv::host {

#define SEKV_ROW_PRODUCTS(T)                                                                                                                           \
    HWY_EXPORT(logits_##T);                                                                                                                            \
    HWY_EXPORT(accumulate_##T);                                                                                                                        \
    template <>                                                                                                                                        \
    void row_logits<T>(const T* rows, std::int64_t count, std::int32_t size, const float* queries, std::int32_t group, float* logits,                  \
                       std::int64_t logit_stride) {                                                                                                    \
        HWY_DYNAMIC_DISPATCH(logits_##T)(rows, count, size, queries, group, logits, logit_stride);                                                     \
    }                                                                                                                                                  \
    template <>                                                                                                                                        \
    void row_accumulate<T>(const T* rows, std::int64_t count, std::int32_t size, const float* weights, std::int64_t weight_stride, std::int32_t group, \
                           float* sums, const T* next) {                                                                                               \
        HWY_DYNAMIC_DISPATCH(accumulate_##T)(rows, count, size, weights, weight_stride, group, sums, size, next);                                      \
    }
SEKV_ROW_PRODUCTS(float)
SEKV_ROW_PRODUCTS(bf16)
SEKV_ROW_PRODUCTS(fp16)
#undef SEKV_ROW_PRODUCTS

void vector_matrix(const float* x, std::int64_t x_stride, std::int32_t count, const fp16* a, std::int32_t rows, std::int32_t columns, float* y,
                   std::int64_t y_stride) {
    for (std::int32_t i = 0; i < count; ++i) std::fill_n(y + i * y_stride, columns, 0.0F);
    HWY_DYNAMIC_DISPATCH(accumulate_fp16)(a, rows, columns, x, x_stride, count, y, y_stride, nullptr);
}

}  // namespace sekv::host
#endif
