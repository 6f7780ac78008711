// Definitions of basic_cache. Included by cache.hpp.
#pragma once

#include "sekv/cache.hpp"

namespace sekv {

template <scalar S, backend B, codec C>
basic_cache<S, B, C>::basic_cache(model_shape model, const cache_options& options, const codec_options& codec, B where)
    : model_((model.validate(), std::move(model))),
      options_((options.validate(), options)),
      backend_(std::move(where)),
      memory_(std::make_shared<memory>(backend_.resource(), options.device_budget, options.host_budget)),
      pool_(memory_),
      codec_(make_codec(codec)),
      residency_(model_, options_, pool_, codec_),
      engine_(model_, options_, backend_, pool_, residency_, codec_),
      fixed_(memory_->used().total(tier::device)) {}

// A codec whose work runs on the backend's device takes the backend, one that runs on the host its executor.
template <scalar S, backend B, codec C>
C basic_cache<S, B, C>::make_codec(const codec_options& o) {
    if constexpr (std::constructible_from<C, const model_shape&, const codec_options&, dtype, block_pool&, B&>)
        return C(model_, o, dtype_of<S>, pool_, backend_);
    else
        return C(model_, o, dtype_of<S>, pool_, backend_.exec());
}

// Sequences.

template <scalar S, backend B, codec C>
auto basic_cache<S, B, C>::at(sequence s) const -> const record& {
    if (s.generation == 0 || s.index >= slots_.size() || slots_[s.index].generation != s.generation || !slots_[s.index].state)
        throw state_error("Sequence " + std::to_string(s.index) + " (generation " + std::to_string(s.generation) + ") is not open in this cache; it was closed, or belongs to another cache.");
    return *slots_[s.index].state;
}

template <scalar S, backend B, codec C>
sequence basic_cache<S, B, C>::admit(std::unique_ptr<record> r) {
    const auto free = std::find_if(slots_.begin(), slots_.end(), [](const slot& x) { return !x.state; });
    if (free == slots_.end()) {
        slots_.push_back({1, std::move(r)});
        return {static_cast<std::uint32_t>(slots_.size() - 1), 1};
    }
    free->state = std::move(r);
    return {static_cast<std::uint32_t>(free - slots_.begin()), ++free->generation};
}

template <scalar S, backend B, codec C>
sequence basic_cache<S, B, C>::open(const sequence_options& options) {
    constexpr std::int64_t longest = std::int64_t{1} << 30;  // zoom lists index tokens with 32 bits
    if (options.capacity < 1 || options.capacity > longest) throw invalid_argument("sequence_options::capacity must be 1 to " + std::to_string(longest) + " tokens, not " + std::to_string(options.capacity) + ".");
    auto r = std::make_unique<record>(record{options.device_quota > 0 ? options.device_quota : default_quota(options.capacity), options.capacity, {}, nullptr, 0, {}, codec_.open(options.capacity), segmenter(options_.spans), {},
                                             std::vector<std::int64_t>(model_.layers.size(), 0), 0, true});
    if (options_.spans.policy == span_policy::key_novelty) {
        const auto& l = model_.layers[static_cast<std::size_t>(residency_.novelty_layer())];
        r->novelty.emplace(l.kv_heads, l.key_size);
    }
    const auto fixed = residency_.used_by(*r).total(tier::device);
    if (fixed > r->quota)
        throw budget_error("A device quota of " + std::to_string(r->quota) + " bytes can't hold a sequence's line cache of " + std::to_string(fixed) + " bytes; raise it, or lower line_slots.", fixed, r->quota);
    return admit(std::move(r));
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::close(sequence s) {
    (void)at(s);
    if (std::any_of(own_plan_.items_.begin(), own_plan_.items_.end(), [&](const batch_item& i) { return i.seq == s; })) own_plan_ = plan();
    slots_[s.index].state.reset();
}

template <scalar S, backend B, codec C>
std::int64_t basic_cache<S, B, C>::settled_length(const record& r, const char* call) const {
    const auto length = residency_.common_length(r);
    if (length < 0) throw state_error(std::string(call) + " was called in the middle of a step: append the step's tokens to all layers first.");
    return length;
}

template <scalar S, backend B, codec C>
std::int64_t basic_cache<S, B, C>::length(sequence s) const {
    return settled_length(at(s), "length");
}

template <scalar S, backend B, codec C>
sequence basic_cache<S, B, C>::fork(sequence s, std::int64_t length) {
    auto& r = at(s);
    const auto all = settled_length(r, "fork");
    if (length < -1 || length > all) throw invalid_argument("fork takes a length of 0 to " + std::to_string(all) + " tokens (or -1 for all), not " + std::to_string(length) + ".");
    engine_.follow(r);
    auto child = std::make_unique<record>(residency_.fork(r, length < 0 ? all : length));
    engine_.restart_novelty(*child);
    return admit(std::move(child));
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::truncate(sequence s, std::int64_t length) {
    auto& r = at(s);
    const auto all = residency_.least_length(r);
    if (length < 0 || length > all) throw invalid_argument("truncate takes a length of 0 to " + std::to_string(all) + " tokens, not " + std::to_string(length) + ".");
    engine_.follow(r);
    residency_.truncate(r, length);
    engine_.restart_novelty(r);
}

// Filling.

template <scalar S, backend B, codec C>
const layer_shape& basic_cache<S, B, C>::checked_layer(std::int32_t layer) const {
    if (layer < 0 || static_cast<std::size_t>(layer) >= model_.layers.size())
        throw invalid_argument("There is no layer " + std::to_string(layer) + "; the model has " + std::to_string(model_.layers.size()) + ".");
    return model_.layers[static_cast<std::size_t>(layer)];
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::check_rows(const char* what, const rows_view& v, std::int64_t tokens, std::int32_t heads, std::int32_t size) const {
    if (v.tokens == tokens && v.heads == heads && v.size == size && (v.data != nullptr || tokens == 0)) return;
    const auto shape = [](std::int64_t t, std::int32_t h, std::int32_t d) { return "[" + std::to_string(t) + ", " + std::to_string(h) + ", " + std::to_string(d) + "]"; };
    throw invalid_argument(std::string(what) + " must be " + shape(tokens, heads, size) + " with data, not " + shape(v.tokens, v.heads, v.size) + (v.data == nullptr ? " without." : "."));
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::reserve(sequence s, std::int64_t tokens) {
    auto& r = at(s);
    const auto length = settled_length(r, "reserve");
    if (tokens < 0 || tokens > r.capacity - length)
        throw invalid_argument("Can't reserve " + std::to_string(tokens) + " tokens after " + std::to_string(length) + ": the sequence was opened for " + std::to_string(r.capacity) + ".");
    engine_.check();
    engine_.follow(r);
    residency_.reserve(r, length, tokens);
    engine_.settle(r);
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::append(sequence s, std::int32_t layer, const rows_view& keys, const rows_view& values, std::int64_t position, const rows_view* queries) {
    auto& r = at(s);
    const auto& l = checked_layer(layer);
    if (l.kv_source >= 0) throw invalid_argument("Layer " + std::to_string(layer) + " reads the K and V of layer " + std::to_string(l.kv_source) + "; append to that one only.");
    check_rows("keys", keys, keys.tokens, l.kv_heads, l.key_size);
    check_rows("values", values, keys.tokens, l.kv_heads, l.value_size);
    if (queries != nullptr) check_rows("queries", *queries, keys.tokens, l.query_heads(), l.key_size);
    if (keys.tokens < 1) throw invalid_argument("append takes at least one token, not " + std::to_string(keys.tokens) + ".");
    auto& length = r.lengths[static_cast<std::size_t>(layer)];
    if (position >= 0 && position != length)
        throw invalid_argument("Tokens out of order: layer " + std::to_string(layer) + " holds " + std::to_string(length) + " tokens, and the next to append is at position " + std::to_string(position) + ".");
    if (keys.tokens > r.capacity - length)
        throw invalid_argument("Can't append " + std::to_string(keys.tokens) + " tokens after " + std::to_string(length) + ": the sequence was opened for " + std::to_string(r.capacity) + ".");
    const auto k = engine_.stage("Keys", keys);
    const auto v = engine_.stage("Values", values);
    if (length + keys.tokens > r.reserved) {
        if (residency_.common_length(r) < 0)
            throw state_error("Layer " + std::to_string(layer) + " would run to " + std::to_string(length + keys.tokens) + " tokens, past the " + std::to_string(r.reserved) + " that this step reserved; append equal counts to all layers.");
        reserve(s, keys.tokens);
    }
    const step_item<C> item{&r, keys.tokens, length, 0};
    engine_.write({&item, 1}, layer, k, v);
    if (queries != nullptr) engine_.observe(item, layer, *queries);  // last of what can fail: the rows count from here on, and a call made again must not count queries twice
    length += keys.tokens;
    if (r.novelty && layer == residency_.novelty_layer()) engine_.follow_novelty(r, layer, k, 0, keys.tokens);
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::begin_step(plan& p) {
    check_plan(p);
    for (const auto& i : p.items_) {
        if (i.seq.generation == 0) continue;
        const auto& r = at(i.seq);
        const auto length = settled_length(r, "begin_step");
        if (i.position >= 0 && i.position != length)
            throw invalid_argument("begin_step takes plans whose items follow their sequences: sequence " + std::to_string(i.seq.index) + " has " + std::to_string(length) + " tokens, and its item begins at " + std::to_string(i.position) + ".");
    }
    for (const auto& i : p.items_) {
        if (i.seq.generation != 0) reserve(i.seq, i.tokens);
    }
    engine_.begin_step(p, resolve_append(p, -1));
}

// The items of a plan as a step appends to them; layer -1: their common lengths.
template <scalar S, backend B, codec C>
std::vector<step_item<C>> basic_cache<S, B, C>::resolve_append(const plan& p, std::int32_t layer) {
    std::vector<step_item<C>> out;
    std::int64_t row = 0;
    for (const auto& i : p.items_) {
        if (i.seq.generation != 0) {
            auto& r = at(i.seq);
            out.push_back({&r, i.tokens, layer < 0 ? settled_length(r, "begin_step") : r.lengths[static_cast<std::size_t>(layer)], row});
            if (out.back().position + i.tokens > r.reserved)
                throw state_error("Layer " + std::to_string(layer) + " of sequence " + std::to_string(i.seq.index) + " would run to " + std::to_string(out.back().position + i.tokens) + " tokens, past the " +
                                  std::to_string(r.reserved) + " that are reserved; call begin_step before the step's first append.");
        }
        row += i.tokens;
    }
    return out;
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::append(plan& p, std::int32_t layer, const rows_view& keys, const rows_view& values) {
    check_plan(p);
    const auto& l = checked_layer(layer);
    if (l.kv_source >= 0) throw invalid_argument("Layer " + std::to_string(layer) + " reads the K and V of layer " + std::to_string(l.kv_source) + "; append to that one only.");
    check_rows("keys", keys, p.tokens_, l.kv_heads, l.key_size);
    check_rows("values", values, p.tokens_, l.kv_heads, l.value_size);
    const auto items = resolve_append(p, layer);
    const auto k = engine_.stage("Keys", keys);
    const auto v = engine_.stage("Values", values);
    engine_.write(p, items, layer, k, v);
    for (const auto& i : items) {
        i.record->lengths[static_cast<std::size_t>(layer)] += i.tokens;
        if (i.record->novelty && layer == residency_.novelty_layer()) engine_.follow_novelty(*i.record, layer, k, i.row, i.tokens);
    }
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::replayed(plan& p) {
    check_plan(p);
    const auto items = resolve_append(p, -1);
    engine_.replayed(p, items);
    for (const auto& i : items) {
        for (std::size_t l = 0; l < model_.layers.size(); ++l) i.record->lengths[l] += model_.layers[l].kv_source < 0 ? i.tokens : 0;
    }
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::check_plan(const plan& p) const {
    if (p.owner_ != memory_.get()) throw invalid_argument("The plan is empty or was made by another cache; use make_plan of this one.");
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::observe(sequence s, std::span<const float> surprisal) {
    auto& r = at(s);
    if (r.novelty) throw state_error("This cache segments by key novelty, which it takes from the keys; observe is for surprisal.");
    const auto most = *std::max_element(r.lengths.begin(), r.lengths.end());
    const auto after = r.spans.length() + static_cast<std::int64_t>(surprisal.size());
    if (after > most)
        throw invalid_argument("observe got surprisal up to token " + std::to_string(after) + ", but only " + std::to_string(most) + " tokens were appended.");
    r.spans.push(surprisal);
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::cut(sequence s, std::span<const std::int64_t> positions) {
    auto& r = at(s);
    r.spans.cut(positions);
    if (r.novelty) r.novelty->cut(std::max(r.spans.open_begin(), r.novelty->begin()));
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::begin_prefill(sequence s) {
    auto& r = at(s);
    (void)settled_length(r, "begin_prefill");
    r.prefilling = true;
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::end_prefill(sequence s) {
    auto& r = at(s);
    const auto length = settled_length(r, "end_prefill");
    engine_.check();
    engine_.follow(r);
    own_plan_ = plan();  // a prompt chunk's workspace is wider than a decode step's
    residency_.end_prefill(r, length);
    engine_.settle(r);
}

// Attention.

// The batch's query tokens. Sequences are in it once: two items would share line cache and metric.
template <scalar S, backend B, codec C>
std::int64_t basic_cache<S, B, C>::checked_tokens(std::span<const batch_item> items) const {
    constexpr std::int64_t most = std::int64_t{1} << 30;
    std::int64_t tokens = 0;
    for (const auto& i : items) {
        if (i.tokens < 1 || i.tokens > most - tokens) throw invalid_argument("A batch item must have at least one query token, and a batch at most " + std::to_string(most) + ", not " + std::to_string(i.tokens) + ".");
        tokens += i.tokens;
        if (i.seq.generation == 0) continue;
        (void)at(i.seq);
        if (std::count_if(items.begin(), items.end(), [&](const batch_item& x) { return x.seq == i.seq; }) > 1)
            throw invalid_argument("Sequence " + std::to_string(i.seq.index) + " is in the batch twice; give all its query tokens as one item.");
    }
    return tokens;
}

template <scalar S, backend B, codec C>
plan basic_cache<S, B, C>::make_plan(std::span<const batch_item> items, resolution how) {
    plan p;
    p.owner_ = memory_.get();
    p.items_.assign(items.begin(), items.end());
    p.how_ = how;
    p.tokens_ = checked_tokens(items);
    for (const auto& i : items) {
        if (i.seq.generation != 0) p.longest_ = std::max(p.longest_, at(i.seq).scored_tokens() + i.tokens);
    }
    engine_.size(p, p.tokens_ > 0 ? resolve_sizes(p) : std::vector<const record*>{});
    const auto bytes = p.workspace_bytes_;
    for (auto& x : slots_) {
        if (x.state && memory_->available(tier::device) < bytes) residency_.relieve(*x.state, bytes - memory_->available(tier::device));
    }
    p.workspace_ = memory_->allocate(tier::device, kind::workspace, bytes);
    return p;
}

template <scalar S, backend B, codec C>
auto basic_cache<S, B, C>::resolve_sizes(const plan& p) const -> std::vector<const record*> {
    std::vector<const record*> out;
    for (const auto& i : p.items_) out.push_back(i.seq.generation != 0 ? &at(i.seq) : nullptr);
    return out;
}

// What a sequence may use by default: its share of the budget, less the workspace of a decode step at its capacity.
template <scalar S, backend B, codec C>
std::uint64_t basic_cache<S, B, C>::default_quota(std::int64_t capacity) const {
    if (options_.device_budget == memory::unlimited) return memory::unlimited;
    plan decode;
    decode.items_.assign(static_cast<std::size_t>(options_.max_sequences), {});
    decode.tokens_ = options_.max_sequences;
    decode.longest_ = capacity;
    engine_.size(decode, {});
    const auto taken = fixed_ + decode.workspace_bytes_;
    return options_.device_budget > taken ? (options_.device_budget - taken) / static_cast<std::uint64_t>(options_.max_sequences) : 0;
}

template <scalar S, backend B, codec C>
std::vector<step_item<C>> basic_cache<S, B, C>::resolve(std::span<const batch_item> items, std::int32_t layer) {
    const auto& shape = model_.layers[static_cast<std::size_t>(layer)];
    const auto owner = static_cast<std::size_t>(shape.kv_source >= 0 ? shape.kv_source : layer);
    std::vector<step_item<C>> out;
    std::int64_t row = 0;
    for (const auto& i : items) {
        if (i.seq.generation != 0) {
            auto& r = at(i.seq);
            const auto held = r.lengths[owner];
            const auto position = i.position < 0 ? held - i.tokens : i.position;
            if (position < 0 || position > held - i.tokens)
                throw state_error("A batch asks for " + std::to_string(i.tokens) + " queries from position " + std::to_string(position) + " on, but layer " + std::to_string(layer) + " holds " +
                                  std::to_string(held) + " tokens; append their K and V first.");
            const auto seen = std::max<std::int64_t>(0, position + 1 - shape.sliding_window);
            if (shape.windowed() && seen < residency_.first_held(r, static_cast<std::int32_t>(owner)))
                throw state_error("A query at position " + std::to_string(position) + " sees tokens from " + std::to_string(seen) + " on, but sliding-window layer " + std::to_string(layer) + " dropped those before " +
                                  std::to_string(residency_.first_held(r, static_cast<std::int32_t>(owner))) + "; ask while they are at most `rejectable` tokens behind the window.");
            out.push_back({&r, i.tokens, position, row});
        }
        row += i.tokens;
    }
    return out;
}

template <scalar S, backend B, codec C>
state_error basic_cache<S, B, C>::outgrown(const plan& p, const record& r) {
    return state_error("The plan was made for up to " + std::to_string(p.longest_) + " tokens, and a sequence has " + std::to_string(r.scored_tokens()) + ", or was sealed in the meantime; make a new plan.");
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::attend(plan& p, std::int32_t layer, const rows_view& queries, const out_view& out, float* lse) {
    const auto& l = checked_layer(layer);
    check_plan(p);
    check_rows("queries", queries, p.tokens_, l.query_heads(), l.key_size);
    if (out.data == nullptr || out.tokens != p.tokens_ || out.heads != l.query_heads() || out.size != l.value_size)
        throw invalid_argument("out must be [" + std::to_string(p.tokens_) + ", " + std::to_string(l.query_heads()) + ", " + std::to_string(l.value_size) + "], not [" + std::to_string(out.tokens) + ", " +
                               std::to_string(out.heads) + ", " + std::to_string(out.size) + "].");
    const auto items = resolve(p.items_, layer);
    for (const auto& i : items) {
        if (i.record->scored_tokens() > p.longest_ || !engine_.covers(p, *i.record)) throw outgrown(p, *i.record);
    }
    engine_.attend(p, layer, items, queries, out, lse, zooms_);
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::attend(std::span<const batch_item> items, std::int32_t layer, const rows_view& queries, resolution how, const out_view& out, float* lse) {
    const auto same = [](const batch_item& a, const batch_item& b) { return a.seq == b.seq && a.tokens == b.tokens && a.position == b.position; };
    bool fits = own_plan_.how_ == how && std::equal(items.begin(), items.end(), own_plan_.items_.begin(), own_plan_.items_.end(), same) && own_plan_.tokens_ > 0;
    for (const auto& i : items) {
        if (i.seq.generation == 0) continue;
        fits = fits && at(i.seq).scored_tokens() <= own_plan_.longest_ && engine_.covers(own_plan_, at(i.seq));
    }
    if (!fits) {
        (void)checked_layer(layer);
        (void)checked_tokens(items);
        (void)resolve(items, layer);  // positions that aren't there are refused before memory is taken
        own_plan_ = plan();  // its workspace goes before the next one comes
        own_plan_ = make_plan(items, how);
    }
    attend(own_plan_, layer, queries, out, lse);
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::prefetch(plan& p, std::int32_t layer, const rows_view& queries) {
    const auto& l = checked_layer(layer);
    check_plan(p);
    check_rows("queries", queries, p.tokens_, l.query_heads(), l.key_size);
    std::vector<step_item<C>> items;
    std::int64_t row = 0;
    for (const auto& i : p.items_) {
        if (i.seq.generation != 0) {
            auto& r = at(i.seq);
            if (r.scored_tokens() > p.longest_ || !engine_.covers(p, r)) throw outgrown(p, r);
            items.push_back({&r, i.tokens, residency_.least_length(r), row});
        }
        row += i.tokens;
    }
    engine_.prefetch(p, layer, items, queries);
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::materialize(sequence s, std::int32_t layer, std::int64_t begin, std::int64_t count, const out_view& keys, const out_view& values) const {
    const auto& r = at(s);
    const auto& l = checked_layer(layer);
    const auto owner = l.kv_source >= 0 ? l.kv_source : layer;
    const auto held = r.lengths[static_cast<std::size_t>(owner)];
    const auto first = residency_.first_held(r, owner);
    if (count < 0 || begin < first || begin > held || count > held - begin)
        throw invalid_argument("Layer " + std::to_string(layer) + " holds tokens [" + std::to_string(first) + ", " + std::to_string(held) + "); can't materialise [" + std::to_string(begin) + ", " +
                               std::to_string(begin) + " + " + std::to_string(count) + ").");
    const auto fits = [&](const out_view& v, std::int32_t size) { return v.tokens == count && v.heads == l.kv_heads && v.size == size && (v.data != nullptr || count == 0); };
    if (!fits(keys, l.key_size) || !fits(values, l.value_size))
        throw invalid_argument("materialize writes keys and values of [" + std::to_string(count) + ", " + std::to_string(l.kv_heads) + ", " + std::to_string(l.key_size) + " and " + std::to_string(l.value_size) + "]; the views have other shapes.");
    engine_.read(r, owner, {begin, count}, keys, values);
}

// Looking.

template <scalar S, backend B, codec C>
usage basic_cache<S, B, C>::used() const {
    auto u = memory_->used();
    for (const auto& x : slots_) {
        if (x.state) u.at(tier::host, kind::statistics) += x.state->spans.bytes();
    }
    return u;
}

template <scalar S, backend B, codec C>
usage basic_cache<S, B, C>::used(sequence s) const {
    auto u = residency_.used_by(at(s));
    u.at(tier::host, kind::statistics) += at(s).spans.bytes();
    return u;
}

template <scalar S, backend B, codec C>
void basic_cache<S, B, C>::export_sequence(sequence s, const std::string&) const {
    (void)at(s);
    throw unsupported("Snapshots of sequences are not supported yet.");
}

template <scalar S, backend B, codec C>
sequence basic_cache<S, B, C>::import_sequence(const std::string&) {
    throw unsupported("Snapshots of sequences are not supported yet.");
}

}  // namespace sekv
