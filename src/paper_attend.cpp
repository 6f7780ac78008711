// The paper preset's decode attention: anchors exactly, relevant spans token by token out of their factors, the others as one row each.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "sekv/attend/exact.hpp"
#include "sekv/attend/paper.hpp"

namespace sekv {
namespace {

constexpr auto route_size = paper_weights::route_size;
constexpr std::int64_t width = host::block_tokens;

// How many of ascending offsets lie below the limit.
std::int64_t below(const std::int32_t* offsets, std::int64_t count, std::int64_t limit) noexcept {
    return std::lower_bound(offsets, offsets + count, limit) - offsets;
}

}  // namespace

// Of a size that doesn't depend on the sequence.
struct paper_codec::scratch {
    std::int32_t index = 0;
    float threshold = 0;            ///< on q'.s / sqrt(32) + ln|S|: sigmoid(threshold) = tau
    float* query = nullptr;         ///< [key_size]: the group's mean, without the logit scale
    float* route = nullptr;         ///< [32]: q' / sqrt(32)
    float* relevance = nullptr;     ///< [64]
    float* bias = nullptr;          ///< [64]: ln|S|, -infinity for a span that is not attended through its mean
    float* logits = nullptr;        ///< [group, 64]
    float* keys = nullptr;          ///< [64, key_size]
    float* values = nullptr;        ///< [64, value_size]
    float* left = nullptr;          ///< [64, rank]
    float* right_keys = nullptr;    ///< [rank, key_size]
    float* right_values = nullptr;  ///< [rank, value_size]
    std::uint64_t fetched = 0;      ///< tokens of this list, and how long they took
    std::uint64_t nanoseconds = 0;

    void layout(arena& a, std::int32_t key_size, std::int32_t value_size, std::int32_t group, std::int32_t rank) {
        query = a.take<float>(key_size);
        route = a.take<float>(route_size);
        relevance = a.take<float>(width);
        bias = a.take<float>(width);
        logits = a.take<float>(group * width);
        keys = a.take<float>(width * key_size);
        values = a.take<float>(width * value_size);
        left = a.take<float>(width * rank);
        right_keys = a.take<float>(rank * key_size);
        right_values = a.take<float>(rank * value_size);
    }
};

void paper_codec::layout_scratch(arena& a, std::int32_t layer, std::int32_t group, std::int64_t) const {
    const auto index = head_index(layer, 0);
    if (index < 0) return;
    const auto& head = heads_[static_cast<std::size_t>(index)];
    scratch().layout(a, head.key_size, head.value_size, group, options_.rank);
}

void paper_codec::attend(sequence&, const std::vector<unit>& units, const head_query& q, arena a, zoom_metrics& metrics) const {
    if (units.empty() || units.front().begin > q.position) return;
    scratch x;
    x.index = head_index(q.layer, q.head);
    const auto& head = heads_[static_cast<std::size_t>(x.index)];
    x.layout(a, head.key_size, head.value_size, q.state->group, options_.rank);
    route(q, x);
    for (const auto& u : units) {
        if (u.begin > q.position) break;
        const auto limit = std::min<std::int64_t>(u.count, q.position + 1 - u.begin);
        const auto v = view(u.payload, x.index);
        attend_exact(u, v, limit, q, x);
        attend_spans(u, v, limit, q, x, metrics);
    }
    ++metrics.zooms;
    metrics.tokens += x.fetched;
    metrics.misses += x.fetched;
    metrics.most_tokens = std::max(metrics.most_tokens, x.fetched);
    if (x.fetched > 0) metrics.latency.add(x.nanoseconds);
}

void paper_codec::route(const head_query& q, scratch& x) const {
    const auto& head = heads_[static_cast<std::size_t>(x.index)];
    const auto& w = router_->layers[static_cast<std::size_t>(head.layer)];
    const auto group = q.state->group;
    const float factor = 1.0F / (static_cast<float>(group) * q.scale * std::sqrt(static_cast<float>(route_size)));
    std::fill_n(x.query, head.key_size, 0.0F);
    for (std::int32_t g = 0; g < group; ++g) {
        for (std::int32_t j = 0; j < head.key_size; ++j) x.query[j] += factor * q.queries[g * head.key_size + j];
    }
    host::row_logits(w.weight.data(), route_size, head.key_size, x.query, 1, x.route, route_size);
    const float tau = options_.tau > 0 ? options_.tau : w.tau;
    x.threshold = std::log(tau / (1.0F - tau));
}

void paper_codec::attend_exact(const unit& u, const head_view& v, std::int64_t limit, const head_query& q, scratch& x) const {
    const auto& head = heads_[static_cast<std::size_t>(x.index)];
    const auto rows = below(v.exact_offsets, u.payload.exact_rows, limit);
    const auto dk = static_cast<std::size_t>(head.key_size), dv = static_cast<std::size_t>(head.value_size);
    for (std::int64_t at = 0; at < rows; at += width) {
        const auto n = std::min(width, rows - at);
        const auto first = static_cast<std::size_t>(at) * size_of(stored_);
        host::to_float(v.exact_keys + first * dk, stored_, static_cast<std::size_t>(n) * dk, x.keys);
        host::to_float(v.exact_values + first * dv, stored_, static_cast<std::size_t>(n) * dv, x.values);
        attend_rows(x.keys, x.values, n, head.key_size, q.queries, q.soft_cap, *q.state, x.logits);
    }
}

void paper_codec::attend_spans(const unit& u, const head_view& v, std::int64_t limit, const head_query& q, scratch& x, zoom_metrics& metrics) const {
    const auto hidden = u.payload.factored() - u.payload.spans;
    for (std::int32_t first = 0; first < u.payload.spans; first += static_cast<std::int32_t>(width)) {
        const auto n = std::min<std::int32_t>(static_cast<std::int32_t>(width), u.payload.spans - first);
        host::row_logits(v.routes + first * route_size, n, route_size, x.route, 1, x.relevance, width);
        bool any = false;
        for (std::int32_t i = 0; i < n; ++i) {
            const float size = std::log(static_cast<float>(v.span_tokens[first + i]));
            const bool whole = v.span_last[first + i] < limit;
            const bool coarse = whole && !(x.relevance[i] + size > x.threshold);
            x.bias[i] = coarse ? size : softmax_state::empty_max;
            any = any || coarse;
        }
        if (any) attend_means(v, first, n, q, x);
        for (std::int32_t i = 0; i < n; ++i) {
            if (std::isinf(x.bias[i])) attend_tokens(factors(v, hidden + first + i, x.index), limit, q, x, metrics);
        }
    }
}

void paper_codec::attend_means(const head_view& v, std::int32_t first, std::int32_t count, const head_query& q, scratch& x) const {
    const auto& head = heads_[static_cast<std::size_t>(x.index)];
    const auto dk = static_cast<std::size_t>(head.key_size), dv = static_cast<std::size_t>(head.value_size), n = static_cast<std::size_t>(count);
    const auto at = static_cast<std::size_t>(first) * size_of(stored_);
    host::to_float(v.mean_keys + at * dk, stored_, n * dk, x.keys);
    host::to_float(v.mean_values + at * dv, stored_, n * dv, x.values);
    auto& state = *q.state;
    host::row_logits(x.keys, count, head.key_size, q.queries, state.group, x.logits, width);
    for (std::int32_t g = 0; g < state.group; ++g) {
        float* row = x.logits + g * width;
        if (q.soft_cap > 0) host::soft_cap(row, count, q.soft_cap);
        for (std::int32_t i = 0; i < count; ++i) row[i] += x.bias[i];
        const float shift = state.raise(g, host::max_of(row, count));
        state.weight[g] += host::exp_sum(row, count, shift);
    }
    host::row_accumulate(x.values, count, head.value_size, x.logits, width, state.group, state.sums);
}

void paper_codec::attend_tokens(const span_factors& f, std::int64_t limit, const head_query& q, scratch& x, zoom_metrics& metrics) const {
    const auto tokens = below(f.offsets, f.keys.count, limit);
    if (tokens == 0) return;
    const auto now = [] { return std::chrono::steady_clock::now(); };
    auto started = now();
    const auto rank = static_cast<std::int64_t>(f.keys.rank);
    metrics.bytes += 2 * sizeof(float) + sizeof(fp16) * static_cast<std::size_t>(2 * tokens * rank + rank * (f.keys.size + f.values.size));
    x.fetched += static_cast<std::uint64_t>(tokens);
    expand_right(f.keys, x.right_keys);
    expand_right(f.values, x.right_values);
    for (std::int64_t at = 0; at < tokens; at += width) {
        const auto n = std::min(width, tokens - at);
        expand_rows(f.keys, at, n, x.right_keys, x.left, x.keys);
        expand_rows(f.values, at, n, x.right_values, x.left, x.values);
        x.nanoseconds += static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now() - started).count());
        attend_rows(x.keys, x.values, n, f.keys.size, q.queries, q.soft_cap, *q.state, x.logits);
        started = now();
    }
}

void paper_codec::decode(const unit& u, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const {
    const auto index = head_index(layer, head);
    const auto& place = heads_[static_cast<std::size_t>(index)];
    const auto v = view(u.payload, index);
    const auto dk = place.key_size, dv = place.value_size;
    const auto first = range.begin - u.begin, last = range.end() - u.begin;
    for (auto i = below(v.exact_offsets, u.payload.exact_rows, first); i < u.payload.exact_rows && v.exact_offsets[i] < last; ++i) {
        const auto to = v.exact_offsets[i] - first;
        host::to_float(v.exact_keys + static_cast<std::size_t>(i * dk) * size_of(stored_), stored_, static_cast<std::size_t>(dk), keys + to * dk);
        host::to_float(v.exact_values + static_cast<std::size_t>(i * dv) * size_of(stored_), stored_, static_cast<std::size_t>(dv), values + to * dv);
    }
    const auto end = below(v.own_offsets, u.payload.own_tokens, last);
    for (auto own = below(v.own_offsets, u.payload.own_tokens, first); own < end;) {
        const auto span = static_cast<std::int32_t>(std::upper_bound(v.first_own, v.first_own + u.payload.factored() + 1, own) - v.first_own - 1);
        const auto f = factors(v, span, index);
        const auto at = own - v.first_own[span];
        const auto n = std::min(end - own, f.keys.count - at);
        const auto rank = static_cast<std::size_t>(f.keys.rank);
        std::vector<float> left(static_cast<std::size_t>(n) * rank), right(rank * static_cast<std::size_t>(std::max(dk, dv))),
            rows(static_cast<std::size_t>(n * std::max(dk, dv)));
        const auto scatter = [&](const svd_view& half, float* to) {
            expand_right(half, right.data());
            expand_rows(half, at, n, right.data(), left.data(), rows.data());
            for (std::int64_t i = 0; i < n; ++i) std::copy_n(rows.data() + i * half.size, half.size, to + (f.offsets[at + i] - first) * half.size);
        };
        scatter(f.keys, keys);
        scatter(f.values, values);
        own += n;
    }
}

}  // namespace sekv
