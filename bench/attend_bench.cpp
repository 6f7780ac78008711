// Decode attention of one query token, all heads of one layer: SeKV beside the full cache and the bound of reading it. Every round takes both in turn, each
// after a pass that empties the caches: a layer of a deep model finds its data in memory. Times are medians over the rounds.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "sekv/exec/row_ops.hpp"
#include "subject.hpp"

namespace sekv::bench {
namespace {

struct timings {
    std::vector<double> sekv, full, warm, bandwidth;
};

timings race(benchmark::State& state, subject& s, full_kv_attention& full) {
    auto& env = environment::get();
    timings t;
    std::vector<float> out(static_cast<std::size_t>(s.shape().query_heads() * s.shape().value_size));
    for (int i = 0; i < 3; ++i) (void)s.attend();
    for (auto _ : state) {
        t.bandwidth.push_back(env.cold.run(*env.threads));
        t.sekv.push_back(s.attend());
        t.warm.push_back(s.attend());
        t.bandwidth.push_back(env.cold.run(*env.threads));
        const auto* q = s.next_query();
        const auto start = std::chrono::steady_clock::now();
        full.attend(q, out.data(), *env.threads);
        t.full.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        benchmark::DoNotOptimize(out.data());
        state.SetIterationTime(t.sekv.back());
    }
    return t;
}

void report(benchmark::State& state, subject& s, const full_kv_attention& full, const timings& t) {
    const auto sekv = median(t.sekv), bandwidth = median(t.bandwidth);
    const auto used = s.cache().used(s.id());
    const auto kv = static_cast<double>(s.full_bytes());
    state.counters["sekv_ms"] = 1e3 * sekv;
    state.counters["sekv_warm_ms"] = 1e3 * median(t.warm);
    state.counters["full_kv_ms"] = 1e3 * median(t.full);
    state.counters["bound_ms"] = 1e3 * static_cast<double>(full.bytes()) / bandwidth;
    state.counters["read_GBps"] = 1e-9 * bandwidth;
    state.counters["vs_full_kv"] = median(t.full) / sekv;
    state.counters["vs_bandwidth_bound"] = static_cast<double>(full.bytes()) / bandwidth / sekv;
    state.counters["device_bytes"] = static_cast<double>(used.total(tier::device));
    state.counters["device_share"] = static_cast<double>(used.total(tier::device)) / kv;
    state.counters["host_bytes"] = static_cast<double>(used.total(tier::host));
    state.counters["host_share"] = static_cast<double>(used.total(tier::host)) / kv;
}

void report_zooms(benchmark::State& state, const zoom_metrics& before, const zoom_metrics& after, std::int64_t sealed) {
    const auto lists = static_cast<double>(after.zooms - before.zooms);
    const auto tokens = static_cast<double>(after.tokens - before.tokens);
    state.counters["zoom_rate"] = lists > 0 ? tokens / lists / static_cast<double>(sealed) : 0.0;
    state.counters["zoomed_per_head"] = lists > 0 ? tokens / lists : 0.0;
    state.counters["hit_rate"] = tokens > 0 ? static_cast<double>(after.hits - before.hits) / tokens : 0.0;
}

/// rate: of zoomed tokens; none: the default tau and cap.
void attend(benchmark::State& state, const layer_case& layer, std::int64_t n, std::optional<double> rate) {
    auto& s = subject::get(layer, n, filling::sealed);
    auto& full = opponent(layer, n);
    if (rate) {
        state.counters["tau"] = s.turn_to_rate(*rate);
    } else {
        const progressive_options o;
        s.zoom_dial().turn(o.tau, o.cap);
        state.counters["tau"] = o.tau;
    }
    const auto before = s.cache().zooms();
    const auto t = race(state, s, full);
    report(state, s, full, t);
    report_zooms(state, before, s.cache().zooms(), s.cache().sealed(s.id()));
}

void attend_exact(benchmark::State& state, const layer_case& layer, std::int64_t n) {
    auto& s = subject::get(layer, n, filling::exact);
    auto& full = opponent(layer, n);
    const auto t = race(state, s, full);
    report(state, s, full, t);
}

void append_seal(benchmark::State& state, const layer_case& layer, std::int64_t n) {
    for (auto _ : state) {
        auto& s = subject::fresh(layer, n, filling::sealed);
        const auto seconds = s.append_seconds() + s.seal_seconds();
        state.SetIterationTime(seconds);
        state.counters["tokens_per_s"] = static_cast<double>(n) / seconds;
        state.counters["append_ms"] = 1e3 * s.append_seconds();
        state.counters["seal_ms"] = 1e3 * s.seal_seconds();
        state.counters["prefill_ms"] = 1e3 * s.prefill_seconds();
        state.counters["seal_vs_prefill"] = s.seal_seconds() / s.prefill_seconds();
        state.counters["vs_prefill"] = seconds / s.prefill_seconds();
    }
}

}  // namespace

void route(benchmark::State& state, const layer_case& layer, std::int64_t n);

namespace {

/// Zoomed tokens per head as a share of the sealed ones, from the JSON that examples/long_context wrote (SEKV_ZOOM_RATE names it).
std::optional<double> measured_rate() {
    const char* path = std::getenv("SEKV_ZOOM_RATE");
    if (path == nullptr) return std::nullopt;
    std::ifstream file(path);
    if (!file) throw std::runtime_error(std::string("SEKV_ZOOM_RATE names \"") + path + "\", which can't be read.");
    const auto json = nlohmann::json::parse(file);
    return json.at("zoom").at("tokens_per_head").get<double>() / json.at("sealed_tokens").get<double>();
}

std::string percent(double rate) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g%%", 100 * rate);
    return text;
}

template <class Run>
void add(const std::string& name, std::int64_t iterations, const Run& run) {
    benchmark::RegisterBenchmark(name.c_str(), run)->Iterations(iterations)->UseManualTime()->Unit(benchmark::kMillisecond);
}

const bool registered = [] {
    const auto rounds = environment::rounds();
    const auto real = measured_rate();
    benchmark::AddCustomContext("sekv_target", host::target_name());
    for (const auto& layer : layer_cases) {
        for (const auto n : lengths) {
            const auto at = std::string("/") + layer.name + "/" + std::to_string(n / 1024) + "K";
            add("append_seal" + at, 1, [&layer, n](benchmark::State& s) { append_seal(s, layer, n); });
            add("route" + at, rounds, [&layer, n](benchmark::State& s) { route(s, layer, n); });
            add("attend" + at + "/default", rounds, [&layer, n](benchmark::State& s) { attend(s, layer, n, std::nullopt); });
            for (const auto rate : {0.005, 0.01, 0.02, 0.04}) {
                add("attend" + at + "/zoom_" + percent(rate), rounds, [&layer, n, rate](benchmark::State& s) { attend(s, layer, n, rate); });
            }
            if (real) add("attend" + at + "/zoom_as_measured_" + percent(*real), rounds, [&layer, n, real](benchmark::State& s) { attend(s, layer, n, real); });
            add("attend_exact" + at, rounds, [&layer, n](benchmark::State& s) { attend_exact(s, layer, n); });
        }
    }
    return true;
}();

}  // namespace
}  // namespace sekv::bench
