// kernels/warp.cuh and kernels/scalar.cuh against plain loops. Their PTX side is checked by the kernels' own tests on a device.
#include "kernels/warp.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace sekv::cuda {
namespace {

template <class T>
constexpr dtype type_of = std::is_same_v<T, float>    ? dtype::f32
                          : std::is_same_v<T, __half> ? dtype::f16
                                                      : dtype::bf16;

template <class... P>
void run_warps(int threads, std::size_t shared_bytes, void (*kernel)(P...), std::type_identity_t<P>... arguments) {
    for (const std::uint64_t seed : {0, 1, 2, 3}) {
        const auto before = simt::current_options();
        simt::set_seed(seed);
        simt::launch(dim3(1), dim3(static_cast<unsigned>(threads)), shared_bytes, kernel, arguments...);
        simt::current_options() = before;
    }
}

template <int width>
__global__ void reduce_kernel(const float* in, float* sum, float* most) {
    const auto i = threadIdx.x;
    sum[i] = warp_sum<width>(in[i]);
    most[i] = warp_max<width>(in[i]);
}

template <int width>
void check_reductions() {
    std::vector<float> in(64), sum(64), most(64);
    std::mt19937 random(width);
    for (auto& x : in) x = static_cast<float>(random() % 1000) - 700;  // sums are exact
    in[37] = -std::numeric_limits<float>::infinity();
    run_warps(64, 0, &reduce_kernel<width>, in.data(), sum.data(), most.data());
    for (std::size_t i = 0; i < in.size(); ++i) {
        const auto first = in.begin() + static_cast<std::ptrdiff_t>(i / width * width);
        EXPECT_EQ(most[i], *std::max_element(first, first + width)) << i;
        float total = 0;
        for (auto p = first; p != first + width; ++p) total += *p;
        EXPECT_EQ(sum[i], total) << i;
    }
}

TEST(Warp, SumsAndMaxima) {
    check_reductions<32>();
    check_reductions<16>();
    check_reductions<8>();
    check_reductions<4>();
    check_reductions<2>();
    check_reductions<1>();
}

TEST(Warp, Exponentials) {
    for (const float x : {0.0F, -1.5F, 3.25F, -20.0F, 80.0F}) {
        EXPECT_NEAR(exp2_approx(x) / std::exp2(x), 1.0F, 1e-6F);
        EXPECT_NEAR(exp_approx(x) / std::exp(x), 1.0F, 1e-5F);
    }
    EXPECT_EQ(exp2_approx(-std::numeric_limits<float>::infinity()), 0.0F);
}

__global__ void timer_kernel(unsigned long long* times) {
    times[0] = global_timer();
    times[1] = global_timer();
}

TEST(Warp, TimerRuns) {
    unsigned long long times[2] = {};
    run_warps(1, 0, &timer_kernel, times);
    EXPECT_GT(times[0], 0u);
    EXPECT_LE(times[0], times[1]);
}

// Every bit pattern of 16 bits: conversions agree with the host's types, in both directions.
template <class T, class Host>
void check_conversions() {
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
        const auto host = std::bit_cast<Host>(static_cast<std::uint16_t>(bits));
        const auto mine = std::bit_cast<T>(static_cast<std::uint16_t>(bits));
        const float x = static_cast<float>(host);
        if (std::isnan(x)) {
            EXPECT_TRUE(std::isnan(to_float(mine))) << bits;
            continue;
        }
        ASSERT_EQ(to_float(mine), x) << bits;
        const float2 both = unpack2<T>(bits | (bits ^ 1) << 16);
        ASSERT_EQ(both.x, x);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(pack2<T>(x, 1.0F)) & 0xffff, bits);
        ASSERT_EQ(rounded_to(type_of<T>, x), x);
        if (std::isinf(x)) continue;
        const float between = x * (1 + 1.0F / 700);  // not a value of the type
        ASSERT_EQ(std::bit_cast<std::uint16_t>(from_float<T>(between)), std::bit_cast<std::uint16_t>(Host(between))) << bits;
    }
}

TEST(Scalar, ConversionsAreTheHosts) {
    check_conversions<__half, fp16>();
    check_conversions<__nv_bfloat16, bf16>();
}

template <class T>
__global__ void eight_kernel(const T* in, std::int64_t first, T* by_type, T* any) {
    const std::int64_t i = threadIdx.x * 8;
    float x[8];
    load8_any(in, type_of<T>, first + i, x);
    store8(by_type + i, x);
    load8(by_type + i, x);
    store8_any(any, type_of<T>, i, x);
}

template <class T>
void check_eights() {
    struct alignas(16) rows {
        T v[32 * 8 + 16];
    };
    rows in, by_type, any;
    std::mt19937 random(5);
    for (auto& x : in.v) x = from_float<T>(std::normal_distribution<float>()(random));
    for (const int first : {0, 1, 2, 3, 8, 15}) {  // aligned or not
        run_warps(32, 0, &eight_kernel<T>, in.v, first, by_type.v, any.v);
        for (int i = 0; i < 256; ++i) {
            ASSERT_EQ(to_float(by_type.v[i]), to_float(in.v[first + i])) << i;
            ASSERT_EQ(to_float(any.v[i]), to_float(in.v[first + i])) << i;
        }
    }
    for (int i = 0; i < 256; ++i) {
        store_element(any.v, type_of<T>, i, static_cast<float>(i) + 0.001F);
        ASSERT_EQ(load_element(any.v, type_of<T>, i), rounded_to(type_of<T>, static_cast<float>(i) + 0.001F));
    }
}

TEST(Scalar, EightElements) {
    check_eights<float>();
    check_eights<__half>();
    check_eights<__nv_bfloat16>();
}

struct copied {
    shared_array<unsigned char, 2 * 64 * 16> bytes;
};

// Two groups; the first is waited for alone. Lane l copies l % 17 bytes, the rest are zeros.
__global__ void copy_kernel(const unsigned char* in, unsigned char* out) {
    auto& shared = dynamic_shared<copied>();
    const int i = static_cast<int>(threadIdx.x);
    cp_async16(&shared.bytes[i * 16], in + i * 16, i % 17);
    cp_async_commit();
    cp_async16(&shared.bytes[(64 + i) * 16], in + (64 + i) * 16);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const int other = i ^ 33;
    for (int j = 0; j < 16; ++j) out[other * 16 + j] = shared.bytes[other * 16 + j];
    cp_async_wait<0>();
    __syncthreads();
    for (int j = 0; j < 16; ++j) out[(64 + other) * 16 + j] = shared.bytes[(64 + other) * 16 + j];
}

TEST(Warp, AsynchronousCopies) {
    struct alignas(16) {
        unsigned char v[2 * 64 * 16];
    } in;
    std::vector<unsigned char> out(sizeof in.v);
    for (std::size_t i = 0; i < sizeof in.v; ++i) in.v[i] = static_cast<unsigned char>(i * 37 + 11);
    run_warps(64, sizeof(copied), &copy_kernel, in.v, out.data());
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], i < 64 * 16 && i % 16 >= i / 16 % 17 ? 0 : in.v[i]) << i;
}

struct matrix_tile {
    shared_array<unsigned short, 32 * 8> rows;  // four 8 x 8 matrices
};

__global__ void matrices_kernel(const unsigned short* in, unsigned* plain, unsigned* transposed, unsigned* two, unsigned* two_transposed) {
    auto& shared = dynamic_shared<matrix_tile>();
    const int lane = static_cast<int>(threadIdx.x);
    for (int j = 0; j < 8; ++j) shared.rows[lane * 8 + j] = in[lane * 8 + j];
    __syncthreads();
    unsigned x[4], y[2];
    ldmatrix_x4(x, &shared.rows[lane * 8]);
    for (int m = 0; m < 4; ++m) plain[m * 32 + lane] = x[m];
    ldmatrix_x4_trans(x, &shared.rows[lane * 8]);
    for (int m = 0; m < 4; ++m) transposed[m * 32 + lane] = x[m];
    ldmatrix_x2(y, &shared.rows[lane * 8]);
    for (int m = 0; m < 2; ++m) two[m * 32 + lane] = y[m];
    ldmatrix_x2_trans(y, &shared.rows[lane * 8]);
    for (int m = 0; m < 2; ++m) two_transposed[m * 32 + lane] = y[m];
}

TEST(Warp, Matrices) {
    std::vector<unsigned short> in(256);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned short>(1000 + i);
    std::vector<unsigned> plain(128), transposed(128), two(64), two_transposed(64);
    run_warps(32, sizeof(matrix_tile), &matrices_kernel, in.data(), plain.data(), transposed.data(), two.data(), two_transposed.data());
    const auto at = [&](unsigned m, unsigned row, unsigned column) { return static_cast<unsigned>(in[m * 64 + row * 8 + column]); };
    for (unsigned m = 0; m < 4; ++m) {
        for (unsigned lane = 0; lane < 32; ++lane) {
            const unsigned r = lane / 4, c = lane % 4 * 2;
            const unsigned straight = at(m, r, c) | at(m, r, c + 1) << 16, turned = at(m, c, r) | at(m, c + 1, r) << 16;
            EXPECT_EQ(plain[m * 32 + lane], straight);
            EXPECT_EQ(transposed[m * 32 + lane], turned);
            if (m >= 2) continue;
            EXPECT_EQ(two[m * 32 + lane], straight);
            EXPECT_EQ(two_transposed[m * 32 + lane], turned);
        }
    }
}

// a [16, 16], b [16, 8], c [16, 8] row-major.
template <class T>
__global__ void product_kernel(const float* a, const float* b, float* c) {
    const int lane = static_cast<int>(threadIdx.x), r = lane / 4, k = lane % 4 * 2;
    const auto pair = [&](int row, int column) { return pack2<T>(a[row * 16 + column], a[row * 16 + column + 1]); };
    const unsigned left[4] = {pair(r, k), pair(r + 8, k), pair(r, k + 8), pair(r + 8, k + 8)};
    float sums[4] = {c[r * 8 + k], c[r * 8 + k + 1], c[(r + 8) * 8 + k], c[(r + 8) * 8 + k + 1]};
    mma_m16n8k16<T>(sums, left, pack2<T>(b[k * 8 + r], b[(k + 1) * 8 + r]), pack2<T>(b[(k + 8) * 8 + r], b[(k + 9) * 8 + r]));
    c[r * 8 + k] = sums[0], c[r * 8 + k + 1] = sums[1], c[(r + 8) * 8 + k] = sums[2], c[(r + 8) * 8 + k + 1] = sums[3];
}

template <class T>
void check_product() {
    std::mt19937 random(9);
    std::vector<float> a(256), b(128), expected(128);
    for (auto* v : {&a, &b, &expected}) {
        for (auto& x : *v) x = static_cast<float>(random() % 33) - 16;  // exact in both types, and so are the sums
    }
    const auto start = expected;
    for (std::size_t i = 0; i < 16; ++i) {
        for (std::size_t j = 0; j < 8; ++j) {
            for (std::size_t k = 0; k < 16; ++k) expected[i * 8 + j] += a[i * 16 + k] * b[k * 8 + j];
        }
    }
    auto c = start;
    simt::launch(dim3(1), dim3(32), 0, &product_kernel<T>, a.data(), b.data(), c.data());
    EXPECT_EQ(c, expected);
}

TEST(Warp, Products) {
    check_product<__half>();
    check_product<__nv_bfloat16>();
}

}  // namespace
}  // namespace sekv::cuda
