// What the cache asks of a codec: to seal exact rows into a smaller form, and to attend and decode that form.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sekv/attend/softmax_state.hpp"
#include "sekv/core/shape.hpp"
#include "sekv/exec/arena.hpp"
#include "sekv/exec/executor.hpp"
#include "sekv/exec/memory.hpp"
#include "sekv/span/segmenter.hpp"
#include "sekv/tier/block_pool.hpp"
#include "sekv/tier/rows.hpp"
#include "sekv/tier/transfer.hpp"

namespace sekv {

struct token_range {
    std::int64_t begin = 0;
    std::int64_t count = 0;
    [[nodiscard]] std::int64_t end() const noexcept { return begin + count; }
};

/// Reads exact rows as floats: keys [count, key_size], values [count, value_size]. Thread-safe.
class row_reader {
public:
    row_reader() = default;
    row_reader(const row_reader&) = delete;
    row_reader& operator=(const row_reader&) = delete;
    virtual ~row_reader() = default;
    virtual void read(std::int32_t layer, std::int32_t head, token_range range, float* keys, float* values) const = 0;
};

/// Consecutive blocks to seal, oldest first.
struct seal_request {
    std::span<const token_range> blocks;  ///< at most 64 tokens each, without gaps
    std::span<const row_block> pages;     ///< the same blocks' exact rows as they lie
    const row_reader* rows = nullptr;
    const segmenter* spans = nullptr;
    std::int64_t length = 0;  ///< of the sequence now

    [[nodiscard]] token_range all() const noexcept { return blocks.empty() ? token_range{} : token_range{blocks.front().begin, blocks.back().end() - blocks.front().begin}; }
};

/// A sealed range of positions, of any length; a seal makes at most one unit per block. `count` falls when a truncation cuts the range.
template <class Payload>
struct sealed_unit {
    std::int64_t begin = 0;
    std::int32_t count = 0;
    Payload payload;
    [[nodiscard]] std::int64_t end() const noexcept { return begin + count; }
};

/// One query token of one KV head: the group's queries, scaled, and the exact rows' softmax, to which the codec adds what is sealed.
struct head_query {
    std::int32_t layer = 0;  ///< the layer that owns the keys
    std::int32_t head = 0;
    const float* queries = nullptr;  ///< [group, key_size]
    std::int64_t position = 0;       ///< sealed tokens after it are not attended
    std::int32_t sinks = 0;          ///< leading tokens that are among the exact rows
    float soft_cap = 0;
    softmax_state* state = nullptr;
    float scale = 1;  ///< the factor that the queries carry, for a codec that wants them without it
};

/// Seals exact rows into a smaller form. See progressive_books for what each member must do.
template <class C>
concept codec = requires(C c, const C k, typename C::sequence& s, const typename C::sequence& ks, std::vector<sealed_unit<typename C::payload>>& units,
                         const std::vector<sealed_unit<typename C::payload>>& kunits, const seal_request& r, const segmenter& kspans) {
    typename C::options;
    requires std::copyable<typename C::payload>;
    requires std::movable<typename C::sequence>;
    { C::name } -> std::convertible_to<const char*>;
    { c.open(std::int64_t{}) } -> std::same_as<typename C::sequence>;
    { c.fork(ks, std::int64_t{}) } -> std::same_as<typename C::sequence>;
    { c.truncate(s, std::int64_t{}) } noexcept;
    { k.sequence_usage(ks, kunits) } -> std::same_as<usage>;
    { k.seal_bytes(ks, kunits, token_range{}, std::int64_t{}, kspans) } -> std::same_as<demand>;
    { k.least_seal(ks) } -> std::convertible_to<std::int64_t>;
    { c.seal(s, kunits, r) } -> std::same_as<std::vector<sealed_unit<typename C::payload>>>;
    { c.advance(s, units, std::int64_t{}, std::uint64_t{}) } -> std::same_as<bool>;  // whether sealed units changed
};

/// A codec whose sealed form the host attends and decodes, head by head.
template <class C>
concept host_codec = codec<C> && requires(C c, const C k, typename C::sequence& s, const std::vector<sealed_unit<typename C::payload>>& kunits, const head_query& q, arena& a, zoom_metrics& m, const float* rows, float* out) {
    c.observe(s, std::int32_t{}, rows, std::int32_t{}, std::int64_t{});
    k.layout_scratch(a, std::int32_t{}, std::int32_t{}, std::int64_t{});
    k.attend(s, kunits, q, a, m);
    k.decode(kunits.front(), std::int32_t{}, std::int32_t{}, token_range{}, out, out);
};

}  // namespace sekv
