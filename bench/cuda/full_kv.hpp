// The opponent: flash decoding over a whole, uncompressed cache, in bf16 and in FP8 (e4m3), on tensor cores.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.hpp"

namespace sekv::bench {

enum class element : std::uint8_t { bf16, fp8 };

/// Keys and values [batch, kv_heads, tokens, 128], queries [batch, kv_heads * group, 128] of bf16, out the same of float. All on the device.
struct full_kv_step {
    element stored = element::bf16;
    std::int32_t batch = 1, kv_heads = 8, group = 4;  ///< group up to 8
    std::int64_t tokens = 0;
    float scale = 1;  ///< on logits, the keys' own included
    const void* keys = nullptr;
    const void* values = nullptr;
    const void* queries = nullptr;
    float* out = nullptr;
    float* workspace = nullptr;  ///< full_kv_workspace floats
    std::int32_t splits = 1;
};
inline constexpr std::int32_t full_kv_size = 128;

/// As flash decoding chooses it: enough thread blocks for `processors` multiprocessors, each with at least 256 tokens.
[[nodiscard]] std::int32_t full_kv_splits(const full_kv_step& step, std::int32_t processors);
[[nodiscard]] std::size_t full_kv_workspace(const full_kv_step& step);
void attend_full_kv(const full_kv_step& step, cuda::stream s);

/// Uniform values in [-1, 1) as elements of the type, by a hash of seed and index.
void fill_uniform(void* to, element type, std::int64_t count, std::uint32_t seed, cuda::stream s);
void fill_uniform(float* to, std::int64_t count, std::uint32_t seed, cuda::stream s);

/// Reads `lines` lines of `line_bytes` (a power of two from 64 to 4096) at pseudo-random places of `memory`, [line_count * line_bytes]; `sums` keeps one word per warp, `warps` of them.
void read_lines(const std::byte* memory, std::int64_t line_count, std::int32_t line_bytes, std::int64_t lines, std::uint32_t seed, std::uint32_t* sums, std::int32_t warps, cuda::stream s);

}  // namespace sekv::bench
