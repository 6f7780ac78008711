#include "sekv/zoom/router.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace sekv {
namespace {

constexpr float coarsest_step = 0.05F;  // nats
constexpr float largest_sum = 65000.0F; // steps that a sum over the planes may reach: 16 bits, less the planes' rounding

// One query's partial logits by plane and nibble; returns the step that their ranges ask for.
float partial_logits(const routing_tables& tables, const key_view& keys, const float* t) {
    std::fill_n(tables.partial, tables.view.planes * 16, 0.0F);
    for (std::size_t f = 0; f < keys.sketch.fields.size(); ++f) {
        const auto& field = keys.sketch.fields[f];
        const auto level = level_of(keys.sketch.fields, f, keys.sketch.bits[field.component], keys.sketch.step[field.component]);
        float* row = tables.partial + field.plane * 16;
        for (int v = 0; v < 16; ++v) row[v] += t[field.component] * (static_cast<float>((v >> field.shift) & field.mask) * level.factor + level.offset);
    }
    float widest = 0, total = 0;
    for (std::int32_t p = 0; p < tables.view.planes; ++p) {
        const auto [least, most] = std::minmax_element(tables.partial + p * 16, tables.partial + p * 16 + 16);
        widest = std::max(widest, *most - *least);
        total += *most - *least;
    }
    return std::max(std::clamp(widest / 255.0F, 1e-6F, coarsest_step), total / largest_sum);
}

// Marks the planes before which byte sums must be spilled, so that none exceeds 255.
void mark_fresh(const routing_tables& tables) {
    int sum = 0;
    for (std::int32_t p = 0; p < tables.view.planes; ++p) {
        const auto* low = tables.low + static_cast<std::int64_t>(p) * tables.view.group * 16;
        const int most = *std::max_element(low, low + tables.view.group * 16);
        tables.fresh[p] = sum + most > 255 ? 1 : 0;
        sum = tables.fresh[p] != 0 ? most : sum + most;
    }
}

}  // namespace

void fill_tables(routing_tables& tables, const key_view& keys, const float* t, const float* query_mean, std::int32_t size) {
    const auto planes = tables.view.planes;
    const auto group = tables.view.group;
    std::fill_n(tables.wide, planes, std::uint8_t{0});
    for (std::int32_t g = 0; g < group; ++g) {
        const float* tg = t + static_cast<std::int64_t>(g) * size;
        const float step = partial_logits(tables, keys, tg);
        float base = query_mean[g];
        for (std::int32_t j = 0; j < size; ++j) base += 0.5F * tg[j] * tg[j] * keys.error[j];
        for (std::int32_t p = 0; p < planes; ++p) {
            const float* row = tables.partial + p * 16;
            const float least = *std::min_element(row, row + 16);
            base += least;
            const auto at = static_cast<std::int64_t>(p * group + g) * 16;
            for (int v = 0; v < 16; ++v) {
                const auto x = static_cast<std::uint32_t>((row[v] - least) / step + 0.5F);
                tables.low[at + v] = static_cast<std::uint8_t>(x & 0xffu);
                tables.high[at + v] = static_cast<std::uint8_t>(x >> 8);
                if (x > 0xffu) tables.wide[p] = 1;
            }
        }
        tables.step[g] = step;
        tables.base[g] = base;
    }
    mark_fresh(tables);
}

void choose_zoom(zoom_list& list, const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, std::int64_t count, const progressive_options& options,
                 float* largest) {
    list.count = 0;
    list.capped = false;
    if (options.tau >= 1.0F) return;  // no probability exceeds 1 but by rounding
    const bool mean = options.rule == zoom_rule::mean;
    const float threshold = mean ? options.tau * static_cast<float>(group) : options.tau;
    list.count = (mean ? host::select_above : host::select_above_max)(weights, weight_stride, group, factors, threshold, count, list.tokens, list.mass);
    list.capped = list.count > options.cap;
    if (!list.capped) return;
    std::partial_sort_copy(list.mass, list.mass + list.count, largest, largest + options.cap, std::greater<>());
    const float cut = options.cap > 0 ? largest[options.cap - 1] : INFINITY;
    std::int64_t above = 0;
    for (std::int64_t i = 0; i < options.cap; ++i) above += largest[i] > cut ? 1 : 0;
    std::int64_t ties = options.cap - above;
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < list.count; ++i) {
        const float m = list.mass[i];
        if (m < cut || (m == cut && ties-- <= 0)) continue;
        list.tokens[n] = list.tokens[i];
        list.mass[n++] = m;
    }
    list.count = n;
}

}  // namespace sekv
