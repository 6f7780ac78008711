// Dynamic shared memory as one struct per kernel. Under the emulation it is bounds-checked, with poisoned red zones.
#pragma once

#include <cstddef>

namespace sekv::cuda {

/// Array in shared memory. GPU: a plain array.
template <class T, int N>
struct alignas(16) shared_array {
    T v[N];
#if SEKV_ON_GPU
    __device__ __forceinline__ T& operator[](int i) { return v[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
#else
    alignas(16) unsigned char red_zone[32];
    shared_array() { simt::poison(red_zone, sizeof red_zone); }  // once per block, by dynamic_shared; leaves the fill pattern in v
    T& operator[](int i) { return v[simt::checked_index(i, N)]; }
    const T& operator[](int i) const { return v[simt::checked_index(i, N)]; }
#endif
    __device__ __forceinline__ T* data() { return v; }
    __device__ __forceinline__ const T* data() const { return v; }
};

/// The block's dynamic shared memory as one T; a kernel declares exactly one, and is launched with sizeof(T).
template <class T>
__device__ __forceinline__ T& dynamic_shared() {
#if SEKV_ON_GPU
    extern __shared__ __align__(128) unsigned char sekv_shared[];
    return *reinterpret_cast<T*>(sekv_shared);
#else
    return simt::dynamic_shared<T>();
#endif
}

/// For sizes known at run time: the block's dynamic shared memory as bytes, `bytes` of it in use.
__device__ __forceinline__ unsigned char* dynamic_bytes(std::size_t bytes) {
#if SEKV_ON_GPU
    (void)bytes;
    extern __shared__ __align__(128) unsigned char sekv_shared[];
    return sekv_shared;
#else
    return simt::dynamic_bytes(bytes);
#endif
}

}  // namespace sekv::cuda
