// Random cases of exact prefill attention, run through kernels/rows.hpp, and the same in double.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/rows_world.hpp"
#include "kernels/rows.hpp"

namespace sekv::cuda::prefill_tests {

using rows_tests::array;

struct prefill_case {
    dtype stored = dtype::bf16, query = dtype::bf16;
    std::int32_t dk = 64, dv = 64, kv_heads = 2, group = 2, tokens = 5;
    std::int64_t position = 200;              ///< of the first query
    std::int64_t begin = 0;                   ///< of the first block
    std::vector<std::int32_t> counts = {64};  ///< tokens per block
    std::int32_t window = 0;
    float soft_cap = 0;
    std::vector<std::int32_t> cuts;  ///< blocks before each further call
    std::int32_t query_gap = 0;      ///< elements between the heads of a query tensor
    float spread = 1;                ///< of the logits' standard deviation
    std::uint64_t seed = 1;

    [[nodiscard]] std::string name() const {
        std::string s = "seed " + std::to_string(seed) + ": stored " + std::to_string(static_cast<int>(stored)) + ", queries " +
                        std::to_string(static_cast<int>(query)) + ", sizes " + std::to_string(dk) + " " + std::to_string(dv) + ", " + std::to_string(kv_heads) +
                        " heads x " + std::to_string(group) + ", " + std::to_string(tokens) + " tokens at " + std::to_string(position) + ", window " +
                        std::to_string(window) + ", cap " + std::to_string(soft_cap) + ", gap " + std::to_string(query_gap) + ", blocks from " +
                        std::to_string(begin) + ":";
        for (const auto c : counts) s += " " + std::to_string(c);
        return s;
    }
};

struct prefill_result {
    std::vector<float> out, lse;  ///< [rows, query_heads, dv], [rows, query_heads]
};

inline constexpr std::int32_t rows_before = 2, rows_after = 3;  ///< of other items of the batch: stay empty

/// Rounds to what an element of `type` holds, and appends its bytes.
inline float append_element(std::vector<std::byte>& bytes, dtype type, float x) {
    const auto put = [&](const auto& v) {
        const auto at = bytes.size();
        bytes.resize(at + sizeof v);
        std::memcpy(bytes.data() + at, &v, sizeof v);
    };
    if (type == dtype::f32) return put(x), x;
    if (type == dtype::f16) {
        const fp16 h(x);
        return put(h), static_cast<float>(h);
    }
    const bf16 b(x);
    return put(b), static_cast<float>(b);
}

inline float rounded(dtype type, float x) {
    std::vector<std::byte> bytes;
    return append_element(bytes, type, x);
}

class prefill_problem {
public:
    explicit prefill_problem(const prefill_case& c) : c_(c), random_(c.seed * 7919 + 17) {
        layer_.kv_heads = c.kv_heads, layer_.group = c.group, layer_.key_size = c.dk, layer_.value_size = c.dv;
        layer_.scale = c.spread / std::sqrt(static_cast<float>(c.dk)), layer_.soft_cap = c.soft_cap, layer_.window = c.window, layer_.stored = c.stored;
        page_.first = 48;  // neither the first byte nor packed
        page_.stride = static_cast<std::uint64_t>((c.dk + c.dv) * block_tokens * 2 + 32);
        make_queries();
        auto at = c.begin;
        for (const auto count : c.counts) make_block(at, count), at += count;
        device_blocks_ = std::make_unique<array<exact_block>>(blocks_);
    }

    /// Through the kernels, in calls that `cuts` separate.
    [[nodiscard]] prefill_result run(const std::vector<std::int32_t>& cuts) const {
        const auto rows = rows_before + c_.tokens + rows_after, heads = c_.kv_heads * c_.group;
        const auto count = static_cast<std::size_t>(rows * heads), dv = static_cast<std::size_t>(c_.dv);
        array<float> max(count), weight(count), sums(count * dv), out(count * dv), lse(count);
        const prefill_state state{max.get(), weight.get(), sums.get()};
        prefill_begin(state, rows, heads, c_.dv, nullptr);
        prefill_step step{layer_, page_, nullptr, 0, c_.position, c_.tokens, rows_before, {}, state};
        step.queries = {queries_->get(), c_.query, token_stride(), head_elements()};
        std::int32_t first = 0;
        for (std::size_t i = 0; i <= cuts.size(); ++i) {
            const auto last = i < cuts.size() ? cuts[i] : static_cast<std::int32_t>(blocks_.size());
            step.blocks = device_blocks_->get() + first, step.block_count = last - first;
            prefill_attend(step, nullptr);
            first = last;
        }
        prefill_end(state, rows, heads, c_.dv, {out.get(), heads * static_cast<std::int64_t>(dv), c_.dv}, lse.get(), nullptr);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        return {out.read(), lse.read()};
    }

    /// Compares with double. Tolerance: kernels/prefill.cu's.
    void check(const prefill_result& got) const {
        const auto heads = c_.kv_heads * c_.group, rows = rows_before + c_.tokens + rows_after;
        for (std::int32_t row = 0; row < rows && !testing::Test::HasFailure(); ++row) {
            for (std::int32_t h = 0; h < heads; ++h) check_row(got, row, h);
        }
    }

private:
    [[nodiscard]] std::int64_t head_elements() const { return c_.dk + c_.query_gap; }
    [[nodiscard]] std::int64_t token_stride() const { return head_elements() * c_.kv_heads * c_.group + c_.query_gap; }
    float normal() { return std::normal_distribution<float>()(random_); }

    void make_queries() {
        std::vector<std::byte> bytes;
        const auto rows = rows_before + c_.tokens;
        const auto elements = rows * token_stride();
        for (std::int64_t i = 0; i < elements; ++i) query_rows_.push_back(rounded(c_.stored, append_element(bytes, c_.query, normal())));
        queries_ = std::make_unique<array<std::byte>>(bytes);
    }

    void make_block(std::int64_t begin, std::int32_t count) {
        const auto dk = static_cast<std::size_t>(c_.dk), dv = static_cast<std::size_t>(c_.dv), heads = static_cast<std::size_t>(c_.kv_heads),
                   n = static_cast<std::size_t>(count);
        std::vector<std::byte> bytes(page_.first + heads * page_.stride, std::byte{0xff});  // NaN
        for (std::size_t h = 0; h < heads; ++h) {
            std::vector<float> k(n * dk), v(n * dv);
            for (std::size_t t = 0; t < n; ++t) {
                for (std::size_t j = 0; j < dk; ++j) k[t * dk + j] = place(bytes, h, j * block_tokens + t);
                for (std::size_t j = 0; j < dv; ++j) v[t * dv + j] = place(bytes, h, (dk * block_tokens) + t * dv + j);
            }
            keys_.push_back(std::move(k)), values_.push_back(std::move(v));
        }
        const bool pinned = blocks_.size() % 3 == 1;
        pages_.push_back(std::make_unique<array<std::byte>>(bytes, pinned));
        const bool seen = count > 0 && begin < c_.position + c_.tokens && (c_.window == 0 || begin + count > c_.position + 1 - c_.window);
        blocks_.push_back({seen ? pages_.back()->get() : nullptr, begin, count, 0});  // null: reading what no query sees faults
    }

    float place(std::vector<std::byte>& page, std::size_t head, std::size_t element) {
        std::vector<std::byte> bytes;
        const float x = append_element(bytes, c_.stored, normal());
        std::memcpy(page.data() + page_.first + head * page_.stride + element * 2, bytes.data(), 2);
        return x;
    }

    void check_row(const prefill_result& got, std::int32_t row, std::int32_t query_head) const {
        const auto dk = static_cast<std::size_t>(c_.dk), dv = static_cast<std::size_t>(c_.dv);
        const bool mine = row >= rows_before && row < rows_before + c_.tokens;
        const auto q_position = c_.position + row - rows_before;
        const auto head = static_cast<std::size_t>(query_head / c_.group);
        std::vector<double> sums(dv, 0.0);
        double most = -std::numeric_limits<double>::infinity(), weight = 0, largest = 0, product = 0;
        for (std::size_t b = 0; mine && b < blocks_.size(); ++b) {
            const auto& k = keys_[b * static_cast<std::size_t>(c_.kv_heads) + head];
            const auto& v = values_[b * static_cast<std::size_t>(c_.kv_heads) + head];
            for (std::size_t t = 0; t < static_cast<std::size_t>(blocks_[b].count); ++t) {
                const auto p = blocks_[b].begin + static_cast<std::int64_t>(t);
                if (p > q_position || (c_.window > 0 && p <= q_position - c_.window)) continue;
                double x = 0, sum_of_sizes = 0;
                for (std::size_t j = 0; j < dk; ++j) {
                    const double y = static_cast<double>(query_rows_[static_cast<std::size_t>(row * token_stride() + query_head * head_elements()) + j]) *
                                     static_cast<double>(k[t * dk + j]);
                    x += y, sum_of_sizes += std::abs(y);
                }
                x *= static_cast<double>(layer_.scale), product = std::max(product, sum_of_sizes * static_cast<double>(layer_.scale));
                if (c_.soft_cap > 0) x = static_cast<double>(c_.soft_cap) * std::tanh(x / static_cast<double>(c_.soft_cap));
                const double next = std::max(most, x), shrink = std::exp(most - next), w = std::exp(x - next);
                weight = weight * shrink + w, most = next;
                for (std::size_t j = 0; j < dv; ++j) {
                    sums[j] = sums[j] * shrink + w * static_cast<double>(v[t * dv + j]);
                    largest = std::max(largest, std::abs(static_cast<double>(v[t * dv + j])));
                }
            }
        }
        const auto at = static_cast<std::size_t>(row * c_.kv_heads * c_.group + query_head);
        const double logit_error = 1e-5 * (1 + product);
        ASSERT_TRUE(weight > 0 ? std::abs(got.lse[at] - (most + std::log(weight))) <= logit_error : got.lse[at] == -std::numeric_limits<float>::infinity())
            << c_.name() << "\nrow " << row << " head " << query_head << ": lse " << got.lse[at] << ", should be " << most + std::log(weight);
        const double tolerance = weight > 0 ? ((c_.stored == dtype::f16 ? 0x1p-11 : 0x1p-8) + 2 * logit_error) * largest : 0.0;
        for (std::size_t j = 0; j < dv; ++j) {
            const double expected = weight > 0 ? sums[j] / weight : 0.0;
            ASSERT_LE(std::abs(static_cast<double>(got.out[at * dv + j]) - expected), tolerance)
                << c_.name() << "\nrow " << row << " head " << query_head << " element " << j << ": should be " << expected;
        }
    }

    prefill_case c_;
    std::mt19937_64 random_;
    layer_layout layer_;
    head_stride page_;
    std::vector<float> query_rows_;  ///< as stored, strided like the tensor
    std::unique_ptr<array<std::byte>> queries_;
    std::vector<std::vector<float>> keys_, values_;  ///< per block and KV head, token-major
    std::vector<std::unique_ptr<array<std::byte>>> pages_;
    std::vector<exact_block> blocks_;
    std::unique_ptr<array<exact_block>> device_blocks_;
};

inline prefill_result check_case(const prefill_case& c) {
    const prefill_problem problem(c);
    auto result = problem.run(c.cuts);
    problem.check(result);
    return result;
}

}  // namespace sekv::cuda::prefill_tests
