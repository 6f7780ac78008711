#include "sekv/codec/calibration.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "sekv/core/tensor_file.hpp"

namespace {

using sekv::calibration;
using sekv::format_error;
using sekv::paper_weights;
using sekv::rope_shape;
using pairing = sekv::rope_shape::pairing;

std::filesystem::path scratch(const char* name) {
    return std::filesystem::temp_directory_path() / ("sekv-calibration-" + std::to_string(::getpid()) + "-" + name);
}

rope_shape rope_of(pairing pairs, std::size_t count, float base) {
    rope_shape r{pairs, {}};
    for (std::size_t p = 0; p < count; ++p) r.inverse_frequency.push_back(std::pow(base, -static_cast<float>(p) / static_cast<float>(count)));
    return r;
}

std::vector<double> random_moment(std::mt19937_64& random, std::size_t d) {
    std::normal_distribution<double> normal;
    std::vector<double> m(d * d, 0.0), q(d);
    for (int n = 0; n < 7; ++n) {
        for (auto& x : q) x = normal(random);
        for (std::size_t i = 0; i < d; ++i) {
            for (std::size_t j = 0; j < d; ++j) m[i * d + j] += q[i] * q[j];
        }
    }
    return m;
}

// Mean of R_t M R_t^T, by turning the columns and then the rows for every position.
std::vector<double> brute_turn(const std::vector<double>& m, const rope_shape& rope, std::size_t d, std::int64_t begin, std::int64_t end) {
    std::vector<double> total(d * d, 0.0), half(d * d), row(d);
    for (auto t = begin; t < end; ++t) {
        for (std::size_t i = 0; i < d; ++i) sekv::turn_query(std::span(m).subspan(i * d, d), rope, t, std::span(half).subspan(i * d, d));
        for (std::size_t j = 0; j < d; ++j) {
            for (std::size_t i = 0; i < d; ++i) row[i] = half[i * d + j];
            sekv::turn_query(row, rope, t, row);
            for (std::size_t i = 0; i < d; ++i) total[i * d + j] += row[i] / static_cast<double>(end - begin);
        }
    }
    return total;
}

void expect_close(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], tolerance) << "element " << i;
}

sekv::model_shape small_model() {
    sekv::model_shape m;
    m.fingerprint = "test-model";
    m.layers = {{.kv_heads = 2, .group = 3, .key_size = 64, .value_size = 64, .rope = rope_of(pairing::half, 32, 10000.0F)},
                {.kv_heads = 1, .group = 2, .key_size = 80, .value_size = 64, .rope = rope_of(pairing::interleaved, 16, 100.0F)}};
    return m;
}

TEST(TurnQuery, PairsAreWhereTheyShouldBe) {
    const double turn = 2.0;  // radians at position 4 and frequency 0.5
    const std::vector<double> q{1, 2, 3, 4, 5, 6};
    std::vector<double> out(6);
    sekv::turn_query(q, rope_shape{pairing::half, {0.5F, 0.0F}}, 4, out);
    EXPECT_NEAR(out[0], std::cos(turn) * 1 - std::sin(turn) * 3, 1e-14);
    EXPECT_NEAR(out[2], std::sin(turn) * 1 + std::cos(turn) * 3, 1e-14);
    EXPECT_EQ((std::vector<double>{out[1], out[3], out[4], out[5]}), (std::vector<double>{2, 4, 5, 6}));
    sekv::turn_query(q, rope_shape{pairing::interleaved, {0.5F, 0.0F}}, 4, out);
    EXPECT_NEAR(out[0], std::cos(turn) * 1 - std::sin(turn) * 2, 1e-14);
    EXPECT_NEAR(out[1], std::sin(turn) * 1 + std::cos(turn) * 2, 1e-14);
    EXPECT_EQ((std::vector<double>{out[2], out[3], out[4], out[5]}), (std::vector<double>{3, 4, 5, 6}));
    sekv::turn_query(q, rope_shape{pairing::none, {0.5F}}, 4, out);
    EXPECT_EQ(out, q);
    EXPECT_THROW(sekv::turn_query(q, rope_shape{pairing::half, {1, 1, 1, 1}}, 4, out), sekv::invalid_argument);
    EXPECT_THROW(sekv::turn_query(q, rope_shape{pairing::half, {INFINITY}}, 4, out), sekv::invalid_argument);
    EXPECT_THROW(sekv::turn_query(q, rope_shape{}, 4, std::span(out).first(5)), sekv::invalid_argument);
}

TEST(TurnQuery, UnturnIsTheInverse) {
    const std::uint64_t seed = 3;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    for (const auto pairs : {pairing::half, pairing::interleaved}) {
        for (const std::int64_t position : {0, 1, 4097, 1'000'000}) {
            std::vector<double> q(64);
            for (auto& x : q) x = normal(random);
            auto there = q;
            const auto rope = rope_of(pairs, 24, 1e6F);
            sekv::turn_query(q, rope, position, there);
            sekv::unturn_query(there, rope, position, there);
            expect_close(there, q, 1e-13);
        }
    }
}

TEST(TurnMoment, PropertyEqualsTheAverage) {
    const std::pair<std::int64_t, std::int64_t> ranges[] = {
        {0, 1}, {1, 2}, {0, 2}, {7, 100}, {4096, 4096 + 333}, {1'000'000, 1'000'001}, {1'000'000, 1'000'257}};
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const std::size_t d = 2 + random() % 15, pairs = random() % (d / 2 + 1);
        const auto m = random_moment(random, d);
        auto rope = rope_of(seed % 2 == 0 ? pairing::half : pairing::interleaved, pairs, 10000.0F);
        if (pairs > 1 && seed % 3 == 0) rope.inverse_frequency[1] = rope.inverse_frequency[0];  // equal frequencies
        if (pairs > 2 && seed % 4 == 0) rope.inverse_frequency[2] = 0.0F;
        if (pairs > 0 && seed % 5 == 0) rope.inverse_frequency[0] = 3.1415927F;  // twice it is a whole turn, nearly
        if (pairs > 1 && seed % 6 == 0) rope.inverse_frequency[1] = 7.5F;        // more than a turn per position
        for (const auto& [begin, end] : ranges) {
            const auto turned = sekv::turn_moment(std::span<const double>(m), rope, begin, end);
            expect_close(turned, brute_turn(m, rope, d, begin, end), begin < 10'000 ? 1e-10 : 1e-7);
            for (std::size_t i = 0; i < d; ++i) {
                for (std::size_t j = 0; j < i; ++j) ASSERT_EQ(turned[i * d + j], turned[j * d + i]);
            }
        }
    }
}

TEST(TurnMoment, FullHeadAtLargePositions) {
    std::mt19937_64 random(1);
    for (const auto pairs : {pairing::half, pairing::interleaved}) {
        for (const std::size_t count : {32U, 20U}) {  // whole and partial rotary
            const auto m = random_moment(random, 64);
            const auto rope = rope_of(pairs, count, 500000.0F);
            expect_close(sekv::turn_moment(std::span<const double>(m), rope, 1'000'000, 1'000'100), brute_turn(m, rope, 64, 1'000'000, 1'000'100), 1e-7);
        }
    }
}

TEST(TurnMoment, EdgesAreExactOrRefused) {
    std::mt19937_64 random(2);
    const auto m = random_moment(random, 8);
    const std::span<const double> view(m);
    expect_close(sekv::turn_moment(view, rope_of(pairing::half, 4, 100.0F), 0, 1), m, 1e-14);
    EXPECT_EQ(sekv::turn_moment(view, rope_shape{}, 5, 900), m);
    const std::vector<float> narrow(m.begin(), m.end());
    const std::vector<double> widened(narrow.begin(), narrow.end());
    const auto rope = rope_of(pairing::half, 3, 100.0F);
    EXPECT_EQ(sekv::turn_moment(std::span<const float>(narrow), rope, 5, 9), sekv::turn_moment(std::span<const double>(widened), rope, 5, 9));
    double trace = 0, before = 0;
    const auto far = sekv::turn_moment(view, rope, 0, 100'000);
    for (std::size_t i = 0; i < 8; ++i) trace += far[i * 9], before += m[i * 9];
    EXPECT_NEAR(trace, before, 1e-9);
    EXPECT_THROW((void)sekv::turn_moment(view, rope, 5, 5), sekv::invalid_argument);
    EXPECT_THROW((void)sekv::turn_moment(view, rope, -1, 5), sekv::invalid_argument);
    EXPECT_THROW((void)sekv::turn_moment(view.first(63), rope, 0, 5), sekv::invalid_argument);
    EXPECT_THROW((void)sekv::turn_moment(view.first(0), rope, 0, 5), sekv::invalid_argument);
    EXPECT_THROW((void)sekv::turn_moment(view, rope_of(pairing::half, 5, 10.0F), 0, 5), sekv::invalid_argument);
}

// Pre-RoPE queries, turned as an engine does, collected, and turned again to where they were: the moment of what was added.
TEST(Calibration, CollectorUndoesRope) {
    const std::uint64_t seed = 9;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    const auto model = small_model();
    sekv::calibration_collector collector(model);
    for (std::int32_t layer = 0; layer < 2; ++layer) {
        const auto& shape = model.layers[static_cast<std::size_t>(layer)];
        const auto d = static_cast<std::size_t>(shape.key_size);
        std::vector<double> expected(d * d, 0.0), q(d);
        const int n = 90;
        for (int t = 0; t < n; ++t) {
            for (auto& x : q) x = normal(random) + 0.5;
            for (std::size_t i = 0; i < d * d; ++i) expected[i] += q[i / d] * q[i % d] / n;
            std::vector<double> turned(d);
            sekv::turn_query(q, shape.rope, 50 + t, turned);
            collector.add(layer, 0, std::vector<float>(turned.begin(), turned.end()), 50 + t);
        }
        const auto c = collector.finish();
        const auto m = c.layers[static_cast<std::size_t>(layer)].moment(0);
        expect_close(std::vector<double>(m.begin(), m.end()), expected, 1e-5);
        EXPECT_EQ(c.layers[static_cast<std::size_t>(layer)].counts[0], n);
    }
    const auto c = collector.finish();
    EXPECT_EQ(c.fingerprint, "test-model");
    EXPECT_EQ(c.layers[0].counts[1], 0);
    EXPECT_EQ(c.layers[0].moment(1)[5], 0.0F);
    EXPECT_THROW((void)c.layers[0].moment(2), sekv::invalid_argument);
    const std::vector<float> bad(64, std::numeric_limits<float>::quiet_NaN()), good(64, 1.0F);
    EXPECT_THROW(collector.add(0, 0, bad, 0), sekv::invalid_argument);
    EXPECT_THROW(collector.add(1, 0, good, 0), sekv::invalid_argument);
    EXPECT_THROW(collector.add(2, 0, good, 0), sekv::invalid_argument);
    EXPECT_THROW(collector.add(0, 2, good, 0), sekv::invalid_argument);
    EXPECT_THROW(collector.add(0, 0, good, -1), sekv::invalid_argument);
    EXPECT_EQ(collector.finish(), c);
    auto nameless = model;
    nameless.fingerprint.clear();
    EXPECT_THROW(sekv::calibration_collector{nameless}, sekv::invalid_argument);
}

calibration some_calibration(const sekv::model_shape& model) {
    std::mt19937_64 random(4);
    std::normal_distribution<float> normal;
    sekv::calibration_collector collector(model);
    for (int t = 0; t < 40; ++t) {
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            std::vector<float> q(static_cast<std::size_t>(model.layers[static_cast<std::size_t>(layer)].key_size));
            for (auto& x : q) x = normal(random);
            collector.add(layer, 0, q, t);
        }
    }
    return collector.finish();
}

TEST(Calibration, SurvivesAFileAndRefusesOtherModels) {
    const auto model = small_model();
    const auto c = some_calibration(model);
    const auto path = scratch("a");
    c.save(path);
    EXPECT_EQ(calibration::load(path, model), c);
    auto other = model;
    other.fingerprint = "another-model";
    EXPECT_THROW((void)calibration::load(path, other), format_error);
    other.fingerprint.clear();
    EXPECT_THROW((void)calibration::load(path, other), format_error);
    other = model;
    other.layers.pop_back();
    EXPECT_THROW((void)calibration::load(path, other), format_error);
    other = model;
    other.layers[1].key_size = 64;
    EXPECT_THROW((void)calibration::load(path, other), format_error);
    other = model;
    other.layers[0].kv_heads = 4;
    EXPECT_THROW((void)calibration::load(path, other), format_error);
    EXPECT_THROW((void)paper_weights::load(path, model), format_error);
    std::filesystem::remove(path);
    EXPECT_THROW((void)calibration::load(path, model), sekv::io_error);
    auto nameless = c;
    nameless.fingerprint.clear();
    EXPECT_THROW(nameless.save(path), sekv::invalid_argument);
    nameless = c;
    nameless.layers[0].counts.pop_back();
    EXPECT_THROW(nameless.save(path), sekv::invalid_argument);
    EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Calibration, RefusesWhatIsNoMoment) {
    const auto model = small_model();
    const auto good = some_calibration(model);
    const auto path = scratch("b");
    const auto expect_refused = [&](auto damage) {
        auto bad = good;
        damage(bad.layers[0]);
        bad.save(path);
        EXPECT_THROW((void)calibration::load(path, model), format_error);
    };
    expect_refused([](auto& l) { l.moments[0] = -1.0F; });
    expect_refused([](auto& l) { l.moments[65] = std::numeric_limits<float>::quiet_NaN(); });
    expect_refused([](auto& l) { l.moments[1] = std::numeric_limits<float>::quiet_NaN(); });
    expect_refused([](auto& l) { l.moments[64] = INFINITY; });
    expect_refused([](auto& l) { l.moments[0] = INFINITY; });
    expect_refused([](auto& l) { l.moments[1] += 0.1F; });                  // not symmetric
    expect_refused([](auto& l) { l.moments[1] = l.moments[64] = 90.0F; });  // past Cauchy-Schwarz
    expect_refused([](auto& l) { l.counts[0] = -1.0; });
    expect_refused([](auto& l) { l.counts[0] = 0.0; });
    expect_refused([](auto& l) { l.counts[0] = std::nan(""); });
    std::filesystem::remove(path);
}

TEST(PaperWeights, UntrainedPicksTheSlowestElements) {
    const auto w = paper_weights::untrained(small_model());
    ASSERT_EQ(w.layers.size(), 2U);
    EXPECT_EQ(w.parameters(), 32U * 64 + 1 + 32U * 80 + 1);
    const auto picked = [&](std::size_t layer, std::size_t element) {
        const auto d = static_cast<std::size_t>(w.layers[layer].key_size);
        float column = 0;
        for (std::size_t r = 0; r < 32; ++r) column += w.layers[layer].weight[r * d + element];
        return column == 1.0F;
    };
    for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(picked(0, i), i % 32 >= 16) << i;       // half pairing: slow pairs are the upper ones
    for (std::size_t i = 0; i < 80; ++i) EXPECT_EQ(picked(1, i), i >= 32 && i < 64) << i;  // 48 unrotated: the first 32 of them
    for (const auto& l : w.layers) {
        EXPECT_EQ(l.tau, 0.05F);
        const auto d = static_cast<std::size_t>(l.key_size);
        for (std::size_t r = 0; r < 32; ++r) {
            float row = 0;
            for (std::size_t i = 0; i < d; ++i) row += l.weight[r * d + i];
            EXPECT_EQ(row, 1.0F);
        }
    }
}

TEST(PaperWeights, SurvivesAFileAndRefusesOtherModels) {
    const auto model = small_model();
    auto w = paper_weights::untrained(model);
    w.layers[1].tau = 0.3F;
    w.layers[0].weight[17] = -0.125F;
    const auto path = scratch("c");
    w.save(path);
    EXPECT_EQ(paper_weights::load(path, model), w);
    auto other = model;
    other.fingerprint = "another-model";
    EXPECT_THROW((void)paper_weights::load(path, other), format_error);
    other = model;
    other.layers[0].key_size = 128;
    EXPECT_THROW((void)paper_weights::load(path, other), format_error);
    EXPECT_THROW((void)calibration::load(path, model), format_error);
    for (const float tau : {0.0F, 1.0F, -0.1F, std::numeric_limits<float>::quiet_NaN()}) {
        auto bad = w;
        bad.layers[0].tau = tau;
        bad.save(path);
        EXPECT_THROW((void)paper_weights::load(path, model), format_error);
    }
    w.layers[0].weight[3] = INFINITY;
    w.save(path);
    EXPECT_THROW((void)paper_weights::load(path, model), format_error);
    std::filesystem::remove(path);
}

}  // namespace
