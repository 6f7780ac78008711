#include "sekv/exec/memory.hpp"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <string>

namespace sekv {

const char* name_of(tier t) noexcept { return t == tier::device ? "device" : "host"; }

const char* name_of(kind k) noexcept {
    static constexpr std::array<const char*, kind_count> names{"exact", "sketch", "basis", "lines", "line_cache", "statistics", "workspace", "tables"};
    return names[static_cast<std::size_t>(k)];
}

namespace {

class heap_resource final : public memory_resource {
public:
    void* allocate(tier, std::size_t bytes, std::size_t alignment) override {
        const bool huge = bytes >= huge_page;
        void* p = ::operator new(bytes, std::align_val_t{huge ? huge_page : alignment}, std::nothrow);
#ifdef MADV_HUGEPAGE
        if (huge && p != nullptr) (void)madvise(p, bytes / huge_page * huge_page, MADV_HUGEPAGE);  // a wish: fewer TLB misses where it is granted
#endif
        return p;
    }
    void deallocate(tier, void* p, std::size_t bytes, std::size_t alignment) noexcept override { ::operator delete(p, std::align_val_t{bytes >= huge_page ? huge_page : alignment}); }

private:
    static constexpr std::size_t huge_page = std::size_t{2} << 20;
};

}  // namespace

void memory_resource::zero(tier, void* p, std::size_t bytes) { std::memset(p, 0, bytes); }

void memory_resource::copy(void* to, tier, const void* from, tier, std::size_t bytes) { std::memcpy(to, from, bytes); }

void memory_resource::copy_rows(void* to, tier, std::size_t to_pitch, const void* from, tier, std::size_t from_pitch, std::size_t width, std::size_t rows) {
    for (std::size_t i = 0; i < rows; ++i) std::memcpy(static_cast<std::byte*>(to) + i * to_pitch, static_cast<const std::byte*>(from) + i * from_pitch, width);
}

std::shared_ptr<memory_resource> make_heap_resource() { return std::make_shared<heap_resource>(); }

buffer::~buffer() {
    if (data_ == nullptr) return;
    owner_->resource_->deallocate(tier_, data_, size_ + padding, alignment);
    owner_->used_.at(tier_, kind_) -= size_;
}

buffer memory::allocate(tier t, kind k, std::size_t bytes) {
    buffer b;
    if (bytes == 0) return b;
    if (bytes > available(t) || bytes > ~std::size_t{0} - buffer::padding)
        throw budget_error(std::string("The ") + name_of(t) + " tier's budget of " + std::to_string(limit(t)) + " bytes has " + std::to_string(available(t)) + " left, too few for " +
                               std::to_string(bytes) + " bytes of kind " + name_of(k) + "; raise the budget or close sequences.",
                           bytes, available(t));
    void* p = nullptr;
    try {
        p = resource_->allocate(t, bytes + buffer::padding, buffer::alignment);
    } catch (const std::bad_alloc&) {
        p = nullptr;  // reported below, as one of the library's own errors
    }
    if (p == nullptr)
        throw budget_error(std::string("The memory resource of the ") + name_of(t) + " tier gave no " + std::to_string(bytes) + " bytes for kind " + name_of(k) + "; free memory or lower the budgets.", bytes, 0);
    b.owner_ = shared_from_this();
    b.data_ = static_cast<std::byte*>(p);
    b.size_ = bytes;
    b.tier_ = t;
    b.kind_ = k;
    used_.at(t, k) += bytes;
    const auto now = used_.total(t);
    if (now > peak_[static_cast<std::size_t>(t)]) peak_[static_cast<std::size_t>(t)] = now;
    resource_->zero(t, p, bytes + buffer::padding);
    return b;
}

void memory::require(const demand& need, const char* purpose, const demand& freed) const {
    const auto check = [&](tier t, std::uint64_t bytes, std::uint64_t back) {
        const auto room = limit(t) == unlimited ? unlimited : available(t) + back;
        if (bytes > room)
            throw budget_error(std::string("The ") + name_of(t) + " tier's budget of " + std::to_string(limit(t)) + " bytes has " + std::to_string(room) + " for " + purpose + ", which needs " +
                                   std::to_string(bytes) + "; raise the budget or close sequences.",
                               bytes, room);
    };
    check(tier::device, need.device, freed.device);
    check(tier::host, need.host, freed.host);
}

}  // namespace sekv
