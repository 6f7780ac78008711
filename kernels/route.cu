// Routing over R1. score_sketch: each segment's softmax sums. route: probabilities against the log-sum-exp of everything; tokens above tau become candidates, the others are attended
// here through the value sketch. Both stage a segment's planes once; a warp scores a block on tensor cores, and both get the same bits.
#include "kernels/candidates.cuh"
#include "kernels/device.cuh"
#include "kernels/segment_values.cuh"
#include "kernels/segment_work.cuh"

namespace sekv::cuda {
namespace {

using namespace routing;

// Merges a partial sum into (max, weight).
__device__ __forceinline__ void merge(float& max_, float& weight, float other_max, float other_weight) {
    const float top = fmaxf(max_, other_max);
    if (top == -INFINITY) return;
    weight = weight * exp_approx(max_ - top) + other_weight * exp_approx(other_max - top);
    max_ = top;
}

// Largest and sum over the lanes that hold other tokens of the same queries, given to all of them.
template <int G>
__device__ __forceinline__ float token_max(float x) {
#pragma unroll
    for (int step = 16; step >= (G < 8 ? 2 : 4); step /= 2) x = fmaxf(x, __shfl_xor_sync(whole_warp, x, step));
    return x;
}
template <int G>
__device__ __forceinline__ float token_sum(float x) {
#pragma unroll
    for (int step = 16; step >= (G < 8 ? 2 : 4); step /= 2) x += __shfl_xor_sync(whole_warp, x, step);
    return x;
}

// A lane's sums of each of its queries.
template <int G>
struct lane_sums {
    float most[column_sets<G>][lane_heads<G>], weight[column_sets<G>][lane_heads<G>];
};

template <int G>
__device__ __forceinline__ void add_quads(const quads<G>& x, lane_sums<G>& sums) {
#pragma unroll
    for (int i = 0; i < lane_quads<G>; ++i) {
#pragma unroll
        for (int h = 0; h < lane_heads<G>; ++h) {
            const float(&logit)[word_tokens] = x[i][h];
            float &most = sums.most[i / 2][h], &weight = sums.weight[i / 2][h];
            const float top = fmaxf(most, fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3])));
            const float shift = top > -INFINITY ? -top * log2_e : 0.0f;
            weight *= exp2_approx(fmaf(most, log2_e, shift));
#pragma unroll
            for (const float y : logit) weight += exp2_approx(fmaf(y, log2_e, shift));
            most = top;
        }
    }
}

// The warps' sums, merged in order, become the segment's.
template <int G>
__device__ __forceinline__ void write_sums(const work& x, const lane_sums<G>& sums) {
    const int tid = static_cast<int>(threadIdx.x), lane = lane_of(tid);
    auto* partial = x.of<partial_sum>(x.cut.partial);
#pragma unroll
    for (int set = 0; set < column_sets<G>; ++set) {
#pragma unroll
        for (int h = 0; h < lane_heads<G>; ++h) {
            const float top = token_max<G>(sums.most[set][h]);
            const float sum = token_sum<G>(top == -INFINITY ? 0.0f : sums.weight[set][h] * exp_approx(sums.most[set][h] - top));
            if (lane < head_lanes<G>) partial[warp_of(tid) * G + lane_head<G>(lane, set, h)] = {top, sum};
        }
    }
    __syncthreads();
    if (tid >= G) return;
    partial_sum total = {-INFINITY, 0.0f};
    for (int k = 0; k < warps<G> && tid < x.step.layer.group; ++k) merge(total.max, total.weight, partial[k * G + tid].max, partial[k * G + tid].weight);
    x.w.sums[(x.place(x.w.exact_splits + x.w.segments) + x.w.exact_splits + x.index) * G + tid] = total;
}

template <int G>
__global__ void __launch_bounds__(threads<G>) score_sketch(decode_step step, decode_workspace w, shared_cut cut) {
    const auto q = view_of(step, static_cast<int>(blockIdx.z));
    if (q.sequence == nullptr || static_cast<int>(blockIdx.x) >= q.sequence->segment_count) return;
    const auto x = make_work(step, w, cut, q);
    prepare_scores<G>(x);
    stage_planes<G>(x, cut.keys, 0, step.layer.key_planes);
    cp_async_wait<0>();
    __syncthreads();
    lane_sums<G> sums;
#pragma unroll
    for (int set = 0; set < column_sets<G>; ++set) {
#pragma unroll
        for (int h = 0; h < lane_heads<G>; ++h) sums.most[set][h] = -INFINITY, sums.weight[set][h] = 0.0f;
    }
    const int lane = lane_of(static_cast<int>(threadIdx.x));
    const auto queries = queries_of<G>(x, lane);
    for (int b = warp_of(static_cast<int>(threadIdx.x)); b < x.part.count; b += warps<G>) {
        quads<G> logits;
        score_block<G>(x, queries, b, lane, logits);
        add_quads<G>(logits, sums);
    }
    write_sums<G>(x, sums);
}

// A power of two that brings the segment's largest probability, e^log, near fp16's end. A query without any takes 1; queries that aren't finite may come with any log.
__device__ __forceinline__ float fp16_factor(float log) { return log > -INFINITY ? power_of_two(14 - static_cast<int>(fminf(fmaxf(floorf(log * log2_e), -100.0f), 100.0f))) : 1.0f; }

// L of each query over exact splits and segments, the same in every thread block: a warp per query. Which lane adds what follows the sequence, not the plan's bounds, so that equal histories
// give equal bits under any plan.
template <int G>
__device__ __forceinline__ void log_sums(const work& x) {
    const int lane = lane_of(static_cast<int>(threadIdx.x));
    const int splits = exact_splits_of(*x.sequence, 0), count = splits + x.sequence->segment_count;
    const partial_sum* sums = x.w.sums + x.place(x.w.exact_splits + x.w.segments) * G;
    for (int g = warp_of(static_cast<int>(threadIdx.x)); g < G; g += warps<G>) {
        float most = -INFINITY, weight = 0.0f;
        if (g < x.step.layer.group) {
            for (int i = lane; i < count; i += 32) {
                const partial_sum& p = sums[(i < splits ? i : x.w.exact_splits + i - splits) * G + g];
                merge(most, weight, p.max, p.weight);
            }
        }
        const float top = warp_max(most);
        weight = warp_sum(top == -INFINITY ? 0.0f : weight * exp_approx(most - top));
        const float l = weight > 0.0f ? top + logf(weight) : -INFINITY;
        if (lane != 0) continue;
        x.of<float>(x.cut.log_sum)[g] = l;
        x.of<float>(x.cut.factor)[g] = fp16_factor(sums[(x.w.exact_splits + x.index) * G + g].max - l);
        if (x.index == 0) x.w.log_sum[x.place(G) + g] = l;
    }
}

// Probabilities of block b to shared memory, as two fp16 each.
template <int G>
__device__ __forceinline__ void put_quads(const work& x, int b, int lane, const quads<G>& p) {
    if (lane % 2 >= head_lanes<G>) return;
#pragma unroll
    for (int i = 0; i < lane_quads<G>; ++i) {
#pragma unroll
        for (int h = 0; h < lane_heads<G>; ++h) {
            const int g = lane_head<G>(lane, i / 2, h);
            const float factor = x.of<float>(x.cut.factor)[g];
            const auto even = split(p[i][h][0] * factor, p[i][h][2] * factor), odd = split(p[i][h][1] * factor, p[i][h][3] * factor);
            uint2* to = x.of<uint2>(x.cut.probability) + probability_at<G>(b, quad_token<G>(lane, i) >= 32, lane / 4, g);
            to[0] = {even.high, odd.high};
            to[4 * G] = {even.low, odd.low};
        }
    }
}

// Block b's probabilities and candidates.
template <int G>
__device__ __forceinline__ void flag_block(const work& x, const lane_queries<G>& queries, int b, int lane, bool zoom) {
    quads<G> p;
    score_block<G>(x, queries, b, lane, p);
#pragma unroll
    for (int i = 0; i < lane_quads<G>; ++i) {
#pragma unroll
        for (int h = 0; h < lane_heads<G>; ++h) {
            const float l = x.of<float>(x.cut.log_sum)[lane_head<G>(lane, i / 2, h)];
            const float shift = l > -INFINITY ? -l * log2_e : -INFINITY;  // nothing seen: probabilities are 0
#pragma unroll
            for (float& y : p[i][h]) y = exp2_approx(fmaf(y, log2_e, shift));
        }
    }
    put_quads<G>(x, b, lane, p);
    if (!zoom) return;
    quad_mass<G> mass = {};
    if (x.step.bounds.largest_of_group) {
        merge_masses<G>(p, largest(), mass);
    } else {
        merge_masses<G>(p, total(), mass);
    }
    put_flags<G>(x, b, lane, mass);
}

template <int G>
__global__ void __launch_bounds__(threads<G>, G == 1 ? 6 : G < 8 ? 8 : G == 8 ? 4 : 2) route(decode_step step, decode_workspace w, shared_cut cut) {
    const auto q = view_of(step, static_cast<int>(blockIdx.z));
    if (q.sequence == nullptr || static_cast<int>(blockIdx.x) >= q.sequence->segment_count) return;
    const auto x = make_work(step, w, cut, q);
    const int tid = static_cast<int>(threadIdx.x), warp = warp_of(tid), lane = lane_of(tid);
    const auto& l = step.layer;
    const bool at_once = cut.values != cut.keys;
    prepare_scores<G>(x);
    stage_planes<G>(x, cut.keys, 0, l.key_planes);
    const int value_planes = step.ahead ? 0 : l.value_planes;
    stage_planes<G>(x, cut.values, l.key_planes, at_once ? value_planes : 0);
    const auto* fields = at<sketch_field>(x.statistics, l.epoch.fields);
    const int count = min(*at<std::int32_t>(x.statistics, l.epoch.field_count), l.value_bits);
    for (int i = tid; i < count; i += threads<G>) x.of<sketch_field>(cut.value_fields)[i] = fields[i];
    for (int i = tid; i < l.value_size; i += threads<G>) x.of<int>(cut.first_field)[i] = -1;
    if (tid < plane_bytes) x.of<unsigned char>(cut.ones)[tid] = 0x11;
    if (tid < 2 * segment_blocks) x.of<unsigned>(cut.flags)[tid] = 0;
    log_sums<G>(x);
    cp_async_wait<1>();
    __syncthreads();
    for (int i = tid; i < count; i += threads<G>) {
        if (!repeats(fields, i)) x.of<int>(cut.first_field)[fields[i].component] = i;
    }
    const bool zoom = step.bounds.cap > 0 && step.bounds.tau < 1.0f;
    const auto queries = queries_of<G>(x, lane);
    for (int b = warp; b < x.part.count; b += warps<G>) flag_block<G>(x, queries, b, lane, zoom);
    __syncthreads();
    if (warp == 0) reserve(x, lane);
    if (!at_once) stage_planes<G>(x, cut.values, l.key_planes, value_planes);
    cp_async_wait<0>();
    __syncthreads();
    for (int b = warp; b < x.part.count; b += warps<G>) list_block<G>(x, b, lane);
    if (step.ahead) return;
    __syncthreads();
    attend_values<G>(x, count);
}

dim3 segment_grid(const decode_step& step, const decode_workspace& w) { return dim3(static_cast<unsigned>(w.segments), static_cast<unsigned>(step.layer.kv_heads), static_cast<unsigned>(step.bounds.rows)); }

}  // namespace

void launch_score_sketch(const decode_step& step, const decode_workspace& w, stream s) {
    const auto cut = cut_shared(step.layer, w, false);
    with_group(step.layer.group, [&](auto g) { launch("score_sketch", s, segment_grid(step, w), dim3(threads<g()>), cut.bytes, &score_sketch<g()>, step, w, cut); });
}

void launch_route(const decode_step& step, const decode_workspace& w, stream s) {
    const auto cut = cut_shared(step.layer, w, true);
    with_group(step.layer.group, [&](auto g) { launch("route", s, segment_grid(step, w), dim3(threads<g()>), cut.bytes, &route<g()>, step, w, cut); });
}

}  // namespace sekv::cuda
