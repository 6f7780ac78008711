// Barriers, shuffles and votes.
#pragma once

#include "simt/engine.hpp"

#define SIMT_CALLER const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define SIMT_SITE(name) \
    ::simt::detail::site { file_, line_, name }

inline void __syncthreads(SIMT_CALLER) { simt::detail::block_barrier(SIMT_SITE("__syncthreads")); }
inline int __syncthreads_count(int p, SIMT_CALLER) { return simt::detail::block_barrier_count(p != 0, SIMT_SITE("__syncthreads_count")); }
inline int __syncthreads_or(int p, SIMT_CALLER) { return simt::detail::block_barrier_count(p != 0, SIMT_SITE("__syncthreads_or")) != 0; }
inline int __syncthreads_and(int p, SIMT_CALLER) { return simt::detail::block_barrier_count(p == 0, SIMT_SITE("__syncthreads_and")) == 0; }
inline void __syncwarp(unsigned mask = ~0u, SIMT_CALLER) {
    simt::detail::warp_collective(
        mask, nullptr, [](void**, unsigned) {}, SIMT_SITE("__syncwarp"), true);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
unsigned __activemask() __attribute__((error("__activemask() is not emulated: name the mask")));

namespace simt::detail {

template <class T>
struct shuffle_argument {
    T value;
    T result;
    int source;  ///< lane of the warp
};

/// The value that lane `source` passes.
template <class T>
T shuffle(unsigned mask, T value, int source, site where) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "shuffles take 16, 32 and 64 bits");
    shuffle_argument<T> mine{value, value, source};
    warp_collective(
        mask, &mine,
        [](void** lanes, unsigned present) {
            for (unsigned rest = present; rest != 0; rest &= rest - 1) {
                auto& me = *static_cast<shuffle_argument<T>*>(lanes[__builtin_ctz(rest)]);
                if ((present >> me.source & 1) == 0) fail("shuffle from lane " + std::to_string(me.source) + ", which is outside the mask or has no thread");
                me.result = static_cast<const shuffle_argument<T>*>(lanes[me.source])->value;
            }
        },
        where, false);
    return mine.result;
}

struct ballot_argument {
    bool predicate;
    unsigned result;
};

inline unsigned ballot(unsigned mask, bool predicate, site where) {
    ballot_argument mine{predicate, 0};
    warp_collective(
        mask, &mine,
        [](void** lanes, unsigned present) {
            unsigned votes = 0;
            for (unsigned rest = present; rest != 0; rest &= rest - 1) {
                const int lane = __builtin_ctz(rest);
                if (static_cast<const ballot_argument*>(lanes[lane])->predicate) votes |= 1u << lane;
            }
            for (unsigned rest = present; rest != 0; rest &= rest - 1) static_cast<ballot_argument*>(lanes[__builtin_ctz(rest)])->result = votes;
        },
        where, false);
    return mine.result;
}

template <class T>
struct reduce_argument {
    T value;
    T result;
};

template <class T, class F>
T reduce(unsigned mask, T value, site where) {
    reduce_argument<T> mine{value, value};
    warp_collective(
        mask, &mine,
        [](void** lanes, unsigned present) {
            T total = static_cast<const reduce_argument<T>*>(lanes[__builtin_ctz(present)])->value;
            for (unsigned rest = present & (present - 1); rest != 0; rest &= rest - 1)
                total = F{}(total, static_cast<const reduce_argument<T>*>(lanes[__builtin_ctz(rest)])->value);
            for (unsigned rest = present; rest != 0; rest &= rest - 1) static_cast<reduce_argument<T>*>(lanes[__builtin_ctz(rest)])->result = total;
        },
        where, false);
    return mine.result;
}

/// First lane of the calling lane's part when the warp is cut into parts of `width`.
inline int first_of_part(int width) {
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("a shuffle's width is 1, 2, 4, 8, 16 or 32, not " + std::to_string(width));
    return lane_id() & ~(width - 1);
}

}  // namespace simt::detail

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_CALLER) {
    const int first = simt::detail::first_of_part(width);
    return simt::detail::shuffle(mask, value, first | (source & (width - 1)), SIMT_SITE("__shfl_sync"));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_CALLER) {
    const int first = simt::detail::first_of_part(width);
    const int source = simt::detail::lane_id() ^ bits;
    return simt::detail::shuffle(mask, value, source < first + width ? source : simt::detail::lane_id(), SIMT_SITE("__shfl_xor_sync"));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, SIMT_CALLER) {
    const int first = simt::detail::first_of_part(width);
    const int source = simt::detail::lane_id() + static_cast<int>(distance);
    return simt::detail::shuffle(mask, value, source < first + width ? source : simt::detail::lane_id(), SIMT_SITE("__shfl_down_sync"));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, SIMT_CALLER) {
    const int first = simt::detail::first_of_part(width);
    const int source = simt::detail::lane_id() - static_cast<int>(distance);
    return simt::detail::shuffle(mask, value, source >= first ? source : simt::detail::lane_id(), SIMT_SITE("__shfl_up_sync"));
}

inline unsigned __ballot_sync(unsigned mask, int p, SIMT_CALLER) { return simt::detail::ballot(mask, p != 0, SIMT_SITE("__ballot_sync")); }
inline int __any_sync(unsigned mask, int p, SIMT_CALLER) { return simt::detail::ballot(mask, p != 0, SIMT_SITE("__any_sync")) != 0; }
inline int __all_sync(unsigned mask, int p, SIMT_CALLER) { return simt::detail::ballot(mask, p == 0, SIMT_SITE("__all_sync")) == 0; }

namespace simt::detail {
struct plus {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a + b);
    }
};
struct smaller {
    template <class T>
    T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};
struct larger {
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};
}  // namespace simt::detail

inline unsigned __reduce_add_sync(unsigned mask, unsigned v, SIMT_CALLER) {
    return simt::detail::reduce<unsigned, simt::detail::plus>(mask, v, SIMT_SITE("__reduce_add_sync"));
}
inline int __reduce_add_sync(unsigned mask, int v, SIMT_CALLER) {
    return simt::detail::reduce<int, simt::detail::plus>(mask, v, SIMT_SITE("__reduce_add_sync"));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, SIMT_CALLER) {
    return simt::detail::reduce<unsigned, simt::detail::smaller>(mask, v, SIMT_SITE("__reduce_min_sync"));
}
inline int __reduce_min_sync(unsigned mask, int v, SIMT_CALLER) {
    return simt::detail::reduce<int, simt::detail::smaller>(mask, v, SIMT_SITE("__reduce_min_sync"));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, SIMT_CALLER) {
    return simt::detail::reduce<unsigned, simt::detail::larger>(mask, v, SIMT_SITE("__reduce_max_sync"));
}
inline int __reduce_max_sync(unsigned mask, int v, SIMT_CALLER) {
    return simt::detail::reduce<int, simt::detail::larger>(mask, v, SIMT_SITE("__reduce_max_sync"));
}

#undef SIMT_CALLER
#undef SIMT_SITE
