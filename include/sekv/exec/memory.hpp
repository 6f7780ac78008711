// Where bytes live, who provides them, and the ledger that counts every one of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "sekv/core/error.hpp"

namespace sekv {

/// A tier of memory. On the host backend both are DRAM: the device tier is the hot, budgeted part.
enum class tier : std::uint8_t { device, host };
inline constexpr std::size_t tier_count = 2;

/// What bytes are used for; usage is reported by tier and kind.
enum class kind : std::uint8_t {
    exact,       ///< raw rows of K and V: sinks, window, unsealed blocks (device); raw rows kept on the host
    sketch,      ///< R1 token codes, or the paper preset's span summaries
    basis,       ///< bases, means, steps; their encoders on the host
    lines,       ///< R2 token codes, or the paper preset's SVD factors
    line_cache,  ///< device copies of lines, with tags
    statistics,  ///< query moments, surprisal
    workspace,   ///< scratch of plans and of sealing
    tables,      ///< what a device backend's kernels read of a sequence: where its blocks lie
};
inline constexpr std::size_t kind_count = 8;
[[nodiscard]] const char* name_of(tier t) noexcept;
[[nodiscard]] const char* name_of(kind k) noexcept;

/// Provides raw memory. Inject one to place tiers in an engine's own pools. Functions may be called from the
/// thread that calls the cache only. allocate returns nullptr or throws std::bad_alloc when it has nothing.
class memory_resource {
public:
    memory_resource() = default;
    memory_resource(const memory_resource&) = delete;
    memory_resource& operator=(const memory_resource&) = delete;
    virtual ~memory_resource() = default;
    virtual void* allocate(tier t, std::size_t bytes, std::size_t alignment) = 0;
    virtual void deallocate(tier t, void* p, std::size_t bytes, std::size_t alignment) noexcept = 0;

    // What the host can't do by itself where the device tier is another memory; in order with the backend's other work.
    virtual void zero(tier t, void* p, std::size_t bytes);
    virtual void copy(void* to, tier to_tier, const void* from, tier from_tier, std::size_t bytes);
    /// `rows` runs of `width` bytes, their starts `pitch` bytes apart.
    virtual void copy_rows(void* to, tier to_tier, std::size_t to_pitch, const void* from, tier from_tier, std::size_t from_pitch, std::size_t width, std::size_t rows);
};

/// The C++ heap, for both tiers.
[[nodiscard]] std::shared_ptr<memory_resource> make_heap_resource();

/// Bytes in use, by tier and kind.
struct usage {
    std::array<std::array<std::uint64_t, kind_count>, tier_count> bytes{};

    [[nodiscard]] std::uint64_t& at(tier t, kind k) noexcept { return bytes[static_cast<std::size_t>(t)][static_cast<std::size_t>(k)]; }
    [[nodiscard]] std::uint64_t at(tier t, kind k) const noexcept { return bytes[static_cast<std::size_t>(t)][static_cast<std::size_t>(k)]; }
    [[nodiscard]] std::uint64_t total(tier t) const noexcept {
        std::uint64_t sum = 0;
        for (const auto b : bytes[static_cast<std::size_t>(t)]) sum += b;
        return sum;
    }
    bool operator==(const usage&) const = default;
};

/// Bytes that a call will add to each tier, for the check that precedes it.
struct demand {
    std::uint64_t device = 0;
    std::uint64_t host = 0;
    demand& operator+=(const demand& o) noexcept {
        device += o.device;
        host += o.host;
        return *this;
    }
};

class memory;

/// One counted allocation, zero-filled, 64-byte aligned, padded so that 64 bytes past its end may be read. Movable.
class buffer {
public:
    static constexpr std::size_t alignment = 64;
    static constexpr std::size_t padding = 64;
    buffer() = default;
    buffer(buffer&& o) noexcept { swap(o); }
    buffer& operator=(buffer&& o) noexcept {
        buffer(std::move(o)).swap(*this);
        return *this;
    }
    ~buffer();

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    template <class T>
    [[nodiscard]] T* as(std::size_t byte_offset = 0) const noexcept {
        return reinterpret_cast<T*>(data_ + byte_offset);
    }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] tier where() const noexcept { return tier_; }

private:
    friend class memory;
    void swap(buffer& o) noexcept {
        std::swap(owner_, o.owner_);
        std::swap(data_, o.data_);
        std::swap(size_, o.size_);
        std::swap(tier_, o.tier_);
        std::swap(kind_, o.kind_);
    }
    std::shared_ptr<memory> owner_;
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    tier tier_ = tier::host;
    kind kind_ = kind::exact;
};

/// The memory of one cache: a resource, a hard limit per tier, and the ledger. Not thread-safe: one caller at a time.
class memory : public std::enable_shared_from_this<memory> {
public:
    static constexpr std::uint64_t unlimited = ~std::uint64_t{0};

    memory(std::shared_ptr<memory_resource> resource, std::uint64_t device_limit, std::uint64_t host_limit)
        : resource_(std::move(resource)), limits_{device_limit, host_limit} {}

    /// Throws budget_error when the limit, or the resource itself, can't give the bytes.
    [[nodiscard]] buffer allocate(tier t, kind k, std::size_t bytes);
    [[nodiscard]] memory_resource& resource() const noexcept { return *resource_; }
    /// Throws budget_error if `need` doesn't fit beside what is in use now, `freed` of which will be given back first.
    void require(const demand& need, const char* purpose, const demand& freed = {}) const;
    [[nodiscard]] std::uint64_t available(tier t) const noexcept { return limit(t) - used_.total(t); }
    [[nodiscard]] std::uint64_t limit(tier t) const noexcept { return limits_[static_cast<std::size_t>(t)]; }
    [[nodiscard]] const usage& used() const noexcept { return used_; }
    /// The most bytes that were in use at once.
    [[nodiscard]] std::uint64_t peak(tier t) const noexcept { return peak_[static_cast<std::size_t>(t)]; }

private:
    friend class buffer;
    std::shared_ptr<memory_resource> resource_;
    std::array<std::uint64_t, tier_count> limits_;
    usage used_;
    std::array<std::uint64_t, tier_count> peak_{};
};

}  // namespace sekv
