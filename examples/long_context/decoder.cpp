#include "decoder.hpp"

#include <algorithm>
#include <string>

#include "sekv/core/error.hpp"

namespace sekv::example {
namespace {

// Logits of this many tokens are held by llama.cpp at once; a vocabulary of 256K makes each a megabyte.
constexpr std::int32_t most_rows = 64;

class batch {
public:
    batch(std::span<const token> tokens, std::int64_t position, logits_of rows) : batch_(llama_batch_init(static_cast<std::int32_t>(tokens.size()), 0, 1)) {
        batch_.n_tokens = static_cast<std::int32_t>(tokens.size());
        for (std::size_t i = 0; i < tokens.size(); ++i) {
            batch_.token[i] = tokens[i];
            batch_.pos[i] = static_cast<llama_pos>(position + static_cast<std::int64_t>(i));
            batch_.n_seq_id[i] = 1;
            batch_.seq_id[i][0] = 0;
            batch_.logits[i] = rows == logits_of::all || (rows == logits_of::last && i + 1 == tokens.size()) ? 1 : 0;
        }
    }
    batch(const batch&) = delete;
    batch& operator=(const batch&) = delete;
    ~batch() { llama_batch_free(batch_); }

    [[nodiscard]] const llama_batch& get() const noexcept { return batch_; }

private:
    llama_batch batch_;
};

context_handle make_context(const llama_host& host, llama_context_params params) {
    const auto threads = host.options().threads;
    params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(host.options().chunk);
    params.n_outputs_max = static_cast<std::uint32_t>(std::min(most_rows, host.options().chunk));
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = threads;
    params.no_perf = true;
    params.swa_full = true;  // keeps what a window has passed, so that the cache can be rewound
    context_handle context(llama_init_from_model(host.model(), params));
    if (!context)
        throw io_error("llama.cpp can't make a context of " + std::to_string(params.n_ctx) +
                       " tokens; there may be too little memory, so ask for a shorter one.");
    llama_attach_threadpool(context.get(), host.threadpool(), host.threadpool());
    return context;
}

void check_tokens(const llama_host& host, std::span<const token> tokens, std::int64_t position) {
    if (tokens.empty()) throw invalid_argument("There are no tokens to decode; give at least one.");
    const auto end = position + static_cast<std::int64_t>(tokens.size());
    if (position < 0 || end > host.options().context)
        throw invalid_argument("Positions " + std::to_string(position) + " to " + std::to_string(end - 1) + " don't fit the context of " +
                               std::to_string(host.options().context) +
                               " tokens; shorten the text, or use a longer context if the model was trained with one.");
    for (const auto t : tokens)
        if (t < 0 || t >= host.vocabulary())
            throw invalid_argument("Token " + std::to_string(t) + " isn't in the model's vocabulary of " + std::to_string(host.vocabulary()) + ".");
}

void collect(llama_context* context, const batch& b, std::int32_t width, std::vector<float>& logits) {
    for (std::int32_t i = 0; i < b.get().n_tokens; ++i) {
        if (b.get().logits[i] == 0) continue;
        const float* row = llama_get_logits_ith(context, i);
        logits.insert(logits.end(), row, row + width);
    }
}

/// Calls run(tokens, position, rows) for the pieces that fit one run through the network.
template <class Run>
void for_pieces(std::span<const token> tokens, std::int64_t position, std::int32_t chunk, logits_of rows, Run&& run) {
    const auto piece = static_cast<std::size_t>(rows == logits_of::all ? std::min(chunk, most_rows) : chunk);
    while (!tokens.empty()) {
        const auto part = tokens.first(std::min(piece, tokens.size()));
        tokens = tokens.subspan(part.size());
        run(part, position, rows == logits_of::last && !tokens.empty() ? logits_of::none : rows);
        position += static_cast<std::int64_t>(part.size());
    }
}

}  // namespace

native_decoder::native_decoder(const llama_host& host, native_cache cache, graph_observer observer) : host_(host) {
    auto params = llama_context_default_params();
    const bool exact = cache == native_cache::f32_exact;
    params.n_ctx = static_cast<std::uint32_t>(host.options().context);
    params.type_k = params.type_v = exact ? GGML_TYPE_F32 : GGML_TYPE_F16;
    params.flash_attn_type = exact ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.cb_eval = observer.callback;
    params.cb_eval_user_data = observer.userdata;
    context_ = make_context(host, params);
    for (const auto& l : host.shape().layers)
        if (l.kv_source < 0) bytes_per_token_ += kv_row_bytes(l, exact ? 4 : 2);
}

std::vector<float> native_decoder::decode(std::span<const token> tokens, std::int64_t first_position, logits_of rows) {
    check_tokens(host_, tokens, first_position);
    if (first_position != size_)
        throw invalid_argument("The next token's position is " + std::to_string(size_) + ", not " + std::to_string(first_position) + ".");
    std::vector<float> logits;
    try {
        for_pieces(tokens, first_position, host_.options().chunk, rows, [&](std::span<const token> part, std::int64_t position, logits_of wanted) {
            const batch b(part, position, wanted);
            if (const auto status = llama_decode(context_.get(), b.get()); status != 0)
                throw state_error("llama.cpp failed to decode " + std::to_string(part.size()) + " tokens at position " + std::to_string(position) +
                                  " (llama_decode returned " + std::to_string(status) + ").");
            collect(context_.get(), b, host_.vocabulary(), logits);
        });
    } catch (...) {
        truncate(first_position);
        throw;
    }
    size_ += static_cast<std::int64_t>(tokens.size());
    return logits;
}

void native_decoder::truncate(std::int64_t tokens) {
    if (tokens < 0 || tokens > size_)
        throw invalid_argument("The cache holds " + std::to_string(size_) + " tokens and can't be cut to " + std::to_string(tokens) + ".");
    if (!llama_memory_seq_rm(llama_get_memory(context_.get()), 0, static_cast<llama_pos>(tokens), -1))
        throw state_error("llama.cpp can't rewind its cache to " + std::to_string(tokens) + " tokens.");
    size_ = tokens;
}

hosted_decoder::hosted_decoder(const llama_host& host, attention_provider& provider)
    : host_(host), provider_(provider), hook_(std::make_unique<graph_hook>(host.graph())) {
    auto params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>((host.options().chunk + 255) / 256 * 256);
    hook_->configure(params);
    context_ = make_context(host, params);
}

void hosted_decoder::run_chunk(std::span<const token> tokens, std::int64_t position, logits_of rows, std::vector<float>& logits) {
    const batch b(tokens, position, rows);
    const auto forget = [&] { llama_memory_seq_rm(llama_get_memory(context_.get()), -1, -1, -1); };
    provider_.begin(position, static_cast<std::int64_t>(tokens.size()));
    try {
        hook_->arm(provider_, static_cast<std::int64_t>(tokens.size()));
        hook_->finish(llama_decode(context_.get(), b.get()));
        provider_.end();
    } catch (...) {
        forget();
        provider_.cancel();
        throw;
    }
    forget();
    collect(context_.get(), b, host_.vocabulary(), logits);
}

std::vector<float> hosted_decoder::decode(std::span<const token> tokens, std::int64_t first_position, logits_of rows) {
    check_tokens(host_, tokens, first_position);
    std::vector<float> logits;
    for_pieces(tokens, first_position, host_.options().chunk, rows,
               [&](std::span<const token> part, std::int64_t position, logits_of wanted) { run_chunk(part, position, wanted, logits); });
    return logits;
}

}  // namespace sekv::example
