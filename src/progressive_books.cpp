// Which epoch and sketch generation a sealed block belongs to: the part of sealing that is the same on every backend.
#include <algorithm>

#include "sekv/attend/progressive.hpp"

namespace sekv {

std::vector<progressive_books::unit> progressive_books::seal(progressive_sequence& s, const std::vector<unit>& before, const seal_request& request) {
    const auto all = request.all();
    const auto fits = epochs_for(s, all.count);
    auto newest = s.newest;
    auto newest_keys = s.newest_keys;
    auto since_fit = s.since_fit;
    if (fits == 0 && since_fit >= std::max<std::int64_t>(options_.epoch_tokens, request.length / 8)) {
        newest = std::make_shared<epoch>(layout_, pool_->budget());
        newest_keys = newest->keys;
        fit_decoded(s, *newest, before, {all.begin - since_fit, since_fit}, request.length);
        since_fit = 0;
    }

    std::vector<std::shared_ptr<epoch>> epochs;
    for (std::int64_t i = 0; i < fits; ++i) epochs.push_back(std::make_shared<epoch>(layout_, pool_->budget()));
    std::vector<unit> units;
    const auto blocks = static_cast<std::int64_t>(request.blocks.size());
    std::vector<token_range> ranges(static_cast<std::size_t>(fits));
    for (std::int64_t b = 0; b < blocks; ++b) {
        const auto& range = request.blocks[static_cast<std::size_t>(b)];
        unit u{range.begin, static_cast<std::int32_t>(range.count), {newest, newest_keys, nullptr, nullptr, nullptr}};
        if (fits > 0) {
            const auto which = static_cast<std::size_t>(b * fits / blocks);
            if (ranges[which].count == 0) ranges[which].begin = range.begin;
            ranges[which].count += range.count;
            u.payload.statistics = epochs[which];
            u.payload.keys = epochs[which]->keys;
        }
        u.payload.sketch = pool_->make(tier::device, kind::sketch, layout_.sketch_block_bytes());
        u.payload.lines = pool_->make(tier::host, kind::lines, layout_.line_block_bytes());
        if (options_.exact_tier) u.payload.exact = pool_->make(tier::host, kind::exact, exact_block_bytes_);
        units.push_back(std::move(u));
    }
    if (fits > 0) {
        fit_and_encode(s, epochs, ranges, units, request);
        newest = epochs.back();
        newest_keys = newest->keys;
        since_fit = 0;
    } else {
        encode_units(units, request);
        since_fit += all.count;
    }
    if (!s.newest) s.sketched_at = request.length;
    s.epochs += newest != s.newest ? std::max<std::int64_t>(fits, 1) : 0;
    s.newest = std::move(newest);
    s.newest_keys = std::move(newest_keys);
    s.since_fit = since_fit;
    s.sealed_end = all.end();
    return units;
}

void progressive_books::resketch(progressive_sequence& s, std::vector<unit>& units, std::int64_t length) {
    std::vector<sketch_run> runs;  // of blocks with one epoch; each gets new key bases, fitted on its decoded keys in the present metric
    for (std::size_t i = 0; i < units.size(); ++i) {
        if (runs.empty() || units[i].payload.statistics != units[runs.back().first].payload.statistics) runs.push_back({i, i, std::make_shared<key_bases>(layout_, pool_->budget())});
        runs.back().last = i + 1;
    }
    // New planes go to a host buffer first: a failure leaves every sketch as it was, and pages that no fork shares are overwritten in place.
    const auto planes = pool_->budget().allocate(tier::host, kind::workspace, units.size() * layout_.sketch_block_bytes());
    std::vector<page_ref> fresh(units.size());
    for (std::size_t i = 0; i < units.size(); ++i) {
        if (units[i].payload.sketch.use_count() > 1) fresh[i] = pool_->make(tier::device, kind::sketch, layout_.sketch_block_bytes());
    }
    sketch_anew(s, units, runs, planes.data(), length);
    auto& mover = pool_->budget().resource();
    for (const auto& r : runs) {
        for (std::size_t i = r.first; i < r.last; ++i) {
            auto& p = units[i].payload;
            if (fresh[i]) {
                mover.copy(fresh[i]->data(), tier::device, p.sketch->data(), tier::device, layout_.sketch_block_bytes());
                p.sketch = fresh[i];
            }
            copy_key_planes(p.sketch->data(), planes.data() + i * layout_.sketch_block_bytes());
            p.keys = r.bases;
        }
        if (units[r.first].payload.statistics == s.newest) s.newest_keys = r.bases;
    }
    s.sketched_at = length;
}

// The value's planes don't depend on the metric and stay. Heads of one format lie at equal distances, so a page takes few copies.
void progressive_books::copy_key_planes(std::byte* page, const std::byte* planes) {
    auto& mover = pool_->budget().resource();
    for (std::int32_t first = 0; first < layout_.heads();) {
        const auto& f = layout_.format(first);
        const auto pitch = static_cast<std::size_t>(f.sketch_bytes());
        auto last = first + 1;
        while (last < layout_.heads() && layout_.format(last).key_planes() == f.key_planes() && layout_.format(last).sketch_bytes() == f.sketch_bytes()) ++last;
        const auto at = layout_.sketch_offset(first);
        mover.copy_rows(page + at, tier::device, pitch, planes + at, tier::host, pitch, static_cast<std::size_t>(f.key_planes() * host::plane_bytes), static_cast<std::size_t>(last - first));
        first = last;
    }
}

}  // namespace sekv
