#include "arguments.hpp"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <map>

#include "sekv/core/error.hpp"
#include "text_file.hpp"

namespace sekv::example {
namespace {

const std::string data_directory = SEKV_EXAMPLE_DATA;

/// Flags whose text isn't yet what the arguments hold.
struct raw_flags {
    std::string device_budget, host_budget, sketch_bits;
    std::optional<float> tau;
    std::string method = "progressive", stored = "bf16", segmenter = "surprisal";
    bool no_self_test = false;
};

void add_input_flags(CLI::App& app, arguments& a, raw_flags& raw) {
    app.add_option("--model", a.model, "GGUF of a llama-family model")->capture_default_str();
    app.add_option("--document", a.document, "Text file to read (default: the one that ships, with its questions and its continuation)");
    app.add_option("--question", a.questions, "A question, or 'question|expected string'; repeatable")->take_all();
    app.add_option("--teacher-forced", a.teacher_forced, "Text file taken as the document's continuation: KL and agreement per token");
    app.add_option("--max-tokens", a.max_tokens, "Tokens of an answer at most")->capture_default_str();
    app.add_option("--context", a.context, "Tokens of context (default: all that the model was trained with; fewer save memory)");
    app.add_option("--threads", a.threads, "Of llama.cpp and of the cache, which take turns")->capture_default_str();
    app.add_flag("--quantised-weights", a.quantised_weights,
                 "Run quantised weights as they are. llama.cpp then rounds activations to 8 bits, so the last bit of an attention output moves the logits: "
                 "a KL of ~3e-3 between two exact runs. By default weights are widened to fp32 while loading");
    app.add_flag("--no-self-test", raw.no_self_test, "Don't check at start-up that the hook computes what llama.cpp computes");
    app.add_flag("--skip-answers", a.skip_answers, "Ask no questions");
    app.add_flag("--skip-continuation", a.skip_continuation, "Measure no continuation");
    app.add_option("--json", a.json, "Write the results to this file too (keys: docs/json.md)");
    app.add_flag("--quiet", a.quiet, "No progress on stderr");
}

void add_cache_flags(CLI::App& app, arguments& a, raw_flags& raw) {
    auto& p = a.progressive;
    app.add_option("--preset", raw.method, "progressive, or paper (the method as published)")->capture_default_str();
    app.add_option("--kv-type", raw.stored, "How exact rows are stored: bf16, f16 or f32")->capture_default_str();
    app.add_option("--device-budget", raw.device_budget,
                   "Hard limit of the device tier: bytes (suffix K, M, G) or % of bf16 KV at the declared capacity (default: 12.5%, paper 50%)");
    app.add_option("--host-budget", raw.host_budget, "The same of the host tier (default: none)");
    app.add_option("--recent", a.cache.window, "Last tokens that are always exact")->capture_default_str();
    app.add_option("--rejectable", a.cache.rejectable, "Tokens behind those that sealing leaves alone, for engines that take drafts back")->capture_default_str();
    app.add_option("--segmenter", raw.segmenter, "surprisal, novelty or fixed")->capture_default_str();
    app.add_option("--sketch-bits", raw.sketch_bits, "K,V bits per token of the sketch (default: 80,32 below head size 128, else 96,32)");
    app.add_option("--line-factor", p.line_factor, "Bytes of a refined line as a multiple of the head size; 0: 1.25 for heads below 128, else 1")->capture_default_str();
    app.add_option("--tau", raw.tau,
                   "Probability from which a token is zoomed (default: 2e-4), or relevance from which a span is (paper; default: its router's)");
    app.add_option("--cap", p.cap, "Zoomed tokens per head and step at most")->capture_default_str();
    app.add_option("--line-slots", p.line_slots, "Line cache slots per KV head")->capture_default_str();
    app.add_option("--horizon", p.horizon, "Tokens after which sketches are made anew; 0: never")->capture_default_str();
    app.add_option("--epoch-tokens", p.epoch_tokens, "Positions that share a basis at least")->capture_default_str();
    app.add_option("--shrinkage", p.shrinkage, "Identity share of the query metric")->capture_default_str();
    app.add_option("--metric-power", p.metric_power, "Power of the query metric")->capture_default_str();
    app.add_option("--calibration", a.calibration, "Query moments of this model, as --write-calibration makes them");
    app.add_option("--write-calibration", a.write_calibration, "Write the query moments of this run");
    app.add_option("--trace-zooms", a.trace_zooms, "Write every zoom list to this file, for scripts/zoom_reuse");
    app.add_flag("--exact-tier", p.exact_tier, "Keep raw K and V on the host after sealing; zooms read them");
    app.add_option("--router", a.router, "Trained weights for --preset paper");
}

template <class T>
T chosen(const std::string& flag, const std::string& value, const std::map<std::string, T>& choices) {
    if (const auto found = choices.find(value); found != choices.end()) return found->second;
    std::string names;
    for (const auto& c : choices) names += (names.empty() ? "" : ", ") + c.first;
    throw invalid_argument(flag + " takes one of " + names + ", not '" + value + "'.");
}

void parse_sketch_bits(const std::string& text, progressive_options& o) {
    if (text.empty()) return;
    char rest = 0;
    if (std::sscanf(text.c_str(), "%d,%d%c", &o.key_sketch_bits, &o.value_sketch_bits, &rest) != 2)
        throw invalid_argument("--sketch-bits takes two whole numbers such as 80,32, not '" + text + "'.");
}

void complete(arguments& a, const raw_flags& raw) {
    a.self_test = !raw.no_self_test;
    a.method = chosen<preset>("--preset", raw.method, {{"progressive", preset::progressive}, {"paper", preset::paper}});
    a.stored = chosen<kv_type>("--kv-type", raw.stored, {{"bf16", kv_type::bf16}, {"f16", kv_type::f16}, {"f32", kv_type::f32}});
    a.cache.spans.policy = chosen<span_policy>("--segmenter", raw.segmenter,
                                               {{"surprisal", span_policy::surprisal}, {"novelty", span_policy::key_novelty}, {"fixed", span_policy::fixed}});
    const bool paper = a.method == preset::paper;
    a.device_budget = byte_amount::parse("--device-budget", !raw.device_budget.empty() ? raw.device_budget : paper ? "50%" : "12.5%");
    if (raw.tau) (paper ? a.paper.tau : a.progressive.tau) = *raw.tau;
    if (!raw.host_budget.empty()) a.host_budget = byte_amount::parse("--host-budget", raw.host_budget);
    parse_sketch_bits(raw.sketch_bits, a.progressive);
    if (a.max_tokens < 1) throw invalid_argument("--max-tokens must be at least 1, not " + std::to_string(a.max_tokens) + ".");
    if (a.context < 0) throw invalid_argument("--context must be at least 1, not " + std::to_string(a.context) + ".");
    if (!a.router.empty() && !paper) throw invalid_argument("--router goes with --preset paper only.");
    if (!a.trace_zooms.empty() && paper) throw invalid_argument("--trace-zooms goes with --preset progressive only.");
    if (!a.calibration.empty() && paper) throw invalid_argument("--calibration goes with --preset progressive only.");
    if (paper && a.cache.spans.policy != span_policy::surprisal) throw invalid_argument("--preset paper segments by surprisal; leave --segmenter out.");
    if (paper) a.cache = paper_cache_options(a.cache);
    a.cache.validate();
    a.progressive.validate();
    a.paper.validate();

    if (a.shipped_document = a.document.empty(); a.shipped_document) {
        a.document = data_directory + "/document.txt";
        if (a.questions.empty()) a.questions = lines_of(read_text(data_directory + "/questions.txt", "questions file"));
        if (a.teacher_forced.empty()) a.teacher_forced = data_directory + "/continuation.txt";
    }
    if (a.skip_answers) a.questions.clear();
    if (a.skip_continuation) a.teacher_forced.clear();
    if (a.questions.empty() && a.teacher_forced.empty())
        throw invalid_argument("There is nothing to do: give --question or --teacher-forced for this document.");
}

}  // namespace

byte_amount byte_amount::parse(const std::string& flag, const std::string& text) {
    const auto refuse = [&] { return invalid_argument(flag + " takes bytes such as 20M, or a share such as 12%, not '" + text + "'."); };
    std::size_t used = 0;
    byte_amount a;
    try {
        a.value = std::stod(text, &used);
    } catch (const std::exception&) {
        throw refuse();
    }
    const auto unit = text.substr(used);
    const std::map<std::string, double> units{{"", 1}, {"%", 1}, {"K", 1024.0}, {"M", 1024.0 * 1024}, {"G", 1024.0 * 1024 * 1024}};
    const auto found = units.find(unit);
    if (found == units.end() || !std::isfinite(a.value) || a.value <= 0) throw refuse();
    a.value *= found->second;
    a.percent = unit == "%";
    if (a.value > (a.percent ? 1e6 : 1e18)) throw refuse();
    return a;
}

std::uint64_t byte_amount::bytes(std::uint64_t full_cache) const {
    return static_cast<std::uint64_t>(percent ? value / 100.0 * static_cast<double>(full_cache) : value);
}

std::optional<arguments> parse_arguments(int argc, const char* const* argv) {
    arguments a;
    a.model = SEKV_DEFAULT_MODEL;
    raw_flags raw;
    CLI::App app("Answers questions over a long document with a real model, through SeKV beside the full cache.", "long_context");
    add_input_flags(app, a, raw);
    add_cache_flags(app, a, raw);
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& done) {
        app.exit(done);
        return std::nullopt;
    } catch (const CLI::ParseError& e) {
        throw invalid_argument(std::string(e.what()) + " (--help lists the flags)");
    }
    complete(a, raw);
    return a;
}

}  // namespace sekv::example
