// Steps and codes of a seal: src/quantizer.cpp, src/sketch.cpp and src/line.cpp are the reference.
#include "kernels/device.cuh"
#include "kernels/line_decode.cuh"
#include "kernels/scalar.cuh"
#include "kernels/seal_kernels.hpp"
#include "kernels/warp.cuh"

namespace sekv::cuda {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int most_size = 256, most_fields = 512, most_line = 512;
constexpr int candidates = 8;

__device__ __forceinline__ const float* row_at(const seal_rows_view& v, std::int32_t head, std::int32_t row) { return v.data + (static_cast<std::int64_t>(head) * v.capacity + row) * v.size; }

template <class T>
__device__ __forceinline__ T* array_of(const head_array& a, std::int32_t head) {
    return reinterpret_cast<T*>(a.buffer + a.heads.first + static_cast<std::uint64_t>(head) * a.heads.stride + a.offset);
}

__device__ __forceinline__ float factor_of(const row_factor& f, std::int32_t head, std::int32_t row) { return f.data == nullptr ? 1.0F : f.data[head * f.head_stride + row * f.row_stride]; }

// Each product and sum rounded by itself, as the host does.
__device__ __forceinline__ float scaled_sum(float x, float factor, float plus) {
#if SEKV_ON_GPU
    return __fadd_rn(__fmul_rn(x, factor), plus);
#else
    return x * factor + plus;
#endif
}

// sekv::quantize.
__device__ __forceinline__ std::int32_t quantize(float c, float inverse, std::int32_t bits) {
    const auto half = static_cast<float>(1 << (bits - 1));
    float x = scaled_sum(c, inverse, half);
    x = x > 0.0F ? x : 0.0F;
    const float top = 2.0F * half - 1.0F;
    return static_cast<std::int32_t>(x < top ? x : top);
}

// sekv::nearest_level. thresholds: of this width.
__device__ __forceinline__ std::int32_t nearest_level(float x, std::int32_t width, const float* thresholds) {
    std::int32_t code = 0;
    for (std::int32_t b = width - 1; b >= 0; --b) {
        const std::int32_t half = 1 << b;
        code += x > thresholds[code + half - 1] ? half : 0;
    }
    return code;
}
__device__ __forceinline__ std::int32_t table_at(std::int32_t width) { return (1 << width) - 2; }

// The steps' optima for a unit Gaussian, and the clips around them that are tried; src/quantizer.cpp and src/line.cpp.
__device__ __forceinline__ double gaussian_step(bool line, std::int32_t width) {
    switch (width) {
        case 1: return static_cast<double>(1.596);
        case 2: return line ? static_cast<double>(0.896F) : 0.9957;
        case 3: return line ? static_cast<double>(0.4728F) : 0.586;
        case 4: return line ? static_cast<double>(0.2443F) : 0.3352;
        case 5: return line ? static_cast<double>(0.1108F) : 0.1881;
        case 6: return line ? static_cast<double>(0.055F) : 0.1041;
        case 7: return line ? static_cast<double>(0.031F) : 0.0569;
        default: return line ? static_cast<double>(0.018F) : 0.0308;
    }
}
__device__ __forceinline__ double clip_of(bool line, int k) {
    switch (k) {
        case 0: return line ? 0.65 : 0.8;
        case 1: return line ? 0.8 : 1.0;
        case 2: return line ? 0.9 : 1.2;
        case 3: return line ? 1.0 : 1.45;
        case 4: return line ? 1.12 : 1.75;
        case 5: return line ? 1.3 : 2.2;
        case 6: return line ? 1.6 : 3.0;
        default: return 2.2;
    }
}
__device__ __forceinline__ float candidate_step(bool line, std::int32_t width, double deviation, int k) { return static_cast<float>(gaussian_step(line, width) * deviation * clip_of(line, k)); }
__device__ __forceinline__ int candidates_of(bool line) { return line ? candidates : candidates - 1; }

__device__ __forceinline__ double deviation_of(const step_search& s, std::int32_t head, std::int32_t column) {
    return s.samples > 0 ? sqrt(s.squares[head * s.codes.size + column] / static_cast<double>(s.samples)) : 0.0;
}
__device__ __forceinline__ std::int32_t width_of(const step_search& s, std::int32_t head, std::int32_t column) {
    return static_cast<std::int32_t>(array_of<const std::uint8_t>(s.widths, head)[s.line ? column / 8 : column]);
}

struct error_shared {
    shared_array<double, threads> sums;
    shared_array<float, level_table> levels;
};

// 32 columns and one candidate per thread block; each warp takes every eighth sample.
__global__ void __launch_bounds__(threads) step_errors(step_search search) {
    auto& shared = dynamic_shared<error_shared>();
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const int k = static_cast<int>(blockIdx.z), thread = static_cast<int>(threadIdx.x), warp = warp_of(thread);
    const auto column = static_cast<std::int32_t>(blockIdx.x) * 32 + lane_of(thread);
    const bool line = search.line;
    if (line) {
        for (int i = thread; i < level_table; i += threads) shared.levels[i] = search.levels[i];
        __syncthreads();
    }
    const std::int32_t width = column < search.codes.size ? width_of(search, head, column) : 0;
    double error = 0;
    if (width > 0) {
        const float step = candidate_step(line, width, deviation_of(search, head, column), k);
        const float inverse = 1.0F / step, lowest = 0.5F - static_cast<float>(1 << (width - 1));
        for (std::int32_t i = warp; i < search.codes.rows; i += warps) {
            const float c = row_at(search.codes, head, i)[column] * factor_of(search.factor, head, i);
            const float level = line ? shared.levels[512 + table_at(width) + nearest_level(c / step, width, shared.levels.data() + table_at(width))] : static_cast<float>(quantize(c, inverse, width)) + lowest;
            const double e = scaled_sum(level, step, -c);
            error += e * e;
        }
    }
    shared.sums[thread] = error;
    __syncthreads();
    if (warp != 0 || width == 0) return;
    double* total = search.errors + (head * search.codes.size + column) * candidates + k;
    double sum = *total;
    for (int w = 0; w < warps; ++w) sum += shared.sums[w * 32 + thread];
    *total = sum;
}

__global__ void __launch_bounds__(threads) choose_steps(step_search search) {
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const auto column = static_cast<std::int32_t>(threadIdx.x);
    if (column >= search.codes.size) return;
    const std::int32_t width = width_of(search, head, column), at = head * search.codes.size + column;
    const double deviation = deviation_of(search, head, column);
    float step = 0, error = 0;
    if (width == 0) {
        error = search.variance != nullptr ? static_cast<float>(search.variance[at]) : 0.0F;
    } else if (deviation < 1e-20) {
        step = 1e-30F, error = static_cast<float>(deviation * deviation);
    } else {
        double least = INFINITY;
        for (int k = 0; k < candidates_of(search.line); ++k) {
            const double e = search.errors[at * candidates + k] / static_cast<double>(search.samples);
            if (!(e < least)) continue;
            least = search.line ? e : static_cast<double>(static_cast<float>(e));  // the host keeps a sketch's error as a float
            step = candidate_step(search.line, width, deviation, k), error = static_cast<float>(e);
        }
    }
    array_of<float>(search.step, head)[column] = step;
    if (search.error.buffer != nullptr) array_of<float>(search.error, head)[column] = error;
}

__device__ __forceinline__ void copy_bytes(std::byte* to, const std::uint8_t* from, std::int32_t count) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += threads) to[i] = static_cast<std::byte>(from[i]);
}
__device__ __forceinline__ void copy_fields(std::byte* to, const std::uint32_t* from, std::int32_t count) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count; i += threads) reinterpret_cast<std::uint32_t*>(to)[i] = from[i];
}

__global__ void __launch_bounds__(threads) store_allotment(layer_layout layer, const allotment* from, std::byte* key_buffer, std::byte* epoch_buffer) {
    const auto head = static_cast<std::uint64_t>(blockIdx.x);
    const allotment& a = from[blockIdx.x];
    if (key_buffer != nullptr) {
        std::byte* key = key_buffer + layer.key_buffer.first + head * layer.key_buffer.stride;
        copy_bytes(key + layer.key.bits, a.key_bits, layer.key_size);
        copy_fields(key + layer.key.fields, a.key_fields, a.key_field_count);
        if (threadIdx.x == 0) *reinterpret_cast<std::int32_t*>(key + layer.key.field_count) = a.key_field_count;
    }
    if (epoch_buffer == nullptr) return;
    std::byte* epoch = epoch_buffer + layer.epoch_buffer.first + head * layer.epoch_buffer.stride;
    copy_bytes(epoch + layer.epoch.bits, a.value_bits, layer.value_size);
    copy_fields(epoch + layer.epoch.fields, a.value_fields, a.value_field_count);
    copy_bytes(epoch + layer.epoch.key_widths, a.key_widths, layer.key_size / 8);
    copy_bytes(epoch + layer.epoch.value_widths, a.value_widths, layer.value_size / 8);
    if (threadIdx.x == 0) *reinterpret_cast<std::int32_t*>(epoch + layer.epoch.field_count) = a.value_field_count;
}

// How a field is encoded: its bits are (code >> drop & mask) << shift.
struct field_code {
    float inverse;
    std::int32_t component, width;
    std::uint8_t shift, mask, drop, unused;
};
struct sketch_shared {
    shared_array<field_code, most_fields> fields;
    shared_array<std::int32_t, most_fields / 4 + 1> first;  // field of each plane; planes are filled in order
};

__device__ __forceinline__ std::int32_t nibble_of(sketch_shared& shared, const seal_rows_view& codes, const row_factor& factor, std::int32_t head, std::int32_t row, std::int32_t plane) {
    const float* c = row_at(codes, head, row);
    const float f = factor_of(factor, head, row);
    std::int32_t nibble = 0;
    for (std::int32_t i = shared.first[plane]; i < shared.first[plane + 1]; ++i) {
        const field_code& field = shared.fields[i];
        nibble |= ((quantize(c[field.component] * f, field.inverse, field.width) >> field.drop) & field.mask) << field.shift;
    }
    return nibble;
}

// One block's planes of one head per thread block; a thread per byte.
__global__ void __launch_bounds__(threads)
    pack_sketch(const seal_target* targets, seal_rows_view codes, row_factor factor, sketch_place quantizer, head_stride page, std::int32_t first_plane, std::int32_t planes) {
    auto& shared = dynamic_shared<sketch_shared>();
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const int thread = static_cast<int>(threadIdx.x);
    const seal_target t = targets[blockIdx.x];
    const std::byte* buffer = quantizer.buffer + quantizer.heads.first + static_cast<std::uint64_t>(head) * quantizer.heads.stride;
    const auto* fields = reinterpret_cast<const uchar4*>(buffer + quantizer.fields);  // host::sketch_field: plane, shift, mask, component
    const std::int32_t count = *reinterpret_cast<const std::int32_t*>(buffer + quantizer.field_count);
    for (std::int32_t i = thread; i < count; i += threads) {
        const uchar4 f = fields[i];
        const auto width = static_cast<std::int32_t>(reinterpret_cast<const std::uint8_t*>(buffer + quantizer.bits)[f.w]);
        const bool low = i > 0 && fields[i - 1].w == f.w;
        shared.fields[i] = {1.0F / reinterpret_cast<const float*>(buffer + quantizer.step)[f.w], f.w, width, f.y, f.z, static_cast<std::uint8_t>(width == 8 && !low ? 4 : 0), 0};
        const std::int32_t before = i > 0 ? fields[i - 1].x : -1;
        for (std::int32_t p = before + 1; p <= f.x; ++p) shared.first[p] = i;
    }
    const std::int32_t last = count > 0 ? fields[count - 1].x : -1;
    for (std::int32_t p = last + 1 + thread; p <= planes; p += threads) shared.first[p] = count;
    __syncthreads();
    std::uint8_t* out = t.sketch + page.first + static_cast<std::uint64_t>(head) * page.stride + first_plane * plane_bytes;
    for (std::int32_t i = thread; i < planes * plane_bytes; i += threads) {
        const std::int32_t plane = i / plane_bytes, token = i % plane_bytes;
        std::int32_t byte = 0;
        if (token < t.count) byte = nibble_of(shared, codes, factor, head, t.row + token, plane);
        if (token + plane_bytes < t.count) byte |= nibble_of(shared, codes, factor, head, t.row + token + plane_bytes, plane) << 4;
        out[i] = static_cast<std::uint8_t>(byte);
    }
}

struct line_shared {
    shared_array<std::uint8_t, block_tokens * most_line> lines;
    shared_array<float, level_table / 2> thresholds;
    shared_array<code_group, most_size / group_codes> key_groups, value_groups;
};

__device__ __forceinline__ void pack_group(line_shared& shared, std::int32_t at, const code_group& g, const float* codes, float factor, const float* steps) {
    if (g.width == 0) return;
    std::uint64_t word = 0;
    for (std::int32_t j = 0; j < 8; ++j)
        word |= static_cast<std::uint64_t>(nearest_level(codes[j] * factor / steps[j], g.width, shared.thresholds.data() + table_at(g.width))) << (j * g.width);
    for (std::int32_t b = 0; b < g.width; ++b) shared.lines[at + g.first + b] = static_cast<std::uint8_t>(word >> (8 * b));
}

// One block's lines of one head per thread block, put together in shared memory.
__global__ void __launch_bounds__(threads)
    pack_lines(layer_layout layer, const seal_target* targets, seal_rows_view keys, seal_rows_view values, row_factor factor, const std::uint8_t* bytes, const std::byte* epoch_buffer, const float* levels) {
    auto& shared = dynamic_shared<line_shared>();
    const auto head = static_cast<std::int32_t>(blockIdx.y);
    const int thread = static_cast<int>(threadIdx.x);
    const seal_target t = targets[blockIdx.x];
    const std::byte* epoch = epoch_buffer + layer.epoch_buffer.first + static_cast<std::uint64_t>(head) * layer.epoch_buffer.stride;
    const std::int32_t block_bytes = block_tokens * layer.line_stride;
    for (std::int32_t i = thread * 16; i < block_bytes; i += threads * 16) store16(shared.lines.data() + i, uint4{0, 0, 0, 0});
    for (int i = thread; i < level_table / 2; i += threads) shared.thresholds[i] = levels[i];
    if (warp_of(thread) == 0) locate_groups(reinterpret_cast<const std::uint8_t*>(epoch + layer.epoch.key_widths), layer.key_size, 0, shared.key_groups.data());
    if (warp_of(thread) == 1) locate_groups(reinterpret_cast<const std::uint8_t*>(epoch + layer.epoch.value_widths), layer.value_size, layer.key_line_bytes + 1, shared.value_groups.data());
    __syncthreads();
    const auto* key_step = reinterpret_cast<const float*>(epoch + layer.epoch.key_step);
    const auto* value_step = reinterpret_cast<const float*>(epoch + layer.epoch.value_step);
    const std::int32_t key_groups = layer.key_size / 8, groups = key_groups + layer.value_size / 8;
    for (std::int32_t i = thread; i < t.count * groups; i += threads) {
        const std::int32_t token = i / groups, g = i % groups, row = t.row + token, at = token * layer.line_stride;
        if (g < key_groups) {
            pack_group(shared, at, shared.key_groups[g], row_at(keys, head, row) + g * 8, 1.0F, key_step + g * 8);
        } else {
            const std::int32_t v = g - key_groups;
            pack_group(shared, at, shared.value_groups[v], row_at(values, head, row) + v * 8, factor_of(factor, head, row), value_step + v * 8);
        }
    }
    if (thread < t.count) shared.lines[thread * layer.line_stride + layer.key_line_bytes] = bytes[head * values.capacity + t.row + thread];
    __syncthreads();
    std::uint8_t* out = t.lines + layer.line_page.first + static_cast<std::uint64_t>(head) * layer.line_page.stride;
    for (std::int32_t i = thread * 16; i < block_bytes; i += threads * 16) store16(out + i, load16(shared.lines.data() + i));
}

dim3 grid_of(std::int32_t x, std::int32_t heads, int z = 1) { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(heads), static_cast<unsigned>(z)); }

}  // namespace

void launch_store_allotment(const layer_layout& layer, const allotment* from, std::byte* key_buffer, std::byte* epoch_buffer, stream s) {
    launch("store_allotment", s, dim3(static_cast<unsigned>(layer.kv_heads)), dim3(threads), 0, &store_allotment, layer, from, key_buffer, epoch_buffer);
}

void launch_step_errors(const step_search& search, stream s) {
    launch("step_errors", s, grid_of((search.codes.size + 31) / 32, search.codes.heads, search.line ? candidates : candidates - 1), dim3(threads), sizeof(error_shared), &step_errors, search);
}

void launch_choose_steps(const step_search& search, stream s) { launch("choose_steps", s, grid_of(1, search.codes.heads), dim3(threads), 0, &choose_steps, search); }

void launch_pack_sketch(const seal_target* targets, std::int32_t count, const seal_rows_view& codes, const row_factor& factor, const sketch_place& quantizer, const head_stride& page, std::int32_t first_plane,
                        std::int32_t planes, stream s) {
    launch("pack_sketch", s, grid_of(count, codes.heads), dim3(threads), sizeof(sketch_shared), &pack_sketch, targets, codes, factor, quantizer, page, first_plane, planes);
}

void launch_pack_lines(const layer_layout& layer, const seal_target* targets, std::int32_t count, const seal_rows_view& keys, const seal_rows_view& values, const row_factor& factor,
                       const std::uint8_t* bytes, const std::byte* epoch_buffer, const float* levels, stream s) {
    launch("pack_lines", s, grid_of(count, layer.kv_heads), dim3(threads), sizeof(line_shared), &pack_lines, layer, targets, keys, values, factor, bytes, epoch_buffer, levels);
}

}  // namespace sekv::cuda
