// Decode attention over sealed blocks, in code space: score R1, zoom, attend what is zoomed at R2 and the rest at R1.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "sekv/attend/progressive.hpp"
#include "sekv/codec/basis.hpp"
#include "sekv/codec/line.hpp"
#include "sekv/exec/row_ops.hpp"

namespace sekv {

// Everything that one (query token, KV head) needs beside its codes.
struct progressive_codec::scratch {
    std::int64_t stride = 0;  ///< of scores: sealed tokens, 64 per unit
    std::size_t units = 0;    ///< that the query may see
    float* scores = nullptr;  ///< [group, stride]: logits, then exp(logit - max), 0 where zoomed
    float* max = nullptr;     ///< [group]
    const std::uint8_t** blocks = nullptr;
    float* t = nullptr;            ///< [group, key_size]
    float* query_mean = nullptr;   ///< [group]
    routing_tables tables;
    zoom_list list;
    float* largest = nullptr;
    std::int64_t* positions = nullptr;
    const std::uint8_t** sources = nullptr;
    const std::uint8_t** lines = nullptr;
    float* logits = nullptr;       ///< [group, cap]
    float* exact_keys = nullptr;   ///< [cap, key_size], of R3 lines
    float* exact_values = nullptr; ///< [cap, value_size]
    float* field_sums = nullptr;   ///< [group, value_bits]
    float* components = nullptr;   ///< [group, value_size]
    float* partial = nullptr;      ///< [group, value_size]
    float* totals = nullptr;       ///< [group]
    std::int64_t cap = 0;

    void layout(arena& a, const head_format& f, std::int32_t group, std::int64_t tokens, const progressive_options& o) {
        const bool exact_tier = o.exact_tier;
        stride = (tokens + host::block_tokens - 1) / host::block_tokens * host::block_tokens;
        cap = std::min<std::int64_t>(o.cap, stride);
        scores = a.take<float>(group * stride);
        max = a.take<float>(group);
        blocks = a.take<const std::uint8_t*>(stride / host::block_tokens);
        t = a.take<float>(group * f.key_size);
        query_mean = a.take<float>(group);
        tables.layout(a, f.key_planes(), group);
        list.tokens = a.take<std::int32_t>(stride);
        list.mass = a.take<float>(stride);
        largest = a.take<float>(cap);
        positions = a.take<std::int64_t>(cap);
        sources = a.take<const std::uint8_t*>(cap);
        lines = a.take<const std::uint8_t*>(cap);
        logits = a.take<float>(group * cap);
        exact_keys = a.take<float>(exact_tier ? cap * f.key_size : 0);
        exact_values = a.take<float>(exact_tier ? cap * f.value_size : 0);
        field_sums = a.take<float>(group * f.value_bits);
        components = a.take<float>(group * f.value_size);
        partial = a.take<float>(group * f.value_size);
        totals = a.take<float>(group);
    }
};

namespace {

float dot(const float* a, const float* b, std::int32_t n) noexcept {
    float s = 0;
    for (std::int32_t j = 0; j < n; ++j) s += a[j] * b[j];
    return s;
}

// The maximal run from `first` on in which every unit has the payload's epoch and sketch basis.
template <class Units>
std::size_t run_end(const Units& units, std::size_t first, std::size_t end) noexcept {
    std::size_t last = first + 1;
    while (last < end && units[last].payload.statistics == units[first].payload.statistics && units[last].payload.keys == units[first].payload.keys) ++last;
    return last;
}

// t = A^T q for the group.
void project(const key_view& keys, const head_query& q, std::int32_t group, std::int32_t size, float* t) { host::vector_matrix(q.queries, size, group, keys.a, size, size, t, size); }

}  // namespace

void progressive_codec::layout_scratch(arena& a, std::int32_t layer, std::int32_t group, std::int64_t tokens) const {
    const auto index = layout_.head_index(layer, 0);
    if (index < 0) return;
    scratch x;
    x.layout(a, layout_.format(index), group, tokens, options_);
}

void progressive_codec::attend(sequence& s, const std::vector<unit>& units, const head_query& q, arena a, zoom_metrics& metrics) const {
    const auto index = layout_.head_index(q.layer, q.head);
    const auto group = q.state->group;
    scratch x;
    for (x.units = units.size(); x.units > 0 && units[x.units - 1].begin > q.position;) --x.units;
    if (x.units == 0) return;
    x.layout(a, layout_.format(index), group, static_cast<std::int64_t>(x.units) * host::block_tokens, options_);
    score(units, q, x);
    for (std::int32_t g = 0; g < group; ++g) {
        float* row = x.scores + g * x.stride;
        x.max[g] = host::max_of(row, x.stride);
        if (std::isinf(x.max[g])) return;  // only sinks are sealed
        const float sum = host::sketch_weights(row, x.stride, x.max[g]);
        const float sealed = x.max[g] + std::log(sum);
        const float exact = q.state->log_sum_exp(g);
        const float top = std::max(sealed, exact);
        const float l = top + std::log(std::exp(sealed - top) + std::exp(exact - top));
        x.totals[g] = std::exp(x.max[g] - l);  // turns a weight into a probability
    }
    choose_zoom(x.list, x.scores, x.stride, group, x.totals, x.stride, options_, x.largest);
    for (std::int32_t g = 0; g < group; ++g) {
        for (std::int64_t i = 0; i < x.list.count; ++i) x.scores[g * x.stride + x.list.tokens[i]] = 0.0F;
    }
    attend_sketch(units, q, x);
    if (x.list.count > 0) {
        zoom(s, units, q, x, metrics);
        const auto count = static_cast<std::size_t>(x.list.count);
        if (options_.observer) options_.observer({q.layer, q.head, q.position, {x.positions, count}, {x.list.mass, count}});
        options_.exact_tier ? attend_exact_lines(q, x) : attend_lines(units, q, x);
    }
    ++metrics.zooms;
    metrics.capped += x.list.capped ? 1 : 0;
    metrics.most_tokens = std::max(metrics.most_tokens, static_cast<std::uint64_t>(x.list.count));
}

void progressive_codec::score(const std::vector<unit>& units, const head_query& q, scratch& x) const {
    const auto index = layout_.head_index(q.layer, q.head);
    const auto& f = layout_.format(index);
    const auto group = q.state->group;
    for (std::size_t first = 0; first < x.units;) {
        const auto last = run_end(units, first, x.units);
        const auto& payload = units[first].payload;
        const auto keys = payload.keys->view(index);
        project(keys, q, group, f.key_size, x.t);
        for (std::int32_t g = 0; g < group; ++g) x.query_mean[g] = dot(q.queries + g * f.key_size, payload.statistics->key_mean(index), f.key_size);
        fill_tables(x.tables, keys, x.t, x.query_mean, f.key_size);
        for (std::size_t u = first; u < last; ++u) x.blocks[u] = units[u].payload.sketch->as<std::uint8_t>(layout_.sketch_offset(index));
        host::sketch_scores(x.blocks + first, static_cast<std::int64_t>(last - first), x.tables.view, x.scores + static_cast<std::int64_t>(first) * host::block_tokens, x.stride);
        first = last;
    }
    for (std::int32_t g = 0; g < group; ++g) {
        float* row = x.scores + g * x.stride;
        if (q.soft_cap > 0) host::soft_cap(row, x.stride, q.soft_cap);
        for (std::int64_t i = 0; i < q.sinks && i < x.stride; ++i) row[i] = softmax_state::empty_max;  // sinks are among the exact rows
        for (std::size_t u = 0; u < x.units; ++u) {
            const auto seen = std::min<std::int64_t>(units[u].count, q.position + 1 - units[u].begin);
            for (std::int64_t i = seen; i < host::block_tokens; ++i) row[static_cast<std::int64_t>(u) * host::block_tokens + i] = softmax_state::empty_max;
        }
    }
}

void progressive_codec::attend_sketch(const std::vector<unit>& units, const head_query& q, scratch& x) const {
    const auto index = layout_.head_index(q.layer, q.head);
    const auto& f = layout_.format(index);
    const auto group = q.state->group;
    const auto dv = f.value_size;
    const auto planes = f.key_planes() * host::plane_bytes;
    for (std::size_t u = 0; u < x.units; ++u) x.blocks[u] += planes;
    for (std::size_t first = 0; first < x.units;) {
        auto last = first + 1;  // values don't depend on the sketch generation
        while (last < x.units && units[last].payload.statistics == units[first].payload.statistics) ++last;
        const auto v = units[first].payload.statistics->values(index);
        const auto fields = static_cast<std::int32_t>(v.sketch.fields.size());
        std::fill_n(x.field_sums, group * fields, 0.0F);
        std::fill_n(x.totals, group, 0.0F);
        host::sketch_values(x.blocks + first, static_cast<std::int64_t>(last - first), v.sketch.fields.data(), fields, x.scores + static_cast<std::int64_t>(first) * host::block_tokens, x.stride, group,
                            x.field_sums, x.totals);
        std::fill_n(x.components, group * dv, 0.0F);
        for (std::int32_t i = 0; i < fields; ++i) {
            const auto j = v.sketch.fields[static_cast<std::size_t>(i)].component;
            const auto level = level_of(v.sketch.fields, static_cast<std::size_t>(i), v.sketch.bits[j], v.sketch.step[j]);
            for (std::int32_t g = 0; g < group; ++g) x.components[g * dv + j] += v.typical_scale * (level.factor * x.field_sums[g * fields + i] + level.offset * x.totals[g]);
        }
        host::vector_matrix(x.components, dv, group, v.basis, dv, dv, x.partial, dv);
        for (std::int32_t g = 0; g < group; ++g) {
            for (std::int32_t j = 0; j < dv; ++j) x.partial[g * dv + j] += x.totals[g] * v.mean[j];
            q.state->merge(g, x.max[g], x.totals[g], x.partial + g * dv);
        }
        first = last;
    }
}

void progressive_codec::zoom(sequence& s, const std::vector<unit>& units, const head_query& q, scratch& x, zoom_metrics& metrics) const {
    const auto started = std::chrono::steady_clock::now();
    const auto index = layout_.head_index(q.layer, q.head);
    const auto& f = layout_.format(index);
    for (std::int64_t i = 0; i < x.list.count; ++i) {
        const auto& u = units[static_cast<std::size_t>(x.list.tokens[i] / host::block_tokens)];
        const auto at = x.list.tokens[i] % host::block_tokens;
        x.positions[i] = u.begin + at;
        x.sources[i] = u.payload.exact ? u.payload.exact->as<std::uint8_t>(exact_offset_[static_cast<std::size_t>(index)]) + at * exact_stride(index)
                                       : u.payload.lines->as<std::uint8_t>(layout_.line_offset(index)) + at * f.line_stride;
    }
    const auto line_bytes = options_.exact_tier ? static_cast<std::int32_t>(exact_stride(index)) : f.line_bytes();
    s.cache.resolve(index, {x.positions, static_cast<std::size_t>(x.list.count)}, x.sources, line_bytes, x.lines, metrics);
    metrics.latency.add(static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started).count()));
}

void progressive_codec::attend_exact_lines(const head_query& q, scratch& x) const {
    const auto& f = layout_.format(layout_.head_index(q.layer, q.head));
    const auto group = q.state->group;
    const auto n = x.list.count;
    for (std::int64_t i = 0; i < n; ++i) {
        host::to_float(x.lines[i], stored_, static_cast<std::size_t>(f.key_size), x.exact_keys + i * f.key_size);
        host::to_float(x.lines[i] + static_cast<std::size_t>(f.key_size) * size_of(stored_), stored_, static_cast<std::size_t>(f.value_size), x.exact_values + i * f.value_size);
    }
    host::row_logits(x.exact_keys, n, f.key_size, q.queries, group, x.logits, x.cap);
    std::fill_n(x.partial, group * f.value_size, 0.0F);
    for (std::int32_t g = 0; g < group; ++g) {
        float* w = x.logits + g * x.cap;
        if (q.soft_cap > 0) host::soft_cap(w, n, q.soft_cap);
        x.max[g] = host::max_of(w, n);
        x.totals[g] = host::exp_sum(w, n, x.max[g]);
    }
    host::row_accumulate(x.exact_values, n, f.value_size, x.logits, x.cap, group, x.partial);
    for (std::int32_t g = 0; g < group; ++g) q.state->merge(g, x.max[g], x.totals[g], x.partial + g * f.value_size);
}

void progressive_codec::attend_lines(const std::vector<unit>& units, const head_query& q, scratch& x) const {
    const auto epoch_of = [&](std::int64_t i) { return units[static_cast<std::size_t>(x.list.tokens[i] / host::block_tokens)].payload.statistics.get(); };
    for (std::int64_t first = 0; first < x.list.count;) {
        auto last = first + 1;
        while (last < x.list.count && epoch_of(last) == epoch_of(first)) ++last;
        refine(*epoch_of(first), q, x, first, last - first);
        first = last;
    }
}

// n zoomed tokens of one epoch, in its code space: logits, softmax, values, then one multiply by U.
void progressive_codec::refine(const epoch& e, const head_query& q, scratch& x, std::int64_t first, std::int64_t n) const {
    const auto index = layout_.head_index(q.layer, q.head);
    const auto& f = layout_.format(index);
    const auto group = q.state->group;
    const auto dk = f.key_size, dv = f.value_size;
    const auto lines = e.lines(index);
    const auto v = e.values(index);
    project(e.keys->view(index), q, group, dk, x.t);
    for (std::int32_t g = 0; g < group; ++g) {
        float* t = x.t + g * dk;
        x.query_mean[g] = dot(q.queries + g * dk, e.key_mean(index), dk);
        for (std::int32_t j = 0; j < dk; ++j) t[j] *= lines.key_step[j];
    }
    host::line_logits(x.lines + first, n, lines.key_widths, dk, x.t, x.query_mean, group, x.logits, x.cap);
    for (std::int32_t g = 0; g < group; ++g) {
        float* w = x.logits + g * x.cap;
        if (q.soft_cap > 0) host::soft_cap(w, n, q.soft_cap);
        x.max[g] = host::max_of(w, n);
        x.totals[g] = host::exp_sum(w, n, x.max[g]);
        for (std::int64_t i = 0; i < n; ++i) w[i] *= scale_of(x.lines[first + i][f.key_line_bytes]);
    }
    std::fill_n(x.components, group * dv, 0.0F);
    host::line_accumulate(x.lines + first, n, f.value_line_offset(), lines.value_widths, dv, x.logits, x.cap, group, x.components);
    for (std::int32_t g = 0; g < group; ++g) {
        float* c = x.components + g * dv;
        for (std::int32_t j = 0; j < dv; ++j) c[j] *= lines.value_step[j];
    }
    host::vector_matrix(x.components, dv, group, v.basis, dv, dv, x.partial, dv);
    for (std::int32_t g = 0; g < group; ++g) {
        for (std::int32_t j = 0; j < dv; ++j) x.partial[g * dv + j] += x.totals[g] * v.mean[j];
        q.state->merge(g, x.max[g], x.totals[g], x.partial + g * dv);
    }
}

}  // namespace sekv
