// The steps of a seal, as src/cuda/sealer.cpp strings them together. Arrays are [heads, rows or size, ...]; a head's rows lie `capacity` rows apart.
#pragma once

#include "kernels/seal.hpp"

namespace sekv::cuda {

/// Rows of all heads in the workspace: head h's row i at data + (h * capacity + i) * size.
struct seal_rows_view {
    float* data = nullptr;
    std::int32_t heads = 0, size = 0, capacity = 0, rows = 0;
};

/// Which tokens become rows: row i is the token at position origin + i * stride.
struct row_choice {
    std::int64_t origin = 0;
    std::int32_t stride = 1, rows = 0;
};

/// Where the codes of one block go, and which workspace rows they are made of.
struct seal_target {
    std::uint8_t* sketch = nullptr;
    std::uint8_t* lines = nullptr;
    std::uint8_t* exact = nullptr;
    std::int32_t row = 0, count = 0;
};

/// A factor on each row: one per row, one per head (row_stride 0), or none (data null).
struct row_factor {
    const float* data = nullptr;
    std::int32_t head_stride = 0, row_stride = 0;
};

/// An array inside each head's part of a basis buffer.
struct head_array {
    std::byte* buffer = nullptr;
    head_stride heads;
    std::uint32_t offset = 0;
};

// seal.cu: rows

/// The chosen tokens' rows of exact pages, as fp32; keys or values may have null data.
void launch_gather(const layer_layout& layer, const exact_block* blocks, std::int32_t count, const row_choice& choice, const seal_rows_view& keys, const seal_rows_view& values, stream s);
/// The chosen tokens' rows out of decoded [count * 64, size] rows per head, head h's at padded + h * head_elements.
void launch_compact(const sealed_block* blocks, std::int32_t count, const float* padded, std::int64_t head_elements, const row_choice& choice, const seal_rows_view& rows, stream s);
/// R3: lines of [key][value] in the stored type, for targets that want them.
void launch_store_exact(const layer_layout& layer, const seal_target* targets, std::int32_t count, const seal_rows_view& keys, const seal_rows_view& values, stream s);
/// rows -= mean (fp32).
void launch_center(const seal_rows_view& rows, const head_array& mean, stream s);
/// The same for values; bytes and inverse [heads, capacity]: each row's scale byte and 1 / scale.
void launch_center_values(const seal_rows_view& rows, const head_array& mean, std::uint8_t* bytes, float* inverse, stream s);
/// out [heads, capacity, size] = rows - mean [heads, size] in double.
void launch_widen_keys(const seal_rows_view& rows, const double* mean, double* out, stream s);
/// out = (rows - mean) / scale in double; square_sums[head] += sum of scale^2. bytes [heads, capacity] is scratch.
void launch_widen_values(const seal_rows_view& rows, const head_array& mean, double* out, std::uint8_t* bytes, double* square_sums, stream s);

// seal.cu: statistics. sums [heads, size].

/// sums += the sum over rows of x, or of (factor x)^2.
void launch_column_sums(const seal_rows_view& rows, double* sums, stream s);
void launch_column_squares(const seal_rows_view& rows, const row_factor& factor, double* sums, stream s);
/// mean = sums / count: in double in place, and rounded to the buffer (which may be null).
void launch_finish_means(double* sums, std::int32_t heads, std::int32_t size, std::int64_t count, const head_array& mean, stream s);
/// typical = sqrt(square_sums / count), and its inverse [heads].
void launch_finish_typical(const double* square_sums, std::int32_t heads, std::int64_t count, const head_array& typical, float* inverse, stream s);
/// inverse [heads] = 1 / typical.
void launch_load_typical(const head_array& typical, std::int32_t heads, float* inverse, stream s);
/// left and right = vectors scaled column by column by root and 1 / root, root = (max(value, 1e-9 largest) / mean value)^(power / 2). vectors: column-major, values [heads, size] ascending.
void launch_scale_vectors(const double* vectors, const double* values, std::int32_t heads, std::int32_t size, double power, double* left, double* right, stream s);
/// From W U and W^-1 U (column-major, eigenvalues ascending): B row-major, columns by falling eigenvalue, to encoder [heads, size, size] and encoder_buffer; A likewise, fp16; variance = max(value, 0), falling.
void launch_finish_keys(const double* wu, const double* inverse_wu, const double* values, std::int32_t heads, std::int32_t size, float* encoder, const head_array& encoder_buffer, const head_array& a,
                        double* variance, stream s);
/// From U of a sum over count rows: U transposed, row j component j, to basis [heads, size, size] and as fp16 to the buffer; variance = max(value, 0) / count, falling.
void launch_finish_values(const double* vectors, const double* values, std::int32_t heads, std::int32_t size, std::int64_t count, float* basis, const head_array& buffer, double* variance, stream s);
/// fp32 copies of an encoder (fp32, pinned host) or a basis (fp16, device).
void launch_load_matrix(const head_array& from, dtype type, std::int32_t heads, std::int32_t size, float* to, stream s);

// quantize.cu

/// What the host allots to one head.
struct allotment {
    std::uint8_t key_bits[256], value_bits[256], key_widths[32], value_widths[32];
    std::uint32_t key_fields[512], value_fields[512];  ///< host::sketch_field as it lies in memory
    std::int32_t key_field_count, value_field_count;
};
/// Copies bits, fields, counts (key_buffer and epoch_buffer) and widths (epoch_buffer) to their places; a null buffer is skipped.
void launch_store_allotment(const layer_layout& layer, const allotment* from, std::byte* key_buffer, std::byte* epoch_buffer, stream s);

/// One quantiser of a layer: component widths at `widths` (a byte per `widths_per` components), steps to `step`, mean squared errors to `error` (null buffer: not kept).
struct step_search {
    seal_rows_view codes;
    row_factor factor;
    bool line = false;                ///< levels of a line, else a sketch's
    head_array widths, step, error;
    const double* squares = nullptr;  ///< [heads, size], sums over all samples
    const double* variance = nullptr; ///< [heads, size], what `error` is where the width is 0
    double* errors = nullptr;         ///< [heads, size, 8], sums over all samples
    const float* levels = nullptr;    ///< of level_table
    std::int64_t samples = 0;
};
/// errors += each candidate step's squared errors on codes.rows samples.
void launch_step_errors(const step_search& search, stream s);
/// The best candidates.
void launch_choose_steps(const step_search& search, stream s);

/// Thresholds and levels of a line's quantisers of width w, at (1 << w) - 2 and 512 + (1 << w) - 2.
inline constexpr std::int32_t level_table = 1024;

/// The quantiser of a sketch in a basis buffer.
struct sketch_place {
    const std::byte* buffer = nullptr;
    head_stride heads;
    std::uint32_t bits = 0, step = 0, fields = 0, field_count = 0;
};
/// Writes planes [first_plane, first_plane + planes) of each target's sketch.
void launch_pack_sketch(const seal_target* targets, std::int32_t count, const seal_rows_view& codes, const row_factor& factor, const sketch_place& quantizer, const head_stride& page, std::int32_t first_plane,
                        std::int32_t planes, stream s);
/// Writes each target's lines whole: codes, scale bytes, and zeros in between and behind the last token.
void launch_pack_lines(const layer_layout& layer, const seal_target* targets, std::int32_t count, const seal_rows_view& keys, const seal_rows_view& values, const row_factor& factor,
                       const std::uint8_t* bytes, const std::byte* epoch_buffer, const float* levels, stream s);

}  // namespace sekv::cuda
