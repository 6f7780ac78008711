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

// Bytes are summed as bytes as long as they can't overflow, then spilled into the words.
struct byte_sums {
    bytes_vec low, high;  // of tokens in low nibbles, in high nibbles
};

// G queries of one block.
template <int G>
HWY_INLINE void score_block(const std::uint8_t* HWY_RESTRICT block, const std::uint8_t* next, const score_tables& t, std::int32_t first, float* HWY_RESTRICT out, std::int64_t stride) {
    const bytes_tag d8;
    const words_tag dw;
    const auto n = static_cast<std::int32_t>(hn::Lanes(d8));
    const auto low_mask = hn::Set(d8, 0x0f);
    for (std::int32_t at = 0; at < plane_bytes; at += n) {
        token_sums a[G], b[G];
        byte_sums s[G];
        for (int g = 0; g < G; ++g) {
            a[g].even = a[g].odd = b[g].even = b[g].odd = hn::Zero(dw);
            s[g].low = s[g].high = hn::Zero(d8);
        }
        const auto spill = [&] {
            for (int g = 0; g < G; ++g) {
                add_low(a[g], s[g].low);
                add_low(b[g], s[g].high);
                s[g].low = s[g].high = hn::Zero(d8);
            }
        };
        for (std::int32_t p = 0; p < t.planes; ++p) {
            const auto x = hn::LoadU(d8, block + p * plane_bytes + at);
            if (p % 2 == 0) hwy::Prefetch(next + p * plane_bytes);
            const auto lo = hn::And(x, low_mask);
            const auto hi = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(dw, x))), low_mask);
            if (t.fresh == nullptr || t.fresh[p] != 0) spill();
            const auto* table = t.low + static_cast<std::int64_t>(p * t.group + first) * 16;
            for (int g = 0; g < G; ++g) {
                const auto v = hn::LoadDup128(d8, table + g * 16);
                s[g].low = hn::Add(s[g].low, hn::TableLookupBytes(v, lo));
                s[g].high = hn::Add(s[g].high, hn::TableLookupBytes(v, hi));
            }
            if (t.wide[p] == 0) continue;
            table = t.high + static_cast<std::int64_t>(p * t.group + first) * 16;
            for (int g = 0; g < G; ++g) {
                const auto v = hn::LoadDup128(d8, table + g * 16);
                add_high(a[g], hn::TableLookupBytes(v, lo));
                add_high(b[g], hn::TableLookupBytes(v, hi));
            }
        }
        spill();
        for (int g = 0; g < G; ++g) {
            store_scores(a[g], t.step[first + g], t.base[first + g], out + g * stride + at);
            store_scores(b[g], t.step[first + g], t.base[first + g], out + g * stride + 32 + at);
        }
    }
}

void Scores(const std::uint8_t* const* blocks, std::int64_t count, const score_tables& t, float* scores, std::int64_t stride) {
    for (std::int64_t b = 0; b < count; ++b) {
        float* out = scores + b * block_tokens;
        const auto* next = blocks[b + 3 < count ? b + 3 : b];
        std::int32_t g = 0;
        for (; g + 4 <= t.group; g += 4) score_block<4>(blocks[b], next, t, g, out + g * stride, stride);
        if (t.group - g == 3) score_block<3>(blocks[b], next, t, g, out + g * stride, stride);
        if (t.group - g == 2) score_block<2>(blocks[b], next, t, g, out + g * stride, stride);
        if (t.group - g == 1) score_block<1>(blocks[b], next, t, g, out + g * stride, stride);
    }
}

// exp by 2^n * 2^f: a quartic for f in [-1/2, 1/2].
float Weights(float* HWY_RESTRICT values, std::int64_t count, float shift) {
    const hn::ScalableTag<float> df;
    const hn::RebindToSigned<decltype(df)> di;
    const auto n = static_cast<std::int64_t>(hn::Lanes(df));
    const auto log2e = hn::Set(df, 1.44269504F);
    const auto vs = hn::Set(df, shift);
    const auto least = hn::Set(df, -126.0F);
    const auto c4 = hn::Set(df, 0.00956999F), c3 = hn::Set(df, 0.05591759F), c2 = hn::Set(df, 0.24024744F), c1 = hn::Set(df, 0.69312185F), c0 = hn::Set(df, 0.99999928F);
    const auto exponential = [&](auto x) {
        const auto y = hn::Mul(hn::Sub(x, vs), log2e);  // the difference first: large logits would cancel after the product
        const auto whole = hn::Round(hn::Max(y, least));
        const auto f = hn::Sub(hn::Max(y, least), whole);
        const auto p = hn::MulAdd(hn::MulAdd(hn::MulAdd(hn::MulAdd(c4, f, c3), f, c2), f, c1), f, c0);
        const auto scaled = hn::BitCast(df, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::ConvertTo(di, whole))));
        return hn::IfThenElseZero(hn::Gt(y, least), scaled);
    };
    auto s0 = hn::Zero(df), s1 = s0;
    std::int64_t i = 0;
    for (; i + 2 * n <= count; i += 2 * n) {
        const auto a = exponential(hn::LoadU(df, values + i));
        const auto b = exponential(hn::LoadU(df, values + i + n));
        hn::StoreU(a, df, values + i);
        hn::StoreU(b, df, values + i + n);
        s0 = hn::Add(s0, a);
        s1 = hn::Add(s1, b);
    }
    float sum = hn::GetLane(hn::SumOfLanes(df, hn::Add(s0, s1)));
    HWY_ALIGN float rest[hn::MaxLanes(hn::ScalableTag<float>())];
    for (; i < count; i += n) {
        const auto left = count - i < n ? count - i : n;
        for (std::int64_t j = 0; j < n; ++j) rest[j] = j < left ? values[i + j] : 0.0F;
        hn::Store(exponential(hn::Load(df, rest)), df, rest);
        for (std::int64_t j = 0; j < left; ++j) sum += values[i + j] = rest[j];
    }
    return sum;
}

// The codes of one field for a vector of tokens, as floats.
HWY_INLINE hn::Vec<hn::CappedTag<float, 16>> field_codes(const std::uint8_t* HWY_RESTRICT plane, int shift, int mask) {
    const hn::CappedTag<float, 16> df;
    const hn::RebindToSigned<decltype(df)> di;
    const hn::Rebind<std::uint8_t, decltype(df)> d8;
    const auto x = hn::PromoteTo(di, hn::LoadU(d8, plane));
    return hn::ConvertTo(df, hn::And(hn::ShiftRightSame(x, shift), hn::Set(di, mask)));
}

// One field over some blocks for G queries: their sums stay in registers, their weights in L1.
template <int G>
HWY_INLINE void field_sums(const std::uint8_t* const* blocks, std::int64_t count, const sketch_field& f, const float* HWY_RESTRICT weights, std::int64_t stride, float* sums, std::int32_t sum_stride) {
    const hn::CappedTag<float, 16> df;
    const auto n = static_cast<std::int64_t>(hn::Lanes(df));
    hn::Vec<hn::CappedTag<float, 16>> s[G];
    for (int g = 0; g < G; ++g) s[g] = hn::Zero(df);
    for (std::int64_t b = 0; b < count; ++b) {
        const auto* plane = blocks[b] + f.plane * plane_bytes;
        const float* w = weights + b * block_tokens;
        for (std::int64_t i = 0; i < 32; i += n) {
            const auto low = field_codes(plane + i, f.shift, f.mask);
            const auto high = field_codes(plane + i, f.shift + 4, f.mask);
            for (int g = 0; g < G; ++g) {
                s[g] = hn::MulAdd(low, hn::LoadU(df, w + g * stride + i), s[g]);
                s[g] = hn::MulAdd(high, hn::LoadU(df, w + g * stride + 32 + i), s[g]);
            }
        }
    }
    for (int g = 0; g < G; ++g) sums[g * sum_stride] += hn::GetLane(hn::SumOfLanes(df, s[g]));
}

float Sum(const float* HWY_RESTRICT values, std::int64_t count) {  // count: a multiple of 64
    const hn::CappedTag<float, 16> df;
    const auto n = static_cast<std::int64_t>(hn::Lanes(df));
    auto s0 = hn::Zero(df), s1 = s0;
    for (std::int64_t i = 0; i < count; i += 2 * n) {
        s0 = hn::Add(s0, hn::LoadU(df, values + i));
        s1 = hn::Add(s1, hn::LoadU(df, values + i + n));
    }
    return hn::GetLane(hn::SumOfLanes(df, hn::Add(s0, s1)));
}

void Values(const std::uint8_t* const* blocks, std::int64_t count, const sketch_field* fields, std::int32_t field_count, const float* weights, std::int64_t stride, std::int32_t group, float* sums,
            float* totals) {
    constexpr std::int64_t chunk = 16;  // blocks whose weights for four queries fit in L1 beside their planes
    for (std::int64_t b = 0; b < count; b += chunk) {
        const std::int64_t n = count - b < chunk ? count - b : chunk;
        const float* w = weights + b * block_tokens;
        for (std::int64_t i = b + chunk; field_count > 0 && i < count && i < b + 2 * chunk; ++i) {  // each block is on a page of its own
            for (std::int32_t p = 0; p <= fields[field_count - 1].plane; p += 2) hwy::Prefetch(blocks[i] + p * plane_bytes);
        }
        for (std::int32_t g = 0; g < group; ++g) totals[g] += Sum(w + g * stride, n * block_tokens);
        for (std::int32_t g = 0; g < group; g += 4) {
            const auto left = group - g;
            for (std::int32_t f = 0; f < field_count; ++f) {
                float* out = sums + g * field_count + f;
                const float* from = w + g * stride;
                if (left >= 4) field_sums<4>(blocks + b, n, fields[f], from, stride, out, field_count);
                if (left == 3) field_sums<3>(blocks + b, n, fields[f], from, stride, out, field_count);
                if (left == 2) field_sums<2>(blocks + b, n, fields[f], from, stride, out, field_count);
                if (left == 1) field_sums<1>(blocks + b, n, fields[f], from, stride, out, field_count);
            }
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
HWY_EXPORT(Weights);
HWY_EXPORT(SelectSum);
HWY_EXPORT(SelectMax);

void sketch_scores(const std::uint8_t* const* blocks, std::int64_t block_count, const score_tables& tables, float* scores, std::int64_t score_stride) {
    HWY_DYNAMIC_DISPATCH(Scores)(blocks, block_count, tables, scores, score_stride);
}
void sketch_values(const std::uint8_t* const* blocks, std::int64_t block_count, const sketch_field* fields, std::int32_t field_count, const float* weights, std::int64_t weight_stride, std::int32_t group,
                   float* sums, float* totals) {
    HWY_DYNAMIC_DISPATCH(Values)(blocks, block_count, fields, field_count, weights, weight_stride, group, sums, totals);
}
float sketch_weights(float* values, std::int64_t count, float shift) { return HWY_DYNAMIC_DISPATCH(Weights)(values, count, shift); }
std::int64_t select_above(const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, float threshold, std::int64_t count, std::int32_t* found, float* mass) {
    return HWY_DYNAMIC_DISPATCH(SelectSum)(weights, weight_stride, group, factors, threshold, count, found, mass);
}
std::int64_t select_above_max(const float* weights, std::int64_t weight_stride, std::int32_t group, const float* factors, float threshold, std::int64_t count, std::int32_t* found, float* mass) {
    return HWY_DYNAMIC_DISPATCH(SelectMax)(weights, weight_stride, group, factors, threshold, count, found, mass);
}
}  // namespace sekv::host
#endif
