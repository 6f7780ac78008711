#include "sekv/attend/softmax_state.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "oracle/random.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240812;
constexpr std::int32_t size = 5;

struct owned_state {
    std::vector<float> max, weight, sums;
    softmax_state state;
    owned_state() : max(1), weight(1), sums(size), state{1, size, max.data(), weight.data(), sums.data()} { state.clear(); }
};

struct term {
    double logit;
    std::vector<float> value;
};

// Adds the terms [begin, end) as one partial attention, formed with their maximum as the shift.
void merge_range(softmax_state& s, const std::vector<term>& terms, std::size_t begin, std::size_t end) {
    double top = softmax_state::empty_max;
    for (auto i = begin; i < end; ++i) top = std::max(top, terms[i].logit);
    float weight = 0;
    std::vector<float> sums(size, 0.0F);
    for (auto i = begin; i < end; ++i) {
        const auto w = static_cast<float>(std::exp(terms[i].logit - top));
        weight += w;
        for (std::size_t j = 0; j < size; ++j) sums[j] += w * terms[i].value[j];
    }
    s.merge(0, static_cast<float>(top), weight, sums.data());
}

void expect_softmax(const softmax_state& s, const std::vector<term>& terms) {
    double top = softmax_state::empty_max, weight = 0;
    for (const auto& t : terms) top = std::max(top, t.logit);
    std::vector<double> out(size, 0.0);
    for (const auto& t : terms) {
        const double w = std::exp(t.logit - top);
        weight += w;
        for (std::size_t j = 0; j < size; ++j) out[j] += w * t.value[j];
    }
    EXPECT_NEAR(s.log_sum_exp(0), top + std::log(weight), 2e-6 * (1 + std::abs(top)));
    std::vector<float> got(size);
    s.finish(0, got.data());
    for (std::size_t j = 0; j < size; ++j) EXPECT_NEAR(got[j], out[j] / weight, 1e-5 * (1 + std::abs(top)));
}

TEST(SoftmaxState, MergesInAnyGrouping) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    for (std::int64_t i = 0; i < oracle::iterations(1000); ++i) {
        std::vector<term> terms(1 + random.below<std::size_t>(40));
        const float spread = i % 3 == 0 ? 40.0F : 1.0F;
        for (auto& t : terms) t = {random.normal(spread), random.normals(size)};
        owned_state s;
        for (std::size_t at = 0; at < terms.size();) {
            const auto n = std::min(terms.size() - at, 1 + random.below<std::size_t>(10));
            merge_range(s.state, terms, at, at + n);
            at += n;
        }
        expect_softmax(s.state, terms);
    }
}

TEST(SoftmaxState, EmptyStatesChangeNothing) {
    owned_state s;
    std::vector<float> out(size, 7.0F);
    EXPECT_EQ(s.state.log_sum_exp(0), softmax_state::empty_max);
    s.state.finish(0, out.data());
    EXPECT_EQ(out, std::vector<float>(size, 0.0F));
    const std::vector<float> nothing(size, 0.0F);
    s.state.merge(0, softmax_state::empty_max, 0.0F, nothing.data());
    EXPECT_EQ(s.weight[0], 0.0F);
    const std::vector<term> one{{-3.0, {1, 2, 3, 4, 5}}};
    merge_range(s.state, one, 0, 1);
    s.state.merge(0, softmax_state::empty_max, 0.0F, nothing.data());
    s.state.merge(0, 50.0F, 0.0F, nothing.data());  // no weight: its shift must not matter either
    expect_softmax(s.state, one);
    EXPECT_EQ(s.max[0], -3.0F);
}

TEST(SoftmaxState, RaiseRescalesWhatIsHeld) {
    owned_state s;
    EXPECT_EQ(s.state.raise(0, 2.0F), 2.0F);
    s.weight[0] = 1.0F;
    s.sums.assign(size, 3.0F);
    EXPECT_EQ(s.state.raise(0, 1.0F), 2.0F) << "a lower maximum leaves the shift";
    EXPECT_EQ(s.weight[0], 1.0F);
    EXPECT_EQ(s.state.raise(0, 4.0F), 4.0F);
    EXPECT_NEAR(s.weight[0], std::exp(-2.0), 1e-7);
    EXPECT_NEAR(s.sums[0], 3 * std::exp(-2.0), 1e-6);
    EXPECT_EQ(s.state.raise(0, 1000.0F), 1000.0F);
    EXPECT_EQ(s.weight[0], 0.0F);
}

}  // namespace
}  // namespace sekv
