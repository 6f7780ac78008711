// Routing over R1. score_sketch: each segment's softmax sums. route: probabilities against the log-sum-exp of everything; tokens above tau become candidates, the others are attended
// here through the value sketch. Both stage a segment's planes once; a warp scores a block, each lane the two tokens whose nibbles share a byte.
#include "kernels/device.cuh"
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

// The warps' sums, merged in order, become the segment's.
template <int G>
__device__ __forceinline__ void write_sums(const work& x, float (&most)[G], float (&weight)[G]) {
    const int tid = static_cast<int>(threadIdx.x);
    auto* partial = x.of<partial_sum>(x.cut.partial);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const float top = warp_max(most[g]);
        const float sum = warp_sum(top == -INFINITY ? 0.0f : weight[g] * exp_approx(most[g] - top));
        if (lane_of(tid) == 0) partial[warp_of(tid) * G + g] = {top, sum};
    }
    __syncthreads();
    if (tid >= G) return;
    partial_sum total = {-INFINITY, 0.0f};
    for (int k = 0; k < warps && tid < x.step.layer.group; ++k) merge(total.max, total.weight, partial[k * G + tid].max, partial[k * G + tid].weight);
    x.w.sums[(x.place(x.w.exact_splits + x.w.segments) + x.w.exact_splits + x.index) * G + tid] = total;
}

template <int G>
__global__ void __launch_bounds__(threads) score_sketch(decode_step step, decode_workspace w, shared_cut cut) {
    const auto q = view_of(step, static_cast<int>(blockIdx.z));
    if (q.sequence == nullptr || static_cast<int>(blockIdx.x) >= q.sequence->segment_count) return;
    const auto x = make_work(step, w, cut, q);
    stage_planes(x, cut.keys, 0, step.layer.key_planes);
    load_weights<G>(x);
    cp_async_wait<0>();
    __syncthreads();
    float most[G], weight[G];
#pragma unroll
    for (int g = 0; g < G; ++g) most[g] = -INFINITY, weight[g] = 0.0f;
    for (int b = warp_of(static_cast<int>(threadIdx.x)); b < x.part.count; b += warps) {
        float low[G], high[G];
        score_block<G>(x, b, lane_of(static_cast<int>(threadIdx.x)), low, high);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            const float top = fmaxf(most[g], fmaxf(low[g], high[g]));
            if (top == -INFINITY) continue;
            weight[g] = weight[g] * exp_approx(most[g] - top) + exp_approx(low[g] - top) + exp_approx(high[g] - top);
            most[g] = top;
        }
    }
    write_sums<G>(x, most, weight);
}

// L of each query over exact splits and segments, the same in every thread block: a warp per query. Which lane adds what follows the sequence, not the plan's bounds, so that equal histories
// give equal bits under any plan.
template <int G>
__device__ __forceinline__ void log_sums(const work& x) {
    const int lane = lane_of(static_cast<int>(threadIdx.x));
    const int splits = exact_splits_of(*x.sequence, 0), count = splits + x.sequence->segment_count;
    const partial_sum* sums = x.w.sums + x.place(x.w.exact_splits + x.w.segments) * G;
    for (int g = warp_of(static_cast<int>(threadIdx.x)); g < G; g += warps) {
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
        if (x.index == 0) x.w.log_sum[x.place(G) + g] = l;
    }
}

// The statistic of a group's probabilities that decides on a zoom, and by which candidates are ranked.
template <int G>
__device__ __forceinline__ float mass_of(const decode_step& step, const float (&p)[G]) {
    float mass = 0.0f;
#pragma unroll
    for (int g = 0; g < G; ++g) mass = step.bounds.largest_of_group ? fmaxf(mass, p[g]) : mass + p[g];  // entries past the group are 0
    return step.bounds.largest_of_group ? mass : mass / static_cast<float>(step.layer.group);
}

// Probabilities of block b's tokens to shared memory, and whose mass exceeds tau as a bit each.
template <int G>
__device__ __forceinline__ void flag_block(const work& x, int b, int lane, bool zoom) {
    float* p = x.of<float>(x.cut.probability) + b * block_tokens + lane;
    float low[G], high[G];
#pragma unroll
    for (int g = 0; g < G; ++g) low[g] = high[g] = -INFINITY;
    if (b < x.part.count) score_block<G>(x, b, lane, low, high);
    const float* l = x.of<float>(x.cut.log_sum);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const bool any = l[g] > -INFINITY;
        p[g * segment_tokens] = low[g] = any ? exp_approx(low[g] - l[g]) : 0.0f;
        p[g * segment_tokens + 32] = high[g] = any ? exp_approx(high[g] - l[g]) : 0.0f;
    }
    const unsigned first = __ballot_sync(whole_warp, zoom && mass_of<G>(x.step, low) > x.step.bounds.tau);
    const unsigned second = __ballot_sync(whole_warp, zoom && mass_of<G>(x.step, high) > x.step.bounds.tau);
    if (lane != 0) return;
    x.of<unsigned>(x.cut.flags)[2 * b] = first;
    x.of<unsigned>(x.cut.flags)[2 * b + 1] = second;
}

// What the reservation leaves: offsets[0, 32) of each word of flags, then where the segment's part of the list begins and how many of its candidates fit.
constexpr int list_first = 32, list_kept = 33;

// One warp: reserves room in the list. Probabilities sum up to 1, so that the list can't overflow but for faulty rounding; whoever comes last then stays at R1.
__device__ __forceinline__ void reserve(const work& x, int lane) {
    const int own = __popc(x.of<unsigned>(x.cut.flags)[lane]);
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(whole_warp, sum, static_cast<unsigned>(step));
        if (lane >= step) sum += below;
    }
    int* offsets = x.of<int>(x.cut.offsets);
    offsets[lane] = sum - own;
    if (lane != 31) return;
    const int first = sum > 0 ? atomicAdd(x.w.cursor + x.place(1), sum) : 0;
    const int kept = max(0, min(sum, x.w.candidates - first));
    offsets[list_first] = first;
    offsets[list_kept] = kept;
    x.w.candidate_runs[x.place(x.w.segments) + x.index] = {first, kept};
}

// Writes block b's candidates in order, and takes them out of the tokens that are attended here.
template <int G>
__device__ __forceinline__ void list_block(const work& x, int b, int lane) {
    const int* offsets = x.of<int>(x.cut.offsets);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned flags = x.of<unsigned>(x.cut.flags)[2 * b + half];
        if ((flags >> lane & 1u) == 0) continue;
        const int rank = offsets[2 * b + half] + __popc(flags & ((1u << lane) - 1u));
        if (rank >= offsets[list_kept]) continue;
        float* p = x.of<float>(x.cut.probability) + b * block_tokens + half * 32 + lane;
        float own[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
            own[g] = p[g * segment_tokens];
            p[g * segment_tokens] = 0.0f;
        }
        x.w.list[x.place(x.w.candidates) + offsets[list_first] + rank] = {(x.part.first + b) * block_tokens + half * 32 + lane, mass_of<G>(x.step, own)};
    }
}

// Sums of probability x code over one part of the blocks for a few value fields from `first` on: lanes hold tokens, then add up.
template <int G>
__device__ __forceinline__ void sum_fields(const work& x, int first, int count, int begin, int end, float* sums) {
    constexpr int chunk = field_chunk<G>;
    const int lane = lane_of(static_cast<int>(threadIdx.x));
    const auto* fields = x.of<sketch_field>(x.cut.value_fields);
    float sum[chunk][G] = {};
    for (int b = begin; b < end; ++b) {
        const float* p = x.of<float>(x.cut.probability) + b * block_tokens + lane;
        float low[G], high[G];
#pragma unroll
        for (int g = 0; g < G; ++g) low[g] = p[g * segment_tokens], high[g] = p[g * segment_tokens + 32];
#pragma unroll
        for (int c = 0; c < chunk; ++c) {
            const sketch_field f = fields[min(first + c, count - 1)];
            const unsigned code = static_cast<unsigned>(x.shared[x.cut.values + (b * x.step.layer.value_planes + f.plane) * plane_bytes + lane]) >> f.shift;
            const float u = small_float(code & f.mask), v = small_float((code >> 4) & f.mask);
#pragma unroll
            for (int g = 0; g < G; ++g) sum[c][g] = fmaf(low[g], u, fmaf(high[g], v, sum[c][g]));
        }
    }
#pragma unroll
    for (int c = 0; c < chunk; ++c) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            const float total = warp_sum(sum[c][g]);
            if (lane == 0 && first + c < count) sums[(first + c) * G + g] = total;
        }
    }
}

// The segment's tokens that are no candidates, in the epoch's code space.
template <int G>
__device__ __forceinline__ void attend_values(const work& x, int fields) {
    constexpr int chunk = field_chunk<G>;
    const int tid = static_cast<int>(threadIdx.x), warp = warp_of(tid), lane = lane_of(tid);
    const int chunks = (fields + chunk - 1) / chunk, parts = value_parts(fields, chunk);
    float* sums = x.of<float>(x.cut.weights);  // [parts, fields, G]
    for (int i = warp; i < chunks * parts; i += warps) {
        const int k = i / chunks;
        sum_fields<G>(x, i % chunks * chunk, fields, x.part.count * k / parts, x.part.count * (k + 1) / parts, sums + k * fields * G);
    }
    for (int g = warp; g < G; g += warps) {
        const float* p = x.of<float>(x.cut.probability) + g * segment_tokens;
        float sum = 0.0f;
        for (int i = lane; i < segment_tokens; i += 32) sum += p[i];
        sum = warp_sum(sum);
        if (lane != 0) continue;
        x.of<float>(x.cut.totals)[g] = sum;
        x.w.rest[(x.place(x.w.segments) + x.index) * G + g] = {sum > 0.0f ? x.of<float>(x.cut.log_sum)[g] : -INFINITY, sum};
    }
    __syncthreads();
    const auto& l = x.step.layer;
    const auto* bits = at<std::uint8_t>(x.statistics, l.epoch.bits);
    const auto* steps = at<float>(x.statistics, l.epoch.step);
    const float scale = *at<float>(x.statistics, l.epoch.typical_scale);
    float* out = x.w.rest_codes + (x.place(x.w.segments) + x.index) * G * l.value_size;
    for (int i = tid; i < G * l.value_size; i += threads) {
        const int g = i / l.value_size, j = i % l.value_size;
        float value = 0.0f;
        for (int f = x.of<int>(x.cut.first_field)[j]; f >= 0 && f < fields && x.of<sketch_field>(x.cut.value_fields)[f].component == j; ++f) {
            float sum = sums[f * G + g];
            if (parts > 1) sum += sums[(fields + f) * G + g];
            const auto u = level_of(x.of<sketch_field>(x.cut.value_fields), f, bits, steps);
            value += u.factor * sum + u.offset * x.of<float>(x.cut.totals)[g];
        }
        out[i] = scale * value;
    }
}

template <int G>
__global__ void __launch_bounds__(threads) route(decode_step step, decode_workspace w, shared_cut cut) {
    const auto q = view_of(step, static_cast<int>(blockIdx.z));
    if (q.sequence == nullptr || static_cast<int>(blockIdx.x) >= q.sequence->segment_count) return;
    const auto x = make_work(step, w, cut, q);
    const int tid = static_cast<int>(threadIdx.x), warp = warp_of(tid), lane = lane_of(tid);
    const auto& l = step.layer;
    const bool at_once = cut.values != cut.keys;
    stage_planes(x, cut.keys, 0, l.key_planes);
    stage_planes(x, cut.values, l.key_planes, at_once ? l.value_planes : 0);
    load_weights<G>(x);
    const auto* fields = at<sketch_field>(x.statistics, l.epoch.fields);
    const int count = min(*at<std::int32_t>(x.statistics, l.epoch.field_count), l.value_bits);
    for (int i = tid; i < count; i += threads) x.of<sketch_field>(cut.value_fields)[i] = fields[i];
    for (int i = tid; i < l.value_size; i += threads) x.of<int>(cut.first_field)[i] = -1;
    log_sums<G>(x);
    cp_async_wait<1>();
    __syncthreads();
    for (int i = tid; i < count; i += threads) {
        if (!repeats(fields, i)) x.of<int>(cut.first_field)[fields[i].component] = i;
    }
    const bool zoom = step.bounds.cap > 0 && step.bounds.tau < 1.0f;
    for (int b = warp; b < segment_blocks; b += warps) flag_block<G>(x, b, lane, zoom);
    __syncthreads();
    if (warp == 0) reserve(x, lane);
    if (!at_once) stage_planes(x, cut.values, l.key_planes, l.value_planes);
    cp_async_wait<0>();
    __syncthreads();
    for (int b = warp; b < x.part.count; b += warps) list_block<G>(x, b, lane);
    __syncthreads();
    attend_values<G>(x, count);
}

dim3 segment_grid(const decode_step& step, const decode_workspace& w) { return dim3(static_cast<unsigned>(w.segments), static_cast<unsigned>(step.layer.kv_heads), static_cast<unsigned>(step.bounds.rows)); }

}  // namespace

void launch_score_sketch(const decode_step& step, const decode_workspace& w, stream s) {
    const auto cut = cut_shared(step.layer, w, false);
    with_group(step.layer.group, [&](auto g) { launch("score_sketch", s, segment_grid(step, w), dim3(threads), cut.bytes, &score_sketch<g()>, step, w, cut); });
}

void launch_route(const decode_step& step, const decode_workspace& w, stream s) {
    const auto cut = cut_shared(step.layer, w, true);
    with_group(step.layer.group, [&](auto g) { launch("route", s, segment_grid(step, w), dim3(threads), cut.bytes, &route<g()>, step, w, cut); });
}

}  // namespace sekv::cuda
