#include "llama_host.hpp"

#include <ggml-cpu.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "gguf_check.hpp"
#include "sekv/core/error.hpp"
#include "widened_file.hpp"

namespace sekv::example {
namespace {

void print_nothing(ggml_log_level /*unused*/, const char* /*unused*/, void* /*unused*/) {}

void print_errors(ggml_log_level level, const char* text, void* /*unused*/) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

void start_llama() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(print_nothing, nullptr);
        llama_backend_init();
    });
}

model_handle load(const std::string& path, const std::string& architecture, bool fp32_weights) {
    std::optional<widened_file> wide;  // may go once it is mapped
    if (fp32_weights) wide.emplace(path);
    auto params = llama_model_default_params();
    params.n_gpu_layers = 0;         // the hook reads and writes activations in host memory
    params.use_extra_bufts = false;  // weights repacked for AMX crash under hypervisors and sandboxes that lose the tile state
    model_handle model(llama_model_load_from_file(wide ? wide->path().c_str() : path.c_str(), params));
    const auto file = "The model file '" + path + "' (architecture '" + architecture + "') ";
    if (!model) throw unsupported(file + "can't be loaded by the llama.cpp this program was built with; its message above says why.");
    if (llama_model_is_recurrent(model.get()) || llama_model_is_hybrid(model.get()))
        throw unsupported(file + "can't be hosted: it is recurrent or hybrid, so its memory is a running state, not keys and values per token.");
    if (llama_model_has_encoder(model.get()) || !llama_model_has_decoder(model.get()) || llama_model_is_diffusion(model.get()))
        throw unsupported(file + "can't be hosted: it is no causal decoder.");
    return model;
}

std::int64_t original_context(const llama_model* model, const std::string& architecture) {
    std::string value(32, '\0');
    const auto key = architecture + ".rope.scaling.original_context_length";
    const auto size = llama_model_meta_val_str(model, key.c_str(), value.data(), value.size());
    return size > 0 ? std::strtoll(value.c_str(), nullptr, 10) : llama_model_n_ctx_train(model);
}

void check_options(host_options& o, const llama_model* model, const gguf_identity& identity) {
    const std::int64_t trained = llama_model_n_ctx_train(model);
    if (o.context == 0) o.context = trained;
    if (o.context < 1 || o.context > trained)
        throw invalid_argument("The context must be 1 to " + std::to_string(trained) + " tokens, which is what the model was trained with, not " +
                               std::to_string(o.context) + ".");
    if (o.threads < 1 || o.threads > 256) throw invalid_argument("The number of threads must be 1 to 256, not " + std::to_string(o.threads) + ".");
    if (o.chunk < 1 || o.chunk > 4096) throw invalid_argument("The chunk must be 1 to 4096 tokens, not " + std::to_string(o.chunk) + ".");
    // llama.cpp picks the long or the short factors by the size of its own cache, which is small here.
    if (const auto limit = original_context(model, identity.architecture); identity.long_rope && o.context > limit)
        throw unsupported("This model has a second set of rotary factors for contexts beyond " + std::to_string(limit) +
                          " tokens, which can't be hosted; ask for a context of at most that.");
}

threadpool_handle make_threadpool(std::int32_t threads) {
    auto params = ggml_threadpool_params_default(threads);
    params.poll = 0;  // llama's idle workers must not spin on the cores that the provider's own threads need
    threadpool_handle pool(ggml_threadpool_new(&params));
    if (!pool) throw io_error("llama.cpp couldn't start " + std::to_string(threads) + " threads.");
    return pool;
}

}  // namespace

void threadpool_free_fn::operator()(ggml_threadpool* p) const noexcept { ggml_threadpool_free(p); }

llama_host::llama_host(const std::string& path, host_options options) : options_(options) {
    start_llama();
    llama_log_set(print_nothing, nullptr);  // check_gguf says in a sentence what llama.cpp's reader would add lines to
    const auto identity = check_gguf(path);
    llama_log_set(print_errors, nullptr);
    architecture_ = identity.architecture;
    model_ = load(path, architecture_, options_.fp32_weights);
    check_options(options_, model_.get(), identity);
    vocab_ = llama_model_get_vocab(model_.get());
    threadpool_ = make_threadpool(options_.threads);
    graph_ = probe_attention(model_.get());
    graph_.shape.fingerprint = identity.fingerprint;
    try {
        graph_.shape.validate();
    } catch (const invalid_argument& e) {
        throw unsupported("The model file '" + path + "' (architecture '" + architecture_ + "') has attention of a shape that sekv can't hold. " + e.what());
    }
}

std::vector<token> llama_host::tokenise(std::string_view text, bool frame, bool special_marks) const {
    if (!has_tokeniser()) throw unsupported("This model file has no tokeniser, so it can't take text.");
    if (text.size() > static_cast<std::size_t>(INT32_MAX)) throw invalid_argument("A text of more than 2 GiB can't be tokenised at once.");
    const auto size = static_cast<std::int32_t>(text.size());
    std::vector<token> tokens(text.size() + 2);
    const auto run = [&] { return llama_tokenize(vocab_, text.data(), size, tokens.data(), static_cast<std::int32_t>(tokens.size()), frame, special_marks); };
    auto count = run();
    if (count < 0 && count != INT32_MIN) {
        tokens.resize(static_cast<std::size_t>(-count));
        count = run();
    }
    if (count < 0) throw invalid_argument("llama.cpp can't tokenise this text of " + std::to_string(size) + " bytes.");
    tokens.resize(static_cast<std::size_t>(count));
    return tokens;
}

std::string llama_host::detokenise(std::span<const token> tokens, bool special_marks) const {
    if (!has_tokeniser()) throw unsupported("This model file has no tokeniser, so it can't give text.");
    std::string text(tokens.size() * 8 + 16, '\0');
    const auto count = static_cast<std::int32_t>(tokens.size());
    const auto run = [&] { return llama_detokenize(vocab_, tokens.data(), count, text.data(), static_cast<std::int32_t>(text.size()), false, special_marks); };
    auto size = run();
    if (size < 0) {
        text.resize(static_cast<std::size_t>(-size));
        size = run();
    }
    if (size < 0) throw invalid_argument("llama.cpp can't turn these " + std::to_string(count) + " tokens into text.");
    text.resize(static_cast<std::size_t>(size));
    return text;
}

std::string llama_host::chat_prompt(std::span<const chat_message> messages, bool reply) const {
    const char* format = llama_model_chat_template(model_.get(), nullptr);
    if (format == nullptr) throw unsupported("This model file has no chat template; it is a base model, so give it plain text.");
    std::vector<llama_chat_message> list;
    std::size_t total = 256;
    for (const auto& m : messages) {
        list.push_back({m.role.c_str(), m.content.c_str()});
        total += 2 * (m.role.size() + m.content.size());
    }
    std::string text(total, '\0');
    const auto run = [&] { return llama_chat_apply_template(format, list.data(), list.size(), reply, text.data(), static_cast<std::int32_t>(text.size())); };
    auto size = run();
    if (size > static_cast<std::int32_t>(text.size())) {
        text.resize(static_cast<std::size_t>(size));
        size = run();
    }
    if (size < 0) throw unsupported("llama.cpp doesn't know this model's chat template; give it plain text.");
    text.resize(static_cast<std::size_t>(size));
    return text;
}

}  // namespace sekv::example
