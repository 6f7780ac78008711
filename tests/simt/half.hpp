// fp16 and bf16 intrinsics that NVIDIA's headers offer to device code alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

inline __half __hfma(__half a, __half b, __half c) {
    return __double2half(std::fma(static_cast<double>(__half2float(a)), static_cast<double>(__half2float(b)), static_cast<double>(__half2float(c))));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return __halves2half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __float2bfloat16_rn(std::fma(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { return __halves2bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }

inline __half hexp2(__half v) { return __float2half_rn(std::exp2(__half2float(v))); }
inline __half hexp(__half v) { return __float2half_rn(std::exp(__half2float(v))); }
inline __half hsqrt(__half v) { return __float2half_rn(std::sqrt(__half2float(v))); }
inline __half2 h2exp2(__half2 v) { return __halves2half2(hexp2(v.x), hexp2(v.y)); }
inline int __half2int_rn(__half v) { return static_cast<int>(std::nearbyint(__half2float(v))); }
