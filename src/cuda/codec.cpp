// The CUDA codec's sequences and their query metric: what sealing needs beside the books.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "kernels/line_cache.hpp"
#include "kernels/rows.hpp"
#include "kernels/seal.hpp"
#include "sekv/attend/cuda_codec.hpp"
#include "src/cuda/context.hpp"
#include "src/cuda/layer_layout.hpp"
#include "src/cuda/sequence_tables.hpp"

namespace sekv {
namespace {

dtype checked_type(dtype stored, const progressive_options& o) {
    if (o.observer) throw unsupported("The CUDA backend tells no observer of its zooms, since they never leave the device; use the host backend.");
    if (stored == dtype::f32) throw unsupported("The CUDA backend stores exact rows in bf16 or fp16; use cuda_cache or cuda_fp16_cache.");
    return stored;
}

cuda::seal_shape shape_of(const cuda::cache_layout& places) {
    cuda::seal_shape s;
    for (const auto& l : places.layers) {
        s.most_heads = std::max(s.most_heads, l.kv_heads);
        s.most_size = std::max({s.most_size, l.key_size, l.value_size});
    }
    return s;
}

}  // namespace

cuda_progressive_codec::cuda_progressive_codec(const model_shape& model, const options& o, dtype stored, block_pool& pool, cuda_backend& where)
    : progressive_books(model, o, checked_type(stored, o), pool), where_(where), places_(std::make_unique<cuda::cache_layout>(model_, options_, stored)) {
    flags_ = pool.budget().allocate(tier::host, kind::workspace, sizeof(cuda::deferred_flags));
    if (layout_.heads() == 0) return;
    const auto shape = shape_of(*places_);
    seal_workspace_ = pool.budget().allocate(tier::device, kind::workspace, cuda::seal_workspace_bytes(shape));
    const cuda::device_guard guard(where_.context().device());
    sealer_ = std::make_unique<cuda::sealer>(shape, seal_workspace_.data(), where_.context().joined());
}

cuda_progressive_codec::~cuda_progressive_codec() = default;

cuda_progressive_codec::sequence cuda_progressive_codec::open(std::int64_t capacity) {
    sequence s{open_books(capacity), {}, {}, {}, {}, {}};
    s.ring = pool_->budget().allocate(tier::device, kind::statistics, places_->ring_bytes);
    s.ring_begin.assign(model_.layers.size(), 0);
    s.ring_end = s.ring_begin;
    const auto blocks = static_cast<std::size_t>(capacity / host::block_tokens) + 2;
    s.tables = pool_->budget().allocate(tier::device, kind::tables, cuda::table_bytes(2 * blocks, blocks, 16));
    return s;
}

cuda_progressive_codec::sequence cuda_progressive_codec::fork(const sequence& from, std::int64_t length) {
    sequence s{fork_books(from), {}, from.ring_begin, from.ring_end, {}, {}};
    s.ring = pool_->budget().allocate(tier::device, kind::statistics, places_->ring_bytes);
    if (places_->ring_bytes > 0) pool_->budget().resource().copy(s.ring.data(), tier::device, from.ring.data(), tier::device, places_->ring_bytes);
    s.tables = pool_->budget().allocate(tier::device, kind::tables, from.tables.size());
    truncate(s, length);
    s.stale_lines = std::numeric_limits<std::int64_t>::max();  // a fork's line cache starts empty
    return s;
}

void cuda_progressive_codec::truncate(sequence& s, std::int64_t length) noexcept {
    for (std::size_t l = 0; l < s.ring_end.size(); ++l) {
        s.ring_end[l] = std::min(s.ring_end[l], length);
        s.ring_begin[l] = std::min(s.ring_begin[l], length);
    }
    truncate_books(s, length);
    s.stale_lines = std::min(s.stale_lines, length);
}

void cuda_progressive_codec::forget_lines(sequence& s) {
    constexpr auto none = std::numeric_limits<std::int64_t>::max();
    if (s.stale_lines == none) return;
    if (options_.line_slots > 0 && layout_.heads() > 0) cuda::invalidate_lines(s.cache.data(), {layout_.heads(), options_.line_slots, widest_line_}, s.stale_lines, where_.context().joined());
    s.stale_lines = none;
}

usage cuda_progressive_codec::sequence_usage(const sequence& s, const std::vector<unit>& units) const {
    auto u = progressive_books::sequence_usage(s, units);
    u.at(tier::device, kind::statistics) += s.ring.size();
    u.at(tier::device, kind::tables) += s.tables.size();
    return u;
}

// What one launch adds to moments, and what is counted once it is accepted.
struct cuda_progressive_codec::moment_list {
    struct entry {
        cuda::moment_step step;
        sequence* to;
        std::size_t owner;
    };
    cuda_progressive_codec& coder;
    double decay = std::exp(-1.0 / coder.options_.metric_memory);
    std::vector<entry> entries = {};

    void add(sequence& s, std::int32_t layer, const rows_view& queries, float scale) {
        const auto& l = coder.model_.layers[static_cast<std::size_t>(layer)];
        const auto owner = l.kv_source >= 0 ? l.kv_source : layer;
        if (queries.tokens == 0 || !coder.owns(owner)) return;
        coder.own_moments(s);
        cuda::moment_step m;
        m.moments = s.moments->as<float>(coder.layout_.moment_offset(coder.layout_.head_index(owner, 0)));
        m.queries = {queries.data, queries.type, queries.token_stride, queries.head_stride};
        m.tokens = queries.tokens;
        m.kv_heads = l.kv_heads, m.group = l.group, m.key_size = l.key_size;
        m.scale = scale;
        m.faded = static_cast<float>(std::pow(decay, static_cast<double>(queries.tokens)));
        entries.push_back({m, &s, static_cast<std::size_t>(owner)});
    }

    // A layer's ring, in two parts where it wraps.
    void add_ring(sequence& s, std::int32_t layer) {
        const auto& shape = coder.model_.layers[static_cast<std::size_t>(layer)];
        const auto row = static_cast<std::int64_t>(shape.query_heads()) * shape.key_size;
        const auto end = s.ring_end[static_cast<std::size_t>(layer)];
        for (auto begin = s.ring_begin[static_cast<std::size_t>(layer)]; begin < end;) {
            const auto slot = begin % cuda::ring_tokens;
            const auto n = std::min(end - begin, cuda::ring_tokens - slot);
            const auto* data = s.ring.as<bf16>(coder.places_->layers[static_cast<std::size_t>(layer)].query_ring) + slot * row;
            add(s, layer, {data, dtype::bf16, n, shape.query_heads(), shape.key_size, row, shape.key_size}, 1.0F);
            begin += n;
        }
    }

    void launch() {
        if (entries.empty()) return;
        // Layers that share keys share moments.
        std::stable_sort(entries.begin(), entries.end(), [](const entry& a, const entry& b) { return std::less<>()(a.step.moments, b.step.moments); });
        const auto steps = coder.pool_->budget().allocate(tier::host, kind::workspace, entries.size() * sizeof(cuda::moment_step));
        for (std::size_t i = 0; i < entries.size(); ++i) std::memcpy(steps.data() + i * sizeof(cuda::moment_step), &entries[i].step, sizeof(cuda::moment_step));
        cuda::add_queries({steps.as<cuda::moment_step>(), entries.size()}, decay, coder.flags_.as<cuda::deferred_flags>(), coder.where_.context().joined());
        for (const auto& e : entries) coder.count_queries(*e.to, e.owner, e.step.group, e.step.tokens);
    }
};

void cuda_progressive_codec::take(std::span<const intake> from) {
    const auto each_layer = [&](const intake& x, auto&& f) {
        const auto last = x.layer < 0 ? static_cast<std::int32_t>(model_.layers.size()) : x.layer + 1;
        for (auto l = std::max(x.layer, 0); l < last; ++l) f(l);
    };
    if (from.empty()) return;
    if (where_.context().capturing()) throw state_error("The queries of earlier steps have to enter the metric, and the stream is being captured; call begin_step before the capture begins.");
    moment_list list{*this};
    for (const auto& x : from) {
        each_layer(x, [&](std::int32_t l) { list.add_ring(*x.to, l); });
        if (x.queries.data != nullptr) list.add(*x.to, x.layer, x.queries, model_.layers[static_cast<std::size_t>(x.layer)].logit_scale());
    }
    list.launch();
    for (const auto& x : from) {
        each_layer(x, [&](std::int32_t l) { x.to->ring_begin[static_cast<std::size_t>(l)] = x.to->ring_end[static_cast<std::size_t>(l)]; });
    }
}

std::size_t cuda_progressive_codec::moment_bytes(const sequence& s) const {
    std::size_t steps = 0;
    for (std::size_t l = 0; l < s.ring_end.size(); ++l) steps += s.ring_begin[l] < s.ring_end[l] ? 2 : 0;
    return steps * sizeof(cuda::moment_step);
}

void cuda_progressive_codec::fold(sequence& s, std::int32_t layer) {
    const intake rings{&s, layer, {}};
    take({&rings, 1});
}

void cuda_progressive_codec::observe(sequence& s, std::int32_t layer, const rows_view& queries) {
    const intake x{&s, layer, queries};
    take({&x, 1});
}

bool cuda_progressive_codec::advance(sequence& s, std::vector<unit>& units, std::int64_t length, std::uint64_t device_room) {
    const bool snapshot = length > 0 && (s.snapshots.empty() || length >= s.snapshots.back().length + host::block_tokens);
    const bool stale = sketches_due(s, units, length, device_room);
    const cuda::device_guard guard(where_.context().device());
    if (snapshot || stale) fold(s);
    if (stale) where_.synchronize();  // the host reads the moments
    return advance_books(s, units, length, device_room);
}

std::vector<cuda_progressive_codec::unit> cuda_progressive_codec::seal(sequence& s, const std::vector<unit>& before, const seal_request& request) {
    const cuda::device_guard guard(where_.context().device());
    fold(s);
    where_.synchronize();
    check_flags();  // all appended rows have been seen now: none that isn't finite is sealed
    return progressive_books::seal(s, before, request);
}

void cuda_progressive_codec::check_flags() {
    auto* flags = flags_.as<cuda::deferred_flags>();
    const bool rows = std::atomic_ref(flags->not_finite).exchange(0) != 0, queries = std::atomic_ref(flags->queries_not_finite).exchange(0) != 0;
    if (rows)
        throw invalid_argument(std::string("Keys or values that were appended from device memory are not finite, or leave the range of the stored type; truncate the sequences of that step to their lengths before it, or close them.") +
                               (queries ? " Queries are not finite either." : ""));
    if (queries)
        throw invalid_argument("Some queries that an earlier step gave in device memory are not finite, or too large; check the model's activations, and don't use that step's outputs. Such elements count as zero in the metric.");
}

// By a kernel, in order with the others: a copy between two host ranges would stop the device.
void cuda_progressive_codec::copy_moments(const page& from, page& to) { cuda::copy_floats(to.as<float>(), from.as<float>(), static_cast<std::int64_t>(layout_.moment_bytes() / sizeof(float)), where_.context().joined()); }

std::vector<double> cuda_progressive_codec::metric(const progressive_sequence& s, std::int32_t layer, std::int64_t length) const {
    std::vector<double> all;
    for (std::int32_t h = 0; h < model_.layers[static_cast<std::size_t>(layer)].kv_heads; ++h) {
        const auto m = metric_of(s, layer, h, length);
        all.insert(all.end(), m.begin(), m.end());
    }
    return all;
}

}  // namespace sekv
