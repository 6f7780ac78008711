// A decode step's attention: its workspace and the order of its kernels.
#include "kernels/decode_parts.cuh"
#include "kernels/device.cuh"

#include <algorithm>
#include <cmath>

namespace sekv::cuda {
namespace {

// Hands out arrays of a byte range one after the other, each aligned for the widest loads.
class cutter {
public:
    explicit cutter(std::byte* base) : base_(base) {}
    template <class T>
    void take(T*& array, std::int64_t count) {
        array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
        bytes_ = (bytes_ + static_cast<std::size_t>(count) * sizeof(T) + 127) / 128 * 128;
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

private:
    std::byte* base_;
    std::size_t bytes_ = 0;
};

// Probabilities sum to 1 per query, so fewer than 1 / tau tokens can exceed tau in the group's mean, and 1 / tau per query in its maximum; the margin is for their rounding.
std::int32_t most_candidates(const layer_layout& l, const decode_bounds& b) {
    if (b.tau >= 1.0F) return 0;  // no probability exceeds 1 but by rounding
    const double lists = b.largest_of_group ? l.group : 1;
    const double sealed = static_cast<double>(b.segments) * segment_blocks * block_tokens;
    return static_cast<std::int32_t>(std::min(sealed, std::ceil(lists * (1.02 / static_cast<double>(b.tau) + 8))));
}

}  // namespace

decode_workspace cut_workspace(const layer_layout& layer, const decode_bounds& bounds, std::byte* base) {
    decode_workspace w{};
    const bool sealed = layer.window == 0 && bounds.segments > 0;  // sliding-window layers keep exact rows only
    w.group = padded_group(layer.group), w.dk = layer.key_size, w.dv = layer.value_size;
    w.exact_splits = std::max(1, (bounds.exact_blocks + exact_split_blocks - 1) / exact_split_blocks);  // the first takes the sinks too
    if (sealed) {
        w.fields = layer.key_bits, w.segments = bounds.segments, w.epochs = bounds.epochs, w.key_bases = bounds.key_bases;
        w.candidates = most_candidates(layer, bounds);
        // Full runs, and one that ends early for each change of epoch or key basis along the sequence.
        w.runs = std::min(w.candidates, (w.candidates + refine_tokens - 1) / refine_tokens + std::min(w.segments, w.epochs + w.key_bases));
    }
    cutter c(base);
    const std::int64_t parts = static_cast<std::int64_t>(bounds.rows) * layer.kv_heads, g = parts * w.group;
    c.take(w.field_weight, g * w.key_bases * w.fields);
    c.take(w.field_matrix, parts * w.key_bases * matrix_words(w.fields, w.group));
    c.take(w.field_unit, g * w.key_bases);
    c.take(w.field_base, g * w.key_bases);
    c.take(w.epoch_base, g * w.epochs);
    c.take(w.line_weight, g * w.epochs * w.dk);
    c.take(w.sums, g * (w.exact_splits + w.segments));
    c.take(w.exact_out, g * w.exact_splits * w.dv);
    c.take(w.log_sum, g);
    c.take(w.rest, g * w.segments);
    c.take(w.rest_codes, g * w.segments * w.dv);
    c.take(w.cursor, parts);
    c.take(w.candidate_runs, parts * w.segments);
    c.take(w.list, parts * w.candidates);
    c.take(w.zoomed, parts * w.candidates);
    c.take(w.refine_runs, parts * w.runs);
    c.take(w.run_count, parts);
    c.take(w.refined, g * w.runs);
    c.take(w.refined_codes, g * w.runs * w.dv);
    w.bytes = c.bytes();
    return w;
}

std::size_t decode_workspace_bytes(const layer_layout& layer, const decode_bounds& bounds) { return cut_workspace(layer, bounds, nullptr).bytes; }

namespace {

void choose_lines(const decode_step& step, const decode_workspace& w, stream s) {
    launch_project(step, w, s);
    launch_score_exact(step, w, s);
    launch_score_sketch(step, w, s);
    launch_route(step, w, s);
    launch_choose(step, w, s);
}

}  // namespace

void attend_decode(const decode_step& step, stream s) {
    const decode_workspace w = cut_workspace(step.layer, step.bounds, step.workspace);
    if (w.segments == 0) {
        launch_score_exact(step, w, s);
    } else {
        choose_lines(step, w, s);
        launch_refine(step, w, s);
    }
    launch_combine(step, w, s);
}

void fetch_ahead(const decode_step& step, stream s) {
    const decode_workspace w = cut_workspace(step.layer, step.bounds, step.workspace);
    if (w.segments > 0) choose_lines(step, w, s);
}

}  // namespace sekv::cuda
