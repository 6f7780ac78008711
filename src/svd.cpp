#include "sekv/codec/svd.hpp"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>

#include "sekv/exec/row_ops.hpp"

namespace sekv {
namespace {

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The `rank` leading eigenvectors of a symmetric matrix, as columns, largest eigenvalue first.
matrix leading_eigenvectors(const matrix& gram, Eigen::Index rank) {
    const Eigen::SelfAdjointEigenSolver<matrix> solver(gram);
    return solver.eigenvectors().rightCols(rank).rowwise().reverse();
}

// A power of two at or above the largest magnitude, as far as a float reaches; 1 for zeros.
double range_of(const matrix& m) {
    const double largest = m.cwiseAbs().maxCoeff();
    return largest > 0 ? std::exp2(std::clamp(std::ceil(std::log2(largest)), -126.0, 127.0)) : 1.0;
}

void store(const matrix& m, double factor, fp16* to) {
    for (Eigen::Index i = 0; i < m.size(); ++i) to[i] = fp16(static_cast<float>(m.data()[i] * factor));
}

}  // namespace

float fit_svd(const float* rows, std::int64_t count, std::int32_t size, std::int32_t rank, fp16* left, fp16* right) {
    const matrix x = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(rows, count, size).cast<double>();
    const bool wide = count <= size;
    const matrix u = leading_eigenvectors(wide ? matrix(x * x.transpose()) : matrix(x.transpose() * x), rank);
    const matrix loaded = wide ? matrix(u.transpose() * x) : matrix(x * u);
    const double scale = range_of(loaded);
    store(wide ? u : loaded, wide ? 1.0 : 1.0 / scale, left);
    store(wide ? loaded : matrix(u.transpose()), wide ? 1.0 / scale : 1.0, right);
    return static_cast<float>(scale);
}

void expand_right(const svd_view& v, float* right) {
    const auto n = static_cast<std::int64_t>(v.rank) * v.size;
    host::to_float(v.right, dtype::f16, static_cast<std::size_t>(n), right);
    host::scale(right, n, v.scale);
}

void expand_rows(const svd_view& v, std::int64_t first, std::int64_t count, const float* right, float* left, float* rows) {
    host::to_float(v.left + first * v.rank, dtype::f16, static_cast<std::size_t>(count * v.rank), left);
    host::gemm(left, v.rank, right, v.size, rows, v.size, count, v.size, v.rank, false);
}

}  // namespace sekv
