// sekv's cache behind llama.cpp: equal to llama.cpp's own while everything is exact, and as it was after a batch that failed.
#include "cache_provider.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "decoder.hpp"
#include "host_fixtures.hpp"
#include "sekv/sekv.hpp"
#include "self_test.hpp"
#include "tiny_model.hpp"

namespace sekv::example {
namespace {

using exact_cache = basic_cache<float, host_backend, progressive_codec>;

double relative_rms(std::span<const float> expected, std::span<const float> found) {
    EXPECT_EQ(expected.size(), found.size());
    double error = 0, size = 0;
    for (std::size_t i = 0; i < std::min(expected.size(), found.size()); ++i) {
        error += std::pow(static_cast<double>(found[i]) - static_cast<double>(expected[i]), 2);
        size += std::pow(static_cast<double>(expected[i]), 2);
    }
    return std::sqrt(error / size);
}

/// One open sequence of a cache, run by llama.cpp.
template <class Cache>
struct hosted_cache {
    hosted_cache(const llama_host& host, const cache_options& options, std::int64_t capacity = 4096, const typename Cache::codec_options& codec = {})
        : cache(host.shape(), options, codec), seq(cache.open({.capacity = capacity})), provider(cache, seq), decoder(host, provider) {}

    std::vector<float> read(std::span<const token> tokens, resolution how, logits_of rows = logits_of::all) {
        provider.read_at(how);
        return decoder.decode(tokens, cache.length(seq), rows);
    }

    Cache cache;
    sequence seq;
    cache_provider<Cache> provider;
    hosted_decoder decoder;
};

/// A prompt in two chunks, then single tokens, against llama.cpp's own fp32 cache.
void expect_as_llama_alone(const llama_host& host) {
    const auto tokens = some_tokens(host, 150);
    native_decoder native(host, native_cache::f32_exact);
    const auto expected = native.decode(tokens, 0, logits_of::all);
    hosted_cache<exact_cache> ours(host, {});
    auto found = ours.read(std::span(tokens).first(90), resolution::full);
    ours.provider.release();
    const auto more = ours.read(std::span(tokens).subspan(90, 56), resolution::full);
    found.insert(found.end(), more.begin(), more.end());
    ours.provider.release();
    ours.cache.end_prefill(ours.seq);
    for (std::size_t i = 146; i < 150; ++i) {
        const auto row = ours.read(std::span(tokens).subspan(i, 1), resolution::adaptive);
        found.insert(found.end(), row.begin(), row.end());
    }
    EXPECT_LE(relative_rms(expected, found), agreement_bound);
    EXPECT_EQ(ours.cache.length(ours.seq), 150);
    EXPECT_EQ(ours.cache.sealed(ours.seq), 0);
}

class CacheProvider : public testing::Test {
protected:
    std::string write(const tiny_model& m) {
        const auto path = directory_.file("tiny.gguf");
        tiny_model_writer(m).write(path);
        return path;
    }
    scratch_directory directory_;
};

TEST_F(CacheProvider, ExactRowsGiveLlamasLogits) { expect_as_llama_alone(llama_host(write({}), one_thread())); }

TEST_F(CacheProvider, SlidingWindowAndSoftCapGiveLlamasLogits) {
    tiny_model m;
    m.architecture = "gemma2";
    m.layers = 4;
    m.window = 32;
    m.soft_cap = 20;
    expect_as_llama_alone(llama_host(write(m), one_thread()));
}

TEST_F(RealModel, CacheProviderGivesLlamasLogits) {
    auto options = one_thread(512);
    options.fp32_weights = true;  // else llama.cpp's 8-bit activations amplify the last bit
    expect_as_llama_alone(llama_host(path_, options));
}

TEST_F(CacheProvider, RowsInSixteenBitsComeClose) {
    const llama_host host(write({}), one_thread());
    const auto tokens = some_tokens(host, 150);
    native_decoder native(host, native_cache::f32_exact);
    const auto expected = native.decode(tokens, 0, logits_of::all);
    EXPECT_LE(relative_rms(expected, hosted_cache<basic_cache<fp16, host_backend, progressive_codec>>(host, {}).read(tokens, resolution::full)), 2e-3);
    EXPECT_LE(relative_rms(expected, hosted_cache<cache>(host, {}).read(tokens, resolution::full)), 2e-2);
}

TEST_F(CacheProvider, SealedTokensAreReadInBothWaysAndTruncatedAgain) {
    const llama_host host(write({}), one_thread());
    const auto tokens = some_tokens(host, 1536);
    const auto budget = host.shape().full_cache_bytes(2048) * 3 / 5;
    cache_options options;
    options.device_budget = budget;
    progressive_options codec;
    codec.line_slots = 32;
    codec.epoch_tokens = 1024;
    hosted_cache<cache> ours(host, options, 2048, codec);
    (void)ours.read(tokens, resolution::full, logits_of::none);
    ours.provider.release();
    ours.cache.end_prefill(ours.seq);
    EXPECT_GT(ours.cache.sealed(ours.seq), 0);
    const auto next = some_tokens(host, 8);
    const auto first = ours.read(next, resolution::full, logits_of::last);
    for (const auto t : next) (void)ours.read({&t, 1}, resolution::adaptive, logits_of::last);
    EXPECT_GT(ours.cache.zooms().zooms, 0U);
    EXPECT_LE(ours.cache.peak(tier::device), budget);
    ours.cache.truncate(ours.seq, 1536);
    EXPECT_EQ(ours.read(next, resolution::full, logits_of::last), first) << "the same tokens behind the same sealed history";
}

TEST_F(CacheProvider, BudgetErrorComesThroughAndLeavesTheSequence) {
    const llama_host host(write({}), one_thread(0, 64));
    cache_options options;
    options.device_budget = host.shape().full_cache_bytes(512);
    options.host_budget = host.shape().full_cache_bytes(128);
    progressive_options codec;
    codec.line_slots = 0;
    hosted_cache<cache> ours(host, options, 4096, codec);
    const auto tokens = some_tokens(host, 2048);
    EXPECT_THROW((void)ours.read(tokens, resolution::full, logits_of::none), budget_error);
    const auto held = ours.cache.length(ours.seq);
    EXPECT_GT(held, 0);
    EXPECT_EQ(held % 64, 0) << "the chunks before the failing one stay";
    EXPECT_LE(ours.cache.peak(tier::device), options.device_budget);
    ours.cache.truncate(ours.seq, 64);
    EXPECT_EQ(ours.read(std::span(tokens).first(8), resolution::full).size(), static_cast<std::size_t>(8 * host.vocabulary()));
}

TEST_F(CacheProvider, CancelTakesBackWhatSomeLayersHave) {
    const llama_host host(write({}), one_thread());
    hosted_cache<exact_cache> ours(host, {});
    const auto tokens = some_tokens(host, 20);
    const auto expected = ours.read(tokens, resolution::full);
    ours.cache.truncate(ours.seq, 10);

    const auto& l = host.shape().layers.front();
    const std::vector<float> rows(static_cast<std::size_t>(3 * l.kv_heads * l.key_size), 1.0F);
    const std::vector<float> bad(static_cast<std::size_t>(3 * l.query_heads() * l.key_size), std::numeric_limits<float>::quiet_NaN());
    std::vector<float> out(bad.size());
    ours.provider.begin(10, 3);
    ours.provider.append(0, rows.data(), rows.data());
    EXPECT_THROW(ours.provider.attend(0, bad.data(), out.data()), invalid_argument);
    ours.provider.cancel();
    EXPECT_EQ(ours.cache.length(ours.seq), 10);
    const auto again = ours.read(std::span(tokens).subspan(10), resolution::full);
    EXPECT_LE(relative_rms(std::span(expected).last(again.size()), again), agreement_bound);
}

TEST_F(CacheProvider, PositionsOutOfOrderAreRefused) {
    const llama_host host(write({}), one_thread());
    hosted_cache<exact_cache> ours(host, {});
    const auto tokens = some_tokens(host, 4);
    (void)ours.read(tokens, resolution::full);
    EXPECT_HAS(message_of<invalid_argument>([&] { (void)ours.decoder.decode(tokens, 9, logits_of::none); }), "4, not 9");
    EXPECT_EQ(ours.cache.length(ours.seq), 4);
}

TEST_F(CacheProvider, QueriesEnterACalibration) {
    const llama_host host(write({}), one_thread());
    calibration_collector collector(host.shape());
    hosted_cache<exact_cache> ours(host, {});
    ours.provider.collect_queries(&collector);
    (void)ours.read(some_tokens(host, 30), resolution::full, logits_of::none);
    const auto found = collector.finish();
    EXPECT_EQ(found.fingerprint, host.shape().fingerprint);
    ASSERT_EQ(found.layers.size(), host.shape().layers.size());
    for (const auto& l : found.layers) EXPECT_EQ(l.counts, std::vector<double>(static_cast<std::size_t>(l.kv_heads), 30.0 * host.shape().layers.front().group));
}

}  // namespace
}  // namespace sekv::example
