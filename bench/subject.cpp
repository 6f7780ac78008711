#include "subject.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

namespace sekv::bench {
namespace {

constexpr std::int64_t chunk = 2048;         // tokens of an append
constexpr std::int64_t last_queries = 512;   // that enter the metric
constexpr std::int64_t decode_queries = 64;  // steps before they come round again
constexpr std::uint64_t data_seed = 17;

double seconds_of(const auto& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::int32_t count_from_environment(const char* name, std::int32_t otherwise) {
    const char* text = std::getenv(name);
    if (text == nullptr) return otherwise;
    const auto value = std::atoi(text);
    if (value < 1 || value > 1024) throw std::runtime_error(std::string(name) + " must be a count from 1 to 1024, not \"" + text + "\".");
    return value;
}

}  // namespace

environment::environment() : threads(make_thread_pool(count_from_environment("SEKV_BENCH_THREADS", 2))), cold(std::size_t{512} << 20) {
    full_kv_attention::self_check(*threads);
}

std::int64_t environment::rounds() { return count_from_environment("SEKV_BENCH_ROUNDS", 11); }

environment& environment::get() {
    static environment one;
    return one;
}

layer_shape layer_case::shape() const {
    layer_shape l;
    l.kv_heads = kv_heads;
    l.group = group;
    l.key_size = l.value_size = d;
    return l;
}

subject::subject(const layer_case& layer, std::int64_t n, filling how)
    : n_(n),
      cache_(model_shape{{layer.shape()}, "synthetic", 4}, {}, {{}, dial_}, host_backend(environment::get().threads)),
      out_(static_cast<std::size_t>(layer.kv_heads * layer.group * layer.d)) {
    const synthetic_layer data(shape(), data_seed);
    queries_ = data.queries(n, decode_queries, 5);
    sequence_ = cache_.open({how == filling::exact ? memory::unlimited : tightest_quota(), n});
    fill(data);
    if (how == filling::sealed) measure_prefill(data);
    seal_seconds_ = seconds_of([&] { cache_.end_prefill(sequence_); });
    const batch_item step{sequence_};
    plan_ = cache_.make_plan({&step, 1}, resolution::adaptive);
}

// The least device quota that n tokens fit in: everything outside the window sealed.
std::uint64_t subject::tightest_quota() const {
    block_pool pool(std::make_shared<memory>(make_heap_resource(), memory::unlimited, memory::unlimited));
    progressive_codec codec(cache_.model(), {}, dtype::bf16, pool, *environment::get().threads);
    const auto s = codec.open(n_);
    const auto exact = cache_options().window + cache_options().rejectable + 3 * host::block_tokens + cache_.model().sinks;
    return codec.sequence_usage(s, {}).total(tier::device) + codec.seal_bytes(s, {}, {0, n_}, n_ / host::block_tokens, segmenter()).device +
           cache_.model().full_cache_bytes(exact);
}

void subject::fill(const synthetic_layer& data) {
    auto& threads = *environment::get().threads;
    const auto& l = shape();
    const auto row = static_cast<std::size_t>(l.kv_heads * l.key_size);
    std::vector<float> keys(row * chunk), values(row * chunk);
    const auto last = data.queries(n_, last_queries, 3);
    for (std::int64_t begin = 0; begin < n_;) {
        const auto with_queries = begin >= n_ - last_queries;
        const auto count = std::min(chunk, (with_queries ? n_ : n_ - last_queries) - begin);
        data.keys(begin, count, keys.data(), threads);
        data.values(begin, count, values.data(), threads);
        const auto queries = rows(last.data(), last_queries, l.query_heads(), l.key_size);
        append_seconds_ += seconds_of([&] {
            cache_.append(sequence_, 0, rows(keys.data(), count, l.kv_heads, l.key_size), rows(values.data(), count, l.kv_heads, l.value_size), begin,
                          with_queries ? &queries : nullptr);
        });
        begin += count;
    }
}

// The exact attention of a prompt costs a token at position p about p; four depths, each in the middle of a quarter, stand for all.
void subject::measure_prefill(const synthetic_layer& data) {
    const auto& l = shape();
    const auto tokens = std::int64_t{2} * prefill_tile::tokens_for(l.group);
    const auto queries = data.queries(n_, tokens, 7);
    std::vector<float> out(queries.size());
    double seconds = 0;
    for (std::int64_t quarter = 0; quarter < 4; ++quarter) {
        const batch_item item{sequence_, tokens, (2 * quarter + 1) * n_ / 8};
        auto p = cache_.make_plan({&item, 1}, resolution::full);
        seconds += seconds_of([&] {
            cache_.attend(p, 0, rows(queries.data(), tokens, l.query_heads(), l.key_size), out_rows(out.data(), tokens, l.query_heads(), l.value_size));
        });
    }
    prefill_seconds_ = seconds / static_cast<double>(4 * tokens) * static_cast<double>(n_);
}

const float* subject::next_query() {
    const auto at = static_cast<std::size_t>(step_++ % decode_queries);
    return queries_.data() + at * out_.size();
}

double subject::attend() {
    const auto& l = shape();
    const auto* q = next_query();
    return seconds_of([&] { cache_.attend(plan_, 0, rows(q, 1, l.query_heads(), l.key_size), out_rows(out_.data(), 1, l.query_heads(), l.value_size)); });
}

double subject::zoom_rate(int steps) {
    const auto before = cache_.zooms();
    for (int i = 0; i < steps; ++i) (void)attend();
    const auto& after = cache_.zooms();
    const auto lists = static_cast<double>(after.zooms - before.zooms);
    return lists > 0 ? static_cast<double>(after.tokens - before.tokens) / (lists * static_cast<double>(cache_.sealed(sequence_))) : 0.0;
}

float subject::turn_to_rate(double rate) {
    constexpr int steps = 8;
    float low = -20.0F, high = -1.0F;  // ln tau
    for (int i = 0; i < 9; ++i) {
        const float middle = (low + high) / 2;
        dial_->turn(std::exp(middle), tunable_codec::most_cap);
        step_ = 0;
        (zoom_rate(steps) > rate ? low : high) = middle;
    }
    const auto tau = std::exp((low + high) / 2);
    dial_->turn(tau, tunable_codec::most_cap);
    return tau;
}

namespace {

struct kept_subject {
    std::string key;
    std::unique_ptr<subject> value;
} kept;

}  // namespace

subject& subject::fresh(const layer_case& layer, std::int64_t n, filling how) {
    drop();
    kept.value = std::make_unique<subject>(layer, n, how);
    kept.key = std::string(layer.name) + "/" + std::to_string(n) + (how == filling::exact ? "/exact" : "/sealed");
    return *kept.value;
}

subject& subject::get(const layer_case& layer, std::int64_t n, filling how) {
    const auto key = std::string(layer.name) + "/" + std::to_string(n) + (how == filling::exact ? "/exact" : "/sealed");
    return kept.value && kept.key == key ? *kept.value : fresh(layer, n, how);
}

void subject::drop() { kept = {}; }

full_kv_attention& opponent(const layer_case& layer, std::int64_t n) {
    static std::string key;
    static std::unique_ptr<full_kv_attention> one;
    const auto wanted = std::string(layer.name) + "/" + std::to_string(n);
    if (!one || key != wanted) {
        one.reset();
        one = std::make_unique<full_kv_attention>(layer.kv_heads, layer.group, layer.d, n);
        one->fill(29);
        key = wanted;
    }
    return *one;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0.0 : values[values.size() / 2];
}

}  // namespace sekv::bench
