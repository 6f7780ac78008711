// The paper preset's units: which tokens are exact, which form spans, and where everything lies in a unit's pages.
#include "sekv/attend/paper.hpp"

#include <algorithm>
#include <cstring>

namespace sekv {
namespace {

constexpr std::int32_t unit_tokens = 256;  // a truncation leaves at most so many tokens, and the rest of a span, in pages that nothing reads
constexpr auto route_size = paper_weights::route_size;
constexpr std::size_t scales_bytes = 2 * sizeof(float);

constexpr std::size_t up_to_line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr std::size_t wide(std::int64_t n) { return static_cast<std::size_t>(n); }

std::size_t own_header(const paper_block& p) { return up_to_line(sizeof(std::int32_t) * wide(p.own_tokens + 3 * (p.factored() + 1))); }

}  // namespace

paper_codec::paper_codec(const model_shape& model, const options& o, dtype stored, block_pool& pool, executor& exec)
    : model_(model),
      options_((o.validate(), o)),
      stored_(stored),
      pool_(&pool),
      executor_(&exec),
      router_(o.router ? o.router : std::make_shared<paper_weights>(paper_weights::untrained(model))) {
    if (router_->fingerprint != model.fingerprint)
        throw format_error("The router is of model \"" + router_->fingerprint + "\", not of \"" + model.fingerprint + "\"; train one for this model.");
    if (router_->layers.size() != model.layers.size())
        throw format_error("The router has " + std::to_string(router_->layers.size()) + " layers, and the model " + std::to_string(model.layers.size()) +
                           "; train one for this model.");
    for (std::size_t l = 0; l < model.layers.size(); ++l) {
        const auto& shape = model.layers[l];
        const auto& w = router_->layers[l];
        if (w.key_size != shape.key_size || w.weight.size() != wide(route_size) * wide(shape.key_size))
            throw format_error("The router's layer " + std::to_string(l) + " is of key size " + std::to_string(w.key_size) + ", the model's of " +
                               std::to_string(shape.key_size) + ", or its W is no [32, key_size].");
        const bool sealed = shape.kv_source < 0 && !shape.windowed();
        first_head_.push_back(sealed ? static_cast<std::int32_t>(heads_.size()) : -1);
        for (std::int32_t h = 0; sealed && h < shape.kv_heads; ++h) {
            heads_.push_back({static_cast<std::int32_t>(l), h, shape.key_size, shape.value_size, row_size_});
            row_size_ += shape.key_size + shape.value_size;
        }
    }
}

std::int32_t paper_codec::head_index(std::int32_t layer, std::int32_t head) const noexcept {
    const auto first = first_head_[static_cast<std::size_t>(layer)];
    return first < 0 ? -1 : first + head;
}

// Pages.

std::size_t paper_codec::exact_bytes(const payload& p) const noexcept {
    return p.exact_rows == 0 ? 0 : up_to_line(sizeof(std::int32_t) * wide(p.exact_rows)) + wide(p.exact_rows * row_size_) * size_of(stored_);
}

std::size_t paper_codec::summary_bytes(const payload& p) const noexcept {
    if (p.spans == 0) return 0;
    const auto routes = wide(route_size) * sizeof(fp16) * heads_.size();
    return up_to_line(2 * sizeof(std::int32_t) * wide(p.spans)) + wide(p.spans) * (wide(row_size_) * size_of(stored_) + routes);
}

std::size_t paper_codec::factor_bytes(const payload& p) const noexcept {
    if (p.factored() == 0) return 0;
    const auto left = scales_bytes * wide(p.factored()) + 2 * sizeof(fp16) * wide(p.area);
    return own_header(p) + left * heads_.size() + wide(p.ranks * row_size_) * sizeof(fp16);
}

auto paper_codec::view(const payload& p, std::int32_t index) const noexcept -> head_view {
    head_view v{};
    const auto& head = heads_[static_cast<std::size_t>(index)];
    const auto element = size_of(stored_);
    if (p.exact) {
        v.exact_offsets = p.exact->as<std::int32_t>();
        v.exact_keys = p.exact->data() + up_to_line(sizeof(std::int32_t) * wide(p.exact_rows)) + wide(p.exact_rows * head.before) * element;
        v.exact_values = v.exact_keys + wide(p.exact_rows) * wide(head.key_size) * element;
    }
    if (p.summaries) {
        v.span_tokens = p.summaries->as<std::int32_t>();
        v.span_last = v.span_tokens + p.spans;
        v.mean_keys = p.summaries->data() + up_to_line(2 * sizeof(std::int32_t) * wide(p.spans)) +
                      wide(p.spans) * (wide(head.before) * element + wide(index) * wide(route_size) * sizeof(fp16));
        v.mean_values = v.mean_keys + wide(p.spans) * wide(head.key_size) * element;
        v.routes = reinterpret_cast<fp16*>(v.mean_values + wide(p.spans) * wide(head.value_size) * element);
    }
    if (p.factors) {
        v.own_offsets = p.factors->as<std::int32_t>();
        v.first_own = v.own_offsets + p.own_tokens;
        v.first_rank = v.first_own + p.factored() + 1;
        v.first_area = v.first_rank + p.factored() + 1;
        const auto left = scales_bytes * wide(p.factored()) + 2 * sizeof(fp16) * wide(p.area);
        v.factors = p.factors->data() + own_header(p) + left * wide(index) + wide(p.ranks * head.before) * sizeof(fp16);
    }
    return v;
}

std::byte* paper_codec::factors_at(const head_view& v, std::int32_t span, std::int32_t index) const noexcept {
    const auto& head = heads_[static_cast<std::size_t>(index)];
    return v.factors + scales_bytes * wide(span) +
           sizeof(fp16) * (2 * wide(v.first_area[span]) + wide(v.first_rank[span]) * wide(head.key_size + head.value_size));
}

auto paper_codec::factors(const head_view& v, std::int32_t span, std::int32_t index) const noexcept -> span_factors {
    const auto& head = heads_[static_cast<std::size_t>(index)];
    const auto count = v.first_own[span + 1] - v.first_own[span];
    const auto rank = v.first_rank[span + 1] - v.first_rank[span];
    const auto* scales = reinterpret_cast<const float*>(factors_at(v, span, index));
    const auto* left_keys = reinterpret_cast<const fp16*>(scales + 2);
    const auto* left_values = left_keys + count * rank;
    const auto* right_keys = left_values + count * rank;
    return {{left_keys, right_keys, scales[0], count, head.key_size, rank},
            {left_values, right_keys + rank * head.key_size, scales[1], count, head.value_size, rank},
            v.own_offsets + v.first_own[span]};
}

// Units.

// What goes where in one unit; offsets count from its begin.
struct paper_codec::unit_plan {
    std::int64_t begin = 0;
    std::int32_t count = 0;
    payload block;
    std::vector<std::int32_t> exact, own;
    std::vector<std::int32_t> first_own{0}, first_rank{0}, first_area{0};

    void close_factored(std::int32_t most_rank) {
        const auto tokens = static_cast<std::int32_t>(own.size()) - first_own.back();
        const auto rank = std::min(most_rank, tokens);
        first_own.push_back(static_cast<std::int32_t>(own.size()));
        first_rank.push_back(first_rank.back() + rank);
        first_area.push_back(first_area.back() + tokens * rank);
        block.own_tokens = first_own.back();
        block.ranks = first_rank.back();
        block.area = first_area.back();
    }
};

auto paper_codec::plan_units(token_range range, const segmenter& spans) const -> std::vector<unit_plan> {
    std::vector<unit_plan> units;
    const auto anchor = [&](std::int64_t t) { return t < spans.length() && spans.is_anchor(t); };
    for (auto at = range.begin; at < range.end();) {
        if (units.empty() || units.back().count >= unit_tokens) units.emplace_back().begin = at;
        auto& u = units.back();
        const bool sinks = at == 0 && model_.sinks > 0;  // the cache keeps these as exact rows
        const auto span_end = sinks ? model_.sinks : at < spans.length() ? spans.span_at(at).end : at + spans.options().l_max;
        const auto end = std::min(span_end, range.end());
        std::int64_t own = 0;
        for (auto t = at; t < end; ++t) own += anchor(t) ? 0 : 1;
        for (auto t = at; t < end; ++t) (sinks || (own > 1 && !anchor(t)) ? u.own : u.exact).push_back(static_cast<std::int32_t>(t - u.begin));
        if (sinks) u.block.sinks = static_cast<std::int32_t>(end);
        if (!sinks && own > 1) ++u.block.spans;
        if (sinks || own > 1) u.close_factored(options_.rank);
        u.block.exact_rows = static_cast<std::int32_t>(u.exact.size());
        u.count = static_cast<std::int32_t>(end - u.begin);
        at = end;
    }
    return units;
}

auto paper_codec::make_unit(const unit_plan& p) -> unit {
    unit u{p.begin, p.count, p.block};
    auto& b = u.payload;
    if (b.exact_rows > 0) b.exact = pool_->make(tier::device, kind::exact, exact_bytes(b));
    if (b.spans > 0) b.summaries = pool_->make(tier::device, kind::sketch, summary_bytes(b));
    if (b.factored() > 0) b.factors = pool_->make(tier::host, kind::lines, factor_bytes(b));
    const auto v = view(b, 0);
    std::copy(p.exact.begin(), p.exact.end(), v.exact_offsets);
    std::copy(p.own.begin(), p.own.end(), v.own_offsets);
    if (b.factors) {
        std::copy(p.first_own.begin(), p.first_own.end(), v.first_own);
        std::copy(p.first_rank.begin(), p.first_rank.end(), v.first_rank);
        std::copy(p.first_area.begin(), p.first_area.end(), v.first_area);
    }
    for (std::int32_t s = 0; s < b.spans; ++s) {
        const auto first = static_cast<std::size_t>(s + b.factored() - b.spans);
        v.span_tokens[s] = p.first_own[first + 1] - p.first_own[first];
        v.span_last[s] = p.own[static_cast<std::size_t>(p.first_own[first + 1]) - 1];
    }
    return u;
}

demand paper_codec::seal_bytes(const sequence&, const std::vector<unit>&, token_range range, std::int64_t, const segmenter& spans) const {
    demand d;
    for (const auto& p : plan_units(range, spans)) d += {exact_bytes(p.block) + summary_bytes(p.block), factor_bytes(p.block)};
    return d;
}

usage paper_codec::sequence_usage(const sequence&, const std::vector<unit>& units) const {
    usage sum;
    for (const auto& u : units) {
        if (u.payload.exact) sum.at(tier::device, kind::exact) += u.payload.exact->size();
        if (u.payload.summaries) sum.at(tier::device, kind::sketch) += u.payload.summaries->size();
        if (u.payload.factors) sum.at(tier::host, kind::lines) += u.payload.factors->size();
    }
    return sum;
}

auto paper_codec::seal(sequence&, const std::vector<unit>&, const seal_request& request) -> std::vector<unit> {
    std::vector<unit> units;
    for (const auto& p : plan_units(request.all(), *request.spans)) units.push_back(make_unit(p));
    const auto heads = static_cast<std::int64_t>(heads_.size());
    executor_->run(heads * static_cast<std::int64_t>(units.size()), [&](std::int64_t task, std::int32_t) {
        const auto& u = units[static_cast<std::size_t>(task / heads)];
        const auto index = static_cast<std::int32_t>(task % heads);
        encode_exact(u, *request.rows, index);
        for (std::int32_t s = 0; s < u.payload.factored(); ++s) encode_span(u, s, *request.rows, *request.spans, index);
    });
    return units;
}

}  // namespace sekv
