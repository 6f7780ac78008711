// Writes GGUF files of small random models, and of models that must be refused.
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace sekv::example {

struct tiny_model {
    std::string architecture = "llama";
    std::int32_t layers = 3, heads = 4, kv_heads = 2, head_size = 64, vocabulary = 320, feed_forward = 96;
    std::int32_t window = 0;  ///< gemma2 and gemma3
    bool fused_qkv = false;
    float soft_cap = 0;  ///< gemma2

    [[nodiscard]] std::int32_t width() const { return heads * head_size; }
};

class tiny_model_writer {
public:
    explicit tiny_model_writer(const tiny_model& m)
        : m_(m), context_(ggml_init({std::size_t{64} << 20, nullptr, false}), ggml_free), file_(gguf_init_empty(), gguf_free) {}

    void write(const std::string& path) {
        add_metadata();
        add("token_embd.weight", {m_.width(), m_.vocabulary}, 1, 0);
        add("output_norm.weight", {m_.width()}, 0.1F, 1);
        if (!gemma()) add("output.weight", {m_.width(), m_.vocabulary}, input_scale(), 0);
        for (std::int32_t i = 0; i < m_.layers; ++i) add_layer("blk." + std::to_string(i) + ".");
        gguf_write_to_file(file_.get(), path.c_str(), false);
    }

private:
    [[nodiscard]] bool gemma() const { return m_.architecture.starts_with("gemma"); }
    [[nodiscard]] float input_scale() const { return 1.0F / std::sqrt(static_cast<float>(m_.width())); }

    void set(const std::string& key, std::int32_t value) {
        gguf_set_val_u32(file_.get(), (m_.architecture + "." + key).c_str(), static_cast<std::uint32_t>(value));
    }
    void set(const std::string& key, float value) { gguf_set_val_f32(file_.get(), (m_.architecture + "." + key).c_str(), value); }

    void add_metadata() {
        gguf_set_val_str(file_.get(), "general.architecture", m_.architecture.c_str());
        gguf_set_val_str(file_.get(), "tokenizer.ggml.model", "no_vocab");
        set("context_length", 4096);
        set("embedding_length", m_.width());
        set("block_count", m_.layers);
        set("feed_forward_length", m_.feed_forward);
        set("attention.head_count", m_.heads);
        set("attention.head_count_kv", m_.kv_heads);
        set("attention.key_length", m_.head_size);
        set("attention.value_length", m_.head_size);
        set("rope.dimension_count", m_.head_size);
        set("vocab_size", m_.vocabulary);
        set("attention.layer_norm_rms_epsilon", 1e-5F);
        set("rope.freq_base", 500000.0F);
        if (m_.window > 0) set("attention.sliding_window", m_.window);
        if (m_.soft_cap > 0) set("attn_logit_softcapping", m_.soft_cap);
    }

    void add(const std::string& name, const std::vector<std::int64_t>& shape, float deviation, float mean) {
        auto* t = ggml_new_tensor(context_.get(), GGML_TYPE_F32, static_cast<int>(shape.size()), shape.data());
        ggml_set_name(t, name.c_str());
        std::normal_distribution<float> normal(mean, deviation);
        for (std::int64_t i = 0; i < ggml_nelements(t); ++i) static_cast<float*>(t->data)[i] = normal(random_);
        gguf_add_tensor(file_.get(), t);
    }

    void add_layer(const std::string& b) {
        const std::int64_t e = m_.width(), q = m_.heads * m_.head_size, kv = m_.kv_heads * m_.head_size;
        const auto s = input_scale();
        add(b + "attn_norm.weight", {e}, 0.1F, 1);
        if (m_.fused_qkv) {
            add(b + "attn_qkv.weight", {e, q + 2 * kv}, 2 * s, 0);
        } else {
            add(b + "attn_q.weight", {e, q}, 2 * s, 0);
            add(b + "attn_k.weight", {e, kv}, 2 * s, 0);
            add(b + "attn_v.weight", {e, kv}, s, 0);
        }
        if (m_.architecture == "qwen3" || m_.architecture == "gemma3")
            for (const auto* name : {"attn_q_norm.weight", "attn_k_norm.weight"}) add(b + name, {m_.head_size}, 0.1F, 1.3F);
        if (gemma())
            for (const auto* name : {"post_attention_norm.weight", "post_ffw_norm.weight"}) add(b + name, {e}, 0.1F, 1);
        add(b + "attn_output.weight", {q, e}, 2 * s, 0);
        add(b + "ffn_norm.weight", {e}, 0.1F, 1);
        add(b + "ffn_gate.weight", {e, m_.feed_forward}, s, 0);
        add(b + "ffn_up.weight", {e, m_.feed_forward}, s, 0);
        add(b + "ffn_down.weight", {m_.feed_forward, e}, 1.0F / std::sqrt(static_cast<float>(m_.feed_forward)), 0);
    }

    tiny_model m_;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> context_;
    std::unique_ptr<gguf_context, decltype(&gguf_free)> file_;
    std::mt19937 random_{7};
};

}  // namespace sekv::example
