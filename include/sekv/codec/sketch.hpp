// R1: how components are laid into nibbles, and the encoder of one block. Layout: exec/sketch_ops.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sekv/exec/sketch_ops.hpp"

namespace sekv {

/// The steps and fields of one head's key or value sketch. A component of 8 bits is two fields, its high nibble first; every other component is one.
struct sketch_code {
    std::vector<std::uint8_t> bits;         ///< per component: 0, 1, 2, 4 or 8
    std::vector<float> step;                ///< per component; 0 where bits is 0
    std::vector<float> error;               ///< mean squared code error per component: its variance where bits is 0
    std::vector<host::sketch_field> fields; ///< planes count from 0
};

/// Allots `bits` over the components of codes [count, size] and chooses their steps. variance: of the components.
[[nodiscard]] sketch_code fit_sketch(const float* codes, std::int64_t count, std::int32_t size, std::span<const double> variance, std::int32_t bits);

/// Lays components of 8, 4, 2, 1 bits into nibbles, widest first, so that no field straddles two.
[[nodiscard]] std::vector<host::sketch_field> lay_fields(std::span<const std::uint8_t> bits);

/// A field's contribution to its component: code * factor + offset, in units of the value.
struct field_level {
    float factor = 0;
    float offset = 0;
};
[[nodiscard]] field_level level_of(std::span<const host::sketch_field> fields, std::size_t f, std::int32_t bits, float step) noexcept;

/// Packs count <= 64 tokens' codes [count, size] into planes that start at `planes` (zeroed by the caller).
void pack_sketch(const float* codes, std::int64_t count, std::int32_t size, std::span<const host::sketch_field> fields, const std::uint8_t* bits, const float* step, std::uint8_t* planes);

/// Decoded components of one block's tokens: out[count, size], components without bits 0.
void unpack_sketch(const std::uint8_t* planes, std::int64_t count, std::int32_t size, std::span<const host::sketch_field> fields, const std::uint8_t* bits, const float* step, float* out);

}  // namespace sekv
