// The books of the progressive preset: what a sequence owns beside its blocks, how it is forked, truncated and counted, and which epoch a block belongs to.
#include "sekv/attend/progressive.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sekv/codec/metric.hpp"

namespace sekv {
namespace {

constexpr std::size_t kept_snapshots = 3;  // with one per 64 tokens, more than `rejectable` reaches back

}  // namespace

progressive_books::progressive_books(const model_shape& model, const options& o, dtype stored, block_pool& pool) : model_(model), options_(o), stored_(stored), layout_((o.validate(), model), o), pool_(&pool) {
    for (std::size_t l = 0; l < model.layers.size(); ++l) {
        if (layout_.head_index(static_cast<std::int32_t>(l), 0) < 0) continue;
        for (std::int32_t h = 0; h < model.layers[l].kv_heads; ++h) {
            layer_of_.push_back(static_cast<std::int32_t>(l));
            head_of_.push_back(h);
        }
    }
    for (std::int32_t i = 0; i < layout_.heads(); ++i) {
        widest_line_ = std::max(widest_line_, o.exact_tier ? static_cast<std::int32_t>(exact_stride(i)) : layout_.format(i).line_stride);
        exact_offset_.push_back(exact_block_bytes_);
        if (o.exact_tier) exact_block_bytes_ += static_cast<std::size_t>(exact_stride(i)) * host::block_tokens;
    }
    if (o.prior && o.prior->fingerprint != model.fingerprint)
        throw format_error("The calibration is of model \"" + o.prior->fingerprint + "\", not of \"" + model.fingerprint + "\"; calibrate this model.");
}

std::int64_t progressive_books::exact_stride(std::int32_t index) const noexcept {
    const auto& f = layout_.format(index);
    return static_cast<std::int64_t>(f.key_size + f.value_size) * static_cast<std::int64_t>(size_of(stored_));
}

progressive_sequence progressive_books::open_books(std::int64_t capacity) {
    return {line_cache(pool_->budget(), layout_.heads(), options_.line_slots, widest_line_, capacity), pool_->make(tier::host, kind::statistics, layout_.moment_bytes()),
            std::vector<double>(model_.layers.size(), 0.0), {}, nullptr, nullptr, 0, 0, 0, 0, capacity};
}

progressive_sequence progressive_books::fork_books(const progressive_sequence& from) {
    // Reserved for the longest sequence that the parent's tags can tell apart; the child's cache starts empty.
    return {line_cache(pool_->budget(), layout_.heads(), options_.line_slots, widest_line_, 0), from.moments, from.samples, from.snapshots, from.newest, from.newest_keys, from.since_fit, from.epochs, from.sketched_at, from.sealed_end, from.capacity};
}

void progressive_books::truncate_books(progressive_sequence& s, std::int64_t length) noexcept {
    if (length < s.sealed_end) {
        s.since_fit = std::max<std::int64_t>(0, s.since_fit - (s.sealed_end - length));
        s.sealed_end = length;
    }
    if (s.snapshots.empty() || s.snapshots.back().length <= length) return;
    while (s.snapshots.size() > 1 && s.snapshots.back().length > length) s.snapshots.pop_back();
    s.moments = s.snapshots.back().moments;
    s.samples = s.snapshots.back().samples;
}

usage progressive_books::sequence_usage(const progressive_sequence& s, const std::vector<unit>& units) const {
    usage u;
    u.at(tier::device, kind::line_cache) = line_cache::bytes(layout_.heads(), options_.line_slots, widest_line_);
    const page* moments = nullptr;  // a snapshot shares the page of the next until queries change it
    for (const auto& x : s.snapshots) {
        u.at(tier::host, kind::statistics) += x.moments.get() != moments ? layout_.moment_bytes() : 0;
        moments = x.moments.get();
    }
    u.at(tier::host, kind::statistics) += s.moments.get() != moments ? layout_.moment_bytes() : 0;
    u.at(tier::device, kind::sketch) = units.size() * layout_.sketch_block_bytes();
    u.at(tier::host, kind::lines) = units.size() * layout_.line_block_bytes();
    u.at(tier::host, kind::exact) = units.size() * exact_block_bytes_;
    const auto add_keys = [&](const key_bases* k) {
        if (k == nullptr) return;
        u.at(tier::device, kind::basis) += layout_.key_device_bytes();
        u.at(tier::host, kind::basis) += layout_.key_host_bytes();
    };
    const epoch* last = nullptr;
    const auto add_epoch = [&](const epoch* e, const key_bases* sketched) {
        if (e == nullptr || e == last) return;
        u.at(tier::device, kind::basis) += layout_.epoch_bytes();
        add_keys(e->keys.get());
        if (sketched != e->keys.get()) add_keys(sketched);
        last = e;
    };
    for (const auto& b : units) add_epoch(b.payload.statistics.get(), b.payload.keys.get());
    add_epoch(s.newest.get(), s.newest_keys.get());
    return u;
}

std::int64_t progressive_books::epochs_for(const progressive_sequence& s, std::int64_t tokens) const noexcept {
    if (s.newest && tokens < options_.epoch_tokens / 2) return 0;
    const auto length = std::max<std::int64_t>(options_.epoch_tokens, tokens / 8);
    return std::max<std::int64_t>(1, (tokens + length / 2) / length);
}

bool progressive_books::outlives_sketches(const progressive_sequence& s, token_range range) const noexcept {
    return options_.horizon > 0 && (s.newest ? s.sketched_at : range.end()) + options_.horizon < s.capacity;
}

demand progressive_books::seal_bytes(const progressive_sequence& s, const std::vector<unit>&, token_range range, std::int64_t blocks, const segmenter&) const {
    const auto n = static_cast<std::uint64_t>(blocks);
    auto fits = static_cast<std::uint64_t>(epochs_for(s, range.count));
    if (fits == 0 && s.since_fit >= options_.epoch_tokens) fits = 1;
    // The next generation's bases will stand beside the present one's.
    const std::uint64_t spare = outlives_sketches(s, range) ? static_cast<std::uint64_t>(s.epochs) + fits : 0;
    return {n * layout_.sketch_block_bytes() + fits * (layout_.epoch_bytes() + layout_.key_device_bytes()) + spare * layout_.key_device_bytes(),
            n * (layout_.line_block_bytes() + exact_block_bytes_) + fits * layout_.key_host_bytes() + spare * layout_.key_host_bytes()};
}

void progressive_books::copy_moments(const page& from, page& to) { pool_->budget().resource().copy(to.data(), tier::host, from.data(), tier::host, layout_.moment_bytes()); }

void progressive_books::own_moments(progressive_sequence& s) {
    if (s.moments.use_count() == 1) return;
    auto own = pool_->make(tier::host, kind::statistics, layout_.moment_bytes());
    copy_moments(*s.moments, *own);
    s.moments = std::move(own);
}

void progressive_books::count_queries(progressive_sequence& s, std::size_t owner, std::int32_t group, std::int64_t tokens) const {
    const double decay = std::exp(-1.0 / options_.metric_memory);
    const double faded = std::pow(decay, static_cast<double>(tokens));
    auto& n = s.samples[owner];
    n = n * faded + static_cast<double>(group) * (1 - faded) / (1 - decay);
}

void progressive_codec::observe(sequence& s, std::int32_t layer, const float* queries, std::int32_t group, std::int64_t tokens) {
    const auto& l = model_.layers[static_cast<std::size_t>(layer)];
    const auto owner = l.kv_source >= 0 ? l.kv_source : layer;
    if (layout_.head_index(owner, 0) < 0) return;
    own_moments(s);
    if (tokens == 0) return;
    const double decay = std::exp(-1.0 / options_.metric_memory);
    const auto stride = static_cast<std::int64_t>(l.query_heads()) * l.key_size;
    const auto body = [&](std::int64_t h, std::int32_t) {
        float* m = s.moments->as<float>(layout_.moment_offset(layout_.head_index(owner, static_cast<std::int32_t>(h))));
        add_queries({m, l.key_size}, queries + h * group * l.key_size, stride, tokens, group, decay);
    };
    if (tokens * group * l.key_size >= 512) {
        executor_->run(l.kv_heads, body);
    } else {
        for (std::int32_t h = 0; h < l.kv_heads; ++h) body(h, 0);  // a step's few queries aren't worth waking threads
    }
    count_queries(s, static_cast<std::size_t>(owner), group, tokens);
}

bool progressive_books::advance_books(progressive_sequence& s, std::vector<unit>& units, std::int64_t length, std::uint64_t device_room) {
    const bool due = s.snapshots.empty() ? length > 0 : length >= s.snapshots.back().length + host::block_tokens;
    if (due) {
        s.snapshots.reserve(kept_snapshots + 1);
        s.snapshots.push_back({length, s.moments, s.samples});
        if (s.snapshots.size() > kept_snapshots) s.snapshots.erase(s.snapshots.begin());
    }
    if (!sketches_due(s, units, length, device_room)) return false;
    resketch(s, units, length);
    return true;
}

bool progressive_books::sketches_due(const progressive_sequence& s, const std::vector<unit>& units, std::int64_t length, std::uint64_t device_room) const noexcept {
    if (options_.horizon == 0 || units.empty() || length < s.sketched_at + options_.horizon) return false;
    std::uint64_t epochs = 1;
    for (std::size_t i = 1; i < units.size(); ++i) epochs += units[i].payload.statistics != units[i - 1].payload.statistics ? 1 : 0;
    return epochs * layout_.key_device_bytes() <= device_room;
}

std::vector<double> progressive_books::metric_of(const progressive_sequence& s, std::int32_t layer, std::int32_t head, std::int64_t length) const {
    const auto index = layout_.head_index(layer, head);
    const auto d = layout_.format(index).key_size;
    std::vector<double> prior;
    if (options_.prior) {
        const auto& c = options_.prior->layers[static_cast<std::size_t>(layer)];
        const auto horizon = std::max(options_.horizon, 1);
        prior = turn_moment(c.moment(head), model_.layers[static_cast<std::size_t>(layer)].rope, length, length + horizon);
    }
    return blend_metric(s.moments->as<float>(layout_.moment_offset(index)), s.samples[static_cast<std::size_t>(layer)], prior.empty() ? nullptr : prior.data(), d, options_.shrinkage);
}

}  // namespace sekv
