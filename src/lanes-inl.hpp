// Vectors of floats for the instruction set being compiled; included once per set (Highway's foreach_target).
#if defined(SEKV_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef SEKV_LANES_INL_HPP
#undef SEKV_LANES_INL_HPP
#else
#define SEKV_LANES_INL_HPP
#endif

#include <cstdint>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "sekv/core/scalar.hpp"

#undef SEKV_UNROLL
#if defined(__clang__)
#define SEKV_UNROLL _Pragma("unroll")
#else
#define SEKV_UNROLL _Pragma("GCC unroll 8")  // before loops over arrays of vectors, which else go through memory
#endif

HWY_BEFORE_NAMESPACE();
namespace sekv::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using tag = hn::ScalableTag<float>;
using vec = hn::Vec<tag>;
constexpr auto lanes = static_cast<std::int64_t>(hn::MaxLanes(tag()));
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
constexpr bool many_registers = true;  // 32 vectors
#else
constexpr bool many_registers = false;  // 16 vectors
#endif
#undef SEKV_FP16_INSTRUCTIONS
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
#define SEKV_FP16_INSTRUCTIONS 1
#else
#define SEKV_FP16_INSTRUCTIONS 0  // Highway 1.0.3 emulates, wrongly for infinity, NaN and some subnormals
#endif

HWY_INLINE vec load(const float* p) { return hn::LoadU(tag(), p); }
HWY_INLINE vec load(const bf16* p) { return hn::PromoteTo(tag(), hn::LoadU(hn::Rebind<hwy::bfloat16_t, tag>(), reinterpret_cast<const hwy::bfloat16_t*>(p))); }
HWY_INLINE vec load(const fp16* p) {
#if SEKV_FP16_INSTRUCTIONS
    return hn::PromoteTo(tag(), hn::LoadU(hn::Rebind<hwy::float16_t, tag>(), reinterpret_cast<const hwy::float16_t*>(p)));
#else
    // Exponent and mantissa moved into place mean the value times 2^-112, subnormals included; only exponent 31 differs.
    const hn::RebindToSigned<tag> di;
    const auto bits = hn::PromoteTo(di, hn::LoadU(hn::Rebind<std::uint16_t, tag>(), reinterpret_cast<const std::uint16_t*>(p)));
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7fff));
    const auto scaled = hn::Mul(hn::BitCast(tag(), hn::ShiftLeft<13>(magnitude)), hn::Set(tag(), 0x1p112F));
    const auto special = hn::And(hn::VecFromMask(di, hn::Gt(magnitude, hn::Set(di, 0x7bff))), hn::Set(di, 0x7f800000));
    const auto sign = hn::ShiftLeft<16>(hn::Sub(bits, magnitude));
    return hn::BitCast(tag(), hn::Or(hn::BitCast(di, scaled), hn::Or(special, sign)));
#endif
}

/// Elements p[0, 2 * lanes) as two vectors. bf16 come as evens and odds: a shift and a mask instead of two shuffles.
template <class T>
HWY_INLINE void load_pair(const T* p, vec& first, vec& second) {
    if constexpr (std::is_same_v<T, bf16>) {
        const hn::RebindToUnsigned<tag> du;
        const auto both = hn::LoadU(du, reinterpret_cast<const std::uint32_t*>(p));
        first = hn::BitCast(tag(), hn::ShiftLeft<16>(both));
        second = hn::BitCast(tag(), hn::And(both, hn::Set(du, 0xffff0000U)));
    } else {
        first = load(p);
        second = load(p + lanes);
    }
}

template <class T>
HWY_INLINE void prefetch(const T* p, std::int64_t count) {
    const auto* const bytes = reinterpret_cast<const char*>(p);
    for (std::int64_t b = 0; b < count * static_cast<std::int64_t>(sizeof(T)); b += 64) hwy::Prefetch(bytes + b);
}

}  // namespace sekv::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
