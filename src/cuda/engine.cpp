// The CUDA engine: what kernels read of sequences and steps, kept in step with the host's books.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "src/cuda/engine_state.hpp"
#include "src/cuda/sequence_tables.hpp"

namespace sekv {

void cuda_engine::state::land_counters() const { context.memory().copy(counters_landed.data(), tier::host, counters.data(), tier::device, sizeof(cuda::zoom_counters)); }

cuda_engine::cuda_engine(const model_shape& model, cuda_backend& where, block_pool& pool, cuda_progressive_codec& coder, dtype stored) {
    auto& mem = pool.budget();
    const cuda::device_guard guard(where.context().device());
    state_ = std::make_unique<state>(state{model, where, where.context(), mem, coder, coder.places(), stored, mem.allocate(tier::device, kind::workspace, sizeof(cuda::zoom_counters)),
                                           mem.allocate(tier::host, kind::workspace, sizeof(cuda::zoom_counters))});
    for (const auto& l : model.layers) {
        if (l.group > cuda::most_group) throw unsupported("The CUDA backend takes GQA groups of 1 to " + std::to_string(cuda::most_group) + " query heads per KV head, not " + std::to_string(l.group) + ".");
    }
}

cuda_engine::~cuda_engine() = default;

void cuda_engine::settle(record& r) const {
    auto& own = r.own;
    if (own.sent == r.version) return;
    const cuda::device_guard guard(state_->context.device());
    if (state_->context.capturing()) throw state_error("A sequence changed since begin_step while the stream is being captured; call begin_step before the capture begins.");
    state_->coder.forget_lines(own);
    const auto slots = state_->coder.settings().line_slots;
    auto image = cuda::table_image(r, slots, own.tables.data());
    if (image.size() > own.tables.size()) {
        auto larger = state_->budget.allocate(tier::device, kind::tables, image.size() + image.size() / 2);
        image = cuda::table_image(r, slots, larger.data());
        own.tables = std::move(larger);
        own.shadow.clear();
    }
    const auto same = std::mismatch(image.begin(), image.end(), own.shadow.begin(), own.shadow.end());
    const auto first = static_cast<std::size_t>(same.first - image.begin()) / 64 * 64;
    auto last = image.size();
    while (image.size() == own.shadow.size() && last > first && image[last - 1] == own.shadow[last - 1]) --last;
    if (last > first) {
        const auto staging = state_->pinned(last - first);
        std::memcpy(staging.data(), image.data() + first, last - first);
        state_->context.memory().copy(own.tables.data() + first, tier::device, staging.data(), tier::host, last - first);
    }
    cuda::sequence_view head;
    std::memcpy(&head, image.data(), sizeof head);
    own.segments = head.segment_count, own.epoch_runs = head.epoch_count, own.key_runs = head.key_bases_count;
    own.shadow = std::move(image);
    own.sent = r.version;
}

// Plans.

namespace {

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// What a record may grow to while its plan holds: everything that comes may stay exact, or be sealed.
void widen(cuda::decode_bounds& b, const sequence_record<cuda_progressive_codec>& r, std::int64_t longest) {
    const auto growth = static_cast<std::int32_t>((longest - std::min(longest, r.scored_tokens())) / host::block_tokens) + 2;
    std::int32_t exact = 0;
    for (const auto& list : r.rows) exact = std::max(exact, static_cast<std::int32_t>(list.blocks().size()));
    const auto sealed = static_cast<std::int32_t>(r.sealed.size());
    b.exact_blocks = std::max(b.exact_blocks, exact + growth);
    b.epochs = std::max(b.epochs, static_cast<std::int32_t>(r.own.epochs) + 3);
    b.segments = std::max(b.segments, (sealed + exact + growth) / cuda::segment_blocks + 1 + b.epochs + r.own.segments - sealed / cuda::segment_blocks);
}

// Without a record: the most that any of this length takes.
void widen_to(cuda::decode_bounds& b, std::int64_t longest, const progressive_options& o) {
    const auto blocks = static_cast<std::int32_t>(longest / host::block_tokens) + 2;
    b.exact_blocks = std::max(b.exact_blocks, blocks);
    b.epochs = std::max(b.epochs, static_cast<std::int32_t>(std::min<std::int64_t>(12, longest / o.epoch_tokens + 1)) + 3);
    b.segments = std::max(b.segments, blocks / cuda::segment_blocks + 1 + b.epochs);
}

}  // namespace

auto cuda_engine::size(std::span<const batch_item> items, std::int64_t tokens, std::int64_t longest, resolution how, const std::vector<const record*>& records) const -> std::shared_ptr<step_tables> {
    auto t = std::make_shared<step_tables>();
    const auto& o = state_->coder.settings();
    t->how = how;
    t->items.assign(items.begin(), items.end());
    auto& b = t->bounds;
    cut_windows(*t);
    for (const auto& x : t->windows) b.rows = std::max(b.rows, x.rows), b.items = std::max(b.items, x.entries);
    b.tau = o.tau, b.largest_of_group = o.rule == zoom_rule::max, b.cap = o.cap;
    for (const auto* r : records) {
        if (r == nullptr) continue;
        settle(const_cast<record&>(*r));  // counts the runs that bounds are made of; the record's content doesn't change
        widen(b, *r, longest);
    }
    if (records.empty()) widen_to(b, longest, o);
    b.key_bases = b.epochs;
    t->rows_at = aligned((items.size() + t->pieces.size()) * sizeof(cuda::batch_entry));
    t->work_at = t->rows_at + aligned(2 * static_cast<std::size_t>(tokens) * sizeof(cuda::batch_row));
    std::size_t work = 0, page = 0;
    for (const auto& l : state_->places.layers) {
        const auto query_heads = static_cast<std::size_t>(l.kv_heads * l.group);
        const auto prefill = (static_cast<std::size_t>(tokens) * query_heads * static_cast<std::size_t>(l.value_size + 2) + 128) * sizeof(float);
        work = std::max(work, how == resolution::full ? prefill : cuda::decode_workspace_bytes(l, b));
        page = std::max(page, cuda::strip_page_bytes(l));
    }
    t->strips_at = t->work_at + aligned(work);
    t->bytes = t->strips_at;
    if (how == resolution::full) {
        constexpr std::int64_t most_strip = 16;
        t->strip_blocks = static_cast<std::int32_t>(std::clamp<std::int64_t>(longest / host::block_tokens, 1, most_strip));
        t->strip_bytes = aligned(page * static_cast<std::size_t>(t->strip_blocks));
        t->bytes += 2 * t->strip_bytes;
    }
    t->attended.assign(state_->model.layers.size(), 0);
    return t;
}

std::size_t cuda_engine::bytes_of(const step_tables& t) noexcept { return t.bytes; }

bool cuda_engine::covers(const step_tables& t, const record& r) noexcept {
    if (t.how == resolution::full || r.own.sent != r.version) return true;  // settled first, and asked again, before anything is launched
    for (const auto& list : r.rows) {
        if (static_cast<std::int64_t>(list.blocks().size()) > t.bounds.exact_blocks) return false;
    }
    return r.own.segments <= t.bounds.segments && r.own.epoch_runs <= t.bounds.epochs && r.own.key_runs <= t.bounds.key_bases;
}

// Windows of at most 32 rows; an item that crosses one is cut, and its tokens stay in order.
void cuda_engine::cut_windows(step_tables& t) {
    constexpr std::int32_t most_rows = 32;
    std::int32_t row = 0;
    for (std::size_t i = 0; i < t.items.size(); ++i) {
        for (std::int64_t first = 0; first < t.items[i].tokens;) {
            if (t.windows.empty() || t.windows.back().rows == most_rows) t.windows.push_back({row, 0, static_cast<std::int32_t>(t.pieces.size()), 0});
            auto& x = t.windows.back();
            const auto n = static_cast<std::int32_t>(std::min<std::int64_t>(most_rows - x.rows, t.items[i].tokens - first));
            t.pieces.push_back({i, static_cast<std::int32_t>(first), n, x.rows});
            x.rows += n, ++x.entries;
            first += n, row += n;
        }
    }
}

// Steps.

namespace {

// f(entry) of a plan's items in turn, until one is false; items that are padding have no sequence.
template <class F>
bool every_entry(const std::vector<batch_item>& plan, std::span<const cuda_engine::item> items, F&& f) {
    std::int32_t row = 0;
    auto next = items.begin();
    for (const auto& i : plan) {
        cuda::batch_entry e{nullptr, 0, static_cast<std::int32_t>(i.tokens), row};
        if (next != items.end() && next->row == row) e.sequence = next->record->own.tables.as<cuda::sequence_view>(), e.position = next->position, ++next;
        if (!f(e)) return false;
        row += e.tokens;
    }
    return true;
}

}  // namespace

void cuda_engine::send(step_tables& t, std::byte* workspace, std::span<const item> items) const {
    for (const auto& i : items) {
        settle(*i.record);
        if (!covers(t, *i.record)) throw state_error("The plan's launch shapes no longer cover a sequence of " + std::to_string(i.record->scored_tokens()) + " tokens; make a new plan, and capture anew what was captured with this one.");
    }
    const bool same = t.rows_sent && every_entry(t.items, items, [sent = t.sent.begin()](const cuda::batch_entry& e) mutable {
        const auto& before = *sent++;
        return e.sequence == before.sequence && e.position == before.position;
    });
    if (same) return;  // as in all calls of a step but the first
    if (state_->context.capturing()) throw state_error("The plan's positions have not been sent, and the stream is being captured; call begin_step before the capture begins.");
    std::vector<cuda::batch_entry> entries;
    entries.reserve(t.items.size() + t.pieces.size());
    every_entry(t.items, items, [&](const cuda::batch_entry& e) { return entries.push_back(e), true; });
    for (const auto& p : t.pieces) {
        auto e = entries[p.item];
        e.position += p.first, e.tokens = p.tokens, e.row = p.row, e.first = p.first;
        entries.push_back(e);
    }
    const auto bytes = t.rows_sent ? entries.size() * sizeof(cuda::batch_entry) : t.work_at;
    const auto staging = state_->pinned(bytes);
    std::memcpy(staging.data(), entries.data(), entries.size() * sizeof(cuda::batch_entry));
    if (!t.rows_sent) {
        auto* rows = staging.as<cuda::batch_row>(t.rows_at);
        const auto add = [&](std::size_t begin, std::size_t end) {
            for (auto i = begin; i < end; ++i) {
                for (std::int32_t k = 0; k < entries[i].tokens; ++k) *rows++ = {static_cast<std::int32_t>(i - begin), k};
            }
        };
        add(0, t.items.size());
        for (const auto& x : t.windows) add(t.items.size() + static_cast<std::size_t>(x.entry), t.items.size() + static_cast<std::size_t>(x.entry + x.entries));
    }
    state_->context.memory().copy(workspace, tier::device, staging.data(), tier::host, bytes);
    t.sent = std::move(entries);
    t.rows_sent = true;
}

void cuda_engine::begin_step(step_tables& t, std::byte* workspace, const std::vector<item>& items) {
    const cuda::device_guard guard(state_->context.device());
    check_deferred();
    for (const auto& i : items) {
        auto& own = i.record->own;
        bool full = false;
        for (std::size_t l = 0; l < own.ring_end.size(); ++l) {
            if (state_->shape(static_cast<std::int32_t>(l)).windowed()) continue;  // no ring of theirs is ever filled
            full = full || own.ring_end[l] != i.position || i.position + i.tokens - own.ring_begin[l] > cuda::ring_tokens;
        }
        if (!full) continue;
        state_->coder.own(own);
        state_->coder.fold(own);
        own.ring_begin.assign(own.ring_begin.size(), i.position);
        own.ring_end = own.ring_begin;
    }
    send(t, workspace, items);
    state_->land_counters();
}

void cuda_engine::replayed(step_tables& t, const std::vector<item>& items) {
    (void)state_->context.joined();  // the graph knows nothing of hints outside it
    for (const auto& i : items) {
        for (std::size_t l = 0; l < t.attended.size(); ++l) {
            if (t.attended[l] != 0) i.record->own.ring_end[l] = i.position + i.tokens;
        }
    }
}

void cuda_engine::check_deferred() { state_->coder.check_flags(); }

void cuda_engine::collect(zoom_metrics& zooms) const {
    cuda::zoom_counters c;
    std::memcpy(&c, state_->counters_landed.data(), sizeof c);
    zooms = {c.zooms, c.tokens, c.capped, c.hits, c.misses, c.bytes, c.most_tokens, c.prefetched, {}};
    zooms.latency.add_buckets(c.latency, c.latency_most);
}

}  // namespace sekv
