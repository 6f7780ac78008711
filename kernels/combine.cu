// Merges what a query row's thread blocks left: exact rows at token level, sealed tokens in the code space of their epochs, which are multiplied out here, once per epoch.
#include "kernels/decode_parts.cuh"
#include "kernels/warp.cuh"

namespace sekv::cuda {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;

// Partial attentions of Q queries: entry s at sums[s * G + q] and data[(s * G + q) * dv].
struct source {
    const partial_sum* sums;
    const float* data;
    std::int32_t group, dv;
};

// Threads as [slices][dv / width]: a thread takes `width` columns of every slices-th entry.
struct share {
    std::int32_t column, slice, slices;
    [[nodiscard]] __device__ __forceinline__ bool idle() const { return slice >= slices; }
};
__device__ __forceinline__ share share_of(std::int32_t dv, std::int32_t width) {
    const std::int32_t lanes = dv / width, thread = static_cast<std::int32_t>(threadIdx.x);
    return {thread % lanes * width, thread / lanes, threads / lanes};
}

template <int Q>
struct combine_shared {
    shared_array<float, warps * Q> tops;
    shared_array<float, threads * 12 * Q> slices;  ///< sums by thread: four columns of a gather, eight of a product
    shared_array<float, threads * Q> weights;      ///< by slice
    shared_array<float, 256 * Q> codes;            ///< [Q, dv] of one epoch
    shared_array<float, Q> epoch_weight, coded_weight;
};

template <int Q>
struct gathered {
    float4 sums[Q];
    float weight[Q];
};

__device__ __forceinline__ void add_scaled(float4& to, float f, const float4& x) { to.x = fmaf(f, x.x, to.x), to.y = fmaf(f, x.y, to.y), to.z = fmaf(f, x.z, to.z), to.w = fmaf(f, x.w, to.w); }

// Adds this thread's share of entries [first, last), brought to the maximum `top`. Four at a time, so that their loads are under way together; nothing of an empty entry is read.
template <int Q>
__device__ __forceinline__ void gather(const source& from, std::int32_t first, std::int32_t last, std::int32_t queries, const float (&top)[Q], gathered<Q>& to) {
    const share c = share_of(from.dv, 4);
    if (c.idle()) return;
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (q >= queries) break;
        for (std::int32_t s = first + c.slice; s < last; s += 4 * c.slices) {
            float f[4];
            float4 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const std::int32_t at = s + i * c.slices;
                const partial_sum p = at < last ? from.sums[static_cast<std::int64_t>(at) * from.group + q] : partial_sum{0, 0};
                f[i] = p.weight > 0 ? exp_approx(p.max - top[q]) : 0;
                to.weight[q] += f[i] * p.weight;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[i] = f[i] > 0 ? *reinterpret_cast<const float4*>(from.data + (static_cast<std::int64_t>(s + i * c.slices) * from.group + q) * from.dv + c.column) : float4{0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 4; ++i) add_scaled(to.sums[q], f[i], x[i]);
        }
    }
}

// Each query's largest maximum, by all threads.
template <int Q>
__device__ __forceinline__ void find_tops(const source* sources, const std::int32_t* counts, std::int32_t queries, combine_shared<Q>& s, float (&top)[Q]) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        top[q] = -INFINITY;
        if (q < queries) {
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                for (std::int32_t i = thread; i < counts[k]; i += threads) {
                    const partial_sum p = sources[k].sums[static_cast<std::int64_t>(i) * sources[k].group + q];
                    if (p.weight > 0) top[q] = fmaxf(top[q], p.max);
                }
            }
        }
        top[q] = warp_max(top[q]);
        if (lane_of(thread) == 0) s.tops[warp_of(thread) * Q + q] = top[q];
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        for (int k = 0; k < warps; ++k) top[q] = fmaxf(top[q], s.tops[k * Q + q]);
    }
}

// The first index from `first` on whose entry isn't of `epoch`. An epoch is a position range and both lists ascend, so that its entries lie together. By whole warps.
template <class T>
__device__ __forceinline__ std::int32_t epoch_end(const T* list, std::int32_t first, std::int32_t count, std::int32_t epoch) {
    for (const auto lane = static_cast<std::int32_t>(threadIdx.x & 31U);; first += 32) {
        const bool other = first + lane >= count || list[first + lane].epoch != epoch;
        const unsigned mask = __ballot_sync(whole_warp, other ? 1 : 0);
        if (mask != 0) return first + __ffs(static_cast<int>(mask)) - 1;
    }
}

// out[q] += codes[q] U + weight[q] mean: this thread's eight columns over its slice of the components.
template <int Q>
__device__ __forceinline__ void multiply_out(const layer_layout& l, const std::byte* statistics, combine_shared<Q>& s, float (&out)[Q][8]) {
    const share c = share_of(l.value_size, 8);
    if (c.idle()) return;
    const auto* basis = reinterpret_cast<const __half*>(statistics + l.epoch.value_basis);
#pragma unroll 4
    for (std::int32_t j = c.slice; j < l.value_size; j += c.slices) {
        float u[8];
        load8(basis + j * l.value_size + c.column, u);
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            const float code = s.codes[q * l.value_size + j];
#pragma unroll
            for (int i = 0; i < 8; ++i) out[q][i] = fmaf(code, u[i], out[q][i]);
        }
    }
    if (c.slice > 0) return;
    float mean[8];
    load8(reinterpret_cast<const float*>(statistics + l.epoch.value_mean) + c.column, mean);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[q][i] = fmaf(s.epoch_weight[q], mean[i], out[q][i]);
    }
}

template <int Q>
__device__ __forceinline__ void clear(gathered<Q>& x) {
#pragma unroll
    for (int q = 0; q < Q; ++q) x.sums[q] = float4{0, 0, 0, 0}, x.weight[q] = 0;
}

// This thread's four columns of a gather to slices[at + slice][Q][dv], and its weights.
template <int Q>
__device__ __forceinline__ void store_gathered(const gathered<Q>& x, std::int32_t dv, std::int32_t at, combine_shared<Q>& s) {
    const share c = share_of(dv, 4);
    if (c.idle()) return;
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        *reinterpret_cast<float4*>(&s.slices[((at + c.slice) * Q + q) * dv + c.column]) = x.sums[q];
        if (c.column == 0) s.weights[c.slice * Q + q] = x.weight[q];
    }
}

// Element i of [Q, dv], summed over slices [0, count) in order.
template <int Q>
__device__ __forceinline__ float sum_slices(const combine_shared<Q>& s, std::int32_t i, std::int32_t count, std::int32_t dv) {
    float x = 0;
    for (std::int32_t k = 0; k < count; ++k) x += s.slices[k * Q * dv + i];
    return x;
}

template <int Q>
__global__ void __launch_bounds__(threads, 2) combine(const decode_step step, const decode_workspace w) {
    const auto head = static_cast<std::int32_t>(blockIdx.y), row = static_cast<std::int32_t>(blockIdx.z), first = static_cast<std::int32_t>(blockIdx.x) * Q;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const layer_layout& l = step.layer;
    const std::int32_t dv = l.value_size, G = w.group, queries = l.group - first < Q ? l.group - first : Q;
    const std::int64_t part = part_of(l, row, head);
    float* out = step.out.data + row * step.out.token_stride + (head * l.group + first) * step.out.head_stride;
    float* lse = step.lse == nullptr ? nullptr : step.lse + static_cast<std::int64_t>(row) * l.kv_heads * l.group + head * l.group + first;
    const sequence_view* sequence = view_of(step, row).sequence;
    if (sequence == nullptr) {
        for (std::int32_t i = thread; i < queries * dv; i += threads) out[i / dv * step.out.head_stride + i % dv] = 0;
        if (lse != nullptr && thread < queries) lse[thread] = -INFINITY;
        return;
    }
    auto& s = dynamic_shared<combine_shared<Q>>();
    const partial_sum* sums = w.sums + part * (w.exact_splits + w.segments) * G + first;
    const source sources[3] = {{sums, w.exact_out + (part * w.exact_splits * G + first) * dv, G, dv},
                               {w.rest + part * w.segments * G + first, w.rest_codes + (part * w.segments * G + first) * dv, G, dv},
                               {w.refined + part * w.runs * G + first, w.refined_codes + (part * w.runs * G + first) * dv, G, dv}};
    const std::int32_t counts[3] = {exact_splits_of(*sequence, l.window > 0 ? 1 : 0), w.segments > 0 ? sequence->segment_count : 0, w.runs > 0 ? w.run_count[part] : 0};
    const bool token_level = l.exact_line_bytes > 0;  // R3 lines are
    float top[Q];
    find_tops<Q>(sources, counts, queries, s, top);

    float products[Q][8] = {};
    float coded_weight = 0;  // of query `thread`
    const refine_run* runs = w.refine_runs + part * w.runs;
    const std::int32_t slices = share_of(dv, 4).slices;
    for (std::int32_t segment = 0, run = 0; segment < counts[1];) {
        const std::int32_t epoch = sequence->segments[segment].epoch;
        const std::int32_t segment_end = epoch_end(sequence->segments, segment, counts[1], epoch);
        const std::int32_t run_end = token_level ? run : epoch_end(runs, run, counts[2], epoch);
        gathered<Q> codes;
        clear(codes);
        gather<Q>(sources[1], segment, segment_end, queries, top, codes);
        gather<Q>(sources[2], run, run_end, queries, top, codes);
        store_gathered<Q>(codes, dv, 0, s);
        __syncthreads();
        for (std::int32_t i = thread; i < Q * dv; i += threads) s.codes[i] = sum_slices<Q>(s, i, slices, dv);
        if (thread < Q) {
            float weight = 0;
            for (std::int32_t k = 0; k < slices; ++k) weight += s.weights[k * Q + thread];
            s.epoch_weight[thread] = weight;
            coded_weight += weight;
        }
        __syncthreads();
        multiply_out<Q>(l, head_part(sequence->epochs[epoch].statistics, l.epoch_buffer, head), s, products);
        segment = segment_end, run = run_end;
    }

    gathered<Q> rows;
    clear(rows);
    gather<Q>(sources[0], 0, counts[0], queries, top, rows);
    if (token_level) gather<Q>(sources[2], 0, counts[2], queries, top, rows);
    store_gathered<Q>(rows, dv, 0, s);
    const share c = share_of(dv, 8);
    if (counts[1] > 0 && !c.idle()) {
#pragma unroll
        for (int q = 0; q < Q; ++q) {
#pragma unroll
            for (int i = 0; i < 8; i += 4)
                *reinterpret_cast<float4*>(&s.slices[((slices + c.slice) * Q + q) * dv + c.column + i]) = float4{products[q][i], products[q][i + 1], products[q][i + 2], products[q][i + 3]};
        }
    }
    if (thread < Q) s.coded_weight[thread] = coded_weight;
    __syncthreads();
    const std::int32_t all = slices + (counts[1] > 0 ? c.slices : 0);
    for (std::int32_t i = thread; i < queries * dv; i += threads) {
        const std::int32_t q = i / dv;
        float weight = s.coded_weight[q];
        for (std::int32_t k = 0; k < slices; ++k) weight += s.weights[k * Q + q];
        out[q * step.out.head_stride + i % dv] = weight > 0 ? sum_slices<Q>(s, i, all, dv) / weight : 0;
        if (lse == nullptr || i % dv != 0) continue;
        float most = top[0];
#pragma unroll
        for (int k = 1; k < Q; ++k) most = q == k ? top[k] : most;
        lse[q] = weight > 0 ? most + logf(weight) : -INFINITY;
    }
}

}  // namespace

// Few query rows: a thread block per query, for parallelism. Many: one per four, which share the reading of the basis.
void launch_combine(const decode_step& step, const decode_workspace& w, stream s) {
    const auto& l = step.layer;
    const auto heads = static_cast<unsigned>(l.kv_heads), rows = static_cast<unsigned>(step.bounds.rows), group = static_cast<unsigned>(l.group);
    if (heads * rows * group <= 512 || group == 1) {
        launch("combine", s, dim3(group, heads, rows), dim3(threads), sizeof(combine_shared<1>), &combine<1>, step, w);
    } else {
        launch("combine", s, dim3((group + 3) / 4, heads, rows), dim3(threads), sizeof(combine_shared<4>), &combine<4>, step, w);
    }
}

}  // namespace sekv::cuda
