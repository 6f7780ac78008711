// What the kernels of a decode step share: finding a query row's sequence, its queries in shared memory, loads of a whole group.
#pragma once

#include <type_traits>

#include "kernels/decode_workspace.cuh"
#include "kernels/device.cuh"
#include "kernels/scalar.cuh"

namespace sekv::cuda {

/// Calls f with the padded group as a constant.
template <class F>
void with_group(std::int32_t group, F&& f) {
    switch (padded_group(group)) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 4: return f(std::integral_constant<int, 4>());
        case 8: return f(std::integral_constant<int, 8>());
        default: return f(std::integral_constant<int, 16>());
    }
}

/// R1's weights as tensor cores take them (kernels/sketch_mma.cuh): per step of 16 fields (at least one, of zeros) one matrix for up to four query heads, else two for each eight. A matrix is
/// [16 fields, 8 columns] fp16 in 64 words, in the order in which a warp's lanes hold it.
inline constexpr std::int32_t step_fields = 16;
[[nodiscard]] __host__ __device__ constexpr std::int32_t field_steps(std::int32_t fields) noexcept { return fields < 1 ? 1 : (fields + step_fields - 1) / step_fields; }
[[nodiscard]] __host__ __device__ constexpr std::int32_t step_matrices(std::int32_t padded) noexcept { return padded < 8 ? 1 : padded / 4; }
[[nodiscard]] __host__ __device__ constexpr std::int32_t matrix_words(std::int32_t fields, std::int32_t padded) noexcept { return field_steps(fields) * step_matrices(padded) * 64; }

/// The sequence that a query row sees, and up to which position; sequence is null for padding rows.
struct row_view {
    const sequence_view* sequence;
    std::int64_t position;
};
[[nodiscard]] __device__ __forceinline__ row_view view_of(const decode_step& step, std::int32_t row) {
    const batch_row r = step.rows[row];
    const batch_entry& item = step.items[r.item];
    return {item.sequence, item.position + (step.ahead ? -item.first - 1 : r.index)};
}

/// Splits of a sequence's exact rows that a query row's thread blocks fill: at least one, for the sinks. Independent of the plan's bounds.
[[nodiscard]] __device__ __forceinline__ std::int32_t exact_splits_of(const sequence_view& s, std::int32_t layer_class) {
    const std::int32_t n = (s.exact_count[layer_class] + exact_split_blocks - 1) / exact_split_blocks;
    return n > 1 ? n : 1;
}

/// count floats at p, aligned to them (16 bytes from 4 floats on), as the widest loads.
template <int count>
__device__ __forceinline__ void load_group(const float* p, float (&x)[count]) {
    if constexpr (count % 4 == 0) {
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            const float4 v = *reinterpret_cast<const float4*>(p + i);
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
    } else if constexpr (count == 2) {
        const float2 v = *reinterpret_cast<const float2*>(p);
        x[0] = v.x, x[1] = v.y;
    } else {
        static_assert(count == 1);
        x[0] = *p;
    }
}

/// to[j * G + g] = scale * q_g[j] of the group's queries of one row, zeros past the group. By all threads; a barrier must follow. False if an element of the thread's is not finite.
template <int G>
__device__ __forceinline__ bool stage_queries(const decode_step& step, std::int32_t row, std::int32_t head, float* to) {
    const auto& l = step.layer;
    const std::int32_t chunks = l.key_size / 8;
    bool finite = true;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < G * chunks; i += static_cast<std::int32_t>(blockDim.x)) {
        const std::int32_t g = i / chunks, j = i % chunks * 8;
        float x[8] = {};
        if (g < l.group) load8_any(step.queries.data, step.queries.type, row * step.queries.token_stride + (head * l.group + g) * step.queries.head_stride + j, x);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            to[(j + k) * G + g] = x[k] * l.scale;
            finite = finite && is_finite(x[k]);
        }
    }
    return finite;
}

[[nodiscard]] __device__ __forceinline__ float soft_capped(float logit, float cap) { return cap > 0 ? cap * tanhf(logit / cap) : logit; }

/// The part of head `head` in a page or buffer.
[[nodiscard]] __device__ __forceinline__ const std::byte* head_part(const std::byte* base, const head_stride& at, std::int32_t head) { return base + at.first + static_cast<std::uint64_t>(head) * at.stride; }

/// Index of (row, head) in the workspace's arrays [R, H, ...].
[[nodiscard]] __device__ __forceinline__ std::int64_t part_of(const layer_layout& l, std::int32_t row, std::int32_t head) { return static_cast<std::int64_t>(row) * l.kv_heads + head; }

}  // namespace sekv::cuda
