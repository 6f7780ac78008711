// Elements of bf16, fp16 and fp32 arrays as floats: by type, or by a dtype known at run time.
#pragma once

#include "kernels/device.cuh"

namespace sekv::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Rounds to nearest even, as the host's sekv::bf16 and sekv::fp16 do.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000U) != 0x7f800000U; }
/// Whether sums of such elements' products stay finite, which moments would never lose again: below 2^56.
__device__ __forceinline__ bool is_summable(float x) { return (__float_as_uint(x) & 0x7f800000U) < (127U + 56U) << 23; }

/// Sixteen aligned bytes as one access.
__device__ __forceinline__ uint4 load16(const void* p) { return *static_cast<const uint4*>(p); }
__device__ __forceinline__ void store16(void* p, const uint4& x) { *static_cast<uint4*>(p) = x; }

/// The two elements of a 32-bit word, the lower first.
template <class T>
__device__ __forceinline__ float2 unpack2(unsigned bits);
template <>
__device__ __forceinline__ float2 unpack2<__half>(unsigned bits) {
    return float2{__half2float(__ushort_as_half(static_cast<unsigned short>(bits))), __half2float(__ushort_as_half(static_cast<unsigned short>(bits >> 16)))};
}
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(unsigned bits) {
    return float2{__int_as_float(static_cast<int>(bits << 16)), __int_as_float(static_cast<int>(bits & 0xffff0000u))};
}
template <class T>
__device__ __forceinline__ unsigned pack2(float low, float high);
template <>
__device__ __forceinline__ unsigned pack2<__half>(float low, float high) {
    return static_cast<unsigned>(__half_as_ushort(__float2half_rn(low))) | static_cast<unsigned>(__half_as_ushort(__float2half_rn(high))) << 16;
}
template <>
__device__ __forceinline__ unsigned pack2<__nv_bfloat16>(float low, float high) {
    return static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) | static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

/// Eight elements at p, which is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void load8(const T* p, float (&x)[8]) {
    const uint4 w = load16(p);
    const float2 a = unpack2<T>(w.x), b = unpack2<T>(w.y), c = unpack2<T>(w.z), d = unpack2<T>(w.w);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}
template <>
__device__ __forceinline__ void load8<float>(const float* p, float (&x)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
template <class T>
__device__ __forceinline__ void store8(T* p, const float (&x)[8]) {
    store16(p, uint4{pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7])});
}
template <>
__device__ __forceinline__ void store8<float>(float* p, const float (&x)[8]) {
    *reinterpret_cast<float4*>(p) = float4{x[0], x[1], x[2], x[3]};
    *reinterpret_cast<float4*>(p + 4) = float4{x[4], x[5], x[6], x[7]};
}

// By a dtype known at run time. `index` counts elements.

__device__ __forceinline__ float load_element(const void* p, dtype type, std::int64_t index) {
    if (type == dtype::f32) return static_cast<const float*>(p)[index];
    if (type == dtype::f16) return to_float(static_cast<const __half*>(p)[index]);
    return to_float(static_cast<const __nv_bfloat16*>(p)[index]);
}

__device__ __forceinline__ void store_element(void* p, dtype type, std::int64_t index, float x) {
    if (type == dtype::f32) {
        static_cast<float*>(p)[index] = x;
    } else if (type == dtype::f16) {
        static_cast<__half*>(p)[index] = from_float<__half>(x);
    } else {
        static_cast<__nv_bfloat16*>(p)[index] = from_float<__nv_bfloat16>(x);
    }
}

/// What an element of this type becomes: x rounded to it.
__device__ __forceinline__ float rounded_to(dtype type, float x) {
    if (type == dtype::f32) return x;
    return type == dtype::f16 ? to_float(from_float<__half>(x)) : to_float(from_float<__nv_bfloat16>(x));
}

/// Eight elements from `index` on, of an array that may begin anywhere: vector loads where the address allows, single ones elsewhere (engines' tensors).
__device__ __forceinline__ void load8_any(const void* p, dtype type, std::int64_t index, float (&x)[8]) {
    const char* at = static_cast<const char*>(p) + index * (type == dtype::f32 ? 4 : 2);
    if (reinterpret_cast<std::uintptr_t>(at) % 16 != 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = load_element(at, type, i);
    } else if (type == dtype::f32) {
        load8(reinterpret_cast<const float*>(at), x);
    } else if (type == dtype::f16) {
        load8(reinterpret_cast<const __half*>(at), x);
    } else {
        load8(reinterpret_cast<const __nv_bfloat16*>(at), x);
    }
}

/// Eight elements at `index` of an array where that is aligned to 16 bytes.
__device__ __forceinline__ void store8_any(void* p, dtype type, std::int64_t index, const float (&x)[8]) {
    if (type == dtype::f32) {
        store8(static_cast<float*>(p) + index, x);
    } else if (type == dtype::f16) {
        store8(static_cast<__half*>(p) + index, x);
    } else {
        store8(static_cast<__nv_bfloat16*>(p) + index, x);
    }
}

}  // namespace sekv::cuda
