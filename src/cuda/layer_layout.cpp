#include "src/cuda/layer_layout.hpp"

#include <algorithm>

#include "sekv/tier/line_cache.hpp"

namespace sekv::cuda {
namespace {

std::uint32_t distance(std::size_t to, std::size_t from) { return static_cast<std::uint32_t>(to - from); }

key_place key_places(const basis_layout::place& p) {
    const auto& s = p.key_sketch;
    return {0, distance(p.error, p.a), distance(s.step, p.a), distance(s.bits, p.a), distance(s.fields, p.a), distance(s.field_count, p.a)};
}

epoch_place epoch_places(const basis_layout::place& p) {
    const auto at = [&](std::size_t x) { return distance(x, p.key_mean); };
    const auto& s = p.value_sketch;
    return {0, at(p.value_basis), at(p.value_mean), at(p.typical_scale), at(s.step), at(s.bits), at(s.fields), at(s.field_count), at(p.key_widths), at(p.key_step), at(p.value_widths), at(p.value_step)};
}

// first: of head 0. next: of head 1, where there is one.
head_stride strided(std::size_t first, std::size_t next) { return {first, next > first ? next - first : 0}; }

void place_codes(layer_layout& l, const basis_layout& bases, std::int32_t index) {
    const auto& a = bases.place_of(index);
    const auto& b = bases.place_of(l.kv_heads > 1 ? index + 1 : index);
    const auto& f = a.format;
    l.key_planes = f.key_planes(), l.value_planes = f.value_planes(), l.key_bits = f.key_bits, l.value_bits = f.value_bits;
    l.key_line_bytes = f.key_line_bytes, l.value_line_bytes = f.value_line_bytes, l.line_bytes = f.line_bytes(), l.line_stride = f.line_stride;
    l.sketch_page = strided(a.sketch, b.sketch);
    l.line_page = strided(a.lines, b.lines);
    l.key_buffer = strided(a.a, b.a);
    l.epoch_buffer = strided(a.key_mean, b.key_mean);
    l.encoder_buffer = strided(a.encoder, b.encoder);
    l.key = key_places(a);
    l.epoch = epoch_places(a);
}

}  // namespace

// Each layer's own, since layers that share K and V have queries of their own.
void cache_layout::place_ring(layer_layout& l) {
    l.query_ring = ring_bytes;
    ring_bytes += static_cast<std::size_t>(ring_tokens * l.kv_heads * l.group * l.key_size) * sizeof(std::uint16_t);
}

cache_layout::cache_layout(const model_shape& model, const progressive_options& options, dtype stored) {
    const basis_layout bases(model, options);
    const auto element = size_of(stored);
    std::int32_t widest = 0;
    for (const auto& shape : model.layers) {
        const auto exact = static_cast<std::int32_t>(static_cast<std::size_t>(shape.key_size + shape.value_size) * element);
        if (shape.kv_source < 0 && !shape.windowed()) widest = std::max(widest, options.exact_tier ? exact : make_head_format(shape, options).line_stride);
    }
    std::size_t page[2] = {0, 0}, sinks = 0;
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        const auto& shape = model.layers[i];
        if (shape.kv_source >= 0) {
            layers.push_back(layers[static_cast<std::size_t>(shape.kv_source)]);
            auto& l = layers.back();
            l.group = shape.group, l.scale = shape.logit_scale(), l.soft_cap = shape.soft_cap;
            if (!shape.windowed()) place_ring(l);
            continue;
        }
        layer_layout l;
        l.kv_heads = shape.kv_heads, l.group = shape.group, l.key_size = shape.key_size, l.value_size = shape.value_size;
        l.scale = shape.logit_scale(), l.soft_cap = shape.soft_cap, l.window = shape.sliding_window, l.stored = stored;
        const auto row = static_cast<std::size_t>(shape.key_size + shape.value_size) * element;
        const auto heads = static_cast<std::size_t>(shape.kv_heads);
        auto& at = page[shape.windowed() ? 1 : 0];
        l.exact_page = {at, block_tokens * row};
        at += heads * block_tokens * row;
        if (!shape.windowed()) {
            l.sink_capacity = model.sinks;
            l.sink_page = {sinks, static_cast<std::size_t>(model.sinks) * row};
            sinks += heads * static_cast<std::size_t>(model.sinks) * row;
            const auto index = bases.head_index(static_cast<std::int32_t>(i), 0);
            place_codes(l, bases, index);
            if (options.exact_tier) {
                l.exact_line_bytes = static_cast<std::int32_t>(row);
                l.exact_line_page = {exact_line_block_bytes, block_tokens * row};
                exact_line_block_bytes += heads * block_tokens * row;
            }
            l.cache_stride = widest;
            const auto per_head = line_cache::bytes(1, options.line_slots, widest);
            l.line_cache = {static_cast<std::size_t>(index) * per_head, per_head};
            place_ring(l);
        }
        layers.push_back(l);
    }
}

}  // namespace sekv::cuda
