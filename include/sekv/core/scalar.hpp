// Element types of keys, values and queries.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>

namespace sekv {

/// bfloat16: the upper half of a float, rounded to nearest even. NaN stays NaN.
struct bf16 {
    std::uint16_t bits = 0;
    bf16() = default;
    explicit bf16(float x) noexcept {
        const auto u = std::bit_cast<std::uint32_t>(x);
        bits = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<std::uint16_t>((u >> 16) | 0x40u)
                                               : static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
    explicit operator float() const noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

/// IEEE binary16. Conversions are the compiler's (F16C or fp16 instructions where the target has them).
struct fp16 {
    std::uint16_t bits = 0;
    fp16() = default;
    explicit fp16(float x) noexcept : bits(std::bit_cast<std::uint16_t>(static_cast<_Float16>(x))) {}
    explicit operator float() const noexcept { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
};

/// The element type of a buffer that the caller owns, known at run time.
enum class dtype : std::uint8_t { f32, f16, bf16 };

template <class T>
concept scalar = std::same_as<T, float> || std::same_as<T, bf16> || std::same_as<T, fp16>;

template <scalar T>
inline constexpr dtype dtype_of = std::same_as<T, float> ? dtype::f32 : std::same_as<T, fp16> ? dtype::f16 : dtype::bf16;

[[nodiscard]] constexpr std::size_t size_of(dtype type) noexcept { return type == dtype::f32 ? 4 : 2; }

static_assert(scalar<float> && scalar<bf16> && scalar<fp16> && !scalar<double>);
static_assert(sizeof(bf16) == 2 && sizeof(fp16) == 2);

}  // namespace sekv
