// The whole cache on the CUDA backend when memory runs out, launches and copies are refused, or the context is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/backend_world.hpp"
#include "src/cuda/context.hpp"

namespace {

using namespace sekv_test;
using fakecuda::call;
using sekv::resolution;
using sekv::tier;
using cache = sekv::cuda_fp16_cache;

constexpr std::size_t exact_slabs = 256;  // every range that isn't there yet is asked of the driver

struct limits {
    std::size_t slab = exact_slabs;
    std::uint64_t device = sekv::memory::unlimited, host = sekv::memory::unlimited;
    std::size_t pinned = ~std::size_t{0};
    std::int32_t horizon = 64, epoch_tokens = 256;
};

world faults_world() {
    world w({layer(1, 2), layer(1, 1, 20), layer(1, 2)});
    w.query_gain = 2.0F;
    return w;
}

std::unique_ptr<cache> make_cache(const world& w, const limits& l) {
    auto codec = small_codec();
    codec.horizon = l.horizon, codec.epoch_tokens = l.epoch_tokens;
    codec.tau = 2e-3F;
    auto o = small_options();
    o.device_budget = l.device;
    o.host_budget = l.host;
    return std::make_unique<cache>(w.model, o, codec, sekv::cuda_backend({.device_slab = l.slab, .pinned_slab = l.slab, .pinned_limit = l.pinned}));
}

/// Gives the driver back whatever is free, so that the next allocations reach it.
void give_back_slabs(cache& c) {
    c.where().synchronize();
    c.where().context().memory().pool().trim();
    c.where().context().memory().arena().trim();
}

// A life of two sequences as single calls, so that the one that failed can be made again.
struct scenario {
    struct step {
        const char* name;
        std::function<void()> prepare, body, after;
    };
    world w = faults_world();
    std::unique_ptr<cache> c;
    std::uint64_t quota;
    sekv::sequence main, branch;
    sekv::plan plan;
    std::unique_ptr<device_step> memory;
    std::vector<result> outputs;
    std::vector<step> calls;

    explicit scenario(std::uint64_t device_quota, const limits& l = {}) : c(make_cache(w, l)), quota(device_quota), memory(std::make_unique<device_step>(w, 3)) {
        add("open", [this] { main = c->open({quota, 2000}); });
        for (uid chunk = 0; chunk < 4; ++chunk) add_step(main, fresh(1 + 200 * chunk, chunk == 3 ? 90 : 150), resolution::full);
        add("end_prefill", [this] { c->end_prefill(main); });
        for (uid i = 0; i < 4; ++i) add_step(main, fresh(3000 + 20 * i, 6), resolution::adaptive);
        add("fork", [this] { branch = c->fork(main, c->length(main) - 5); });
        add_planned_steps(fresh(7500, 6));
        for (uid i = 0; i < 4; ++i) {  // drafts, some of them rejected
            add_step(main, fresh(5000 + 40 * i, 40), resolution::adaptive);
            add("truncate", [this] { c->truncate(main, c->length(main) - 7); });
            if (i < 2) add_step(branch, fresh(6000 + 40 * i, 20), resolution::adaptive);
        }
        add("begin_prefill", [this] { c->begin_prefill(branch); });
        add_step(branch, fresh(7000, 90), resolution::full);
        add_prompt_without_attention(fresh(7200, 70));
        add("end_prefill", [this] { c->end_prefill(branch); });
        for (uid i = 0; i < 2; ++i) add_planned_steps(fresh(8000 + 100 * i, 24));
        constexpr std::ptrdiff_t first_planned_step = 75;
        if (short_run()) calls.erase(calls.begin() + first_planned_step, calls.end());
    }

    void add(const char* name, std::function<void()> body, std::function<void()> prepare = {}, std::function<void()> after = {}) { calls.push_back({name, std::move(prepare), std::move(body), std::move(after)}); }

    void add_step(sekv::sequence& s, const uids& tokens, resolution how) {
        add("reserve", [this, &s, n = ssize(tokens)] { c->reserve(s, n); });
        for (std::int32_t l = 0; l < w.layers(); ++l) {
            add("append", [this, &s, tokens, l] { append(*c, w, s, l, tokens); });
            add("attend", [this, &s, tokens, l, how] {
                result r;
                attend_layer(*c, w, s, l, tokens, how, r);
                outputs.push_back(std::move(r));
            });
        }
        add("observe", [this, &s, tokens] { c->observe(s, w.surprisal(tokens)); });
    }

    // Queries come with the rows: what an engine does that attends by itself.
    void add_prompt_without_attention(const uids& tokens) {
        for (std::int32_t l = 0; l < w.layers(); ++l) {
            add("append with queries", [this, tokens, l] {
                const auto& x = w.at(l);
                const auto k = w.keys(l, tokens), v = w.values(l, tokens), q = w.queries(l, tokens);
                const auto n = ssize(tokens);
                const auto queries = sekv::rows(q.data(), n, x.query_heads(), x.key_size);
                c->append(branch, l, sekv::rows(k.data(), n, x.kv_heads, x.key_size), sekv::rows(v.data(), n, x.kv_heads, x.value_size), -1, &queries);
            });
        }
    }

    // Steps of both sequences over one plan, everything in device memory.
    void add_planned_steps(const uids& tokens) {
        add("make_plan", [this] {
            const sekv::batch_item items[] = {{main, 1, -1}, {branch, 2, -1}};
            plan = c->make_plan(items, resolution::adaptive);
        });
        for (std::size_t i = 0; i + 3 <= tokens.size(); i += 3) {
            const uids rows(tokens.begin() + static_cast<std::ptrdiff_t>(i), tokens.begin() + static_cast<std::ptrdiff_t>(i) + 3);
            add("begin_step", [this] { c->begin_step(plan); }, [this, rows] { memory->put(rows, c->where().stream()); });
            for (std::int32_t l = 0; l < w.layers(); ++l) {
                add("prefetch(plan)", [this, l] { memory->prefetch(*c, plan, l); });
                add("append(plan)", [this, l] { memory->append(*c, plan, l); });
                add("attend(plan)", [this, l] { memory->attend(*c, plan, l); });
            }
            calls.back().after = [this] { outputs.push_back(memory->get(c->where().stream())); };
        }
    }

    // What a caller can see of a sequence.
    struct view {
        std::int64_t length = -1, sealed = 0;
        std::vector<token_rows> rows;
        bool operator==(const view&) const = default;
    };
    [[nodiscard]] view look(sekv::sequence s, bool rows) const {
        view v;
        v.sealed = c->sealed(s);
        try {
            v.length = c->length(s);
        } catch (const sekv::state_error&) {  // in the middle of a step
        }
        for (std::int32_t l = 0; rows && l < w.layers(); ++l) {
            if (w.at(l).windowed()) continue;
            try {
                v.rows.push_back(materialize(*c, w, s, l, 0, 64));
                if (v.length >= 40) v.rows.push_back(materialize(*c, w, s, l, v.length - 40, 40));
            } catch (const sekv::invalid_argument&) {  // not so long yet
            }
        }
        return v;
    }
    [[nodiscard]] std::vector<view> look(bool rows) const {
        std::vector<view> v;
        for (const auto s : {main, branch}) {
            if (s.generation != 0) v.push_back(look(s, rows));
        }
        return v;
    }

    struct level_state {
        std::int64_t sealed = 0;
        std::vector<const void*> keys;  ///< of the blocks of the first sequence
    };
    [[nodiscard]] level_state levels() const {
        level_state v;
        if (branch.generation != 0) v.sealed += c->sealed(branch);
        if (main.generation == 0) return v;
        v.sealed += c->sealed(main);
        for (const auto& u : c->units(main)) v.keys.push_back(u.payload.keys.get());
        return v;
    }

    void run(std::size_t i) {
        if (calls[i].prepare) calls[i].prepare();
        calls[i].body();
        if (calls[i].after) calls[i].after();
    }
    void run() {
        for (std::size_t i = 0; i < calls.size(); ++i) run(i);
    }

    /// Every call is made again and again, each time with another driver call failing, until it meets none. `spacing`: of those that fail. Returns how many did.
    template <class Error>
    std::int64_t run_with_faults(const std::function<void(int)>& plan_fault, int spacing, bool fresh_memory, const std::function<void(const Error&)>& check) {
        std::int64_t failures = 0;
        for (std::size_t i = 0; i < calls.size(); ++i) {
            if (calls[i].prepare) calls[i].prepare();
            for (int k = static_cast<int>(i) % spacing;; k += spacing) {
                const bool rows = failures % 8 == 0;
                const auto before = look(rows);
                if (fresh_memory) give_back_slabs(*c);
                plan_fault(k);
                bool failed = false;
                try {
                    calls[i].body();
                } catch (const Error& e) {
                    failed = true;
                    fakecuda::clear_faults();
                    check(e);
                }
                fakecuda::clear_faults();
                if (!failed) break;
                ++failures;
                if (std::string(calls[i].name) == "begin_step") continue;  // sequences before the one that failed keep their reservation
                const auto now = look(rows);
                EXPECT_TRUE(now == before) << "driver call " << k << " of " << calls[i].name << " (call " << i << ") failed and changed something";
                if (testing::Test::HasFailure()) return failures;
            }
            if (calls[i].after) calls[i].after();
        }
        return failures;
    }
};

/// A quota that makes prompts of the scenario's length seal most of themselves, and decoding seal now and then.
std::uint64_t pressed_quota() {
    const auto c = make_cache(faults_world(), {});
    const auto probe = c->open({sekv::memory::unlimited - 1, 2000});
    const auto u = c->used(probe);
    return 370'000 + u.total(tier::device) - u.at(tier::device, sekv::kind::line_cache);
}

void expect_same_end(const scenario& s, const scenario& undisturbed, const char* what) {
    ASSERT_EQ(s.outputs.size(), undisturbed.outputs.size()) << what;
    for (std::size_t i = 0; i < s.outputs.size(); ++i) ASSERT_TRUE(s.outputs[i] == undisturbed.outputs[i]) << what << ": output " << i << " of " << s.outputs.size();
    EXPECT_TRUE(s.look(true) == undisturbed.look(true)) << what;
    for (const auto& [a, b] : {std::pair{s.main, undisturbed.main}, std::pair{s.branch, undisturbed.branch}}) EXPECT_EQ(s.c->used(a), undisturbed.c->used(b)) << what;
}

class CudaBackendFaults : public testing::Test {
protected:
    static void SetUpTestSuite() {
        quota_ = pressed_quota();
        undisturbed_ = std::make_unique<scenario>(quota_);
        driver_calls_.clear();
        for (std::size_t i = 0; i < undisturbed_->calls.size(); ++i) {
            const auto& x = undisturbed_->calls[i];
            if (x.prepare) x.prepare();
            const auto before = fakecuda::calls(call::any);
            x.body();
            driver_calls_.push_back(fakecuda::calls(call::any) - before);
            if (x.after) x.after();
        }
    }
    static void TearDownTestSuite() { undisturbed_.reset(); }
    static inline std::uint64_t quota_ = 0;
    static inline std::unique_ptr<scenario> undisturbed_;
    static inline std::vector<std::uint64_t> driver_calls_;  ///< of each call
};

TEST_F(CudaBackendFaults, TheScenarioReachesEveryLevel) {
    if (short_run()) GTEST_SKIP() << "short runs end with the first planned step";
    scenario s(quota_);
    std::int64_t seals = 0, sketches = 0;
    for (std::size_t i = 0; i < s.calls.size(); ++i) {
        const auto before = s.levels();
        s.run(i);
        const auto now = s.levels();
        const bool decoding = std::string(s.calls[i].name) == "reserve" || std::string(s.calls[i].name) == "begin_step";
        seals += decoding && now.sealed > before.sealed ? 1 : 0;
        sketches += decoding && now.keys != before.keys && now.sealed == before.sealed ? 1 : 0;
    }
    std::printf("%zu calls; decoding, %lld seals and %lld sketch generations\n", s.calls.size(), static_cast<long long>(seals), static_cast<long long>(sketches));
    EXPECT_GE(seals, 1);
    EXPECT_GE(sketches, 1);
    EXPECT_GT(s.c->zooms().tokens, 0U);
}

void no_memory(int k) {
    for (int i = 0; i < 4; ++i) fakecuda::fail_after(call::allocation, k, cudaErrorMemoryAllocation);  // a heap that is refused asks again, for less
}

class CudaBackendMemoryFaults : public CudaBackendFaults, public testing::WithParamInterface<std::size_t> {};

TEST_P(CudaBackendMemoryFaults, EveryAllocationMayFail) {
    scenario s(quota_, {.slab = GetParam()});
    const auto failures = s.run_with_faults<sekv::budget_error>(no_memory, short_run() ? 10 : 2, true, [](const sekv::budget_error&) {});
    std::printf("%lld allocations failed\n", static_cast<long long>(failures));
    EXPECT_GE(failures, short_run() ? 2 : 20);
    expect_same_end(s, *undisturbed_, "after allocations that failed");
}
INSTANTIATE_TEST_SUITE_P(Slabs, CudaBackendMemoryFaults, testing::Values(exact_slabs, std::size_t{64} << 10));

// Calls of one kind fail at this spacing, and what they were part of is done again.
void survives(call kind, cudaError_t error, int spacing, const char* what, std::uint64_t quota, const scenario& undisturbed) {
    scenario s(quota);
    const auto refuse = [&](int k) { fakecuda::fail_after(kind, k, error); };
    const auto failures = s.run_with_faults<sekv::device_error>(refuse, spacing, false, [](const sekv::device_error& e) { EXPECT_FALSE(e.lost()) << e.what(); });
    std::printf("%lld %s failed\n", static_cast<long long>(failures), what);
    EXPECT_GE(failures, short_run() ? 2 : 20);
    expect_same_end(s, undisturbed, what);
}

TEST_F(CudaBackendFaults, EveryLaunchMayBeRefused) { survives(call::launch, cudaErrorLaunchOutOfResources, short_run() ? 25 : 5, "launches", quota_, *undisturbed_); }

TEST_F(CudaBackendFaults, EveryCopyMayFail) { survives(call::copy, cudaErrorInvalidValue, short_run() ? 25 : 9, "copies", quota_, *undisturbed_); }

// What was waited for is done, so only what comes behind the wait may be missing.
TEST_F(CudaBackendFaults, EveryWaitMayReportAnError) { survives(call::synchronise, cudaErrorInvalidValue, short_run() ? 1 : 5, "waits", quota_, *undisturbed_); }

// Two sequences in one batch from host memory: prompts, drafts that make the rings wrap, more prompt behind them. Each attend is made again until none of its driver calls fails; then the history is sealed.
class batched_life {
public:
    explicit batched_life(std::uint64_t quota, std::function<void(int)> plan_fault = {}) : plan_fault_(std::move(plan_fault)), c_(make_cache(w_, {})), sequences_{c_->open({quota, 2000}), c_->open({quota, 2000})} {
        for (int i = 0; i < 2; ++i) step({60, 80}, resolution::full);
        for (int i = 0; i < 4; ++i) step({40, 9}, resolution::adaptive);
        for (int i = 0; i < 2; ++i) step({5, 70}, resolution::full);
        for (int i = 0; i < 2; ++i) step({70, 30}, resolution::adaptive);
        plan_fault_ = {};
        step({200, 200}, resolution::full);
        for (const auto s : sequences_) c_->end_prefill(s);
        for (int i = 0; i < 3; ++i) step({1, 2}, resolution::adaptive);
        for (const auto s : sequences_) EXPECT_GE(c_->sealed(s), 256);  // with bases that follow the metric
    }
    std::vector<result> outputs;
    std::int64_t failures = 0;

private:
    void step(const std::array<std::int64_t, 2>& counts, resolution how) {
        const std::array tokens{fresh(next_, counts[0]), fresh(next_ + 1000, counts[1])};
        next_ += 2000;
        uids all = tokens[0];
        all.insert(all.end(), tokens[1].begin(), tokens[1].end());
        for (std::size_t i = 0; i < 2; ++i) c_->reserve(sequences_[i], counts[i]);
        const sekv::batch_item items[] = {{sequences_[0], counts[0], -1}, {sequences_[1], counts[1], -1}};
        for (std::int32_t l = 0; l < w_.layers(); ++l) {
            for (std::size_t i = 0; i < 2; ++i) append(*c_, w_, sequences_[i], l, tokens[i]);
            const auto& x = w_.at(l);
            const auto q = w_.queries(l, all);
            result r;
            r.out.emplace_back(all.size() * static_cast<std::size_t>(x.query_heads() * x.value_size), NAN);
            until_none_fails([&] { c_->attend(items, l, sekv::rows(q.data(), ssize(all), x.query_heads(), x.key_size), how, sekv::out_rows(r.out.back().data(), ssize(all), x.query_heads(), x.value_size)); });
            outputs.push_back(std::move(r));
        }
    }

    template <class F>
    void until_none_fails(F&& call) {
        const int spacing = short_run() ? 16 : 2;
        for (int k = static_cast<int>(outputs.size()) % spacing; plan_fault_; k += spacing, ++failures) {
            plan_fault_(k);
            try {
                call();
                return fakecuda::clear_faults();
            } catch (const sekv::device_error& e) {
                fakecuda::clear_faults();
                EXPECT_FALSE(e.lost()) << e.what();
            }
        }
        call();
    }

    world w_ = faults_world();
    std::function<void(int)> plan_fault_;
    std::unique_ptr<cache> c_;
    std::array<sekv::sequence, 2> sequences_;
    uid next_ = 1;
};

TEST_F(CudaBackendFaults, ABatchsQueriesCountOnceHoweverOftenItsAttendFails) {
    const auto quota = quota_ - 90'000;
    const batched_life undisturbed(quota);
    for (const auto kind : {call::launch, call::copy, call::synchronise}) {
        if (short_run() && kind != call::launch) continue;
        const batched_life x(quota, [&](int k) { fakecuda::fail_after(kind, k, cudaErrorInvalidValue); });
        EXPECT_GE(x.failures, short_run() ? 2 : 20);
        ASSERT_EQ(x.outputs.size(), undisturbed.outputs.size());
        for (std::size_t i = 0; i < x.outputs.size(); ++i) ASSERT_TRUE(x.outputs[i] == undisturbed.outputs[i]) << "kind " << static_cast<int>(kind) << ", output " << i << " of " << x.outputs.size();
    }
}

TEST_F(CudaBackendFaults, AnAllocationOfTheCacheItselfMayFail) {
    const auto w = faults_world();
    const auto before = fakecuda::live_allocations();
    int failures = 0;
    for (bool failed = true; failed; ++failures) {
        no_memory(failures);
        try {
            (void)make_cache(w, {});
            failed = false;
        } catch (const sekv::budget_error&) {
        }
        fakecuda::clear_faults();
        EXPECT_EQ(fakecuda::live_allocations(), before) << failures;
    }
    EXPECT_GE(failures, 8);
}

// A budget that is short at one stage: an error there, or pages that moved to the host in time; never another content.
TEST_F(CudaBackendFaults, ABudgetMayBeTooSmallAtEachStage) {
    std::vector<limits> tried;
    {
        scenario s(quota_);
        std::uint64_t device = 0, host = 0;
        for (std::size_t i = 0; i < s.calls.size(); ++i) {
            s.run(i);
            const auto d = s.c->peak(tier::device), h = s.c->peak(tier::host);
            if (d > device) tried.push_back({.device = d - 1});
            if (h > host) tried.push_back({.host = h - 1});
            device = d, host = h;
        }
    }
    const auto every = tried.size() / (short_run() ? 4 : 12) + 1;
    std::int64_t failures = 0, runs = 0, moved = 0;
    std::string names;
    for (auto t = tried.size() % every; t < tried.size(); t += every) {
        ++runs;
        scenario s(quota_, tried[t]);
        std::size_t i = 0;
        for (; i < s.calls.size(); ++i) {
            const auto before = s.look(false);
            const auto rows = s.calls[i].name == std::string("end_prefill") ? s.look(true) : std::vector<scenario::view>();
            try {
                s.run(i);
                continue;
            } catch (const sekv::budget_error& e) {
                ++failures;
                names += std::string(" ") + s.calls[i].name;
            }
            EXPECT_TRUE(s.look(false) == before) << s.calls[i].name;
            EXPECT_TRUE(rows.empty() || s.look(true) == rows) << s.calls[i].name;
            break;
        }
        EXPECT_LE(s.c->used().total(tier::device), tried[t].device);
        // Pages that moved change time only.
        for (std::size_t o = 0; o < s.outputs.size(); ++o) ASSERT_TRUE(s.outputs[o] == undisturbed_->outputs[o]) << "output " << o << " before " << i;
        if (i == s.calls.size()) ++moved;
        // What closing gives back serves another sequence.
        if (s.main.generation != 0) s.c->close(s.main);
        if (s.branch.generation != 0) s.c->close(s.branch);
        s.plan = sekv::plan();
        if (i < 5) continue;
        const auto again = s.c->open({quota_, 2000});
        (void)step(*s.c, s.w, again, fresh(1, 20), resolution::full);
        EXPECT_EQ(s.c->length(again), 20);
    }
    std::printf("%lld of %lld budgets were too small, at%s; %lld were met by moving\n", static_cast<long long>(failures), static_cast<long long>(runs), names.c_str(), static_cast<long long>(moved));
    EXPECT_GE(failures, short_run() ? 1 : 5);
}

// A prompt, then blocks that are sealed one by one until a basis is fitted on what they decode to.
struct sealed_life {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> peaks;  ///< of host memory, before and after each call that may seal
    std::vector<std::uint64_t> next;  ///< what the first sketch generation after each takes: bases and planes
    std::size_t epochs = 0;

    void run(cache& c, const world& w, std::uint64_t quota, uid chunks) {
        const auto probe = c.open({sekv::memory::unlimited - 1, 2000});
        const auto u = c.used(probe);
        const auto s = c.open({quota + u.total(tier::device) - u.at(tier::device, sekv::kind::line_cache), 3000});
        c.close(probe);
        const auto call = [&](auto&& body) {
            const auto before = c.peak(tier::host);
            body();
            peaks.emplace_back(before, c.peak(tier::host));
            next.push_back(c.used(s).at(tier::host, sekv::kind::basis) + c.used(s).at(tier::device, sekv::kind::sketch));
        };
        for (uid i = 0; i < chunks; ++i) {
            call([&] { c.reserve(s, 16); });
            append_all(c, w, s, fresh(1 + 100 * i, 16));  // little at once: staging is the host's memory, too
            if (i == 37) call([&] { c.end_prefill(s); });
        }
        std::vector<const void*> seen;
        for (const auto& x : c.units(s)) seen.push_back(x.payload.statistics.get());
        epochs = static_cast<std::size_t>(std::unique(seen.begin(), seen.end()) - seen.begin());
    }
};

TEST_F(CudaBackendFaults, WhatASealAsksForSuffices) {
    const auto w = faults_world();
    struct kind {
        std::int32_t horizon, epoch_tokens;
        std::uint64_t quota;
        uid chunks;
    };
    for (const auto& [horizon, epoch_tokens, quota, chunks] : {kind{0, 512, 450'000, 110}, kind{256, 256, 400'000, 75}}) {
        sealed_life ample;
        ample.run(*make_cache(w, {.horizon = horizon, .epoch_tokens = epoch_tokens}), w, quota, chunks);
        EXPECT_GE(ample.epochs, 2) << "horizon " << horizon;
        int refused = 0;
        for (std::size_t i = 0; i < ample.peaks.size(); ++i) {
            const auto [before, after] = ample.peaks[i];
            if (after <= before) continue;
            using refusal = std::optional<std::pair<std::size_t, sekv::budget_error>>;
            const auto first_refusal = [&](std::uint64_t limit) -> refusal {  // up to call i, with so much host memory
                sealed_life x;
                try {
                    x.run(*make_cache(w, {.host = limit, .horizon = horizon, .epoch_tokens = epoch_tokens}), w, quota, chunks);
                } catch (const sekv::budget_error& e) {
                    if (x.peaks.size() <= i) return std::pair(x.peaks.size(), e);
                }
                return {};
            };
            const auto r = first_refusal(after - 1);
            if (!r) continue;  // the peak was that of the tables' staging, which may wait
            ++refused;
            const auto& [call, e] = *r;
            EXPECT_NE(std::string(e.what()).find(" for the "), std::string::npos) << "horizon " << horizon << ", call " << call << ", not before it began: " << e.what();
            EXPECT_TRUE(horizon == 0 || refused > 1 || e.requested() - e.available() - 1 >= ample.next[call]) << "the sketches after call " << call << " weren't asked for";
            const auto again = first_refusal(after - 1 + e.requested() - e.available());
            EXPECT_TRUE(!again || again->first > call) << "what was asked for doesn't suffice, horizon " << horizon << ", call " << call << ": " << again->second.what();
        }
        std::printf("horizon %d: %d calls refused, %zu epochs\n", horizon, refused, ample.epochs);
        EXPECT_GE(refused, 2);
    }
}

// Steps that the host runs ahead of. waited: not, so that each step's memory in flight can be used again by the next. Returns the last step's outputs.
result steps_ahead(cache& c, const world& w, bool waited) {
    const auto s = c.open({0, 2000});
    auto p = c.make_plan(std::vector<sekv::batch_item>{{s, 1, -1}}, resolution::adaptive);
    device_step memory(w, 1);
    memory.put({9000}, c.where().stream());
    for (int i = 0; i < 40; ++i) {
        c.begin_step(p);
        memory.layers(c, p);
        if (waited) c.where().synchronize();
    }
    return memory.get(c.where().stream());
}

TEST_F(CudaBackendFaults, PinnedMemoryInFlightIsWaitedFor) {
    const auto w = faults_world();
    fakecuda::set_policy(fakecuda::policy::lazy);
    const auto reserved = [](cache& c) { return static_cast<std::size_t>(c.where().context().memory().arena().usage().reserved); };
    const auto ample = make_cache(w, {}), slow = make_cache(w, {});
    const auto expected = steps_ahead(*ample, w, false);
    EXPECT_EQ(ample->where().transfers().waits, 0U);
    EXPECT_TRUE(steps_ahead(*slow, w, true) == expected);
    EXPECT_LT(reserved(*slow), reserved(*ample));
    const auto c = make_cache(w, {.pinned = reserved(*slow)});
    EXPECT_TRUE(steps_ahead(*c, w, false) == expected);
    EXPECT_GT(c->where().transfers().waits, 5U);
    EXPECT_LE(reserved(*c), reserved(*slow));
}

// The line cache knows lines by their position.
TEST_F(CudaBackendFaults, TruncatedTokensLinesAreForgottenThoughALaunchIsRefused) {
    const world w = [] {
        world one({layer(1, 2)});
        one.query_gain = 2.0F;
        return one;
    }();
    const auto run = [&](bool refused) {
        const auto c = make_cache(w, {});
        const auto probe = c->open({sekv::memory::unlimited - 1, 2000});
        const auto u = c->used(probe);
        const auto s = c->open({150'000 + u.total(tier::device) - u.at(tier::device, sekv::kind::line_cache), 2000});
        prefill(*c, w, s, fresh(1, 600));
        EXPECT_GE(c->sealed(s), 256);
        (void)decode(*c, w, s, fresh(5000, 6));
        EXPECT_GT(c->zooms().misses, 0U);
        if (refused) fakecuda::fail_after(call::launch, 0, cudaErrorLaunchOutOfResources);
        c->truncate(s, 64);
        if (refused) {
            EXPECT_THROW((void)materialize(*c, w, s, 0, 0, 64), sekv::device_error);
        }
        fakecuda::clear_faults();
        c->begin_prefill(s);
        prefill(*c, w, s, fresh(20'000, 540));
        EXPECT_GE(c->sealed(s), 256);
        return decode(*c, w, s, fresh(6000, 6));
    };
    EXPECT_TRUE(run(true) == run(false));
}

TEST_F(CudaBackendFaults, PinnedMemoryMayBeTooSmall) {
    std::size_t most = 0;
    {
        scenario s(quota_);
        for (std::size_t i = 0; i < 60; ++i) s.run(i);
        most = static_cast<std::size_t>(s.c->where().context().memory().arena().usage().reserved);
    }
    std::int64_t failures = 0;
    const auto start = std::size_t{2} << 20;  // the staging buffers and what the cache itself takes
    for (int part = 1; part <= 4; ++part) {
        scenario s(quota_, {.pinned = start + (most - start) * static_cast<std::size_t>(part) / 5});
        for (std::size_t i = 0; i < 60; ++i) {
            const auto before = s.look(false);
            try {
                s.run(i);
            } catch (const sekv::budget_error&) {
                ++failures;
                EXPECT_TRUE(s.look(false) == before) << s.calls[i].name;
                break;
            }
        }
        for (std::size_t o = 0; o < s.outputs.size(); ++o) ASSERT_TRUE(s.outputs[o] == undisturbed_->outputs[o]) << "output " << o;
    }
    std::printf("%lld of 4 limits of pinned memory were too small\n", static_cast<long long>(failures));
    EXPECT_GE(failures, 1);
}

template <class F>
void expect_lost(const char* name, F&& f) {
    try {
        f();
        ADD_FAILURE() << name << " works with a lost context";
    } catch (const sekv::device_error& e) {
        EXPECT_TRUE(e.lost()) << name << ": " << e.what();
    }
}

TEST_F(CudaBackendFaults, ALostContextIsSaidToBeLostAndLeavesTheCacheDestructible) {
    // The first of every kind of call; of its driver calls any.
    std::vector<std::size_t> chosen;
    std::map<std::string, int> seen;
    for (std::size_t i = 0; i < undisturbed_->calls.size(); ++i) {
        auto& n = seen[undisturbed_->calls[i].name];
        if (driver_calls_[i] > 0 && n++ == 0) chosen.push_back(i);
    }
    const auto before = fakecuda::live_allocations();
    std::int64_t runs = 0;
    for (std::size_t n = 0; n < chosen.size(); n += short_run() ? 6 : 1) {
        const auto at = chosen[n];
        const auto k = static_cast<int>(mixed(at) % driver_calls_[at]);
        {
            scenario s(quota_);
            for (std::size_t i = 0; i < at; ++i) s.run(i);
            const auto& x = s.calls[at];
            if (x.prepare) x.prepare();
            fakecuda::fail_after(call::any, k, n % 2 == 0 ? cudaErrorIllegalAddress : cudaErrorLaunchFailure, true);
            ++runs;
            if (std::string(x.name) == "truncate") {
                EXPECT_NO_THROW(x.body()) << "forgetting is the host's own business";
            } else {
                expect_lost(x.name, x.body);
                expect_lost(x.name, x.body);
            }
            expect_lost("open", [&] { (void)s.c->open({quota_, 2000}); });
            expect_lost("synchronize", [&] { s.c->where().synchronize(); });
            expect_lost("make_plan", [&] { (void)s.c->make_plan(std::vector<sekv::batch_item>{{{}, 3, -1}}, resolution::adaptive); });
            if (s.main.generation != 0) {
                EXPECT_NO_THROW((void)s.c->sealed(s.main));
                EXPECT_NO_THROW((void)s.c->used(s.main));
                if (at > 3) expect_lost("materialize", [&] { (void)materialize(*s.c, s.w, s.main, 0, 0, 10); });
            }
            EXPECT_NO_THROW((void)s.c->zooms());
            if (s.branch.generation != 0) s.c->close(s.branch);  // the other goes with the cache
        }
        fakecuda::reset();
        EXPECT_EQ(fakecuda::live_allocations(), before) << undisturbed_->calls[at].name;
    }
    std::printf("lost the context in %lld calls\n", static_cast<long long>(runs));
    scenario s(quota_);
    for (std::size_t i = 0; i < 60; ++i) s.run(i);
    ASSERT_GT(s.outputs.size(), 12U);
    for (std::size_t o = 0; o < s.outputs.size(); ++o) EXPECT_TRUE(s.outputs[o] == undisturbed_->outputs[o]) << "output " << o << " of a new cache";
}

}  // namespace
