// R1 on tensor cores. Logits are codes [64 tokens, fields] x weights [fields, heads]; value sums are codes^T [fields, tokens] x probabilities [tokens, heads].
// Codes are small integers, exact in fp16. They stay where they lie in their byte: a field's shift is a power of two that its weight makes up for, a high nibble's 16 one that the sum does.
// Weights and probabilities, brought near fp16's end by a power of two, are two fp16 each, 22 bits. Up to four heads take one matrix, the high parts in columns 0-3 and the low ones in 4-7 (fewer heads
// repeat); beyond, either part of eight heads is a matrix, and both add to the same sums.
// In a lane's share r = lane / 4, q = lane % 4. Lane r reads word r of a plane: tokens 4 r to 4 r + 3, and those + 32.
#pragma once

#include "kernels/fields.cuh"

namespace sekv::cuda::routing {

inline constexpr int word_tokens = 4;           ///< of either half of a block, in a word of a plane
inline constexpr float high_nibble = 1.0f / 16;  ///< factor of what was summed over codes in high nibbles

/// Sums [16, 8] that a lane carries at once, queries in its columns, and how many times a lane holds four tokens of them.
template <int G>
constexpr int column_sets = G < 8 ? 1 : G / 8;
template <int G>
constexpr int lane_heads = G == 1 ? 1 : 2;
template <int G>
constexpr int lane_quads = G < 8 ? 1 : G / 4;

/// The query of column `column` of matrix `m`, and whether it is the low part.
template <int G>
__device__ __forceinline__ int column_head(int m, int column) {
    return G < 8 ? column % 4 % G : m / 2 * 8 + column;
}
template <int G>
__device__ __forceinline__ bool column_low(int m, int column) {
    return G < 8 ? column >= 4 : m % 2 == 1;
}
/// The query of a lane's h-th column in column set `set`, once the parts are added.
template <int G>
__device__ __forceinline__ int lane_head(int lane, int set, int h) {
    return G < 8 ? (lane % 2 * 2 + h) % G : set * 8 + lane % 4 * 2 + h;
}
/// Lanes that hold all queries of a row of sums; the others repeat them.
template <int G>
constexpr int head_lanes = G < 4 ? 1 : G == 4 ? 2 : 4;

/// 2^e, for -126 <= e <= 127.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }
/// e of the largest power of two that a positive number reaches; of tiny numbers one that keeps 2^(14 - e) finite.
__device__ __forceinline__ int exponent_of(float x) { return max((__float_as_int(x) >> 23 & 255) - 127, -100); }

/// Two numbers as fp16, and what that leaves of them, also as fp16.
struct split_pair {
    unsigned high, low;
};
__device__ __forceinline__ unsigned bits_of(__half2 x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
__device__ __forceinline__ split_pair split(float a, float b) {
    const __half2 high = __floats2half2_rn(a, b);
    const float2 rounded = __half22float2(high);
    return {bits_of(high), bits_of(__floats2half2_rn(a - rounded.x, b - rounded.y))};
}

/// Integers below 1,024 in the halves of a word as fp16: put into the mantissa of 1,024, which is then taken off. (As they stand they are subnormal, of which PTX leaves open what mma makes.)
__device__ __forceinline__ unsigned code_pair(unsigned codes) {
    codes |= 0x64006400u;
    __half2 pair;
    memcpy(static_cast<void*>(&pair), &codes, sizeof pair);
    return bits_of(__hsub2(pair, __float2half2_rn(1024.0f)));
}

/// Fields q, q + 4, q + 8, q + 12 of a step: lanes that read at the same time read neighbouring planes, in other banks. Masks select the code in a byte's low and in its high nibble.
struct __align__(16) lane_fields {
    int plane[4];  ///< bytes from the block's first plane
    std::uint16_t low[4], high[4];
};

/// Entry i of `steps` x 16 fields into its lane's place; fields past the count have no bits.
__device__ __forceinline__ void put_field(lane_fields* to, int i, const host::sketch_field* fields, int count) {
    const host::sketch_field f = i < count ? fields[i] : host::sketch_field{};
    lane_fields& x = to[i / step_fields * 4 + i % 4];
    const int j = i % step_fields / 4, mask = f.mask << f.shift;
    x.plane[j] = f.plane * plane_bytes;
    x.low[j] = static_cast<std::uint16_t>(mask);
    x.high[j] = static_cast<std::uint16_t>(mask << 4);
}
/// The field whose weight is the i-th of four in a lane's part of a step's matrix.
__device__ __forceinline__ int matrix_field(int step, int lane, int i) { return step * step_fields + i * 4 + lane % 4; }

/// sums[m][set] += codes x weights of one block, over `steps` >= 1 times 16 fields. Rows of m: tokens m % 2 and m % 2 + 2 of a lane's word, of low nibbles for m < 2, then of high ones. fields, matrix (field_matrix's order): shared memory.
template <int G>
__device__ __forceinline__ void multiply_codes(const unsigned char* planes, const lane_fields* fields, const uint2* matrix, int steps, int lane, float (&sums)[4][column_sets<G>][4]) {
    constexpr int matrices = step_matrices(G);
    planes += lane / 4 * word_tokens;
    int s = 0;
    do {
        const uint4 at = load16(&fields[s * 4 + lane % 4]), masks = load16(fields[s * 4 + lane % 4].low);
        const unsigned w[4] = {*reinterpret_cast<const unsigned*>(planes + at.x), *reinterpret_cast<const unsigned*>(planes + at.y), *reinterpret_cast<const unsigned*>(planes + at.z),
                               *reinterpret_cast<const unsigned*>(planes + at.w)};
        uint2 weights[matrices];
#pragma unroll
        for (int m = 0; m < matrices; ++m) weights[m] = matrix[(s * matrices + m) * 32 + lane];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            // Bytes t of two fields' words, each at the bottom of a half; then bytes t + 2.
            const unsigned pick = 0x4400u + static_cast<unsigned>(t) * 0x1111u, next = pick + 0x2222u;
            const unsigned bytes[4] = {__byte_perm(w[0], w[1], pick), __byte_perm(w[0], w[1], next), __byte_perm(w[2], w[3], pick), __byte_perm(w[2], w[3], next)};
            const unsigned low[4] = {code_pair(bytes[0] & masks.x), code_pair(bytes[1] & masks.x), code_pair(bytes[2] & masks.y), code_pair(bytes[3] & masks.y)};
            const unsigned high[4] = {code_pair(bytes[0] & masks.z), code_pair(bytes[1] & masks.z), code_pair(bytes[2] & masks.w), code_pair(bytes[3] & masks.w)};
#pragma unroll
            for (int m = 0; m < matrices; ++m) {
                mma_m16n8k16<__half>(sums[t][m / 2], low, weights[m].x, weights[m].y);
                mma_m16n8k16<__half>(sums[t + 2][m / 2], high, weights[m].x, weights[m].y);
            }
        }
    } while (++s < steps);
}

/// Logits of one block as a lane holds them: four neighbouring tokens of lane_heads queries, lane_quads times.
template <int G>
using quads = float[lane_quads<G>][lane_heads<G>][word_tokens];

/// The first token of a lane's quad i.
template <int G>
__device__ __forceinline__ int quad_token(int lane, int i) {
    return lane / 4 * word_tokens + (G < 8 ? lane % 4 / 2 : i % 2) * 32;
}

/// Both parts of the sums added. With up to four heads, lanes q < 2 keep the low nibbles' tokens, and get their other part from lane q + 2, which keeps the high nibbles'.
template <int G>
__device__ __forceinline__ void gather_quads(int lane, const float (&sums)[4][column_sets<G>][4], quads<G>& x) {
    const bool upper = lane % 4 >= 2;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (e % 2 >= lane_heads<G>) continue;
            const int token = t + e / 2 * 2;
            if constexpr (G < 8) {
                const float mine = upper ? sums[t + 2][0][e] : sums[t][0][e], other = upper ? sums[t][0][e] : sums[t + 2][0][e];
                x[0][e % 2][token] = mine + __shfl_xor_sync(whole_warp, other, 2);
            } else {
#pragma unroll
                for (int i = 0; i < lane_quads<G>; ++i) x[i][e % 2][token] = sums[t + i % 2 * 2][i / 2][e];
            }
        }
    }
}

/// Where the probabilities of word `word` (0-7) of block b lie, for a query and nibble, in units of four fp16: tokens 0, 2, 1, 3, the high parts; the low ones lie 4 G units further. Words of even and of
/// odd number are a matrix's 16 rows each. The exclusive or spreads a warp's writes over the banks.
template <int G>
__device__ __forceinline__ int probability_at(int b, bool high, int word, int g) {
    const int rows = (high ? 2 : 0) + word % 2;
    return (b * 4 + rows) * 8 * G + ((g * 4 + word / 2) ^ (rows * 2 & (4 * G - 1)));
}

/// One row of codes^T: where a field's plane lies in the segment's first block, bytes to that of the next block, and its mask in two halves.
struct code_row {
    const unsigned char* plane;
    int stride;
    unsigned mask;
};

/// sums[field][query] = sum of the probabilities of blocks [begin, end) x codes, for 16 fields. Lane r holds rows r and r + 8; sums: shared memory, [16, G].
template <int G>
__device__ __forceinline__ void multiply_transposed(const code_row& top, const code_row& bottom, const uint2* probabilities, int begin, int end, int lane, float* sums) {
    float parts[2][column_sets<G>][4] = {};  // of low and of high nibbles
    const int q = lane % 4;
    for (int b = begin; b < end; ++b) {
        const uint2 u = *reinterpret_cast<const uint2*>(top.plane + b * top.stride + q * 8), v = *reinterpret_cast<const uint2*>(bottom.plane + b * bottom.stride + q * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned top_mask = top.mask << (4 * half), bottom_mask = bottom.mask << (4 * half);
#pragma unroll
            for (int word = 0; word < 2; ++word) {  // tokens 0 and 2 of a word, then 1 and 3
                const unsigned x = word == 0 ? u.x : u.y, y = word == 0 ? v.x : v.y;
                const unsigned codes[4] = {code_pair(x & top_mask), code_pair(y & bottom_mask), code_pair(x >> 8 & top_mask), code_pair(y >> 8 & bottom_mask)};
#pragma unroll
                for (int m = 0; m < step_matrices(G); ++m) {
                    const int low = column_low<G>(m, lane / 4) ? 4 * G : 0;
                    const uint2 p = probabilities[probability_at<G>(b, half == 1, word + 2 * q, column_head<G>(m, lane / 4)) + low];
                    mma_m16n8k16<__half>(parts[half][m / 2], codes, p.x, p.y);
                }
            }
        }
    }
#pragma unroll
    for (int set = 0; set < column_sets<G>; ++set) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float sum = fmaf(parts[1][set][e], high_nibble, parts[0][set][e]);
            if (G < 8) sum += __shfl_xor_sync(whole_warp, sum, 2);
            if (q < head_lanes<G> && e % 2 < lane_heads<G>) sums[(lane / 4 + e / 2 * 8) * G + lane_head<G>(lane, set, e % 2)] = sum;
        }
    }
}

}  // namespace sekv::cuda::routing
