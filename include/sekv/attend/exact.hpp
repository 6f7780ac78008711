// Attention over exact rows: one query token at a time (decode), and tiles of query tokens over many blocks (prefill).
#pragma once

#include <algorithm>
#include <cstdint>

#include "sekv/attend/softmax_state.hpp"
#include "sekv/core/scalar.hpp"
#include "sekv/exec/arena.hpp"
#include "sekv/exec/row_ops.hpp"
#include "sekv/exec/sketch_ops.hpp"

namespace sekv {

/// Some rows of one KV head in a page (see row_layout): keys transposed, [key_size, capacity], and values [capacity, value_size]; rows [first, first + count).
template <scalar T>
struct page_rows {
    const T* keys = nullptr;
    const T* values = nullptr;
    std::int32_t capacity = 0;
    std::int64_t first = 0;
    std::int64_t count = 0;
    const T* next = nullptr;  ///< keys that will be read after these rows, to be fetched meanwhile
};

/// Adds rows whose logits [group] rows of `stride` are known: their softmax, and values [count, state.size].
template <scalar T>
void absorb_rows(float* logits, std::int64_t stride, const T* values, std::int64_t count, float soft_cap, softmax_state& state, const T* next = nullptr) {
    for (std::int32_t g = 0; g < state.group; ++g) {
        float* row = logits + g * stride;
        if (soft_cap > 0) host::soft_cap(row, count, soft_cap);
        const float shift = state.raise(g, host::max_of(row, count));
        state.weight[g] += host::exp_sum(row, count, shift);
    }
    host::row_accumulate(values, count, state.size, logits, stride, state.group, state.sums, next);
}

/// Adds rows of a page to the group's state. queries: scaled, [group, key_size]; logits: scratch for group * capacity floats.
template <scalar T>
void attend_rows(const page_rows<T>& rows, std::int32_t key_size, const float* queries, float soft_cap, softmax_state& state, float* logits) {
    if (rows.count <= 0) return;
    std::fill_n(logits, state.group * rows.capacity, 0.0F);
    host::row_accumulate(rows.keys, key_size, rows.capacity, queries, key_size, state.group, logits, rows.values);
    absorb_rows(logits + rows.first, rows.capacity, rows.values + rows.first * state.size, rows.count, soft_cap, state, rows.next);
}

/// The same for count <= 64 plain rows: keys [count, key_size], values [count, state.size]; logits: scratch for group * 64 floats.
template <scalar T>
void attend_rows(const T* keys, const T* values, std::int64_t count, std::int32_t key_size, const float* queries, float soft_cap, softmax_state& state, float* logits) {
    if (count <= 0) return;
    host::row_logits(keys, count, key_size, queries, state.group, logits, host::block_tokens);
    absorb_rows(logits, host::block_tokens, values, count, soft_cap, state);
}

/// One tile of prefill: query tokens of one KV head's group against blocks of up to 64 tokens.
struct prefill_tile {
    std::int64_t tokens = 0;
    std::int32_t group = 0, key_size = 0, value_size = 0;
    float* queries = nullptr;  ///< [tokens * group, key_size], scaled
    float* logits = nullptr;   ///< [tokens * group, 64]
    float* keys = nullptr;     ///< [64, key_size]
    float* turned = nullptr;   ///< [key_size, 64]
    float* values = nullptr;   ///< [64, value_size]
    softmax_state state;       ///< of tokens * group rows

    /// Rows of a tile: enough that loading a block is cheap beside multiplying it.
    [[nodiscard]] static std::int64_t tokens_for(std::int32_t group) noexcept { return std::max<std::int64_t>(1, 96 / group); }

    void layout(arena& a, std::int64_t count, std::int32_t g, std::int32_t dk, std::int32_t dv) {
        tokens = count, group = g, key_size = dk, value_size = dv;
        const auto rows = tokens * group;
        queries = a.take<float>(rows * dk);
        logits = a.take<float>(rows * host::block_tokens);
        keys = a.take<float>(host::block_tokens * dk);
        turned = a.take<float>(host::block_tokens * dk);
        values = a.take<float>(host::block_tokens * dv);
        state = {static_cast<std::int32_t>(rows), dv, a.take<float>(rows), a.take<float>(rows), a.take<float>(rows * dv)};
    }

    /// Attends this->keys and values, positions [begin, begin + count), for query tokens from `first_position` on; each sees positions p - window < x <= p (window 0: all up to p).
    void attend(std::int64_t begin, std::int64_t count, std::int64_t first_position, std::int64_t window, float soft_cap);
};

inline void prefill_tile::attend(std::int64_t begin, std::int64_t count, std::int64_t first_position, std::int64_t window, float soft_cap) {
    constexpr std::int64_t width = host::block_tokens;
    if (begin > first_position + tokens - 1 || count <= 0) return;
    for (std::int64_t i = 0; i < width; ++i) {
        for (std::int32_t j = 0; j < key_size; ++j) turned[j * width + i] = i < count ? keys[i * key_size + j] : 0.0F;
    }
    const auto rows = tokens * group;
    host::gemm(queries, key_size, turned, width, logits, width, rows, width, key_size, false);
    for (std::int64_t r = 0; r < rows; ++r) {
        float* row = logits + r * width;
        const auto p = first_position + r / group;
        const auto seen = std::clamp<std::int64_t>(p + 1 - begin, 0, count);
        const auto hidden = window > 0 ? std::clamp<std::int64_t>(p + 1 - window - begin, 0, seen) : 0;
        std::fill(row, row + hidden, softmax_state::empty_max);
        std::fill(row + seen, row + width, softmax_state::empty_max);
        if (seen == hidden) {
            std::fill_n(row, width, 0.0F);
            continue;
        }
        if (soft_cap > 0) host::soft_cap(row + hidden, seen - hidden, soft_cap);
        const auto g = static_cast<std::int32_t>(r);
        const float shift = state.raise(g, host::max_of(row, width));
        state.weight[g] += host::exp_sum(row, width, shift);
    }
    host::gemm(logits, width, values, value_size, state.sums, value_size, rows, value_size, count, true);
}

}  // namespace sekv
