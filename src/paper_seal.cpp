// The paper preset's encoding: exact rows, weighted means with routing keys, and factors of one KV head.
#include <cmath>
#include <cstring>

#include "sekv/attend/paper.hpp"
#include "sekv/exec/row_ops.hpp"

namespace sekv {
namespace {

constexpr auto route_size = paper_weights::route_size;

void store(const float* row, std::int32_t size, dtype type, std::byte* to) {
    const auto n = static_cast<std::size_t>(size);
    switch (type) {
        case dtype::f32:
            host::from_float(row, n, reinterpret_cast<float*>(to));
            break;
        case dtype::f16:
            host::from_float(row, n, reinterpret_cast<fp16*>(to));
            break;
        case dtype::bf16:
            host::from_float(row, n, reinterpret_cast<bf16*>(to));
            break;
    }
}

// sum_i weights[i] rows[i], weights summing to 1.
std::vector<float> weighted_mean(const std::vector<double>& weights, const float* rows, std::int32_t size) {
    std::vector<double> sum(static_cast<std::size_t>(size), 0.0);
    for (std::size_t i = 0; i < weights.size(); ++i) {
        const float* row = rows + i * sum.size();
        for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += weights[i] * static_cast<double>(row[j]);
    }
    std::vector<float> mean(sum.size());
    for (std::size_t j = 0; j < sum.size(); ++j) mean[j] = static_cast<float>(sum[j]);
    return mean;
}

// Surprisal shares of a span's own tokens, even where there is no surprisal. Under key novelty the signal is no surprisal.
std::vector<double> mean_weights(const segmenter& spans, std::int64_t begin, const std::int32_t* offsets, std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    std::vector<double> weights(n, 1.0 / static_cast<double>(count));
    if (spans.options().policy == span_policy::key_novelty || begin + offsets[count - 1] >= spans.length()) return weights;
    double sum = 0.0;
    for (std::size_t i = 0; i < n; ++i) sum += static_cast<double>(spans.signal(begin + offsets[i]));
    for (std::size_t i = 0; i < n && sum > 0.0; ++i) weights[i] = static_cast<double>(spans.signal(begin + offsets[i])) / sum;
    return weights;
}

// Drops the rows that lie between a span's own tokens.
void compact(const std::int32_t* offsets, std::int64_t count, std::int32_t size, std::vector<float>& rows) {
    for (std::int64_t i = 0; i < count; ++i) {
        const auto from = offsets[i] - offsets[0];
        if (from != i) std::memcpy(rows.data() + i * size, rows.data() + from * size, static_cast<std::size_t>(size) * sizeof(float));
    }
}

}  // namespace

void paper_codec::encode_exact(const unit& u, const row_reader& rows, std::int32_t index) const {
    const auto& head = heads_[static_cast<std::size_t>(index)];
    const auto v = view(u.payload, index);
    std::vector<float> key(static_cast<std::size_t>(head.key_size)), value(static_cast<std::size_t>(head.value_size));
    for (std::int32_t i = 0; i < u.payload.exact_rows; ++i) {
        rows.read(head.layer, head.head, {u.begin + v.exact_offsets[i], 1}, key.data(), value.data());
        store(key.data(), head.key_size, stored_, v.exact_keys + static_cast<std::size_t>(i) * key.size() * size_of(stored_));
        store(value.data(), head.value_size, stored_, v.exact_values + static_cast<std::size_t>(i) * value.size() * size_of(stored_));
    }
}

void paper_codec::encode_span(const unit& u, std::int32_t span, const row_reader& rows, const segmenter& spans, std::int32_t index) const {
    const auto& head = heads_[static_cast<std::size_t>(index)];
    const auto v = view(u.payload, index);
    const auto f = factors(v, span, index);
    const auto count = f.keys.count;
    const auto rank = f.keys.rank;
    const token_range range{u.begin + f.offsets[0], f.offsets[count - 1] - f.offsets[0] + 1};
    std::vector<float> keys(static_cast<std::size_t>(range.count * head.key_size)), values(static_cast<std::size_t>(range.count * head.value_size));
    rows.read(head.layer, head.head, range, keys.data(), values.data());
    compact(f.offsets, count, head.key_size, keys);
    compact(f.offsets, count, head.value_size, values);

    auto* scales = reinterpret_cast<float*>(factors_at(v, span, index));
    auto* left = reinterpret_cast<fp16*>(scales + 2);
    auto* right = left + 2 * count * rank;
    scales[0] = fit_svd(keys.data(), count, head.key_size, rank, left, right);
    scales[1] = fit_svd(values.data(), count, head.value_size, rank, left + count * rank, right + rank * head.key_size);
    const auto summary = span - (u.payload.factored() - u.payload.spans);
    if (summary >= 0) summarise(u, summary, mean_weights(spans, u.begin, f.offsets, count), keys.data(), values.data(), index);
}

void paper_codec::summarise(const unit& u, std::int32_t summary, const std::vector<double>& weights, const float* keys, const float* values,
                            std::int32_t index) const {
    const auto& head = heads_[static_cast<std::size_t>(index)];
    const auto v = view(u.payload, index);
    const auto at = static_cast<std::size_t>(summary) * size_of(stored_);
    const auto key = weighted_mean(weights, keys, head.key_size);
    store(key.data(), head.key_size, stored_, v.mean_keys + at * key.size());
    const auto value = weighted_mean(weights, values, head.value_size);
    store(value.data(), head.value_size, stored_, v.mean_values + at * value.size());

    const auto& w = router_->layers[static_cast<std::size_t>(head.layer)].weight;
    std::vector<double> route(route_size, 0.0);
    double squares = 0.0;
    for (std::size_t r = 0; r < route.size(); ++r) {
        for (std::size_t j = 0; j < key.size(); ++j) route[r] += static_cast<double>(w[r * key.size() + j]) * static_cast<double>(key[j]);
        squares += route[r] * route[r];
    }
    const double norm = squares > 0.0 ? 1.0 / std::sqrt(squares) : 0.0;
    for (std::size_t r = 0; r < route.size(); ++r) v.routes[static_cast<std::size_t>(summary) * route.size() + r] = fp16(static_cast<float>(route[r] * norm));
}

}  // namespace sekv
