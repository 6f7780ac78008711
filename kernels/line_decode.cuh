// Components of R2 lines on the device; the host's are in include/sekv/exec/line_ops.hpp and src/line_ops.cpp.
#pragma once

#include "kernels/device.cuh"

namespace sekv::cuda {

inline constexpr std::int32_t group_codes = 8;  ///< components that share a width

/// Eight components of a line: their codes take `width` bytes from byte `first` of the line, component j in bits [j width, j width + width). level(code) = u +
/// curve u^3 with u = code - middle.
struct alignas(16) code_group {
    std::int32_t first, width;
    float middle, curve;
};

/// exec/line_ops.hpp's line_curve; an array can't be read on the device.
[[nodiscard]] __device__ __forceinline__ float level_curve(std::int32_t width) {
    return width == 2   ? 0.0555F
           : width == 3 ? 0.0239F
           : width == 4 ? 0.0076F
           : width == 5 ? 0.0027F
           : width == 6 ? 0.0008F
           : width == 7 ? 0.0002F
           : width == 8 ? 0.00005F
                        : 0.0F;
}

/// Fills groups[size / 8] of a half whose codes begin at byte `first` of the line. All lanes of a warp call it; size is at most 256. Other threads need a
/// barrier before they read.
__device__ __forceinline__ void locate_groups(const std::uint8_t* widths, std::int32_t size, std::int32_t first, code_group* groups) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x & 31U);
    const std::int32_t width = lane < size / group_codes ? static_cast<std::int32_t>(widths[lane]) : 0;
    std::int32_t end = width;  // sum of the widths up to this lane's
    for (std::int32_t step = 1; step < 32; step *= 2) {
        const std::int32_t below = __shfl_up_sync(0xffffffffU, end, static_cast<unsigned>(step));
        if (lane >= step) end += below;
    }
    if (lane < size / group_codes) groups[lane] = {first + end - width, width, 0.5F * static_cast<float>((1 << width) - 1), level_curve(width)};
}

[[nodiscard]] __device__ __forceinline__ float level_of(std::uint32_t code, const code_group& g) {
    const float u = static_cast<float>(code) - g.middle;
    return fmaf(g.curve * u, u * u, u);
}

/// The eight levels of one group, zeros where its width is 0. `line` is 4-byte aligned, in any memory; reads whole 4-byte words, none that the codes don't
/// touch (lines are padded to 16 bytes).
__device__ __forceinline__ void group_levels(const std::uint8_t* line, const code_group& g, float (&levels)[group_codes]) {
    if (g.width == 0) {
#pragma unroll
        for (std::int32_t j = 0; j < group_codes; ++j) levels[j] = 0;
        return;
    }
    const auto* words = reinterpret_cast<const std::uint32_t*>(line) + g.first / 4;
    const std::int32_t shift = g.first % 4 * 8, last = (g.first + g.width - 1) / 4 - g.first / 4;
    std::uint64_t codes = words[0];
    if (last > 0) codes |= static_cast<std::uint64_t>(words[1]) << 32;
    codes >>= shift;
    if (last > 1) codes |= static_cast<std::uint64_t>(words[2]) << (64 - shift);  // then shift is not 0
    const std::uint32_t mask = (1U << g.width) - 1U;
#pragma unroll
    for (std::int32_t j = 0; j < group_codes; ++j) levels[j] = level_of(static_cast<std::uint32_t>(codes >> (j * g.width)) & mask, g);
}

/// The level of component j of one group: two bytes read at most, none past the group's codes.
[[nodiscard]] __device__ __forceinline__ float component_level(const std::uint8_t* line, const code_group& g, std::int32_t j) {
    const std::int32_t bit = j * g.width, byte = g.first + bit / 8, shift = bit % 8;
    if (g.width == 0) return 0;
    std::uint32_t code = line[byte];
    if (shift + g.width > 8) code |= static_cast<std::uint32_t>(line[byte + 1]) << 8;
    return level_of((code >> shift) & ((1U << g.width) - 1U), g);
}

/// A value's scale from its byte, between the line's halves (at key_line_bytes): steps of an eighth octave. The value's codes begin at key_line_bytes + 1.
[[nodiscard]] __device__ __forceinline__ float line_scale(std::uint8_t byte) { return exp2f((static_cast<float>(byte) - 160.0F) * 0.125F); }

}  // namespace sekv::cuda
