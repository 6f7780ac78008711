// Scoring of R1 by table look-up, 64 tokens per shuffle, and its value sums. Tables stay in registers while a block streams by.
#include "sekv/exec/sketch_ops.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/sketch_ops.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace sekv::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using bytes_tag = hn::CappedTag<std::uint8_t, 32>;
using words_tag = hn::RepartitionToWide<bytes_tag>;
using bytes_vec = hn::Vec<bytes_tag>;
using words_vec = hn::Vec<words_tag>;

// Sums of one vector of tokens: even tokens in one accumulator, odd ones in the other, so that no unpacking is needed inside the loop.
struct token_sums {
    words_vec even, odd;
};

HWY_INLINE void add_low(token_sums& s, bytes_vec v) {
    const words_tag dw;
    const auto w = hn::BitCast(dw, v);
    s.even = hn::Add(s.even, hn::And(w, hn::Set(dw, 0xff)));
    s.odd = hn::Add(s.odd, hn::ShiftRight<8>(w));
}

HWY_INLINE void add_high(token_sums& s, bytes_vec v) {
    const words_tag dw;
    const auto w = hn::BitCast(dw, v);
    s.even = hn::Add(s.even, hn::ShiftLeft<8>(w));
    s.odd = hn::Add(s.odd, hn::AndNot(hn::Set(dw, 0xff), w));
}

HWY_INLINE void store_scores(const token_sums& s, float step, float base, float* HWY_RESTRICT out) {
    const words_tag dw;
    const hn::Half<words_tag> dh;
    const hn::RebindToFloat<hn::RepartitionToWide<words_tag>> df;
    const hn::RebindToSigned<decltype(df)> di;
    const auto vs = hn::Set(df, step);
    const auto vb = hn::Set(df, base);
    HWY_ALIGN std::uint16_t words[2 * hn::MaxLanes(words_tag())];
    hn::StoreInterleaved2(s.even, s.odd, dw, words);
    for (std::size_t i = 0; i < 2 * hn::Lanes(dw); i += hn::Lanes(dh)) {
        const auto x = hn::ConvertTo(df, hn::PromoteTo(di, hn::Load(dh, words + i)));
        hn::StoreU(hn::MulAdd(x, vs, vb), df, out + i);
    }
}

// G queries of one block; a half of the plane's nibbles (64 tokens / 2) is Lanes-wise swept.
template <int G>
HWY_INLINE void score_block(const std::uint8_t* HWY_RESTRICT block, const score_tables& t, std::int32_t first, float* HWY_RESTRICT out, std::int64_t stride) {
    const bytes_tag d8;
    const words_tag dw;
    const auto n = static_cast<std::int32_t>(hn::Lanes(d8));
    const auto low_mask = hn::Set(d8, 0x0f);
    for (std::int32_t at = 0; at < plane_bytes; at += n) {
        token_sums a[G], b[G];
        for (int g = 0; g < G; ++g) a[g].even = a[g].odd = b[g].even = b[g].odd = hn::Zero(dw);
        for (std::int32_t p = 0; p < t.planes; ++p) {
            const auto x = hn::LoadU(d8, block + p * plane_bytes + at);
            const auto lo = hn::And(x, low_mask);
            const auto hi = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(dw, x))), low_mask);
            const auto* table = t.low + static_cast<std::int64_t>(p * t.group + first) * 16;
            for (int g = 0; g < G; ++g) {
                const auto v = hn::LoadDup128(d8, table + g * 16);
                add_low(a[g], hn::TableLookupBytes(v, lo));
                add_low(b[g], hn::TableLookupBytes(v, hi));
            }
            if (t.wide[p] == 0) continue;
            table = t.high + static_cast<std::int64_t>(p * t.group + first) * 16;
            for (int g = 0; g < G; ++g) {
                const auto v = hn::LoadDup128(d8, table + g * 16);
                add_high(a[g], hn::TableLookupBytes(v, lo));
                add_high(b[g], hn::TableLookupBytes(v, hi));
            }
        }
        for (int g = 0; g < G; ++g) {
            store_scores(a[g], t.step[first + g], t.base[first + g], out + g * stride + at);
            store_scores(b[g], t.step[first + g], t.base[first + g], out + g * stride + 32 + at);
        }
    }
}

void Scores(const std::uint8_t* const* blocks, std::int64_t count, const score_tables& t, float* scores, std::int64_t stride) {
    for (std::int64_t b = 0; b < count; ++b) {
        float* out = scores + b * block_tokens;
        if (b + 2 < count) hwy::Prefetch(blocks[b + 2]);
        std::int32_t g = 0;
        for (; g + 4 <= t.group; g += 4) score_block<4>(blocks[b], t, g, out + g * stride, stride);
        if (t.group - g == 3) score_block<3>(blocks[b], t, g, out + g * stride, stride);
        if (t.group - g == 2) score_block<2>(blocks[b], t, g, out + g * stride, stride);
        if (t.group - g == 1) score_block<1>(blocks[b], t, g, out + g * stride, stride);
    }
}

// Codes of one field for the 64 tokens of a block, as floats.
HWY_INLINE void field_codes(const std::uint8_t* HWY_RESTRICT plane, const sketch_field& f, float* HWY_RESTRICT codes) {
    const hn::CappedTag<float, 16> df;
    const hn::RebindToSigned<decltype(df)> di;
    const hn::Rebind<std::uint8_t, decltype(df)> d8;
    const auto mask = hn::Set(di, f.mask);
    const auto shift_low = static_cast<int>(f.shift);
    for (std::size_t i = 0; i < 32; i += hn::Lanes(df)) {
        const auto x = hn::PromoteTo(di, hn::LoadU(d8, plane + i));
        hn::StoreU(hn::ConvertTo(df, hn::And(hn::ShiftRightSame(x, shift_low), mask)), df, codes + i);
        hn::StoreU(hn::ConvertTo(df, hn::And(hn::ShiftRightSame(x, shift_low + 4), mask)), df, codes + 32 + i);
    }
}

HWY_INLINE float dot64(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b) {
    const hn::CappedTag<float, 16> df;
    const auto n = hn::Lanes(df);
    auto s0 = hn::Zero(df), s1 = s0;
    for (std::size_t i = 0; i < 64; i += 2 * n) {
        s0 = hn::MulAdd(hn::LoadU(df, a + i), hn::LoadU(df, b + i), s0);
        s1 = hn::MulAdd(hn::LoadU(df, a + i + n), hn::LoadU(df, b + i + n), s1);
    }
    return hn::GetLane(hn::SumOfLanes(df, hn::Add(s0, s1)));
}

// Accumulates codes * weights into a vector per (query, field), reduced once at the end.
void Values(const std::uint8_t* const* blocks, std::int64_t count, const sketch_field* fields, std::int32_t field_count, const float* weights, std::int64_t stride, std::int32_t group, float* sums,
            float* totals) {
    const hn::CappedTag<float, 16> df;
    const auto n = static_cast<std::int64_t>(hn::Lanes(df));
    HWY_ALIGN float codes[block_tokens];
    HWY_ALIGN float ones[block_tokens];
    for (float& x : ones) x = 1.0F;
    constexpr std::int32_t chunk = 8;  // fields whose accumulators are swept together: 8 x 16 queries x a vector stay in L1
    HWY_ALIGN float lanes[chunk * 16 * 16];
    for (std::int32_t g0 = 0; g0 < group; g0 += 16) {
        const std::int32_t gs = group - g0 < 16 ? group - g0 : 16;
        for (std::int32_t f0 = 0; f0 < field_count; f0 += chunk) {
            const std::int32_t fs = field_count - f0 < chunk ? field_count - f0 : chunk;
            for (float& x : lanes) x = 0.0F;
            for (std::int64_t b = 0; b < count; ++b) {
                const float* w = weights + g0 * stride + b * block_tokens;
                for (std::int32_t f = 0; f < fs; ++f) {
                    const auto& field = fields[f0 + f];
                    field_codes(blocks[b] + field.plane * plane_bytes, field, codes);
                    for (std::int32_t g = 0; g < gs; ++g) {
                        float* acc = lanes + (f * 16 + g) * 16;
                        auto s = hn::Load(df, acc);
                        for (std::int64_t i = 0; i < block_tokens; i += n) s = hn::MulAdd(hn::Load(df, codes + i), hn::LoadU(df, w + g * stride + i), s);
                        hn::Store(s, df, acc);
                    }
                }
            }
            for (std::int32_t f = 0; f < fs; ++f)
                for (std::int32_t g = 0; g < gs; ++g) sums[(g0 + g) * field_count + f0 + f] += hn::GetLane(hn::SumOfLanes(df, hn::Load(df, lanes + (f * 16 + g) * 16)));
        }
        for (std::int32_t g = 0; g < gs; ++g) {
            float s = 0.0F;
            for (std::int64_t b = 0; b < count; ++b) s += dot64(weights + (g0 + g) * stride + b * block_tokens, ones);
            totals[g0 + g] += s;
        }
    }
}

template <bool Max>
std::int64_t Select(const float* weights, std::int64_t stride, std::int32_t group, const float* factors, float threshold, std::int64_t count, std::int32_t* found, float* mass) {
    const hn::ScalableTag<float> df;
    const auto n = static_cast<std::int64_t>(hn::Lanes(df));
    const auto limit = hn::Set(df, threshold);
    std::int64_t k = 0;
    HWY_ALIGN float lanes[hn::MaxLanes(hn::ScalableTag<float>())];
    std::int64_t i = 0;
    for (; i + n <= count; i += n) {
        auto s = hn::Zero(df);
        for (std::int32_t g = 0; g < group; ++g) {
            const auto p = hn::Mul(hn::LoadU(df, weights + g * stride + i), hn::Set(df, factors[g]));
            s = Max ? hn::Max(s, p) : hn::Add(s, p);
        }
        if (hn::AllFalse(df, hn::Gt(s, limit))) continue;
        hn::Store(s, df, lanes);
        for (std::int64_t j = 0; j < n; ++j) {
            if (lanes[j] <= threshold) continue;
            found[k] = static_cast<std::int32_t>(i + j);
            mass[k++] = lanes[j];
        }
    }
    for (; i < count; ++i) {
        float s = 0.0F;
        for (std::int32_t g = 0; g < group; ++g) {
            const float p = weights[g * stride + i] * factors[g];
            s = Max ? (p > s ? p : s) : s + p;
        }
        if (s <= threshold) continue;
        found[k] = static_cast<std::int32_t>(i);
        mass[k++] = s;
    }
    return k;
}

std::int64_t SelectSum(const float* w, std::int64_t stride, std::int32_t group, const float* f, float threshold, std::int64_t count, std::int32_t* found, float* mass) {
    return Select<false>(w, stride, group, f, threshold, count, found, mass);
}
std::int64_t SelectMax(const float* w, std::int64_t stride, std::int32_t group, const float* f, float threshold, std::int64_t count, std::int32_t* found, float* mass) {
    return Select<true>(w, stride, group, f, threshold, count, found, mass);
}

}  // namespace sekv::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sekv::host {
HWY_EXPORT(Scores);
HWY_EXPORT(Values);
HWY_EXPORT(SelectSum);
HWY_EXPORT(SelectMax);

void sketch_scores(const std::uint8_t* const* blocks, std::int64_t block_count, const score_tables& tables, float* scores, std::int64_t score_stride) {
    HWY_DYNAMIC_DISPATCH(Scores)(blocks, block_count, tables, scores, score_stride);
}
void sketch_values(const std::uint8_t* const* blocks, std::int64_t block_count, const sketch_field* fields, std::int32_t field_count, const float* weights, std::int64_t weight_stride, std::int32_t group,
                   float* sums, float* totals) {
    HWY_DYNAMIC_DISPATCH(Values)(blocks, block_count, fields, field_count, weights, weight_stride, group, sums, totals);
}
std::int64_t select_above(const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, float threshold, std::int64_t count, std::int32_t* found, float* mass) {
    return HWY_DYNAMIC_DISPATCH(SelectSum)(weights, weight_stride, group, factors, threshold, count, found, mass);
}
std::int64_t select_above_max(const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, float threshold, std::int64_t count, std::int32_t* found, float* mass) {
    return HWY_DYNAMIC_DISPATCH(SelectMax)(weights, weight_stride, group, factors, threshold, count, found, mass);
}
}  // namespace sekv::host
#endif
