// Sequences under the paper preset: sealing, forks, truncation, token-level rows and bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "unit/paper_world.hpp"

namespace {

using namespace sekv;
using namespace sekv::paper_test;

TEST(PaperSequence, ManySmallSealsWhileDecoding) {
    for (const float tau : {nothing, 0.93F, everything}) {
        world w({.window_rows = 768}, codec_of(tau), 5, 0.2);
        w.fill(200);
        w.decode(200, 690);
        ASSERT_GE(w.borders.size(), 5U);
        w.cache.reserve(w.seq, 1);
        int sure = 0;
        for (int i = 0; i < 6; ++i) sure += w.agrees(i % 2 == 0 ? 0 : 2, w.spans(), 690, tau == nothing ? coarse_tolerance : zoomed_tolerance) ? 1 : 0;
        EXPECT_GE(sure, 2);
        EXPECT_LE(w.cache.used(w.seq).total(tier::device), 2 * w.model.full_bytes_per_token() * all_tokens);
    }
}

TEST(PaperSequence, AQueryInsideASpanReadsItTokenByToken) {
    world w({3, 64}, codec_of(nothing));
    w.fill(650);
    const auto spans = w.spans();
    const auto border = w.cache.sealed(w.seq);
    for (const auto position : {std::int64_t{1}, std::int64_t{5}, std::int64_t{77}, border / 2, border - 1})
        EXPECT_TRUE(w.agrees(2, spans, position + 1, zoomed_tolerance, position)) << position;
}

TEST(PaperSequence, TruncationCutsASpanAndLeavesNothingOfTheRest) {
    world w({.sliding_window = 700, .window_rows = 768}, codec_of(nothing), 3);
    w.fill(650);
    const auto spans = w.spans();
    const auto parent = w.seq;
    const auto before = w.attend(0);
    const auto& cut_span = *std::find_if(spans.own.begin(), spans.own.end(), [](const auto& own) { return own.front() > 200 && own.size() > 5; });
    const auto length = cut_span[cut_span.size() / 2] + 1;
    const auto shared = w.cache.used().at(tier::host, kind::lines);
    w.seq = w.cache.fork(parent, length);
    EXPECT_EQ(w.cache.used().at(tier::host, kind::lines), shared);
    EXPECT_EQ(w.cache.sealed(w.seq), length);
    EXPECT_LE(w.cache.units(w.seq).size(), w.cache.units(parent).size());
    EXPECT_TRUE(w.agrees(0, spans, length, zoomed_tolerance));
    EXPECT_TRUE(w.agrees(2, spans, length, zoomed_tolerance));
    // Shorter and shorter, through sinks, down to nothing.
    for (const auto cut : {length / 2, std::int64_t{70}, std::int64_t{9}, std::int64_t{3}, std::int64_t{1}}) {
        w.cache.truncate(w.seq, cut);
        EXPECT_TRUE(w.agrees(0, spans, cut, zoomed_tolerance)) << cut;
    }
    w.cache.truncate(w.seq, 0);
    EXPECT_EQ(w.cache.used(w.seq).total(tier::device), 0U);
    w.cache.close(w.seq);
    w.seq = parent;
    EXPECT_EQ(w.attend(0).out.size(), before.out.size());
    EXPECT_TRUE(w.agrees(0, spans, 650, coarse_tolerance));
}

TEST(PaperSequence, GrowsAgainAfterATruncation) {
    for (const std::int64_t cut : {2, 4, 41, 150}) {
        world w({3, 64, 0, 0, 4, 0}, codec_of(nothing), 7, 0.75);  // sliding-window layers would miss rows after so deep a cut
        w.fill(600);
        const auto spans = w.spans();
        w.cache.truncate(w.seq, cut);
        w.cache.begin_prefill(w.seq);
        w.append(cut, 640);
        w.cache.end_prefill(w.seq);
        ASSERT_GT(w.cache.sealed(w.seq), cut);
        // What the cut left: whole spans as they were, everything else token by token; then what was sealed after it.
        auto all = oracle::split_spans(w.cache.spans(w.seq), {cut, w.cache.sealed(w.seq)}, std::min<std::int64_t>(cut, 4));
        all.sinks.clear();
        for (std::int64_t t = 0; t < cut; ++t) all.exact.push_back(t);
        for (const auto& own : spans.own) {
            if (own.back() >= cut) continue;
            all.own.push_back(own);
            for (const auto t : own) std::erase(all.exact, t);
        }
        EXPECT_TRUE(w.agrees(0, all, 640, zoomed_tolerance)) << "cut at " << cut;
    }
}

TEST(PaperSequence, MaterialisesAnchorsExactlyAndSpansToHalfPrecision) {
    world w({3, 64}, codec_of(0));
    w.fill(650);
    const auto spans = w.spans();
    for (const std::int32_t layer : {0, 2}) {
        const auto& l = w.model.layers[static_cast<std::size_t>(layer)];
        std::vector<float> k(static_cast<std::size_t>(650 * l.kv_heads * l.key_size)), v(static_cast<std::size_t>(650 * l.kv_heads * l.value_size));
        w.cache.materialize(w.seq, layer, 0, 650, out_rows(k.data(), 650, l.kv_heads, l.key_size), out_rows(v.data(), 650, l.kv_heads, l.value_size));
        for (std::size_t i = 0; i < k.size(); ++i) ASSERT_NEAR(k[i], w.keys[static_cast<std::size_t>(layer)][i], 2e-2F) << i;
        for (std::size_t i = 0; i < v.size(); ++i) ASSERT_NEAR(v[i], w.values[static_cast<std::size_t>(layer)][i], 2e-2F) << i;
        const auto row = static_cast<std::size_t>(l.kv_heads * l.key_size);
        for (const auto t : spans.exact)
            EXPECT_TRUE(std::equal(k.begin() + t * static_cast<std::int64_t>(row), k.begin() + (t + 1) * static_cast<std::int64_t>(row),
                                   w.keys[static_cast<std::size_t>(layer)].begin() + t * static_cast<std::int64_t>(row)));
        // Any part is the same rows.
        std::vector<float> part(static_cast<std::size_t>(101 * l.kv_heads * l.key_size)), rest(static_cast<std::size_t>(101 * l.kv_heads * l.value_size));
        w.cache.materialize(w.seq, layer, 33, 101, out_rows(part.data(), 101, l.kv_heads, l.key_size), out_rows(rest.data(), 101, l.kv_heads, l.value_size));
        for (std::size_t i = 0; i < part.size(); ++i) ASSERT_NEAR(part[i], k[33 * row + i], 1e-5F);
    }
}

TEST(PaperSequence, ALaterPromptReadsSealedSpansWhole) {
    world w({3, 64}, codec_of(nothing));
    w.fill(600);
    w.cache.begin_prefill(w.seq);
    w.append(600, 640);
    const auto& l = w.model.layers[0];
    const auto a = w.attend(0, -1, resolution::full, 40);
    for (std::int64_t t = 0; t < 40; ++t) {
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
            const auto first = static_cast<std::size_t>(t * l.query_heads() + h * l.group);
            const auto e = w.expect(0, h, {}, a.queries.data() + first * static_cast<std::size_t>(l.key_size), 601 + t);
            for (std::size_t j = 0; j < e.out.size(); ++j) EXPECT_NEAR(a.out[first * static_cast<std::size_t>(l.value_size) + j], e.out[j], zoomed_tolerance);
        }
    }
}

TEST(PaperSequence, CountsEveryByteAndPredictsThem) {
    world w({.sliding_window = 700, .window_rows = 768}, codec_of(0));
    w.append(0, 650);
    const auto prompt = w.cache.used(w.seq).at(tier::device, kind::exact) + w.cache.used(w.seq).at(tier::host, kind::exact);
    w.cache.end_prefill(w.seq);
    const auto used = w.cache.used(w.seq);
    EXPECT_LT(used.total(tier::device), prompt);
    auto ledger = w.cache.used();
    EXPECT_EQ(used, ledger);
    std::uint64_t device = 0, host = 0;
    for (const auto& u : w.cache.units(w.seq)) {
        device += u.payload.exact->size() + u.payload.summaries->size();
        host += u.payload.factors->size();
    }
    const auto predicted = w.cache.coder().seal_bytes({}, {}, {0, w.cache.sealed(w.seq)}, 1, w.cache.spans(w.seq));
    EXPECT_EQ(predicted.device, device);
    EXPECT_EQ(predicted.host, host);
    EXPECT_EQ(used.at(tier::host, kind::lines), host);
    const auto child = w.cache.fork(w.seq, 300);
    EXPECT_EQ(w.cache.used().total(tier::device), used.total(tier::device));
    w.cache.close(w.seq);
    w.cache.close(child);
    EXPECT_EQ(w.cache.used().total(tier::device) + w.cache.used().total(tier::host), 0U);
}

TEST(PaperSequence, AQuotaThatCannotHoldTheWindowChangesNothing) {
    world w({.window_rows = 768}, codec_of(nothing), 1, 0.02);
    w.append(0, 650);
    const auto before = w.cache.used();
    EXPECT_THROW(w.cache.end_prefill(w.seq), budget_error);
    EXPECT_EQ(w.cache.used(), before);
    EXPECT_EQ(w.cache.sealed(w.seq), 0);
    EXPECT_TRUE(w.agrees(0, {}, 650, coarse_tolerance));
}

TEST(PaperSequence, KeepsAnchorsAsStoredInHalfPrecisionToo) {
    const auto model = model_of({3, 64});
    paper_cache cache(model, paper_cache_options(), {}, host_backend());
    world w({3, 64}, codec_of(0));
    const auto seq = cache.open({model.full_bytes_per_token() * 450 + model.windowed_bytes_per_token() * 768, 4096});
    for (std::size_t i = 0; i < model.layers.size(); ++i)
        cache.append(seq, static_cast<std::int32_t>(i), rows(w.keys[i].data(), 650, 2, model.layers[i].key_size),
                     rows(w.values[i].data(), 650, 2, model.layers[i].value_size));
    cache.observe(seq, {w.signals.data(), 650});
    cache.end_prefill(seq);
    ASSERT_GT(cache.sealed(seq), 100);
    const auto spans = oracle::split_spans(cache.spans(seq), {0, cache.sealed(seq)}, 4);
    std::vector<float> k(650 * 2 * 64), v(650 * 2 * 64);
    cache.materialize(seq, 0, 0, 650, out_rows(k.data(), 650, 2, 64), out_rows(v.data(), 650, 2, 64));
    for (const auto t : spans.exact) {
        for (std::size_t j = 0; j < 128; ++j)
            EXPECT_EQ(k[static_cast<std::size_t>(t) * 128 + j], static_cast<float>(bf16(w.keys[0][static_cast<std::size_t>(t) * 128 + j])));
    }
}

}  // namespace
