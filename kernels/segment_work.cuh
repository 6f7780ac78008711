// What scoring and routing share: one thread block's segment of a query row and KV head, its planes in shared memory, and the logits of its tokens.
#pragma once

#include <algorithm>

#include "kernels/fields.cuh"

namespace sekv::cuda::routing {

using host::sketch_field;

inline constexpr int segment_tokens = segment_blocks * block_tokens;
inline constexpr std::uint32_t most_at_once = 96 * 1024;  ///< bytes: beyond it the value planes take the key planes' place in shared memory

/// Fields whose sums a warp carries at once, and into how many parts the segment's blocks are cut so that every warp has some.
template <int G>
constexpr int field_chunk = G < 16 ? 4 : 2;
__host__ __device__ constexpr int value_parts(int fields, int chunk) { return (fields + chunk - 1) / chunk < warps ? 2 : 1; }

/// Byte offsets in shared memory.
struct shared_cut {
    std::uint32_t keys, values, key_fields, value_fields, first_field, weights, base, probability, log_sum, totals, flags, offsets, partial, bytes;
};

/// Score needs planes, fields, weights and partial sums; route the rest too.
inline shared_cut cut_shared(const layer_layout& l, const decode_workspace& w, bool route) {
    shared_cut c{};
    const auto take = [&](std::uint32_t& at, std::uint32_t bytes) {
        at = c.bytes;
        c.bytes += (bytes + 15) / 16 * 16;
    };
    const auto g = static_cast<std::uint32_t>(w.group), fields = static_cast<std::uint32_t>(w.fields), most = static_cast<std::uint32_t>(l.value_bits);
    take(c.key_fields, fields * 4);
    take(c.base, g * 4);
    take(c.partial, warps * g * 8);
    std::uint32_t weights = fields * g;
    if (route) {
        // The weights' place serves for the value fields' sums later.
        const auto chunk = g < 16 ? 4U : 2U;
        weights = std::max(weights, std::max(most, 2 * chunk * warps) * g);
        take(c.value_fields, most * 4);
        take(c.first_field, static_cast<std::uint32_t>(l.value_size) * 4);
        take(c.probability, g * segment_tokens * 4);
        take(c.log_sum, g * 4);
        take(c.totals, g * 4);
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
__device__ __forceinline__ void stage_planes(const work& x, std::uint32_t to, int first, int planes) {
    const int warp = warp_of(static_cast<int>(threadIdx.x)), lane = lane_of(static_cast<int>(threadIdx.x));
    for (int b = warp; b < x.part.count; b += warps) {
        const std::byte* from = head_part(reinterpret_cast<const std::byte*>(x.blocks[b].sketch), x.step.layer.sketch_page, x.head) + first * plane_bytes;
        unsigned char* block = x.shared + to + b * planes * plane_bytes;
        for (int i = lane; i < planes * plane_bytes / 16; i += 32) cp_async16(block + i * 16, from + i * 16);
    }
    cp_async_commit();
}

template <int G>
__device__ __forceinline__ void load_weights(const work& x) {
    const int tid = static_cast<int>(threadIdx.x);
    const auto* fields = at<sketch_field>(x.keys, x.step.layer.key.fields);
    const auto basis = x.place(x.w.key_bases) + x.part.keys;
    const float* weights = x.w.field_weight + basis * x.w.fields * G;
    for (int i = tid; i < x.key_fields; i += threads) x.of<sketch_field>(x.cut.key_fields)[i] = fields[i];
    for (int i = tid; i < x.key_fields * G; i += threads) x.of<float>(x.cut.weights)[i] = weights[i];
    if (tid < G) x.of<float>(x.cut.base)[tid] = x.w.field_base[basis * G + tid] + x.w.epoch_base[(x.place(x.w.epochs) + x.part.epoch) * G + tid];
}

/// Logits of block b's tokens `lane` and `lane` + 32; -infinity where the query doesn't see them.
template <int G>
__device__ __forceinline__ void score_block(const work& x, int b, int lane, float (&low)[G], float (&high)[G]) {
    const auto& l = x.step.layer;
    const float* base = x.of<float>(x.cut.base);
#pragma unroll
    for (int g = 0; g < G; ++g) low[g] = high[g] = base[g];
    add_logits<G>(x.shared + x.cut.keys + b * l.key_planes * plane_bytes, x.of<sketch_field>(x.cut.key_fields), x.of<float>(x.cut.weights), x.key_fields, lane, low, high);
    const auto visible = seen(x.blocks[b], x.sequence->sink_count, x.position);
    const bool see_low = visible(lane), see_high = visible(lane + 32);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        low[g] = see_low ? soft_capped(low[g], l.soft_cap) : -INFINITY;
        high[g] = see_high ? soft_capped(high[g], l.soft_cap) : -INFINITY;
    }
}

}  // namespace sekv::cuda::routing
