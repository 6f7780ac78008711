// Definitions of residency. Included by residency.hpp.
#pragma once

#include "sekv/attend/residency.hpp"

namespace sekv {

template <scalar Scalar, codec Codec>
std::int64_t residency<Scalar, Codec>::common_length(const record& r) const noexcept {
    std::int64_t length = -2;
    for (std::size_t l = 0; l < model_->layers.size(); ++l) {
        if (model_->layers[l].kv_source >= 0) continue;
        if (length == -2) length = r.lengths[l];
        if (length != r.lengths[l]) return -1;
    }
    return length;
}

template <scalar Scalar, codec Codec>
usage residency<Scalar, Codec>::used_by(const record& r) const {
    auto u = codec_->sequence_usage(r.own, r.sealed);
    for (const auto c : {whole, windowed}) {
        u.at(tier::device, kind::exact) += r.of(c).bytes(tier::device);
        u.at(tier::host, kind::exact) += r.of(c).bytes(tier::host);
    }
    if (r.sinks) u.at(tier::device, kind::exact) += r.sinks->size();
    return u;
}

// Rows that left the sliding windows make room at the end of prefill; if that fails, they are put back.
template <scalar Scalar, codec Codec>
class residency<Scalar, Codec>::window_drop {
public:
    window_drop(residency& owner, record& r, std::int64_t length) : list_(&r.of(windowed)), before_(*list_) { owner.drop_behind_window(r, length); }
    window_drop(const window_drop&) = delete;
    window_drop& operator=(const window_drop&) = delete;
    ~window_drop() {
        if (list_ != nullptr) *list_ = std::move(before_);
    }
    void commit() noexcept { list_ = nullptr; }

private:
    row_list* list_;
    row_list before_;
};

template <scalar Scalar, codec Codec>
auto residency<Scalar, Codec>::plan_growth(const record& r, layer_class c, std::int64_t target) const -> growth {
    growth g;
    if (layout(c).page_bytes() == 0) return g;
    const auto& blocks = r.of(c).blocks();
    std::int64_t at = r.reserved;
    if (!blocks.empty() && blocks.back().count < host::block_tokens) {
        g.copy_last = blocks.back().rows.use_count() > 1;  // a fork shares it: copy before writing
        at = blocks.back().begin + host::block_tokens;
    }
    for (; at < target; at += host::block_tokens) g.blocks.push_back({at, static_cast<std::int32_t>(std::min<std::int64_t>(host::block_tokens, target - at)), nullptr});
    return g;
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::allocate(growth& g, layer_class c, const record& r) {
    if (g.copy_last) {
        const auto& last = r.of(c).blocks().back();
        auto copy = pool_->make(tier::device, kind::exact, layout(c).page_bytes());
        copy_page(*last.rows, *copy);
        g.blocks.insert(g.blocks.begin(), {last.begin, last.count, std::move(copy)});
    }
    std::size_t host_left = g.on_host;
    for (auto& b : g.blocks) {
        if (b.rows) continue;
        b.rows = pool_->make(host_left > 0 ? tier::host : tier::device, kind::exact, layout(c).page_bytes());
        host_left -= host_left > 0 ? 1 : 0;
    }
}

// Prompt blocks that the device can't hold even with every older one moved away start out on the host.
template <scalar Scalar, codec Codec>
std::size_t residency<Scalar, Codec>::overflow(const record& r, const growth& g, std::uint64_t other) const {
    const auto page = layout(whole).page_bytes();
    if (!r.prefilling || page == 0) return 0;
    const auto& mem = pool_->budget();
    const auto used = device_bytes(r);
    const auto held = static_cast<std::int64_t>(r.of(whole).blocks().size());
    const auto most_of = [&](std::uint64_t room, block_test test) {
        const auto moves = count_blocks(r, held, test) * page;
        return room > memory::unlimited - moves ? memory::unlimited : room + moves;
    };
    const auto most = std::min(most_of(r.quota > used ? r.quota - used : 0, is_movable), most_of(mem.limit(tier::device) == memory::unlimited ? memory::unlimited : mem.available(tier::device), is_own));
    const auto fits = most > other ? (most - other) / page : 0;
    return g.blocks.size() - static_cast<std::size_t>(std::min<std::uint64_t>(fits, g.blocks.size()));
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::commit(growth& g, layer_class c, record& r, std::int64_t target) {
    auto& blocks = r.of(c).blocks();
    r.version += g.blocks.empty() ? 0 : 1;
    if (g.copy_last) blocks.pop_back();
    if (!g.copy_last && !blocks.empty() && layout(c).page_bytes() > 0) blocks.back().count = static_cast<std::int32_t>(std::min<std::int64_t>(host::block_tokens, target - blocks.back().begin));
    for (auto& b : g.blocks) {
        b.count = static_cast<std::int32_t>(std::min<std::int64_t>(host::block_tokens, target - b.begin));
        blocks.push_back(std::move(b));
    }
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::reserve(record& r, std::int64_t length, std::int64_t tokens) {
    const auto target = length + tokens;
    if (target <= r.reserved) return;
    // Rows that an earlier, failed call moved to the host count as if they were on the device: its failure must not change what is made anew.
    const auto used = device_bytes(r) + (r.prefilling ? 0 : host_resident_bytes(r));
    if (codec_->advance(r.own, r.sealed, length, used < r.quota ? r.quota - used : 0)) ++r.version;
    drop_behind_window(r, length);  // out of every query's reach, so not undone by a failure
    std::array<growth, layer_classes> grown{plan_growth(r, whole, target), plan_growth(r, windowed, target)};
    for (const auto c : {whole, windowed}) r.of(c).blocks().reserve(r.of(c).blocks().size() + grown[static_cast<std::size_t>(c)].blocks.size());
    auto& [plain, sliding] = grown;
    plain.on_host = overflow(r, plain, sliding.device_pages() * layout(windowed).page_bytes() + (plain.copy_last ? layout(whole).page_bytes() : 0));
    const auto need = plain.device_pages() * layout(whole).page_bytes() + sliding.device_pages() * layout(windowed).page_bytes();
    const auto host_need = plain.on_host * layout(whole).page_bytes();
    const auto replaced_of = [&](const growth& g, layer_class c) -> std::uint64_t { return g.copy_last && is_movable(r.of(c).blocks().back()) ? layout(c).page_bytes() : 0; };
    const auto replaced = replaced_of(plain, whole) + replaced_of(sliding, windowed);
    constexpr auto purpose = "the next tokens' exact rows";
    // Rows that an earlier, failed call moved to the host press as if they were on the device: its failure must not change levels.
    const auto added = need - replaced;  // a copy takes the place of the page that a fork goes on sharing: which side copies must not show
    const bool press = need > 0 && !r.prefilling && device_bytes(r) + host_resident_bytes(r) + added > r.quota;
    const auto blocks = press ? blocks_to_seal(r, length, added, 0, purpose) : 0;
    const auto sealing = seal_demand(r, blocks);
    make_room(r, {need + sealing.device, host_need + sealing.host}, replaced, r.prefilling ? static_cast<std::int64_t>(r.of(whole).blocks().size()) : blocks, purpose);
    for (const auto c : {whole, windowed}) allocate(grown[static_cast<std::size_t>(c)], c, r);
    commit(prepare_seal(r, length, blocks), r);
    for (const auto c : {whole, windowed}) commit(grown[static_cast<std::size_t>(c)], c, r, target);
    r.reserved = target;
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::end_prefill(record& r, std::int64_t length) {
    constexpr auto purpose = "the sealed prompt";
    window_drop dropped(*this, r, length);
    // What decoding will hold at most between two seals: the window, what may be rejected, and the block that is being filled.
    const auto tail = (options_->window + options_->rejectable + host::block_tokens - 1) / host::block_tokens + 1;
    const auto blocks = blocks_to_seal(r, length, layout(windowed).page_bytes(), tail, purpose);
    const auto sealing = seal_demand(r, blocks);
    std::vector<std::pair<std::size_t, page_ref>> back;  // what stays exact after prefill lives on the device
    for (auto b = static_cast<std::size_t>(blocks); b < r.of(whole).blocks().size(); ++b) {
        if (r.of(whole).blocks()[b].rows->where() == tier::host) back.emplace_back(b, nullptr);
    }
    make_room(r, {sealing.device + back.size() * layout(whole).page_bytes(), sealing.host}, 0, blocks, purpose);
    for (auto& [b, copy] : back) {
        copy = pool_->make(tier::device, kind::exact, layout(whole).page_bytes());
        copy_page(*r.of(whole).blocks()[b].rows, *copy);
    }
    auto sealed = prepare_seal(r, length, blocks);
    for (auto& [b, copy] : back) r.of(whole).blocks()[b].rows = std::move(copy);
    commit(std::move(sealed), r);
    dropped.commit();
    r.prefilling = false;
    ++r.version;
}

template <scalar Scalar, codec Codec>
std::int64_t residency<Scalar, Codec>::eligible_blocks(const record& r, std::int64_t length) const noexcept {
    const auto last = length - options_->window - options_->rejectable;
    std::int64_t n = 0;
    for (const auto& b : r.of(whole).blocks()) n += b.end() <= last ? 1 : 0;
    return n;
}

// The fewest oldest blocks whose sealing brings the sequence, with `extra` more device bytes, room for `least_left` exact blocks, and everything exact on the device, inside its quota.
template <scalar Scalar, codec Codec>
std::int64_t residency<Scalar, Codec>::blocks_to_seal(const record& r, std::int64_t length, std::uint64_t extra, std::int64_t least_left, const char* purpose) const {
    const auto page = layout(whole).page_bytes();
    const auto held = device_bytes(r) + host_resident_bytes(r);
    const auto eligible = eligible_blocks(r, length);
    const auto blocks = static_cast<std::int64_t>(r.of(whole).blocks().size());
    const auto least = (codec_->least_seal(r.own) + host::block_tokens - 1) / host::block_tokens;
    std::uint64_t best = ~std::uint64_t{0};
    for (std::int64_t m = 0; m <= eligible; m = m == 0 ? std::clamp<std::int64_t>(least, 1, std::max<std::int64_t>(eligible, 1)) : m + 1) {
        const auto spare = static_cast<std::uint64_t>(std::max<std::int64_t>(0, least_left - (blocks - m))) * page;
        const auto total = held + extra + spare + seal_demand(r, m).device - static_cast<std::uint64_t>(m) * page;
        if (total <= r.quota) return m;
        best = std::min(best, total);
    }
    throw budget_error("The sequence's device quota of " + std::to_string(r.quota) + " bytes is too small for " + purpose + ": with every block outside the window of " + std::to_string(options_->window) +
                           " tokens sealed it needs " + std::to_string(best) + " bytes; raise the quota, or lower window, rejectable, line_slots or the sketch's bits.",
                       best, r.quota);
}

template <scalar Scalar, codec Codec>
demand residency<Scalar, Codec>::seal_demand(const record& r, std::int64_t blocks) const {
    if (blocks == 0) return {};
    const auto& list = r.of(whole).blocks();
    const token_range range{list.front().begin, list[static_cast<std::size_t>(blocks - 1)].end() - list.front().begin};
    auto need = codec_->seal_bytes(r.own, r.sealed, range, blocks, r.spans);
    if (!r.sinks) need.device += sink_layout_.page_bytes();
    return need;
}

// Moves the oldest exact blocks, `most_blocks` at most, to the host until `need.device` more bytes fit the quota, which gets `replaced` bytes back for pages that a fork keeps, and the budget.
// Moving changes time only.
template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::make_room(record& r, const demand& need, std::uint64_t replaced, std::int64_t most_blocks, const char* purpose) {
    auto& mem = pool_->budget();
    const auto page = layout(whole).page_bytes();
    const auto used = device_bytes(r) - replaced;
    const auto short_of = [&](std::uint64_t have, std::uint64_t limit) { return limit != memory::unlimited && have + need.device > limit ? have + need.device - limit : 0; };
    const auto over_quota = short_of(used, r.quota);
    const auto over_budget = short_of(mem.used().total(tier::device), mem.limit(tier::device));
    const auto missing = std::max(over_quota, over_budget);
    std::uint64_t moves = 0, given = 0;  // pages taken from the sequence, and of them those that the cache gets back
    for (std::int64_t b = 0; b < most_blocks && (moves * page < over_quota || given * page < over_budget); ++b) {
        const auto& block = r.of(whole).blocks()[static_cast<std::size_t>(b)];
        moves += is_movable(block) ? 1 : 0;
        given += is_own(block) ? 1 : 0;
    }
    if (moves * page < over_quota || given * page < over_budget)
        throw budget_error("The device tier can't give " + std::to_string(need.device) + " bytes for " + purpose + " (quota " + std::to_string(r.quota) + ", of which " + std::to_string(used) +
                               " are used; the cache has " + std::to_string(mem.available(tier::device)) + " left); raise the budget or close sequences.",
                           need.device, need.device - std::min(need.device, missing));
    mem.require({need.device, need.host + moves * page}, purpose, {given * page, 0});
    demote(r, moves, is_movable);
}

template <scalar Scalar, codec Codec>
std::uint64_t residency<Scalar, Codec>::count_blocks(const record& r, std::int64_t most_blocks, block_test test) noexcept {
    const auto first = r.of(whole).blocks().begin();
    return static_cast<std::uint64_t>(std::count_if(first, first + static_cast<std::ptrdiff_t>(most_blocks), test));
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::demote(record& r, std::uint64_t count, block_test test) {
    const auto page = layout(whole).page_bytes();
    if (count == 0) return;
    std::vector<page_ref> copies;
    for (std::uint64_t i = 0; i < count; ++i) copies.push_back(pool_->make(tier::host, kind::exact, page));
    auto block = r.of(whole).blocks().begin();
    for (auto& copy : copies) {
        block = std::find_if(block, r.of(whole).blocks().end(), test);
        copy_page(*block->rows, *copy);
        block->rows = std::move(copy);
    }
    ++r.version;
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::copy_page(const page& from, page& to) {
    pool_->budget().resource().copy(to.data(), to.where(), from.data(), from.where(), from.size());
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::relieve(record& r, std::uint64_t bytes) {
    const auto page = layout(whole).page_bytes();
    if (!r.prefilling || page == 0) return;
    demote(r, std::min((bytes + page - 1) / page, count_blocks(r, static_cast<std::int64_t>(r.of(whole).blocks().size()), is_own)), is_own);
}

template <scalar Scalar, codec Codec>
class residency<Scalar, Codec>::reader final : public row_reader {
public:
    reader(const residency& owner, const row_list& list) : owner_(owner), list_(list) {}
    void read(std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const override { owner_.read_rows(list_, whole, layer, head, range, keys, values); }

private:
    const residency& owner_;
    const row_list& list_;
};

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::read_rows(const row_list& list, layer_class c, std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const {
    const auto& l = model_->layers[static_cast<std::size_t>(layer)];
    std::int64_t at = range.begin;
    for (auto b = list.find(at); at < range.end(); ++b) {
        const auto& block = list.blocks()[b];
        const auto n = std::min(range.end(), block.end()) - at;
        read_page(layout(c), *block.rows, layer, head, {at - block.begin, n}, keys, values);
        keys += n * l.key_size;
        values += n * l.value_size;
        at += n;
    }
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::read_page(const row_layout& layout, const page& p, std::int32_t layer, std::int32_t head, token_range rows, float* keys, float* values) const {
    const auto& l = model_->layers[static_cast<std::size_t>(layer)];
    const auto first = static_cast<std::size_t>(rows.begin), n = static_cast<std::size_t>(rows.count);
    const auto dk = static_cast<std::size_t>(l.key_size), dv = static_cast<std::size_t>(l.value_size);
    std::array<float, host::block_tokens> column;
    for (std::size_t j = 0; j < dk; ++j) {
        host::to_float(layout.keys(p, layer, head) + (j * static_cast<std::size_t>(layout.capacity()) + first) * sizeof(Scalar), dtype_of<Scalar>, n, column.data());
        for (std::size_t i = 0; i < n; ++i) keys[i * dk + j] = column[i];
    }
    host::to_float(layout.values(p, layer, head) + first * dv * sizeof(Scalar), dtype_of<Scalar>, n * dv, values);
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::read(const record& r, std::int32_t layer, token_range range, const out_view& keys, const out_view& values) const {
    const auto& l = model_->layers[static_cast<std::size_t>(layer)];
    const auto c = class_of(layer);
    std::vector<float> k(static_cast<std::size_t>(host::block_tokens * l.key_size)), v(static_cast<std::size_t>(host::block_tokens * l.value_size));
    const auto store = [&](std::int32_t head, token_range part) {
        for (std::int64_t i = 0; i < part.count; ++i) {
            std::copy_n(k.data() + i * l.key_size, l.key_size, keys.row(part.begin - range.begin + i, head));
            std::copy_n(v.data() + i * l.value_size, l.value_size, values.row(part.begin - range.begin + i, head));
        }
    };
    for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        for (std::int64_t at = range.begin; at < range.end();) {
            if (c == whole && at < r.sealed_end()) {
                const auto u = std::upper_bound(r.sealed.begin(), r.sealed.end(), at, [](std::int64_t p, const auto& x) { return p < x.end(); });
                const token_range part{at, std::min({range.end(), u->end(), at + host::block_tokens}) - at};
                codec_->decode(*u, layer, h, part, k.data(), v.data());
                store(h, part);
                at = part.end();
                continue;
            }
            const auto& block = r.of(c).blocks()[r.of(c).find(at)];
            const token_range part{at, std::min(range.end(), block.end()) - at};
            read_rows(r.of(c), c, layer, h, part, k.data(), v.data());
            store(h, part);
            at = part.end();
        }
    }
}

template <scalar Scalar, codec Codec>
page_ref residency<Scalar, Codec>::copy_sinks(const record& r) {
    auto to = pool_->make(tier::device, kind::exact, sink_layout_.page_bytes());
    const auto& from = *r.of(whole).blocks().front().rows;
    auto& mover = pool_->budget().resource();
    for (std::size_t i = 0; i < model_->layers.size(); ++i) {
        const auto layer = static_cast<std::int32_t>(i);
        const auto& l = model_->layers[i];
        for (std::int32_t h = 0; model_->sinks > 0 && sink_layout_.holds(layer) && h < l.kv_heads; ++h) {
            const auto n = static_cast<std::size_t>(model_->sinks) * sizeof(Scalar);
            mover.copy_rows(sink_layout_.keys(*to, layer, h), tier::device, n, layout(whole).keys(from, layer, h), from.where(), host::block_tokens * sizeof(Scalar), n, static_cast<std::size_t>(l.key_size));
            mover.copy(sink_layout_.values(*to, layer, h), tier::device, layout(whole).values(from, layer, h), from.where(), n * static_cast<std::size_t>(l.value_size));
        }
    }
    return to;
}

template <scalar Scalar, codec Codec>
auto residency<Scalar, Codec>::prepare_seal(record& r, std::int64_t length, std::int64_t blocks) -> pending_seal {
    pending_seal out;
    if (blocks == 0) return out;
    std::vector<token_range> ranges;
    for (std::int64_t b = 0; b < blocks; ++b) {
        const auto& block = r.of(whole).blocks()[static_cast<std::size_t>(b)];
        ranges.push_back({block.begin, block.count});
    }
    out.blocks = blocks;
    out.sinks = r.sinks ? r.sinks : copy_sinks(r);
    r.sealed.reserve(r.sealed.size() + ranges.size());
    const reader rows(*this, r.of(whole));
    out.units = codec_->seal(r.own, r.sealed, {ranges, {r.of(whole).blocks().data(), ranges.size()}, &rows, &r.spans, length});
    return out;
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::commit(pending_seal&& p, record& r) noexcept {
    if (p.blocks == 0) return;
    ++r.version;
    if (!r.sinks) r.sink_count = std::min<std::int32_t>(model_->sinks, r.of(whole).blocks().front().count);
    r.sinks = std::move(p.sinks);
    std::move(p.units.begin(), p.units.end(), std::back_inserter(r.sealed));
    r.of(whole).drop_front(static_cast<std::size_t>(p.blocks));
}

// A sliding-window layer keeps what a query may see after `rejectable` tokens are taken back.
template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::drop_behind_window(record& r, std::int64_t length) noexcept {
    const auto first = length - widest_window_ - options_->rejectable;
    std::size_t gone = 0;
    for (const auto& b : r.of(windowed).blocks()) gone += b.end() <= first ? 1 : 0;
    r.of(windowed).drop_front(gone);
    r.version += gone > 0 ? 1 : 0;
}

template <scalar Scalar, codec Codec>
void residency<Scalar, Codec>::truncate(record& r, std::int64_t length) {
    const auto& windows = r.of(windowed).blocks();
    if (!windows.empty() && length > 0 && windows.front().begin > std::max<std::int64_t>(0, length - widest_window_))
        throw state_error("Can't truncate to " + std::to_string(length) + " tokens: the sliding-window layers' rows before token " + std::to_string(windows.front().begin) +
                          " are gone; truncate by at most `rejectable` tokens, or open the sequence anew.");
    r.spans.truncate(std::min(length, r.spans.length()));
    for (auto& list : r.rows) list.truncate(length);
    while (!r.sealed.empty() && r.sealed.back().begin >= length) r.sealed.pop_back();
    if (!r.sealed.empty() && r.sealed.back().end() > length) r.sealed.back().count = static_cast<std::int32_t>(length - r.sealed.back().begin);
    if (r.sealed.empty()) r.sinks = nullptr;
    r.sink_count = static_cast<std::int32_t>(std::min<std::int64_t>(r.sink_count, r.sealed_end()));
    codec_->truncate(r.own, length);
    for (std::size_t l = 0; l < r.lengths.size(); ++l) r.lengths[l] = std::min(r.lengths[l], length);
    r.reserved = length;
    ++r.version;
}

template <scalar Scalar, codec Codec>
auto residency<Scalar, Codec>::fork(const record& from, std::int64_t length) -> record {
    record r{from.quota,  from.capacity, from.rows,    from.sinks,    from.sink_count, from.sealed,
             codec_->fork(from.own, length), from.spans, from.novelty, from.lengths, from.reserved, from.prefilling};
    truncate(r, length);
    return r;
}

}  // namespace sekv
