// Rows on their way in and out: the caller's tensors, device or host, as kernels take them.
#include <algorithm>
#include <cstring>
#include <string>

#include "sekv/attend/staging.hpp"
#include "src/cuda/engine_state.hpp"

namespace sekv {
namespace cuda {

output::output(const out_view& out, float* lse_to, memory& budget) : to_(out), lse_to_(lse_to) {
    if (on_device(out.data)) {
        rows = {out.data, out.token_stride, out.head_stride};
    } else {
        const auto row = static_cast<std::int64_t>(out.heads) * out.size;
        copy_ = budget.allocate(tier::host, kind::workspace, std::max<std::size_t>(1, static_cast<std::size_t>(out.tokens * row)) * sizeof(float));
        rows = {copy_.as<float>(), row, out.size};
    }
    if (lse_to == nullptr || on_device(lse_to)) {
        lse = lse_to;
    } else {
        lse_copy_ = budget.allocate(tier::host, kind::workspace, std::max<std::size_t>(1, static_cast<std::size_t>(out.tokens * out.heads)) * sizeof(float));
        lse = lse_copy_.as<float>();
    }
}

void output::deliver() const {
    for (std::int64_t t = 0; copy_.data() != nullptr && t < to_.tokens; ++t) {
        for (std::int32_t h = 0; h < to_.heads; ++h) std::copy_n(rows.data + t * rows.token_stride + h * rows.head_stride, to_.size, to_.row(t, h));
    }
    if (lse_copy_.data() != nullptr) std::copy_n(lse, to_.tokens * to_.heads, lse_to_);
}

}  // namespace cuda

namespace {

rows_view contiguous(const void* data, dtype type, const rows_view& like) { return {data, type, like.tokens, like.heads, like.size, static_cast<std::int64_t>(like.heads) * like.size, like.size}; }

}  // namespace

auto cuda_engine::stage(const char* what, const rows_view& v) const -> staged {
    if (v.tokens == 0 || cuda::on_device(v.data)) return {v, {}};
    if (state_->context.capturing()) throw invalid_argument(std::string(what) + " lie in host memory; a captured append takes device memory.");
    staged out;
    out.copy = state_->pinned(static_cast<std::size_t>(v.tokens * v.heads * v.size) * size_of(state_->stored));
    state_->stored == dtype::bf16 ? convert_appended(what, v, out.copy.as<bf16>()) : convert_appended(what, v, out.copy.as<fp16>());
    out.view = contiguous(out.copy.data(), state_->stored, v);
    return out;
}

auto cuda_engine::stage_queries(const rows_view& v) const -> staged {
    if (v.tokens == 0 || cuda::on_device(v.data)) return {v, {}};
    staged out;
    out.copy = state_->pinned(static_cast<std::size_t>(v.tokens * v.heads * v.size) * sizeof(float));
    convert_rows(v, out.copy.as<float>(), [](std::int64_t, std::int32_t) { refuse_queries(); });
    out.view = contiguous(out.copy.data(), dtype::f32, v);
    return out;
}

// Rows of one sequence, outside a plan: its tables are built in pinned memory for this launch.
void cuda_engine::write(std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values) {
    const cuda::device_guard guard(state_->context.device());
    if (state_->context.capturing()) throw state_error("append(sequence, ...) can't be captured in a graph; capture append(plan, ...) after begin_step.");
    std::vector<cuda::batch_entry> entries;
    std::vector<cuda::batch_row> rows;
    for (const auto& i : items) {
        settle(*i.record);
        entries.push_back({i.record->own.tables.as<cuda::sequence_view>(), i.position, static_cast<std::int32_t>(i.tokens), static_cast<std::int32_t>(i.row)});
        for (std::int64_t t = 0; t < i.tokens; ++t) rows.push_back({static_cast<std::int32_t>(entries.size()) - 1, static_cast<std::int32_t>(t)});
    }
    const auto head = (entries.size() * sizeof(cuda::batch_entry) + 63) / 64 * 64;
    const auto tables = state_->pinned(head + rows.size() * sizeof(cuda::batch_row));
    std::memcpy(tables.data(), entries.data(), entries.size() * sizeof(cuda::batch_entry));
    std::memcpy(tables.data() + head, rows.data(), rows.size() * sizeof(cuda::batch_row));
    cuda::append_rows({state_->layout(layer), state_->shape(layer).windowed() ? 1 : 0, static_cast<std::int32_t>(rows.size()), tables.as<cuda::batch_entry>(), tables.as<cuda::batch_row>(head), cuda::tensor(keys.view),
                       cuda::tensor(values.view), state_->flags()},
                      state_->joined());
}

void cuda_engine::write(step_tables& t, std::byte* workspace, std::span<const item> items, std::int32_t layer, const staged& keys, const staged& values) {
    const cuda::device_guard guard(state_->context.device());
    send(t, workspace, items);
    cuda::append_rows({state_->layout(layer), state_->shape(layer).windowed() ? 1 : 0, static_cast<std::int32_t>(keys.view.tokens), reinterpret_cast<const cuda::batch_entry*>(workspace),
                       reinterpret_cast<const cuda::batch_row*>(workspace + t.rows_at), cuda::tensor(keys.view), cuda::tensor(values.view), state_->flags()},
                      state_->joined());
}

void cuda_engine::observe(const item& i, std::int32_t layer, const rows_view& queries) {
    const cuda::device_guard guard(state_->context.device());
    const auto q = stage_queries(queries);
    state_->coder.observe(i.record->own, layer, q.view);
}

// Token-level rows, 64 positions at a time: sealed ones are rebuilt as an exact page first.
void cuda_engine::read(const record& r, std::int32_t layer, token_range range, const out_view& keys, const out_view& values) const {
    if (range.count == 0) return;
    const cuda::device_guard guard(state_->context.device());
    const auto& l = state_->shape(layer);
    const auto& places = state_->layout(layer);
    settle(const_cast<record&>(r));  // what kernels read follows the record; its content doesn't change
    const auto& blocks = r.rows[l.windowed() ? 1U : 0U];
    const auto heads = cuda::strip_heads(places);
    const auto page = state_->pinned(cuda::strip_page_bytes(places));
    const cuda::output k(keys, nullptr, state_->budget), v(values, nullptr, state_->budget);
    for (auto at = range.begin; at < range.end();) {
        cuda::read_step step{places, heads, page.data(), host::block_tokens, 0, 0, k.rows, v.rows};
        std::int64_t begin = 0, end = 0;
        if (!l.windowed() && at < r.sealed_end()) {
            const auto u = std::upper_bound(r.sealed.begin(), r.sealed.end(), at, [](std::int64_t p, const auto& x) { return p < x.end(); });
            cuda::reconstruct_blocks({places, r.own.tables.as<cuda::sequence_view>(), static_cast<std::int32_t>(u - r.sealed.begin()), 1, page.data(), page.size(), heads}, state_->joined());
            begin = u->begin, end = u->end();
        } else {
            const auto& b = blocks.blocks()[blocks.find(at)];
            step.rows = b.rows->data(), step.page = places.exact_page;
            begin = b.begin, end = b.end();
        }
        step.first = static_cast<std::int32_t>(at - begin);
        step.count = static_cast<std::int32_t>(std::min(end, range.end()) - at);
        const auto row = at - range.begin;
        step.keys.data += row * step.keys.token_stride;
        step.values.data += row * step.values.token_stride;
        cuda::read_rows(step, state_->joined());
        at += step.count;
    }
    if (!k.on_host() && !v.on_host()) return;
    state_->context.memory().synchronize();
    k.deliver();
    v.deliver();
}

std::vector<float> cuda_engine::keys_of(const record& r, std::int32_t layer, token_range range) const {
    const auto& l = state_->shape(layer);
    std::vector<float> keys(static_cast<std::size_t>(range.count * l.kv_heads * l.key_size)), values(static_cast<std::size_t>(range.count * l.kv_heads * l.value_size));
    read(r, layer, range, out_rows(keys.data(), range.count, l.kv_heads, l.key_size), out_rows(values.data(), range.count, l.kv_heads, l.value_size));
    return keys;
}

}  // namespace sekv
