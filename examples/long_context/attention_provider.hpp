// What an engine that hosts a foreign key/value store asks of it, one sequence at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "sekv/core/shape.hpp"

namespace sekv::example {

/// Keys, values and attention of one sequence. The host calls, for every batch of tokens and from one thread:
/// begin, then for every layer in order append (layers that own their K and V) and attend, then end. Whatever a call
/// throws stops the batch and reaches the caller of the host; cancel is then called instead of end.
class attention_provider {
public:
    attention_provider() = default;
    attention_provider(const attention_provider&) = delete;
    attention_provider& operator=(const attention_provider&) = delete;
    virtual ~attention_provider() = default;

    /// `tokens` (> 0) tokens follow, the first at position `first_position`.
    virtual void begin(std::int64_t first_position, std::int64_t tokens) = 0;
    /// `k` [tokens, kv_heads, key_size], rotary embedding applied, and `v` [tokens, kv_heads, value_size]; contiguous fp32.
    virtual void append(std::int32_t layer, const float* k, const float* v) = 0;
    /// `q` [tokens, query_heads, key_size], not yet scaled, to `out` [tokens, query_heads, value_size]; causal within the batch.
    virtual void attend(std::int32_t layer, const float* q, float* out) = 0;
    virtual void end() = 0;
    /// The batch that begin announced won't be completed.
    virtual void cancel() noexcept {}
};

/// The reference: keeps every key and value in fp32 and attends in double precision, on one thread. Honours GQA, scale,
/// sliding windows, soft-cap and kv_source. A begin before the end of what is stored drops the tokens from there on.
class exact_provider final : public attention_provider {
public:
    explicit exact_provider(model_shape shape);

    void begin(std::int64_t first_position, std::int64_t tokens) override;
    void append(std::int32_t layer, const float* k, const float* v) override;
    void attend(std::int32_t layer, const float* q, float* out) override;
    void end() override;
    void cancel() noexcept override;

    /// Tokens stored.
    [[nodiscard]] std::int64_t size() const noexcept { return size_; }

private:
    struct rows {
        std::vector<float> k, v;
    };

    void truncate(std::int64_t tokens);
    void attend_head(std::size_t layer, std::int64_t position, std::int32_t query_head, const float* q, float* out);

    model_shape shape_;
    std::vector<rows> layers_;
    std::vector<double> weights_, sum_;
    std::int64_t size_ = 0;     // tokens of completed batches
    std::int64_t pending_ = 0;  // tokens of the batch under way
};

}  // namespace sekv::example
