// Every allocation of a scenario fails once: a budget_error each time, nothing changed, nothing leaked, and the retry ends where the undisturbed run ends.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "unit/cache_fixtures.hpp"

namespace {

using namespace sekv_test;
using sekv::resolution;

// The scenario as single calls, so that the one that failed can be made again.
struct scenario {
    world w{{layer(1, 2), layer(1, 1, 20), layer(1, 2)}};
    std::shared_ptr<faulty_resource> resource = std::make_shared<faulty_resource>();
    std::unique_ptr<float_cache> cache;
    sekv::sequence main, branch;
    std::vector<result> outputs;
    std::int64_t failures = 0;
    std::vector<std::function<void()>> calls;
    bool exact_tier;

    explicit scenario(bool exact) : exact_tier(exact) {
        auto codec = small_codec();
        codec.horizon = 96;
        codec.exact_tier = exact;
        auto o = small_options();
        o.device_budget = 6 << 20;
        cache = std::make_unique<float_cache>(w.model, o, codec, sekv::host_backend(sekv::make_thread_pool(2), resource));
        calls.push_back([this] { main = cache->open({720'000, 4000}); });
        for (uid chunk = 0; chunk < 4; ++chunk) add_step(main, fresh(1 + 200 * chunk, chunk == 3 ? 100 : 150), resolution::full);
        calls.push_back([this] { cache->end_prefill(main); });
        for (uid i = 0; i < 12; ++i) add_step(main, fresh(3000 + 20 * i, 12), resolution::adaptive);
        calls.push_back([this] { branch = cache->fork(main, cache->length(main) - 5); });
        for (uid i = 0; i < 4; ++i) {
            add_step(main, fresh(5000 + 40 * i, 30), resolution::adaptive);
            add_step(branch, fresh(6000 + 40 * i, 30), resolution::adaptive);
        }
        calls.push_back([this] { cache->begin_prefill(branch); });
        for (uid i = 0; i < 3; ++i) add_step(branch, fresh(7000 + 200 * i, 120), resolution::full);
        calls.push_back([this] { cache->end_prefill(branch); });
        add_step(branch, fresh(8000, 1), resolution::adaptive);
        add_batch();
    }

    void add_step(sekv::sequence& s, const uids& tokens, resolution how) {
        calls.push_back([this, &s, n = ssize(tokens)] { cache->reserve(s, n); });
        for (std::int32_t l = 0; l < w.layers(); ++l) {
            calls.push_back([this, &s, tokens, l] { append(*cache, w, s, l, tokens); });
            calls.push_back([this, &s, tokens, l, how] {
                result r;
                attend_layer(*cache, w, s, l, tokens, how, r);
                outputs.push_back(std::move(r));
            });
        }
        calls.push_back([this, &s, tokens] { cache->observe(s, w.surprisal(tokens)); });
    }
    void add_batch() {
        calls.push_back([this] {
            const sekv::batch_item items[] = {{main, 1, -1}, {branch, 2, -1}};
            const auto q = w.queries(0, fresh(99, 3));
            std::vector<float> out(q.size());
            cache->attend(items, 0, sekv::rows(q.data(), 3, 2, 64), resolution::adaptive, sekv::out_rows(out.data(), 3, 2, 64));
            outputs.push_back({{out}, {}});
        });
    }

    // What a caller can see of a sequence.
    struct view {
        std::int64_t sealed;
        std::vector<token_rows> rows;
        bool operator==(const view&) const = default;
    };
    view look(sekv::sequence s) const {
        view v{cache->sealed(s), {}};
        for (std::int32_t l = 0; l < w.layers(); ++l) {
            if (w.at(l).windowed()) continue;
            try {
                v.rows.push_back(materialize(*cache, w, s, l, 0, 64));
            } catch (const sekv::invalid_argument&) {  // not so long yet
            }
        }
        return v;
    }
    std::vector<view> look() const {
        std::vector<view> v;
        for (const auto s : {main, branch}) {
            if (s.generation != 0) v.push_back(look(s));
        }
        return v;
    }

    // Runs all calls. With faults, a call is made again and again, its first allocation failing, then its second, until one call meets none.
    void run(bool faults) {
        for (std::size_t i = 0; i < calls.size(); ++i) {
            for (std::int64_t k = 1;; ++k) {
                const auto before = faults ? look() : std::vector<view>{};
                const auto held = resource->live;
                resource->fail_at = faults ? resource->calls + k : -1;
                resource->throws = k % 2 == 0;
                try {
                    calls[i]();
                    break;
                } catch (const sekv::budget_error& e) {
                    ++failures;
                    ASSERT_TRUE(faults && look() == before) << "allocation " << k << " of call " << i << " failed and changed something, or should not have: " << e.what();
                    if (resource->live != held) k = 0;  // what doesn't show (rows moved, metric unshared, sketches renewed) stays done: count anew
                }
            }
        }
        resource->fail_at = -1;
    }
};

class CacheFaults : public ::testing::TestWithParam<bool> {};

TEST_P(CacheFaults, EveryAllocationMayFail) {
    if (float_cache::on_device) GTEST_SKIP() << "the CUDA backend brings its own memory; see tests/cuda/backend_faults_test.cpp";
    scenario undisturbed(GetParam()), s(GetParam());
    undisturbed.run(false);
    ASSERT_GT(undisturbed.cache->sealed(undisturbed.main), 200);
    s.run(true);
    std::printf("%lld failures\n", static_cast<long long>(s.failures));
    EXPECT_GE(s.failures, undisturbed.resource->calls * 9 / 10);  // the rest was done by a call that failed later
    ASSERT_EQ(s.outputs.size(), undisturbed.outputs.size());
    for (std::size_t i = 0; i < s.outputs.size(); ++i) ASSERT_TRUE(s.outputs[i] == undisturbed.outputs[i]) << "output " << i << " of " << s.outputs.size();
    EXPECT_EQ(s.cache->sealed(s.main), undisturbed.cache->sealed(undisturbed.main));
    EXPECT_EQ(s.cache->used(s.main), undisturbed.cache->used(undisturbed.main));
    s.cache->close(s.main);
    s.cache->close(s.branch);
    EXPECT_EQ(s.cache->used(), sekv::usage{});
    EXPECT_TRUE(s.resource->live.empty()) << "something leaks";
    EXPECT_EQ(s.resource->mismatches, 0);
}
INSTANTIATE_TEST_SUITE_P(ExactTier, CacheFaults, ::testing::Bool());

}  // namespace
