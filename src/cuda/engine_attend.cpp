// Attention on the CUDA engine: one launch sequence for adaptive steps, and passes over history for full resolution.
#include <algorithm>
#include <cstring>
#include <string>

#include "src/cuda/engine_state.hpp"
#include "src/cuda/sequence_tables.hpp"

namespace sekv {

// Whether a step's queries pass the rings by and enter the moments at once.
bool cuda_engine::takes_many(const step_tables& t, std::span<const item> items) noexcept {
    return t.how == resolution::full || std::any_of(items.begin(), items.end(), [](const item& i) { return i.tokens > cuda::ring_tokens; });
}

// What of take_queries may be refused, so that nothing has changed then.
void cuda_engine::ready_metric(const step_tables& t, std::int32_t layer, std::span<const item> items) {
    if (state_->shape(layer).windowed()) return;
    const auto l = static_cast<std::size_t>(layer);
    const bool many = takes_many(t, items);
    for (const auto& i : items) {
        auto& own = i.record->own;
        const auto begin = own.ring_begin[l], end = own.ring_end[l];
        const bool ready = !many && (begin == end || end == i.position) && i.position + i.tokens - (begin == end ? i.position : begin) <= cuda::ring_tokens;
        if (!ready && state_->context.capturing()) throw state_error("Layer " + std::to_string(layer) + " was attended twice, or out of order, in a step that is being captured; capture one attend per layer.");
        if (!ready) state_->coder.own(own);
    }
}

// The queries enter the metric: by way of the rings, whose content is folded into the moments once in 64 positions, or at once when there are many. Last in a call, and each launch takes all of its queries or
// none, so a call made again counts them once. What a call folded that is refused at the ring stays folded: the same sum, taken earlier.
void cuda_engine::take_queries(step_tables& t, std::byte* workspace, std::int32_t layer, std::span<const item> items, const rows_view& queries) {
    if (state_->shape(layer).windowed()) return;
    const auto l = static_cast<std::size_t>(layer);
    const bool many = takes_many(t, items);
    std::vector<cuda_progressive_codec::intake> taken;
    for (const auto& i : items) {
        auto& own = i.record->own;
        const auto begin = own.ring_begin[l], end = own.ring_end[l];
        if (many) {
            auto mine = queries;
            mine.data = queries.row(i.row, 0);
            mine.tokens = i.tokens;
            taken.push_back({&own, layer, mine});
        } else if (begin != end && (end != i.position || i.position + i.tokens - begin > cuda::ring_tokens)) {
            taken.push_back({&own, layer, {}});
        }
    }
    state_->coder.take(taken);
    if (!many)
        cuda::ring_queries({state_->layout(layer), static_cast<std::int32_t>(queries.tokens), cuda::ring_tokens, reinterpret_cast<const cuda::batch_entry*>(workspace),
                            reinterpret_cast<const cuda::batch_row*>(workspace + t.rows_at), cuda::tensor(queries), state_->flags()},
                           state_->joined());
    for (const auto& i : items) {
        auto &begin = i.record->own.ring_begin[l], &end = i.record->own.ring_end[l];
        const auto after = i.position + i.tokens;
        if (many || begin == end) begin = many ? after : i.position;
        end = after;
    }
    t.attended[l] = 1;
}

void cuda_engine::attend(step_tables& t, std::byte* workspace, std::int32_t layer, const std::vector<item>& items, const rows_view& queries, const out_view& out, float* lse) {
    const cuda::device_guard guard(state_->context.device());
    if (state_->context.capturing()) {
        if (t.how == resolution::full) throw state_error("Attention at full resolution can't be captured in a graph: its launches follow the sequence's length.");
        if (!cuda::on_device(queries.data) || !cuda::on_device(out.data) || (lse != nullptr && !cuda::on_device(lse)))
            throw invalid_argument("A captured attend takes queries, out and lse in device memory; some are in the host's.");
    }
    const auto q = stage_queries(queries);
    const cuda::output to(out, lse, state_->budget);
    send(t, workspace, items);
    ready_metric(t, layer, items);
    if (t.how == resolution::full) {
        attend_full(t, workspace, layer, items, q.view, to);
    } else {
        attend_adaptive(t, workspace, layer, q.view, to);
    }
    if (to.on_host()) {
        state_->land_counters();
        state_->context.memory().synchronize();
    }
    take_queries(t, workspace, layer, items, q.view);
    to.deliver();
}

// A window's step, without its outputs.
cuda::decode_step cuda_engine::decode_step_of(const step_tables& t, std::size_t window, std::byte* workspace, std::int32_t layer, const rows_view& queries) const {
    const auto& x = t.windows[window];
    cuda::decode_step step;
    step.layer = state_->layout(layer);
    step.bounds = t.bounds;
    step.bounds.rows = x.rows, step.bounds.items = x.entries;
    step.items = reinterpret_cast<const cuda::batch_entry*>(workspace) + t.items.size() + x.entry;
    step.rows = reinterpret_cast<const cuda::batch_row*>(workspace + t.rows_at) + queries.tokens + x.row;
    step.queries = cuda::tensor(queries);
    step.queries.data = queries.row(x.row, 0);
    step.counters = state_->counters.as<cuda::zoom_counters>();
    step.workspace = workspace + t.work_at;
    return step;
}

void cuda_engine::attend_adaptive(const step_tables& t, std::byte* workspace, std::int32_t layer, const rows_view& queries, const cuda::output& to) const {
    for (std::size_t i = 0; i < t.windows.size(); ++i) {
        const auto row = t.windows[i].row;
        auto step = decode_step_of(t, i, workspace, layer, queries);
        step.out = to.rows;
        step.out.data += row * to.rows.token_stride;
        step.lse = to.lse != nullptr ? to.lse + static_cast<std::int64_t>(row) * queries.heads : nullptr;
        step.flags = state_->flags();
        cuda::attend_decode(step, state_->joined());
    }
}

// Where the step began, as the device knows it already: a layer that shares K and V may have its tokens when it is hinted at.
std::vector<cuda_engine::item> cuda_engine::as_sent(const step_tables& t, std::vector<item> items) {
    if (!t.rows_sent) return items;
    auto next = items.begin();
    for (std::size_t i = 0; i < t.items.size() && next != items.end(); ++i) {
        const auto& sent = t.sent[i];
        if (sent.row != next->row) continue;
        if (sent.sequence == next->record->own.tables.as<cuda::sequence_view>()) next->position = std::min(next->position, sent.position);
        ++next;
    }
    return items;
}

void cuda_engine::prefetch(step_tables& t, std::byte* workspace, std::int32_t layer, const std::vector<item>& items, const rows_view& queries) {
    if (t.how == resolution::full || state_->shape(layer).windowed() || state_->coder.settings().line_slots == 0) return;
    const cuda::device_guard guard(state_->context.device());
    if (state_->context.capturing() && !cuda::on_device(queries.data)) throw invalid_argument("A captured prefetch takes queries in device memory; these are in the host's.");
    const auto q = stage_queries(queries);
    send(t, workspace, as_sent(t, items));
    const auto beside = state_->context.memory().beside();
    for (std::size_t i = 0; i < t.windows.size(); ++i) {
        auto step = decode_step_of(t, i, workspace, layer, q.view);
        step.ahead = true;
        cuda::fetch_ahead(step, beside);
    }
}

// One item's query tokens over its history, oldest first. What lies in exact pages on the device is read where it is; what is sealed is rebuilt into a strip, raw host pages are copied into one, while
// kernels read the other.
class cuda_engine::full_pass {
public:
    full_pass(const state& s, const step_tables& t, std::byte* workspace, std::int32_t layer, const item& i, const rows_view& queries, const cuda::prefill_state& into)
        : state_(s), item_(i), layout_(s.layout(layer)), class_(s.class_of(layer)), blocks_(i.record->of(class_).blocks()), most_(t.strip_blocks),
          strips_(s.context.memory().copies(), workspace + t.strips_at, t.strip_bytes, 2, s.joined()),
          heads_(cuda::strip_heads(layout_)), page_(cuda::strip_page_bytes(layout_)), lists_(s.pinned((i.record->sealed.size() + blocks_.size()) * sizeof(cuda::exact_block))) {
        step_ = {layout_, heads_, nullptr, 0, i.position, static_cast<std::int32_t>(i.tokens), static_cast<std::int32_t>(i.row), cuda::tensor(queries), into, s.flags()};
    }

    void run() {
        const auto last = item_.position + item_.tokens - 1;
        cuda::owned_event copied;  // a pass that failed may have left copies into the strips under way
        copied.record(state_.context.memory().copies().copy_stream());
        copied.order(state_.joined());
        if (class_ == layer_class::whole) sealed_blocks(last);
        state_.context.memory().copies().follow(state_.joined());
        // Groups by index, whatever tier their pages are in: where a call ends shows in the last bits.
        for (std::size_t first = 0; first < blocks_.size() && blocks_[first].begin <= last; first += most_) {
            std::size_t n = 0;
            bool staged = false;
            for (; n < most_ && first + n < blocks_.size() && blocks_[first + n].begin <= last; ++n) staged = staged || blocks_[first + n].rows->where() == tier::host;
            if (layout_.window == 0 || blocks_[first + n - 1].end() > item_.position + 1 - layout_.window) staged ? through_strip(first, n) : in_place(first, n);
        }
    }

private:
    void sealed_blocks(std::int64_t last) {
        const auto& units = item_.record->sealed;
        std::size_t seen = 0;
        while (seen < units.size() && units[seen].begin <= last) ++seen;
        for (std::size_t first = 0; first < seen; first += most_) {
            const auto n = std::min(most_, seen - first);
            const auto slot = next_slot();
            const auto stream = state_.joined();
            auto* to = strips_.acquire(slot, &stream);
            cuda::reconstruct_blocks({layout_, item_.record->own.tables.as<cuda::sequence_view>(), static_cast<std::int32_t>(first), static_cast<std::int32_t>(n), to, page_, heads_}, stream);
            attend_strip(slot, to, n, [&](std::size_t i) { return std::pair{units[first + i].begin, units[first + i].count}; });
        }
    }

    void through_strip(std::size_t first, std::size_t n) {
        const auto slot = next_slot();
        const auto stream = state_.joined();
        auto* to = strips_.acquire(slot, &stream);
        std::vector<cuda::page_range> pages;
        for (std::size_t i = 0; i < n; ++i) {
            const auto* rows = blocks_[first + i].rows->data() + layout_.exact_page.first;
            if (blocks_[first + i].rows->where() == tier::host)
                pages.push_back({rows, i * page_, page_});
            else
                state_.context.memory().copy(to + i * page_, tier::device, rows, tier::device, page_);
        }
        strips_.prefetch(slot, pages);
        attend_strip(slot, to, n, [&](std::size_t i) { return std::pair{blocks_[first + i].begin, blocks_[first + i].count}; });
    }

    template <class Range>
    void attend_strip(std::size_t slot, std::byte* strip, std::size_t n, Range&& range) {
        auto* list = lists_.as<cuda::exact_block>() + listed_;
        for (std::size_t i = 0; i < n; ++i) {
            const auto [begin, count] = range(i);
            list[i] = {strip + i * page_, begin, count, 0};
        }
        listed_ += n;
        strips_.ready(slot, state_.joined());
        attend(heads_, list, n);
        strips_.release(slot, state_.joined());
    }

    void in_place(std::size_t first, std::size_t n) {
        cuda::sequence_view head;
        std::memcpy(&head, item_.record->own.shadow.data(), sizeof head);
        attend(layout_.exact_page, head.exact[static_cast<std::size_t>(class_)] + first, n);
    }

    void attend(const cuda::head_stride& page, const cuda::exact_block* blocks, std::size_t n) {
        step_.page = page;
        step_.blocks = blocks;
        step_.block_count = static_cast<std::int32_t>(n);
        cuda::prefill_attend(step_, state_.joined());
    }

    [[nodiscard]] std::size_t next_slot() noexcept { return slot_++ % 2; }

    const state& state_;
    const item& item_;
    const cuda::layer_layout& layout_;
    layer_class class_;
    const std::vector<row_block>& blocks_;
    std::size_t most_;
    cuda::strip strips_;
    cuda::head_stride heads_;
    std::size_t page_;
    buffer lists_;
    std::size_t listed_ = 0, slot_ = 0;
    cuda::prefill_step step_;
};

void cuda_engine::attend_full(const step_tables& t, std::byte* workspace, std::int32_t layer, std::span<const item> items, const rows_view& queries, const cuda::output& to) const {
    const auto& l = state_->layout(layer);
    const auto heads = l.kv_heads * l.group;
    const auto rows = queries.tokens;
    auto* work = reinterpret_cast<float*>(workspace + t.work_at);
    const auto row_state = (rows * heads + 63) / 64 * 64;  // so that the sums are aligned too
    const cuda::prefill_state into{work, work + row_state, work + 2 * row_state};
    cuda::prefill_begin(into, rows, heads, l.value_size, state_->joined());
    for (const auto& i : items) full_pass(*state_, t, workspace, layer, i, queries, into).run();
    cuda::prefill_end(into, rows, heads, l.value_size, to.rows, to.lse, state_->joined());
}

}  // namespace sekv
