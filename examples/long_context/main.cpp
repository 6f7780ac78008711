// Answers questions over a long document with a real model, through SeKV beside the full cache.
#include <fmt/core.h>
#include <llama.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>

#include "arguments.hpp"
#include "comparison.hpp"
#include "make_cache_reader.hpp"
#include "progress.hpp"
#include "prompt.hpp"
#include "report.hpp"
#include "sekv/core/error.hpp"
#include "self_test.hpp"
#include "text_file.hpp"

namespace sekv::example {
namespace {

constexpr std::size_t continuation_tokens = 256;

void say(const arguments& a, const std::string& line) {
    if (!a.quiet) fmt::print(stderr, "{}\n", line);
}

void check_hook(const arguments& a, const llama_host& host) {
    if (!a.self_test) return;
    const auto found = self_test(host);
    say(a, fmt::format("self-test: attention agrees with llama.cpp's to {:.1e}, logits to {:.1e} (relative rms)", found.attention, found.logits));
}

cache_reader_options reader_options(const arguments& a, run_report& r) {
    cache_reader_options o{a.cache, r.capacity, a.write_calibration};
    o.cache.device_budget = r.device_budget;
    if (a.host_budget) o.cache.host_budget = a.host_budget->bytes(r.full_cache_bytes);
    return o;
}

logits_row prefill(const arguments& a, const char* label, reader& run, const prompt& p, throughput& speed) {
    progress_bar bar(label, static_cast<std::int64_t>(p.document.size()), !a.quiet);
    const stopwatch clock;
    auto logits = run.prefill(p.document, [&](std::int64_t done) { bar.update(done, clock.seconds()); });
    speed = {static_cast<std::int64_t>(p.document.size()), clock.seconds()};
    return logits;
}

void keep_longest(run_report& r, const cache_state& now) {
    if (now.used.total(tier::device) >= r.longest.used.total(tier::device)) r.longest = now;
}

void compare(const arguments& a, const llama_host& host, const prompt& p, cache_reader& cache, run_report& r) {
    timed_reader ours{cache};
    const auto our_first = prefill(a, "prefill through SeKV", cache, p, r.our_prefill);
    r.prefilled = cache.state();
    keep_longest(r, r.prefilled);

    full_cache_reader full_cache(host);
    timed_reader full{full_cache};
    const auto full_first = prefill(a, "prefill into the full cache", full_cache, p, r.full_prefill);
    for (const auto& q : p.questions) {
        r.answers.push_back(compare_answers(host, full, ours, q, a.max_tokens));
        keep_longest(r, cache.state());
        print_answer(r.answers.back());
        std::fflush(stdout);
    }
    if (!p.continuation.empty()) {
        r.continuation = compare_continuation(full, ours, p.continuation, full_first, our_first);
        keep_longest(r, cache.state());
    }
    r.full_decode = full.decode;
    r.our_decode = ours.decode;
    r.last = cache.state();
    cache.finish();
}

void run(const arguments& a) {
    const stopwatch clock;
    const auto document = read_text(a.document, "document");
    const auto continuation = a.teacher_forced.empty() ? std::string() : read_text(a.teacher_forced, "continuation");
    const llama_host host(a.model, {.context = a.context, .threads = a.threads, .fp32_weights = !a.quantised_weights});
    const auto p = make_prompt(host, document, a.questions, continuation, continuation_tokens, a.max_tokens);

    run_report r;
    r.document_tokens = static_cast<std::int64_t>(p.document.size());
    r.capacity = (p.longest(a.max_tokens) + 63) / 64 * 64;
    r.full_cache_bytes = host.shape().full_cache_bytes(r.capacity);
    r.device_budget = a.device_budget.bytes(r.full_cache_bytes);
    r.model_parameters = llama_model_n_params(host.model());
    const auto made = make_cache_reader(a, host, reader_options(a, r));
    r.learned_parameters = made.learned_parameters;
    check_hook(a, host);
    compare(a, host, p, *made.run, r);
    r.seconds = clock.seconds();
    print_report(a, r);
    if (!a.json.empty()) write_text(a.json, json_report(a, r));
}

}  // namespace
}  // namespace sekv::example

int main(int argc, char** argv) {
    try {
        if (const auto a = sekv::example::parse_arguments(argc, argv)) sekv::example::run(*a);
        return 0;
    } catch (const sekv::error& e) {
        fmt::print(stderr, "long_context: {}\n", e.what());
        return 2;
    } catch (const std::exception& e) {
        fmt::print(stderr, "long_context: {}\n", e.what());
        return 1;
    }
}
