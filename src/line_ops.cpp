// R2 lines by FMA: a group of eight codes is unpacked with one shuffle and one variable shift.
#include "sekv/exec/line_ops.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/line_ops.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace sekv::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using float_tag = hn::CappedTag<float, 8>;
using words_tag = hn::FixedTag<std::uint16_t, 8>;
using bytes_tag = hn::FixedTag<std::uint8_t, 16>;

// For each width: which two bytes hold component j's bits, and how far to shift them.
struct unpack_table {
    alignas(16) std::uint8_t bytes[9][16];
    alignas(16) std::uint16_t shifts[9][8];
};
constexpr unpack_table make_unpack_table() {
    unpack_table t{};
    for (int w = 0; w <= 8; ++w) {
        for (int j = 0; j < 8; ++j) {
            t.bytes[w][2 * j] = static_cast<std::uint8_t>(j * w / 8);
            t.bytes[w][2 * j + 1] = static_cast<std::uint8_t>(j * w / 8 + 1);
            t.shifts[w][j] = static_cast<std::uint16_t>(j * w % 8);
        }
    }
    return t;
}
constexpr unpack_table unpack = make_unpack_table();

HWY_INLINE hn::Vec<words_tag> unpack_words(const std::uint8_t* HWY_RESTRICT p, int width) {
    const words_tag dw;
    const bytes_tag d8;
    const auto raw = hn::TableLookupBytes(hn::LoadU(d8, p), hn::Load(d8, unpack.bytes[width]));
    const auto shifted = hn::Shr(hn::BitCast(dw, raw), hn::Load(dw, unpack.shifts[width]));
    return hn::And(shifted, hn::Set(dw, static_cast<std::uint16_t>((1u << width) - 1u)));
}

// Calls use(j, levels) for each vector of levels of one group of eight.
template <class F>
HWY_INLINE void for_levels(const std::uint8_t* HWY_RESTRICT p, int width, F&& use) {
    const float_tag df;
    const hn::RebindToSigned<float_tag> di;
    const auto w = unpack_words(p, width);
    const auto middle = hn::Set(df, 0.5F * static_cast<float>((1 << width) - 1));
    const auto curve = hn::Set(df, line_curve[width]);
    const auto level = [&](auto codes) {
        const auto u = hn::Sub(hn::ConvertTo(df, codes), middle);
        return hn::MulAdd(hn::Mul(curve, u), hn::Mul(u, u), u);
    };
#if HWY_MAX_BYTES >= 32
    use(0, level(hn::PromoteTo(di, w)));
#else
    const hn::Half<words_tag> dh;
    use(0, level(hn::PromoteTo(di, hn::LowerHalf(dh, w))));
    use(4, level(hn::PromoteTo(di, hn::UpperHalf(dh, w))));
#endif
}

// Q queries at once; more reload the line from L1.
template <int Q>
HWY_INLINE void logits_of(const std::uint8_t* HWY_RESTRICT line, const std::uint8_t* widths, std::int32_t size, const float* HWY_RESTRICT t, const float* base, float* logits, std::int64_t stride) {
    const float_tag df;
    hn::Vec<float_tag> s[Q];
    for (int q = 0; q < Q; ++q) s[q] = hn::Zero(df);
    for (std::int32_t c = 0; c < size / line_group; ++c) {
        const int w = widths[c];
        if (w == 0) continue;
        for_levels(line, w, [&](int j, auto levels) {
            for (int q = 0; q < Q; ++q) s[q] = hn::MulAdd(levels, hn::LoadU(df, t + q * size + c * line_group + j), s[q]);
        });
        line += w;
    }
    for (int q = 0; q < Q; ++q) logits[q * stride] = base[q] + hn::GetLane(hn::SumOfLanes(df, s[q]));
}

void Logits(const std::uint8_t* const* lines, std::int64_t count, const std::uint8_t* widths, std::int32_t size, const float* t, const float* base, std::int32_t group, float* logits,
            std::int64_t stride) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (i + 8 < count) hwy::Prefetch(lines[i + 8]);
        std::int32_t q = 0;
        for (; q + 4 <= group; q += 4) logits_of<4>(lines[i], widths, size, t + q * size, base + q, logits + q * stride + i, stride);
        if (group - q >= 2) {
            logits_of<2>(lines[i], widths, size, t + q * size, base + q, logits + q * stride + i, stride);
            q += 2;
        }
        if (group - q == 1) logits_of<1>(lines[i], widths, size, t + q * size, base + q, logits + q * stride + i, stride);
    }
}

void Accumulate(const std::uint8_t* const* lines, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, const float* weights, std::int64_t stride, std::int32_t group,
                float* sums) {
    const float_tag df;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint8_t* line = lines[i] + offset;
        if (i + 8 < count) hwy::Prefetch(lines[i + 8] + offset);
        for (std::int32_t c = 0; c < size / line_group; ++c) {
            const int w = widths[c];
            if (w == 0) continue;
            for_levels(line, w, [&](int j, auto levels) {
                for (std::int32_t q = 0; q < group; ++q) {
                    float* s = sums + q * size + c * line_group + j;
                    hn::StoreU(hn::MulAdd(levels, hn::Set(df, weights[q * stride + i]), hn::LoadU(df, s)), df, s);
                }
            });
            line += w;
        }
    }
}

void Levels(const std::uint8_t* lines, std::int64_t line_stride, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, float* levels) {
    const float_tag df;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint8_t* line = lines + i * line_stride + offset;
        for (std::int32_t c = 0; c < size / line_group; ++c) {
            const int w = widths[c];
            for_levels(line, w, [&](int j, auto x) { hn::StoreU(x, df, levels + i * size + c * line_group + j); });
            line += w;
        }
    }
}

}  // namespace sekv::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sekv::host {
HWY_EXPORT(Logits);
HWY_EXPORT(Accumulate);
HWY_EXPORT(Levels);

void line_logits(const std::uint8_t* const* lines, std::int64_t count, const std::uint8_t* widths, std::int32_t size, const float* t, const float* base, std::int32_t group, float* logits,
                 std::int64_t stride) {
    HWY_DYNAMIC_DISPATCH(Logits)(lines, count, widths, size, t, base, group, logits, stride);
}
void line_accumulate(const std::uint8_t* const* lines, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, const float* weights, std::int64_t stride,
                     std::int32_t group, float* sums) {
    HWY_DYNAMIC_DISPATCH(Accumulate)(lines, count, offset, widths, size, weights, stride, group, sums);
}
void line_levels(const std::uint8_t* lines, std::int64_t line_stride, std::int64_t count, std::int64_t offset, const std::uint8_t* widths, std::int32_t size, float* levels) {
    HWY_DYNAMIC_DISPATCH(Levels)(lines, line_stride, count, offset, widths, size, levels);
}
}  // namespace sekv::host
#endif
