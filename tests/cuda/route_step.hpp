// One step of project, score, route and choose on sequences of route_world.hpp, what it left in the workspace, and a plain model of it in double.
#pragma once

#include "cuda/route_world.hpp"

namespace sekv::cuda::route_tests {

struct item {
    const sealed_sequence* sequence = nullptr;
    std::int64_t position = 0;
    std::int32_t tokens = 1;
};

struct policy {
    float tau = 2e-3F;
    bool largest = false;
    std::int32_t cap = 1024;
    std::int32_t room = 0;  ///< of the candidates' list in place of what the workspace has; 0: that
};

/// Queries, exact partial sums and workspace of a batch; what the kernels wrote, by (row, head).
class step {
public:
    static constexpr std::int32_t exact_splits = 2;

    step(world& w, std::vector<item> items, const policy& p, dtype type = dtype::bf16) : w_(w), items_(std::move(items)), policy_(p), queries_(w.random, type, rows_of(items_), w.shape.kv_heads * w.shape.group, w.shape.dk, 8, 8) {
        auto& l = w.layer;
        std::int32_t row = 0;
        for (const auto& i : items_) {
            for (std::int32_t k = 0; k < i.tokens; ++k) rows.push_back({static_cast<std::int32_t>(entries_.size()), k});
            entries_.push_back({i.sequence != nullptr ? i.sequence->device() : nullptr, i.position, i.tokens, row});
            row += i.tokens;
        }
        device_items_ = std::make_unique<array<batch_entry>>(entries_);
        device_rows_ = std::make_unique<array<batch_row>>(rows);
        counters_ = std::make_unique<array<zoom_counters>>(std::vector<zoom_counters>(1));
        step_.layer = l;
        auto& b = step_.bounds;
        b.rows = row, b.items = static_cast<std::int32_t>(items_.size()), b.exact_blocks = exact_splits * exact_split_blocks, b.tau = p.tau, b.largest_of_group = p.largest, b.cap = p.cap;
        for (const auto& i : items_) {
            if (i.sequence == nullptr) continue;
            // One more than there are, as bounds of a captured graph may be.
            b.segments = std::max(b.segments, i.sequence->view.segment_count + 1), b.epochs = std::max(b.epochs, i.sequence->view.epoch_count + 1), b.key_bases = std::max(b.key_bases, i.sequence->view.key_bases_count + 1);
        }
        step_.items = device_items_->get(), step_.rows = device_rows_->get(), step_.queries = queries_.view(), step_.counters = counters_->get();
        workspace_ = std::make_unique<array<std::byte>>(decode_workspace_bytes(l, b), false, 0xff);
        ws = cut_workspace(l, b, workspace_->get());
        if (p.room > 0) ws.candidates = p.room;
        make_exact_sums();
    }

    void run() {
        put_exact_sums();
        stain_lists();
        for (const auto launch : {launch_project, launch_score_sketch, launch_route, launch_choose}) launch(step_, ws, nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }

    [[nodiscard]] std::int32_t part(std::int32_t row, std::int32_t head) const { return row * w_.shape.kv_heads + head; }
    /// `count` elements of one (row, head) of a workspace array.
    template <class T>
    [[nodiscard]] std::vector<T> read(const T* array, std::int32_t row, std::int32_t head, std::int64_t count) const {
        std::vector<T> values(static_cast<std::size_t>(count));
        EXPECT_EQ(cudaMemcpy(values.data(), array + part(row, head) * count, values.size() * sizeof(T), cudaMemcpyDefault), cudaSuccess);
        return values;
    }
    [[nodiscard]] zoom_counters counters() const { return counters_->read()[0]; }
    [[nodiscard]] const sealed_sequence* sequence(std::int32_t row) const { return items_[static_cast<std::size_t>(rows[static_cast<std::size_t>(row)].item)].sequence; }
    [[nodiscard]] std::int64_t position(std::int32_t row) const { return items_[static_cast<std::size_t>(rows[static_cast<std::size_t>(row)].item)].position + rows[static_cast<std::size_t>(row)].index; }
    [[nodiscard]] std::int32_t row_count() const { return static_cast<std::int32_t>(rows.size()); }
    [[nodiscard]] double query(std::int32_t row, std::int32_t head, std::int32_t g, std::int32_t j) const {
        return static_cast<double>(w_.layer.scale) * static_cast<double>(queries_.at(row, head * w_.shape.group + g, j));
    }
    [[nodiscard]] const partial_sum& exact_sum(std::int32_t row, std::int32_t head, std::int32_t split, std::int32_t g) const {
        return exact_sums_[static_cast<std::size_t>((part(row, head) * exact_splits + split) * ws.group + g)];
    }
    [[nodiscard]] world& of() const { return w_; }
    [[nodiscard]] const policy& rules() const { return policy_; }

    decode_workspace ws{};
    std::vector<batch_row> rows;

private:
    static std::int64_t rows_of(const std::vector<item>& items) {
        std::int64_t n = 0;
        for (const auto& i : items) n += i.tokens;
        return n;
    }
    void make_exact_sums() {
        exact_sums_.resize(static_cast<std::size_t>(row_count() * w_.shape.kv_heads * exact_splits * ws.group));
        for (std::size_t i = 0; i < exact_sums_.size(); ++i) {
            const bool empty = i / static_cast<std::size_t>(ws.group) % 3 == 2;
            exact_sums_[i] = empty ? partial_sum{-INFINITY, 0} : partial_sum{w_.random.normal(), 1 + static_cast<float>(w_.random.uniform())};
        }
    }
    void put_exact_sums() const {
        const auto stride = ws.exact_splits + ws.segments;
        ASSERT_EQ(ws.exact_splits, exact_splits);
        for (std::int32_t p = 0; p < row_count() * w_.shape.kv_heads; ++p)
            ASSERT_EQ(cudaMemcpy(ws.sums + p * stride * ws.group, exact_sums_.data() + p * exact_splits * ws.group, static_cast<std::size_t>(exact_splits * ws.group) * sizeof(partial_sum), cudaMemcpyDefault), cudaSuccess);
    }

    // What earlier steps may have left behind the end of a list: tokens whose lines are missing.
    void stain_lists() const {
        const std::vector<zoomed_token> old(static_cast<std::size_t>(row_count() * w_.shape.kv_heads) * static_cast<std::size_t>(ws.candidates), {nullptr, 0, 1});
        ASSERT_EQ(cudaMemcpy(ws.zoomed, old.data(), old.size() * sizeof(zoomed_token), cudaMemcpyDefault), cudaSuccess);
    }

    world& w_;
    std::vector<item> items_;
    policy policy_;
    rows_tests::tensor queries_;
    std::vector<batch_entry> entries_;
    std::vector<partial_sum> exact_sums_;
    std::unique_ptr<array<batch_entry>> device_items_;
    std::unique_ptr<array<batch_row>> device_rows_;
    std::unique_ptr<array<zoom_counters>> counters_;
    std::unique_ptr<array<std::byte>> workspace_;
    decode_step step_;
};

/// What one (row, head) should find, in double.
struct expectation {
    std::vector<std::vector<double>> logits;  ///< [group][blocks * 64], -infinity where the query doesn't look
    std::vector<double> log_sum;              ///< [group]
    std::vector<double> mass;                 ///< [blocks * 64]
};

/// t = A^T q of one query, as the half-precision A has it.
inline std::vector<double> projected(const step& s, std::int32_t row, std::int32_t head, std::int32_t g, std::int32_t basis) {
    const auto d = s.of().shape.dk;
    const auto keys = s.sequence(row)->keys(basis, head);
    std::vector<double> t(static_cast<std::size_t>(d), 0.0);
    for (std::int32_t i = 0; i < d; ++i) {
        for (std::int32_t j = 0; j < d; ++j) t[static_cast<std::size_t>(j)] += s.query(row, head, g, i) * static_cast<double>(static_cast<float>(keys.a[i * d + j]));
    }
    return t;
}

inline double mean_logit(const step& s, std::int32_t row, std::int32_t head, std::int32_t g, std::int32_t e) {
    const float* mean = s.sequence(row)->statistics(e).key_mean(s.of().index(head));
    double sum = 0;
    for (std::int32_t j = 0; j < s.of().shape.dk; ++j) sum += s.query(row, head, g, j) * static_cast<double>(mean[j]);
    return sum;
}

/// sum_j t_j^2 D_j / 2, and the logit of code 0.
struct constant_terms {
    double correction = 0, lowest = 0;
};
inline constant_terms constants(const key_view& keys, const std::vector<double>& t) {
    constant_terms c;
    for (std::size_t j = 0; j < t.size(); ++j) c.correction += 0.5 * t[j] * t[j] * static_cast<double>(keys.error[j]);
    for (std::size_t f = 0; f < keys.sketch.fields.size(); ++f) {
        const auto j = keys.sketch.fields[f].component;
        c.lowest += t[j] * static_cast<double>(level_of(keys.sketch.fields, f, keys.sketch.bits[j], keys.sketch.step[j]).offset);
    }
    return c;
}

/// Logits of one query over all sealed tokens.
inline void score(const step& s, std::int32_t row, std::int32_t head, std::int32_t g, std::vector<double>& logits) {
    const auto& q = *s.sequence(row);
    const auto d = s.of().shape.dk;
    const double cap = static_cast<double>(s.of().shape.soft_cap);
    std::vector<float> codes(static_cast<std::size_t>(block_tokens * d));
    std::int32_t basis = -1;
    std::vector<double> t;
    for (std::size_t b = 0; b < q.blocks.size(); ++b) {
        const auto& block = q.blocks[b];
        const auto keys = q.keys(block.keys, head);
        if (basis != block.keys) t = projected(s, row, head, g, block.keys);
        basis = block.keys;
        const double base = mean_logit(s, row, head, g, block.epoch) + constants(keys, t).correction;
        unpack_sketch(q.planes(static_cast<std::int32_t>(b), head), block_tokens, d, keys.sketch.fields, keys.sketch.bits, keys.sketch.step, codes.data());
        for (std::int32_t i = 0; i < block_tokens; ++i) {
            double x = base;
            for (std::int32_t j = 0; j < d; ++j) x += t[static_cast<std::size_t>(j)] * static_cast<double>(codes[static_cast<std::size_t>(i * d + j)]);
            const auto at = block.begin + i;
            const bool seen = i < block.count && at <= s.position(row) && at >= q.view.sink_count;
            logits[b * block_tokens + static_cast<std::size_t>(i)] = seen ? (cap > 0 ? cap * std::tanh(x / cap) : x) : -INFINITY;
        }
    }
}

inline double log_sum_exp(const std::vector<double>& x) {
    double top = -INFINITY, sum = 0;
    for (const auto v : x) top = std::max(top, v);
    if (std::isinf(top)) return top;
    for (const auto v : x) sum += std::exp(v - top);
    return top + std::log(sum);
}
/// Of a partial sum as the kernels write it.
inline double log_of(const partial_sum& p) { return p.weight > 0 ? static_cast<double>(p.max) + std::log(static_cast<double>(p.weight)) : -INFINITY; }

inline expectation expect(const step& s, std::int32_t row, std::int32_t head) {
    expectation e;
    const auto group = s.of().shape.group;
    const auto tokens = s.sequence(row)->blocks.size() * block_tokens;
    e.mass.resize(tokens);
    for (std::int32_t g = 0; g < group; ++g) {
        e.logits.emplace_back(tokens);
        score(s, row, head, g, e.logits.back());
        auto all = e.logits.back();
        for (std::int32_t i = 0; i < step::exact_splits; ++i) all.push_back(log_of(s.exact_sum(row, head, i, g)));
        e.log_sum.push_back(log_sum_exp(all));
        for (std::size_t i = 0; i < tokens; ++i) {
            const double p = std::exp(e.logits.back()[i] - e.log_sum.back());
            e.mass[i] = s.rules().largest ? std::max(e.mass[i], p) : e.mass[i] + p / group;
        }
    }
    return e;
}

}  // namespace sekv::cuda::route_tests
