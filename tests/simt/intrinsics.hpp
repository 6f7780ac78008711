// Loads, bits and arithmetic that nvcc knows by itself.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "simt/engine.hpp"

// Loads and stores with a cache hint: plain ones.
#define SIMT_LOAD(name)  \
    template <class T>   \
    T name(const T* p) { \
        return *p;       \
    }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldcv)
SIMT_LOAD(__ldlu)
#undef SIMT_LOAD
#define SIMT_STORE(name)                         \
    template <class T>                           \
    void name(T* p, std::type_identity_t<T> v) { \
        *p = v;                                  \
    }
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwb)
SIMT_STORE(__stwt)
#undef SIMT_STORE

inline int __popc(unsigned v) { return std::popcount(v); }
inline int __popcll(unsigned long long v) { return std::popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }
inline int __clzll(long long v) { return std::countl_zero(static_cast<unsigned long long>(v)); }
inline unsigned __brev(unsigned v) {
    v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
    v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
    v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(v);
}
inline unsigned long long __brevll(unsigned long long v) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32 | __brev(static_cast<unsigned>(v >> 32));
}
/// Bytes picked out of the eight of y:x, one per nibble of s; bit 3 of a nibble spreads the byte's sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = s >> (4 * i) & 15;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 255;
        if ((pick & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (n & 31));
}

inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline double __longlong_as_double(long long v) { return std::bit_cast<double>(v); }
inline long long __double_as_longlong(double v) { return std::bit_cast<long long>(v); }

inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return static_cast<int>(v); }
inline int __float2int_rd(float v) { return static_cast<int>(std::floor(v)); }
inline int __float2int_ru(float v) { return static_cast<int>(std::ceil(v)); }
inline unsigned __float2uint_rn(float v) { return static_cast<unsigned>(std::nearbyint(v)); }
inline unsigned __float2uint_rz(float v) { return static_cast<unsigned>(v); }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
inline float __double2float_rn(double v) { return static_cast<float>(v); }

inline int __mul24(int a, int b) { return a * b; }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<std::int64_t>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<std::int8_t>(a >> (8 * i)) * static_cast<std::int8_t>(b >> (8 * i));
    return c;
}

inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline double rsqrt(double v) { return 1.0 / std::sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fsqrt_rn(float v) { return std::sqrt(v); }
inline float __frsqrt_rn(float v) { return 1.0f / std::sqrt(v); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __saturatef(float v) { return !(v > 0.0f) ? 0.0f : v > 1.0f ? 1.0f : v; }
// glibc declares these seven for its own use, as functions of C that it doesn't export.
inline float __expf(float v) noexcept { return expf(v); }
inline float __exp10f(float v) noexcept { return static_cast<float>(std::pow(10.0, static_cast<double>(v))); }
inline float __logf(float v) noexcept { return logf(v); }
inline float __log2f(float v) noexcept { return log2f(v); }
inline float __log10f(float v) noexcept { return log10f(v); }
inline float __powf(float a, float b) noexcept { return powf(a, b); }
inline float __sinf(float v) noexcept { return sinf(v); }
inline float __cosf(float v) noexcept { return cosf(v); }

template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline void __nanosleep(unsigned) { simt::detail::sleep(); }
/// Ticks at some rate.
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
[[noreturn]] inline void __trap() { simt::detail::fail("__trap"); }
