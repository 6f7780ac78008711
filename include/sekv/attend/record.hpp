// The state of one open sequence.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sekv/attend/codec.hpp"
#include "sekv/config.hpp"
#include "sekv/span/key_novelty.hpp"
#include "sekv/span/segmenter.hpp"
#include "sekv/tier/rows.hpp"

namespace sekv {

/// Layers come in two classes: those that keep the whole context, which are sealed, and sliding-window layers, which keep their window's exact rows.
enum class layer_class : std::uint8_t { whole = 0, windowed = 1 };
inline constexpr std::size_t layer_classes = 2;

/// Positions [0, sealed_end) of whole-context layers are sealed units, [sealed_end, reserved) exact blocks; the leading sinks are kept exactly as well.
template <codec Codec>
struct sequence_record {
    using unit = sealed_unit<typename Codec::payload>;

    std::uint64_t quota = 0;
    std::int64_t capacity = 0;
    std::array<row_list, layer_classes> rows;
    page_ref sinks;                ///< the leading tokens' exact rows, once they are sealed
    std::int32_t sink_count = 0;   ///< of them that are in use; 0 while nothing is sealed
    std::vector<unit> sealed;
    typename Codec::sequence own;
    segmenter spans;
    std::optional<key_novelty> novelty;
    std::vector<std::int64_t> lengths;  ///< appended tokens by layer; shared-KV layers keep 0
    std::int64_t reserved = 0;          ///< tokens that have rows
    bool prefilling = true;
    std::uint64_t version = 0;          ///< rises whenever blocks or pages change

    [[nodiscard]] row_list& of(layer_class c) noexcept { return rows[static_cast<std::size_t>(c)]; }
    [[nodiscard]] const row_list& of(layer_class c) const noexcept { return rows[static_cast<std::size_t>(c)]; }
    [[nodiscard]] std::int64_t sealed_end() const noexcept { return sealed.empty() ? 0 : sealed.back().end(); }
    /// Lets the spans follow keys [tokens, row] of the novelty layer, token by token, since each signal depends on the cuts before it.
    void follow_keys(std::span<const float> keys, std::size_t row) {
        for (std::size_t at = 0; at < keys.size(); at += row) {
            spans.push(std::max(0.0F, novelty->push(keys.subspan(at, row))));
            novelty->cut(std::max(spans.open_begin(), novelty->begin()));
        }
    }
    /// The open span's mean is summed again from keys [tokens, row] of positions from `begin` on.
    void restart_keys(std::int64_t begin, std::span<const float> keys, std::size_t row) {
        novelty->restart(begin);
        for (std::size_t at = 0; at < keys.size(); at += row) (void)novelty->push(keys.subspan(at, row));
    }
    /// Slots that scoring everything takes: the length, but 64 for each sealed block, even one that a truncation cut short.
    [[nodiscard]] std::int64_t scored_tokens() const noexcept {
        const auto length = *std::max_element(lengths.begin(), lengths.end());
        return std::max(length, static_cast<std::int64_t>(sealed.size()) * 64 + length - sealed_end());
    }
};

}  // namespace sekv
