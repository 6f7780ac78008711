// Appending to exact pages and to query rings, and reading rows back.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "rows_world.hpp"

namespace sekv::cuda::rows_tests {
namespace {

constexpr std::uint32_t seed = 20261130;

struct head_sizes {
    std::int32_t dk, dv;
};
constexpr std::array<head_sizes, 7> all_sizes{{{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {128, 64}, {64, 256}}};

struct append_case {
    dtype stored = dtype::bf16, type = dtype::bf16;
    std::int32_t kv_heads = 2, dk = 64, dv = 64, layer_class = 0;
    std::int64_t lead = 0, gap = 0;
};

/// Two sequences of ragged blocks with padding rows between them: 3 tiles of rows, the last ragged. Some rows lie outside a sequence's blocks.
class append_world {
public:
    append_world(const append_case& c, std::uint32_t s)
        : c_(c),
          random_(s),
          layer_(exact_layer(c.stored, c.kv_heads, c.dk, c.dv)),
          a_(page_bytes(layer_), 5, {64, 64, 7, 64, 30, 64}),
          b_(page_bytes(layer_), 1000, {64, 3}),
          keys(random_, c.type, row_count, c.kv_heads, c.dk, c.lead, c.gap),
          values(random_, c.type, row_count, c.kv_heads, c.dv, c.lead, c.gap),
          flags_(std::vector<deferred_flags>(1)) {
        std::vector<sequence_view> views(2);
        views[0].exact[c.layer_class] = a_.device->get(), views[0].exact_count[c.layer_class] = static_cast<std::int32_t>(a_.blocks.size());
        views[1].exact[c.layer_class] = b_.device->get(), views[1].exact_count[c.layer_class] = static_cast<std::int32_t>(b_.blocks.size());
        views_ = std::make_unique<array<sequence_view>>(views);
        const std::vector<batch_entry> items = {{views_->get(), 60, 33, 0},   {nullptr, 0, 5, 33},         {views_->get() + 1, 1063, 6, 38},
                                                {views_->get(), 130, 20, 44}, {views_->get(), 295, 2, 64}, {views_->get(), 3, 4, 66}};
        std::vector<batch_row> rows;
        for (std::size_t i = 0; i < items.size(); ++i) {
            for (std::int32_t t = 0; t < items[i].tokens; ++t) rows.push_back({static_cast<std::int32_t>(i), t});
        }
        EXPECT_EQ(rows.size(), static_cast<std::size_t>(row_count));
        host_items_ = items, host_rows_ = rows;
        items_ = std::make_unique<array<batch_entry>>(items);
        rows_ = std::make_unique<array<batch_row>>(rows);
    }

    void append() {
        append_rows({layer_, c_.layer_class, row_count, items_->get(), rows_->get(), keys.view(), values.view(), flags_.get()}, nullptr);
        finish();
    }
    [[nodiscard]] bool not_finite() const { return flags_.read()[0].not_finite != 0; }

    /// Every element of every page: what a row put there, or what was there before.
    void check() const {
        check_list(a_, 0);
        check_list(b_, 1);
    }

    static constexpr std::int32_t row_count = 70;

private:
    void check_list(const block_list& list, std::ptrdiff_t sequence) const {
        for (std::size_t b = 0; b < list.blocks.size(); ++b) {
            std::vector<std::uint16_t> expected(list.pages[b].size(), 0xa5a5);
            for (std::int32_t r = 0; r < row_count; ++r) {
                const auto& item = host_items_[static_cast<std::size_t>(host_rows_[static_cast<std::size_t>(r)].item)];
                const auto token = item.position + host_rows_[static_cast<std::size_t>(r)].index - list.blocks[b].begin;
                if (item.sequence != views_->get() + sequence || token < 0 || token >= list.blocks[b].count) continue;
                for (std::int32_t h = 0; h < c_.kv_heads; ++h) {
                    for (std::int32_t j = 0; j < c_.dk; ++j) expected[key_index(layer_.exact_page, h, j, token)] = bits_of(c_.stored, keys.at(r, h, j));
                    for (std::int32_t i = 0; i < c_.dv; ++i)
                        expected[value_index(layer_.exact_page, layer_, h, token, i)] = bits_of(c_.stored, values.at(r, h, i));
                }
            }
            ASSERT_EQ(list.pages[b].read(), expected) << "sequence " << sequence << ", block " << b;
        }
    }

    append_case c_;
    oracle::draws random_;
    layer_layout layer_;
    block_list a_, b_;
    std::unique_ptr<array<sequence_view>> views_;
    std::vector<batch_entry> host_items_;
    std::vector<batch_row> host_rows_;
    std::unique_ptr<array<batch_entry>> items_;
    std::unique_ptr<array<batch_row>> rows_;

public:
    tensor keys, values;

private:
    array<deferred_flags> flags_;
};

void expect_append(const append_case& c, std::uint32_t s) {
    SCOPED_TRACE("seed " + std::to_string(s) + ", stored " + std::to_string(static_cast<int>(c.stored)) + ", type " + std::to_string(static_cast<int>(c.type)) +
                 ", sizes " + std::to_string(c.dk) + " " + std::to_string(c.dv) + ", lead " + std::to_string(c.lead) + ", gap " + std::to_string(c.gap));
    append_world w(c, s);
    w.append();
    w.check();
    EXPECT_FALSE(w.not_finite());
}

TEST(CudaAppend, EverySizeAndType) {
    std::uint32_t s = seed;
    for (const auto size : all_sizes) {
        for (const auto stored : {dtype::bf16, dtype::f16}) {
            for (const auto type : {dtype::f32, dtype::f16, dtype::bf16}) expect_append({stored, type, 2, size.dk, size.dv, 0, 0, 0}, ++s);
        }
    }
}

TEST(CudaAppend, StridedAndUnalignedTensors) {
    std::uint32_t s = seed + 100;
    for (const std::int64_t lead : {0, 1, 8}) {
        for (const std::int64_t gap : {0, 3, 8}) {
            for (const auto type : {dtype::f32, dtype::f16, dtype::bf16}) expect_append({dtype::bf16, type, 3, 64, 80, 1, lead, gap}, ++s);
        }
    }
}

TEST(CudaAppend, SameUnderAllSchedules) {
    under_schedules(6, [] { expect_append({dtype::f16, dtype::bf16, 2, 80, 64, 0, 0, 0}, seed + 200); });
}

TEST(CudaAppend, FlagsWhatIsNotFinite) {
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (const auto stored : {dtype::bf16, dtype::f16}) {
        for (const float x : {infinity, -infinity, nan, 3.4e38F}) {
            for (const bool key : {true, false}) {
                append_world w({stored, dtype::f32, 2, 64, 64, 0, 0, 0}, seed + 300);
                (key ? w.keys : w.values).set(69 - 2, 1, 63, x);  // outside the blocks: not stored
                (key ? w.keys : w.values).set(35, 1, 63, x);      // padding
                w.append();
                EXPECT_FALSE(w.not_finite());
                w.check();
                (key ? w.keys : w.values).set(40, 1, 63, x);
                w.append();
                EXPECT_EQ(w.not_finite(), true) << x;
            }
        }
    }
    append_world w({dtype::f16, dtype::f32, 2, 64, 64, 0, 0, 0}, seed + 301);
    w.keys.set(0, 0, 0, 65519.0F);  // rounds to the largest fp16
    w.append();
    EXPECT_FALSE(w.not_finite());
    w.values.set(0, 0, 0, -65520.0F);  // rounds to -infinity
    w.append();
    EXPECT_TRUE(w.not_finite());
}

TEST(CudaAppend, OneRow) {
    const auto layer = exact_layer(dtype::bf16, 2, 64, 64);
    oracle::draws random(seed + 400);
    const tensor keys(random, dtype::bf16, 1, 2, 64, 0, 0), values(random, dtype::bf16, 1, 2, 64, 0, 0);
    const block_list list(page_bytes(layer), 0, std::vector<std::int32_t>(9, 64));
    for (const std::int64_t position : {0, 63, 64, 300, 575}) {
        sequence_view v;
        v.exact[0] = list.device->get(), v.exact_count[0] = 9;
        const array<sequence_view> view(std::vector<sequence_view>{v});
        const array<batch_entry> items(std::vector<batch_entry>{{view.get(), position, 1, 0}});
        const array<batch_row> rows(std::vector<batch_row>{{0, 0}});
        const array<deferred_flags> flags(std::vector<deferred_flags>(1));
        append_rows({layer, 0, 1, items.get(), rows.get(), keys.view(), values.view(), flags.get()}, nullptr);
        finish();
        const auto page = list.pages[static_cast<std::size_t>(position / 64)].read();
        for (std::int32_t j = 0; j < 64; ++j) {
            EXPECT_EQ(page[key_index(layer.exact_page, 1, j, position % 64)], bits_of(dtype::bf16, keys.at(0, 1, j)));
            EXPECT_EQ(page[value_index(layer.exact_page, layer, 1, position % 64, j)], bits_of(dtype::bf16, values.at(0, 1, j)));
        }
    }
}

// Tokens of two sequences and padding, one item longer than the ring.
void expect_ring(dtype type, std::int32_t kv_heads, std::int32_t group, std::int32_t dk, std::int64_t gap) {
    SCOPED_TRACE("type " + std::to_string(static_cast<int>(type)) + ", " + std::to_string(kv_heads) + " heads x " + std::to_string(group) + ", size " +
                 std::to_string(dk) + ", gap " + std::to_string(gap));
    constexpr std::int32_t ring = 16;
    oracle::draws random(seed + 500);
    layer_layout l;
    l.kv_heads = kv_heads, l.group = group, l.key_size = dk, l.value_size = dk, l.scale = 0.37F;
    const auto row = static_cast<std::size_t>(kv_heads * group * dk);
    l.query_ring = 64;
    const auto elements = l.query_ring / 2 + ring * row;
    const array<std::uint16_t> first(elements), second(elements);
    std::vector<sequence_view> views(2);
    views[0].query_ring = reinterpret_cast<std::byte*>(first.get()), views[1].query_ring = reinterpret_cast<std::byte*>(second.get());
    const array<sequence_view> sequences(views);
    const std::vector<batch_entry> host_items = {{sequences.get(), 1000, 37, 0}, {nullptr, 0, 3, 37}, {sequences.get() + 1, 13, 5, 40}};
    std::vector<batch_row> host_rows;
    std::vector<std::uint16_t> expected[2] = {first.read(), second.read()};
    for (std::int32_t i = 0; i < 3; ++i) {
        for (std::int32_t t = 0; t < host_items[static_cast<std::size_t>(i)].tokens; ++t) host_rows.push_back({i, t});
    }
    const auto row_count = static_cast<std::int32_t>(host_rows.size());
    const tensor queries(random, type, row_count, kv_heads * group, dk, 0, gap);
    for (std::int32_t r = 0; r < row_count; ++r) {
        const auto& item = host_items[static_cast<std::size_t>(host_rows[static_cast<std::size_t>(r)].item)];
        if (item.sequence == nullptr) continue;
        auto& to = expected[item.sequence - sequences.get()];
        const auto slot = static_cast<std::size_t>((item.position + host_rows[static_cast<std::size_t>(r)].index) % ring);
        for (std::int32_t q = 0; q < kv_heads * group; ++q) {
            const auto at = l.query_ring / 2 + slot * row + static_cast<std::size_t>(q * dk);
            for (std::int32_t j = 0; j < dk; ++j) to[at + static_cast<std::size_t>(j)] = bits_of(dtype::bf16, queries.at(r, q, j) * l.scale);
        }
    }
    const array<batch_entry> items(host_items);
    const array<batch_row> rows(host_rows);
    const array<deferred_flags> flags(std::vector<deferred_flags>(1));
    ring_queries({l, row_count, ring, items.get(), rows.get(), queries.view(), flags.get()}, nullptr);
    finish();
    EXPECT_EQ(first.read(), expected[0]);
    EXPECT_EQ(second.read(), expected[1]);
    EXPECT_EQ(flags.read()[0].queries_not_finite, 0);
}

TEST(CudaRing, KeepsTheLatestQueries) {
    for (const auto type : {dtype::f32, dtype::f16, dtype::bf16}) {
        for (const std::int32_t dk : {64, 80, 256}) expect_ring(type, 2, dk == 80 ? 3 : 16, dk, dk == 64 ? 5 : 0);
    }
    under_schedules(4, [] { expect_ring(dtype::bf16, 3, 5, 96, 0); });
}

// A padding row, then one of a sequence; element `at` of one of them is x.
TEST(CudaRing, TakesZerosForWhatIsNotFinite) {
    layer_layout l;
    l.kv_heads = 2, l.group = 2, l.key_size = 64, l.value_size = 64, l.scale = 0.125F;
    constexpr std::size_t row = 2 * 2 * 64;
    const auto run = [&](float x, std::size_t at, std::size_t of_row, bool reported) {
        std::vector<float> queries(2 * row, 8.0F);
        queries[of_row * row + at] = x;
        const array<float> in(queries);
        const array<std::uint16_t> ring(64 * row);
        sequence_view v;
        v.query_ring = reinterpret_cast<std::byte*>(ring.get());
        const array<sequence_view> view(std::vector<sequence_view>{v});
        const array<batch_entry> items(std::vector<batch_entry>{{nullptr, 0, 1, 0}, {view.get(), 67, 1, 1}});
        const array<batch_row> rows(std::vector<batch_row>{{0, 0}, {1, 0}});
        const array<deferred_flags> flags(std::vector<deferred_flags>(1));
        ring_queries({l, 2, 64, items.get(), rows.get(), {in.get(), dtype::f32, static_cast<std::int64_t>(row), 64}, flags.get()}, nullptr);
        finish();
        EXPECT_EQ(flags.read()[0].queries_not_finite != 0, reported) << x;
        EXPECT_EQ(flags.read()[0].not_finite, 0);
        const auto got = ring.read();
        for (std::size_t i = 0; i < row; ++i) {
            const float expected = of_row == 1 && i == at ? (reported ? 0.0F : x * 0.125F) : 1.0F;
            ASSERT_EQ(got[3 * row + i], bits_of(dtype::bf16, expected)) << x << ", element " << i;
        }
    };
    for (const float x : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        for (const std::size_t at : {std::size_t{0}, std::size_t{77}, row - 1}) run(x, at, 1, true);
        run(x, 3, 0, false);
    }
    run(6.0e17F, 9, 1, true);  // 2^56 once scaled: its square would not be lost again
    run(5.0e17F, 9, 1, false);
}

// One page of `capacity` tokens, rows [first, first + count).
void expect_read(dtype stored, std::int32_t dk, std::int32_t dv, std::int32_t capacity, std::int32_t first, std::int32_t count, std::int64_t gap) {
    SCOPED_TRACE("stored " + std::to_string(static_cast<int>(stored)) + ", sizes " + std::to_string(dk) + " " + std::to_string(dv) + ", capacity " +
                 std::to_string(capacity) + ", rows " + std::to_string(first) + " + " + std::to_string(count));
    oracle::draws random(seed + 600);
    const std::int32_t heads = 3;
    auto l = exact_layer(stored, heads, dk, dv);
    const head_stride place{32, static_cast<std::uint64_t>((dk + dv) * capacity * 2 + 48)};
    std::vector<std::uint16_t> page;
    for (const auto x : random.normals(static_cast<std::int64_t>(place.first + heads * place.stride) / 2)) page.push_back(bits_of(stored, x));
    const array<std::uint16_t> device(page, capacity % 2 == 1);
    const std::int64_t key_stride = dk + gap, value_stride = dv + gap;
    const array<float> keys(static_cast<std::size_t>(count * (heads * key_stride + gap))),
        values(static_cast<std::size_t>(count * (heads * value_stride + gap)));
    read_rows({l,
               place,
               reinterpret_cast<const std::byte*>(device.get()),
               capacity,
               first,
               count,
               {keys.get(), heads * key_stride + gap, key_stride},
               {values.get(), heads * value_stride + gap, value_stride}},
              nullptr);
    finish();
    const float untouched = std::bit_cast<float>(0xa5a5a5a5U);
    std::vector<float> expected_keys(keys.size(), untouched), expected_values(values.size(), untouched);
    for (std::int32_t t = 0; t < count; ++t) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t j = 0; j < dk; ++j)
                expected_keys[static_cast<std::size_t>(t * (heads * key_stride + gap) + h * key_stride + j)] =
                    value_of(stored, page[key_index(place, h, j, first + t, capacity)]);
            for (std::int32_t i = 0; i < dv; ++i)
                expected_values[static_cast<std::size_t>(t * (heads * value_stride + gap) + h * value_stride + i)] =
                    value_of(stored, page[value_index(place, l, h, first + t, i, capacity)]);
        }
    }
    EXPECT_EQ(keys.read(), expected_keys);
    EXPECT_EQ(values.read(), expected_values);
}

TEST(CudaReadRows, TokenMajorCopies) {
    for (const auto size : all_sizes) {
        for (const auto stored : {dtype::bf16, dtype::f16}) {
            expect_read(stored, size.dk, size.dv, 64, 0, 64, 0);
            expect_read(stored, size.dk, size.dv, 64, 17, 30, 5);
        }
    }
    expect_read(dtype::bf16, 64, 80, 4, 0, 4, 0);
    expect_read(dtype::bf16, 64, 80, 4, 3, 1, 1);
    expect_read(dtype::f16, 96, 64, 151, 2, 149, 2);
    under_schedules(4, [] { expect_read(dtype::f16, 80, 64, 64, 5, 59, 0); });
}

}  // namespace
}  // namespace sekv::cuda::rows_tests
