#include "report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace sekv::example {
namespace {

const char* name_of(preset p) { return p == preset::paper ? "paper" : "progressive"; }
const char* name_of(kv_type t) { return t == kv_type::f32 ? "f32" : t == kv_type::f16 ? "f16" : "bf16"; }
const char* name_of(span_policy p) { return p == span_policy::key_novelty ? "novelty" : p == span_policy::fixed ? "fixed" : "surprisal"; }
double microseconds(std::uint64_t ns) { return static_cast<double>(ns) / 1e3; }
double tokens_per_zoom(const zoom_metrics& m) { return m.zooms > 0 ? static_cast<double>(m.tokens) / static_cast<double>(m.zooms) : 0.0; }

struct tally {
    std::int64_t expected = 0, full = 0, ours = 0, kept = 0, agree = 0;
};

tally count(const std::vector<answer_comparison>& answers) {
    tally t;
    for (const auto& a : answers) {
        t.expected += a.expected.empty() ? 0 : 1;
        t.full += a.full.right ? 1 : 0;
        t.ours += a.ours.right ? 1 : 0;
        t.kept += a.full.right && a.ours.right ? 1 : 0;
        t.agree += a.agree ? 1 : 0;
    }
    return t;
}

void print_quality(const run_report& r) {
    if (!r.answers.empty()) {
        const auto t = count(r.answers);
        const auto d = r.over_answers();
        fmt::print("answers         {} of {} the same text; right: full cache {}, SeKV {} of {} known; {} of the full cache's {} right ones kept\n", t.agree,
                   r.answers.size(), t.full, t.ours, t.expected, t.kept, t.full);
        fmt::print("  KL            {:.3g} nats/token over {} answer positions (largest {:.3g}), same top token {:.1f}%\n", d.kl(), d.positions, d.kl_max,
                   100 * d.agreement());
    }
    if (const auto& d = r.continuation.difference; d.positions > 0) {
        fmt::print("continuation    KL {:.3g} nats/token over {} tokens (largest {:.3g}), same top token {:.1f}%\n", d.kl(), d.positions, d.kl_max,
                   100 * d.agreement());
        fmt::print("  surprisal     full cache {:.4f}, SeKV {:.4f} nats/token\n", r.continuation.full_surprisal, r.continuation.our_surprisal);
    }
}

void print_tier(const run_report& r, tier t, const char* label) {
    const auto& u = r.longest.used;
    fmt::print("{:<15} {:>12} bytes, {:.2f}% of bf16 KV, peak over the run {:.2f}%\n", label, u.total(t), 100 * r.share(u.total(t)),
               100 * r.share(t == tier::device ? r.last.device_peak : r.last.host_peak));
    for (std::size_t k = 0; k < kind_count; ++k) {
        if (const auto b = u.at(t, static_cast<kind>(k)); b > 0)
            fmt::print("  {:<13} {:>12} {:>8.2f}%\n", sekv::name_of(static_cast<kind>(k)), b, 100 * r.share(b));
    }
}

nlohmann::json tier_json(const run_report& r, tier t) {
    const auto peak = t == tier::device ? r.last.device_peak : r.last.host_peak;
    const auto total = r.longest.used.total(t);
    nlohmann::json j{{"bytes", total}, {"share", r.share(total)}, {"peak_bytes", peak}, {"peak_share", r.share(peak)}};
    for (std::size_t k = 0; k < kind_count; ++k) j["by_kind"][sekv::name_of(static_cast<kind>(k))] = r.longest.used.at(t, static_cast<kind>(k));
    return j;
}

nlohmann::json divergence_json(const divergence& d) {
    return {{"positions", d.positions}, {"kl", d.kl()}, {"kl_max", d.kl_max}, {"top1_agreement", d.agreement()}};
}

nlohmann::json answers_json(const run_report& r) {
    auto list = nlohmann::json::array();
    for (const auto& a : r.answers) {
        list.push_back({{"question", a.question},
                        {"expected", a.expected},
                        {"full_cache", a.full.text},
                        {"sekv", a.ours.text},
                        {"full_cache_right", a.full.right},
                        {"sekv_right", a.ours.right},
                        {"agree", a.agree},
                        {"divergence", divergence_json(a.difference)}});
    }
    return list;
}

nlohmann::json zoom_json(const zoom_metrics& m) {
    return {{"lists", m.zooms},
            {"tokens", m.tokens},
            {"tokens_per_head", tokens_per_zoom(m)},
            {"most_tokens", m.most_tokens},
            {"capped", m.capped},
            {"hit_rate", m.hit_rate()},
            {"bytes", m.bytes},
            {"latency_us",
             {{"p50", microseconds(m.latency.percentile(0.5))}, {"p99", microseconds(m.latency.percentile(0.99))}, {"max", microseconds(m.latency.max())}}}};
}

nlohmann::json settings_json(const arguments& a) {
    const auto& p = a.progressive;
    return {{"model", a.model},
            {"document", a.document},
            {"preset", name_of(a.method)},
            {"kv_type", name_of(a.stored)},
            {"segmenter", name_of(a.cache.spans.policy)},
            {"recent", a.cache.window},
            {"rejectable", a.cache.rejectable},
            {"sketch_bits", {p.key_sketch_bits, p.value_sketch_bits}},
            {"line_factor", p.line_factor},
            {"tau", a.method == preset::paper ? a.paper.tau : p.tau},
            {"cap", p.cap},
            {"line_slots", p.line_slots},
            {"horizon", p.horizon},
            {"epoch_tokens", p.epoch_tokens},
            {"shrinkage", p.shrinkage},
            {"metric_power", p.metric_power},
            {"exact_tier", p.exact_tier},
            {"calibration", a.calibration},
            {"router", a.router},
            {"max_tokens", a.max_tokens},
            {"threads", a.threads},
            {"fp32_weights", !a.quantised_weights}};
}

}  // namespace

divergence run_report::over_answers() const {
    divergence d;
    for (const auto& a : answers) d += a.difference;
    return d;
}

void print_answer(const answer_comparison& c) {
    const auto mark = [&](const answer& a) { return c.expected.empty() ? "" : a.right ? "right" : "wrong"; };
    fmt::print("Q: {}\n", c.question);
    if (!c.expected.empty()) fmt::print("   expected     {}\n", c.expected);
    fmt::print("   full cache   {:<6}{}\n", mark(c.full), c.full.text);
    fmt::print("   SeKV         {:<6}{}\n", mark(c.ours), c.agree ? "(the same)" : c.ours.text);
    fmt::print("   KL           {:.3g} nats/token over {} positions\n\n", c.difference.kl(), c.difference.positions);
}

void print_report(const arguments& a, const run_report& r) {
    fmt::print("preset          {}, {} of {} document tokens sealed, exact rows in {}\n", name_of(a.method), r.prefilled.sealed, r.document_tokens,
               name_of(a.stored));
    print_quality(r);
    fmt::print("full cache      {:>12} bytes = bf16 KV of {} tokens, the declared capacity\n", r.full_cache_bytes, r.capacity);
    print_tier(r, tier::device, "device");
    print_tier(r, tier::host, "host");
    const auto& z = r.last.zooms;
    fmt::print("zooms           {:.1f} tokens per head and step (most {}, {} lists capped), hit rate {:.1f}%\n", tokens_per_zoom(z), z.most_tokens, z.capped,
               100 * z.hit_rate());
    fmt::print("  latency       P50 {:.1f} us, P99 {:.1f} us, max {:.1f} us\n", microseconds(z.latency.percentile(0.5)),
               microseconds(z.latency.percentile(0.99)), microseconds(z.latency.max()));
    fmt::print("spans           {} of {:.1f} tokens on average ({})\n", r.last.spans, r.last.mean_span, name_of(a.cache.spans.policy));
    fmt::print("learned         {} parameters, {:.4f}% of the model's {}; bases and moments are statistics, counted above\n", r.learned_parameters,
               100.0 * static_cast<double>(r.learned_parameters) / static_cast<double>(std::max<std::uint64_t>(r.model_parameters, 1)), r.model_parameters);
    fmt::print("prefill         full cache {:.1f} tokens/s, SeKV {:.1f} tokens/s\n", r.full_prefill.rate(), r.our_prefill.rate());
    fmt::print("decode          full cache {:.1f} tokens/s, SeKV {:.1f} tokens/s\n", r.full_decode.rate(), r.our_decode.rate());
    fmt::print("time            {:.0f} s in all\n", r.seconds);
}

std::string json_report(const arguments& a, const run_report& r) {
    const auto t = count(r.answers);
    const auto speed = [](const throughput& p, const throughput& d) {
        return nlohmann::json{{"prefill_tokens_per_s", p.rate()}, {"decode_tokens_per_s", d.rate()}};
    };
    auto continuation = divergence_json(r.continuation.difference);
    continuation["full_cache_surprisal"] = r.continuation.full_surprisal;
    continuation["sekv_surprisal"] = r.continuation.our_surprisal;
    auto divergence_of_answers = divergence_json(r.over_answers());
    const nlohmann::json j{{"settings", settings_json(a)},
                           {"document_tokens", r.document_tokens},
                           {"sealed_tokens", r.prefilled.sealed},
                           {"capacity", r.capacity},
                           {"full_cache_bytes", r.full_cache_bytes},
                           {"device_budget", r.device_budget},
                           {"answers", answers_json(r)},
                           {"answer_summary",
                            {{"questions", r.answers.size()},
                             {"with_expected", t.expected},
                             {"full_cache_right", t.full},
                             {"sekv_right", t.ours},
                             {"kept", t.kept},
                             {"agree", t.agree},
                             {"divergence", divergence_of_answers}}},
                           {"continuation", continuation},
                           {"device", tier_json(r, tier::device)},
                           {"host", tier_json(r, tier::host)},
                           {"zoom", zoom_json(r.last.zooms)},
                           {"spans", {{"count", r.last.spans}, {"mean_length", r.last.mean_span}}},
                           {"learned_parameters", r.learned_parameters},
                           {"model_parameters", r.model_parameters},
                           {"full_cache", speed(r.full_prefill, r.full_decode)},
                           {"sekv", speed(r.our_prefill, r.our_decode)},
                           {"seconds", r.seconds}};
    return j.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace sekv::example
