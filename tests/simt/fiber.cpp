#include "simt/fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

#include "simt/sanitizers.hpp"

#if SIMT_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#error "Compile tests/simt/*.cpp with -fno-sanitize=thread -DSIMT_TSAN=1 (see tests/simt/README.md)."
#endif
#if !defined(__x86_64__)
#error "The SIMT emulation switches stacks in x86-64 assembly."
#endif

// void simt_switch_stack(void** save, void* load): callee-saved registers go on the old stack, the new stack's come back.
extern "C" void simt_switch_stack(void** save, void* load);
asm(R"(
.text
.globl simt_switch_stack
.type simt_switch_stack,@function
simt_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch_stack, .-simt_switch_stack
)");

namespace simt::detail {
namespace {

constexpr std::size_t guard_bytes = 4096;
constexpr std::size_t saved_registers = 6;

[[maybe_unused]] fiber* previous = nullptr;  // whom the running fiber was resumed from

}  // namespace

fiber::fiber(std::size_t stack_bytes, void (*entry)()) : mapped_(stack_bytes + guard_bytes) {
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(memory);
    mprotect(mapping_, guard_bytes, PROT_NONE);
    bottom_ = mapping_ + guard_bytes;
    size_ = stack_bytes;
    // The switch pops the registers, then returns into entry with the stack as after a call: 8 below a multiple of 16.
    auto** top = reinterpret_cast<void**>(mapping_ + mapped_ - 16);
    top[0] = reinterpret_cast<void*>(entry);
    top[1] = nullptr;
    stack_pointer_ = top - saved_registers;
    std::memset(stack_pointer_, 0, saved_registers * sizeof(void*));
#if SIMT_TSAN
    race_context_ = __tsan_create_fiber(0);
    own_race_context_ = true;
#endif
}

fiber::~fiber() {
    if (mapping_ != nullptr) {
        unpoison_bytes(bottom_, size_);
        munmap(mapping_, mapped_);
    }
#if SIMT_TSAN
    if (own_race_context_) __tsan_destroy_fiber(race_context_);
#endif
}

void fiber::adopt_current() {
#if SIMT_TSAN
    race_context_ = __tsan_get_current_fiber();
#endif
}

void fiber::resume_from(fiber& from) {
#if SIMT_ASAN
    previous = &from;
    __sanitizer_start_switch_fiber(&from.fake_stack_, bottom_, size_);
#endif
#if SIMT_TSAN
    __tsan_switch_to_fiber(race_context_, 1);  // 1: no order between the two
#endif
    simt_switch_stack(&from.stack_pointer_, stack_pointer_);
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(from.fake_stack_, &previous->bottom_, &previous->size_);
#endif
}

void fiber::arrived() {
#if SIMT_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &previous->bottom_, &previous->size_);
#endif
}

}  // namespace simt::detail
