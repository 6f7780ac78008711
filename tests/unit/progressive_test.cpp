#include "sekv/attend/progressive.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "oracle/progressive.hpp"
#include "oracle/random.hpp"
#include "oracle/replay.hpp"

namespace sekv {
namespace {

using oracle::replay;
using oracle::stream;

constexpr std::uint32_t seed = 20240813;
// Tables round logits to a hundredth of a nat or so; a token near tau may go the other way.
constexpr double table_rounding = 1e-2;

oracle::replay_options small_options() {
    oracle::replay_options o;
    o.cache.window = 64;
    o.cache.rejectable = 16;
    o.codec.epoch_tokens = 512;
    o.codec.horizon = 0;
    o.codec.line_slots = 32;
    o.codec.tau = 1e-3F;
    return o;
}

oracle::zoom_policy policy_of(const progressive_options& o, float soft_cap) { return {o.tau, static_cast<std::size_t>(o.cap), o.rule == zoom_rule::max, soft_cap}; }

// One decode step's layers and heads against the oracle over the codes that the cache held.
void compare(const std::vector<replay::step>& got, const replay& r, const stream& x, const progressive_options& o, std::int64_t position, oracle::deviation& from_codes, oracle::deviation& from_exact) {
    for (std::int32_t l = 0; l < static_cast<std::int32_t>(x.model.layers.size()); ++l) {
        const auto& shape = x.model.layers[static_cast<std::size_t>(l)];
        for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
            const auto q = x.group(l, h, position);
            const auto& step = got[static_cast<std::size_t>(l)];
            const auto first = static_cast<std::size_t>(h * shape.group), size = static_cast<std::size_t>(shape.value_size);
            from_codes.add(step, oracle::attend(q, oracle::read_head(*r.cache, r.seq, x, l, h, position), policy_of(o, shape.soft_cap)), first, size);
            from_exact.add(step, oracle::attend(q, oracle::exact_head(x, l, h, position), {1, 0, false, shape.soft_cap}), first, size);
        }
    }
}

struct outcome {
    oracle::deviation codes, exact;
};

// Prefill of all but `steps` tokens, then decode steps, each compared.
outcome decode_and_compare(replay& r, const stream& x, const progressive_options& o, std::int64_t steps) {
    outcome all;
    r.prefill(x.tokens - steps);
    EXPECT_GT(r.cache->sealed(r.seq), 0);
    for (auto at = x.tokens - steps; at < x.tokens; ++at) compare(r.decode(at), r, x, o, at, all.codes, all.exact);
    return all;
}

struct shape_case {
    const char* name;
    layer_shape layer;
    std::int32_t sinks;
};

class ProgressiveShapes : public ::testing::TestWithParam<shape_case> {};

layer_shape shape(std::int32_t heads, std::int32_t group, std::int32_t key, std::int32_t value, float soft_cap = 0) {
    layer_shape l;
    l.kv_heads = heads, l.group = group, l.key_size = key, l.value_size = value, l.soft_cap = soft_cap;
    return l;
}

TEST_P(ProgressiveShapes, AgreesWithTheOracle) {
    SCOPED_TRACE(seed);
    const auto& c = GetParam();
    const stream x(oracle::make_model(2, c.layer, c.sinks), 1400, seed);
    for (const auto rule : {zoom_rule::mean, zoom_rule::max}) {
        auto o = small_options();
        o.codec.rule = rule;
        replay r(x, o);
        const auto got = decode_and_compare(r, x, o.codec, 5);
        EXPECT_GT(r.cache->zooms().tokens, 0U);
        EXPECT_LT(got.codes.relative(), table_rounding);
        EXPECT_LT(got.codes.lse, table_rounding);
        EXPECT_LT(got.exact.relative(), 0.3);
        RecordProperty(rule == zoom_rule::mean ? "mean" : "max", testing::PrintToString(got.codes.relative()) + " lse " + testing::PrintToString(got.codes.lse) + " exact " + testing::PrintToString(got.exact.relative()));
    }
}

// The tables' step follows the logits' range: with gentle queries nothing is left of their rounding, nor where all is zoomed.
TEST_P(ProgressiveShapes, AgreesCloselyWhereTablesRoundLittle) {
    SCOPED_TRACE(seed);
    const auto& c = GetParam();
    stream x(oracle::make_model(1, c.layer, c.sinks), 1000, seed + 20);
    for (const float tau : {1e-30F, 1.0F}) {
        auto o = small_options();
        o.codec.tau = tau;
        o.codec.cap = 4096;
        o.share = 0.7;
        replay r(x, o);
        const auto got = decode_and_compare(r, x, o.codec, 3);
        EXPECT_LT(got.codes.relative(), tau < 1 ? 1e-5 : 1e-3) << tau;
        EXPECT_LT(got.codes.lse, tau < 1 ? 2e-5 : 1e-3) << tau;
        x.scale_queries(0.02F);
    }
}

TEST_P(ProgressiveShapes, EverythingZoomedAtR3IsFullAttention) {
    SCOPED_TRACE(seed);
    const auto& c = GetParam();
    const stream x(oracle::make_model(2, c.layer, c.sinks), 1200, seed + 1);
    auto o = small_options();
    o.codec.exact_tier = true;
    o.codec.tau = 1e-30F;
    o.codec.cap = 4096;
    replay r(x, o);
    const auto got = decode_and_compare(r, x, o.codec, 3);
    EXPECT_LT(got.exact.relative(), 1e-5);
    EXPECT_LT(got.exact.lse, 1e-4);
}

const shape_case shapes[] = {
    {"Plain64", shape(2, 1, 64, 64), 4},        {"Group3", shape(2, 3, 64, 64), 4},          {"Group4", shape(1, 4, 80, 80), 0},
    {"Group8", shape(1, 8, 96, 96), 4},         {"Wide128", shape(1, 4, 128, 128), 4},       {"Apart128And64", shape(2, 2, 128, 64), 4},
    {"Apart64And128", shape(1, 3, 64, 128), 0}, {"SoftCapped", shape(2, 3, 64, 64, 20.0F), 4}, {"Wide256", shape(1, 2, 256, 256), 4},
};
INSTANTIATE_TEST_SUITE_P(Shapes, ProgressiveShapes, ::testing::ValuesIn(shapes), [](const auto& info) { return std::string(info.param.name); });

model_shape plain_model() { return oracle::make_model(2, shape(2, 3, 64, 64)); }

TEST(Progressive, LevelsOfATokenAreEachFinerThanTheLast) {
    const stream x(plain_model(), 1400, seed + 2);
    replay r(x, small_options());
    r.prefill(1400);
    for (std::int32_t h = 0; h < 2; ++h) {
        const auto codes = oracle::read_head(*r.cache, r.seq, x, 0, h, 1399);
        const auto exact = oracle::exact_head(x, 0, h, 1399);
        double norm = 0, rough = 0, fine = 0, value_norm = 0, value_rough = 0, value_fine = 0;
        for (std::size_t i = 0; i < codes.sealed() * 64; ++i) {
            const double k = exact.exact_keys[4 * 64 + i], v = exact.exact_values[4 * 64 + i];
            norm += k * k, rough += std::pow(codes.k1[i] - k, 2), fine += std::pow(codes.k2[i] - k, 2);
            value_norm += v * v, value_rough += std::pow(codes.v1[i] - v, 2), value_fine += std::pow(codes.v2[i] - v, 2);
        }
        EXPECT_LT(fine, 0.02 * norm);
        EXPECT_LT(value_fine, 0.02 * value_norm);
        EXPECT_GT(rough, fine);
        EXPECT_LT(rough, 0.5 * norm);
        EXPECT_LT(value_rough, 0.9 * value_norm);
        EXPECT_GT(value_rough, value_fine);
    }
}

TEST(Progressive, TauOneZoomsNothingAndTheCapTakesTheLargest) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1400, seed + 3);
    for (const std::int32_t cap : {0, 1, 7}) {
        auto o = small_options();
        o.codec.tau = 1e-5F;
        o.codec.cap = cap;
        replay r(x, o);
        const auto got = decode_and_compare(r, x, o.codec, 4);
        EXPECT_EQ(r.cache->zooms().capped, r.cache->zooms().zooms);
        EXPECT_EQ(r.cache->zooms().most_tokens, static_cast<std::uint64_t>(cap));
        EXPECT_LT(got.codes.relative(), 3 * table_rounding) << cap;  // near-ties at the cut
    }
    auto o = small_options();
    o.codec.tau = 1.0F;
    replay r(x, o);
    const auto got = decode_and_compare(r, x, o.codec, 4);
    EXPECT_EQ(r.cache->zooms().tokens, 0U);
    // One token may have most of the weight, and the rounding of its 20 planes isn't zoomed away.
    EXPECT_LT(got.codes.relative(), 10 * table_rounding);
    EXPECT_LT(got.codes.lse, 20 * 0.5 * 0.05);
}

TEST(Progressive, TheObserverIsToldOfEveryList) {
    const stream x(plain_model(), 1400, seed + 4);
    for (const auto rule : {zoom_rule::mean, zoom_rule::max}) {
        auto o = small_options();
        o.codec.rule = rule;
        std::uint64_t tokens = 0, most = 0;
        std::set<std::int64_t> positions;
        const auto group = x.model.layers[0].group;
        const float least = o.codec.tau * (rule == zoom_rule::mean ? static_cast<float>(group) : 1.0F);
        o.codec.observer = [&](const zoom_event& e) {
            ASSERT_EQ(e.tokens.size(), e.mass.size());
            EXPECT_TRUE(std::is_sorted(e.tokens.begin(), e.tokens.end()));
            EXPECT_TRUE(std::all_of(e.tokens.begin(), e.tokens.end(), [&](std::int64_t t) { return t >= 0 && t < e.position; }));
            EXPECT_TRUE(std::all_of(e.mass.begin(), e.mass.end(), [&](float m) { return m > least && m <= 1.001F * static_cast<float>(group); }));
            tokens += e.tokens.size();
            most = std::max(most, static_cast<std::uint64_t>(e.tokens.size()));
            positions.insert(e.position);
        };
        replay r(x, o);
        (void)decode_and_compare(r, x, o.codec, 4);
        EXPECT_GT(tokens, 0U);
        EXPECT_EQ(tokens, r.cache->zooms().tokens);
        EXPECT_EQ(most, r.cache->zooms().most_tokens);
        EXPECT_EQ(positions, (std::set<std::int64_t>{1396, 1397, 1398, 1399}));
    }
}

TEST(Progressive, FinerTauComesNearerToFullAttention) {
    const stream x(plain_model(), 1400, seed + 4);
    double last = 1;
    for (const float tau : {1.0F, 1e-2F, 1e-4F}) {
        auto o = small_options();
        o.codec.tau = tau;
        replay r(x, o);
        const auto got = decode_and_compare(r, x, o.codec, 6);
        EXPECT_LT(got.exact.relative(), last);
        last = got.exact.relative();
    }
    EXPECT_LT(last, 0.1);
}

std::vector<std::byte> refined_bytes(const replay& r, std::size_t units) {
    std::vector<std::byte> all;
    for (std::size_t i = 0; i < units; ++i) {
        const auto& page = *r.cache->units(r.seq)[i].payload.lines;
        all.insert(all.end(), page.data(), page.data() + page.size());
    }
    return all;
}

TEST(Progressive, SealsWhileDecodingWithoutTouchingWhatIsSealed) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1800, seed + 5);
    auto o = small_options();
    o.share = 0.5;
    replay r(x, o);
    r.prefill(1300);
    const auto sealed = r.cache->sealed(r.seq);
    const auto units = r.cache->units(r.seq).size();
    const auto before = refined_bytes(r, units);
    outcome all;
    for (std::int64_t at = 1300; at < 1800; ++at) {
        const auto got = r.decode(at);
        if (at % 50 == 49) compare(got, r, x, o.codec, at, all.codes, all.exact);
    }
    EXPECT_GT(r.cache->sealed(r.seq), sealed);
    EXPECT_EQ(refined_bytes(r, units), before);
    EXPECT_LT(all.codes.relative(), table_rounding);
    EXPECT_LT(all.codes.lse, table_rounding);
}

TEST(Progressive, AHorizonMakesSketchesAnewFromUntouchedLines) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1700, seed + 6);
    double error[2] = {0, 0};
    for (const std::int32_t horizon : {0, 100}) {
        auto o = small_options();
        o.codec.horizon = horizon;
        replay r(x, o);
        r.prefill(1300);
        const auto units = r.cache->units(r.seq).size();
        const auto before = refined_bytes(r, units);
        const auto bases = r.cache->units(r.seq).front().payload.keys;
        outcome all;
        for (std::int64_t at = 1300; at < 1700; ++at) {
            const auto got = r.decode(at);
            if (at % 40 == 39) compare(got, r, x, o.codec, at, all.codes, all.exact);
        }
        EXPECT_EQ(r.cache->units(r.seq).front().payload.keys == bases, horizon == 0);
        EXPECT_EQ(refined_bytes(r, units), before);
        EXPECT_LT(all.codes.relative(), table_rounding);
        error[horizon > 0] = all.exact.relative();
    }
    EXPECT_LT(error[1], 1.1 * error[0]);
}

TEST(Progressive, SeveralEpochs) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 2000, seed + 7);
    auto o = small_options();
    o.codec.epoch_tokens = 256;
    replay r(x, o);
    const auto got = decode_and_compare(r, x, o.codec, 4);
    std::set<const epoch*> epochs;
    for (const auto& u : r.cache->units(r.seq)) epochs.insert(u.payload.statistics.get());
    EXPECT_GE(epochs.size(), 3U);
    EXPECT_LT(got.codes.relative(), table_rounding);
    EXPECT_LT(got.codes.lse, table_rounding);
}

TEST(Progressive, ACalibratedPriorEntersTheMetric) {
    SCOPED_TRACE(seed);
    auto model = plain_model();
    for (auto& l : model.layers) {
        l.rope.pairs = rope_shape::pairing::half;
        for (int p = 0; p < 32; ++p) l.rope.inverse_frequency.push_back(static_cast<float>(std::pow(10000.0, -p / 32.0)));
    }
    const stream x(model, 1400, seed + 8);
    calibration_collector collector(model);
    for (std::int64_t t = 0; t < 200; ++t) {
        for (std::int32_t l = 0; l < 2; ++l) {
            for (std::int32_t h = 0; h < 2; ++h) {
                const auto q = x.group(l, h, t);
                for (std::size_t g = 0; g < 3; ++g) collector.add(l, h, std::vector<float>(q.begin() + static_cast<std::ptrdiff_t>(g * 64), q.begin() + static_cast<std::ptrdiff_t>((g + 1) * 64)), t);
            }
        }
    }
    auto o = small_options();
    o.codec.prior = std::make_shared<const calibration>(collector.finish());
    replay r(x, o);
    const auto got = decode_and_compare(r, x, o.codec, 4);
    EXPECT_LT(got.codes.relative(), table_rounding);
    EXPECT_LT(got.codes.lse, table_rounding);

    auto other = *o.codec.prior;
    other.fingerprint = "another model";
    o.codec.prior = std::make_shared<const calibration>(other);
    EXPECT_THROW(oracle::fp32_cache(model, o.cache, o.codec), format_error);
}

TEST(Progressive, ALaterPromptReadsSealedTokensWholeAtR2) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1450, seed + 9);
    replay r(x, small_options());
    r.prefill(1400);
    r.cache->begin_prefill(r.seq);
    const auto got = r.chunk(r.seq, 1400, 50, resolution::full);
    oracle::deviation all;
    for (const std::int64_t at : {1400, 1425, 1449}) {
        for (std::int32_t l = 0; l < 2; ++l) {
            for (std::int32_t h = 0; h < 2; ++h) {
                const auto expected = oracle::attend(x.group(l, h, at), oracle::read_head(*r.cache, r.seq, x, l, h, at), {-1, 4096, false, 0});
                replay::step one;
                const auto row = (at - 1400) * 6;
                const auto& step = got[static_cast<std::size_t>(l)];
                one.out.assign(step.out.begin() + row * 64, step.out.begin() + (row + 6) * 64);
                one.lse.assign(step.lse.begin() + row, step.lse.begin() + row + 6);
                all.add(one, expected, static_cast<std::size_t>(h * 3), 64);
            }
        }
    }
    EXPECT_LT(all.relative(), 1e-4);
    EXPECT_LT(all.lse, 1e-4);
}

TEST(Progressive, EarlierQueryPositionsSeeNothingLater) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1400, seed + 10);
    auto o = small_options();
    replay r(x, o);
    r.prefill(1400);
    oracle::deviation codes, exact;
    for (const std::int64_t at : {0, 2, 3, 4, 63, 64, 100, 500, 1399}) {
        std::vector<replay::step> got;
        for (std::int32_t l = 0; l < 2; ++l) got.push_back(r.attend(r.seq, l, at, 1, resolution::adaptive));
        compare(got, r, x, o.codec, at, codes, exact);
        EXPECT_LT(codes.relative(), table_rounding) << at;
        EXPECT_LT(codes.lse, table_rounding) << at;
    }
}

TEST(Progressive, TruncationsIntoSealedBlocksLeaveShortOnes) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1500, seed + 11);
    auto o = small_options();
    o.codec.exact_tier = true;
    replay r(x, o);
    r.prefill(1400);
    oracle::draws random(seed);
    for (int i = 0; i < 12; ++i) {
        const auto cut = r.cache->sealed(r.seq) - 1 - random.below(100);
        r.cache->truncate(r.seq, cut);
        outcome all;
        const auto end = std::min<std::int64_t>(cut + 400, 1500);
        for (auto at = cut; at < end; ++at) {
            const auto got = r.decode(at);
            if (at == end - 1) compare(got, r, x, o.codec, at, all.codes, all.exact);
        }
        ASSERT_LT(all.codes.relative(), table_rounding) << "cut to " << cut;
        ASSERT_LT(all.codes.lse, table_rounding) << "cut to " << cut;
    }
}

bool same_bits(const std::vector<replay::step>& a, const std::vector<replay::step>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i].out.size() != b[i].out.size() || std::memcmp(a[i].out.data(), b[i].out.data(), a[i].out.size() * sizeof(float)) != 0) return false;
        if (std::memcmp(a[i].lse.data(), b[i].lse.data(), a[i].lse.size() * sizeof(float)) != 0) return false;
    }
    return a.size() == b.size();
}

std::vector<replay::step> history(const stream& x, const oracle::replay_options& o) {
    replay r(x, o);
    r.prefill(1200);
    std::vector<replay::step> all;
    for (std::int64_t at = 1200; at < x.tokens; ++at) {
        for (auto& s : r.decode(at)) all.push_back(std::move(s));
    }
    return all;
}

TEST(Progressive, ThreadsAndLineSlotsChangeNoBit) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1300, seed + 12);
    auto o = small_options();
    o.codec.horizon = 64;
    o.codec.tau = 1e-4F;
    o.share = 0.7;
    const auto expected = history(x, o);
    for (const std::int32_t threads : {2, 3}) {
        auto with = o;
        with.threads = threads;
        EXPECT_TRUE(same_bits(history(x, with), expected)) << threads << " threads";
    }
    for (const std::int32_t slots : {0, 256}) {
        auto with = o;
        with.codec.line_slots = slots;
        EXPECT_TRUE(same_bits(history(x, with), expected)) << slots << " slots";
    }
}

TEST(Progressive, ABatchEqualsOneByOne) {
    SCOPED_TRACE(seed);
    const stream x(plain_model(), 1400, seed + 13);
    const std::vector<std::int64_t> lengths{1300, 900, 40, 1100};
    replay alone(x, small_options()), batched(x, small_options());
    std::vector<sequence> a, b;
    for (const auto n : lengths) {
        a.push_back(alone.open());
        b.push_back(batched.open());
        alone.prefill(a.back(), n);
        batched.prefill(b.back(), n);
    }
    std::vector<batch_item> items;
    const std::int32_t heads = 6;
    for (int step = 0; step < 3; ++step) {
        for (std::size_t i = 0; i < lengths.size(); ++i) batched.cache->reserve(b[i], 2), alone.cache->reserve(a[i], 2);
        for (std::int32_t l = 0; l < 2; ++l) {
            std::vector<float> queries, out(4 * 2 * heads * 64), lse(4 * 2 * heads);
            std::vector<replay::step> expected, got;
            items.clear();
            for (std::size_t i = 0; i < lengths.size(); ++i) {
                const auto at = lengths[i] + 2 * step;
                alone.cache->append(a[i], l, x.keys(l, at, 2), x.values(l, at, 2));
                batched.cache->append(b[i], l, x.keys(l, at, 2), x.values(l, at, 2));
                expected.push_back(alone.attend(a[i], l, at, 2, resolution::adaptive));
                const auto* q = static_cast<const float*>(x.queries(l, at, 2).data);
                queries.insert(queries.end(), q, q + 2 * heads * 64);
                items.push_back({b[i], 2, -1});
            }
            batched.cache->attend(items, l, rows(queries.data(), 8, heads, 64), resolution::adaptive, out_rows(out.data(), 8, heads, 64), lse.data());
            for (std::ptrdiff_t i = 0; i < 4; ++i) got.push_back({{out.begin() + i * 2 * heads * 64, out.begin() + (i + 1) * 2 * heads * 64}, {lse.begin() + i * 2 * heads, lse.begin() + (i + 1) * 2 * heads}});
            EXPECT_TRUE(same_bits(got, expected)) << "step " << step << " layer " << l;
        }
    }
}

// Adversarial magnitudes: logits of thousands of nats, and queries so small that the metric is all but zero.
TEST(Progressive, QueriesOfAnyMagnitudeStayFinite) {
    SCOPED_TRACE(seed);
    for (const float scale : {1e-12F, 1e-5F, 300.0F, 1e25F}) {
        stream x(plain_model(), 1300, seed + 14);
        x.scale_queries(scale);
        auto o = small_options();
        replay r(x, o);
        const auto got = decode_and_compare(r, x, o.codec, 3);
        EXPECT_TRUE(std::isfinite(got.codes.relative())) << scale;
        EXPECT_TRUE(std::isfinite(got.codes.lse)) << scale;
        EXPECT_LT(scale < 1 ? got.codes.relative() : 0.0, table_rounding) << scale;
    }
}

}  // namespace
}  // namespace sekv
