// Batches: many sequences, padding rows, several tokens, past positions, strided and 16-bit input, injected executor and memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "unit/cache_fixtures.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;
using sekv::rows;

TEST(CacheBatch, ManySequencesEqualOneAtATime) {
    const world w({layer(2, 2), layer(1, 3, 20)});
    auto o = small_options();
    o.max_sequences = 6;
    float_cache c(w.model, o, small_codec(), sekv::host_backend(2));
    const std::vector<std::int64_t> lengths{700, 1, 64, 65, 500, 3};
    std::vector<sekv::sequence> s;
    std::vector<uids> all;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        s.push_back(c.open({i == 0 || i == 4 ? quota(c, 620'000) : 0U, 4000}));
        all.push_back(fresh(1000 * (i + 1), lengths[i]));
        append_all(c, w, s.back(), all.back());
        c.end_prefill(s.back());
    }
    ASSERT_GT(c.sealed(s[0]), 0);
    ASSERT_EQ(c.sealed(s[2]), 0);
    for (const auto how : {resolution::adaptive, resolution::full}) {
        const std::vector<sekv::batch_item> items{{s[3], 1, -1}, {{}, 2, -1}, {s[0], 3, -1}, {s[1], 1, 0}, {s[4], 2, 17}, {{}, 1, 5}, {s[2], 4, 30}, {s[5], 3, -1}};
        const std::int64_t total = 17;
        for (std::int32_t l = 0; l < w.layers(); ++l) {
            const auto heads = w.at(l).query_heads();
            if (l == 1 && how == resolution::adaptive) continue;
            auto p = c.make_plan(items, how);
            EXPECT_EQ(p.tokens(), total);
            EXPECT_GT(c.used().at(sekv::tier::device, sekv::kind::workspace), 0U);
            const auto q = w.queries(l, fresh(77, total));
            std::vector<float> out(static_cast<std::size_t>(total * heads * 64), NAN), lse(static_cast<std::size_t>(total * heads), NAN);
            if (l == 1) {  // the window of past positions is gone
                EXPECT_THROW(c.attend(p, l, rows(q.data(), total, heads, 64), sekv::out_rows(out.data(), total, heads, 64), lse.data()), sekv::state_error);
                continue;
            }
            c.attend(p, l, rows(q.data(), total, heads, 64), sekv::out_rows(out.data(), total, heads, 64), lse.data());
            std::int64_t row = 0;
            for (const auto& i : items) {
                const auto n = static_cast<std::size_t>(i.tokens * heads);
                const std::vector<float> got(out.begin() + row * heads * 64, out.begin() + (row + i.tokens) * heads * 64), got_lse(lse.begin() + row * heads, lse.begin() + (row + i.tokens) * heads);
                if (i.seq == sekv::sequence{}) {
                    EXPECT_EQ(got, std::vector<float>(n * 64, 0.0F));
                    EXPECT_EQ(got_lse, std::vector<float>(n, -INFINITY));
                } else {
                    std::vector<float> alone(n * 64), alone_lse(n);
                    c.attend({&i, 1}, l, rows(q.data() + row * heads * 64, i.tokens, heads, 64), how, sekv::out_rows(alone.data(), i.tokens, heads, 64), alone_lse.data());
                    EXPECT_EQ(got, alone) << "row " << row;
                    EXPECT_EQ(got_lse, alone_lse);
                }
                row += i.tokens;
            }
        }
    }
}

// [tokens, heads, size] laid out head by head with gaps.
template <class T>
std::vector<T> spread(const std::vector<float>& dense, std::int64_t tokens, std::int32_t heads, std::int32_t size, std::int64_t token_stride, std::int64_t head_stride) {
    std::vector<T> out(static_cast<std::size_t>(heads * head_stride + tokens * token_stride), T(-7.0F));
    for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t j = 0; j < size; ++j) out[static_cast<std::size_t>(t * token_stride + h * head_stride + j)] = T(dense[static_cast<std::size_t>((t * heads + h) * size + j)]);
        }
    }
    return out;
}

template <class T>
void strided() {
    const world w({layer(2, 2)});
    float_cache c(w.model);
    const auto dense = c.open(), strided = c.open();
    const auto tokens = fresh(1, 90);
    auto k = w.keys(0, tokens), v = w.values(0, tokens), q = w.queries(0, tokens);
    for (auto* x : {&k, &v, &q}) {
        for (auto& y : *x) y = static_cast<float>(T(y));
    }
    c.append(dense, 0, rows(k.data(), 90, 2, 64), rows(v.data(), 90, 2, 64));
    const std::int64_t ts = 70, hs = 90 * 70 + 3;
    const auto sk = spread<T>(k, 90, 2, 64, ts, hs), sv = spread<T>(v, 90, 2, 64, ts, hs), sq = spread<T>(q, 90, 4, 64, ts, hs);
    c.append(strided, 0, {sk.data(), sekv::dtype_of<T>, 90, 2, 64, ts, hs}, {sv.data(), sekv::dtype_of<T>, 90, 2, 64, ts, hs});
    EXPECT_EQ(materialize(c, w, dense, 0, 0, 90), materialize(c, w, strided, 0, 0, 90));
    for (const auto how : {resolution::full, resolution::adaptive}) {
        std::vector<float> a(90 * 4 * 64), b(4 * 90 * 70 + 200, -1.0F);
        const sekv::batch_item one{dense, 90, -1}, other{strided, 90, -1};
        c.attend({&one, 1}, 0, rows(q.data(), 90, 4, 64), how, sekv::out_rows(a.data(), 90, 4, 64));
        c.attend({&other, 1}, 0, {sq.data(), sekv::dtype_of<T>, 90, 4, 64, ts, hs}, how, {b.data(), 90, 4, 64, 66, 90 * 66});
        for (std::int64_t t = 0; t < 90; ++t) {
            for (std::int32_t h = 0; h < 4; ++h) ASSERT_TRUE(std::equal(a.begin() + (t * 4 + h) * 64, a.begin() + (t * 4 + h + 1) * 64, b.begin() + t * 66 + h * 90 * 66));
        }
        EXPECT_EQ(b[64], -1.0F) << "wrote between rows";
    }
}
TEST(CacheBatch, StridedFp32) { strided<float>(); }
TEST(CacheBatch, StridedFp16) { strided<sekv::fp16>(); }
TEST(CacheBatch, StridedBf16) { strided<sekv::bf16>(); }

class counting_executor final : public sekv::executor {
public:
    void run(std::int64_t count, const std::function<void(std::int64_t, std::int32_t)>& body) override {
        for (std::int64_t i = count - 1; i >= 0; --i) body(i, static_cast<std::int32_t>(i % 3)), ++bodies;  // backwards, over three worker numbers
    }
    std::int32_t workers() const noexcept override { return 3; }
    std::int64_t bodies = 0;
};

TEST(CacheBatch, InjectedExecutorAndMemory) {
    if (float_cache::on_device) GTEST_SKIP() << "the CUDA backend brings its own memory";
    const world w({layer(2, 2)});
    const auto exec = std::make_shared<counting_executor>();
    const auto resource = std::make_shared<faulty_resource>();
    std::vector<result> mine, usual;
    {
        float_cache c(w.model, small_options(), small_codec(), sekv::host_backend(exec, resource)), plain(w.model, small_options(), small_codec());
        const auto s = c.open({420'000, 4000}), t = plain.open({420'000, 4000});
        prefill(c, w, s, fresh(1, 600));
        prefill(plain, w, t, fresh(1, 600));
        mine = decode(c, w, s, fresh(2000, 50));
        usual = decode(plain, w, t, fresh(2000, 50));
        EXPECT_GT(c.sealed(s), 0);
        std::uint64_t held = 0;
        for (const auto& [p, bytes] : resource->live) held += bytes - sekv::buffer::padding;
        EXPECT_EQ(held + c.spans(s).bytes(), c.used().total(sekv::tier::device) + c.used().total(sekv::tier::host)) << "every byte is counted";
    }
    EXPECT_TRUE(mine == usual);
    EXPECT_GT(exec->bodies, 100);
    EXPECT_TRUE(resource->live.empty());
    EXPECT_EQ(resource->mismatches, 0);
}

TEST(CacheBatch, WorkersWithoutAHeadTakeNoMemory) {
    if (float_cache::on_device) GTEST_SKIP() << "the CUDA backend has no workers";
    const world w({layer(2, 2)});
    float_cache few(w.model, small_options(), small_codec(), sekv::host_backend(2)), many(w.model, small_options(), small_codec(), sekv::host_backend(7));
    std::vector<result> decoded;
    std::vector<std::size_t> bytes;
    for (auto* c : {&few, &many}) {
        const auto s = c->open({420'000, 4000});
        prefill(*c, w, s, fresh(1, 600));
        EXPECT_GT(c->sealed(s), 0);
        bytes.push_back(c->make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive).workspace_bytes());
        for (auto& r : decode(*c, w, s, fresh(2000, 20))) decoded.push_back(std::move(r));
    }
    EXPECT_EQ(bytes[0], bytes[1]);
    ASSERT_EQ(decoded.size() % 2, 0U);
    EXPECT_TRUE(std::equal(decoded.begin(), decoded.begin() + static_cast<std::ptrdiff_t>(decoded.size() / 2), decoded.begin() + static_cast<std::ptrdiff_t>(decoded.size() / 2)));
}

// On every backend: a hint, right or wrong, is taken and changes no output.
TEST(CacheBatch, HintsChangeNoOutput) {
    const world w({layer(2, 2), layer(1, 2, 20), layer(1, 1)});
    std::vector<std::vector<result>> got;
    for (const int hints : {0, 1, 2}) {
        float_cache c(w.model, small_options(), small_codec());
        const auto s = c.open({quota(c, 620'000), 4000});
        append_all(c, w, s, fresh(1, 700));
        c.end_prefill(s);
        ASSERT_GT(c.sealed(s), 0);
        auto p = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive);
        got.emplace_back();
        for (uid token = 9000; token < 9006; ++token) {
            c.begin_step(p);
            result r;
            for (std::int32_t l = 0; l < w.layers(); ++l) {
                const auto q = w.queries(l, {hints == 1 ? token : token + 100});
                if (hints > 0) c.prefetch(p, l, rows(q.data(), 1, w.at(l).query_heads(), w.at(l).key_size));
                append(c, w, s, l, {token});
                attend_layer(c, w, s, l, {token}, resolution::adaptive, r);
            }
            got.back().push_back(std::move(r));
        }
        EXPECT_THROW(c.prefetch(p, 0, rows<float>(nullptr, 1, 4, 64)), sekv::invalid_argument);
    }
    EXPECT_EQ(got[1], got[0]);
    EXPECT_EQ(got[2], got[0]);
}

TEST(CacheBatch, AppendOnlyEngines) {
    const world w({layer(2, 2)});
    float_cache c(w.model, small_options(), small_codec());
    const auto s = c.open({quota(c, 420'000), 4000}), t = c.open({quota(c, 420'000), 4000});
    for (uid i = 0; i < 6; ++i) {
        const auto tokens = fresh(100 * i, 100);
        const auto k = w.keys(0, tokens), v = w.values(0, tokens), q = w.queries(0, tokens);
        const auto queries = rows(q.data(), 100, 4, 64);
        c.append(s, 0, rows(k.data(), 100, 2, 64), rows(v.data(), 100, 2, 64), static_cast<std::int64_t>(100 * i), &queries);
        (void)step(c, w, t, tokens, resolution::full);
    }
    c.end_prefill(s);
    c.end_prefill(t);
    ASSERT_GT(c.sealed(s), 0);
    EXPECT_EQ(materialize(c, w, s, 0, 0, 600), materialize(c, w, t, 0, 0, 600)) << "queries given to append make the same metric as those that are attended";
}

}  // namespace
