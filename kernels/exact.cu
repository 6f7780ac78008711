// Flash decoding over exact rows: a thread block attends up to exact_split_blocks pages of one KV head for one query row.
#include "kernels/decode_parts.cuh"
#include "kernels/warp.cuh"

namespace sekv::cuda {
namespace {

constexpr int threads = 128;
constexpr int warps = threads / 32;
constexpr int most_pieces = exact_split_blocks + 1;  // the sink page's rows too

// Rows [first, last) of one page that the query sees; head: this KV head's part of it.
struct piece {
    const std::byte* head;
    std::int32_t first, last, capacity;
};

// Shared memory. Tiles lie in a ring: keys of piece 0, its values, keys of piece 1, ...
template <int G>
struct exact_shared {
    unsigned char* ring;  // [stages][tile_bytes]
    float* queries;       // [dk, G]
    float* partial;       // [warps, G, 64] logits of each warp's share of the components
    float* weights;       // [64, G] exp(logit - max)
    float* decay;         // [G] what a new maximum makes of earlier sums
    piece* pieces;        // [most_pieces]
    std::int32_t* count;
};

struct exact_plan {
    std::int32_t tile_bytes, stages;
};
__host__ __device__ constexpr exact_plan plan_of(std::int32_t dk, std::int32_t dv) {
    const std::int32_t size = dk > dv ? dk : dv;
    return {size * block_tokens * 2, size > 128 ? 2 : 4};
}
template <int G>
__host__ __device__ constexpr std::size_t shared_bytes(std::int32_t dk, std::int32_t dv) {
    const exact_plan p = plan_of(dk, dv);
    return static_cast<std::size_t>(p.tile_bytes * p.stages) + sizeof(float) * static_cast<std::size_t>(dk * G + (warps + 1) * G * block_tokens + (G < 4 ? 4 : G)) + sizeof(piece) * most_pieces + 16;
}

template <int G>
__device__ __forceinline__ exact_shared<G> cut_shared(std::int32_t dk, std::int32_t dv) {
    const exact_plan p = plan_of(dk, dv);
    exact_shared<G> s;
    s.ring = dynamic_bytes(shared_bytes<G>(dk, dv));
    s.queries = reinterpret_cast<float*>(s.ring + p.tile_bytes * p.stages);
    s.partial = s.queries + dk * G;
    s.weights = s.partial + warps * G * block_tokens;
    s.decay = s.weights + G * block_tokens;
    s.pieces = reinterpret_cast<piece*>(s.decay + (G < 4 ? 4 : G));
    s.count = reinterpret_cast<std::int32_t*>(s.pieces + most_pieces);
    return s;
}

// What a query at `position` sees of the split's index-th page; index exact_split_blocks names the sink page, which split 0 takes.
__device__ __forceinline__ piece seen_piece(const layer_layout& l, const row_view& view, std::int32_t head, std::int32_t split, std::int32_t index) {
    const sequence_view& s = *view.sequence;
    if (index == exact_split_blocks) {
        if (split > 0 || l.window > 0 || s.sink_count == 0) return {};
        const std::int64_t seen = view.position + 1;
        return {head_part(s.sinks, l.sink_page, head), 0, seen < s.sink_count ? static_cast<std::int32_t>(seen) : s.sink_count, l.sink_capacity};
    }
    const int which = l.window > 0 ? 1 : 0;
    const std::int32_t block = split * exact_split_blocks + index;
    if (block >= s.exact_count[which]) return {};
    const exact_block b = s.exact[which][block];
    const std::int64_t hidden = l.window > 0 ? view.position + 1 - l.window - b.begin : 0, seen = view.position + 1 - b.begin;
    return {head_part(b.rows, l.exact_page, head), hidden > 0 ? static_cast<std::int32_t>(hidden < b.count ? hidden : b.count) : 0, seen < b.count ? static_cast<std::int32_t>(seen) : b.count, block_tokens};
}

// By warp 0: lists the pieces that have rows.
template <int G>
__device__ __forceinline__ void list_pieces(const layer_layout& l, const row_view& view, std::int32_t head, std::int32_t split, const exact_shared<G>& s) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x);
    const piece p = lane < most_pieces ? seen_piece(l, view, head, split, lane) : piece{};
    const unsigned mask = __ballot_sync(whole_warp, p.last > p.first ? 1 : 0);
    if (p.last > p.first) s.pieces[__popc(mask & ((1U << lane) - 1U))] = p;
    if (lane == 0) *s.count = __popc(mask);
}

// Begins copying a piece's keys to tile[component * 64 + token]: only the 16-byte chunks in which the query sees a token.
template <class T>
__device__ __forceinline__ void load_keys(const piece& p, const T* keys, std::int32_t dk, T* tile) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (p.capacity == block_tokens) {
        const std::int32_t t = thread % 8 * 8;
        if (t >= p.last || t + 8 <= p.first) return;
        for (std::int32_t j = thread / 8; j < dk; j += threads / 8) cp_async16(tile + j * block_tokens + t, keys + j * block_tokens + t);
    } else {  // the sink page: a few tokens, whose rows aren't 16 bytes long
        for (std::int32_t i = thread; i < dk * p.last; i += threads) tile[i / p.last * block_tokens + i % p.last] = keys[i / p.last * p.capacity + i % p.last];
    }
}

template <class T>
__device__ __forceinline__ void load_values(const piece& p, const T* values, std::int32_t dv, T* tile) {
    for (std::int32_t i = p.first * dv / 8 + static_cast<std::int32_t>(threadIdx.x); i < p.last * dv / 8; i += threads) cp_async16(tile + i * 8, values + i * 8);
}

// Tile `unit`: keys of piece unit / 2 when even, else its values.
template <class T, int G>
__device__ __forceinline__ void load_tile(const layer_layout& l, const exact_shared<G>& s, std::int32_t unit) {
    const exact_plan plan = plan_of(l.key_size, l.value_size);
    const piece p = s.pieces[unit / 2];
    const T* keys = reinterpret_cast<const T*>(p.head);
    T* tile = reinterpret_cast<T*>(s.ring + unit % plan.stages * plan.tile_bytes);
    if (unit % 2 == 0) {
        load_keys(p, keys, l.key_size, tile);
    } else {
        load_values(p, keys + p.capacity * l.key_size, l.value_size, tile);
    }
}

// Each warp multiplies every fourth component, each lane two tokens.
template <class T, int G>
__device__ __forceinline__ void partial_logits(const T* tile, std::int32_t dk, const exact_shared<G>& s) {
    const int lane = lane_of(static_cast<int>(threadIdx.x)), warp = warp_of(static_cast<int>(threadIdx.x));
    float low[G] = {}, high[G] = {};
#pragma unroll 4
    for (std::int32_t j = warp; j < dk; j += warps) {
        const float2 k = unpack2<T>(*reinterpret_cast<const unsigned*>(tile + j * block_tokens + 2 * lane));
        float q[G];
        load_group<G>(s.queries + j * G, q);
#pragma unroll
        for (int g = 0; g < G; ++g) low[g] = fmaf(q[g], k.x, low[g]), high[g] = fmaf(q[g], k.y, high[g]);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) *reinterpret_cast<float2*>(s.partial + (warp * G + g) * block_tokens + 2 * lane) = float2{low[g], high[g]};
}

// Maximum and weight so far of the queries that this warp owns: g = warp, warp + warps, ...
template <int G>
struct running {
    static constexpr int owned = (G + warps - 1) / warps;
    float max[owned], weight[owned];
};

// Logits of the piece's tokens to weights; two tokens per lane.
template <int G>
__device__ __forceinline__ void softmax(const piece& p, float soft_cap, const exact_shared<G>& s, running<G>& r) {
    const int lane = lane_of(static_cast<int>(threadIdx.x)), warp = warp_of(static_cast<int>(threadIdx.x));
#pragma unroll
    for (int i = 0; i < running<G>::owned; ++i) {
        const int g = warp + i * warps;
        if (g >= G) break;
        float x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int t = lane + 32 * h;
            float sum = 0;
#pragma unroll
            for (int k = 0; k < warps; ++k) sum += s.partial[(k * G + g) * block_tokens + t];
            x[h] = t >= p.first && t < p.last ? soft_capped(sum, soft_cap) : -INFINITY;
        }
        const float top = fmaxf(r.max[i], warp_max(fmaxf(x[0], x[1])));
        const float a = exp_approx(x[0] - top), b = exp_approx(x[1] - top), decay = exp_approx(r.max[i] - top);
        s.weights[lane * G + g] = a, s.weights[(lane + 32) * G + g] = b;
        if (lane == 0) s.decay[g] = decay;
        r.weight[i] = r.weight[i] * decay + warp_sum(a + b);
        r.max[i] = top;
    }
}

// Threads as [slices][dv / 2]: a thread adds every slices-th token to two columns.
struct column_share {
    std::int32_t column, slice, slices;
};
__device__ __forceinline__ column_share share_of(std::int32_t dv) {
    const std::int32_t pairs = dv / 2, thread = static_cast<std::int32_t>(threadIdx.x);
    return {thread % pairs * 2, thread / pairs, threads / pairs};
}

template <class T, int G>
__device__ __forceinline__ void accumulate(const T* tile, const piece& p, std::int32_t dv, const exact_shared<G>& s, float2 (&sums)[G]) {
    const column_share c = share_of(dv);
    if (c.slice >= c.slices) return;
    float decay[G];
    load_group<G>(s.decay, decay);
#pragma unroll
    for (int g = 0; g < G; ++g) sums[g].x *= decay[g], sums[g].y *= decay[g];
#pragma unroll 4
    for (std::int32_t t = p.first + c.slice; t < p.last; t += c.slices) {
        const float2 v = unpack2<T>(*reinterpret_cast<const unsigned*>(tile + t * dv + c.column));
        float weight[G];
        load_group<G>(s.weights + t * G, weight);
#pragma unroll
        for (int g = 0; g < G; ++g) sums[g].x = fmaf(weight[g], v.x, sums[g].x), sums[g].y = fmaf(weight[g], v.y, sums[g].y);
    }
}

// Adds the slices in order and writes the split's sums [group, dv].
template <int G>
__device__ __forceinline__ void store_sums(const layer_layout& l, const exact_shared<G>& s, const float2 (&sums)[G], float* out) {
    const column_share c = share_of(l.value_size);
    const std::int32_t dv = l.value_size;
    float* slices = s.partial;  // [slices - 1, G, dv], less than what the logits took
    if (c.slice > 0 && c.slice < c.slices) {
#pragma unroll
        for (int g = 0; g < G; ++g) *reinterpret_cast<float2*>(slices + ((c.slice - 1) * G + g) * dv + c.column) = sums[g];
    }
    __syncthreads();
    if (c.slice > 0) return;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        if (g >= l.group) break;
        float2 x = sums[g];
        for (std::int32_t i = 0; i < c.slices - 1; ++i) {
            const float2 y = *reinterpret_cast<const float2*>(slices + (i * G + g) * dv + c.column);
            x.x += y.x, x.y += y.y;
        }
        *reinterpret_cast<float2*>(out + g * dv + c.column) = x;
    }
}

template <class T, int G>
__global__ void __launch_bounds__(threads, 3) score_exact(const decode_step step, const decode_workspace w) {
    const auto split = static_cast<std::int32_t>(blockIdx.x), head = static_cast<std::int32_t>(blockIdx.y), row = static_cast<std::int32_t>(blockIdx.z);
    const int lane = lane_of(static_cast<int>(threadIdx.x)), warp = warp_of(static_cast<int>(threadIdx.x));
    const layer_layout& l = step.layer;
    const exact_shared<G> s = cut_shared<G>(l.key_size, l.value_size);
    const exact_plan plan = plan_of(l.key_size, l.value_size);
    const std::int64_t part = part_of(l, row, head);
    partial_sum* own = w.sums + (part * (w.exact_splits + w.segments) + split) * G;
    const row_view view = view_of(step, row);
    const int which = l.window > 0 ? 1 : 0;
    if (view.sequence == nullptr || (split > 0 && split * exact_split_blocks >= view.sequence->exact_count[which])) {
        if (threadIdx.x < G) own[threadIdx.x] = {-INFINITY, 0};
        return;
    }
    if (warp == 0) list_pieces<G>(l, view, head, split, s);
    const bool finite = stage_queries<G>(step, row, head, s.queries);
    if (split == 0 && !finite && step.flags != nullptr) atomicExch(&step.flags->queries_not_finite, 1);  // the one kernel that reads every query of every layer
    __syncthreads();
    const std::int32_t tiles = 2 * *s.count;

    running<G> r;
    float2 sums[G];
#pragma unroll
    for (int i = 0; i < running<G>::owned; ++i) r.max[i] = -INFINITY, r.weight[i] = 0;
#pragma unroll
    for (int g = 0; g < G; ++g) sums[g] = float2{0, 0};
    for (std::int32_t u = 0; u < plan.stages - 1; ++u) {
        if (u < tiles) load_tile<T, G>(l, s, u);
        cp_async_commit();
    }
    for (std::int32_t u = 0; u < tiles; ++u) {
        if (plan.stages == 4) {
            cp_async_wait<2>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();  // tile u is there, and tile u - 1, whose place the next one takes, has been read
        if (u + plan.stages - 1 < tiles) load_tile<T, G>(l, s, u + plan.stages - 1);
        cp_async_commit();
        const T* tile = reinterpret_cast<const T*>(s.ring + u % plan.stages * plan.tile_bytes);
        if (u % 2 == 0) {
            partial_logits<T, G>(tile, l.key_size, s);
            __syncthreads();
            softmax<G>(s.pieces[u / 2], l.soft_cap, s, r);
        } else {
            accumulate<T, G>(tile, s.pieces[u / 2], l.value_size, s, sums);
        }
    }
#pragma unroll
    for (int i = 0; i < running<G>::owned; ++i) {
        const int g = warp + i * warps;
        if (lane == 0 && g < G) own[g] = {r.max[i], r.weight[i]};
    }
    if (tiles > 0) store_sums<G>(l, s, sums, w.exact_out + (part * w.exact_splits + split) * G * l.value_size);
}

template <class T, int G>
void launch_typed(const decode_step& step, const decode_workspace& w, stream s) {
    const auto& l = step.layer;
    const dim3 grid(static_cast<unsigned>(w.exact_splits), static_cast<unsigned>(l.kv_heads), static_cast<unsigned>(step.bounds.rows));
    launch("score_exact", s, grid, dim3(threads), shared_bytes<G>(l.key_size, l.value_size), &score_exact<T, G>, step, w);
}

}  // namespace

void launch_score_exact(const decode_step& step, const decode_workspace& w, stream s) {
    with_group(step.layer.group, [&](auto g) { step.layer.stored == dtype::f16 ? launch_typed<__half, g()>(step, w, s) : launch_typed<__nv_bfloat16, g()>(step, w, s); });
}

}  // namespace sekv::cuda
