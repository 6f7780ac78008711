// Device copies of recently zoomed lines: set-associative, 32 ways, a 16-bit tag and an 8-bit clock per slot (design.md section 3).
#pragma once

#include <cstdint>
#include <span>

#include "sekv/exec/memory.hpp"
#include "sekv/tier/transfer.hpp"

namespace sekv {

/// The line cache of one sequence: `slots` lines for each of `heads` KV heads. It holds copies only, so that its state changes time, never output.
/// Different heads may be used by different threads at once.
class line_cache {
public:
    static constexpr std::int32_t ways = 32;

    /// slots: a multiple of 32, 0 for a cache that never hits. line_stride: the widest line, bytes. tokens: the longest sequence that tags must tell apart;
    /// more sets than slots / 32 are never made, so tokens must be at most 65,535 * slots / 32 (else unsupported is thrown).
    line_cache(memory& mem, std::int32_t heads, std::int32_t slots, std::int32_t line_stride, std::int64_t tokens);
    line_cache(line_cache&&) noexcept = default;
    line_cache& operator=(line_cache&&) noexcept = default;

    [[nodiscard]] static std::size_t bytes(std::int32_t heads, std::int32_t slots, std::int32_t line_stride) noexcept;

    /// lines[i] = the line of positions[i] (ascending): in the cache where it is or was put now, else at sources[i], the host tier's copy, of which `line_bytes` count.
    /// The pointers stay valid until the head's next call.
    void resolve(std::int32_t head, std::span<const std::int64_t> positions, const std::uint8_t* const* sources, std::int32_t line_bytes, const std::uint8_t** lines, zoom_metrics& metrics);
    /// The slots' memory, laid out per head as [lines][16-bit tags][clocks][now]; null without slots.
    [[nodiscard]] std::byte* data() const noexcept { return bytes_.data(); }
    /// Forgets lines of positions from `position` on, in all heads.
    void invalidate_from(std::int64_t position) noexcept;

private:
    struct head_state {
        std::uint16_t* tags;
        std::uint8_t* clocks;
        std::uint8_t* now;
        std::byte* lines;
    };
    [[nodiscard]] head_state at(std::int32_t head) const noexcept;

    std::int32_t heads_, slots_, stride_, sets_;
    buffer bytes_;
};

}  // namespace sekv
