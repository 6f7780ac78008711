#include "full_kv.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "sekv/exec/row_ops.hpp"

namespace sekv::bench {
namespace {

constexpr std::int64_t ranges_per_worker = 8;  // so that a worker that starts late costs little
constexpr std::int64_t fewest_tokens = 512;    // of a range; below, the merge would show

/// splitmix64 (Steele et al. 2014).
std::uint64_t next_random(std::uint64_t& state) {
    auto z = (state += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
}

float uniform(std::uint64_t& state) { return static_cast<float>(next_random(state) >> 40) * 0x1p-23F - 1.0F; }

std::size_t offset(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

void free_aligned::operator()(void* p) const noexcept { std::free(p); }

void* allocate_huge_bytes(std::size_t bytes) {
    constexpr std::size_t page = std::size_t{2} << 20;
    const auto rounded = (std::max<std::size_t>(bytes, 1) + page - 1) / page * page;
    void* const p = std::aligned_alloc(page, rounded);
    if (p == nullptr) throw std::bad_alloc();
    (void)madvise(p, rounded, MADV_HUGEPAGE);  // refused: ordinary pages serve as well, only slower
    std::memset(p, 0, rounded);
    return p;
}

full_kv_attention::full_kv_attention(std::int32_t kv_heads, std::int32_t group, std::int32_t d, std::int64_t n)
    : kv_heads_(kv_heads),
      group_(group),
      d_(d),
      n_(n),
      padded_n_((n + block - 1) / block * block),
      keys_(allocate_huge<bf16>(offset(padded_n_ * kv_heads * d))),
      values_(allocate_huge<bf16>(offset(n * kv_heads * d))),
      queries_(offset(std::int64_t{kv_heads} * group * d)) {}

bf16& full_kv_attention::key(std::int64_t head, std::int64_t token, std::int64_t column) const noexcept {
    return keys_[offset((head * padded_n_ + token / block * block) * d_ + column * block + token % block)];
}

void full_kv_attention::fill(std::uint64_t seed) {
    for (std::int64_t i = 0; i < padded_n_ * kv_heads_ * d_; ++i) keys_[offset(i)] = bf16(uniform(seed));
    for (std::int64_t i = 0; i < n_ * kv_heads_ * d_; ++i) values_[offset(i)] = bf16(uniform(seed));
}

std::size_t full_kv_attention::bytes() const noexcept { return 2 * sizeof(bf16) * static_cast<std::size_t>(n_ * kv_heads_ * d_); }

/// Cuts every head's tokens into equal ranges, enough of them to keep all workers busy to the end.
void full_kv_attention::split(std::int32_t workers) {
    const auto wanted = workers == 1 ? 1 : (workers * ranges_per_worker + kv_heads_ - 1) / kv_heads_;
    const auto count = std::clamp<std::int64_t>(n_ / fewest_tokens, 1, wanted);
    const auto length = ((n_ + count - 1) / count + block - 1) / block * block;
    ranges_.clear();
    for (std::int64_t head = 0; head < kv_heads_; ++head) {
        for (std::int64_t begin = 0; begin < n_; begin += length) ranges_.push_back({head, begin, std::min(n_, begin + length)});
    }
    ranges_per_head_ = static_cast<std::int64_t>(ranges_.size()) / kv_heads_;
    partials_.resize(ranges_.size() * offset(std::int64_t{group_} * (d_ + 2)));
    logits_.resize(offset(std::int64_t{workers} * group_ * block));
}

full_kv_attention::partial full_kv_attention::partial_of(std::int64_t index) {
    auto* const p = partials_.data() + index * group_ * (d_ + 2);
    return {p, p + group_, p + 2 * group_};
}

void full_kv_attention::attend_range(const range& r, partial p, float* logits) const {
    std::fill_n(p.maxima, group_, -std::numeric_limits<float>::infinity());
    std::fill_n(p.sums, group_ * (d_ + 1), 0.0F);
    const auto* const q = queries_.data() + r.head * group_ * d_;
    for (auto t = r.begin; t < r.end; t += block) {
        const auto count = std::min(block, r.end - t);
        std::fill_n(logits, group_ * block, 0.0F);
        host::row_accumulate(keys_.get() + (r.head * padded_n_ + t) * d_, d_, block, q, d_, group_, logits);
        for (std::int32_t g = 0; g < group_; ++g) {
            auto* const row = logits + g * block;
            const auto top = host::max_of(row, count);
            if (top > p.maxima[g]) {
                const auto fade = std::exp(p.maxima[g] - top);
                p.maxima[g] = top;
                p.sums[g] *= fade;
                host::scale(p.outputs + g * d_, d_, fade);
            }
            p.sums[g] += host::exp_sum(row, count, p.maxima[g]);
        }
        host::row_accumulate(values_.get() + (r.head * n_ + t) * d_, count, d_, logits, block, group_, p.outputs);
    }
}

void full_kv_attention::merge(std::int64_t head, float* out) {
    for (std::int32_t g = 0; g < group_; ++g) {
        auto top = -std::numeric_limits<float>::infinity();
        for (std::int64_t i = 0; i < ranges_per_head_; ++i) top = std::max(top, partial_of(head * ranges_per_head_ + i).maxima[g]);
        auto* const row = out + (head * group_ + g) * d_;
        std::fill_n(row, d_, 0.0F);
        float sum = 0.0F;
        for (std::int64_t i = 0; i < ranges_per_head_; ++i) {
            const auto p = partial_of(head * ranges_per_head_ + i);
            const auto weight = std::exp(p.maxima[g] - top);
            sum += weight * p.sums[g];
            for (std::int32_t j = 0; j < d_; ++j) row[j] += weight * p.outputs[g * d_ + j];
        }
        host::scale(row, d_, 1.0F / sum);
    }
}

void full_kv_attention::attend(const float* q, float* out, executor& threads) {
    split(threads.workers());
    std::copy_n(q, queries_.size(), queries_.data());
    host::scale(queries_.data(), static_cast<std::int64_t>(queries_.size()), 1.0F / std::sqrt(static_cast<float>(d_)));
    threads.run(static_cast<std::int64_t>(ranges_.size()),
                [&](std::int64_t i, std::int32_t worker) { attend_range(ranges_[offset(i)], partial_of(i), logits_.data() + worker * group_ * block); });
    threads.run(kv_heads_, [&](std::int64_t head, std::int32_t) { merge(head, out); });
}

/// Largest |out - attention in double| over all heads.
double full_kv_attention::largest_error(const float* q, const float* out) const {
    double worst = 0.0;
    std::vector<double> weights(offset(n_));
    for (std::int64_t h = 0; h < std::int64_t{kv_heads_} * group_; ++h) {
        const auto* const values = values_.get() + h / group_ * n_ * d_;
        double top = -std::numeric_limits<double>::infinity(), sum = 0.0;
        for (std::int64_t t = 0; t < n_; ++t) {
            double dot = 0.0;
            for (std::int32_t j = 0; j < d_; ++j) dot += static_cast<double>(q[h * d_ + j]) * static_cast<double>(static_cast<float>(key(h / group_, t, j)));
            weights[offset(t)] = dot / std::sqrt(static_cast<double>(d_));
            top = std::max(top, weights[offset(t)]);
        }
        for (auto& w : weights) sum += w = std::exp(w - top);
        for (std::int32_t j = 0; j < d_; ++j) {
            double expected = 0.0;
            for (std::int64_t t = 0; t < n_; ++t) expected += weights[offset(t)] * static_cast<double>(static_cast<float>(values[t * d_ + j]));
            worst = std::max(worst, std::abs(expected / sum - static_cast<double>(out[h * d_ + j])));
        }
    }
    return worst;
}

void full_kv_attention::self_check(executor& threads) {
    struct shape {
        std::int32_t kv_heads, group, d;
        std::int64_t n;
    };
    for (const auto& s : {shape{1, 4, 128, 5000}, shape{3, 3, 64, 1}, shape{2, 8, 80, 1999}, shape{8, 4, 128, 700}, shape{1, 1, 256, 2048}}) {
        full_kv_attention cache(s.kv_heads, s.group, s.d, s.n);
        cache.fill(7);
        std::uint64_t seed = 11;
        std::vector<float> q(offset(std::int64_t{s.kv_heads} * s.group * s.d)), out(q.size());
        for (auto& x : q) x = 8.0F * uniform(seed);
        cache.attend(q.data(), out.data(), threads);
        const auto error = cache.largest_error(q.data(), out.data());
        if (!(error < 2e-5)) throw std::runtime_error("full_kv_attention differs from attention in double by " + std::to_string(error) + ".");
    }
}

}  // namespace sekv::bench
