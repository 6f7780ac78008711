// refine alone: runs of zoomed tokens at R2 or R3, with tokens of R1 among them, against what the host decodes, in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cuda/decode_world.hpp"
#include "sekv/codec/sketch.hpp"

namespace sekv::cuda::decode_tests {
namespace {

// fp32 sums over at most 256 components of products of rounded factors.
constexpr double tolerance = 2e-5;

/// What precedes refine, made on the host: a list over one query row, and what project leaves for it. Row 0 of the batch is padding, row 1 the query.
template <class T>
class scene {
public:
    scene(const world<T>& w, std::int32_t tokens, std::uint32_t seed, double rough_share) : w_(w), l_(w.layer), random_(seed) {
        const std::vector<item_shape> items{{-1, 1}, {0, 1}};
        auto b = w.bounds(items);
        b.tau = 1e-3F;
        batch_ = w.make_batch(items, b);
        ws_ = cut_workspace(l_, b, batch_.step.workspace);
        collect();
        project();
        for (std::int32_t head = 0; head < l_.kv_heads; ++head) choose(head, tokens, rough_share);
    }

    void check() {
        launch_refine(batch_.step, ws_, nullptr);
        rows_tests::finish();
        for (std::int32_t head = 0; head < l_.kv_heads; ++head) {
            for (std::size_t run = 0; run < runs_[static_cast<std::size_t>(head)].size(); ++run) check_run(head, static_cast<std::int32_t>(run));
        }
    }
    [[nodiscard]] std::vector<float> codes() const { return read(ws_.refined_codes, static_cast<std::size_t>(2 * l_.kv_heads * ws_.runs * ws_.group * l_.value_size)); }

private:
    struct token {
        std::int32_t block, at;
        bool rough;
    };
    template <class X>
    static std::vector<X> read(const X* from, std::size_t count) {
        std::vector<X> x(count);
        EXPECT_EQ(cudaMemcpy(x.data(), from, count * sizeof(X), cudaMemcpyDefault), cudaSuccess);
        return x;
    }
    template <class X>
    static void write(X* to, const std::vector<X>& from) {
        EXPECT_EQ(cudaMemcpy(to, from.data(), from.size() * sizeof(X), cudaMemcpyDefault), cudaSuccess);
    }
    [[nodiscard]] std::int64_t part(std::int32_t head) const { return l_.kv_heads + head; }  // of row 1
    [[nodiscard]] std::vector<double> queries(std::int32_t head) const { return w_.queries(0, head, w_.length(0) - 1); }

    void collect() {
        const auto& units = w_.units(0);
        for (std::size_t i = 0; i < units.size(); ++i) {
            const auto& b = w_.blocks(0)[i];
            epochs_.resize(std::max(epochs_.size(), static_cast<std::size_t>(b.epoch) + 1));
            keys_.resize(std::max(keys_.size(), static_cast<std::size_t>(b.keys) + 1));
            epochs_[static_cast<std::size_t>(b.epoch)] = units[i].payload.statistics.get();
            keys_[static_cast<std::size_t>(b.keys)] = units[i].payload.keys.get();
        }
    }

    // t[g][j] = (A^T q)_j.
    [[nodiscard]] std::vector<double> turned(const key_bases& keys, std::int32_t head) const {
        const auto d = static_cast<std::size_t>(l_.key_size), group = static_cast<std::size_t>(l_.group);
        const auto q = queries(head);
        const auto* a = keys.view(head).a;
        std::vector<double> t(group * d);
        for (std::size_t g = 0; g < group; ++g) {
            for (std::size_t i = 0; i < d; ++i) {
                for (std::size_t j = 0; j < d; ++j) t[g * d + j] += q[g * d + i] * static_cast<double>(static_cast<float>(a[i * d + j]));
            }
        }
        return t;
    }

    void project() {
        const auto G = static_cast<std::size_t>(ws_.group), group = static_cast<std::size_t>(l_.group), d = static_cast<std::size_t>(l_.key_size), heads = static_cast<std::size_t>(l_.kv_heads);
        const auto E = static_cast<std::size_t>(ws_.epochs), K = static_cast<std::size_t>(ws_.key_bases), F = static_cast<std::size_t>(ws_.fields);
        std::vector<float> epoch_base(2 * heads * E * G), line_weight(2 * heads * E * d * G), field_base(2 * heads * K * G), field_weight(2 * heads * K * F * G);
        for (std::int32_t h = 0; h < l_.kv_heads; ++h) {
            const auto p = static_cast<std::size_t>(part(h));
            const auto q = queries(h);
            for (std::size_t e = 0; e < epochs_.size(); ++e) {
                const auto t = turned(*epochs_[e]->keys, h);
                for (std::size_t g = 0; g < group; ++g) {
                    double base = 0;
                    for (std::size_t j = 0; j < d; ++j) {
                        base += q[g * d + j] * static_cast<double>(epochs_[e]->key_mean(h)[j]);
                        line_weight[((p * E + e) * d + j) * G + g] = static_cast<float>(t[g * d + j] * static_cast<double>(epochs_[e]->lines(h).key_step[j]));
                    }
                    epoch_base[(p * E + e) * G + g] = static_cast<float>(base);
                }
            }
            for (std::size_t k = 0; k < keys_.size(); ++k) {
                const auto t = turned(*keys_[k], h);
                const auto view = keys_[k]->view(h);
                for (std::size_t g = 0; g < group; ++g) {
                    double base = 0;
                    for (std::size_t j = 0; j < d; ++j) base += 0.5 * t[g * d + j] * t[g * d + j] * static_cast<double>(view.error[j]);
                    for (std::size_t f = 0; f < view.sketch.fields.size(); ++f) {
                        const auto j = view.sketch.fields[f].component;
                        const auto level = level_of(view.sketch.fields, f, view.sketch.bits[j], view.sketch.step[j]);
                        field_weight[((p * K + k) * F + f) * G + g] = static_cast<float>(t[g * d + j]) * level.factor;
                        base += t[g * d + j] * static_cast<double>(level.offset);
                    }
                    field_base[(p * K + k) * G + g] = static_cast<float>(base);
                }
            }
        }
        write(ws_.epoch_base, epoch_base), write(ws_.line_weight, line_weight), write(ws_.field_base, field_base), write(ws_.field_weight, field_weight);
    }

    // Ascending tokens, runs of at most 32 of one epoch and key basis. Lines of even blocks lie in device memory.
    void choose(std::int32_t head, std::int32_t count, double rough_share) {
        std::vector<token> all;
        for (std::int32_t b = 0; b < static_cast<std::int32_t>(w_.units(0).size()); ++b) {
            for (std::int32_t t = b == 0 ? l_.sink_capacity : 0; t < w_.units(0)[static_cast<std::size_t>(b)].count; ++t) all.push_back({b, t, random_.uniform() < rough_share});
        }
        while (static_cast<std::int32_t>(all.size()) > count) all.erase(all.begin() + random_.below(static_cast<std::int32_t>(all.size())));
        std::vector<zoomed_token> list;
        std::vector<refine_run> runs;
        for (const auto& t : all) {
            const auto& b = w_.blocks(0)[static_cast<std::size_t>(t.block)];
            if (runs.empty() || runs.back().count == refine_tokens || runs.back().epoch != b.epoch || runs.back().keys != b.keys) runs.push_back({static_cast<std::int32_t>(list.size()), 0, b.epoch, b.keys});
            ++runs.back().count;
            list.push_back({t.rough ? nullptr : line_of(t, head), t.block << 6 | t.at, 0});
        }
        ASSERT_LE(list.size(), static_cast<std::size_t>(ws_.candidates));
        ASSERT_LE(runs.size(), static_cast<std::size_t>(ws_.runs));
        write(ws_.zoomed + part(head) * ws_.candidates, list);
        write(ws_.refine_runs + part(head) * ws_.runs, runs);
        write(ws_.run_count + part(head), std::vector<std::int32_t>{static_cast<std::int32_t>(runs.size())});
        tokens_.push_back(all);
        runs_.push_back(runs);
    }
    const std::uint8_t* line_of(const token& t, std::int32_t head) {
        const auto& b = w_.blocks(0)[static_cast<std::size_t>(t.block)];
        const bool exact = l_.exact_line_bytes > 0;
        const auto& page = exact ? l_.exact_line_page : l_.line_page;
        const auto bytes = static_cast<std::size_t>(exact ? l_.exact_line_bytes : l_.line_stride);
        const auto* line = (exact ? b.exact : b.lines) + page.first + static_cast<std::size_t>(head) * page.stride + static_cast<std::size_t>(t.at) * bytes;
        if (t.block % 2 == 1) return line;
        copies_.emplace_back(std::vector<std::uint8_t>(line, line + bytes));
        return copies_.back().get();
    }

    void check_run(std::int32_t head, std::int32_t index) {
        const auto& run = runs_[static_cast<std::size_t>(head)][static_cast<std::size_t>(index)];
        const auto at = part(head) * ws_.runs + index;
        const auto G = static_cast<std::size_t>(ws_.group), dk = static_cast<std::size_t>(l_.key_size), dv = static_cast<std::size_t>(l_.value_size);
        const auto sums = read(ws_.refined + at * ws_.group, G);
        const auto codes = read(ws_.refined_codes + at * ws_.group * l_.value_size, G * dv);
        const auto& e = *epochs_[static_cast<std::size_t>(run.epoch)];
        const auto values = e.values(head);
        const auto q = queries(head);
        const auto view = keys_[static_cast<std::size_t>(run.keys)]->view(head);
        const auto t = turned(*keys_[static_cast<std::size_t>(run.keys)], head);
        std::vector<float> k(64 * dk), v(64 * dv);
        for (std::size_t g = 0; g < static_cast<std::size_t>(l_.group); ++g) {
            std::vector<double> logits, out(dv), got(dv);
            std::vector<std::vector<float>> rows;
            for (std::int32_t i = run.first; i < run.first + run.count; ++i) {
                const auto& x = tokens_[static_cast<std::size_t>(head)][static_cast<std::size_t>(i)];
                const auto& u = w_.units(0)[static_cast<std::size_t>(x.block)];
                x.rough ? w_.coder().decode_sketch(u, 0, head, {u.begin + x.at, 1}, k.data(), v.data()) : w_.coder().decode(u, 0, head, {u.begin + x.at, 1}, k.data(), v.data());
                double s = 0;
                for (std::size_t j = 0; j < dk; ++j) s += q[g * dk + j] * static_cast<double>(k[j]) + (x.rough ? 0.5 * t[g * dk + j] * t[g * dk + j] * static_cast<double>(view.error[j]) : 0.0);
                logits.push_back(oracle::capped(s, w_.shape.soft_cap));
                rows.emplace_back(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(dv));
            }
            std::vector<const double*> none;
            const double top = *std::max_element(logits.begin(), logits.end());
            double weight = 0;
            for (std::size_t i = 0; i < rows.size(); ++i) {
                const double p = std::exp(logits[i] - top);
                weight += p;
                for (std::size_t j = 0; j < dv; ++j) out[j] += p * static_cast<double>(rows[i][j]);
            }
            EXPECT_NEAR(sums[g].max + std::log(sums[g].weight), top + std::log(weight), tolerance * 8) << "head " << head << " run " << index << " query " << g;
            double error = 0, norm = 0;
            for (std::size_t j = 0; j < dv; ++j) {
                if (l_.exact_line_bytes > 0) {
                    got[j] = codes[g * dv + j];
                } else {
                    got[j] = static_cast<double>(sums[g].weight) * static_cast<double>(values.mean[j]);
                    for (std::size_t c = 0; c < dv; ++c) got[j] += static_cast<double>(codes[g * dv + c]) * static_cast<double>(static_cast<float>(values.basis[c * dv + j]));
                }
                const double x = got[j] / static_cast<double>(sums[g].weight) - out[j] / weight;
                error += x * x, norm += std::pow(out[j] / weight, 2);
            }
            EXPECT_LT(std::sqrt(error / norm), tolerance) << "head " << head << " run " << index << " query " << g;
        }
    }

    const world<T>& w_;
    layer_layout l_;
    oracle::draws random_;
    typename world<T>::batch batch_;
    decode_workspace ws_;
    std::vector<const epoch*> epochs_;
    std::vector<const key_bases*> keys_;
    std::vector<std::vector<token>> tokens_;
    std::vector<std::vector<refine_run>> runs_;
    std::vector<array<std::uint8_t>> copies_;
};

// A prompt of two epochs and a truncated last block.
sequence_shape sealed(std::int64_t prompt = 700) { return {prompt, 0, 0.45, -1}; }

template <class T>
void check(const world_shape& s, std::int32_t tokens, double rough_share) {
    const world<T> w(s, {sealed()});
    scene<T> x(w, tokens, s.seed, rough_share);
    if (!testing::Test::HasFailure()) x.check();
}

TEST(Refine, AllGroups) {
    for (const std::int32_t group : {1, 2, 3, 5, 7, 8, 16}) {
        SCOPED_TRACE(group);
        world_shape s;
        s.group = group, s.kv_heads = 1;
        check<bf16>(s, 77, 0);
    }
}

TEST(Refine, AllHeadSizes) {
    const std::int32_t sizes[][2] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {64, 128}, {128, 80}, {80, 256}};
    for (const auto& d : sizes) {
        SCOPED_TRACE(std::to_string(d[0]) + " " + std::to_string(d[1]));
        world_shape s;
        s.dk = d[0], s.dv = d[1], s.group = 3, s.kv_heads = d[0] + d[1] < 200 ? 2 : 1;
        check<fp16>(s, 70, 0.2);
    }
}

TEST(Refine, RoughTokensAndSoftCap) {
    for (const double share : {0.03, 0.5, 1.0}) {
        world_shape s;
        s.soft_cap = share < 0.1 ? 0.0F : 4.0F, s.group = 5, s.query = dtype::f16;
        check<bf16>(s, 100, share);
    }
}

TEST(Refine, ExactTier) {
    for (const double share : {0.0, 0.3}) {
        world_shape s;
        s.codec.exact_tier = true, s.group = 3;
        check<bf16>(s, 90, share);
        s.dk = 128, s.dv = 80, s.query = dtype::bf16, s.soft_cap = 6;
        check<fp16>(s, 90, share);
    }
}

TEST(Refine, SameBitsUnderAllSchedules) {
    for (const bool exact : {false, true}) {
        world_shape s;
        s.codec.exact_tier = exact, s.group = 7, s.kv_heads = 1;
        const world<bf16> w(s, {sealed(400)});
        scene<bf16> x(w, 75, 3, 0.2);
        x.check();
        const auto expected = x.codes();
        rows_tests::under_schedules(5, [&] {
            x.check();
            const auto again = x.codes();
            EXPECT_EQ(std::memcmp(again.data(), expected.data(), again.size() * sizeof(float)), 0);
        });
    }
}

}  // namespace
}  // namespace sekv::cuda::decode_tests
