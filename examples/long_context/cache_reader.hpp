// A reader whose keys, values and attention are sekv's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache_provider.hpp"
#include "reader.hpp"
#include "sekv/span/surprisal.hpp"

namespace sekv::example {

/// What a cache looked like at one moment.
struct cache_state {
    std::int64_t length = 0;
    std::int64_t sealed = 0;
    usage used;
    std::uint64_t device_peak = 0, host_peak = 0;  ///< since it was made
    zoom_metrics zooms;                            ///< likewise
    std::int64_t spans = 0;
    double mean_span = 0;  ///< tokens
};

struct cache_reader_options {
    cache_options cache;
    std::int64_t capacity = 0;    ///< tokens that the sequence will have at most
    std::string calibration_out;  ///< file for the query moments of the whole run; empty: none
};

class cache_reader : public reader {
public:
    [[nodiscard]] virtual cache_state state() const = 0;
    /// Writes what calibration_out asks for.
    virtual void finish() = 0;
};

/// Cache: a basic_cache on the host backend. The host must outlive it.
template <class Cache>
class sekv_reader final : public cache_reader {
public:
    sekv_reader(const llama_host& host, cache_reader_options options, const typename Cache::codec_options& codec)
        : host_(host),
          options_(std::move(options)),
          cache_(host.shape(), options_.cache, codec, host_backend(host.options().threads)),
          seq_(cache_.open({.capacity = options_.capacity})),
          provider_(cache_, seq_),
          decoder_(host, provider_) {
        if (options_.calibration_out.empty()) return;
        collector_.emplace(host.shape());
        provider_.collect_queries(&*collector_);
    }

    logits_row prefill(std::span<const token> document, const prefill_progress& progress) override {
        provider_.read_at(resolution::full);
        // Logits of prompt tokens come 64 at a time (see decoder.cpp); without them a chunk may be as long as the host takes.
        const auto chunk = static_cast<std::size_t>(needs_logits() ? 64 : host_.options().chunk);
        while (!document.empty()) {
            const auto part = document.first(std::min(document.size(), chunk));
            document = document.subspan(part.size());
            take(part, document.empty());
            progress(cache_.length(seq_));
        }
        provider_.release();
        cache_.end_prefill(seq_);
        document_ = cache_.length(seq_);
        document_logits_ = last_;
        return last_;
    }

    void rewind() override {
        cache_.truncate(seq_, document_);
        last_ = document_logits_;
    }

    logits_row prompt(std::span<const token> tokens) override {
        provider_.read_at(resolution::full);
        cache_.begin_prefill(seq_);
        take(tokens, true);
        provider_.release();
        cache_.end_prefill(seq_);
        return last_;
    }

    logits_row step(token t) override {
        provider_.read_at(resolution::adaptive);
        take({&t, 1}, true);
        return last_;
    }

    [[nodiscard]] cache_state state() const override {
        cache_state s{cache_.length(seq_), cache_.sealed(seq_), cache_.used(), cache_.peak(tier::device), cache_.peak(tier::host), cache_.zooms()};
        const auto spans = cache_.spans(seq_).spans();
        s.spans = static_cast<std::int64_t>(spans.size());
        if (s.spans > 0) s.mean_span = static_cast<double>(spans.back().end) / static_cast<double>(s.spans);
        return s;
    }

    void finish() override {
        if (collector_) collector_->finish().save(options_.calibration_out);
    }

private:
    [[nodiscard]] bool needs_logits() const noexcept { return options_.cache.spans.policy == span_policy::surprisal; }

    // Runs tokens behind what is there, then tells the segmenter how surprising each was.
    void take(std::span<const token> tokens, bool last_wanted) {
        const auto position = cache_.length(seq_);
        const auto width = static_cast<std::size_t>(host_.vocabulary());
        const auto rows = needs_logits() ? logits_of::all : last_wanted ? logits_of::last : logits_of::none;
        auto logits = decoder_.decode(tokens, position, rows);
        if (options_.cache.spans.policy != span_policy::key_novelty) {
            std::vector<float> signals(tokens.size(), 0.0F);  // what a fixed policy gets
            for (std::size_t i = 0; needs_logits() && i < tokens.size(); ++i) {
                const float* before = i > 0 ? logits.data() + (i - 1) * width : last_.data();
                if (position > 0 || i > 0) signals[i] = surprisal(before, host_.vocabulary(), tokens[i]);
            }
            cache_.observe(seq_, signals);
        }
        if (rows == logits_of::all) logits.erase(logits.begin(), logits.end() - static_cast<std::ptrdiff_t>(width));
        last_ = std::move(logits);
    }

    const llama_host& host_;
    cache_reader_options options_;
    Cache cache_;
    sequence seq_;
    cache_provider<Cache> provider_;
    std::optional<calibration_collector> collector_;
    hosted_decoder decoder_;
    std::int64_t document_ = 0;
    logits_row last_;             // behind the last token, where logits were asked for
    logits_row document_logits_;  // behind the document's
};

}  // namespace sekv::example
