// Reference-counted pages: the unit of storage, of sharing between forks and of accounting.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "sekv/exec/memory.hpp"

namespace sekv {

/// One page of one tier. Sequences that share history share pages; the bytes are counted once in the cache's ledger.
class page {
public:
    page(buffer bytes, std::uint64_t id) noexcept : bytes_(std::move(bytes)), id_(id) {}
    page(const page&) = delete;
    page& operator=(const page&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return bytes_.data(); }
    template <class T>
    [[nodiscard]] T* as(std::size_t byte_offset = 0) const noexcept {
        return bytes_.as<T>(byte_offset);
    }
    [[nodiscard]] std::size_t size() const noexcept { return bytes_.size(); }
    [[nodiscard]] tier where() const noexcept { return bytes_.where(); }
    /// Unique within its cache and never reused.
    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }

private:
    buffer bytes_;
    std::uint64_t id_;
};

using page_ref = std::shared_ptr<page>;

/// Makes the pages of one cache.
class block_pool {
public:
    explicit block_pool(std::shared_ptr<memory> mem) : memory_(std::move(mem)) {}

    /// Throws budget_error; see memory::allocate.
    [[nodiscard]] page_ref make(tier t, kind k, std::size_t bytes) { return std::make_shared<page>(memory_->allocate(t, k, bytes), next_id_++); }
    [[nodiscard]] memory& budget() const noexcept { return *memory_; }

private:
    std::shared_ptr<memory> memory_;
    std::uint64_t next_id_ = 1;
};

}  // namespace sekv
