// How the workspace of a seal is cut.
#pragma once

#include <array>

#include "kernels/seal_kernels.hpp"
#include "src/cuda/solver.hpp"

namespace sekv::cuda {

/// H: most heads, D: most size, C: chunk. Rows and codes are [H, C, D] floats.
struct seal_space {
    float *keys, *values, *key_codes, *value_codes;
    double* wide;                          ///< [H, C, D], in the place of both codes
    std::uint8_t* bytes;                   ///< [H, C] scale bytes
    float* inverse;                        ///< [H, C] 1 / scale
    std::array<double*, 6> matrices;       ///< [H, D, D] each
    float *encoder, *sketch_encoder, *basis;  ///< [H, D, D]
    double *key_sums, *value_sums, *scale_squares, *metric_values, *key_values, *value_values;  ///< [H, D]
    std::array<double*, 3> variances;      ///< [H, D] of key codes, of value codes by their own scale and by the typical one
    double *key_squares, *value_squares;   ///< [H, D]
    double *key_errors, *value_errors;     ///< [H, D, 8]
    float* typical_inverse;                ///< [H]
    allotment* allotments;                 ///< [H]
    seal_target* targets;                  ///< [C / 64]
    float* levels;                         ///< [level_table]
    solver::scratch scratch;
    std::size_t size;                      ///< of all, in bytes
};

/// base: null to measure.
[[nodiscard]] seal_space cut_seal_space(const seal_shape& shape, std::byte* base);

}  // namespace sekv::cuda
