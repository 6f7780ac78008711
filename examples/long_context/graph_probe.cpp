#include "graph_probe.hpp"

#include <ggml.h>
#include <llama.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>

#include "sekv/core/error.hpp"

namespace sekv::example {

std::int32_t cache_number(const ggml_tensor* t, std::string_view prefix) noexcept {
    for (; t != nullptr; t = t->view_src) {
        const std::string_view name(t->name);
        std::int32_t number = -1;
        if (name.starts_with(prefix) && std::from_chars(name.data() + prefix.size(), name.data() + name.size(), number).ec == std::errc{}) return number;
    }
    return -1;
}

namespace {

float float_param(const ggml_tensor* t, std::size_t i) noexcept {
    float x = 0;
    std::memcpy(&x, reinterpret_cast<const char*>(t->op_params) + i * sizeof(float), sizeof(float));
    return x;
}

[[noreturn]] void refuse(std::size_t layer, const std::string& why) {
    throw unsupported("The attention of layer " + std::to_string(layer) + " can't be hosted: " + why);
}

/// Tokens that the mask's row of the batch's last token lets through.
std::int64_t visible(const ggml_tensor* mask, std::int64_t row) {
    std::int64_t count = 0;
    const auto* data = static_cast<const char*>(mask->data) + static_cast<std::size_t>(row) * mask->nb[1];
    for (std::int64_t j = 0; j < mask->ne[0]; ++j) {
        const auto* cell = data + static_cast<std::size_t>(j) * mask->nb[0];
        float x = 0;
        if (mask->type == GGML_TYPE_F16) {
            x = ggml_fp16_to_fp32(*reinterpret_cast<const ggml_fp16_t*>(cell));
        } else {
            std::memcpy(&x, cell, sizeof x);
        }
        count += std::isinf(x) ? 0 : 1;
    }
    return count;
}

/// Rotary frequencies of a ROPE node (ggml_rope_ext); `none` where YaRN mixes two sets or sections are used.
rope_shape rope_of(const ggml_tensor* rope) {
    rope_shape r;
    const auto mode = rope->op_params[2];
    if (float_param(rope, 7) != 0.0F || (mode != GGML_ROPE_TYPE_NORMAL && mode != GGML_ROPE_TYPE_NEOX)) return r;
    r.pairs = mode == GGML_ROPE_TYPE_NEOX ? rope_shape::pairing::half : rope_shape::pairing::interleaved;
    const auto size = rope->op_params[1];
    const auto* factors = rope->src[2] != nullptr ? static_cast<const float*>(rope->src[2]->data) : nullptr;
    for (std::int32_t i = 0; i < size / 2; ++i) {
        const double f = std::pow(static_cast<double>(float_param(rope, 5)), -2.0 * i / size) * float_param(rope, 6);
        r.inverse_frequency.push_back(static_cast<float>(factors != nullptr ? f / factors[i] : f));
    }
    return r;
}

class recorder {
public:
    recorder(std::int64_t tokens, std::int32_t window) : tokens_(tokens), window_(window) {}

    static bool callback(ggml_tensor* t, bool ask, void* self) { return static_cast<recorder*>(self)->visit(t, ask); }

    attention_graph finish() {
        if (error_) std::rethrow_exception(error_);
        if (graph_.shape.layers.empty())
            throw unsupported("The graph that llama.cpp builds for this model has no attention over a key/value cache that could be replaced.");
        return std::move(graph_);
    }

private:
    bool visit(ggml_tensor* t, bool ask) noexcept {
        if (!ask) return true;
        try {
            if (!error_) record(t);
        } catch (...) {
            error_ = std::current_exception();
        }
        ops_[t] = t->op;
        t->op = GGML_OP_NONE;  // nothing has to be computed: inputs are set, and shapes are known
        return false;
    }

    void record(const ggml_tensor* t) {
        if (t->op == GGML_OP_SET_ROWS) {
            if (const auto n = cache_number(t, "cache_k_l"); n >= 0) keys_[n] = t;
        } else if (t->op == GGML_OP_FLASH_ATTN_EXT) {
            record_attention(t);
        }
    }

    void record_attention(const ggml_tensor* t) {
        const auto at = graph_.shape.layers.size();
        const ggml_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *mask = t->src[3];
        const auto number = cache_number(k, "cache_k_l");
        if (number < 0 || cache_number(v, "cache_v_l") != number) refuse(at, "its keys and values don't come from llama.cpp's cache.");
        if (mask == nullptr) refuse(at, "it has no causal mask.");
        if (float_param(t, 1) != 0.0F) refuse(at, "it adds a bias to the logits that grows with the distance (ALiBi).");
        if (q->ne[2] % k->ne[2] != 0) refuse(at, "its query heads aren't a multiple of its key heads.");
        layer_shape l;
        l.kv_heads = static_cast<std::int32_t>(k->ne[2]);
        l.group = static_cast<std::int32_t>(q->ne[2] / k->ne[2]);
        l.key_size = static_cast<std::int32_t>(k->ne[0]);
        l.value_size = static_cast<std::int32_t>(v->ne[0]);
        l.scale = float_param(t, 0);
        l.soft_cap = float_param(t, 2);
        l.sink_logits = t->src[4] != nullptr;
        l.sliding_window = window_of(mask, at);
        l.kv_source = source_of(number);
        if (l.kv_source < 0) l.rope = rope_before(number);
        graph_.shape.layers.push_back(std::move(l));
        graph_.cache_layer.push_back(number);
    }

    std::int32_t window_of(const ggml_tensor* mask, std::size_t at) const {
        const auto seen = visible(mask, tokens_ - 1);
        if (visible(mask, 0) != 1 || (seen != tokens_ && seen != window_))
            refuse(at, "its mask is neither causal over all tokens nor a sliding window of " + std::to_string(window_) + " (a query at position " +
                           std::to_string(tokens_ - 1) + " sees " + std::to_string(seen) + " tokens).");
        return seen == tokens_ ? 0 : window_;
    }

    std::int32_t source_of(std::int32_t number) const {
        for (std::size_t i = 0; i < graph_.cache_layer.size(); ++i)
            if (graph_.cache_layer[i] == number) return static_cast<std::int32_t>(i);
        return -1;
    }

    /// The ROPE that the stored keys come from, if only views lie between.
    rope_shape rope_before(std::int32_t number) const {
        const auto found = keys_.find(number);
        const auto* t = found == keys_.end() ? nullptr : found->second->src[0];
        for (int steps = 0; t != nullptr && steps < 8; ++steps, t = t->src[0]) {
            const auto op = ops_.contains(t) ? ops_.at(t) : t->op;
            if (op == GGML_OP_ROPE) return rope_of(t);
            if (op != GGML_OP_VIEW && op != GGML_OP_RESHAPE) break;
        }
        return {};
    }

    std::int64_t tokens_;
    std::int32_t window_;
    attention_graph graph_;
    std::unordered_map<std::int32_t, const ggml_tensor*> keys_;
    std::unordered_map<const ggml_tensor*, ggml_op> ops_;
    std::exception_ptr error_;
};

}  // namespace

attention_graph probe_attention(llama_model* model) {
    const auto window = llama_model_n_swa(model);
    const auto tokens = window + 2;
    recorder seen(tokens, window);
    auto params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = static_cast<std::uint32_t>((tokens + 255) / 256 * 256);
    params.n_outputs_max = 1;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.cb_eval = recorder::callback;
    params.cb_eval_user_data = &seen;
    const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model, params), llama_free);
    if (!context) throw unsupported("llama.cpp can't make a context for this model; its message above says why.");
    std::vector<llama_token> text(static_cast<std::size_t>(tokens), 0);
    if (llama_decode(context.get(), llama_batch_get_one(text.data(), tokens)) != 0)
        throw unsupported("llama.cpp can't run a batch of " + std::to_string(tokens) + " tokens through this model; its message above says why.");
    return seen.finish();
}

}  // namespace sekv::example
