// The progressive codec with a dial: tau and the cap can be turned on a filled cache, so that one filling serves a sweep of zoom rates.
#pragma once

#include <cstdint>
#include <memory>

#include "sekv/cache.hpp"

namespace sekv::bench {

/// Who attends. The codec that sealed and the one that attends differ in tau and cap only.
struct dial {
    model_shape model;
    progressive_options options;
    dtype stored = dtype::bf16;
    block_pool* pool = nullptr;
    executor* exec = nullptr;
    std::unique_ptr<progressive_codec> codec;

    void turn(float tau, std::int32_t cap) {
        auto o = options;
        o.tau = tau;
        o.cap = cap;
        codec = std::make_unique<progressive_codec>(model, o, stored, *pool, *exec);
    }
};

class tunable_codec : public progressive_codec {
public:
    struct options {
        progressive_options base;
        std::shared_ptr<dial> knob;
    };
    static constexpr std::int32_t most_cap = 1 << 20;  ///< scratch holds any list

    tunable_codec(const model_shape& model, const options& o, dtype stored, block_pool& pool, executor& exec)
        : progressive_codec(model, widest(o.base), stored, pool, exec), dial_(o.knob) {
        *dial_ = {model, o.base, stored, &pool, &exec, nullptr};
        dial_->turn(o.base.tau, o.base.cap);
    }
    void attend(sequence& s, const std::vector<unit>& units, const head_query& q, arena a, zoom_metrics& metrics) const {
        dial_->codec->attend(s, units, q, a, metrics);
    }

private:
    static progressive_options widest(progressive_options o) {
        o.cap = most_cap;
        return o;
    }
    std::shared_ptr<dial> dial_;
};

using bench_cache = basic_cache<bf16, host_backend, tunable_codec>;

}  // namespace sekv::bench
