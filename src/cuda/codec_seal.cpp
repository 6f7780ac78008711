// Sealing on the device, layer by layer: the CUDA codec's part of the books.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "kernels/rows.hpp"
#include "kernels/seal.hpp"
#include "sekv/attend/cuda_codec.hpp"
#include "src/cuda/context.hpp"
#include "src/cuda/layer_layout.hpp"
#include "src/cuda/sequence_tables.hpp"

namespace sekv {
namespace {

using unit = progressive_books::unit;

// An array in pinned memory, which kernels read in place.
template <class T>
class kernel_array {
public:
    kernel_array(memory& mem, const std::vector<T>& values) : bytes_(mem.allocate(tier::host, kind::workspace, bytes(values.size()))) {
        if (!values.empty()) std::memcpy(bytes_.data(), values.data(), values.size() * sizeof(T));
    }
    [[nodiscard]] T* data() const noexcept { return bytes_.as<T>(); }
    [[nodiscard]] static std::size_t bytes(std::size_t count) noexcept { return std::max<std::size_t>(1, count) * sizeof(T); }

private:
    buffer bytes_;
};

// The pages of some units, as kernels take them.
struct unit_pages {
    kernel_array<std::uint8_t*> sketches, lines, exact;

    unit_pages(memory& mem, const std::vector<const unit*>& units)
        : sketches(mem, collect(units, [](const progressive_block& p) { return p.sketch->as<std::uint8_t>(); })),
          lines(mem, collect(units, [](const progressive_block& p) { return p.lines->as<std::uint8_t>(); })),
          exact(mem, collect(units, [](const progressive_block& p) { return p.exact ? p.exact->as<std::uint8_t>() : nullptr; })) {}
    [[nodiscard]] static std::size_t bytes(std::size_t count) noexcept { return 3 * kernel_array<std::uint8_t*>::bytes(count); }

private:
    template <class Get>
    static std::vector<std::uint8_t*> collect(const std::vector<const unit*>& units, Get&& get) {
        std::vector<std::uint8_t*> out;
        for (const auto* u : units) out.push_back(get(u->payload));
        return out;
    }
};

std::vector<cuda::exact_block> exact_rows(std::span<const row_block> pages, std::int64_t begin, std::int64_t end) {
    std::vector<cuda::exact_block> out;
    for (const auto& p : pages) {
        if (p.begin >= begin && p.begin < end) out.push_back({p.rows->data(), p.begin, p.count, 0});
    }
    return out;
}

// The blocks that begin in the range.
std::vector<unit> units_in(const std::vector<unit>& units, token_range range) {
    std::vector<unit> out;
    std::copy_if(units.begin(), units.end(), std::back_inserter(out), [&](const unit& u) { return u.begin >= range.begin && u.begin < range.end(); });
    return out;
}

std::size_t view_bytes(const cuda::sealed_lists& lists) { return cuda::table_bytes(0, lists.blocks.size(), std::max(lists.epochs.size(), lists.key_bases.size())); }

std::size_t widest_page(const cuda::cache_layout& places) {
    std::size_t page = 0;
    for (const auto& l : places.layers) page = std::max(page, cuda::strip_page_bytes(l));
    return page;
}

// Units as kernels decode them outside a step: a sequence_view in pinned memory.
buffer kernel_view(memory& mem, const std::vector<unit>& units) {
    const auto lists = cuda::list_sealed(units);
    auto image = mem.allocate(tier::host, kind::workspace, view_bytes(lists));
    const auto bytes = cuda::sealed_image(lists, image.data());
    std::memcpy(image.data(), bytes.data(), bytes.size());
    return image;
}

cuda::seal_rows rows_of(const std::vector<cuda::exact_block>& blocks, const cuda::exact_block* kernel_blocks, std::int32_t sinks) {
    cuda::seal_rows r{kernel_blocks, static_cast<std::int32_t>(blocks.size()), 0, 0};
    for (const auto& b : blocks) r.tokens += b.count;
    // Sinks are read exactly and are unlike every other token, so they don't shape the basis.
    r.skip = !blocks.empty() && blocks.front().begin == 0 ? static_cast<std::int32_t>(std::min<std::int64_t>(sinks, r.tokens - 1)) : 0;
    return r;
}

}  // namespace

// Follows what the functions below and moment_list allocate.
demand cuda_progressive_codec::seal_bytes(const sequence& s, const std::vector<unit>& before, token_range range, std::int64_t blocks, const segmenter& spans) const {
    const auto n = static_cast<std::size_t>(blocks);
    std::size_t most = std::max(kernel_array<cuda::exact_block>::bytes(n) + unit_pages::bytes(n), moment_bytes(s));
    if (s.newest && epochs_for(s, range.count) == 0 && s.since_fit >= std::max<std::int64_t>(options_.epoch_tokens, range.end() / 8)) {
        const auto decoded = units_in(before, {range.begin - s.since_fit, s.since_fit});
        most = std::max(most, view_bytes(cuda::list_sealed(decoded)) + decoded.size() * widest_page(*places_) + kernel_array<cuda::exact_block>::bytes(decoded.size()));
    }
    if (outlives_sketches(s, range)) {
        const auto all = before.size() + n;
        const auto bases = static_cast<std::size_t>(s.epochs + epochs_for(s, range.count)) + 1;
        most = std::max(most, all * layout_.sketch_block_bytes() + cuda::table_bytes(0, all, bases) + kernel_array<std::uint8_t*>::bytes(all));
    }
    auto need = progressive_books::seal_bytes(s, before, range, blocks, spans);
    need.host += most + (s.moments.use_count() > 1 && moment_bytes(s) > 0 ? layout_.moment_bytes() : 0);  // folding the rings makes the moments the sequence's own
    return need;
}

void cuda_progressive_codec::fit_and_encode(const progressive_sequence& s, const std::vector<std::shared_ptr<epoch>>& epochs, const std::vector<token_range>& ranges, std::vector<unit>& units, const seal_request& request) {
    sealer_->use(where_.context().joined());
    auto& mem = pool_->budget();
    for (std::size_t i = 0; i < epochs.size(); ++i) {
        auto& e = *epochs[i];
        std::vector<const unit*> mine;
        for (const auto& u : units) {
            if (u.payload.statistics == epochs[i]) mine.push_back(&u);
        }
        const auto blocks = exact_rows(request.pages, ranges[i].begin, ranges[i].end());
        const kernel_array<cuda::exact_block> kernel_blocks(mem, blocks);
        const auto rows = rows_of(blocks, kernel_blocks.data(), model_.sinks);
        const unit_pages pages(mem, mine);
        for (std::int32_t l = 0; l < static_cast<std::int32_t>(model_.layers.size()); ++l) {
            if (!owns(l)) continue;
            const auto& layer = places_->layers[static_cast<std::size_t>(l)];
            sealer_->fit_epoch(layer, rows, metric(s, l, request.length).data(), options_.metric_power, e.keys->device(), e.device(), e.keys->host());
            sealer_->encode(layer, rows, e.device(), e.keys->host(), e.keys->device(), e.keys->host(), pages.sketches.data(), pages.lines.data(), pages.exact.data());
        }
    }
}

void cuda_progressive_codec::encode_units(std::vector<unit>& units, const seal_request& request) {
    sealer_->use(where_.context().joined());
    auto& mem = pool_->budget();
    std::vector<const unit*> all;
    for (const auto& u : units) all.push_back(&u);
    const auto range = request.all();
    const auto blocks = exact_rows(request.pages, range.begin, range.end());
    const kernel_array<cuda::exact_block> kernel_blocks(mem, blocks);
    const auto rows = rows_of(blocks, kernel_blocks.data(), model_.sinks);
    const unit_pages pages(mem, all);
    const auto& e = *units.front().payload.statistics;  // blocks that are sealed while decoding share the newest epoch
    const auto& keys = *units.front().payload.keys;
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(model_.layers.size()); ++l) {
        if (!owns(l)) continue;
        sealer_->encode(places_->layers[static_cast<std::size_t>(l)], rows, e.device(), e.keys->host(), keys.device(), keys.host(), pages.sketches.data(), pages.lines.data(), pages.exact.data());
    }
}

// The rows are rebuilt as exact pages in pinned memory, one layer at a time, and fitted like rows that were never sealed.
void cuda_progressive_codec::fit_decoded(const progressive_sequence& s, epoch& e, const std::vector<unit>& units, token_range range, std::int64_t length) {
    sealer_->use(where_.context().joined());
    auto& mem = pool_->budget();
    const auto decoded = units_in(units, range);
    const auto image = kernel_view(mem, decoded);
    const auto page = widest_page(*places_);
    const auto strip = mem.allocate(tier::host, kind::workspace, page * decoded.size());
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(model_.layers.size()); ++l) {
        if (!owns(l)) continue;
        auto layer = places_->layers[static_cast<std::size_t>(l)];
        const auto heads = cuda::strip_heads(layer);
        cuda::reconstruct_blocks({layer, image.as<cuda::sequence_view>(), 0, static_cast<std::int32_t>(decoded.size()), strip.data(), page, heads}, where_.context().joined());
        layer.exact_page = heads;
        std::vector<cuda::exact_block> blocks;
        for (std::size_t i = 0; i < decoded.size(); ++i) blocks.push_back({strip.data() + i * page, decoded[i].begin, decoded[i].count, 0});
        const kernel_array<cuda::exact_block> kernel_blocks(mem, blocks);
        sealer_->fit_epoch(layer, rows_of(blocks, kernel_blocks.data(), model_.sinks), metric(s, l, length).data(), options_.metric_power, e.keys->device(), e.device(), e.keys->host());
    }
}

void cuda_progressive_codec::sketch_anew(const progressive_sequence& s, const std::vector<unit>& units, const std::vector<sketch_run>& runs, std::byte* planes, std::int64_t length) {
    sealer_->use(where_.context().joined());
    auto& mem = pool_->budget();
    const auto image = kernel_view(mem, units);
    std::vector<std::uint8_t*> targets;
    for (std::size_t i = 0; i < units.size(); ++i) targets.push_back(reinterpret_cast<std::uint8_t*>(planes + i * layout_.sketch_block_bytes()));
    const kernel_array<std::uint8_t*> sketches(mem, targets);
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(model_.layers.size()); ++l) {
        if (!owns(l)) continue;
        const auto m = metric(s, l, length);
        for (const auto& r : runs) {
            const auto begin = units[r.first].begin;
            const auto n = units[r.last - 1].end() - begin;
            const auto skip = begin == 0 ? static_cast<std::int32_t>(std::min<std::int64_t>(model_.sinks, n - 1)) : 0;
            sealer_->refit_keys(places_->layers[static_cast<std::size_t>(l)], image.as<cuda::sequence_view>(), static_cast<std::int32_t>(r.first), static_cast<std::int32_t>(r.last - r.first), skip, m.data(),
                                options_.metric_power, r.bases->device(), r.bases->host(), sketches.data() + r.first);
        }
    }
}

}  // namespace sekv
