// A sekv cache in the place of an engine's own: one sequence of it as an attention_provider.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention_provider.hpp"
#include "sekv/cache.hpp"
#include "sekv/codec/calibration.hpp"

namespace sekv::example {

/// Keys, values and attention of one open sequence of a cache, which must outlive it. What the cache throws goes through.
/// A batch that fails leaves the sequence as it was before.
template <class Cache>
class cache_provider final : public attention_provider {
public:
    cache_provider(Cache& cache, sequence seq) : cache_(cache), seq_(seq) {}

    /// How the batches that follow read sealed tokens.
    void read_at(resolution how) noexcept { how_ = how; }
    /// Every query from now on enters `collector` too, unless it is null; it must outlive the provider.
    void collect_queries(calibration_collector* collector) noexcept { collector_ = collector; }
    /// Gives the last batch's workspace back.
    void release() { plan_ = plan(); }

    void begin(std::int64_t first_position, std::int64_t tokens) override {
        if (const auto held = cache_.length(seq_); first_position != held)
            throw invalid_argument("The next token's position is " + std::to_string(held) + ", not " + std::to_string(first_position) + ".");
        release();  // before the next one comes: the budget need not hold two
        cache_.reserve(seq_, tokens);
        first_ = first_position;
        const batch_item item{seq_, tokens};
        plan_ = cache_.make_plan({&item, 1}, how_);
    }

    void append(std::int32_t layer, const float* k, const float* v) override {
        const auto& l = shape_of(layer);
        cache_.append(seq_, layer, rows(k, plan_.tokens(), l.kv_heads, l.key_size), rows(v, plan_.tokens(), l.kv_heads, l.value_size), first_);
    }

    void attend(std::int32_t layer, const float* q, float* out) override {
        const auto& l = shape_of(layer);
        cache_.attend(plan_, layer, rows(q, plan_.tokens(), l.query_heads(), l.key_size), out_rows(out, plan_.tokens(), l.query_heads(), l.value_size));
        if (collector_ != nullptr) collect(layer, q);
    }

    void end() override {}
    void cancel() noexcept override {
        release();
        try {
            cache_.truncate(seq_, first_);  // takes back what some layers already have
        } catch (const error&) {
            // A sliding-window layer has dropped rows that the shorter sequence needs: the next begin says that the lengths differ.
        }
    }

private:
    [[nodiscard]] const layer_shape& shape_of(std::int32_t layer) const { return cache_.model().layers[static_cast<std::size_t>(layer)]; }

    void collect(std::int32_t layer, const float* q) {
        const auto& l = shape_of(layer);
        std::vector<float> scaled(static_cast<std::size_t>(l.key_size));
        for (std::int64_t t = 0; t < plan_.tokens(); ++t) {
            for (std::int32_t h = 0; h < l.query_heads(); ++h, q += l.key_size) {
                for (std::size_t i = 0; i < scaled.size(); ++i) scaled[i] = q[i] * l.logit_scale();
                collector_->add(layer, h / l.group, scaled, first_ + t);
            }
        }
    }

    Cache& cache_;
    sequence seq_;
    plan plan_;
    resolution how_ = resolution::full;
    calibration_collector* collector_ = nullptr;
    std::int64_t first_ = 0;
};

}  // namespace sekv::example
