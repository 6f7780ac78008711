// What a query row needs of each basis before it can read codes: t = A^T q, and from it a weight per sketch field and per line component.
#include "kernels/device.cuh"
#include "kernels/sketch_mma.cuh"

namespace sekv::cuda {
namespace {

using namespace routing;

constexpr int project_threads = 128, project_warps = project_threads / 32;
constexpr int columns = 4;  // of A that a thread sums at once
constexpr int most_size = 256;

template <int G>
struct project_shared {
    shared_array<float, most_size * G> q;                   // [dk, G], scaled
    shared_array<float, project_threads * columns * G> sums;  // [slices, dk, G]
    shared_array<float, most_size * G> t;                   // [dk, G]
    shared_array<float, G> inverse_unit;
};

// t = A^T q for the group: each thread sums four columns over every slices-th row, and the slices are added in order. Threads left over when the columns don't divide them add up what nobody reads.
template <int G>
__device__ void multiply(const __half* a, int size, project_shared<G>& s) {
    const int tid = static_cast<int>(threadIdx.x);
    const int quads = size / columns, slices = project_threads / quads;
    const int slice = tid / quads, column = tid % quads * columns;
    float sum[columns][G] = {};
#pragma unroll 4
    for (int i = slice; i < size; i += slices) {
        const uint2 x = *reinterpret_cast<const uint2*>(a + static_cast<std::int64_t>(i) * size + column);
        const float2 u = unpack2<__half>(x.x), v = unpack2<__half>(x.y);
        const float e[columns] = {u.x, u.y, v.x, v.y};
        float q[G];
        load_group<G>(&s.q[i * G], q);
#pragma unroll
        for (int c = 0; c < columns; ++c) {
#pragma unroll
            for (int g = 0; g < G; ++g) sum[c][g] = fmaf(e[c], q[g], sum[c][g]);
        }
    }
#pragma unroll
    for (int c = 0; c < columns; ++c) {
#pragma unroll
        for (int g = 0; g < G; ++g) s.sums[(slice * size + column + c) * G + g] = sum[c][g];
    }
    __syncthreads();
    for (int i = tid; i < size * G; i += project_threads) {
        float sum = 0.0f;
        for (int k = 0; k < slices; ++k) sum += s.sums[k * size * G + i];
        s.t[i] = sum;
    }
    __syncthreads();
}

// One key basis' fields, as one head has them.
struct field_view {
    const host::sketch_field* fields;
    const std::uint8_t* bits;
    const float* step;
    int count;
};

// Logit per unit of field f's code, and per unit of it where it lies in its nibble.
template <int G>
__device__ __forceinline__ float weight_of(const field_view& v, int f, int g, const project_shared<G>& s) {
    return s.t[v.fields[f].component * G + g] * level_of(v.fields, f, v.bits, v.step).factor;
}
template <int G>
__device__ __forceinline__ float weight_in_place(const field_view& v, int f, int g, const project_shared<G>& s) {
    return weight_of(v, f, g, s) * power_of_two(-v.fields[f].shift);
}

// Per query what does not depend on a token's code, and the unit in which its largest weight fits fp16.
template <int G>
__device__ void write_bases(const field_view& v, const float* error, int size, float* base, float* unit, project_shared<G>& s) {
    const int tid = static_cast<int>(threadIdx.x);
    for (int g = warp_of(tid); g < G; g += project_warps) {
        float sum = 0.0f, most = 0.0f;
        for (int j = lane_of(tid); j < size; j += 32) sum += 0.5f * s.t[j * G + g] * s.t[j * G + g] * error[j];
        for (int f = lane_of(tid); f < v.count; f += 32) {
            sum += s.t[v.fields[f].component * G + g] * level_of(v.fields, f, v.bits, v.step).offset;
            most = fmaxf(most, fabsf(weight_in_place(v, f, g, s)));
        }
        sum = warp_sum(sum);
        const int e = exponent_of(warp_max(most));
        if (lane_of(tid) != 0) continue;
        base[g] = sum;
        unit[g] = power_of_two(e - 14);
        s.inverse_unit[g] = power_of_two(14 - e);
    }
}

// The weights in the order in which lanes hold the matrices; zeros past the last field.
template <int G>
__device__ void write_matrix(const field_view& v, std::uint32_t* matrix, const project_shared<G>& s) {
    constexpr int matrices = step_matrices(G);
    for (int i = static_cast<int>(threadIdx.x); i < field_steps(v.count) * matrices * 32; i += project_threads) {
        const int lane = i % 32, m = i / 32 % matrices, step = i / 32 / matrices, g = column_head<G>(m, lane / 4);
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int f = matrix_field(step, lane, k);
            x[k] = f < v.count ? weight_in_place(v, f, g, s) * s.inverse_unit[g] : 0.0f;
        }
        const auto first = split(x[0], x[1]), second = split(x[2], x[3]);
        const bool low = column_low<G>(m, lane / 4);
        reinterpret_cast<uint2*>(matrix)[i] = low ? uint2{first.low, second.low} : uint2{first.high, second.high};
    }
}

// R1: weights of the fields, in fp32 for refine, and as matrices.
template <int G>
__device__ void write_fields(const decode_step& step, const decode_workspace& w, const std::byte* keys, std::int64_t basis, project_shared<G>& s) {
    const auto& l = step.layer;
    const field_view v = {at<host::sketch_field>(keys, l.key.fields), at<std::uint8_t>(keys, l.key.bits), at<float>(keys, l.key.step), min(*at<std::int32_t>(keys, l.key.field_count), w.fields)};
    float* weight = w.field_weight + basis * w.fields * G;
    for (int i = static_cast<int>(threadIdx.x); i < v.count * G; i += project_threads) weight[i] = weight_of(v, i / G, i % G, s);
    write_bases(v, at<float>(keys, l.key.error), l.key_size, w.field_base + basis * G, w.field_unit + basis * G, s);
    __syncthreads();
    write_matrix(v, w.field_matrix + basis * matrix_words(w.fields, G), s);
}

// R2: weights of the line's components, and the logit of the mean key.
template <int G>
__device__ void write_lines(const decode_step& step, const decode_workspace& w, const std::byte* statistics, std::int64_t at_epoch, project_shared<G>& s) {
    const auto& l = step.layer;
    const int tid = static_cast<int>(threadIdx.x);
    const auto* steps = at<float>(statistics, l.epoch.key_step);
    const auto* mean = at<float>(statistics, l.epoch.key_mean);
    float* weight = w.line_weight + at_epoch * l.key_size * G;
    for (int i = tid; i < l.key_size * G; i += project_threads) weight[i] = s.t[i] * steps[i / G];
    for (int g = warp_of(tid); g < G; g += project_warps) {
        float sum = 0.0f;
        for (int j = lane_of(tid); j < l.key_size; j += 32) sum += s.q[j * G + g] * mean[j];
        sum = warp_sum(sum);
        if (lane_of(tid) == 0) w.epoch_base[at_epoch * G + g] = sum;
    }
}

// Block x: R1 basis x, or after the last of them epoch x - bases.
template <int G>
__global__ void __launch_bounds__(project_threads) project(decode_step step, decode_workspace w) {
    const int x = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
    const std::int64_t place = part_of(step.layer, row, head);
    if (x == 0 && threadIdx.x == 0) w.cursor[place] = w.run_count[place] = 0;  // for padding rows, too
    const auto* sequence = view_of(step, row).sequence;
    if (sequence == nullptr) return;
    const int epoch = x - w.key_bases;
    if (epoch < 0 ? x >= sequence->key_bases_count : epoch >= sequence->epoch_count) return;
    const std::byte* keys = head_part(epoch < 0 ? sequence->key_bases[x] : sequence->epochs[epoch].keys, step.layer.key_buffer, head);
    auto& s = dynamic_shared<project_shared<G>>();
    stage_queries<G>(step, row, head, s.q.data());
    __syncthreads();
    multiply<G>(at<__half>(keys, step.layer.key.a), step.layer.key_size, s);
    if (epoch < 0) return write_fields<G>(step, w, keys, place * w.key_bases + x, s);
    write_lines<G>(step, w, head_part(sequence->epochs[epoch].statistics, step.layer.epoch_buffer, head), place * w.epochs + epoch, s);
}

}  // namespace

void launch_project(const decode_step& step, const decode_workspace& w, stream s) {
    const dim3 grid(static_cast<unsigned>(w.key_bases + w.epochs), static_cast<unsigned>(step.layer.kv_heads), static_cast<unsigned>(step.bounds.rows));
    with_group(step.layer.group, [&](auto g) { launch("project", s, grid, dim3(project_threads), sizeof(project_shared<g()>), &project<g()>, step, w); });
}

}  // namespace sekv::cuda
