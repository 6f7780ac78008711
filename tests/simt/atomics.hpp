// Atomics. Acquire-release, where CUDA's are relaxed: ThreadSanitizer knows no fences, and kernels order relaxed atomics by fences.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/engine.hpp"

namespace simt::detail {

/// *p = f(*p) at once; returns the old value.
template <class T, class F>
T atomic_update(T* p, F f) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    using bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
    preempt();
    auto* place = reinterpret_cast<bits*>(p);
    bits seen = __atomic_load_n(place, __ATOMIC_ACQUIRE);
    bits next;
    T old;
    do {
        std::memcpy(&old, &seen, sizeof old);
        const T changed = f(old);
        std::memcpy(&next, &changed, sizeof next);
    } while (!__atomic_compare_exchange_n(place, &seen, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    return old;
}

}  // namespace simt::detail

#define SIMT_ATOMIC(name, expression)                                                             \
    template <class T>                                                                            \
    T name(T* p, std::type_identity_t<T> v) {                                                     \
        return simt::detail::atomic_update(p, [v](T old) { return static_cast<T>(expression); }); \
    }                                                                                             \
    template <class T>                                                                            \
    T name##_block(T* p, std::type_identity_t<T> v) {                                             \
        return name(p, v);                                                                        \
    }                                                                                             \
    template <class T>                                                                            \
    T name##_system(T* p, std::type_identity_t<T> v) {                                            \
        return name(p, v);                                                                        \
    }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicAnd, old& v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicXor, old ^ v)
SIMT_ATOMIC(atomicInc, old >= v ? T{0} : old + 1)
SIMT_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
SIMT_ATOMIC(atomicExch, ((void)old, v))
#undef SIMT_ATOMIC

template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
    return simt::detail::atomic_update(p, [=](T old) { return old == expected ? v : old; });
}
template <class T>
T atomicCAS_block(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
    return atomicCAS(p, expected, v);
}
template <class T>
T atomicCAS_system(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
    return atomicCAS(p, expected, v);
}
