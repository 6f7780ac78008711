#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "attention_provider.hpp"

namespace sekv::example {

exact_provider::exact_provider(model_shape shape) : shape_(std::move(shape)), layers_(shape_.layers.size()) {}

void exact_provider::truncate(std::int64_t tokens) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const auto& l = shape_.layers[i];
        const auto keep = [&](std::vector<float>& x, std::int32_t width) {
            x.resize(std::min(x.size(), static_cast<std::size_t>(tokens * l.kv_heads * width)));
        };
        keep(layers_[i].k, l.key_size);
        keep(layers_[i].v, l.value_size);
    }
    size_ = tokens;
}

void exact_provider::begin(std::int64_t first_position, std::int64_t tokens) {
    if (first_position < 0 || first_position > size_)
        throw state_error("The next token must be at position " + std::to_string(size_) + " or before it, not at " + std::to_string(first_position) + ".");
    truncate(first_position);
    pending_ = tokens;
}

void exact_provider::append(std::int32_t layer, const float* k, const float* v) {
    const auto& l = shape_.layers[static_cast<std::size_t>(layer)];
    auto& rows = layers_[static_cast<std::size_t>(layer)];
    rows.k.insert(rows.k.end(), k, k + pending_ * l.kv_heads * l.key_size);
    rows.v.insert(rows.v.end(), v, v + pending_ * l.kv_heads * l.value_size);
}

void exact_provider::attend(std::int32_t layer, const float* q, float* out) {
    const auto at = static_cast<std::size_t>(layer);
    const auto& l = shape_.layers[at];
    for (std::int64_t t = 0; t < pending_; ++t) {
        for (std::int32_t h = 0; h < l.query_heads(); ++h) {
            const auto row = t * l.query_heads() + h;
            attend_head(at, size_ + t, h, q + row * l.key_size, out + row * l.value_size);
        }
    }
}

void exact_provider::attend_head(std::size_t layer, std::int64_t position, std::int32_t query_head, const float* q, float* out) {
    const auto& l = shape_.layers[layer];
    const auto& rows = layers_[l.kv_source < 0 ? layer : static_cast<std::size_t>(l.kv_source)];
    const auto first = l.windowed() ? std::max<std::int64_t>(0, position + 1 - l.sliding_window) : 0;
    const auto head = query_head / l.group;
    weights_.clear();
    double top = -HUGE_VAL;
    for (auto j = first; j <= position; ++j) {
        const float* k = rows.k.data() + (j * l.kv_heads + head) * l.key_size;
        double s = 0;
        for (std::int32_t d = 0; d < l.key_size; ++d) s += static_cast<double>(q[d]) * k[d];
        s *= l.logit_scale();
        if (l.soft_cap > 0) s = l.soft_cap * std::tanh(s / l.soft_cap);
        weights_.push_back(s);
        top = std::max(top, s);
    }
    double total = 0;
    sum_.assign(static_cast<std::size_t>(l.value_size), 0.0);
    for (auto j = first; j <= position; ++j) {
        const double w = std::exp(weights_[static_cast<std::size_t>(j - first)] - top);
        total += w;
        const float* v = rows.v.data() + (j * l.kv_heads + head) * l.value_size;
        for (std::size_t d = 0; d < sum_.size(); ++d) sum_[d] += w * v[d];
    }
    for (std::size_t d = 0; d < sum_.size(); ++d) out[d] = static_cast<float>(sum_[d] / total);
}

void exact_provider::end() { size_ += std::exchange(pending_, 0); }

void exact_provider::cancel() noexcept {
    pending_ = 0;
    truncate(size_);
}

}  // namespace sekv::example
