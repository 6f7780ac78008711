// Scratch of one worker: typed arrays cut from one counted buffer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sekv {

/// A bump allocator that runs twice: over no memory to find how many bytes a step needs, then over a buffer of that size.
class arena {
public:
    arena() = default;
    arena(std::byte* memory, std::size_t size) noexcept : memory_(memory), size_(size) {}

    /// `count` elements, 64-byte aligned and followed by 64 bytes that may be read; nullptr when only measuring.
    template <class T>
    T* take(std::int64_t count) noexcept {
        const auto at = used_;
        used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64 + 64;
        return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + at);
    }
    [[nodiscard]] std::size_t used() const noexcept { return used_; }
    [[nodiscard]] bool overrun() const noexcept { return used_ > size_; }

private:
    std::byte* memory_ = nullptr;
    std::size_t size_ = 0;
    std::size_t used_ = 0;
};

}  // namespace sekv
