// Rows and statistics of a seal: src/progressive_seal.cpp and src/basis.cpp are the reference.
#include "kernels/device.cuh"
#include "kernels/scalar.cuh"
#include "kernels/seal_kernels.hpp"
#include "kernels/warp.cuh"

namespace sekv::cuda {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;

dim3 grid_of(std::int64_t x, std::int32_t heads) { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(heads), 1); }

__device__ __forceinline__ float* row_at(const seal_rows_view& v, std::int32_t head, std::int32_t row) { return v.data + (static_cast<std::int64_t>(head) * v.capacity + row) * v.size; }

template <class T>
__device__ __forceinline__ T* array_of(const head_array& a, std::int32_t head) {
    return reinterpret_cast<T*>(a.buffer + a.heads.first + static_cast<std::uint64_t>(head) * a.heads.stride + a.offset);
}

// The row of the token at this position, or -1.
__device__ __forceinline__ std::int32_t row_of(const row_choice& c, std::int64_t position) {
    const std::int64_t distance = position - c.origin;
    if (distance < 0 || distance % c.stride != 0) return -1;
    return distance / c.stride < c.rows ? static_cast<std::int32_t>(distance / c.stride) : -1;
}

// Whether none of the tokens [begin, begin + count) is chosen.
__device__ __forceinline__ bool none_chosen(const row_choice& c, std::int64_t begin, std::int32_t count) {
    const std::int64_t first = begin <= c.origin ? 0 : (begin - c.origin + c.stride - 1) / c.stride;
    return first >= c.rows || c.origin + first * c.stride >= begin + count;
}

constexpr int tile = 64;  // components transposed at once

struct gather_shared {
    shared_array<float, tile*(block_tokens + 1)> keys;
    shared_array<std::int32_t, block_tokens> row;
};

// One exact page and head per thread block.
template <class T>
__global__ void __launch_bounds__(threads) gather_rows(head_stride page, const exact_block* blocks, row_choice choice, std::int32_t dk, seal_rows_view keys, seal_rows_view values) {
    const exact_block b = blocks[blockIdx.x];
    if (none_chosen(choice, b.begin, b.count)) return;
    auto& shared = dynamic_shared<gather_shared>();
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const T* from = reinterpret_cast<const T*>(b.rows + page.first + static_cast<std::uint64_t>(head) * page.stride);
    if (thread < block_tokens) shared.row[thread] = thread < b.count ? row_of(choice, b.begin + thread) : -1;
    for (std::int32_t c0 = 0; keys.data != nullptr && c0 < dk; c0 += tile) {
        const std::int32_t components = dk - c0 < tile ? dk - c0 : tile;
        if (c0 > 0) __syncthreads();  // the tile before is stored
        for (std::int32_t i = thread; i < components * 8; i += threads) {
            float x[8];
            load8(from + (c0 + i / 8) * block_tokens + i % 8 * 8, x);
#pragma unroll
            for (int e = 0; e < 8; ++e) shared.keys[i / 8 * (block_tokens + 1) + i % 8 * 8 + e] = x[e];
        }
        __syncthreads();
        for (std::int32_t i = thread; i < components * block_tokens; i += threads) {
            const std::int32_t token = i / components, c = i % components, row = shared.row[token];
            if (row >= 0) row_at(keys, head, row)[c0 + c] = shared.keys[c * (block_tokens + 1) + token];
        }
    }
    if (values.data == nullptr) return;
    if (keys.data == nullptr) __syncthreads();  // else the tiles' barriers show `row`
    const T* v = from + dk * block_tokens;
    const std::int32_t eights = values.size / 8;
    for (std::int32_t i = thread; i < b.count * eights; i += threads) {
        const std::int32_t token = i / eights, row = shared.row[token];
        if (row < 0) continue;
        float x[8];
        load8(v + token * values.size + i % eights * 8, x);
        store8(row_at(values, head, row) + i % eights * 8, x);
    }
}

__global__ void __launch_bounds__(threads) compact_rows(const sealed_block* blocks, const float* padded, std::int64_t head_elements, row_choice choice, seal_rows_view rows) {
    const sealed_block b = blocks[blockIdx.x];
    if (none_chosen(choice, b.begin, b.count)) return;
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const float* from = padded + head * head_elements + static_cast<std::int64_t>(blockIdx.x) * block_tokens * rows.size;
    const std::int32_t quarters = rows.size / 4;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < b.count * quarters; i += threads) {
        const std::int32_t row = row_of(choice, b.begin + i / quarters);
        if (row >= 0) reinterpret_cast<float4*>(row_at(rows, head, row))[i % quarters] = reinterpret_cast<const float4*>(from)[i];
    }
}

template <class T>
__global__ void __launch_bounds__(threads) store_exact(head_stride page, const seal_target* targets, seal_rows_view keys, seal_rows_view values) {
    const seal_target t = targets[blockIdx.x];
    if (t.exact == nullptr) return;
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    T* out = reinterpret_cast<T*>(t.exact + page.first + static_cast<std::uint64_t>(head) * page.stride);
    const std::int32_t eights = (keys.size + values.size) / 8;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < t.count * eights; i += threads) {
        const std::int32_t row = t.row + i / eights, j = i % eights * 8;
        float x[8];
        load8(j < keys.size ? row_at(keys, head, row) + j : row_at(values, head, row) + (j - keys.size), x);
        store8(out + static_cast<std::int64_t>(i) * 8, x);
    }
}

__global__ void __launch_bounds__(threads) center_rows(seal_rows_view rows, head_array mean) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto i = static_cast<std::int32_t>(blockIdx.x) * threads + static_cast<std::int32_t>(threadIdx.x);
    if (i >= rows.rows * rows.size / 4) return;
    float4* at = reinterpret_cast<float4*>(row_at(rows, head, 0)) + i;
    const float4 m = reinterpret_cast<const float4*>(array_of<float>(mean, head))[i % (rows.size / 4)];
    const float4 x = *at;
    *at = float4{x.x - m.x, x.y - m.y, x.z - m.z, x.w - m.w};
}

// The scale byte of a value, by a warp: as sekv::scale_byte.
__device__ __forceinline__ std::int32_t scale_byte_of(const float* value, const float* mean, std::int32_t size, std::int32_t lane) {
    double square = 0;
    for (std::int32_t j = lane; j < size; j += 32) {
        const double r = static_cast<double>(value[j]) - static_cast<double>(mean[j]);
        square += r * r;
    }
    const double rms = sqrt(warp_sum(square) / size);
    if (!(rms > 0)) return 0;
    const double level = round(8 * log2(rms)) + 160;
    return level < 0 ? 0 : level > 255 ? 255 : static_cast<std::int32_t>(level);
}
// Rounded once, so that it is the host's.
__device__ __forceinline__ float scale_of_byte(std::int32_t byte) { return static_cast<float>(exp2((byte - 160) / 8.0)); }

// A warp per row, here and in the next two.
__global__ void __launch_bounds__(threads) center_value_rows(seal_rows_view rows, head_array mean, std::uint8_t* bytes, float* inverse) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto row = static_cast<std::int32_t>(blockIdx.x) * warps + warp_of(static_cast<int>(threadIdx.x));
    if (row >= rows.rows) return;
    const int lane = lane_of(static_cast<int>(threadIdx.x));
    float* value = row_at(rows, head, row);
    const float* m = array_of<float>(mean, head);
    const std::int32_t byte = scale_byte_of(value, m, rows.size, lane);
    for (std::int32_t j = lane; j < rows.size; j += 32) value[j] -= m[j];
    if (lane != 0) return;
    bytes[head * rows.capacity + row] = static_cast<std::uint8_t>(byte);
    inverse[head * rows.capacity + row] = 1.0F / scale_of_byte(byte);
}

__global__ void __launch_bounds__(threads) widen_key_rows(seal_rows_view rows, const double* mean, double* out) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto i = static_cast<std::int32_t>(blockIdx.x) * threads + static_cast<std::int32_t>(threadIdx.x);
    if (i >= rows.rows * rows.size) return;
    const std::int64_t first = static_cast<std::int64_t>(head) * rows.capacity * rows.size;
    out[first + i] = static_cast<double>(rows.data[first + i]) - mean[head * rows.size + i % rows.size];
}

__global__ void __launch_bounds__(threads) widen_value_rows(seal_rows_view rows, head_array mean, double* out, std::uint8_t* bytes) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto row = static_cast<std::int32_t>(blockIdx.x) * warps + warp_of(static_cast<int>(threadIdx.x));
    if (row >= rows.rows) return;
    const int lane = lane_of(static_cast<int>(threadIdx.x));
    const float* value = row_at(rows, head, row);
    const float* m = array_of<float>(mean, head);
    const std::int32_t byte = scale_byte_of(value, m, rows.size, lane);
    const double scale = scale_of_byte(byte);
    double* to = out + (value - rows.data);
    for (std::int32_t j = lane; j < rows.size; j += 32) to[j] = (static_cast<double>(value[j]) - static_cast<double>(m[j])) / scale;
    if (lane == 0) bytes[head * rows.capacity + row] = static_cast<std::uint8_t>(byte);
}

struct warp_sums {
    shared_array<double, warps> of;
};

__global__ void __launch_bounds__(threads) sum_scales(const std::uint8_t* bytes, std::int32_t capacity, std::int32_t rows, double* sums) {
    auto& shared = dynamic_shared<warp_sums>();
    const auto head = static_cast<std::int32_t>(blockIdx.x);
    const int thread = static_cast<int>(threadIdx.x);
    double sum = 0;
    for (std::int32_t i = thread; i < rows; i += threads) {
        const double scale = scale_of_byte(bytes[head * capacity + i]);
        sum += scale * scale;
    }
    sum = warp_sum(sum);
    if (lane_of(thread) == 0) shared.of[warp_of(thread)] = sum;
    __syncthreads();
    if (thread != 0) return;
    double total = sums[head];
    for (int w = 0; w < warps; ++w) total += shared.of[w];
    sums[head] = total;
}

struct column_shared {
    shared_array<double, threads> of;
};

// 32 columns per thread block; each warp takes every eighth row.
template <bool square>
__global__ void __launch_bounds__(threads) column_sums(seal_rows_view rows, row_factor factor, double* sums) {
    auto& shared = dynamic_shared<column_shared>();
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const int thread = static_cast<int>(threadIdx.x), warp = warp_of(thread);
    const auto column = static_cast<std::int32_t>(blockIdx.x) * 32 + lane_of(thread);
    double sum = 0;
    for (std::int32_t i = warp; column < rows.size && i < rows.rows; i += warps) {
        float x = row_at(rows, head, i)[column];
        if (factor.data != nullptr) x *= factor.data[head * factor.head_stride + i * factor.row_stride];
        sum += square ? static_cast<double>(x) * static_cast<double>(x) : static_cast<double>(x);
    }
    shared.of[thread] = sum;
    __syncthreads();
    if (warp != 0 || column >= rows.size) return;
    double total = sums[head * rows.size + column];
    for (int w = 0; w < warps; ++w) total += shared.of[w * 32 + thread];
    sums[head * rows.size + column] = total;
}

__global__ void __launch_bounds__(threads) finish_means(double* sums, std::int32_t size, double count, head_array mean) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto j = static_cast<std::int32_t>(threadIdx.x);
    if (j >= size) return;
    const double m = sums[head * size + j] / count;
    sums[head * size + j] = m;
    if (mean.buffer != nullptr) array_of<float>(mean, head)[j] = static_cast<float>(m);
}

__global__ void __launch_bounds__(32) finish_typical(const double* square_sums, std::int32_t heads, double count, head_array typical, float* inverse) {
    const auto head = static_cast<std::int32_t>(blockIdx.x) * 32 + static_cast<std::int32_t>(threadIdx.x);
    if (head >= heads) return;
    const auto scale = static_cast<float>(sqrt(square_sums[head] / count));
    *array_of<float>(typical, head) = scale;
    inverse[head] = 1.0F / scale;
}

__global__ void __launch_bounds__(32) load_typical(std::int32_t heads, head_array typical, float* inverse) {
    const auto head = static_cast<std::int32_t>(blockIdx.x) * 32 + static_cast<std::int32_t>(threadIdx.x);
    if (head < heads) inverse[head] = 1.0F / *array_of<float>(typical, head);
}

// A thread block per (eigenvector, head).
__global__ void __launch_bounds__(threads) scale_vectors(const double* vectors, const double* values, std::int32_t size, double power, double* left, double* right) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto i = static_cast<std::int32_t>(threadIdx.x);
    if (i >= size) return;
    const double* v = values + head * size;
    double sum = 0;
    for (std::int32_t j = 0; j < size; ++j) sum += v[j];
    const double mean = fmax(sum / size, 1e-300);
    const double value = fmax(v[blockIdx.x], 1e-9 * fmax(v[size - 1], 1e-300));
    const double root = pow(value / mean, power / 2);
    const std::int64_t at = (static_cast<std::int64_t>(head) * size + static_cast<std::int64_t>(blockIdx.x)) * size + i;
    left[at] = vectors[at] * root;
    right[at] = vectors[at] * (1.0 / root);
}

// A thread block per (row of A and B, head).
__global__ void __launch_bounds__(threads) finish_keys(const double* wu, const double* inverse_wu, const double* values, std::int32_t size, float* encoder, head_array encoder_buffer, head_array a,
                                                       double* variance) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto j = static_cast<std::int32_t>(threadIdx.x), i = static_cast<std::int32_t>(blockIdx.x);
    if (j >= size) return;
    const std::int64_t first = static_cast<std::int64_t>(head) * size * size;
    const std::int64_t from = first + (size - 1 - j) * size + i, to = i * size + j;
    const auto b = static_cast<float>(wu[from]);
    encoder[first + to] = b;
    array_of<float>(encoder_buffer, head)[to] = b;
    array_of<__half>(a, head)[to] = from_float<__half>(static_cast<float>(inverse_wu[from]));
    if (i == 0) variance[head * size + j] = fmax(values[head * size + size - 1 - j], 0.0);
}

__global__ void __launch_bounds__(threads) finish_values(const double* vectors, const double* values, std::int32_t size, double count, float* basis, head_array buffer, double* variance) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto i = static_cast<std::int32_t>(threadIdx.x), j = static_cast<std::int32_t>(blockIdx.x);
    if (i >= size) return;
    const std::int64_t first = static_cast<std::int64_t>(head) * size * size;
    const auto u = static_cast<float>(vectors[first + (size - 1 - j) * size + i]);
    basis[first + j * size + i] = u;
    array_of<__half>(buffer, head)[j * size + i] = from_float<__half>(u);
    if (i == 0) variance[head * size + j] = fmax(values[head * size + size - 1 - j], 0.0) / count;
}

template <class T>
__global__ void __launch_bounds__(threads) load_matrix(head_array from, std::int32_t elements, float* to) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto i = (static_cast<std::int32_t>(blockIdx.x) * threads + static_cast<std::int32_t>(threadIdx.x)) * 8;
    if (i >= elements) return;
    float x[8];
    load8(array_of<const T>(from, head) + i, x);
    store8(to + static_cast<std::int64_t>(head) * elements + i, x);
}

std::int64_t blocks_for(std::int64_t items, std::int64_t each) { return (items + each - 1) / each; }

}  // namespace

void launch_gather(const layer_layout& layer, const exact_block* blocks, std::int32_t count, const row_choice& choice, const seal_rows_view& keys, const seal_rows_view& values, stream s) {
    const auto kernel = layer.stored == dtype::f16 ? &gather_rows<__half> : &gather_rows<__nv_bfloat16>;
    launch("gather_rows", s, grid_of(count, layer.kv_heads), dim3(threads), sizeof(gather_shared), kernel, layer.exact_page, blocks, choice, layer.key_size, keys, values);
}

void launch_compact(const sealed_block* blocks, std::int32_t count, const float* padded, std::int64_t head_elements, const row_choice& choice, const seal_rows_view& rows, stream s) {
    launch("compact_rows", s, grid_of(count, rows.heads), dim3(threads), 0, &compact_rows, blocks, padded, head_elements, choice, rows);
}

void launch_store_exact(const layer_layout& layer, const seal_target* targets, std::int32_t count, const seal_rows_view& keys, const seal_rows_view& values, stream s) {
    const auto kernel = layer.stored == dtype::f16 ? &store_exact<__half> : &store_exact<__nv_bfloat16>;
    launch("store_exact", s, grid_of(count, layer.kv_heads), dim3(threads), 0, kernel, layer.exact_line_page, targets, keys, values);
}

void launch_center(const seal_rows_view& rows, const head_array& mean, stream s) {
    launch("center_rows", s, grid_of(blocks_for(static_cast<std::int64_t>(rows.rows) * rows.size / 4, threads), rows.heads), dim3(threads), 0, &center_rows, rows, mean);
}

void launch_center_values(const seal_rows_view& rows, const head_array& mean, std::uint8_t* bytes, float* inverse, stream s) {
    launch("center_value_rows", s, grid_of(blocks_for(rows.rows, warps), rows.heads), dim3(threads), 0, &center_value_rows, rows, mean, bytes, inverse);
}

void launch_widen_keys(const seal_rows_view& rows, const double* mean, double* out, stream s) {
    launch("widen_key_rows", s, grid_of(blocks_for(static_cast<std::int64_t>(rows.rows) * rows.size, threads), rows.heads), dim3(threads), 0, &widen_key_rows, rows, mean, out);
}

void launch_widen_values(const seal_rows_view& rows, const head_array& mean, double* out, std::uint8_t* bytes, double* square_sums, stream s) {
    launch("widen_value_rows", s, grid_of(blocks_for(rows.rows, warps), rows.heads), dim3(threads), 0, &widen_value_rows, rows, mean, out, bytes);
    launch("sum_scales", s, dim3(static_cast<unsigned>(rows.heads)), dim3(threads), sizeof(warp_sums), &sum_scales, bytes, rows.capacity, rows.rows, square_sums);
}

void launch_column_sums(const seal_rows_view& rows, double* sums, stream s) {
    launch("column_sums", s, grid_of(blocks_for(rows.size, 32), rows.heads), dim3(threads), sizeof(column_shared), &column_sums<false>, rows, row_factor{}, sums);
}

void launch_column_squares(const seal_rows_view& rows, const row_factor& factor, double* sums, stream s) {
    launch("column_squares", s, grid_of(blocks_for(rows.size, 32), rows.heads), dim3(threads), sizeof(column_shared), &column_sums<true>, rows, factor, sums);
}

void launch_finish_means(double* sums, std::int32_t heads, std::int32_t size, std::int64_t count, const head_array& mean, stream s) {
    launch("finish_means", s, grid_of(1, heads), dim3(threads), 0, &finish_means, sums, size, static_cast<double>(count), mean);
}

void launch_finish_typical(const double* square_sums, std::int32_t heads, std::int64_t count, const head_array& typical, float* inverse, stream s) {
    launch("finish_typical", s, grid_of(blocks_for(heads, 32), 1), dim3(32), 0, &finish_typical, square_sums, heads, static_cast<double>(count), typical, inverse);
}

void launch_load_typical(const head_array& typical, std::int32_t heads, float* inverse, stream s) {
    launch("load_typical", s, grid_of(blocks_for(heads, 32), 1), dim3(32), 0, &load_typical, heads, typical, inverse);
}

void launch_scale_vectors(const double* vectors, const double* values, std::int32_t heads, std::int32_t size, double power, double* left, double* right, stream s) {
    launch("scale_vectors", s, grid_of(size, heads), dim3(threads), 0, &scale_vectors, vectors, values, size, power, left, right);
}

void launch_finish_keys(const double* wu, const double* inverse_wu, const double* values, std::int32_t heads, std::int32_t size, float* encoder, const head_array& encoder_buffer, const head_array& a,
                        double* variance, stream s) {
    launch("finish_keys", s, grid_of(size, heads), dim3(threads), 0, &finish_keys, wu, inverse_wu, values, size, encoder, encoder_buffer, a, variance);
}

void launch_finish_values(const double* vectors, const double* values, std::int32_t heads, std::int32_t size, std::int64_t count, float* basis, const head_array& buffer, double* variance, stream s) {
    launch("finish_values", s, grid_of(size, heads), dim3(threads), 0, &finish_values, vectors, values, size, static_cast<double>(count), basis, buffer, variance);
}

void launch_load_matrix(const head_array& from, dtype type, std::int32_t heads, std::int32_t size, float* to, stream s) {
    const auto kernel = type == dtype::f16 ? &load_matrix<__half> : &load_matrix<float>;
    launch("load_matrix", s, grid_of(blocks_for(static_cast<std::int64_t>(size) * size, threads * 8), heads), dim3(threads), 0, kernel, from, size * size, to);
}

}  // namespace sekv::cuda
