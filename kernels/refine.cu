// Attends a run of zoomed tokens of one KV head for one query row: R2 lines in code space, or R3 lines at token level. Tokens that the cap turned away stand in the same list and are attended at R1.
#include "kernels/decode_parts.cuh"
#include "kernels/line_decode.cuh"
#include "kernels/warp.cuh"
#include "sekv/exec/sketch_ops.hpp"

namespace sekv::cuda {
namespace {

constexpr int threads = 128;
constexpr int warps = threads / 32;
static_assert(refine_tokens == 32, "a lane per token");

// Shared memory.
template <int G>
struct refine_shared {
    unsigned char* lines;    // [32] at line_pitch
    zoomed_token* tokens;    // [32]
    code_group *key_groups, *value_groups;  // [32] each
    float* queries;          // [dk, G]: t_j * step_j of R2; R3: the queries themselves
    float* partial;          // [warps, G, 32] logits of each warp's share of the components
    float* weights;          // [32, G] exp(logit - max) * scale
    float* field_sums;       // [value_bits, G] of R1's values
    float* rough;            // [G, dv] R1's components, where they are multiplied out here
};

// Bytes of a staged line, and their distance: 16 more than the line's, so that lanes that read the same part of their lines spread over the banks.
__host__ __device__ constexpr std::int32_t staged_bytes(const layer_layout& l) { return l.exact_line_bytes > 0 ? l.exact_line_bytes : l.line_stride; }
__host__ __device__ constexpr std::int32_t line_pitch(const layer_layout& l) { return staged_bytes(l) + 16; }

template <int G>
__host__ __device__ constexpr std::size_t shared_bytes(const layer_layout& l) {
    const std::int32_t floats = G * (l.key_size + (warps + 1) * refine_tokens + l.value_bits + (l.exact_line_bytes > 0 ? l.value_size : 0));
    return static_cast<std::size_t>(line_pitch(l) * refine_tokens) + refine_tokens * sizeof(zoomed_token) + 64 * sizeof(code_group) + static_cast<std::size_t>(floats) * sizeof(float);
}

template <int G>
__device__ __forceinline__ refine_shared<G> cut_shared(const layer_layout& l) {
    refine_shared<G> s;
    s.lines = dynamic_bytes(shared_bytes<G>(l));
    s.tokens = reinterpret_cast<zoomed_token*>(s.lines + line_pitch(l) * refine_tokens);
    s.key_groups = reinterpret_cast<code_group*>(s.tokens + refine_tokens);
    s.value_groups = s.key_groups + 32;
    s.queries = reinterpret_cast<float*>(s.value_groups + 32);
    s.partial = s.queries + l.key_size * G;
    s.weights = s.partial + warps * G * refine_tokens;
    s.field_sums = s.weights + refine_tokens * G;
    s.rough = s.field_sums + l.value_bits * G;
    return s;
}

// What one thread block works on.
struct work {
    const layer_layout& layer;
    const sequence_view& sequence;
    refine_run run;
    std::int64_t part;
    std::int32_t head;
    const std::byte* statistics;  ///< this head's, of the run's epoch
};

// Nibble of a token in its block's planes, from plane `plane` on.
__device__ __forceinline__ std::uint32_t field_code(const work& k, const zoomed_token& t, std::int32_t first_plane, const host::sketch_field& f) {
    const auto* planes = reinterpret_cast<const std::uint8_t*>(head_part(reinterpret_cast<const std::byte*>(k.sequence.sealed[t.block / block_tokens].sketch), k.layer.sketch_page, k.head));
    const std::int32_t at = t.block % block_tokens;
    const std::uint32_t byte = planes[(first_plane + f.plane) * plane_bytes + at % 32];
    return (byte >> (at / 32 * 4 + f.shift)) & f.mask;
}

// All lines of the run are asked for at once: from the device cache or, over PCIe, from pinned memory.
template <int G>
__device__ __forceinline__ void load_lines(const layer_layout& l, std::int32_t count, const refine_shared<G>& s) {
    const std::int32_t chunks = staged_bytes(l) / 16;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < count * chunks; i += threads) {
        const std::int32_t t = i / chunks, at = i % chunks * 16;
        if (s.tokens[t].line != nullptr) cp_async16(s.lines + t * line_pitch(l) + at, s.tokens[t].line + at);
    }
    cp_async_commit();
}

// Adds the token's components that fall to this warp: every fourth group of R2, chunk of R3, field of R1.
template <int G, bool exact>
__device__ __forceinline__ void add_components(const work& k, const decode_workspace& w, const zoomed_token& t, const std::uint8_t* line, const refine_shared<G>& s, float (&sums)[G]) {
    const layer_layout& l = k.layer;
    const int warp = warp_of(static_cast<int>(threadIdx.x));
    float factor[G];
    if (t.line == nullptr) {
        const std::byte* keys = head_part(k.sequence.key_bases[k.run.keys], l.key_buffer, k.head);
        const auto* fields = reinterpret_cast<const host::sketch_field*>(keys + l.key.fields);
        const std::int32_t count = *reinterpret_cast<const std::int32_t*>(keys + l.key.field_count);
        const float* weights = w.field_weight + (k.part * w.key_bases + k.run.keys) * w.fields * G;
        for (std::int32_t f = warp; f < count; f += warps) {
            const auto code = static_cast<float>(field_code(k, t, 0, fields[f]));
            load_group<G>(weights + f * G, factor);
#pragma unroll
            for (int g = 0; g < G; ++g) sums[g] = fmaf(factor[g], code, sums[g]);
        }
        return;
    }
    for (std::int32_t c = warp; c < l.key_size / 8; c += warps) {
        float x[8];
        if constexpr (exact) {
            load8_any(line, l.stored, c * 8, x);
        } else {
            group_levels(line, s.key_groups[c], x);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            load_group<G>(s.queries + (c * 8 + j) * G, factor);
#pragma unroll
            for (int g = 0; g < G; ++g) sums[g] = fmaf(factor[g], x[j], sums[g]);
        }
    }
}

// Logits to weights, a lane per token, and the run's maximum and weight. A token's scale goes into its weight: R2's own, R1's typical one, none at R3.
template <int G, bool exact>
__device__ __forceinline__ void softmax(const work& k, const decode_workspace& w, const refine_shared<G>& s, partial_sum* out) {
    const layer_layout& l = k.layer;
    const int lane = lane_of(static_cast<int>(threadIdx.x)), warp = warp_of(static_cast<int>(threadIdx.x));
    const bool within = lane < k.run.count, rough = within && s.tokens[lane].line == nullptr;
    float scale = 1;
    if (rough) scale = *reinterpret_cast<const float*>(k.statistics + l.epoch.typical_scale);
    if (within && !rough && !exact) scale = line_scale(s.lines[lane * line_pitch(l) + l.key_line_bytes]);
    for (std::int32_t g = warp; g < G; g += warps) {
        float x = 0;
#pragma unroll
        for (int i = 0; i < warps; ++i) x += s.partial[(i * G + g) * refine_tokens + lane];
        if (rough || !exact) x += w.epoch_base[(k.part * w.epochs + k.run.epoch) * G + g];
        if (rough) x += w.field_base[(k.part * w.key_bases + k.run.keys) * G + g];
        x = within ? soft_capped(x, l.soft_cap) : -INFINITY;
        const float top = warp_max(x), e = exp_approx(x - top), weight = warp_sum(e);
        s.weights[lane * G + g] = e * scale;
        if (lane == 0) out[g] = {top, weight};
    }
}

// Column j of the lines' values, weighted.
template <int G, bool exact>
__device__ __forceinline__ void add_lines(const work& k, std::int32_t j, const refine_shared<G>& s, float (&sums)[G]) {
    const layer_layout& l = k.layer;
#pragma unroll 4
    for (std::int32_t t = 0; t < k.run.count; ++t) {
        if (s.tokens[t].line == nullptr) continue;
        const std::uint8_t* line = s.lines + t * line_pitch(l);
        const float x = exact ? load_element(line, l.stored, l.key_size + j) : component_level(line, s.value_groups[j / 8], j % 8);
        float weight[G];
        load_group<G>(s.weights + t * G, weight);
#pragma unroll
        for (int g = 0; g < G; ++g) sums[g] = fmaf(weight[g], x, sums[g]);
    }
    if constexpr (exact) return;
    const float step = reinterpret_cast<const float*>(k.statistics + l.epoch.value_step)[j];
#pragma unroll
    for (int g = 0; g < G; ++g) sums[g] *= step;
}

// field_sums[f][g] = sum of weight * code over the run's R1 tokens, a thread per field.
template <int G>
__device__ __forceinline__ void sum_fields(const work& k, const refine_shared<G>& s) {
    const auto* fields = reinterpret_cast<const host::sketch_field*>(k.statistics + k.layer.epoch.fields);
    const std::int32_t count = *reinterpret_cast<const std::int32_t*>(k.statistics + k.layer.epoch.field_count);
    for (std::int32_t f = static_cast<std::int32_t>(threadIdx.x); f < count; f += threads) {
        float sums[G] = {};
        for (std::int32_t t = 0; t < k.run.count; ++t) {
            if (s.tokens[t].line != nullptr) continue;
            const auto code = static_cast<float>(field_code(k, s.tokens[t], k.layer.key_planes, fields[f]));
            float weight[G];
            load_group<G>(s.weights + t * G, weight);
#pragma unroll
            for (int g = 0; g < G; ++g) sums[g] = fmaf(weight[g], code, sums[g]);
        }
#pragma unroll
        for (int g = 0; g < G; ++g) s.field_sums[f * G + g] = sums[g];
    }
}

// The R1 tokens' weights, their scale in them.
template <int G>
__device__ __forceinline__ void sum_rough_weights(const work& k, const refine_shared<G>& s, float (&totals)[G]) {
#pragma unroll
    for (int g = 0; g < G; ++g) totals[g] = 0;
    for (std::int32_t t = 0; t < k.run.count; ++t) {
        if (s.tokens[t].line != nullptr) continue;
#pragma unroll
        for (int g = 0; g < G; ++g) totals[g] += s.weights[t * G + g];
    }
}

// Component j of the R1 tokens' values: its fields' sums as codec/sketch.hpp's level_of decodes them.
template <int G>
__device__ __forceinline__ void add_fields(const work& k, std::int32_t j, const float (&totals)[G], const refine_shared<G>& s, float (&sums)[G]) {
    const epoch_place& at = k.layer.epoch;
    const auto* fields = reinterpret_cast<const host::sketch_field*>(k.statistics + at.fields);
    const std::int32_t count = *reinterpret_cast<const std::int32_t*>(k.statistics + at.field_count), bits = reinterpret_cast<const std::uint8_t*>(k.statistics + at.bits)[j];
    const float step = reinterpret_cast<const float*>(k.statistics + at.step)[j], lowest = 0.5F - static_cast<float>(bits > 0 ? 1 << (bits - 1) : 0);
    bool low = false;  // the second nibble of an 8-bit component
    for (std::int32_t f = 0; f < count; ++f) {
        if (fields[f].component != j) continue;
        const float factor = bits == 8 && !low ? 16 * step : step, offset = low ? 0 : lowest * step;
#pragma unroll
        for (int g = 0; g < G; ++g) sums[g] += factor * s.field_sums[f * G + g] + offset * totals[g];
        low = true;
    }
}

// Column j of what the R1 components in `rough` stand for: U and the mean.
template <int G>
__device__ __forceinline__ void multiply_out(const work& k, std::int32_t j, const float (&totals)[G], const refine_shared<G>& s, float (&sums)[G]) {
    const layer_layout& l = k.layer;
    const auto* basis = reinterpret_cast<const __half*>(k.statistics + l.epoch.value_basis);
    for (std::int32_t c = 0; c < l.value_size; ++c) {
        const float u = to_float(basis[c * l.value_size + j]);
#pragma unroll
        for (int g = 0; g < G; ++g) sums[g] = fmaf(s.rough[g * l.value_size + c], u, sums[g]);
    }
    const float mean = reinterpret_cast<const float*>(k.statistics + l.epoch.value_mean)[j] / *reinterpret_cast<const float*>(k.statistics + l.epoch.typical_scale);
#pragma unroll
    for (int g = 0; g < G; ++g) sums[g] = fmaf(totals[g], mean, sums[g]);
}

template <int G>
__device__ __forceinline__ void store_column(const layer_layout& l, std::int32_t j, const float (&sums)[G], float* out) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
        if (g < l.group) out[g * l.value_size + j] = sums[g];
    }
}

// Values of the run: columns of the lines, and, where the cap has turned tokens away, R1's beside them.
template <int G, bool exact>
__device__ __forceinline__ void sum_values(const work& k, bool any_rough, const refine_shared<G>& s, float* out) {
    const layer_layout& l = k.layer;
    float totals[G];
    if (any_rough) {
        sum_fields<G>(k, s);
        sum_rough_weights<G>(k, s, totals);
        __syncthreads();
    }
    if (any_rough && exact) {
        for (std::int32_t j = static_cast<std::int32_t>(threadIdx.x); j < l.value_size; j += threads) {
            float sums[G] = {};
            add_fields<G>(k, j, totals, s, sums);
#pragma unroll
            for (int g = 0; g < G; ++g) s.rough[g * l.value_size + j] = sums[g];
        }
        __syncthreads();
    }
    for (std::int32_t j = static_cast<std::int32_t>(threadIdx.x); j < l.value_size; j += threads) {
        float sums[G] = {};
        add_lines<G, exact>(k, j, s, sums);
        if (any_rough && exact) {
            multiply_out<G>(k, j, totals, s, sums);
        } else if (any_rough) {
            add_fields<G>(k, j, totals, s, sums);
        }
        store_column<G>(l, j, sums, out);
    }
}

template <int G, bool exact>
__global__ void __launch_bounds__(threads, 4) refine(const decode_step step, const decode_workspace w) {
    const auto index = static_cast<std::int32_t>(blockIdx.x), head = static_cast<std::int32_t>(blockIdx.y), row = static_cast<std::int32_t>(blockIdx.z);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const int lane = lane_of(thread), warp = warp_of(thread);
    const layer_layout& l = step.layer;
    const std::int64_t part = part_of(l, row, head);
    const row_view view = view_of(step, row);
    if (view.sequence == nullptr || index >= w.run_count[part]) return;
    const refine_run run = w.refine_runs[part * w.runs + index];
    const work k{l, *view.sequence, run, part, head, head_part(view.sequence->epochs[run.epoch].statistics, l.epoch_buffer, head)};
    const refine_shared<G> s = cut_shared<G>(l);
    if (thread < run.count) s.tokens[thread] = w.zoomed[part * w.candidates + run.first + thread];
    const bool any_rough = __syncthreads_or(thread < run.count && s.tokens[thread].line == nullptr) != 0;
    load_lines<G>(l, run.count, s);
    if constexpr (exact) {
        stage_queries<G>(step, row, head, s.queries);
    } else {
        const float* weights = w.line_weight + (part * w.epochs + run.epoch) * l.key_size * G;
        for (std::int32_t i = thread; i < l.key_size * G; i += threads) s.queries[i] = weights[i];
        if (warp == 0) locate_groups(reinterpret_cast<const std::uint8_t*>(k.statistics + l.epoch.key_widths), l.key_size, 0, s.key_groups);
        if (warp == 1) locate_groups(reinterpret_cast<const std::uint8_t*>(k.statistics + l.epoch.value_widths), l.value_size, l.key_line_bytes + 1, s.value_groups);
    }
    cp_async_wait<0>();
    __syncthreads();
    float sums[G] = {};
    if (lane < run.count) add_components<G, exact>(k, w, s.tokens[lane], s.lines + lane * line_pitch(l), s, sums);
#pragma unroll
    for (int g = 0; g < G; ++g) s.partial[(warp * G + g) * refine_tokens + lane] = sums[g];
    __syncthreads();
    softmax<G, exact>(k, w, s, w.refined + (part * w.runs + index) * G);
    __syncthreads();
    sum_values<G, exact>(k, any_rough, s, w.refined_codes + (part * w.runs + index) * G * l.value_size);
}

template <int G>
void launch_typed(const decode_step& step, const decode_workspace& w, stream s) {
    const dim3 grid(static_cast<unsigned>(w.runs), static_cast<unsigned>(step.layer.kv_heads), static_cast<unsigned>(step.bounds.rows));
    launch("refine", s, grid, dim3(threads), shared_bytes<G>(step.layer), step.layer.exact_line_bytes > 0 ? &refine<G, true> : &refine<G, false>, step, w);
}

}  // namespace

void launch_refine(const decode_step& step, const decode_workspace& w, stream s) {
    with_group(step.layer.group, [&](auto g) { launch_typed<g()>(step, w, s); });
}

}  // namespace sekv::cuda
