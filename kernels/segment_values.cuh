// What route adds up of a segment's values: probabilities x codes on tensor cores, and the components that the codes stand for.
#pragma once

#include "kernels/segment_work.cuh"

namespace sekv::cuda::routing {

/// Row i of the value codes: field i, behind the last one a 1 for every token, then zeros.
__device__ __forceinline__ code_row row_of(const work& x, int i, int count) {
    if (i >= count) return {x.of<unsigned char>(x.cut.ones), 0, i == count ? 0x00010001u : 0u};
    const sketch_field f = x.of<sketch_field>(x.cut.value_fields)[i];
    return {x.shared + x.cut.values + f.plane * plane_bytes, x.step.layer.value_planes * plane_bytes, static_cast<unsigned>(f.mask) << f.shift << 16 | static_cast<unsigned>(f.mask) << f.shift};
}

/// sums[i][g] over the segment's blocks: of probability x value field i in its place in the nibble; with i = fields, of the probabilities.
template <int G>
__device__ __forceinline__ void sum_fields(const work& x, int fields, float* sums) {
    const int tid = static_cast<int>(threadIdx.x), warp = warp_of(tid), lane = lane_of(tid);
    const int tiles = value_tiles(fields), bits = part_bits(tiles, warps<G>), parts = 1 << bits, stride = tiles * step_fields * G;
    for (int i = warp; i < tiles * parts; i += warps<G>) {
        const int k = i & (parts - 1), first = (i >> bits) * step_fields;
        const auto top = row_of(x, first + lane / 4, fields), bottom = row_of(x, first + lane / 4 + 8, fields);
        multiply_transposed<G>(top, bottom, x.of<uint2>(x.cut.probability), x.part.count * k >> bits, x.part.count * (k + 1) >> bits, lane, sums + k * stride + first * G);
    }
    __syncthreads();
    for (int i = tid; i < (fields + 1) * G; i += threads<G>) {
        float sum = sums[i];
        for (int k = 1; k < parts; ++k) sum += sums[k * stride + i];
        sums[i] = sum / x.of<float>(x.cut.factor)[i % G];
    }
    __syncthreads();
}

/// The segment's tokens that are no candidates, in the epoch's code space.
template <int G>
__device__ __forceinline__ void attend_values(const work& x, int fields) {
    const int tid = static_cast<int>(threadIdx.x);
    float* sums = x.of<float>(x.cut.weights);  // [fields + 1, G]
    sum_fields<G>(x, fields, sums);
    const float* totals = sums + fields * G;
    if (tid < G) x.w.rest[(x.place(x.w.segments) + x.index) * G + tid] = {totals[tid] > 0.0f ? x.of<float>(x.cut.log_sum)[tid] : -INFINITY, totals[tid]};
    const auto& l = x.step.layer;
    const auto* bits = at<std::uint8_t>(x.statistics, l.epoch.bits);
    const auto* steps = at<float>(x.statistics, l.epoch.step);
    const float scale = *at<float>(x.statistics, l.epoch.typical_scale);
    float* out = x.w.rest_codes + (x.place(x.w.segments) + x.index) * G * l.value_size;
    for (int i = tid; i < G * l.value_size; i += threads<G>) {
        const int g = i / l.value_size, j = i % l.value_size;
        float value = 0.0f;
        for (int f = x.of<int>(x.cut.first_field)[j]; f >= 0 && f < fields && x.of<sketch_field>(x.cut.value_fields)[f].component == j; ++f) {
            const auto u = level_of(x.of<sketch_field>(x.cut.value_fields), f, bits, steps);
            value += u.factor * power_of_two(-x.of<sketch_field>(x.cut.value_fields)[f].shift) * sums[f * G + g] + u.offset * totals[g];
        }
        out[i] = scale * value;
    }
}

}  // namespace sekv::cuda::routing
