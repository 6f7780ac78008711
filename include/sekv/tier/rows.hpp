// Exact rows of K and V: the tail (sinks, window, unsealed blocks) on the device, and raw blocks on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sekv/core/scalar.hpp"
#include "sekv/core/shape.hpp"
#include "sekv/exec/sketch_ops.hpp"
#include "sekv/tier/block_pool.hpp"

namespace sekv {

/// Where the rows of each (layer, KV head) lie in a page: [keys: key_size x capacity][values: capacity x value_size], for the layers of one
/// class (whole-context or sliding-window), so that a class can be dropped without the other. Keys are transposed: a query's logits are then
/// sums of rows, without sums across lanes.
class row_layout {
public:
    row_layout(const model_shape& model, bool windowed, std::size_t element, std::int32_t capacity) : element_(element), capacity_(capacity) {
        for (const auto& l : model.layers) {
            const bool held = l.kv_source < 0 && l.windowed() == windowed;
            layers_.push_back({bytes_, l.key_size, l.value_size, held});
            if (held) bytes_ += static_cast<std::size_t>(capacity) * kv_row_bytes(l, element);
        }
    }
    [[nodiscard]] bool holds(std::int32_t layer) const noexcept { return at(layer).held; }
    [[nodiscard]] std::size_t page_bytes() const noexcept { return bytes_; }
    [[nodiscard]] std::int32_t capacity() const noexcept { return capacity_; }

    [[nodiscard]] std::byte* keys(const page& p, std::int32_t layer, std::int32_t head) const noexcept { return p.data() + head_offset(layer, head); }
    [[nodiscard]] std::byte* values(const page& p, std::int32_t layer, std::int32_t head) const noexcept {
        return keys(p, layer, head) + static_cast<std::size_t>(capacity_ * at(layer).key_size) * element_;
    }

private:
    struct entry {
        std::size_t offset;
        std::int32_t key_size, value_size;
        bool held;
    };
    [[nodiscard]] const entry& at(std::int32_t layer) const noexcept { return layers_[static_cast<std::size_t>(layer)]; }
    [[nodiscard]] std::size_t head_offset(std::int32_t layer, std::int32_t head) const noexcept {
        const auto& e = at(layer);
        return e.offset + static_cast<std::size_t>(head) * static_cast<std::size_t>(capacity_ * (e.key_size + e.value_size)) * element_;
    }
    std::vector<entry> layers_;
    std::size_t bytes_ = 0;
    std::size_t element_;
    std::int32_t capacity_;
};

/// A run of positions in one page. `count` rows are reserved or written; a page holds up to 64.
struct row_block {
    std::int64_t begin = 0;
    std::int32_t count = 0;
    page_ref rows;

    [[nodiscard]] std::int64_t end() const noexcept { return begin + count; }
};

/// The blocks of one layer class, in order of position, without gaps.
class row_list {
public:
    [[nodiscard]] const std::vector<row_block>& blocks() const noexcept { return blocks_; }
    [[nodiscard]] std::vector<row_block>& blocks() noexcept { return blocks_; }
    [[nodiscard]] bool empty() const noexcept { return blocks_.empty(); }

    /// Index of the block that holds `position`; blocks().size() when none does.
    [[nodiscard]] std::size_t find(std::int64_t position) const noexcept {
        const auto it = std::upper_bound(blocks_.begin(), blocks_.end(), position, [](std::int64_t p, const row_block& b) { return p < b.end(); });
        return it != blocks_.end() && it->begin <= position ? static_cast<std::size_t>(it - blocks_.begin()) : blocks_.size();
    }
    void drop_front(std::size_t count) noexcept { blocks_.erase(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(count)); }
    /// Forgets the rows from `length` on.
    void truncate(std::int64_t length) noexcept {
        while (!blocks_.empty() && blocks_.back().begin >= length) blocks_.pop_back();
        if (!blocks_.empty() && blocks_.back().end() > length) blocks_.back().count = static_cast<std::int32_t>(length - blocks_.back().begin);
    }
    [[nodiscard]] std::uint64_t bytes(tier t) const noexcept {
        std::uint64_t sum = 0;
        for (const auto& b : blocks_) {
            if (b.rows->where() == t) sum += b.rows->size();
        }
        return sum;
    }

private:
    std::vector<row_block> blocks_;
};

}  // namespace sekv
