// Where a seal's rows come from: exact pages, or what R2 decodes to.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/rows.hpp"
#include "kernels/seal_kernels.hpp"
#include "src/cuda/runtime.hpp"

namespace sekv::cuda {

/// Copies an array that the device can read to the host; synchronises the stream.
template <class T>
[[nodiscard]] std::vector<T> to_host(const T* from, std::int64_t count, stream s) {
    std::vector<T> out(static_cast<std::size_t>(count));
    if (count == 0) return out;
    check(cudaMemcpyAsync(out.data(), from, out.size() * sizeof(T), cudaMemcpyDefault, s), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    return out;
}

/// Blocks without gaps in position.
class block_range {
public:
    /// Throws invalid_argument for none, for a block without tokens or with more than 64, and for gaps.
    template <class Block>
    explicit block_range(const std::vector<Block>& blocks) {
        if (blocks.empty()) throw invalid_argument("A seal needs at least one block.");
        end_ = blocks.front().begin;
        for (const auto& b : blocks) {
            if (b.count < 1 || b.count > block_tokens) throw invalid_argument("A block to seal must have 1 to 64 tokens, not " + std::to_string(b.count) + ".");
            if (b.begin != end_) throw invalid_argument("Blocks to seal must lie without gaps: one begins at position " + std::to_string(b.begin) + " where " + std::to_string(end_) + " was expected.");
            begins_.push_back(b.begin);
            end_ = b.begin + b.count;
        }
    }
    [[nodiscard]] std::int32_t blocks() const noexcept { return static_cast<std::int32_t>(begins_.size()); }
    [[nodiscard]] std::int64_t begin() const noexcept { return begins_.front(); }
    [[nodiscard]] std::int64_t end() const noexcept { return end_; }
    [[nodiscard]] std::int64_t tokens() const noexcept { return end() - begin(); }
    [[nodiscard]] std::int64_t begin_of(std::int32_t block) const noexcept { return begins_[static_cast<std::size_t>(block)]; }
    [[nodiscard]] std::int64_t end_of(std::int32_t block) const noexcept { return block + 1 < blocks() ? begin_of(block + 1) : end_; }
    /// The block that holds a position in range.
    [[nodiscard]] std::int32_t block_at(std::int64_t position) const noexcept {
        return static_cast<std::int32_t>(std::upper_bound(begins_.begin(), begins_.end(), position) - begins_.begin()) - 1;
    }
    [[nodiscard]] std::int64_t last_of(const row_choice& c) const noexcept { return c.origin + static_cast<std::int64_t>(c.rows - 1) * c.stride; }

private:
    std::vector<std::int64_t> begins_;
    std::int64_t end_ = 0;
};

/// Fills workspace rows with chosen tokens.
class seal_source {
public:
    explicit seal_source(block_range blocks) : blocks_(std::move(blocks)) {}
    virtual ~seal_source() = default;
    seal_source(const seal_source&) = delete;
    seal_source& operator=(const seal_source&) = delete;
    [[nodiscard]] const block_range& blocks() const noexcept { return blocks_; }
    /// Rows with null data are not wanted.
    virtual void load(const row_choice& choice, const seal_rows_view& keys, const seal_rows_view& values) const = 0;

private:
    block_range blocks_;
};

/// Rows of exact pages.
class exact_source final : public seal_source {
public:
    exact_source(const layer_layout& layer, const seal_rows& rows, stream s) : seal_source(block_range(to_host(rows.blocks, rows.count, s))), layer_(layer), blocks_(rows.blocks), stream_(s) {}
    void load(const row_choice& c, const seal_rows_view& keys, const seal_rows_view& values) const override {
        const auto first = blocks().block_at(c.origin), last = blocks().block_at(blocks().last_of(c));
        launch_gather(layer_, blocks_ + first, last - first + 1, c, keys, values, stream_);
    }

private:
    const layer_layout& layer_;
    const exact_block* blocks_;
    stream stream_;
};

/// Keys that R2 decodes to, about the epoch's mean. scratch: [heads, capacity, dk] floats.
class decoded_source final : public seal_source {
public:
    decoded_source(const layer_layout& layer, const sequence_view* sequence, const sealed_block* blocks, const std::vector<sealed_block>& copy, std::int32_t first, const head_array& mean, float* scratch,
                   std::int32_t capacity, stream s)
        : seal_source(block_range(copy)), layer_(layer), sequence_(sequence), blocks_(blocks), first_(first), mean_(mean), scratch_(scratch), capacity_(capacity), stream_(s) {}
    void load(const row_choice& c, const seal_rows_view& keys, const seal_rows_view&) const override {
        const auto head_elements = static_cast<std::int64_t>(capacity_) * keys.size;
        const auto last = blocks().block_at(blocks().last_of(c));
        const std::int32_t most = capacity_ / block_tokens;
        for (auto b = blocks().block_at(c.origin); b <= last; b += most) {
            const auto count = std::min(most, last - b + 1);
            reconstruct_step step;
            step.layer = layer_, step.sequence = sequence_, step.first = first_ + b, step.count = count;
            reconstruct_keys(step, scratch_, head_elements, stream_);
            launch_compact(blocks_ + b, count, scratch_, head_elements, c, keys, stream_);
        }
        launch_center(keys, mean_, stream_);
    }

private:
    const layer_layout& layer_;
    const sequence_view* sequence_;
    const sealed_block* blocks_;
    std::int32_t first_;
    head_array mean_;
    float* scratch_;
    std::int32_t capacity_;
    stream stream_;
};

}  // namespace sekv::cuda
