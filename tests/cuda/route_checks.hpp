// What one step of routing must have left, by (row, head): compared with the model of route_step.hpp and the host's choose_zoom.
#pragma once

#include <set>

#include "cuda/route_matrix.hpp"
#include "cuda/route_step.hpp"
#include "sekv/zoom/router.hpp"

namespace sekv::cuda::route_tests {

/// One (row, head) of the list: tokens by `block << 6 | token` with their masses, ascending, as route left them segment by segment.
inline std::vector<candidate> candidates_of(const step& s, std::int32_t row, std::int32_t head) {
    const auto segments = s.sequence(row)->view.segment_count;
    const auto runs = s.read(s.ws.candidate_runs, row, head, s.ws.segments);
    const auto list = s.read(s.ws.list, row, head, s.ws.candidates);
    std::vector<candidate> all;
    std::set<std::int32_t> places;
    for (std::int32_t i = 0; i < segments; ++i) {
        const auto& part = s.sequence(row)->segments[static_cast<std::size_t>(i)];
        for (std::int32_t k = 0; k < runs[static_cast<std::size_t>(i)].count; ++k) {
            const auto place = runs[static_cast<std::size_t>(i)].first + k;
            EXPECT_TRUE(places.insert(place).second) << "place " << place << " of the list is taken twice";
            all.push_back(list.at(static_cast<std::size_t>(place)));
            EXPECT_GE(all.back().block / block_tokens, part.first);
            EXPECT_LT(all.back().block / block_tokens, part.first + part.count);
        }
    }
    for (std::size_t i = 1; i < all.size(); ++i) EXPECT_LT(all[i - 1].block, all[i].block);
    return all;
}

inline void check_project(const step& s, std::int32_t row, std::int32_t head) {
    const auto& q = *s.sequence(row);
    const auto& shape = s.of().shape;
    const auto g_count = s.ws.group;
    const auto weight = s.read(s.ws.field_weight, row, head, static_cast<std::int64_t>(s.ws.key_bases) * s.ws.fields * g_count);
    const auto base = s.read(s.ws.field_base, row, head, s.ws.key_bases * g_count), mean = s.read(s.ws.epoch_base, row, head, s.ws.epochs * g_count);
    const auto lines = s.read(s.ws.line_weight, row, head, static_cast<std::int64_t>(s.ws.epochs) * shape.dk * g_count);
    for (std::int32_t g = 0; g < g_count; ++g) {
        const bool real = g < shape.group;
        for (std::int32_t b = 0; b < q.view.key_bases_count; ++b) {
            const auto keys = q.keys(b, head);
            const auto t = real ? projected(s, row, head, g, b) : std::vector<double>(static_cast<std::size_t>(shape.dk), 0.0);
            const auto c = constants(keys, t);
            ASSERT_NEAR(base[static_cast<std::size_t>(b * g_count + g)], c.correction + c.lowest, 1e-4 * (1 + std::abs(c.lowest)));
            for (std::size_t f = 0; f < keys.sketch.fields.size(); ++f) {
                const auto j = keys.sketch.fields[f].component;
                const double factor = static_cast<double>(level_of(keys.sketch.fields, f, keys.sketch.bits[j], keys.sketch.step[j]).factor);
                ASSERT_NEAR(weight[(static_cast<std::size_t>(b * s.ws.fields) + f) * static_cast<std::size_t>(g_count) + static_cast<std::size_t>(g)], factor * t[j], 1e-5 * std::abs(factor)) << "field " << f;
            }
        }
        for (std::int32_t e = 0; e < q.view.epoch_count; ++e) {
            const auto t = real ? projected(s, row, head, g, e) : std::vector<double>(static_cast<std::size_t>(shape.dk), 0.0);
            const float* step = q.statistics(e).lines(s.of().index(head)).key_step;
            ASSERT_NEAR(mean[static_cast<std::size_t>(e * g_count + g)], real ? mean_logit(s, row, head, g, e) : 0.0, 1e-5);
            for (std::int32_t j = 0; j < shape.dk; ++j)
                ASSERT_NEAR(lines[static_cast<std::size_t>((e * shape.dk + j) * g_count + g)], t[static_cast<std::size_t>(j)] * static_cast<double>(step[j]), 1e-5 * (1 + std::abs(static_cast<double>(step[j]))));
        }
    }
}

inline void check_sums(const step& s, const expectation& e, std::int32_t row, std::int32_t head, double tolerance = 1e-3) {
    const auto& q = *s.sequence(row);
    const auto sums = s.read(s.ws.sums, row, head, static_cast<std::int64_t>(s.ws.exact_splits + s.ws.segments) * s.ws.group);
    const auto log_sum = s.read(s.ws.log_sum, row, head, s.ws.group);
    for (std::int32_t g = 0; g < s.ws.group; ++g) {
        for (std::int32_t i = 0; i < q.view.segment_count; ++i) {
            const auto& sum = sums[static_cast<std::size_t>((s.ws.exact_splits + i) * s.ws.group + g)];
            if (g >= s.of().shape.group) {
                ASSERT_TRUE(std::isinf(sum.max) && sum.weight == 0);
                continue;
            }
            const auto& part = q.segments[static_cast<std::size_t>(i)];
            const auto first = e.logits[static_cast<std::size_t>(g)].begin() + part.first * block_tokens;
            const std::vector<double> logits(first, first + part.count * block_tokens);
            const double expected = log_sum_exp(logits);
            if (std::isinf(expected)) {
                ASSERT_TRUE(std::isinf(sum.max) && sum.max < 0 && sum.weight == 0) << "segment " << i;
            } else {
                ASSERT_NEAR(log_of(sum), expected, tolerance) << "segment " << i << " query " << g;
                ASSERT_NEAR(sum.max, *std::max_element(logits.begin(), logits.end()), tolerance);
            }
        }
        if (g < s.of().shape.group) {
            ASSERT_NEAR(log_sum[static_cast<std::size_t>(g)], e.log_sum[static_cast<std::size_t>(g)], tolerance);
        }
    }
}

/// Tokens whose mass is clearly above tau are candidates, those clearly below are not, and masses agree.
inline std::vector<candidate> check_candidates(const step& s, const expectation& e, std::int32_t row, std::int32_t head) {
    const auto found = candidates_of(s, row, head);
    const double tau = static_cast<double>(s.rules().tau);
    const bool off = s.rules().cap == 0 || tau >= 1;
    std::size_t next = 0;
    for (std::size_t i = 0; i < e.mass.size(); ++i) {
        const bool listed = next < found.size() && static_cast<std::size_t>(found[next].block) == i;
        if (listed) {
            EXPECT_FALSE(off);
            EXPECT_NEAR(found[next].mass, e.mass[i], 2e-3 * e.mass[i]);
            EXPECT_GT(e.mass[i], tau * 0.998) << "token " << i;
            ++next;
        } else {
            EXPECT_FALSE(!off && s.rules().room == 0 && e.mass[i] > tau * 1.002) << "token " << i << " mass " << e.mass[i];
        }
    }
    EXPECT_EQ(next, found.size());
    return found;
}

inline void check_rest(const step& s, const expectation& e, const std::vector<candidate>& listed, std::int32_t row, std::int32_t head, double tolerance = 1e-3) {
    const auto& q = *s.sequence(row);
    const auto& shape = s.of().shape;
    const auto d = static_cast<std::size_t>(shape.dv);
    const auto planes = s.of().layer.key_planes * plane_bytes;
    const auto rest = s.read(s.ws.rest, row, head, static_cast<std::int64_t>(s.ws.segments) * s.ws.group);
    const auto codes = s.read(s.ws.rest_codes, row, head, static_cast<std::int64_t>(s.ws.segments) * s.ws.group * shape.dv);
    std::vector<char> out(e.mass.size(), 0);
    for (const auto& c : listed) out[static_cast<std::size_t>(c.block)] = 1;
    std::vector<float> values(block_tokens * d);
    for (std::int32_t i = 0; i < q.view.segment_count; ++i) {
        const auto& part = q.segments[static_cast<std::size_t>(i)];
        const auto v = q.statistics(part.epoch).values(s.of().index(head));
        const auto group = static_cast<std::size_t>(shape.group);
        std::vector<double> weight(group, 0.0), sum(group * d, 0.0), size(group * d, 0.0);
        for (std::int32_t b = part.first; b < part.first + part.count; ++b) {
            unpack_sketch(q.planes(b, head) + planes, block_tokens, shape.dv, v.sketch.fields, v.sketch.bits, v.sketch.step, values.data());
            for (std::size_t k = 0; k < block_tokens; ++k) {
                const auto token = static_cast<std::size_t>(b) * block_tokens + k;
                for (std::size_t g = 0; g < group && out[token] == 0; ++g) {
                    const double p = std::exp(e.logits[g][token] - e.log_sum[g]);
                    weight[g] += p;
                    for (std::size_t j = 0; j < d; ++j) {
                        const double x = p * static_cast<double>(v.typical_scale) * static_cast<double>(values[k * d + j]);
                        sum[g * d + j] += x;
                        size[g * d + j] += std::abs(x);
                    }
                }
            }
        }
        for (std::size_t g = 0; g < static_cast<std::size_t>(s.ws.group); ++g) {
            const auto at = static_cast<std::size_t>(i) * static_cast<std::size_t>(s.ws.group) + g;
            if (g >= group || weight[g] == 0) {
                ASSERT_EQ(rest[at].weight, 0) << "segment " << i << " query " << g;
                continue;
            }
            const double factor = std::exp(static_cast<double>(rest[at].max) - e.log_sum[g]);
            ASSERT_NEAR(static_cast<double>(rest[at].weight) * factor, weight[g], tolerance * weight[g]);
            for (std::size_t j = 0; j < d; ++j) ASSERT_NEAR(static_cast<double>(codes[at * d + j]) * factor, sum[g * d + j], tolerance * size[g * d + j] + 1e-12) << "segment " << i << " component " << j;
        }
    }
}

/// The host's rule on the device's masses: indices of the list that stay.
inline std::set<std::size_t> kept_by_host(const std::vector<candidate>& list, std::int32_t cap) {
    const auto n = list.size() + 16;
    std::vector<float> mass(n, 0.0F), copy(n), largest(static_cast<std::size_t>(cap) + 1);
    std::vector<std::int32_t> tokens(n);
    for (std::size_t i = 0; i < list.size(); ++i) mass[i] = list[i].mass;
    zoom_list z{tokens.data(), copy.data()};
    progressive_options o;
    o.tau = 1e-30F, o.cap = cap;
    const float one = 1;
    choose_zoom(z, mass.data(), static_cast<std::int64_t>(n), 1, &one, static_cast<std::int64_t>(list.size()), o, largest.data());
    return {tokens.begin(), tokens.begin() + z.count};
}

inline void check_runs(const step& s, const std::vector<zoomed_token>& zoomed, std::int32_t row, std::int32_t head) {
    const auto& q = *s.sequence(row);
    const auto count = s.read(s.ws.run_count, row, head, 1)[0];
    ASSERT_LE(count, s.ws.runs);
    const auto runs = s.read(s.ws.refine_runs, row, head, s.ws.runs);
    std::size_t next = 0;
    for (std::int32_t r = 0; r < count; ++r) {
        const auto& run = runs[static_cast<std::size_t>(r)];
        ASSERT_EQ(static_cast<std::size_t>(run.first), next);
        ASSERT_GE(run.count, 1);
        ASSERT_LE(run.count, refine_tokens);
        for (; next < static_cast<std::size_t>(run.first + run.count); ++next) {
            const auto& block = q.blocks[static_cast<std::size_t>(zoomed.at(next).block / block_tokens)];
            ASSERT_EQ(block.epoch, run.epoch);
            ASSERT_EQ(block.keys, run.keys);
        }
        if (next == zoomed.size()) continue;
        const auto& block = q.blocks[static_cast<std::size_t>(zoomed[next].block / block_tokens)];
        ASSERT_TRUE(run.count == refine_tokens || block.epoch != run.epoch || block.keys != run.keys) << "a run ends early";
    }
    ASSERT_EQ(next, zoomed.size());
}

/// The final list: order, cap, lines' bytes, runs. Returns it.
inline std::vector<zoomed_token> check_choose(const step& s, const std::vector<candidate>& listed, std::int32_t row, std::int32_t head) {
    const auto& q = *s.sequence(row);
    const auto& l = s.of().layer;
    auto zoomed = s.read(s.ws.zoomed, row, head, s.ws.candidates);
    zoomed.resize(listed.size());
    const auto kept = kept_by_host(listed, s.rules().cap);
    const auto bytes = static_cast<std::size_t>(l.exact_line_bytes > 0 ? l.exact_line_bytes : l.line_bytes);
    std::vector<std::uint8_t> line(bytes);
    for (std::size_t i = 0; i < zoomed.size(); ++i) {
        EXPECT_EQ(zoomed[i].block, listed[i].block);
        EXPECT_EQ(zoomed[i].line != nullptr, kept.contains(i)) << "entry " << i << " mass " << listed[i].mass;
        if (zoomed[i].line == nullptr) continue;
        EXPECT_EQ(cudaMemcpy(line.data(), zoomed[i].line, bytes, cudaMemcpyDefault), cudaSuccess);
        EXPECT_EQ(std::memcmp(line.data(), q.line(zoomed[i].block / block_tokens, zoomed[i].block % block_tokens, head), bytes), 0) << "entry " << i << " has another token's line";
    }
    check_runs(s, zoomed, row, head);
    return zoomed;
}

struct totals {
    unsigned long long zooms = 0, tokens = 0, capped = 0, most = 0, lists = 0;
};

inline void check_counters(const step& s, const totals& t) {
    const auto c = s.counters();
    const auto& l = s.of().layer;
    EXPECT_EQ(c.zooms, t.zooms);
    EXPECT_EQ(c.tokens, t.tokens);
    EXPECT_EQ(c.capped, t.capped);
    EXPECT_EQ(c.most_tokens, t.most);
    EXPECT_EQ(c.hits + c.misses, t.tokens);
    EXPECT_EQ(c.bytes, c.misses * static_cast<unsigned long long>(l.exact_line_bytes > 0 ? l.exact_line_bytes : l.line_bytes));
    unsigned long long lists = 0;
    for (const auto n : c.latency) lists += n;
    EXPECT_EQ(lists, t.lists);
}

/// Everything that every row left.
inline totals check_step(const step& s) {
    totals t;
    for (std::int32_t row = 0; row < s.row_count(); ++row) {
        for (std::int32_t head = 0; head < s.of().shape.kv_heads; ++head) {
            SCOPED_TRACE("row " + std::to_string(row) + " head " + std::to_string(head));
            if (s.sequence(row) == nullptr) {
                EXPECT_EQ(s.read(s.ws.cursor, row, head, 1)[0], 0);
                EXPECT_EQ(s.read(s.ws.run_count, row, head, 1)[0], 0);
                continue;
            }
            const auto e = expect(s, row, head);
            check_project(s, row, head);
            check_matrices(s, row, head);
            check_sums(s, e, row, head);
            const auto listed = check_candidates(s, e, row, head);
            check_rest(s, e, listed, row, head);
            const auto zoomed = check_choose(s, listed, row, head);
            unsigned long long chosen = 0;
            for (const auto& z : zoomed) chosen += z.line != nullptr ? 1 : 0;
            t.zooms += std::any_of(e.logits[0].begin(), e.logits[0].end(), [](double x) { return x > -INFINITY; }) ? 1 : 0;
            t.tokens += chosen;
            t.capped += chosen < zoomed.size() ? 1 : 0;
            t.most = std::max(t.most, chosen);
            t.lists += chosen > 0 ? 1 : 0;
        }
    }
    check_counters(s, t);
    return t;
}

}  // namespace sekv::cuda::route_tests
