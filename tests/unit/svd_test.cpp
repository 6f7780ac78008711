#include "sekv/codec/svd.hpp"

#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace {

using sekv::fp16;

struct packed {
    std::vector<fp16> left, right;
    sekv::svd_view view;
};

packed fit(const std::vector<float>& rows, std::int64_t count, std::int32_t size, std::int32_t rank) {
    packed p{std::vector<fp16>(static_cast<std::size_t>(count * rank)), std::vector<fp16>(static_cast<std::size_t>(rank * size)), {}};
    const float scale = sekv::fit_svd(rows.data(), count, size, rank, p.left.data(), p.right.data());
    p.view = {p.left.data(), p.right.data(), scale, count, size, rank};
    return p;
}

std::vector<float> rebuild(const sekv::svd_view& v, std::int64_t first, std::int64_t count) {
    std::vector<float> right(static_cast<std::size_t>(v.rank * v.size)), left(static_cast<std::size_t>(count * v.rank)),
        rows(static_cast<std::size_t>(count * v.size));
    sekv::expand_right(v, right.data());
    sekv::expand_rows(v, first, count, right.data(), left.data(), rows.data());
    return rows;
}

std::vector<float> noise(std::mt19937& random, std::int64_t count, float spread) {
    std::normal_distribution<float> normal(0.0F, spread);
    std::vector<float> v(static_cast<std::size_t>(count));
    for (auto& x : v) x = normal(random);
    return v;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    return std::sqrt(sum);
}

Eigen::VectorXd singular_values(const std::vector<float>& rows, std::int64_t count, std::int32_t size) {
    const Eigen::MatrixXd x = Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(rows.data(), count, size).cast<double>();
    return Eigen::JacobiSVD<Eigen::MatrixXd>(x).singularValues();
}

TEST(Svd, ErrorIsTheDiscardedSingularValuesAndHalfPrecision) {
    std::mt19937 random(11);
    for (const std::int64_t count : {2, 5, 31, 64, 100, 300}) {
        for (const std::int32_t size : {64, 80, 128}) {
            auto rows = noise(random, count * size, 1.0F);
            for (std::int64_t i = 0; i < count; ++i) {
                for (std::int32_t j = 0; j < size; ++j) rows[static_cast<std::size_t>(i * size + j)] *= std::pow(0.93F, static_cast<float>(j));
            }
            const auto sigma = singular_values(rows, count, size);
            for (const std::int32_t rank : {1, 4, 32, 64}) {
                if (rank > std::min<std::int64_t>(count, size)) continue;
                const auto p = fit(rows, count, size, rank);
                const double optimum = sigma.tail(sigma.size() - rank).norm();
                const double rounding = 1e-3 * sigma.norm();
                EXPECT_NEAR(distance(rows, rebuild(p.view, 0, count)), optimum, rounding) << count << " x " << size << ", rank " << rank;
            }
        }
    }
}

TEST(Svd, FullRankGivesRowsBack) {
    std::mt19937 random(12);
    for (const float spread : {1e-30F, 1e-6F, 1.0F, 1e6F, 1e36F}) {
        const auto rows = noise(random, 17 * 64, spread);
        const auto p = fit(rows, 17, 64, 17);
        const auto back = rebuild(p.view, 0, 17);
        for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_NEAR(back[i] / spread, rows[i] / spread, 1e-2F);
        EXPECT_LT(distance(rows, back) / static_cast<double>(spread) / std::sqrt(static_cast<double>(rows.size())), 1.5e-3);
    }
}

TEST(Svd, ScaleIsAPowerOfTwo) {
    std::mt19937 random(13);
    for (const float spread : {1e-3F, 1.0F, 700.0F}) {
        const auto p = fit(noise(random, 9 * 64, spread), 9, 64, 4);
        int exponent = 0;
        EXPECT_EQ(std::frexp(p.view.scale, &exponent), 0.5F);
        for (const auto& f : {p.left, p.right}) {
            for (const auto x : f) EXPECT_LE(std::abs(static_cast<float>(x)), 1.0F);
        }
    }
}

TEST(Svd, ZeroAndRepeatedRows) {
    const std::vector<float> zeros(6 * 64, 0.0F);
    EXPECT_EQ(rebuild(fit(zeros, 6, 64, 6).view, 0, 6), zeros);
    std::vector<float> same;
    for (int i = 0; i < 5; ++i) {
        for (int j = 0; j < 64; ++j) same.push_back(0.25F * static_cast<float>(j % 7));
    }
    EXPECT_LT(distance(rebuild(fit(same, 5, 64, 1).view, 0, 5), same), 2e-2);
}

TEST(Svd, APartEqualsTheWhole) {
    std::mt19937 random(14);
    const auto p = fit(noise(random, 100 * 64, 1.0F), 100, 64, 32);
    const auto all = rebuild(p.view, 0, 100), part = rebuild(p.view, 37, 20);
    for (std::size_t i = 0; i < part.size(); ++i) EXPECT_NEAR(part[i], all[37 * 64 + i], 1e-5F);
}

}  // namespace
