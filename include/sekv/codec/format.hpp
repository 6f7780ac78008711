// Sizes of one KV head's codes, derived once from its shape and the options.
#pragma once

#include <cstdint>

#include "sekv/codec/options.hpp"
#include "sekv/core/shape.hpp"
#include "sekv/exec/line_ops.hpp"
#include "sekv/exec/sketch_ops.hpp"

namespace sekv {

/// R1: planes of 32 bytes per block of 64 tokens, keys' planes first. R2: a line per token of [key codes][scale byte][value codes].
struct head_format {
    std::int32_t key_size = 0;
    std::int32_t value_size = 0;
    std::int32_t key_bits = 0;
    std::int32_t value_bits = 0;
    std::int32_t key_line_bytes = 0;    ///< budget of the key's codes
    std::int32_t value_line_bytes = 0;  ///< budget of the value's codes, its scale byte not in it
    std::int32_t line_stride = 0;       ///< 64-byte aligned where the line is a multiple of 64 bytes, else 16

    [[nodiscard]] std::int32_t key_planes() const noexcept { return key_bits / 4; }
    [[nodiscard]] std::int32_t value_planes() const noexcept { return value_bits / 4; }
    [[nodiscard]] std::int64_t sketch_bytes() const noexcept { return static_cast<std::int64_t>(key_planes() + value_planes()) * host::plane_bytes; }
    [[nodiscard]] std::int64_t line_block_bytes() const noexcept { return static_cast<std::int64_t>(line_stride) * host::block_tokens; }
    [[nodiscard]] std::int32_t value_line_offset() const noexcept { return key_line_bytes + 1; }
    [[nodiscard]] std::int32_t line_bytes() const noexcept { return value_line_offset() + value_line_bytes; }
};

[[nodiscard]] inline head_format make_head_format(const layer_shape& l, const progressive_options& o) {
    head_format f;
    f.key_size = l.key_size;
    f.value_size = l.value_size;
    f.key_bits = o.key_sketch_bits > 0 ? o.key_sketch_bits : (l.key_size < 128 ? 80 : 96);
    f.value_bits = o.value_sketch_bits > 0 ? o.value_sketch_bits : 32;
    const auto bytes = [&](std::int32_t size) {
        const float factor = o.line_factor > 0 ? o.line_factor : (size < 128 ? 1.25F : 1.0F);
        return static_cast<std::int32_t>(std::lround(factor * static_cast<float>(size) / 2));
    };
    f.key_line_bytes = bytes(l.key_size);
    f.value_line_bytes = bytes(l.value_size) - 1;
    f.line_stride = (f.line_bytes() + 15) / 16 * 16;
    return f;
}

}  // namespace sekv
