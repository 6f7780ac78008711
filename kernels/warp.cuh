// What a warp does together, and the PTX behind it: each function has a host emulation of the same meaning.
#pragma once

#include "kernels/device.cuh"
#include "kernels/scalar.cuh"

#if !SEKV_ON_GPU
#include <chrono>
#include <cstring>
#include <utility>
#endif

namespace sekv::cuda {

inline constexpr unsigned whole_warp = 0xffffffffu;
inline constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

__device__ __forceinline__ int lane_of(int thread) { return thread & 31; }
__device__ __forceinline__ int warp_of(int thread) { return thread >> 5; }

/// Sum over each `width` neighbouring lanes of the warp, given to all of them; always in the same order.
template <int width = 32, class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int step = width / 2; step > 0; step /= 2) x = x + __shfl_xor_sync(whole_warp, x, step);
    return x;
}

/// Largest over each `width` neighbouring lanes of the warp, given to all of them.
template <int width = 32, class T>
__device__ __forceinline__ T warp_max(T x) {
#pragma unroll
    for (int step = width / 2; step > 0; step /= 2) {
        const T other = __shfl_xor_sync(whole_warp, x, step);
        x = x < other ? other : x;
    }
    return x;
}

/// 2^x to 2 ulp; 0 for -infinity and below -126.
__device__ __forceinline__ float exp2_approx(float x) {
#if SEKV_ON_GPU
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
/// e^x by exp2_approx.
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * log2_e); }

/// Nanoseconds of a clock that all multiprocessors share.
__device__ __forceinline__ unsigned long long global_timer() {
#if SEKV_ON_GPU
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
#else
    return static_cast<unsigned long long>(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
#endif
}

/// Copies 16 bytes from global to shared memory, both aligned to 16; of the source only the first `source_bytes` are read, the rest is zeros. Done once the
/// copy's group was waited for.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, int source_bytes = 16) {
#if SEKV_ON_GPU
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(source_bytes) : "memory");
#else
    simt::detail::cp_async(shared, global, 16, source_bytes);
#endif
}
/// Ends this thread's group of copies.
__device__ __forceinline__ void cp_async_commit() {
#if SEKV_ON_GPU
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    simt::detail::cp_commit();
#endif
}
/// Waits until at most `pending` of this thread's latest groups are under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
#if SEKV_ON_GPU
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
    simt::detail::cp_wait(pending);
#endif
}

#if !SEKV_ON_GPU
namespace emulation {

struct matrix_rows {
    const unsigned char* row;
    unsigned* out;
    int count;
    bool transposed;
};

/// Each lane reads its own row in its own context, so that races and bounds are seen; then lanes exchange.
inline void ldmatrix(unsigned* out, const void* row, int count, bool transposed, int line) {
    if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) simt::detail::fail("ldmatrix: the row's address isn't aligned to 16 bytes");
    alignas(16) unsigned char mine[16] = {};
    if (simt::detail::lane_id() < 8 * count) std::memcpy(mine, row, 16);
    matrix_rows self{mine, out, count, transposed};
    simt::detail::warp_collective(
        whole_warp, &self,
        [](void** lanes, unsigned mask) {
            if (mask != whole_warp) simt::detail::fail("ldmatrix needs all 32 lanes");
            for (int lane = 0; lane < 32; ++lane) {
                const auto& to = *static_cast<matrix_rows*>(lanes[lane]);
                for (int m = 0; m < to.count; ++m) {
                    for (int i = 0; i < 2; ++i) {
                        int r = lane / 4, c = lane % 4 * 2 + i;
                        if (to.transposed) std::swap(r, c);
                        std::memcpy(reinterpret_cast<unsigned char*>(to.out + m) + 2 * i, static_cast<matrix_rows*>(lanes[m * 8 + r])->row + 2 * c, 2);
                    }
                }
            }
        },
        {__FILE__, line, "ldmatrix"}, false);
}

struct mma_operands {
    float* sums;
    const unsigned* a;
    unsigned b[2];
};

template <class T>
float element(unsigned word, int i) {
    const float2 both = unpack2<T>(word);
    return i == 0 ? both.x : both.y;
}

template <class T>
void mma(void** lanes, unsigned mask) {
    if (mask != whole_warp) simt::detail::fail("mma needs all 32 lanes");
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& from = *static_cast<mma_operands*>(lanes[lane]);
        const int row = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < 8; ++i) a[row + i / 2 % 2 * 8][column + i % 2 + i / 4 * 8] = element<T>(from.a[i / 2], i % 2);
        for (int i = 0; i < 4; ++i) b[column + i % 2 + i / 2 * 8][row] = element<T>(from.b[i / 2], i % 2);
    }
    for (int lane = 0; lane < 32; ++lane) {
        const auto& to = *static_cast<mma_operands*>(lanes[lane]);
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = to.sums[i];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            to.sums[i] = sum;
        }
    }
}

}  // namespace emulation
#endif

/// Four 8x8 matrices of 16-bit elements from shared memory: lane l gives the address of row l % 8 of matrix l / 8 (16 aligned bytes); out[m] holds elements (l
/// / 4, l % 4 * 2) and the next of matrix m.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&out)[4], const void* row) {
#if SEKV_ON_GPU
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(from)
                 : "memory");
#else
    emulation::ldmatrix(out, row, 4, false, __LINE__);
#endif
}
/// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&out)[4], const void* row) {
#if SEKV_ON_GPU
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(from)
                 : "memory");
#else
    emulation::ldmatrix(out, row, 4, true, __LINE__);
#endif
}
/// Two matrices; lanes 16 to 31 give addresses that aren't read.
__device__ __forceinline__ void ldmatrix_x2(unsigned (&out)[2], const void* row) {
#if SEKV_ON_GPU
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(from) : "memory");
#else
    emulation::ldmatrix(out, row, 2, false, __LINE__);
#endif
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&out)[2], const void* row) {
#if SEKV_ON_GPU
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(from) : "memory");
#else
    emulation::ldmatrix(out, row, 2, true, __LINE__);
#endif
}

/// sums += A B with A [16, 16] row-major and B [16, 8] column-major of T (__half or __nv_bfloat16), in PTX's fragment layout: with r = lane / 4 and c = lane %
/// 4 * 2, a = A(r, c) A(r + 8, c) A(r, c + 8) A(r + 8, c + 8), b0, b1 = B(c, r) B(c + 8, r), each a word of two elements; sums = D(r, c) D(r, c + 1) D(r + 8,
/// c) D(r + 8, c + 1).
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if SEKV_ON_GPU
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    emulation::mma_operands self{sums, a, {b0, b1}};
    simt::detail::warp_collective(whole_warp, &self, &emulation::mma<__half>, {__FILE__, __LINE__, "mma"}, false);
#endif
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if SEKV_ON_GPU
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    emulation::mma_operands self{sums, a, {b0, b1}};
    simt::detail::warp_collective(whole_warp, &self, &emulation::mma<__nv_bfloat16>, {__FILE__, __LINE__, "mma"}, false);
#endif
}

}  // namespace sekv::cuda
