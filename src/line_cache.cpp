#include "sekv/tier/line_cache.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace sekv {
namespace {

// Tag 0 marks an empty slot, so a position's tag is its quotient by the set count, plus one.
std::uint16_t tag_of(std::int64_t position, std::int32_t sets) noexcept { return static_cast<std::uint16_t>(position / sets + 1); }

// Per slot: a line, a tag and a clock; per head, the clock's present.
std::size_t head_bytes(std::int32_t slots, std::int32_t stride) noexcept {
    return slots == 0 ? 0 : (static_cast<std::size_t>(slots) * (static_cast<std::size_t>(stride) + 3) + 1 + 63) / 64 * 64;
}

}  // namespace

std::size_t line_cache::bytes(std::int32_t heads, std::int32_t slots, std::int32_t line_stride) noexcept { return static_cast<std::size_t>(heads) * head_bytes(slots, line_stride); }

line_cache::line_cache(memory& mem, std::int32_t heads, std::int32_t slots, std::int32_t line_stride, std::int64_t tokens) : heads_(heads), slots_(slots), stride_(line_stride), sets_(slots / ways) {
    if (slots > 0 && tokens / sets_ >= 65535)
        throw unsupported("A line cache of " + std::to_string(slots) + " slots per head can't tell " + std::to_string(tokens) + " tokens apart; set line_slots to at least " +
                          std::to_string((tokens / 65535 + 1) * ways) + ".");
    bytes_ = mem.allocate(tier::device, kind::line_cache, bytes(heads, slots, line_stride));
}

line_cache::head_state line_cache::at(std::int32_t head) const noexcept {
    std::byte* base = bytes_.data() + static_cast<std::size_t>(head) * head_bytes(slots_, stride_);
    const auto lines = static_cast<std::size_t>(slots_) * static_cast<std::size_t>(stride_);
    const auto n = static_cast<std::size_t>(slots_);
    return {reinterpret_cast<std::uint16_t*>(base + lines), reinterpret_cast<std::uint8_t*>(base + lines + 2 * n), reinterpret_cast<std::uint8_t*>(base + lines + 3 * n), base};
}

void line_cache::resolve(std::int32_t head, std::span<const std::int64_t> positions, const std::uint8_t* const* sources, std::int32_t line_bytes, const std::uint8_t** lines, zoom_metrics& metrics) {
    metrics.tokens += positions.size();
    if (slots_ == 0) {
        std::copy_n(sources, positions.size(), lines);
        metrics.misses += positions.size();
        metrics.bytes += positions.size() * static_cast<std::size_t>(line_bytes);
        return;
    }
    const auto h = at(head);
    const auto now = ++*h.now;
    std::uint64_t hits = 0;
    for (std::size_t i = 0; i < positions.size(); ++i) {  // all hits first, so that no miss evicts a line of this list
        const auto first = static_cast<std::int32_t>(positions[i] % sets_) * ways;
        const auto tag = tag_of(positions[i], sets_);
        const auto* at = std::find(h.tags + first, h.tags + first + ways, tag);
        lines[i] = nullptr;
        if (at == h.tags + first + ways) continue;
        const auto slot = at - h.tags;
        h.clocks[slot] = now;
        lines[i] = reinterpret_cast<const std::uint8_t*>(h.lines + slot * stride_);
        ++hits;
    }
    for (std::size_t i = 0; i < positions.size(); ++i) {
        if (lines[i] != nullptr) continue;
        const auto first = static_cast<std::int32_t>(positions[i] % sets_) * ways;
        std::int32_t victim = -1;
        int oldest = 0;
        for (std::int32_t w = first; w < first + ways; ++w) {
            const int age = h.tags[w] == 0 ? 256 : static_cast<std::uint8_t>(now - h.clocks[w]);
            if (age > oldest) oldest = age, victim = w;
        }
        lines[i] = sources[i];
        if (victim < 0) continue;  // every way serves this very list: stream past the cache
        auto* slot = h.lines + static_cast<std::ptrdiff_t>(victim) * stride_;
        std::memcpy(slot, sources[i], static_cast<std::size_t>(line_bytes));
        h.tags[victim] = tag_of(positions[i], sets_);
        h.clocks[victim] = now;
        lines[i] = reinterpret_cast<const std::uint8_t*>(slot);
    }
    metrics.hits += hits;
    metrics.misses += positions.size() - hits;
    metrics.bytes += (positions.size() - hits) * static_cast<std::size_t>(line_bytes);
}

void line_cache::invalidate_from(std::int64_t position) noexcept {
    for (std::int32_t head = 0; slots_ > 0 && head < heads_; ++head) {
        const auto h = at(head);
        for (std::int32_t s = 0; s < slots_; ++s) {
            const std::int64_t held = static_cast<std::int64_t>(h.tags[s] - 1) * sets_ + s / ways;
            if (h.tags[s] != 0 && held >= position) h.tags[s] = 0;
        }
    }
}

}  // namespace sekv
