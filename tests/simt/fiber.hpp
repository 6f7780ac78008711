// Stackful coroutines with the annotations that AddressSanitizer and ThreadSanitizer want at a change of stack.
#pragma once

#include <cstddef>

namespace simt::detail {

/// A stack and where it was left. One without a stack of its own stands for the thread that launches.
class fiber {
public:
    fiber() = default;
    /// Runs entry(), which never returns, when first switched to.
    fiber(std::size_t stack_bytes, void (*entry)());
    ~fiber();
    fiber(const fiber&) = delete;
    fiber& operator=(const fiber&) = delete;

    /// For the launching thread, before each use: which stack and which race-detector context it is.
    void adopt_current();
    /// Leaves `from`, the running one, and resumes this one. Returns when `from` is resumed.
    void resume_from(fiber& from);
    /// First thing on a new stack.
    static void arrived();

private:
    void* stack_pointer_ = nullptr;
    char* mapping_ = nullptr;
    std::size_t mapped_ = 0;
    const void* bottom_ = nullptr;
    std::size_t size_ = 0;
    void* fake_stack_ = nullptr;    ///< AddressSanitizer's
    void* race_context_ = nullptr;  ///< ThreadSanitizer's
    bool own_race_context_ = false;
};

}  // namespace simt::detail
