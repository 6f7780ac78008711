// The opponent: decode attention over a full bf16 KV cache, as fast as this machine's memory allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "sekv/core/scalar.hpp"
#include "sekv/exec/executor.hpp"

namespace sekv::bench {

struct free_aligned {
    void operator()(void* p) const noexcept;
};
template <class T>
using huge_buffer = std::unique_ptr<T[], free_aligned>;

/// `bytes` of zeroed memory on huge pages where the system grants them. Throws std::bad_alloc.
[[nodiscard]] void* allocate_huge_bytes(std::size_t bytes);

template <class T>
[[nodiscard]] huge_buffer<T> allocate_huge(std::size_t count) {
    return huge_buffer<T>(static_cast<T*>(allocate_huge_bytes(count * sizeof(T))));
}

/// One layer's full cache in bf16, every head one stream of memory: V as [n, d]; K transposed in blocks of `block` tokens,
/// [n / block, d, block], which spares the sums across lanes that rows of keys would need.
/// Flash decoding (Dao et al. 2023): token ranges in parallel, online softmax per block, merged by log-sum-exp; the
/// group's queries share every element that is read. The kernel is the library's own host::row_accumulate.
class full_kv_attention {
public:
    full_kv_attention(std::int32_t kv_heads, std::int32_t group, std::int32_t d, std::int64_t n);

    /// Fills K and V with values uniform in [-1, 1).
    void fill(std::uint64_t seed);
    /// q and out: [kv_heads * group, d]; logits are scaled by 1 / sqrt(d). Not reentrant.
    void attend(const float* q, float* out, executor& threads);
    /// Bytes of K and V of the n tokens, which a call of attend reads once.
    [[nodiscard]] std::size_t bytes() const noexcept;

    /// Compares small caches of several shapes with attention computed in double; throws std::runtime_error when they
    /// differ. Benchmarks call it first.
    static void self_check(executor& threads);

private:
    static constexpr std::int64_t block = 128;  // tokens: 32 KiB of K at d = 128, and their logits, fit in L1

    struct range {
        std::int64_t head;
        std::int64_t begin;
        std::int64_t end;
    };
    /// The softmax of one range for one group: maxima[g], sums[g] and unnormalised outputs [group, d].
    struct partial {
        float* maxima;
        float* sums;
        float* outputs;
    };

    void split(std::int32_t workers);
    [[nodiscard]] partial partial_of(std::int64_t index);
    void attend_range(const range& r, partial p, float* logits) const;
    void merge(std::int64_t head, float* out);
    [[nodiscard]] bf16& key(std::int64_t head, std::int64_t token, std::int64_t column) const noexcept;
    [[nodiscard]] double largest_error(const float* q, const float* out) const;

    std::int32_t kv_heads_;
    std::int32_t group_;
    std::int32_t d_;
    std::int64_t n_;
    std::int64_t padded_n_;  // whole blocks
    huge_buffer<bf16> keys_;
    huge_buffer<bf16> values_;
    std::int64_t ranges_per_head_ = 0;
    std::vector<range> ranges_;
    std::vector<float> queries_;
    std::vector<float> partials_;
    std::vector<float> logits_;
};

}  // namespace sekv::bench
