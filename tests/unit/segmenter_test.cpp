#include "sekv/span/segmenter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "sekv/span/key_novelty.hpp"
#include "sekv/span/surprisal.hpp"

namespace {

using sekv::cut_reason;
using sekv::segmenter;
using sekv::segmenter_options;
using sekv::span_policy;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

std::vector<float> stream(std::mt19937_64& random, int kind, std::size_t n) {
    std::vector<float> s(n);
    std::exponential_distribution<float> exponential(0.4F);
    std::uniform_int_distribution<int> small(0, 2);
    for (std::size_t i = 0; i < n; ++i) {
        switch (kind) {
            case 0:
                s[i] = exponential(random);
                break;
            case 1:
                s[i] = 2.5F;
                break;  // constant
            case 2:
                s[i] = random() % 20 == 0 ? 15.0F : 0.1F * exponential(random);
                break;  // spikes
            case 3:
                s[i] = static_cast<float>(i) * 0.01F;
                break;  // rising: every token above the mean
            case 4:
                s[i] = 1.0F / static_cast<float>(i + 1);
                break;  // falling: none is
            case 5:
                s[i] = static_cast<float>(small(random));
                break;  // many ties
            case 6:
                s[i] = i % 2 == 0 ? 0.0F : 1e30F;
                break;
            default:
                s[i] = 0.0F;
                break;
        }
    }
    if (n > 0) s[0] = 0.0F;
    return s;
}
constexpr int kinds = 8;

segmenter_options random_options(std::mt19937_64& random) {
    segmenter_options o;
    o.policy = static_cast<span_policy>(random() % 4);
    o.alpha = static_cast<double>(random() % 5) * 0.5;
    o.l_min = 1 + static_cast<int>(random() % 10);
    o.l_max = o.l_min + static_cast<int>(random() % 40);
    o.fixed_length = 1 + static_cast<int>(random() % 20);
    return o;
}

// The definition, quadratic: statistics afresh for every token, and one list of cuts.
std::vector<std::int64_t> reference_cuts(const std::vector<float>& s, const segmenter_options& o, std::vector<std::int64_t>* anchors) {
    std::vector<std::int64_t> cuts;
    for (std::int64_t t = 0; t < static_cast<std::int64_t>(s.size()); ++t) {
        sekv::running_moments m;
        for (std::int64_t i = 0; i < t; ++i) m.add(static_cast<double>(s[static_cast<std::size_t>(i)]));
        const auto at = [&](std::int64_t i) { return s[static_cast<std::size_t>(i)]; };
        const bool above = t > 0 && static_cast<double>(at(t)) > m.mean + o.alpha * m.deviation();
        if (above) anchors->push_back(t);
        const std::int64_t begin = cuts.empty() ? 0 : cuts.back();
        if (o.policy == span_policy::dictated) continue;
        if (o.policy == span_policy::fixed) {
            if (t - begin == o.fixed_length) cuts.push_back(t);
        } else if (above && t - begin >= o.l_min) {
            cuts.push_back(t);
        } else if (t - begin == o.l_max) {
            std::int64_t best = begin + o.l_min;
            for (std::int64_t i = best; i <= t; ++i) best = at(i) >= at(best) ? i : best;
            cuts.push_back(best);
        }
    }
    return cuts;
}

void expect_partition(const segmenter& s) {
    std::int64_t at = 0;
    const auto all = s.all_spans();
    for (const auto& piece : all) {
        ASSERT_EQ(piece.begin, at);
        ASSERT_GT(piece.end, piece.begin);
        double sum = 0.0;
        for (auto i = piece.begin; i < piece.end; ++i) {
            sum += static_cast<double>(s.signal(i));
            ASSERT_EQ(s.span_at(i), piece);
        }
        ASSERT_EQ(piece.surprisal_sum, static_cast<float>(sum));
        at = piece.end;
    }
    ASSERT_EQ(at, s.length());
}

TEST(Surprisal, MatchesLongDoubleSoftmax) {
    const std::uint64_t seed = 11;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    for (int round = 0; round < 200; ++round) {
        std::normal_distribution<float> normal(0.0F, round % 2 == 0 ? 3.0F : 40.0F);
        std::vector<float> l(1 + random() % 300);
        for (auto& x : l) x = normal(random) + (round % 3 == 0 ? 5000.0F : 0.0F);
        const auto token = random() % l.size();
        const long double peak = *std::max_element(l.begin(), l.end());
        long double sum = 0, entropy = 0;
        for (const float x : l) sum += std::exp(static_cast<long double>(x) - peak);
        for (const float x : l) {
            const long double ln = static_cast<long double>(x) - peak - std::log(sum);
            entropy -= std::exp(ln) * ln;
        }
        const long double expected = std::log(sum) - (static_cast<long double>(l[token]) - peak);
        const auto n = static_cast<std::int64_t>(l.size());
        EXPECT_NEAR(sekv::surprisal(l.data(), n, static_cast<std::int64_t>(token)), static_cast<double>(expected),
                    1e-7 * (1 + std::abs(static_cast<double>(expected))));
        EXPECT_NEAR(sekv::entropy(l.data(), n), static_cast<double>(entropy), 1e-6);
    }
}

TEST(Surprisal, EdgesAreExactOrRefused) {
    const std::vector<float> sure{0.0F, 60.0F, -inf};
    EXPECT_NEAR(sekv::surprisal(sure.data(), 3, 1) / std::exp(-60.0), 1.0, 1e-6);  // keeps its digits near p = 1
    EXPECT_EQ(sekv::surprisal(sure.data(), 3, 2), inf);
    const std::vector<float> wide{-3e38F, 3e38F};
    EXPECT_EQ(sekv::surprisal(wide.data(), 2, 1), 0.0F);
    EXPECT_EQ(sekv::entropy(wide.data(), 2), 0.0F);
    EXPECT_FALSE(std::isnan(sekv::surprisal(wide.data(), 2, 0)));
    EXPECT_THROW((void)sekv::surprisal(sure.data(), 3, 3), sekv::invalid_argument);
    EXPECT_THROW((void)sekv::surprisal(sure.data(), 3, -1), sekv::invalid_argument);
    EXPECT_THROW((void)sekv::surprisal(nullptr, 0, 0), sekv::invalid_argument);
    for (const auto& bad : {std::vector<float>{-inf, -inf}, std::vector<float>{0.0F, nan_value}, std::vector<float>{inf, 0.0F}}) {
        EXPECT_THROW((void)sekv::surprisal(bad.data(), 2, 0), sekv::invalid_argument);
        EXPECT_THROW((void)sekv::entropy(bad.data(), 2), sekv::invalid_argument);
    }
}

TEST(Segmenter, RunningMomentsMatchTwoPasses) {
    std::mt19937_64 random(5);
    for (const auto kind : {0, 2, 3}) {
        const auto s = stream(random, kind, 5000);
        segmenter running;
        running.push(s);
        long double mean = 0, squares = 0;
        for (const float x : s) mean += static_cast<long double>(x) / static_cast<long double>(s.size());
        for (const float x : s) squares += (static_cast<long double>(x) - mean) * (static_cast<long double>(x) - mean);
        const double sigma = static_cast<double>(std::sqrt(squares / static_cast<long double>(s.size())));
        EXPECT_NEAR(running.moments().mean, static_cast<double>(mean), 1e-10);
        EXPECT_NEAR(running.moments().deviation(), sigma, 1e-10);
        EXPECT_NEAR(running.threshold(), static_cast<double>(mean) + sigma, 1e-10);
    }
}

TEST(Segmenter, CutsBeforeASurprisingToken) {
    std::vector<float> s(40, 1.0F);
    s[3] = 9.0F;   // too early: fewer than l_min tokens
    s[20] = 9.0F;  // cuts
    segmenter seg;
    seg.push(s);
    ASSERT_EQ(seg.spans().size(), 1U);
    EXPECT_EQ(seg.spans()[0], (sekv::span{0, 20, 28.0F, cut_reason::threshold}));
    EXPECT_EQ(seg.open_span(), (sekv::span{20, 40, 28.0F, cut_reason::open}));
    EXPECT_TRUE(seg.is_anchor(3) && seg.is_anchor(20) && !seg.is_anchor(21));
    EXPECT_EQ(seg.anchors(), (std::vector<std::int64_t>{3, 20}));
}

TEST(Segmenter, GoesBackToTheLargestSignalAtTheLongestLength) {
    segmenter_options o{.alpha = 50.0};
    std::vector<float> s(65, 1.0F);
    s[5] = 3.0F;  // before l_min: no place for a cut
    s[30] = 2.0F;
    segmenter seg(o);
    seg.push(std::span(s).first(64));
    EXPECT_TRUE(seg.spans().empty());
    seg.push(s[64]);
    ASSERT_EQ(seg.spans().size(), 1U);
    EXPECT_EQ(seg.spans()[0].end, 30);
    EXPECT_EQ(seg.spans()[0].reason, cut_reason::length);
    EXPECT_EQ(seg.open_span().size(), 35);
}

TEST(Segmenter, PropertyEqualsTheQuadraticReference) {
    for (std::uint64_t seed = 1; seed <= 160; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const auto o = random_options(random);
        const auto s = stream(random, static_cast<int>(seed % kinds), random() % 400);
        segmenter seg(o);
        seg.push(s);
        expect_partition(seg);
        std::vector<std::int64_t> anchors, cuts;
        const auto expected = reference_cuts(s, o, &anchors);
        for (const auto& piece : seg.spans()) cuts.push_back(piece.end);
        EXPECT_EQ(cuts, expected);
        EXPECT_EQ(seg.anchors(), anchors);
        if (o.policy == span_policy::dictated) continue;
        const bool fixed = o.policy == span_policy::fixed;
        for (const auto& piece : seg.spans()) {
            EXPECT_GE(piece.size(), fixed ? o.fixed_length : o.l_min);
            EXPECT_LE(piece.size(), fixed ? o.fixed_length : o.l_max);
        }
        EXPECT_LE(seg.open_span().size(), fixed ? o.fixed_length : o.l_max);
    }
}

TEST(Segmenter, PropertyChunksDontMatter) {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const auto o = random_options(random);
        const auto s = stream(random, static_cast<int>(seed % kinds), 500);
        segmenter whole(o), single(o), chunked(o);
        whole.push(s);
        for (const float x : s) single.push(x);
        for (std::size_t at = 0; at < s.size();) {
            const auto n = std::min<std::size_t>(random() % 70, s.size() - at);
            chunked.push(std::span(s).subspan(at, n));
            at += n;
        }
        EXPECT_EQ(whole, single);
        EXPECT_EQ(whole, chunked);
        EXPECT_EQ(whole.bytes(), single.bytes());
    }
}

// A history of pushes and cuts, from which a segmenter can be built that never saw what was truncated.
struct history {
    struct cut {
        std::int64_t at, position;
    };
    std::vector<float> signals;
    std::vector<cut> cuts;

    void truncate(std::int64_t n) {
        signals.resize(static_cast<std::size_t>(n));
        std::erase_if(cuts, [n](const cut& c) { return c.position > n; });
        for (auto& c : cuts) c.at = std::min(c.at, n);
    }
    [[nodiscard]] segmenter replay(const segmenter_options& o) const {
        segmenter fresh(o);
        auto next = cuts.begin();
        for (std::size_t i = 0; i <= signals.size(); ++i) {
            for (; next != cuts.end() && next->at == fresh.length(); ++next) fresh.cut(std::vector<std::int64_t>{next->position});
            if (i < signals.size()) fresh.push(signals[i]);
        }
        return fresh;
    }
};

TEST(Segmenter, PropertyTruncateEqualsFresh) {
    for (std::uint64_t seed = 1; seed <= 80; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        const auto o = random_options(random);
        segmenter seg(o);
        history past;
        for (int step = 0; step < 60; ++step) {
            const auto what = random() % 4;
            if (what < 2) {
                const auto s = stream(random, static_cast<int>(random() % kinds), random() % 60);
                seg.push(s);
                past.signals.insert(past.signals.end(), s.begin(), s.end());
            } else if (what == 2 && seg.open_begin() < seg.length()) {
                const auto room = static_cast<std::uint64_t>(seg.length() - seg.open_begin());
                const auto p = seg.open_begin() + 1 + static_cast<std::int64_t>(random() % room);
                const auto at = seg.length();
                seg.cut(std::vector<std::int64_t>{p});
                past.cuts.push_back({at, p});
            } else if (what == 3) {
                const auto back = std::min<std::int64_t>(static_cast<std::int64_t>(random() % (step % 5 == 0 ? 300 : 12)), seg.length());
                const segmenter fork = seg;
                seg.truncate(seg.length() - back);
                past.truncate(fork.length() - back);
                EXPECT_EQ(fork.length() - back, seg.length());
            }
            expect_partition(seg);
            ASSERT_EQ(seg, past.replay(o)) << "step " << step;
        }
    }
}

TEST(Segmenter, CutsByTheEngine) {
    segmenter seg(segmenter_options{.policy = span_policy::dictated});
    seg.push(std::vector<float>(300, 1.0F));
    EXPECT_TRUE(seg.spans().empty());
    seg.cut(std::vector<std::int64_t>{1, 200, 300});
    ASSERT_EQ(seg.spans().size(), 3U);
    EXPECT_EQ(seg.spans()[1], (sekv::span{1, 200, 199.0F, cut_reason::dictated}));
    EXPECT_EQ(seg.open_begin(), 300);
    EXPECT_EQ(seg.open_span().size(), 0);
    seg.push(std::vector<float>(10, 1.0F));
    const segmenter before = seg;
    for (const auto& bad : {std::vector<std::int64_t>{300}, {311}, {305, 305}, {306, 305}, {-1}, {305, 311}}) {
        EXPECT_THROW(seg.cut(bad), sekv::invalid_argument);
        EXPECT_EQ(seg, before);
    }
    seg.truncate(200);
    ASSERT_EQ(seg.spans().size(), 2U);
    EXPECT_EQ(seg.open_begin(), 200);
}

TEST(Segmenter, RefusesBadInputAndKeepsItsState) {
    segmenter seg;
    seg.push(std::vector<float>(100, 1.0F));
    const segmenter before = seg;
    for (const float bad : {nan_value, inf, -inf, -1e-6F}) {
        EXPECT_THROW(seg.push(bad), sekv::invalid_argument);
        EXPECT_THROW(seg.push(std::vector<float>{1.0F, 50.0F, bad}), sekv::invalid_argument);
    }
    EXPECT_THROW(seg.truncate(101), sekv::invalid_argument);
    EXPECT_THROW(seg.truncate(-1), sekv::invalid_argument);
    EXPECT_THROW((void)seg.signal(100), sekv::invalid_argument);
    EXPECT_THROW((void)seg.span_at(-1), sekv::invalid_argument);
    EXPECT_EQ(seg, before);
    EXPECT_THROW(segmenter(segmenter_options{.alpha = std::nan("")}), sekv::invalid_argument);
    EXPECT_THROW(segmenter(segmenter_options{.l_min = 0}), sekv::invalid_argument);
    EXPECT_THROW(segmenter(segmenter_options{.l_min = 65}), sekv::invalid_argument);
    EXPECT_THROW(segmenter(segmenter_options{.l_min = 1, .l_max = 1 << 21}), sekv::invalid_argument);
    EXPECT_THROW(segmenter(segmenter_options{.fixed_length = 0}), sekv::invalid_argument);
}

TEST(KeyNovelty, IsTheAngleToTheOpenSpansMean) {
    sekv::key_novelty novelty(2, 2);
    EXPECT_EQ(novelty.push(std::vector<float>{1, 0, 0, 2}), 0.0F);
    EXPECT_FLOAT_EQ(novelty.push(std::vector<float>{0, 3, 0, 1}), 0.5F);                                  // 90 degrees, and 0
    EXPECT_NEAR(novelty.push(std::vector<float>{-1, 0, 0, 0}), (1 + 1 / std::sqrt(10.0) + 1) / 2, 1e-6);  // a zero key counts 1
    novelty.cut(2);
    EXPECT_FLOAT_EQ(novelty.push(std::vector<float>{1, 0, 0, 1}), 1.5F);
    const auto before = novelty;
    EXPECT_THROW((void)novelty.push(std::vector<float>{1, 0, nan_value, 1}), sekv::invalid_argument);
    EXPECT_THROW((void)novelty.push(std::vector<float>{1, 0}), sekv::invalid_argument);
    EXPECT_THROW(novelty.cut(1), sekv::invalid_argument);
    EXPECT_THROW(novelty.cut(5), sekv::invalid_argument);
    EXPECT_THROW(novelty.truncate(1), sekv::state_error);
    EXPECT_EQ(novelty, before);
    EXPECT_THROW(sekv::key_novelty(0, 4), sekv::invalid_argument);
}

TEST(KeyNovelty, PropertyFollowsASegmenterThroughRollback) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        std::normal_distribution<float> normal;
        const int heads = 3, d = 8, n = 300;
        std::vector<std::vector<float>> keys(n, std::vector<float>(heads * d));
        for (std::size_t t = 0; t < keys.size(); ++t) {
            for (auto& x : keys[t]) x = normal(random);
            keys[t][(t / 23) % (heads * d)] += 8.0F;  // topics
        }
        const segmenter_options o{.policy = span_policy::key_novelty, .l_min = 4, .l_max = 20};
        segmenter fresh(o), rolled(o);
        sekv::key_novelty fresh_keys(heads, d), rolled_keys(heads, d);
        const auto feed = [&](segmenter& s, sekv::key_novelty& k, std::int64_t t) {
            s.push(k.push(keys[static_cast<std::size_t>(t)]));
            k.cut(s.open_begin());
        };
        for (int t = 0; t < n; ++t) feed(fresh, fresh_keys, t);
        while (rolled.length() < n) {
            feed(rolled, rolled_keys, rolled.length());
            if (random() % 10 != 0) continue;
            rolled.truncate(rolled.length() - std::min<std::int64_t>(static_cast<std::int64_t>(random() % 9), rolled.length()));
            if (rolled.open_begin() >= rolled_keys.begin()) {
                rolled_keys.truncate(rolled.length());
            } else {
                rolled_keys.restart(rolled.open_begin());
                for (auto t = rolled.open_begin(); t < rolled.length(); ++t) (void)rolled_keys.push(keys[static_cast<std::size_t>(t)]);
            }
        }
        EXPECT_EQ(rolled, fresh);
        EXPECT_EQ(rolled_keys, fresh_keys);
        EXPECT_GT(fresh.spans().size(), 10U);
    }
}

}  // namespace
