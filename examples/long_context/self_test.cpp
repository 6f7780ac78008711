#include "self_test.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>

#include "decoder.hpp"
#include "sekv/core/error.hpp"

namespace sekv::example {
namespace {

constexpr std::string_view passage =
    "The lighthouse at the northern point was built in 1871 from grey granite that came by barge. Its keeper wrote the weather of every day into a book, "
    "and on the night of the great storm he wrote only three words, because the lamp needed both of his hands.";

class difference {
public:
    void add(std::span<const float> expected, std::span<const float> found) {
        if (expected.size() != found.size()) throw unsupported("The hook's output has another size than llama.cpp's, so this model can't be hosted.");
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const double d = static_cast<double>(found[i]) - expected[i];
            error_ += d * d;
            size_ += static_cast<double>(expected[i]) * expected[i];
        }
    }
    [[nodiscard]] double relative_rms() const { return std::sqrt(error_ / size_); }

private:
    double error_ = 0, size_ = 0;
};

/// Keeps the attention outputs of a run of llama.cpp alone, in the order in which they are computed.
class attention_recorder {
public:
    [[nodiscard]] graph_observer observer() noexcept { return {callback, this}; }
    [[nodiscard]] const std::vector<std::vector<float>>& outputs() const {
        if (error_) std::rethrow_exception(error_);
        return outputs_;
    }

private:
    static bool callback(ggml_tensor* t, bool ask, void* self) noexcept {
        if (ask) return std::string_view(t->name).starts_with("kqv_out-");
        auto& recorder = *static_cast<attention_recorder*>(self);
        try {
            std::vector<float> rows(static_cast<std::size_t>(ggml_nelements(t)));
            ggml_backend_tensor_get(t, rows.data(), 0, rows.size() * sizeof(float));
            recorder.outputs_.push_back(std::move(rows));
            return true;
        } catch (...) {
            recorder.error_ = std::current_exception();
            return false;
        }
    }

    std::vector<std::vector<float>> outputs_;
    std::exception_ptr error_;
};

/// Compares exact attention with the recorded one, and answers with the recorded one.
class replaying_provider final : public attention_provider {
public:
    replaying_provider(const model_shape& shape, const std::vector<std::vector<float>>& recorded)
        : shape_(shape), exact_(shape), recorded_(recorded), layers_(shape.layers.size()) {}

    void begin(std::int64_t first_position, std::int64_t tokens) override {
        tokens_ = tokens;
        exact_.begin(first_position, tokens);
    }
    void append(std::int32_t layer, const float* k, const float* v) override { exact_.append(layer, k, v); }
    void attend(std::int32_t layer, const float* q, float* out) override {
        const auto at = static_cast<std::size_t>(layer);
        const auto& l = shape_.layers[at];
        const std::span<float> rows(out, static_cast<std::size_t>(tokens_ * l.query_heads() * l.value_size));
        if (next_ >= recorded_.size()) throw unsupported("llama.cpp alone attends in fewer layers than through the hook, so this model can't be hosted.");
        const auto& expected = recorded_[next_++];
        exact_.attend(layer, q, out);
        layers_[at].add(expected, rows);
        std::memcpy(out, expected.data(), rows.size_bytes());
    }
    void end() override { exact_.end(); }
    void cancel() noexcept override { exact_.cancel(); }

    [[nodiscard]] double worst() const {
        double worst = 0;
        for (const auto& l : layers_)
            if (!(l.relative_rms() <= worst)) worst = l.relative_rms();
        return worst;
    }

private:
    const model_shape& shape_;
    exact_provider exact_;
    const std::vector<std::vector<float>>& recorded_;
    std::vector<difference> layers_;
    std::size_t next_ = 0;
    std::int64_t tokens_ = 0;
};

std::vector<token> passage_tokens(const llama_host& host) {
    std::vector<token> tokens;
    if (host.has_tokeniser()) {
        tokens = host.tokenise(passage, true, false);
    } else {
        for (std::int32_t i = 0; i < 52; ++i) tokens.push_back(i * 7919 % host.vocabulary());
    }
    tokens.resize(std::min<std::size_t>({tokens.size(), 52, static_cast<std::size_t>(host.options().context)}));
    return tokens;
}

/// Logits of all tokens: two chunks, then the last four one by one.
template <class Decoder>
std::vector<float> run(Decoder& decoder, std::span<const token> tokens) {
    std::vector<float> logits;
    std::int64_t position = 0;
    const auto feed = [&](std::size_t count) {
        if (count == 0) return;
        const auto rows = decoder.decode(tokens.first(count), position, logits_of::all);
        logits.insert(logits.end(), rows.begin(), rows.end());
        tokens = tokens.subspan(count);
        position += static_cast<std::int64_t>(count);
    };
    const auto singles = std::min<std::size_t>(4, tokens.size());
    const auto prompt = tokens.size() - singles;
    feed(prompt * 2 / 3);
    feed(prompt - prompt * 2 / 3);
    for (std::size_t i = 0; i < singles; ++i) feed(1);
    return logits;
}

hook_agreement compare(const llama_host& host, attention_provider& provider, std::span<const token> tokens, std::span<const float> expected) {
    hosted_decoder hosted(host, provider);
    difference logits;
    logits.add(expected, run(hosted, tokens));
    return {0, logits.relative_rms(), static_cast<std::int64_t>(tokens.size())};
}

}  // namespace

hook_agreement measure_agreement(const llama_host& host) {
    const auto tokens = passage_tokens(host);
    attention_recorder recorder;
    native_decoder native(host, native_cache::f32_exact, recorder.observer());
    const auto expected = run(native, tokens);
    replaying_provider provider(host.shape(), recorder.outputs());
    auto agreement = compare(host, provider, tokens, expected);
    agreement.attention = provider.worst();
    return agreement;
}

hook_agreement measure_free_agreement(const llama_host& host) {
    const auto tokens = passage_tokens(host);
    native_decoder native(host, native_cache::f32_exact);
    exact_provider provider(host.shape());
    return compare(host, provider, tokens, run(native, tokens));
}

hook_agreement self_test(const llama_host& host) {
    const auto agreement = measure_agreement(host);
    if (agreement.attention <= agreement_bound && agreement.logits <= agreement_bound) return agreement;
    std::array<char, 96> figures{};
    std::snprintf(figures.data(), figures.size(), "attention differs by %.1e and logits by %.1e relative rms", agreement.attention, agreement.logits);
    throw unsupported("The hook doesn't agree with llama.cpp on this model (architecture '" + host.architecture() + "'): " + figures.data() +
                      " instead of at most 1e-5. Its attention must do something that the hook doesn't replace; use another model.");
}

}  // namespace sekv::example
