// What scoring and routing share: one thread block's segment of a query row and KV head, its planes in shared memory, and the logits of its tokens.
#pragma once

#include <algorithm>

#include "kernels/sketch_mma.cuh"

namespace sekv::cuda::routing {

using host::sketch_field;

inline constexpr int segment_tokens = segment_blocks * block_tokens;
inline constexpr std::uint32_t most_at_once = 96 * 1024;  ///< bytes: beyond it the value planes take the key planes' place in shared memory

/// Value fields go 16 to a tile, with one behind them that is 1 for every token and sums up the probabilities. The segment's blocks are cut into 2^part_bits parts so that about every warp has some.
__host__ __device__ constexpr int value_tiles(int fields) { return (fields + step_fields) / step_fields; }
__host__ __device__ constexpr int part_bits(int tiles, int warps) { return tiles <= warps / 8 ? 3 : tiles <= warps / 4 ? 2 : tiles <= warps / 2 ? 1 : 0; }

/// Byte offsets in shared memory.
struct shared_cut {
    std::uint32_t keys, values, key_fields, value_fields, first_field, weights, base, unit, seen, probability, log_sum, factor, ones, flags, offsets, partial, bytes;
};

/// Score needs planes, fields, weights and partial sums; route the rest too.
inline shared_cut cut_shared(const layer_layout& l, const decode_workspace& w, bool route) {
    shared_cut c{};
    const auto take = [&](std::uint32_t& at, std::uint32_t bytes) {
        at = c.bytes;
        c.bytes += (bytes + 15) / 16 * 16;
    };
    const int warps = segment_threads(w.group) / 32;
    const auto g = static_cast<std::uint32_t>(w.group), most = static_cast<std::uint32_t>(l.value_bits);
    take(c.key_fields, static_cast<std::uint32_t>(field_steps(w.fields) * 4) * sizeof(lane_fields));
    take(c.base, g * 4);
    take(c.unit, g * 4);
    take(c.seen, segment_blocks * sizeof(seen_tokens));
    take(c.partial, static_cast<std::uint32_t>(warps) * g * 8);
    auto weights = static_cast<std::uint32_t>(matrix_words(w.fields, w.group));
    if (route) {
        // The weights' place serves for the value fields' sums later.
        weights = std::max(weights, static_cast<std::uint32_t>(std::max(value_tiles(l.value_bits), warps) * step_fields) * g);
        take(c.value_fields, most * 4);
        take(c.first_field, static_cast<std::uint32_t>(l.value_size) * 4);
        take(c.probability, g * segment_tokens * 4);
        take(c.log_sum, g * 4);
        take(c.factor, g * 4);
        take(c.ones, plane_bytes);
        take(c.flags, 32 * 4);
        take(c.offsets, (32 + 2) * 4);
    }
    take(c.weights, weights * 4);
    const auto plane = static_cast<std::uint32_t>(segment_blocks * plane_bytes);
    const auto keys = static_cast<std::uint32_t>(l.key_planes) * plane, values = route ? static_cast<std::uint32_t>(l.value_planes) * plane : 0;
    if (c.bytes + keys + values <= most_at_once) {
        take(c.keys, keys);
        take(c.values, values);
    } else {
        take(c.keys, std::max(keys, values));
        c.values = c.keys;
    }
    return c;
}

/// One thread block's segment of one query row and KV head.
struct work {
    const decode_step& step;
    const decode_workspace& w;
    const shared_cut& cut;
    unsigned char* shared;
    const sequence_view* sequence;
    std::int64_t position;
    const std::byte *keys, *statistics;  // of this head
    const sealed_block* blocks;
    segment part;
    int index, head, row, key_fields;

    template <class T>
    __device__ __forceinline__ T* of(std::uint32_t offset) const {
        return reinterpret_cast<T*>(shared + offset);
    }
    __device__ __forceinline__ std::int64_t place(std::int64_t count) const { return part_of(step.layer, row, head) * count; }
};

__device__ __forceinline__ work make_work(const decode_step& step, const decode_workspace& w, const shared_cut& cut, const row_view& q) {
    const int index = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
    const segment part = q.sequence->segments[index];
    const std::byte* keys = head_part(q.sequence->key_bases[part.keys], step.layer.key_buffer, head);
    const std::byte* statistics = head_part(q.sequence->epochs[part.epoch].statistics, step.layer.epoch_buffer, head);
    const int fields = min(*at<std::int32_t>(keys, step.layer.key.field_count), w.fields);
    return {step, w, cut, dynamic_bytes(cut.bytes), q.sequence, q.position, keys, statistics, q.sequence->sealed + part.first, part, index, head, row, fields};
}

/// Starts copying `planes` planes per block, from plane `first` on, to shared memory at `to`. A warp copies the blocks that it scores itself.
template <int G>
__device__ __forceinline__ void stage_planes(const work& x, std::uint32_t to, int first, int planes) {
    const int warp = warp_of(static_cast<int>(threadIdx.x)), lane = lane_of(static_cast<int>(threadIdx.x));
    for (int b = warp; b < x.part.count; b += warps<G>) {
        const std::byte* from = head_part(reinterpret_cast<const std::byte*>(x.blocks[b].sketch), x.step.layer.sketch_page, x.head) + first * plane_bytes;
        unsigned char* block = x.shared + to + b * planes * plane_bytes;
        for (int i = lane; i < planes * plane_bytes / 16; i += 32) cp_async16(block + i * 16, from + i * 16);
    }
    cp_async_commit();
}

/// What scoring a block needs beside its planes. Starts copying the weights; stage_planes, which must follow, ends the group of copies.
template <int G>
__device__ __forceinline__ void prepare_scores(const work& x) {
    const int tid = static_cast<int>(threadIdx.x), words = matrix_words(x.key_fields, G);
    const auto* fields = at<sketch_field>(x.keys, x.step.layer.key.fields);
    const auto basis = x.place(x.w.key_bases) + x.part.keys;
    const std::uint32_t* matrix = x.w.field_matrix + basis * matrix_words(x.w.fields, G);
    for (int i = tid * 4; i < words; i += threads<G> * 4) cp_async16(x.of<std::uint32_t>(x.cut.weights) + i, matrix + i);
    for (int i = tid; i < field_steps(x.key_fields) * step_fields; i += threads<G>) put_field(x.of<lane_fields>(x.cut.key_fields), i, fields, x.key_fields);
    if (tid < x.part.count) x.of<seen_tokens>(x.cut.seen)[tid] = seen(x.blocks[tid], x.sequence->sink_count, x.position);
    if (tid >= G) return;
    x.of<float>(x.cut.base)[tid] = x.w.field_base[basis * G + tid] + x.w.epoch_base[(x.place(x.w.epochs) + x.part.epoch) * G + tid];
    x.of<float>(x.cut.unit)[tid] = x.w.field_unit[basis * G + tid];
}

/// Replaces each logit by change(logit, quad, token in the quad).
template <int G, class F>
__device__ __forceinline__ void change_logits(quads<G>& logits, F&& change) {
#pragma unroll
    for (int i = 0; i < lane_quads<G>; ++i) {
#pragma unroll
        for (auto& head : logits[i]) {
#pragma unroll
            for (int t = 0; t < word_tokens; ++t) head[t] = change(head[t], i, t);
        }
    }
}

/// What a lane needs of its queries for every block: logit = sum * unit + base.
template <int G>
struct lane_queries {
    float unit[column_sets<G>][lane_heads<G>], base[column_sets<G>][lane_heads<G>];
};
template <int G>
__device__ __forceinline__ lane_queries<G> queries_of(const work& x, int lane) {
    lane_queries<G> q;
#pragma unroll
    for (int set = 0; set < column_sets<G>; ++set) {
#pragma unroll
        for (int h = 0; h < lane_heads<G>; ++h) {
            const int g = lane_head<G>(lane, set, h);
            q.base[set][h] = x.of<float>(x.cut.base)[g];
            q.unit[set][h] = x.of<float>(x.cut.unit)[g] * (G < 8 && lane % 4 >= 2 ? high_nibble : 1.0f);
        }
    }
    return q;
}

/// Logits of block b's tokens, by all lanes of a warp; -infinity where the query doesn't see them.
template <int G>
__device__ __forceinline__ void score_block(const work& x, const lane_queries<G>& q, int b, int lane, quads<G>& logits) {
    const auto& l = x.step.layer;
    float sums[4][column_sets<G>][4] = {};
    multiply_codes<G>(x.shared + x.cut.keys + b * l.key_planes * plane_bytes, x.of<lane_fields>(x.cut.key_fields), x.of<uint2>(x.cut.weights), field_steps(x.key_fields), lane, sums);
    gather_quads<G>(lane, sums, logits);
#pragma unroll
    for (int i = 0; i < lane_quads<G>; ++i) {
#pragma unroll
        for (int h = 0; h < lane_heads<G>; ++h) {
            const float unit = q.unit[i / 2][h] * (i % 2 == 1 ? high_nibble : 1.0f);
#pragma unroll
            for (float& logit : logits[i][h]) logit = fmaf(logit, unit, q.base[i / 2][h]);
        }
    }
    if (l.soft_cap > 0) change_logits<G>(logits, [&](float logit, int, int) { return soft_capped(logit, l.soft_cap); });
    const seen_tokens visible = x.of<seen_tokens>(x.cut.seen)[b];
    if (visible.first > 0 || visible.last < block_tokens) change_logits<G>(logits, [&](float logit, int i, int t) { return visible(quad_token<G>(lane, i) + t) ? logit : -INFINITY; });
}

}  // namespace sekv::cuda::routing
