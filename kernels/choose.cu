// From candidates to the final list: the cap, where each token's line lies, and the runs that refine works on. One thread block walks an item's query tokens in order, so that the line cache
// sees them in order; it walks segments in order too, so that nothing depends on the order in which route's thread blocks reserved their parts of the list.
#include "kernels/device.cuh"
#include "kernels/choose_parts.cuh"

namespace sekv::cuda {
namespace {

using namespace choosing;

// Where the host tier keeps a token's line: R3 where the layer has it, else R2.
__device__ __forceinline__ const std::uint8_t* host_line(const chooser& x, const sealed_block& b, int token) {
    const auto& l = x.step.layer;
    const bool exact = l.exact_line_bytes > 0;
    const auto* page = reinterpret_cast<const std::byte*>(exact ? b.exact : b.lines);
    return reinterpret_cast<const std::uint8_t*>(head_part(page, exact ? l.exact_line_page : l.line_page, x.head)) + token * (exact ? l.exact_line_bytes : l.line_stride);
}

// Looks a chosen token up. All hits are found before any miss claims a slot, so that no miss evicts a line of this list.
__device__ __forceinline__ zoomed_token look_up(const chooser& x, int block, int& hits) {
    const sealed_block& b = x.sequence->sealed[block / block_tokens];
    const int token = block % block_tokens;
    const int slot = x.sequence->line_slots > 0 ? find_line(x.cache, b.begin + token) : -1;
    if (slot < 0) return {host_line(x, b, token), block, line_missing};
    x.cache.clocks[slot] = x.now;
    ++hits;
    return {x.cache.line(slot), block, line_ready};
}

// Segments [begin, begin + choose_threads): offsets of their candidates, where runs may begin, and the state carried from chunk to chunk.
struct walk {
    int entries, group, runs, ties;
};
__device__ __forceinline__ void load_segments(const chooser& x, int begin, const walk& at) {
    const int i = begin + x.tid;
    const segment* segments = x.sequence->segments;
    const bool there = i < x.sequence->segment_count;
    const candidate_run run = there ? x.w.candidate_runs[x.place * x.w.segments + i] : candidate_run{0, 0};
    const bool head = there && i > 0 && (segments[i].epoch != segments[i - 1].epoch || segments[i].keys != segments[i - 1].keys);
    const int end = at.entries + scan<sum_of>(run.count, x.lane, x.warp, x.s.totals.data());
    const int group = scan<largest_of>(head ? end - run.count : 0, x.lane, x.warp, x.s.totals.data() + choose_warps);
    x.s.first[x.tid] = run.first;
    x.s.offset[x.tid] = end - run.count;
    x.s.group[x.tid] = max(group, at.group);
    if (x.tid == choose_threads - 1) x.s.offset[choose_threads] = end;
    __syncthreads();
}

// The segment at hand that entry e belongs to.
__device__ __forceinline__ int segment_of(const choose_shared& s, int e) {
    int low = 0, high = choose_threads;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (s.offset[middle] <= e) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Entries of the segments at hand in ascending order, choose_threads at a time: chosen or turned away, looked up, and cut into runs.
__device__ __forceinline__ void list_entries(const chooser& x, int begin, const mass_cut& cut, walk& at, int& hits) {
    const candidate* list = x.w.list + x.place * x.w.candidates;
    const int end = x.s.offset[choose_threads];
    for (int base = at.entries; base < end; base += choose_threads) {
        const int e = base + x.tid;
        const bool there = e < end;
        candidate c{0, 0.0f};
        int k = 0;
        if (there) {
            k = segment_of(x.s, e);
            c = list[x.s.first[k] + e - x.s.offset[k]];
        }
        const auto mass = static_cast<unsigned>(__float_as_int(c.mass));
        const bool starts = there && (e - x.s.group[k]) % refine_tokens == 0, ties = there && mass == cut.bits;
        const unsigned start_bits = __ballot_sync(whole_warp, starts), tie_bits = __ballot_sync(whole_warp, ties);
        if (x.lane == 0) {
            x.s.totals[x.warp] = __popc(start_bits);
            x.s.totals[choose_warps + x.warp] = __popc(tie_bits);
        }
        __syncthreads();
        const auto run = count_flags(start_bits, x.lane, x.warp, x.s.totals.data()), tie = count_flags(tie_bits, x.lane, x.warp, x.s.totals.data() + choose_warps);
        if (starts && at.runs + run.before < x.w.runs) {
            const segment& from = x.sequence->segments[begin + k];
            x.w.refine_runs[x.place * x.w.runs + at.runs + run.before] = {e, 0, from.epoch, from.keys};
        }
        const bool chosen = mass > cut.bits || (ties && at.ties + tie.before < cut.ties);
        if (there) x.w.zoomed[x.place * x.w.candidates + e] = chosen ? look_up(x, c.block, hits) : zoomed_token{nullptr, c.block, line_ready};
        at.runs += run.all;
        at.ties += tie.all;
        __syncthreads();
    }
    at.entries = end;
    at.group = x.s.group[choose_threads - 1];
}

// Misses of choose_threads entries from `base` on, in order; returns how many.
__device__ __forceinline__ int gather_misses(const chooser& x, int base) {
    const int e = base + x.tid;
    zoomed_token z{nullptr, 0, line_ready};
    if (e < x.candidates) z = x.w.zoomed[x.place * x.w.candidates + e];
    const bool missing = z.unused == line_missing;
    const unsigned bits = __ballot_sync(whole_warp, missing);
    if (x.lane == 0) x.s.totals[x.warp] = __popc(bits);
    __syncthreads();
    const auto count = count_flags(bits, x.lane, x.warp, x.s.totals.data());
    if (missing) {
        x.s.entry[count.before] = e;
        x.s.source[count.before] = z.line;
        x.s.position[count.before] = x.sequence->sealed[z.block / block_tokens].begin + z.block % block_tokens;
    }
    __syncthreads();
    return count.all;
}

// A warp serves the sets that fall to it, each set's misses in order.
__device__ __forceinline__ void claim_slots(const chooser& x, int misses) {
    for (int base = 0; base < misses; base += 32) {
        const int own = base + x.lane;
        unsigned bits = __ballot_sync(whole_warp, own < misses && x.cache.set_of(x.s.position[min(own, misses - 1)]) % choose_warps == x.warp);
        for (; bits != 0; bits &= bits - 1) {
            const int i = base + __ffs(static_cast<int>(bits)) - 1;
            const int slot = claim_line(x.cache, x.s.position[i], x.now, x.lane);
            if (x.lane == 0) x.s.slot[i] = slot;
        }
    }
    __syncthreads();
}

// Lines of misses into their slots, many 16-byte reads under way at once. A miss without a slot is read where the host keeps it.
__device__ __forceinline__ void copy_lines(const chooser& x, int misses) {
    const auto& l = x.step.layer;
    const int pieces = (l.exact_line_bytes > 0 ? l.exact_line_bytes : l.line_stride) / 16;
    for (int first = x.tid; first < misses * pieces; first += in_flight * choose_threads) {
        uint4 data[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; ++k) {
            const int i = first + k * choose_threads;
            if (i < misses * pieces && x.s.slot[i / pieces] >= 0) data[k] = load16(x.s.source[i / pieces] + i % pieces * 16);
        }
#pragma unroll
        for (int k = 0; k < in_flight; ++k) {
            const int i = first + k * choose_threads;
            if (i < misses * pieces && x.s.slot[i / pieces] >= 0) store16(x.cache.line(x.s.slot[i / pieces]) + i % pieces * 16, data[k]);
        }
    }
    for (int i = x.tid; i < misses; i += choose_threads) {
        if (x.s.slot[i] < 0) continue;
        x.w.zoomed[x.place * x.w.candidates + x.s.entry[i]].line = x.cache.line(x.s.slot[i]);
        if (x.step.ahead) atomicAdd(&x.s.fetched[0], 1);
    }
}

// Each run reaches up to the next one.
__device__ __forceinline__ void close_runs(const chooser& x, int runs) {
    refine_run* at = x.w.refine_runs + x.place * x.w.runs;
    runs = min(runs, x.w.runs);
    for (int r = x.tid; r < runs; r += choose_threads) at[r].count = min((r + 1 < runs ? at[r + 1].first : x.candidates) - at[r].first, refine_tokens);
    if (x.tid == 0) x.w.run_count[x.place] = runs;
}

// Thread 0's counts over the item's rows.
struct tally {
    unsigned long long zooms = 0, tokens = 0, capped = 0, hits = 0, most = 0;
};

// Whether the query saw any sealed token by its code: what the host counts as a zoom, even of no token.
__device__ __forceinline__ bool sees_sealed(const chooser& x) {
    const partial_sum* sums = x.w.sums + (x.place * (x.w.exact_splits + x.w.segments) + x.w.exact_splits) * x.w.group;
    bool any = false;
    for (int i = x.tid; i < x.sequence->segment_count; i += choose_threads) any = any || sums[static_cast<std::int64_t>(i) * x.w.group].weight > 0.0f;
    return __syncthreads_or(any ? 1 : 0) != 0;
}

__device__ __forceinline__ void add_latency(zoom_counters* counters, unsigned long long nanoseconds) {
    atomicAdd(&counters->latency[latency_bucket(nanoseconds)], 1ull);
    atomicMax(&counters->latency_most, nanoseconds);
}

// One query token's list. Returns how many tokens were chosen, and hits.
__device__ __forceinline__ int choose_row(const chooser& x, int& hits) {
    const int cap = x.step.bounds.cap;
    mass_cut cut{0, 0};
    if (x.candidates > cap) cut = find_cut(x);
    walk at{0, 0, 0, 0};
    int own_hits = 0;
    for (int begin = 0; begin < x.sequence->segment_count; begin += choose_threads) {
        load_segments(x, begin, at);
        list_entries(x, begin, cut, at, own_hits);
    }
    if (own_hits > 0) atomicAdd(&x.s.hits[0], own_hits);
    close_runs(x, at.runs);
    __syncthreads();
    hits = x.s.hits[0];
    const int chosen = min(x.candidates, cap);
    if (x.sequence->line_slots > 0 && hits < chosen) {
        for (int base = 0; base < x.candidates; base += choose_threads) {
            const int misses = gather_misses(x, base);
            claim_slots(x, misses);
            copy_lines(x, misses);
        }
    }
    return chosen;
}

__device__ __forceinline__ void add_counts(const decode_step& step, const tally& t, int fetched) {
    zoom_counters* c = step.counters;
    const auto& l = step.layer;
    const auto line_bytes = static_cast<unsigned long long>(l.exact_line_bytes > 0 ? l.exact_line_bytes : l.line_bytes);
    if (c == nullptr || t.zooms == 0) return;
    if (step.ahead) {
        atomicAdd(&c->prefetched, static_cast<unsigned long long>(fetched));
        atomicAdd(&c->bytes, static_cast<unsigned long long>(fetched) * line_bytes);
        return;
    }
    atomicAdd(&c->zooms, t.zooms);
    atomicAdd(&c->tokens, t.tokens);
    atomicAdd(&c->capped, t.capped);
    atomicAdd(&c->hits, t.hits);
    atomicAdd(&c->misses, t.tokens - t.hits);
    atomicAdd(&c->bytes, (t.tokens - t.hits) * line_bytes);
    atomicMax(&c->most_tokens, t.most);
}

// Lines of every row of the item stay until the launch that reads them: all rows share one tick of the clock, and a slot used in the present tick is never given away.
__global__ void __launch_bounds__(choose_threads, 2) choose(decode_step step, decode_workspace w) {
    const int head = static_cast<int>(blockIdx.x), tid = static_cast<int>(threadIdx.x);
    const batch_entry item = step.items[blockIdx.y];
    if (item.sequence == nullptr) return;
    const sequence_view* sequence = item.sequence;
    const auto at = step.layer.line_cache.first + static_cast<std::uint64_t>(head) * step.layer.line_cache.stride;
    const auto cache = sequence->line_slots > 0 ? view_cache(sequence->line_cache + at, sequence->line_slots, step.layer.cache_stride) : cache_view{};
    auto& s = dynamic_shared<choose_shared>();
    const auto now = static_cast<std::uint8_t>(sequence->line_slots > 0 ? *cache.now + 1 : 0);
    tally counts;
    if (tid == 0) s.fetched[0] = 0;
    for (int i = 0; i < item.tokens; ++i) {
        const auto place = part_of(step.layer, item.row + i, head);
        const chooser x{step, w, s, sequence, cache, place, head, tid, lane_of(tid), warp_of(tid), min(w.cursor[place], w.candidates), now};
        if (tid == 0) s.hits[0] = 0;
        const unsigned long long started = global_timer();
        int hits = 0, chosen = 0;
        const bool zooms = x.candidates > 0 || sees_sealed(x);
        if (x.candidates > 0) chosen = choose_row(x, hits);
        __syncthreads();
        if (tid == 0 && chosen > 0 && step.counters != nullptr && !step.ahead) add_latency(step.counters, global_timer() - started);
        counts.zooms += zooms ? 1u : 0u;
        counts.tokens += static_cast<unsigned long long>(chosen);
        counts.hits += static_cast<unsigned long long>(hits);
        counts.capped += x.candidates > chosen ? 1u : 0u;
        counts.most = max(counts.most, static_cast<unsigned long long>(chosen));
    }
    if (tid != 0) return;
    if (counts.tokens > 0 && sequence->line_slots > 0) *cache.now = now;
    add_counts(step, counts, s.fetched[0]);
}

}  // namespace

void launch_choose(const decode_step& step, const decode_workspace& w, stream s) {
    const dim3 grid(static_cast<unsigned>(step.layer.kv_heads), static_cast<unsigned>(step.bounds.items));
    launch("choose", s, grid, dim3(choose_threads), sizeof(choose_shared), &choose, step, w);
}

}  // namespace sekv::cuda
