#include "graph_hook.hpp"

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "sekv/core/error.hpp"

namespace sekv::example {
namespace {

constexpr std::array<const char*, 2> cache_prefix{"cache_k_l", "cache_v_l"};

/// Makes `t` a node that calls `function`. The layout of a custom node's parameters is private to ggml, so they are taken
/// from one made by its public function.
void turn_custom(ggml_tensor* t, ggml_custom_op_t function, void* userdata) {
    std::array<char, 2048> memory{};
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> scratch(ggml_init({memory.size(), memory.data(), true}), ggml_free);
    const auto* model = ggml_custom_4d(scratch.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, function, GGML_N_TASKS_MAX, userdata);
    t->op = model->op;
    std::memcpy(t->op_params, model->op_params, sizeof t->op_params);
}

[[noreturn]] void refuse(std::size_t layer, const std::string& why) {
    throw unsupported("The attention of layer " + std::to_string(layer) + " can't be hosted: " + why);
}

}  // namespace

graph_hook::graph_hook(const attention_graph& graph) : graph_(graph) {
    const auto last = std::max_element(graph_.cache_layer.begin(), graph_.cache_layer.end());
    stored_.resize(last == graph_.cache_layer.end() ? 0 : static_cast<std::size_t>(*last) + 1);
    for (std::size_t i = 0; i < graph_.cache_layer.size(); ++i) {
        const auto& l = graph_.shape.layers[i];
        auto& parts = stored_[static_cast<std::size_t>(graph_.cache_layer[i])].parts;
        parts[0].width = static_cast<std::int64_t>(l.kv_heads) * l.key_size;
        parts[1].width = static_cast<std::int64_t>(l.kv_heads) * l.value_size;
    }
}

void graph_hook::configure(llama_context_params& params) noexcept {
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = params.type_v = GGML_TYPE_F16;
    params.cb_eval = callback;
    params.cb_eval_user_data = this;
}

void graph_hook::arm(attention_provider& provider, std::int64_t tokens) noexcept {
    provider_ = &provider;
    tokens_ = tokens;
    next_layer_ = 0;
    error_ = nullptr;
    for (auto& s : stored_)
        for (auto& part : s.parts) part.fresh = false;
}

void graph_hook::finish(std::int32_t status) {
    provider_ = nullptr;
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (status != 0)
        throw state_error("llama.cpp failed to decode " + std::to_string(tokens_) + " tokens (llama_decode returned " + std::to_string(status) + ").");
    if (next_layer_ != graph_.shape.layers.size())
        throw unsupported("llama.cpp's graph attended in " + std::to_string(next_layer_) + " layers instead of " + std::to_string(graph_.shape.layers.size()) +
                          ", so it can't be hosted.");
}

// C code calls this: nothing may be thrown through it. llama.cpp ends the graph when told so, and reports success.
bool graph_hook::callback(ggml_tensor* t, bool ask, void* self) {
    auto& hook = *static_cast<graph_hook*>(self);
    if (hook.error_) return ask;
    if (hook.provider_ == nullptr) return !ask;
    try {
        if (ask) return hook.wants(t);
        hook.attend(t);
        return true;
    } catch (...) {
        hook.error_ = std::current_exception();
        return ask;
    }
}

bool graph_hook::wants(ggml_tensor* t) {
    if (t->op == GGML_OP_SET_ROWS || t->op == GGML_OP_CUSTOM) return turn_store(t);
    // Of a reused graph, the attention is a no-op already.
    if (t->op != GGML_OP_FLASH_ATTN_EXT && (t->op != GGML_OP_NONE || t->src[1] == nullptr || cache_number(t->src[1], cache_prefix[0]) < 0)) return false;
    t->op = GGML_OP_NONE;
    return true;
}

bool graph_hook::turn_store(ggml_tensor* t) {
    for (std::size_t i = 0; i < cache_prefix.size(); ++i) {
        const auto number = cache_number(t, cache_prefix[i]);
        if (number < 0) continue;
        const auto* rows = t->src[0];
        if (static_cast<std::size_t>(number) >= stored_.size()) refuse(next_layer_, "llama.cpp stores into a cache tensor that no layer was seen to read.");
        auto& part = stored_[static_cast<std::size_t>(number)].parts[i];
        if (rows->type != GGML_TYPE_F32 || rows->ne[0] != part.width || rows->ne[1] != tokens_ || rows->nb[0] != sizeof(float))
            refuse(next_layer_, "llama.cpp stores keys or values of a shape other than the one seen at the start.");
        part.rows.resize(static_cast<std::size_t>(tokens_ * part.width));
        part.fresh = true;
        turn_custom(t, copy_rows, &part);
    }
    return false;
}

void graph_hook::copy_rows(ggml_tensor* node, int thread, int threads, void* part) {
    auto& to = *static_cast<copy*>(part);
    const auto* from = node->src[0];
    for (std::int64_t t = thread; t < from->ne[1]; t += threads)
        std::memcpy(to.rows.data() + t * to.width, static_cast<const char*>(from->data) + static_cast<std::size_t>(t) * from->nb[1],
                    static_cast<std::size_t>(to.width) * sizeof(float));
}

void graph_hook::check_node(const ggml_tensor* t, const layer_shape& l) const {
    const auto* q = t->src[0];
    if (q->type != GGML_TYPE_F32 || q->ne[0] != l.key_size || q->ne[1] != tokens_ || q->ne[2] != l.query_heads() || q->ne[3] != 1 || q->nb[0] != sizeof(float))
        refuse(next_layer_, "its queries have a shape other than the one seen at the start.");
    if (t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t) || t->ne[0] != l.value_size || t->ne[1] != l.query_heads() || t->ne[2] != tokens_)
        refuse(next_layer_, "its output has a shape other than the one seen at the start.");
    const auto* buffer = t->view_src != nullptr ? t->view_src->buffer : t->buffer;
    if (buffer == nullptr || !ggml_backend_buffer_is_host(const_cast<ggml_backend_buffer*>(buffer))) refuse(next_layer_, "its output isn't in host memory.");
    float scale = 0;
    std::memcpy(&scale, t->op_params, sizeof scale);
    if (scale != l.scale) refuse(next_layer_, "its scale changed from " + std::to_string(l.scale) + " to " + std::to_string(scale) + ".");
}

/// [tokens, heads, size]; llama.cpp's own memory where it lies so already, as it does after a rotary embedding.
const float* graph_hook::contiguous_query(const ggml_tensor* q, const layer_shape& l) {
    const auto head = static_cast<std::size_t>(l.key_size) * sizeof(float);
    const auto heads = static_cast<std::size_t>(l.query_heads());
    const auto* data = static_cast<const char*>(q->data);
    if ((q->nb[2] == head || heads == 1) && (q->nb[1] == head * heads || tokens_ == 1)) return reinterpret_cast<const float*>(data);
    const auto tokens = static_cast<std::size_t>(tokens_);
    query_.resize(tokens * heads * static_cast<std::size_t>(l.key_size));
    auto* to = query_.data();
    for (std::size_t t = 0; t < tokens; ++t)
        for (std::size_t h = 0; h < heads; ++h, to += l.key_size) std::memcpy(to, data + t * q->nb[1] + h * q->nb[2], head);
    return query_.data();
}

void graph_hook::attend(ggml_tensor* t) {
    if (next_layer_ >= graph_.shape.layers.size()) refuse(next_layer_, "llama.cpp attends in more layers than were seen at the start.");
    const auto& l = graph_.shape.layers[next_layer_];
    const auto number = cache_number(t->src[1], cache_prefix[0]);
    if (number != graph_.cache_layer[next_layer_]) refuse(next_layer_, "it reads another cache tensor than was seen at the start.");
    check_node(t, l);
    const auto layer = static_cast<std::int32_t>(next_layer_);
    if (l.kv_source < 0) {
        auto& parts = stored_[static_cast<std::size_t>(number)].parts;
        if (!parts[0].fresh || !parts[1].fresh) refuse(next_layer_, "llama.cpp attends before it stores the layer's keys and values.");
        provider_->append(layer, parts[0].rows.data(), parts[1].rows.data());
    }
    provider_->attend(layer, contiguous_query(t->src[0], l), static_cast<float*>(t->data));
    ++next_layer_;
}

}  // namespace sekv::example
