#include "sekv/codec/basis.hpp"

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>

namespace sekv {
namespace {

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Second moment of rows(i) over i < count, a few hundred rows at a time so that the double copy stays in cache.
template <class Row>
matrix second_moment(std::int64_t count, Eigen::Index d, Row&& row) {
    matrix sum = matrix::Zero(d, d);
    constexpr std::int64_t chunk = 256;
    matrix rows(chunk, d);
    for (std::int64_t first = 0; first < count; first += chunk) {
        const auto n = static_cast<Eigen::Index>(std::min(chunk, count - first));
        for (Eigen::Index i = 0; i < n; ++i) row(first + i, &rows(i, 0));
        sum.selfadjointView<Eigen::Lower>().rankUpdate(rows.topRows(n).transpose());
    }
    matrix full = sum.selfadjointView<Eigen::Lower>();
    return full / static_cast<double>(std::max<std::int64_t>(count, 1));
}

Eigen::VectorXd mean_of(const float* rows, std::int64_t count, Eigen::Index d) {
    Eigen::VectorXd mean = Eigen::VectorXd::Zero(d);
    for (std::int64_t i = 0; i < count; ++i) mean += Eigen::Map<const Eigen::VectorXf>(rows + i * d, d).cast<double>();
    return mean / static_cast<double>(std::max<std::int64_t>(count, 1));
}

// Eigenvectors by falling eigenvalue.
struct spectrum {
    matrix vectors;
    Eigen::VectorXd values;
};
spectrum falling(const matrix& symmetric) {
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(symmetric);
    return {solver.eigenvectors().rowwise().reverse(), solver.eigenvalues().reverse()};
}

template <class Expression>
std::vector<float> elements(const Expression& e) {
    const float_matrix f = e.template cast<float>();
    return {f.data(), f.data() + f.size()};
}
std::vector<double> variances(const Eigen::VectorXd& values) {
    std::vector<double> out(values.data(), values.data() + values.size());
    for (auto& x : out) x = std::max(x, 0.0);
    return out;
}

}  // namespace

key_basis fit_keys(const float* keys, std::int64_t count, std::int32_t size, const std::vector<double>& metric, double power) {
    const Eigen::Index d = size;
    const auto mean = mean_of(keys, count, d);
    const matrix s = second_moment(count, d, [&](std::int64_t i, double* out) {
        for (Eigen::Index j = 0; j < d; ++j) out[j] = static_cast<double>(keys[i * d + j]) - mean[j];
    });
    const auto m = falling(Eigen::Map<const matrix>(metric.data(), d, d));
    // The metric's scale cancels between A and the codes; a mean eigenvalue of 1 keeps A inside fp16 for queries of any magnitude.
    const double mean_value = std::max(m.values.mean(), 1e-300);
    const Eigen::VectorXd root = (m.values.cwiseMax(1e-9 * std::max(m.values[0], 1e-300)) / mean_value).array().pow(power / 2);
    const matrix w = m.vectors * root.asDiagonal() * m.vectors.transpose();
    const matrix inverse = m.vectors * root.cwiseInverse().asDiagonal() * m.vectors.transpose();
    const auto u = falling(w * s * w);
    key_basis out;
    out.size = size;
    out.mean = elements(mean);
    out.a = elements(inverse * u.vectors);
    out.b = elements(w * u.vectors);
    out.variance = variances(u.values);
    return out;
}

value_basis fit_values(const float* values, std::int64_t count, std::int32_t size) {
    const Eigen::Index d = size;
    value_basis out;
    out.size = size;
    out.mean = elements(mean_of(values, count, d));
    double scales = 0;
    const matrix s = second_moment(count, d, [&](std::int64_t i, double* row) {
        const double scale = scale_of(scale_byte(values + i * d, out.mean.data(), size));
        scales += scale * scale;
        for (Eigen::Index j = 0; j < d; ++j) row[j] = (static_cast<double>(values[i * d + j]) - static_cast<double>(out.mean[static_cast<std::size_t>(j)])) / scale;
    });
    const auto u = falling(s);
    out.u = elements(u.vectors);
    out.variance = variances(u.values);
    out.typical_scale = static_cast<float>(std::sqrt(scales / static_cast<double>(std::max<std::int64_t>(count, 1))));
    return out;
}

std::uint8_t scale_byte(const float* value, const float* mean, std::int32_t size) noexcept {
    double square = 0;
    for (std::int32_t j = 0; j < size; ++j) {
        const double r = static_cast<double>(value[j]) - static_cast<double>(mean[j]);
        square += r * r;
    }
    const double rms = std::sqrt(square / size);
    if (!(rms > 0)) return 0;
    return static_cast<std::uint8_t>(std::clamp(std::lround(8 * std::log2(rms)) + 160L, 0L, 255L));
}

float scale_of(std::uint8_t byte) noexcept { return std::exp2((static_cast<float>(byte) - 160.0F) / 8.0F); }

}  // namespace sekv
