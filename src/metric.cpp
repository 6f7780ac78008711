#include "sekv/codec/metric.hpp"

#include <algorithm>
#include <cmath>

#include "sekv/exec/row_ops.hpp"

namespace sekv {
namespace {

constexpr float most_element = 0x1p56F;  // sums of squares stay finite below it; a moment would never lose an infinity again
constexpr double prior_samples = 256;  // what a calibrated prior is worth, in own query vectors

}  // namespace

double add_queries(moment_view moment, const float* queries, std::int64_t token_stride, std::int64_t tokens, std::int32_t group, double decay) {
    const auto d = static_cast<std::size_t>(moment.size);
    const double faded = std::pow(decay, static_cast<double>(tokens));
    host::scale(moment.matrix, static_cast<std::int64_t>(d * d), static_cast<float>(faded));
    constexpr std::int64_t chunk = 64;
    std::vector<float> rows(static_cast<std::size_t>(chunk * group) * d);
    std::vector<float> columns(rows.size());
    for (std::int64_t first = 0; first < tokens; first += chunk) {
        const std::int64_t n = std::min(chunk, tokens - first);
        const auto m = static_cast<std::size_t>(n * group);
        for (std::size_t i = 0; i < m; ++i) {
            const auto token = first + static_cast<std::int64_t>(i) / group;
            const float* q = queries + token * token_stride + static_cast<std::int64_t>(i % static_cast<std::size_t>(group)) * moment.size;
            const auto w = static_cast<float>(std::pow(decay, static_cast<double>(tokens - 1 - token)));
            for (std::size_t j = 0; j < d; ++j) {
                const float x = std::abs(q[j]) < most_element ? q[j] : 0.0F;
                rows[i * d + j] = x;
                columns[j * m + i] = w * x;
            }
        }
        host::gemm(columns.data(), static_cast<std::int64_t>(m), rows.data(), moment.size, moment.matrix, moment.size, moment.size, moment.size, static_cast<std::int64_t>(m), true);
    }
    return faded;
}

std::vector<double> blend_metric(const float* own, double samples, const double* prior, std::int32_t size, double shrinkage) {
    const auto d = static_cast<std::size_t>(size);
    std::vector<double> m(d * d, 0.0);
    const double weight = prior != nullptr ? samples / (samples + prior_samples) : 1.0;
    for (std::size_t i = 0; i < m.size(); ++i) {
        if (samples > 0) m[i] = weight * static_cast<double>(own[i]) / samples;
        if (prior != nullptr) m[i] += (1.0 - weight) * prior[i];
    }
    double trace = 0;
    for (std::size_t i = 0; i < d; ++i) trace += m[i * d + i];
    const double effective = samples + (prior != nullptr ? prior_samples : 0.0);
    double l = std::max(shrinkage, static_cast<double>(d) / (static_cast<double>(d) + 8.0 * effective));
    if (!(trace > 0)) trace = static_cast<double>(d), l = 1.0, m.assign(d * d, 0.0);
    for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = 0; j < d; ++j) {
            const double sym = 0.5 * (m[i * d + j] + m[j * d + i]);
            if (j >= i) m[i * d + j] = m[j * d + i] = (1.0 - l) * sym;
        }
        m[i * d + i] += l * trace / static_cast<double>(d);
    }
    return m;
}

}  // namespace sekv
