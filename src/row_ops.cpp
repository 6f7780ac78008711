// Element by element: conversions, reductions, softmax's exponential. See row_products.cpp and gemm.cpp for the rest.
#include "sekv/exec/row_ops.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)  // as in row_products.cpp
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "../src/row_ops.cpp"  // relative to the include directory
// The order matters: foreach_target.h includes this file once per instruction set and so comes first.
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/contrib/math/math-inl.h"
#include "lanes-inl.hpp"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace sekv::host::HWY_NAMESPACE {

template <class T>
HWY_INLINE void widen(const T* src, std::int64_t count, float* dst) {
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) hn::StoreU(load(src + i), tag(), dst + i);
    for (; i < count; ++i) dst[i] = static_cast<float>(src[i]);
}

void widen_bf16(const bf16* src, std::int64_t count, float* dst) { widen(src, count, dst); }
void widen_fp16(const fp16* src, std::int64_t count, float* dst) { widen(src, count, dst); }

/// Rounds to nearest even; Highway's own conversion truncates here.
void narrow_bf16(const float* src, std::int64_t count, bf16* dst) {
    const hn::RebindToUnsigned<tag> du;
    const hn::RebindToSigned<tag> di;
    const hn::Rebind<std::uint16_t, tag> d16;
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const auto x = load(src + i);
        const auto u = hn::BitCast(du, x);
        const auto upper = hn::ShiftRight<16>(u);
        const auto odd = hn::And(upper, hn::Set(du, 1U));
        const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fffU))));
        const auto quiet = hn::Or(upper, hn::Set(du, 0x40U));
        const auto bits = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), quiet, rounded);
        hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, bits)), d16, reinterpret_cast<std::uint16_t*>(dst + i));
    }
    for (; i < count; ++i) dst[i] = bf16(src[i]);
}

void narrow_fp16(const float* src, std::int64_t count, fp16* dst) {
    std::int64_t i = 0;
#if SEKV_FP16_INSTRUCTIONS
    const hn::Rebind<hwy::float16_t, tag> d16;
    for (; i + lanes <= count; i += lanes) hn::StoreU(hn::DemoteTo(d16, load(src + i)), d16, reinterpret_cast<hwy::float16_t*>(dst + i));
#endif
    for (; i < count; ++i) dst[i] = fp16(src[i]);
}

bool finite(const float* src, std::int64_t count) {
    const hn::RebindToUnsigned<tag> du;
    const auto exponent = hn::Set(du, 0x7f800000U);
    const auto is_special = [](float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7f800000U) == 0x7f800000U; };
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const auto special = hn::Eq(hn::And(hn::BitCast(du, load(src + i)), exponent), exponent);
        if (!hn::AllFalse(du, special)) return false;
    }
    for (; i < count; ++i)
        if (is_special(src[i])) return false;
    return true;
}

float largest(const float* values, std::int64_t count) {
    auto top = -std::numeric_limits<float>::infinity();
    std::int64_t i = 0;
    if (count >= lanes) {
        vec a = hn::Set(tag(), top), b = a;
        for (; i + 2 * lanes <= count; i += 2 * lanes) {
            a = hn::Max(a, load(values + i));
            b = hn::Max(b, load(values + i + lanes));
        }
        if (i + lanes <= count) {
            a = hn::Max(a, load(values + i));
            i += lanes;
        }
        top = hn::GetLane(hn::MaxOfLanes(tag(), hn::Max(a, b)));
    }
    for (; i < count; ++i) top = std::max(top, values[i]);
    return top;
}

/// exp(x), and 0 where that would be subnormal: subnormals take a slow path in every later operation. The clamp also
/// keeps -infinity within what Highway's exp takes.
HWY_INLINE vec exponential(vec x) {
    const vec least = hn::Set(tag(), -87.33F);
    return hn::IfThenElseZero(hn::Ge(x, least), hn::Exp(tag(), hn::Max(x, least)));
}

HWY_INLINE vec exp_store(float* values, vec shift) {
    const auto e = exponential(hn::Sub(load(values), shift));
    hn::StoreU(e, tag(), values);
    return e;
}

float exp_sum_kernel(float* values, std::int64_t count, float shift) {
    constexpr std::int64_t stretch = 4096;  // summed in fp32, then added up in double
    const vec s = hn::Set(tag(), shift);
    double total = 0.0;
    std::int64_t i = 0;
    while (i + lanes <= count) {
        vec a = hn::Zero(tag()), b = hn::Zero(tag());
        const auto end = std::min(count, i + stretch);
        for (; i + 2 * lanes <= end; i += 2 * lanes) {
            a = hn::Add(a, exp_store(values + i, s));
            b = hn::Add(b, exp_store(values + i + lanes, s));
        }
        for (; i + lanes <= end; i += lanes) a = hn::Add(a, exp_store(values + i, s));
        total += static_cast<double>(hn::GetLane(hn::SumOfLanes(tag(), hn::Add(a, b))));
    }
    if (i < count) {
        HWY_ALIGN float rest[lanes] = {};
        std::copy_n(values + i, count - i, rest);
        exp_store(rest, s);
        std::copy_n(rest, count - i, values + i);
        for (; i < count; ++i) total += static_cast<double>(values[i]);
    }
    return static_cast<float>(total);
}

void scale_kernel(float* values, std::int64_t count, float factor) {
    const vec f = hn::Set(tag(), factor);
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) hn::StoreU(hn::Mul(load(values + i), f), tag(), values + i);
    for (; i < count; ++i) values[i] *= factor;
}

void soft_cap_kernel(float* values, std::int64_t count, float cap) {
    const vec c = hn::Set(tag(), cap), inverse = hn::Set(tag(), 1.0F / cap), most = hn::Set(tag(), 20.0F);
    const auto capped = [&](const float* p) HWY_ATTR { return hn::Mul(c, hn::Tanh(tag(), hn::Clamp(hn::Mul(load(p), inverse), hn::Neg(most), most))); };
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) hn::StoreU(capped(values + i), tag(), values + i);
    if (i == count) return;
    HWY_ALIGN float rest[lanes] = {};
    std::copy_n(values + i, count - i, rest);
    hn::Store(capped(rest), tag(), rest);
    std::copy_n(rest, count - i, values + i);
}

const char* name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace sekv::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sekv::host {

HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_fp16);
HWY_EXPORT(narrow_bf16);
HWY_EXPORT(narrow_fp16);
HWY_EXPORT(finite);
HWY_EXPORT(largest);
HWY_EXPORT(exp_sum_kernel);
HWY_EXPORT(scale_kernel);
HWY_EXPORT(soft_cap_kernel);
HWY_EXPORT(name);

namespace {
std::int64_t signed_count(std::size_t count) { return static_cast<std::int64_t>(count); }
}  // namespace

void to_float(const void* src, dtype type, std::size_t count, float* dst) {
    if (type == dtype::f32) std::copy_n(static_cast<const float*>(src), count, dst);
    if (type == dtype::bf16) HWY_DYNAMIC_DISPATCH(widen_bf16)(static_cast<const bf16*>(src), signed_count(count), dst);
    if (type == dtype::f16) HWY_DYNAMIC_DISPATCH(widen_fp16)(static_cast<const fp16*>(src), signed_count(count), dst);
}

template <>
void from_float<float>(const float* src, std::size_t count, float* dst) {
    std::copy_n(src, signed_count(count), dst);
}
template <>
void from_float<bf16>(const float* src, std::size_t count, bf16* dst) {
    HWY_DYNAMIC_DISPATCH(narrow_bf16)(src, signed_count(count), dst);
}
template <>
void from_float<fp16>(const float* src, std::size_t count, fp16* dst) {
    HWY_DYNAMIC_DISPATCH(narrow_fp16)(src, signed_count(count), dst);
}

bool all_finite(const float* src, std::size_t count) { return HWY_DYNAMIC_DISPATCH(finite)(src, signed_count(count)); }
float max_of(const float* values, std::int64_t count) { return HWY_DYNAMIC_DISPATCH(largest)(values, count); }
float exp_sum(float* values, std::int64_t count, float shift) { return HWY_DYNAMIC_DISPATCH(exp_sum_kernel)(values, count, shift); }
void scale(float* values, std::int64_t count, float factor) { HWY_DYNAMIC_DISPATCH(scale_kernel)(values, count, factor); }
void soft_cap(float* values, std::int64_t count, float cap) { HWY_DYNAMIC_DISPATCH(soft_cap_kernel)(values, count, cap); }
const char* target_name() { return HWY_DYNAMIC_DISPATCH(name)(); }

}  // namespace sekv::host
#endif
