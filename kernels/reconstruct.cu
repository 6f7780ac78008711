// Sealed blocks as token-level rows again: R2 codes through their bases, k = mean + A c and v = mean + scale U c, on tensor cores.
//
// A thread block takes one block of 64 tokens and one KV head, and reads its lines once. Codes become two fp16 numbers each, high and low part, after division
// by a power of two that brings the largest of the half near 2^14: the products with the fp16 bases are then exact to 2^-22 of a code or 2^-39 of the half's
// largest one, so that rows differ from the host's fp32 ones by rounding alone (2e-5 of a row's norm per sqrt(size) in tests/cuda/reconstruct_test.cpp) while
// columns of a basis differ in size by less than 2^20 or so.
//
// Which of a fragment's columns is which token or component is free as long as both operands agree, so fragments are read straight from memory, 16 bytes at a
// time (c = lane % 4, r = lane / 4):
//   - depth: of 32 components, lane c holds 8 c to 8 c + 7: the first step of 16 takes the lower four, the second the upper four;
//   - keys, tokens as columns: column r of tile u is token 8 r + u, so that a lane's eight tiles end as eight neighbouring tokens of a transposed row;
//   - values, components as columns: column r of tile u is component 8 r + u of 64.
#include "kernels/line_decode.cuh"
#include "kernels/rows.hpp"
#include "kernels/warp.cuh"

namespace sekv::cuda {
namespace {

constexpr std::int32_t threads = 128, warps = 4;
constexpr std::int32_t most_groups = 32;

// Elements between two tokens' codes: room for whole steps of 32, and an odd multiple of 64 bytes, so that two rows' 64 bytes share no bank.
__host__ __device__ constexpr std::int32_t code_stride(std::int32_t size) { return (size + 31) / 64 * 64 + 32; }
// Where a token's codes lie: eight tokens of one column tile side by side. Its own inverse.
__device__ __forceinline__ std::int32_t code_row(std::int32_t token) { return token % 8 * 8 + token / 8; }

/// The thread block's shared memory.
struct scratch {
    code_group *key_groups, *value_groups;  // [most_groups]
    std::uint8_t* lines;                    // [64, line_stride]
    __half *high, *low;                     // [64, code_stride]
};

__host__ __device__ constexpr std::int32_t widest(const layer_layout& l) { return l.key_size > l.value_size ? l.key_size : l.value_size; }
__host__ __device__ constexpr std::size_t scratch_bytes(const layer_layout& l) {
    return 2 * most_groups * sizeof(code_group) +
           static_cast<std::size_t>(block_tokens) *
               (static_cast<std::size_t>(l.line_stride) + 2 * static_cast<std::size_t>(code_stride(widest(l))) * sizeof(__half));
}

__device__ __forceinline__ scratch cut_scratch(const layer_layout& l) {
    auto* base = dynamic_bytes(scratch_bytes(l));
    scratch s;
    s.key_groups = reinterpret_cast<code_group*>(base);
    s.value_groups = s.key_groups + most_groups;
    s.lines = reinterpret_cast<std::uint8_t*>(s.value_groups + most_groups);
    s.high = reinterpret_cast<__half*>(s.lines + block_tokens * l.line_stride);
    s.low = s.high + block_tokens * code_stride(widest(l));
    return s;
}

/// One head of one sealed block.
struct head_source {
    sealed_block block;
    const std::uint8_t *lines, *exact;  // of the head; exact null without R3
    const std::byte *epoch, *keys;      // the head's part of the buffers
    const std::byte* sinks;             // the head's part of the sink page
    std::int64_t sink_end;              // tokens below it are read there
};

__device__ __forceinline__ head_source find_source(const reconstruct_step& step, std::int32_t head) {
    const auto& l = step.layer;
    const auto at = [&](const head_stride& p) { return p.first + static_cast<std::uint64_t>(head) * p.stride; };
    head_source x;
    x.block = step.sequence->sealed[step.first + static_cast<std::int32_t>(blockIdx.x)];
    const epoch_ref epoch = step.sequence->epochs[x.block.epoch];
    x.lines = x.block.lines + at(l.line_page);
    x.exact = x.block.exact != nullptr ? x.block.exact + at(l.exact_line_page) : nullptr;
    x.epoch = epoch.statistics + at(l.epoch_buffer);
    x.keys = epoch.keys + at(l.key_buffer);
    x.sinks = step.sequence->sinks != nullptr ? step.sequence->sinks + at(l.sink_page) : nullptr;
    x.sink_end = step.sequence->sink_count;
    return x;
}

template <class T>
__device__ __forceinline__ const T* part(const std::byte* base, std::uint32_t offset) {
    return reinterpret_cast<const T*>(base + offset);
}

__device__ __forceinline__ void load_lines(const layer_layout& l, const head_source& x, scratch& s) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x) * 16; i < x.block.count * l.line_stride; i += threads * 16) cp_async16(s.lines + i, x.lines + i);
    cp_async_commit();
    cp_async_wait<0>();
}

// The power of two that a half's codes are divided by. Every warp finds it for itself.
__device__ __forceinline__ float code_unit(const code_group* groups, const float* steps, std::int32_t size) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x & 31U);
    float most = 0;
    if (lane < size / group_codes) {
        const float level = level_of((1U << groups[lane].width) - 1U, groups[lane]);
        for (std::int32_t j = 0; j < group_codes; ++j) most = fmaxf(most, level * steps[lane * group_codes + j]);
    }
    const std::int32_t exponent = max((__float_as_int(warp_max(most)) >> 23) - 127, -100);
    return __int_as_float((exponent - 14 + 127) << 23);
}

// Codes of one half of all lines, in units; zeros behind the block's tokens and, up to a multiple of 32, behind its components.
__device__ __forceinline__ void decode_half(const layer_layout& l, const head_source& x, const scratch& s, const code_group* groups, const float* steps,
                                            float unit, std::int32_t size) {
    const std::int32_t octets = (size + 31) / 32 * 4, stride = code_stride(widest(l));
    const float inverse = 1 / unit;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < block_tokens * octets; i += threads) {
        const std::int32_t token = i / octets, c = i % octets;
        float codes[8] = {};
        if (token < x.block.count && c < size / group_codes) {
            float step[8];
            load8(steps + c * group_codes, step);
            group_levels(s.lines + token * l.line_stride, groups[c], codes);
#pragma unroll
            for (std::int32_t j = 0; j < 8; ++j) codes[j] *= step[j] * inverse;
        }
        float low[8];
#pragma unroll
        for (std::int32_t j = 0; j < 8; ++j) low[j] = codes[j] - to_float(from_float<__half>(codes[j]));
        store8(s.high + code_row(token) * stride + c * 8, codes);
        store8(s.low + code_row(token) * stride + c * 8, low);
    }
}

__device__ __forceinline__ uint4 load16_or_zero(const __half* p, bool inside) { return inside ? load16(p) : uint4{0, 0, 0, 0}; }

// Two steps of depth with four words of each operand; x, y: rows r and r + 8 of the first.
__device__ __forceinline__ void multiply_keys(float (&sums)[4], const uint4& x, const uint4& y, const uint4& b) {
    const unsigned a0[4] = {x.x, y.x, x.y, y.y}, a1[4] = {x.z, y.z, x.w, y.w};
    mma_m16n8k16<__half>(sums, a0, b.x, b.y);
    mma_m16n8k16<__half>(sums, a1, b.z, b.w);
}

/// A c of all tokens: calls store(i, token, y) with row i of eight tokens from `token` on, in units.
template <class Store>
__device__ __forceinline__ void expand_keys(const scratch& s, const __half* a, std::int32_t size, std::int32_t stride, Store&& store) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t r = thread % 32 / 4, c = thread % 4;
    for (std::int32_t first = thread / 32 * 16; first < size; first += warps * 16) {
        float sums[8][4] = {};
        for (std::int32_t j = 8 * c; j - 8 * c < size; j += 32) {
            const auto* row = a + (first + r) * size + j;
            const uint4 x = load16_or_zero(row, j < size), y = load16_or_zero(row + 8 * size, j < size);
#pragma unroll
            for (std::int32_t u = 0; u < 8; ++u) {
                multiply_keys(sums[u], x, y, load16(s.high + (u * 8 + r) * stride + j));
                multiply_keys(sums[u], x, y, load16(s.low + (u * 8 + r) * stride + j));
            }
        }
#pragma unroll
        for (std::int32_t part = 0; part < 4; ++part) {
            float y[8];
#pragma unroll
            for (std::int32_t u = 0; u < 8; ++u) y[u] = sums[u][part];
            store(first + r + part / 2 * 8, 16 * c + part % 2 * 8, y);
        }
    }
}

__device__ __forceinline__ unsigned word_of(const uint4& x, std::int32_t i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
// Element u of two rows as one word, the first row's in the lower half.
__device__ __forceinline__ unsigned pair_of(const uint4& x, const uint4& y, std::int32_t u) {
    const unsigned a = word_of(x, u / 2), b = word_of(y, u / 2);
    return u % 2 == 0 ? (a & 0xffffU) | b << 16 : a >> 16 | (b & 0xffff0000U);
}

// Depth step `half` of 32 components from j on, of this lane's four; 64 columns from `column` on.
__device__ __forceinline__ void multiply_values(float (&sums)[8][4], const scratch& s, const __half* basis, std::int32_t size, std::int32_t stride,
                                                std::int32_t row, std::int32_t j, std::int32_t column) {
    uint4 b[4];
#pragma unroll
    for (std::int32_t e = 0; e < 4; ++e) b[e] = load16_or_zero(basis + (j + e) * size + column, j < size && column < size);
    const auto words = [&](const __half* codes) { return *reinterpret_cast<const uint2*>(codes + row * stride + j); };
    const uint2 h = words(s.high), h8 = words(s.high + 8 * stride), o = words(s.low), o8 = words(s.low + 8 * stride);
    const unsigned high[4] = {h.x, h8.x, h.y, h8.y}, low[4] = {o.x, o8.x, o.y, o8.y};
#pragma unroll
    for (std::int32_t u = 0; u < 8; ++u) {
        const unsigned b0 = pair_of(b[0], b[1], u), b1 = pair_of(b[2], b[3], u);
        mma_m16n8k16<__half>(sums[u], high, b0, b1);
        mma_m16n8k16<__half>(sums[u], low, b0, b1);
    }
}

/// U c of all tokens: calls store(token, i, y) with eight components from i on of one token, in units.
template <class Store>
__device__ __forceinline__ void expand_values(const scratch& s, const __half* basis, std::int32_t size, std::int32_t stride, Store&& store) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t r = thread % 32 / 4, c = thread % 4, row = thread / 32 * 16 + r;
    for (std::int32_t first = 0; first < size; first += 64) {
        float sums[8][4] = {};
        for (std::int32_t j = 8 * c; j - 8 * c < size; j += 32) {
            multiply_values(sums, s, basis, size, stride, row, j, first + 8 * r);
            multiply_values(sums, s, basis, size, stride, row, j + 4, first + 8 * r);
        }
#pragma unroll
        for (std::int32_t part = 0; part < 4; ++part) {
            float y[8];
#pragma unroll
            for (std::int32_t u = 0; u < 8; ++u) y[u] = sums[u][part];
            const std::int32_t i = first + 16 * c + part % 2 * 8;
            if (i < size) store(code_row(row + part / 2 * 8), i, y);
        }
    }
}

// Decodes the keys of a block's lines: the scratch then holds lines, groups and the keys' codes. Returns the codes' unit.
__device__ __forceinline__ float prepare_keys(const layer_layout& l, const head_source& x, scratch& s) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (thread / 32 == 0) locate_groups(part<std::uint8_t>(x.epoch, l.epoch.key_widths), l.key_size, 0, s.key_groups);
    if (thread / 32 == 1) locate_groups(part<std::uint8_t>(x.epoch, l.epoch.value_widths), l.value_size, l.key_line_bytes + 1, s.value_groups);
    load_lines(l, x, s);
    __syncthreads();
    const auto* steps = part<float>(x.epoch, l.epoch.key_step);
    const float unit = code_unit(s.key_groups, steps, l.key_size);
    decode_half(l, x, s, s.key_groups, steps, unit, l.key_size);
    __syncthreads();
    return unit;
}

/// A block's pages in the strip, one head's part.
struct head_page {
    void *keys, *values;  // transposed [dk, 64]; [64, dv]
};

__device__ __forceinline__ void rebuild_keys(const layer_layout& l, const head_source& x, scratch& s, void* page) {
    const float unit = prepare_keys(l, x, s);
    const auto* mean = part<float>(x.epoch, l.epoch.key_mean);
    expand_keys(s, part<__half>(x.keys, l.key.a), l.key_size, code_stride(widest(l)), [&](std::int32_t i, std::int32_t token, float(&y)[8]) {
#pragma unroll
        for (std::int32_t u = 0; u < 8; ++u) {
            const auto position = x.block.begin + token + u;
            y[u] = fmaf(unit, y[u], mean[i]);
            if (position < x.sink_end) y[u] = load_element(x.sinks, l.stored, static_cast<std::int64_t>(i) * l.sink_capacity + position);
            if (token + u >= x.block.count) y[u] = 0;
        }
        store8_any(page, l.stored, i * block_tokens + token, y);
    });
}

// After rebuild_keys.
__device__ __forceinline__ void rebuild_values(const layer_layout& l, const head_source& x, scratch& s, void* page) {
    const auto* steps = part<float>(x.epoch, l.epoch.value_step);
    const float unit = code_unit(s.value_groups, steps, l.value_size);
    __syncthreads();  // the keys' codes were read
    decode_half(l, x, s, s.value_groups, steps, unit, l.value_size);
    __syncthreads();
    const auto* mean = part<float>(x.epoch, l.epoch.value_mean);
    expand_values(s, part<__half>(x.epoch, l.epoch.value_basis), l.value_size, code_stride(widest(l)), [&](std::int32_t token, std::int32_t i, float(&y)[8]) {
        const auto position = x.block.begin + token;
        if (token >= x.block.count) {
#pragma unroll
            for (std::int32_t u = 0; u < 8; ++u) y[u] = 0;
        } else if (position < x.sink_end) {
            load8_any(x.sinks, l.stored, static_cast<std::int64_t>(l.sink_capacity) * l.key_size + position * l.value_size + i, y);
        } else {
            const float scale = unit * line_scale(s.lines[token * l.line_stride + l.key_line_bytes]);
            float m[8];
            load8(mean + i, m);
#pragma unroll
            for (std::int32_t u = 0; u < 8; ++u) y[u] = fmaf(scale, y[u], m[u]);
        }
        store8_any(page, l.stored, static_cast<std::int64_t>(token) * l.value_size + i, y);
    });
}

// Eight elements as stored, keys (`skip` 0) or values of a token of an R3 block; zeros behind the block's tokens.
__device__ __forceinline__ uint4 exact_octet(const layer_layout& l, const head_source& x, std::int32_t token, std::int32_t skip, std::int32_t j) {
    if (token >= x.block.count) return {0, 0, 0, 0};
    return load16(x.exact + static_cast<std::int64_t>(token) * l.exact_line_bytes + (skip + j) * 2);
}

// R3 holds the rows as they were stored, sinks included.
__device__ __forceinline__ void copy_exact(const layer_layout& l, const head_source& x, scratch& s, const head_page& page) {
    const std::int32_t stride = code_stride(widest(l)), key_octets = l.key_size / 8, value_octets = l.value_size / 8;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < block_tokens * key_octets; i += threads) {
        store16(s.high + i / key_octets * stride + i % key_octets * 8, exact_octet(l, x, i / key_octets, 0, i % key_octets * 8));
    }
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < block_tokens * value_octets; i += threads) {
        store16(static_cast<std::uint16_t*>(page.values) + i * 8, exact_octet(l, x, i / value_octets, l.key_size, i % value_octets * 8));
    }
    __syncthreads();
    const auto* keys = reinterpret_cast<const std::uint16_t*>(s.high);
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < l.key_size * 8; i += threads) {
        const std::int32_t j = i % l.key_size, token = i / l.key_size * 8;
        const auto pair = [&](std::int32_t e) {
            return static_cast<unsigned>(keys[(token + e) * stride + j]) | static_cast<unsigned>(keys[(token + e + 1) * stride + j]) << 16;
        };
        store16(static_cast<std::uint16_t*>(page.keys) + j * block_tokens + token, uint4{pair(0), pair(2), pair(4), pair(6)});
    }
}

// Thread block (sealed block of the range, KV head).
__global__ void __launch_bounds__(threads) reconstruct_kernel(reconstruct_step step) {
    const auto& l = step.layer;
    auto s = cut_scratch(l);
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto x = find_source(step, head);
    auto* page = step.strip + blockIdx.x * step.strip_stride + step.page.first + static_cast<std::uint64_t>(head) * step.page.stride;
    const head_page to{page, page + static_cast<std::int64_t>(l.key_size) * block_tokens * 2};
    if (x.exact != nullptr) {
        copy_exact(l, x, s, to);
        return;
    }
    rebuild_keys(l, x, s, to.keys);
    rebuild_values(l, x, s, to.values);
}

// Thread block (sealed block of the range, KV head).
__global__ void __launch_bounds__(threads) reconstruct_keys_kernel(reconstruct_step step, float* keys, std::int64_t head_elements) {
    const auto& l = step.layer;
    auto s = cut_scratch(l);
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto x = find_source(step, head);
    const float unit = prepare_keys(l, x, s);
    const auto* mean = part<float>(x.epoch, l.epoch.key_mean);
    float* to = keys + head * head_elements + static_cast<std::int64_t>(blockIdx.x) * block_tokens * l.key_size;
    expand_keys(s, part<__half>(x.keys, l.key.a), l.key_size, code_stride(widest(l)), [&](std::int32_t i, std::int32_t token, float(&y)[8]) {
#pragma unroll
        for (std::int32_t u = 0; u < 8; ++u) to[(token + u) * l.key_size + i] = token + u < x.block.count ? fmaf(unit, y[u], mean[i]) : 0;
    });
}

dim3 reconstruct_grid(const reconstruct_step& step) { return dim3(static_cast<unsigned>(step.count), static_cast<unsigned>(step.layer.kv_heads)); }

}  // namespace

void reconstruct_blocks(const reconstruct_step& step, stream s) {
    launch("reconstruct_blocks", s, reconstruct_grid(step), dim3(threads), scratch_bytes(step.layer), &reconstruct_kernel, step);
}

void reconstruct_keys(const reconstruct_step& step, float* keys, std::int64_t head_elements, stream s) {
    launch("reconstruct_keys", s, reconstruct_grid(step), dim3(threads), scratch_bytes(step.layer), &reconstruct_keys_kernel, step, keys, head_elements);
}

}  // namespace sekv::cuda
