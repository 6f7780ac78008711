// Which sanitizer this translation unit works with, and its annotations as functions that cost nothing without it.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#include <sanitizer/asan_interface.h>
#else
#define SIMT_ASAN 0
#endif

// Under ThreadSanitizer tests/simt/*.cpp are compiled with -fno-sanitize=thread -DSIMT_TSAN=1: their bookkeeping, run on many fibers, must stay out of the race
// detector.
#if !defined(SIMT_TSAN)
#define SIMT_TSAN 0
#endif

#if SIMT_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

namespace simt::detail {

inline void poison_bytes([[maybe_unused]] const void* p, [[maybe_unused]] std::size_t n) {
#if SIMT_ASAN
    __asan_poison_memory_region(p, n);
#endif
}

inline void unpoison_bytes([[maybe_unused]] const void* p, [[maybe_unused]] std::size_t n) {
#if SIMT_ASAN
    __asan_unpoison_memory_region(p, n);
#endif
}

inline void tsan_acquire([[maybe_unused]] void* p) {
#if SIMT_TSAN
    __tsan_acquire(p);
#endif
}

inline void tsan_release([[maybe_unused]] void* p) {
#if SIMT_TSAN
    __tsan_release(p);
#endif
}

/// Tells the race detector of an access that uninstrumented code makes on the current fiber's behalf.
inline void tsan_reads([[maybe_unused]] const void* p, [[maybe_unused]] std::size_t n) {
#if SIMT_TSAN
    if (n != 0) __tsan_read_range(const_cast<void*>(p), n);
#endif
}

inline void tsan_writes([[maybe_unused]] void* p, [[maybe_unused]] std::size_t n) {
#if SIMT_TSAN
    if (n != 0) __tsan_write_range(p, n);
#endif
}

/// Accesses of the current fiber go unseen by the race detector while this lives; malloc and free then forget what was known of their memory.
struct ignore_races {
#if SIMT_TSAN
    ignore_races() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~ignore_races() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
#else
    ignore_races() {}
    ~ignore_races() {}
#endif
    ignore_races(const ignore_races&) = delete;
    ignore_races& operator=(const ignore_races&) = delete;
};

}  // namespace simt::detail
