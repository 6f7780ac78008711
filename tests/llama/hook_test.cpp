// The llama.cpp hook: agreement with llama.cpp alone, chunking, and what a provider throws through its C callback.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "decoder.hpp"
#include "gguf_check.hpp"
#include "host_fixtures.hpp"
#include "sekv/core/error.hpp"
#include "self_test.hpp"
#include "tiny_model.hpp"

namespace sekv::example {
namespace {

double relative_rms(std::span<const float> expected, std::span<const float> found) {
    EXPECT_EQ(expected.size(), found.size());
    double error = 0, size = 0;
    for (std::size_t i = 0; i < std::min(expected.size(), found.size()); ++i) {
        error += std::pow(static_cast<double>(found[i]) - expected[i], 2);
        size += std::pow(static_cast<double>(expected[i]), 2);
    }
    return std::sqrt(error / size);
}

// ---------------------------------------------------------------- small random models

class TinyModel : public testing::Test {
protected:
    std::string write(const tiny_model& m) {
        const auto path = directory_.file("tiny.gguf");
        tiny_model_writer(m).write(path);
        return path;
    }
    scratch_directory directory_;
};

struct named_model {
    const char* name;
    tiny_model model;
};

class TinyModels : public TinyModel, public testing::WithParamInterface<named_model> {};

TEST_P(TinyModels, RunFreelyAsLlamaAlone) {
    const llama_host host(write(GetParam().model), one_thread());
    const auto agreement = self_test(host);
    EXPECT_LE(agreement.attention, agreement_bound);
    EXPECT_LE(measure_free_agreement(host).logits, agreement_bound);
}

TEST_P(TinyModels, AnyChunkingGivesTheSameLogits) {
    const auto path = write(GetParam().model);
    const llama_host whole(path, one_thread());
    const auto tokens = some_tokens(whole, 150);
    native_decoder native(whole, native_cache::f32_exact);
    const auto expected = native.decode(tokens, 0, logits_of::all);
    for (const std::int32_t chunk : {1, 7, 64, 150}) {
        const llama_host host(path, one_thread(0, chunk));
        exact_provider provider(host.shape());
        hosted_decoder hosted(host, provider);
        EXPECT_LE(relative_rms(expected, hosted.decode(tokens, 0, logits_of::all)), agreement_bound) << "chunk " << chunk;
        EXPECT_EQ(provider.size(), 150);
    }
}

tiny_model of(const char* architecture, std::int32_t layers = 3, std::int32_t window = 0, float soft_cap = 0) {
    tiny_model m;
    m.architecture = architecture;
    m.layers = layers;
    m.window = window;
    m.soft_cap = soft_cap;
    return m;
}

tiny_model fused() {
    auto m = of("llama");
    m.fused_qkv = true;
    return m;
}

INSTANTIATE_TEST_SUITE_P(Architectures, TinyModels,
                         testing::Values(named_model{"llama", of("llama")}, named_model{"fused", fused()}, named_model{"qwen3", of("qwen3")},
                                         named_model{"gemma2", of("gemma2", 4, 24, 3.0F)}, named_model{"gemma3", of("gemma3", 6, 24)}),
                         [](const auto& info) { return info.param.name; });

TEST_F(TinyModel, ShapeComesFromTheGraph) {
    const llama_host host(write(of("gemma3", 7, 24)), one_thread());
    const auto& layers = host.shape().layers;
    ASSERT_EQ(layers.size(), 7U);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        EXPECT_EQ(layers[i].kv_heads, 2);
        EXPECT_EQ(layers[i].group, 2);
        EXPECT_EQ(layers[i].key_size, 64);
        EXPECT_EQ(layers[i].value_size, 64);
        EXPECT_EQ(layers[i].sliding_window, i == 5 ? 0 : 24) << "gemma3 sees all tokens in every sixth layer";
        EXPECT_EQ(layers[i].rope.inverse_frequency.size(), 32U);
    }
    const llama_host capped(write(of("gemma2", 2, 24, 3.0F)), one_thread());
    EXPECT_EQ(capped.shape().layers[0].soft_cap, 3.0F);
    EXPECT_EQ(capped.shape().layers[0].sliding_window, 24);
    EXPECT_EQ(capped.shape().layers[1].sliding_window, 0);
    EXPECT_NE(capped.shape().fingerprint, host.shape().fingerprint);
}

TEST_F(TinyModel, AgreesOnTwoThreads) {
    const llama_host host(write(fused()), {.threads = 2});
    EXPECT_LE(self_test(host).attention, agreement_bound);
}

TEST_F(TinyModel, LogitsOfNoneLastAndAll) {
    const llama_host host(write({}), one_thread(0, 50));
    const auto tokens = some_tokens(host, 70);
    exact_provider provider(host.shape());
    hosted_decoder hosted(host, provider);
    native_decoder native(host, native_cache::f32_exact);
    const auto width = static_cast<std::size_t>(host.vocabulary());
    const auto all = hosted.decode(tokens, 0, logits_of::all);
    ASSERT_EQ(all.size(), tokens.size() * width);
    EXPECT_LE(relative_rms(std::span(all).last(width), hosted.decode(tokens, 0, logits_of::last)), agreement_bound);
    EXPECT_TRUE(hosted.decode(tokens, 0, logits_of::none).empty());
    EXPECT_TRUE(native.decode(tokens, 0, logits_of::none).empty());
    EXPECT_EQ(native.size(), 70);
}

TEST_F(TinyModel, NativeCacheRewinds) {
    for (const auto& m : {of("llama"), of("gemma3", 6, 24)}) {
        const llama_host host(write(m), one_thread());
        const auto tokens = some_tokens(host, 90);
        const auto document = std::span(tokens).first(80), question = std::span(tokens).last(10);
        for (const auto cache : {native_cache::f32_exact, native_cache::f16_flash}) {
            native_decoder native(host, cache);
            native.decode(document, 0, logits_of::none);
            const auto first = native.decode(question, 80, logits_of::all);
            native.truncate(80);
            EXPECT_EQ(native.decode(question, 80, logits_of::all), first);
            EXPECT_THROW(native.truncate(91), invalid_argument);
            EXPECT_THROW(native.decode(question, 80, logits_of::all), invalid_argument);
        }
    }
}

TEST_F(TinyModel, RefusesBadTokensAndPositions) {
    const llama_host host(write({}), one_thread(100, 64));
    exact_provider provider(host.shape());
    hosted_decoder hosted(host, provider);
    native_decoder native(host, native_cache::f32_exact);
    const auto tokens = some_tokens(host, 101);
    const std::vector<token> foreign{3, host.vocabulary()};
    EXPECT_HAS(message_of<invalid_argument>([&] { hosted.decode({}, 0, logits_of::last); }), "no tokens");
    EXPECT_HAS(message_of<invalid_argument>([&] { native.decode({}, 0, logits_of::last); }), "no tokens");
    EXPECT_HAS(message_of<invalid_argument>([&] { hosted.decode(tokens, 0, logits_of::last); }), "context of 100");
    EXPECT_HAS(message_of<invalid_argument>([&] { native.decode(tokens, 0, logits_of::last); }), "context of 100");
    EXPECT_HAS(message_of<invalid_argument>([&] { hosted.decode(foreign, 0, logits_of::last); }), "320");
    EXPECT_THROW(hosted.decode(std::span(tokens).first(5), 7, logits_of::last), state_error);
    EXPECT_EQ(provider.size(), 0);
    EXPECT_EQ(native.size(), 0);
    EXPECT_EQ(hosted.decode(std::span(tokens).first(100), 0, logits_of::last).size(), 320U);
}

TEST_F(TinyModel, RefusesOptionsOutOfRange) {
    const auto path = write({});
    EXPECT_HAS(message_of<invalid_argument>([&] { llama_host(path, one_thread(5000)); }), "4096");
    EXPECT_THROW(llama_host(path, {.threads = 0}), invalid_argument);
    EXPECT_THROW(llama_host(path, one_thread(0, 0)), invalid_argument);
    auto odd = of("llama");
    odd.head_size = 32;
    EXPECT_HAS(message_of<unsupported>([&] { llama_host(write(odd), one_thread()); }), "key_size");
}

// ---------------------------------------------------------------- what a provider throws

/// Throws in one chosen call of one batch.
class failing_provider final : public attention_provider {
public:
    enum class stage : std::uint8_t { none, begin, append, attend, end };

    explicit failing_provider(const model_shape& shape) : exact_(shape) {}
    void fail_in(stage s) { fail_ = s; }
    [[nodiscard]] int cancelled() const { return cancelled_; }
    [[nodiscard]] std::int64_t size() const { return exact_.size(); }

    void begin(std::int64_t first_position, std::int64_t tokens) override {
        check(stage::begin, 1);
        exact_.begin(first_position, tokens);
    }
    void append(std::int32_t layer, const float* k, const float* v) override {
        check(stage::append, layer);
        exact_.append(layer, k, v);
    }
    void attend(std::int32_t layer, const float* q, float* out) override {
        check(stage::attend, layer);
        exact_.attend(layer, q, out);
    }
    void end() override {
        check(stage::end, 1);
        exact_.end();
    }
    void cancel() noexcept override {
        ++cancelled_;
        exact_.cancel();
    }

private:
    void check(stage s, std::int32_t layer) {
        if (s == fail_ && layer == 1) throw budget_error("The provider is full.", 2, 1);
    }
    exact_provider exact_;
    stage fail_ = stage::none;
    int cancelled_ = 0;
};

TEST_F(TinyModel, ProviderErrorsComeThroughAndALaterDecodeWorks) {
    using stage = failing_provider::stage;
    const llama_host host(write({}), one_thread());
    const auto tokens = some_tokens(host, 40);
    const auto head = std::span(tokens).first(30), tail = std::span(tokens).last(10);
    failing_provider provider(host.shape());
    hosted_decoder hosted(host, provider);
    hosted.decode(head, 0, logits_of::none);
    const auto expected = hosted.decode(tail, 30, logits_of::all);
    int cancelled = 0;
    for (const auto s : {stage::append, stage::attend, stage::end, stage::begin}) {
        hosted.decode(head, 0, logits_of::none);
        provider.fail_in(s);
        EXPECT_HAS(message_of<budget_error>([&] { hosted.decode(tail, 30, logits_of::all); }), "The provider is full.");
        cancelled += s == stage::begin ? 0 : 1;
        EXPECT_EQ(provider.cancelled(), cancelled);
        EXPECT_EQ(provider.size(), 30);
        provider.fail_in(stage::none);
        EXPECT_EQ(hosted.decode(tail, 30, logits_of::all), expected);
    }
}

// ---------------------------------------------------------------- the real model

TEST_F(RealModel, HookAgreesInEveryLayer) {
    const llama_host host(path_, one_thread(1024));
    const auto agreement = self_test(host);
    EXPECT_LE(agreement.attention, agreement_bound);
    EXPECT_LE(agreement.logits, agreement_bound);
    EXPECT_GE(agreement.tokens, 48);
}

// llama.cpp rounds activations to 8 bits in front of quantised weights, so only fp32 weights show agreement end to end.
TEST_F(RealModel, WithFp32WeightsTheLogitsAgreeEndToEnd) {
    auto options = one_thread(1024);
    options.fp32_weights = true;
    const llama_host host(path_, options);
    EXPECT_EQ(host.shape().fingerprint, check_gguf(path_).fingerprint);
    EXPECT_LE(measure_free_agreement(host).logits, agreement_bound);
}

TEST_F(RealModel, TextGoesThroughTheTokeniserAndBack) {
    const llama_host host(path_, one_thread(1024));
    const std::string text = "Grüße from the lighthouse: 42 lamps, 7 ships.";
    EXPECT_EQ(host.detokenise(host.tokenise(text, false, false)), text);
    ASSERT_TRUE(host.has_chat_template());
    const std::vector<chat_message> messages{{"user", "Who kept the lamp?"}};
    const auto prompt = host.chat_prompt(messages, true);
    EXPECT_HAS(prompt, "Who kept the lamp?");
    EXPECT_GT(prompt.size(), messages[0].content.size());
    const auto tokens = host.tokenise(prompt, true, true);
    EXPECT_LT(tokens.size(), 64U);
    EXPECT_TRUE(std::any_of(tokens.begin(), tokens.end(), [&](token t) { return host.ends(t); })) << "the user's turn ends with a token that would end a reply";
}

}  // namespace
}  // namespace sekv::example
