// Order of a seal's steps; src/progressive_seal.cpp and src/basis.cpp are the reference.
#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <string>

#include "kernels/seal.hpp"
#include "sekv/codec/quantizer.hpp"
#include "sekv/codec/sketch.hpp"
#include "sekv/exec/line_ops.hpp"
#include "src/cuda/seal_source.hpp"
#include "src/cuda/seal_space.hpp"

namespace sekv::cuda {
namespace {

constexpr std::int64_t sketch_samples = 2048, line_samples = 1024;  // tokens that a step is chosen from; src/sketch.cpp, src/line.cpp

// Levels and the midpoints between them, of all widths.
std::vector<float> line_tables() {
    std::vector<float> t(level_table, 0.0F);
    for (std::int32_t w = 1; w <= 8; ++w) {
        float* thresholds = t.data() + (1 << w) - 2;
        for (std::int32_t k = 0; k < 1 << w; ++k) {
            thresholds[level_table / 2 + k] = host::line_level(k, w);
            if (k + 1 < 1 << w) thresholds[k] = 0.5F * (host::line_level(k, w) + host::line_level(k + 1, w));
        }
    }
    return t;
}

std::span<const double> of_head(const std::vector<double>& v, std::size_t head, std::int32_t size) { return {v.data() + head * static_cast<std::size_t>(size), static_cast<std::size_t>(size)}; }

// Bits of a sketch and their fields.
std::int32_t allot_sketch(std::span<const double> variance, std::int32_t budget, std::uint8_t* bits, std::uint32_t* fields) {
    static constexpr std::array<std::uint8_t, 4> widths{1, 2, 4, 8};
    const auto chosen = allot_bits(variance, budget, widths);
    const auto laid = lay_fields(chosen);
    std::copy(chosen.begin(), chosen.end(), bits);
    std::transform(laid.begin(), laid.end(), fields, [](const host::sketch_field& f) { return std::bit_cast<std::uint32_t>(f); });
    return static_cast<std::int32_t>(laid.size());
}

void allot_line(std::span<const double> variance, std::int32_t bytes, std::uint8_t* widths) {
    const auto chosen = allot_groups(variance, bytes);
    std::copy(chosen.begin(), chosen.end(), widths);
}

}  // namespace

struct sealer::state {
    state(const seal_shape& sh, std::byte* workspace, stream st) : shape(sh), space(cut_seal_space(sh, workspace)), s(st), solve(space.scratch, st), tables(line_tables()) {
        upload(space.levels, tables.data(), tables.size());
        check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    }

    using each_chunk = std::function<void(const seal_rows_view& keys, const seal_rows_view& values)>;

    template <class T>
    void upload(T* to, const T* from, std::size_t count) {
        check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, s), "cudaMemcpyAsync");
    }
    template <class T>
    void zero(T* at, std::int64_t count) {
        check(cudaMemsetAsync(at, 0, static_cast<std::size_t>(count) * sizeof(T), s), "cudaMemsetAsync");
    }
    void finish() { check(cudaStreamSynchronize(s), "cudaStreamSynchronize"); }

    seal_rows_view view(float* data, std::int32_t size, std::int32_t rows) const { return {data, layer.kv_heads, size, shape.chunk, rows}; }
    seal_rows_view key_codes(std::int32_t rows) const { return view(space.key_codes, layer.key_size, rows); }
    seal_rows_view value_codes(std::int32_t rows) const { return view(space.value_codes, layer.value_size, rows); }
    head_array key_array(std::byte* buffer, std::uint32_t offset) const { return {buffer, layer.key_buffer, offset}; }
    head_array epoch_array(const std::byte* buffer, std::uint32_t offset) const { return {const_cast<std::byte*>(buffer), layer.epoch_buffer, offset}; }
    row_factor by_row() const { return {space.inverse, shape.chunk, 1}; }
    row_factor by_head() const { return {space.typical_inverse, 1, 0}; }

    void begin(const layer_layout& l);
    void stream_rows(const seal_source& source, const row_choice& all, std::int64_t count, bool keys, bool values, const each_chunk& f) const;
    void fit_key_basis(const seal_source& source, std::int64_t from, std::int64_t count, const double* metric, double power, const head_array& mean, std::byte* key_buffer, std::byte* encoder_buffer);
    void fit_value_basis(const seal_source& source, std::int64_t from, std::int64_t count, std::byte* epoch_buffer);
    void find_rough_variance(const seal_source& source, std::byte* epoch_buffer);
    void allot(std::byte* key_buffer, std::byte* epoch_buffer);
    void find_steps(const seal_source& source, std::int64_t from, std::int64_t count, std::int64_t most, const head_array& key_mean, const head_array& value_mean, std::vector<step_search> searches);
    void project_keys(const seal_rows_view& keys, const head_array& mean, const float* encoder);
    void project_values(const seal_rows_view& values, const head_array& mean);
    step_search search(bool line, bool values, const head_array& widths, const head_array& step, const head_array& error) const;
    void stage_targets(const block_range& blocks, std::int32_t first, std::int32_t count, std::uint8_t* const* sketches, std::uint8_t* const* lines, std::uint8_t* const* exact);
    void each_run(const seal_source& source, bool values, const std::function<void(std::int32_t, std::int32_t, const seal_rows_view&, const seal_rows_view&)>& f);
    sketch_place key_sketch(const std::byte* key_buffer) const { return {key_buffer, layer.key_buffer, layer.key.bits, layer.key.step, layer.key.fields, layer.key.field_count}; }

    seal_shape shape;
    seal_space space;
    stream s;
    solver solve;
    std::vector<float> tables;
    std::vector<allotment> allotments;   // what copies to the device may still be reading
    std::vector<seal_target> targets;
    layer_layout layer;  // of the present call
};

void sealer::state::begin(const layer_layout& l) {
    if (l.kv_heads > shape.most_heads || std::max(l.key_size, l.value_size) > shape.most_size)
        throw invalid_argument("A layer of " + std::to_string(l.kv_heads) + " KV heads of sizes " + std::to_string(l.key_size) + " and " + std::to_string(l.value_size) + " doesn't fit the seal's workspace of " +
                               std::to_string(shape.most_heads) + " heads of size " + std::to_string(shape.most_size) + ".");
    finish();
    layer = l;
}

// `all` gives the first token and the stride; count rows in all.
void sealer::state::stream_rows(const seal_source& source, const row_choice& all, std::int64_t count, bool keys, bool values, const each_chunk& f) const {
    for (std::int64_t i = 0; i < count; i += shape.chunk) {
        const row_choice c{all.origin + i * all.stride, all.stride, static_cast<std::int32_t>(std::min<std::int64_t>(shape.chunk, count - i))};
        const auto k = view(keys ? space.keys : nullptr, layer.key_size, c.rows), v = view(values ? space.values : nullptr, layer.value_size, c.rows);
        source.load(c, k, v);
        f(k, v);
    }
}

// B and A in the metric; the encoder and variances[0] in the workspace.
void sealer::state::fit_key_basis(const seal_source& source, std::int64_t from, std::int64_t count, const double* metric, double power, const head_array& mean, std::byte* key_buffer,
                                  std::byte* encoder_buffer) {
    const auto h = layer.kv_heads, d = layer.key_size;
    const auto matrix = static_cast<std::int64_t>(h) * d * d;
    auto [m, moment, w, inverse, t, u] = space.matrices;
    zero(space.key_sums, h * d);
    stream_rows(source, {from, 1, 0}, count, true, false, [&](const auto& k, const auto&) { launch_column_sums(k, space.key_sums, s); });
    launch_finish_means(space.key_sums, h, d, count, mean, s);
    zero(moment, matrix);
    stream_rows(source, {from, 1, 0}, count, true, false, [&](const auto& k, const auto&) {
        launch_widen_keys(k, space.key_sums, space.wide, s);
        solve.add_moments(space.wide, h, d, shape.chunk, k.rows, moment);
    });
    upload(m, metric, static_cast<std::size_t>(matrix));
    solve.eigen(m, space.metric_values, h, d);
    launch_scale_vectors(m, space.metric_values, h, d, power, t, u, s);
    solve.multiply(t, m, true, h, d, 1, w);        // W
    solve.multiply(u, m, true, h, d, 1, inverse);  // W^-1
    solve.multiply(w, moment, false, h, d, 1.0 / static_cast<double>(count), t);
    solve.multiply(t, w, false, h, d, 1, u);  // W S W
    solve.eigen(u, space.key_values, h, d);
    solve.multiply(w, u, false, h, d, 1, m);
    solve.multiply(inverse, u, false, h, d, 1, t);
    launch_finish_keys(m, t, space.key_values, h, d, space.encoder, {encoder_buffer, layer.encoder_buffer, 0}, key_array(key_buffer, layer.key.a), space.variances[0], s);
}

// U and the typical scale; U transposed and variances[1] in the workspace.
void sealer::state::fit_value_basis(const seal_source& source, std::int64_t from, std::int64_t count, std::byte* epoch_buffer) {
    const auto h = layer.kv_heads, d = layer.value_size;
    const auto mean = epoch_array(epoch_buffer, layer.epoch.value_mean);
    double* moment = space.matrices[0];
    zero(space.value_sums, h * d);
    zero(space.scale_squares, h);
    stream_rows(source, {from, 1, 0}, count, false, true, [&](const auto&, const auto& v) { launch_column_sums(v, space.value_sums, s); });
    launch_finish_means(space.value_sums, h, d, count, mean, s);
    zero(moment, static_cast<std::int64_t>(h) * d * d);
    stream_rows(source, {from, 1, 0}, count, false, true, [&](const auto&, const auto& v) {
        launch_widen_values(v, mean, space.wide, space.bytes, space.scale_squares, s);
        solve.add_moments(space.wide, h, d, shape.chunk, v.rows, moment);
    });
    launch_finish_typical(space.scale_squares, h, count, epoch_array(epoch_buffer, layer.epoch.typical_scale), space.typical_inverse, s);
    solve.eigen(moment, space.value_values, h, d);
    launch_finish_values(moment, space.value_values, h, d, count, space.basis, epoch_array(epoch_buffer, layer.epoch.value_basis), space.variances[1], s);
}

// Of value codes at the typical scale: variances[2]. Like the host's, over every token.
void sealer::state::find_rough_variance(const seal_source& source, std::byte* epoch_buffer) {
    const auto mean = epoch_array(epoch_buffer, layer.epoch.value_mean);
    const auto& b = source.blocks();
    zero(space.variances[2], layer.kv_heads * layer.value_size);
    stream_rows(source, {b.begin(), 1, 0}, b.tokens(), false, true, [&](const auto&, const auto& v) {
        project_values(v, mean);
        launch_column_squares(value_codes(v.rows), by_head(), space.variances[2], s);
    });
    launch_finish_means(space.variances[2], layer.kv_heads, layer.value_size, b.tokens(), {}, s);
}

// Bits and widths out of the variances. epoch_buffer null: the key's sketch alone.
void sealer::state::allot(std::byte* key_buffer, std::byte* epoch_buffer) {
    const auto h = layer.kv_heads, dk = layer.key_size, dv = layer.value_size;
    const auto key = to_host(space.variances[0], h * dk, s);
    const auto value = epoch_buffer != nullptr ? to_host(space.variances[1], h * dv, s) : std::vector<double>();
    const auto rough = epoch_buffer != nullptr ? to_host(space.variances[2], h * dv, s) : std::vector<double>();
    allotments.assign(static_cast<std::size_t>(h), {});
    for (std::size_t i = 0; i < allotments.size(); ++i) {
        auto& a = allotments[i];
        a.key_field_count = allot_sketch(of_head(key, i, dk), layer.key_bits, a.key_bits, a.key_fields);
        if (epoch_buffer == nullptr) continue;
        allot_line(of_head(key, i, dk), layer.key_line_bytes, a.key_widths);
        a.value_field_count = allot_sketch(of_head(rough, i, dv), layer.value_bits, a.value_bits, a.value_fields);
        allot_line(of_head(value, i, dv), layer.value_line_bytes, a.value_widths);
    }
    upload(space.allotments, allotments.data(), allotments.size());
    launch_store_allotment(layer, space.allotments, key_buffer, epoch_buffer, s);
}

void sealer::state::project_keys(const seal_rows_view& keys, const head_array& mean, const float* encoder) {
    if (mean.buffer != nullptr) launch_center(keys, mean, s);
    solve.project(keys, encoder, false, space.key_codes);
}

void sealer::state::project_values(const seal_rows_view& values, const head_array& mean) {
    launch_center_values(values, mean, space.bytes, space.inverse, s);
    solve.project(values, space.basis, true, space.value_codes);
}

step_search sealer::state::search(bool line, bool values, const head_array& widths, const head_array& step, const head_array& error) const {
    step_search x;
    x.codes = values ? value_codes(0) : key_codes(0);
    if (values) x.factor = line ? by_row() : by_head();
    x.line = line, x.widths = widths, x.step = step, x.error = error;
    x.squares = values ? space.value_squares : space.key_squares, x.errors = values ? space.value_errors : space.key_errors;
    x.variance = space.variances[0], x.levels = space.levels;
    return x;
}

// Steps of least squared error on up to twice `most` of the tokens [from, from + count). Of each search, what depends on the samples is filled in here.
void sealer::state::find_steps(const seal_source& source, std::int64_t from, std::int64_t count, std::int64_t most, const head_array& key_mean, const head_array& value_mean, std::vector<step_search> searches) {
    const auto stride = static_cast<std::int32_t>(std::max<std::int64_t>(1, count / most));
    const auto samples = (count + stride - 1) / stride;
    const bool values = searches.size() > 1;
    const auto each_sample = [&](const std::function<void(std::int32_t rows)>& f) {
        stream_rows(source, {from, stride, 0}, samples, true, values, [&](const auto& k, const auto& v) {
            project_keys(k, key_mean, space.encoder);
            if (values) project_values(v, value_mean);
            f(k.rows);
        });
    };
    const auto add_squares = [&](std::int32_t rows) {
        launch_column_squares(key_codes(rows), {}, space.key_squares, s);
        if (values) launch_column_squares(value_codes(rows), searches[1].factor, space.value_squares, s);
    };
    const auto add_errors = [&](std::int32_t rows) {
        for (auto& x : searches) {
            x.codes.rows = rows;
            launch_step_errors(x, s);
        }
    };
    const auto h = layer.kv_heads;
    zero(space.key_squares, h * layer.key_size), zero(space.key_errors, h * layer.key_size * 8);
    zero(space.value_squares, h * layer.value_size), zero(space.value_errors, h * layer.value_size * 8);
    for (auto& x : searches) x.samples = samples;
    each_sample(add_squares);
    if (samples <= shape.chunk) {
        add_errors(static_cast<std::int32_t>(samples));  // the codes are still there
    } else {
        each_sample(add_errors);
    }
    for (const auto& x : searches) launch_choose_steps(x, s);
}

void sealer::state::stage_targets(const block_range& blocks, std::int32_t first, std::int32_t count, std::uint8_t* const* sketches, std::uint8_t* const* lines, std::uint8_t* const* exact) {
    for (auto b = first; b < first + count; ++b) {
        auto& t = targets[static_cast<std::size_t>(b)];
        t.sketch = sketches[b];
        t.lines = lines != nullptr ? lines[b] : nullptr;
        t.exact = exact != nullptr ? exact[b] : nullptr;
        t.row = static_cast<std::int32_t>(blocks.begin_of(b) - blocks.begin_of(first));
        t.count = static_cast<std::int32_t>(blocks.end_of(b) - blocks.begin_of(b));
    }
    upload(space.targets, targets.data() + first, static_cast<std::size_t>(count));
}

// f(first, count) for runs of blocks that fit the workspace, their rows loaded.
void sealer::state::each_run(const seal_source& source, bool values, const std::function<void(std::int32_t, std::int32_t, const seal_rows_view&, const seal_rows_view&)>& f) {
    const auto& b = source.blocks();
    targets.assign(static_cast<std::size_t>(b.blocks()), {});
    const std::int32_t most = shape.chunk / block_tokens;
    for (std::int32_t first = 0; first < b.blocks(); first += most) {
        const auto count = std::min(most, b.blocks() - first);
        const row_choice c{b.begin_of(first), 1, static_cast<std::int32_t>(b.end_of(first + count - 1) - b.begin_of(first))};
        const auto k = view(space.keys, layer.key_size, c.rows), v = view(values ? space.values : nullptr, layer.value_size, c.rows);
        source.load(c, k, v);
        f(first, count, k, v);
    }
}

sealer::sealer(const seal_shape& shape, std::byte* workspace, stream s) : state_(std::make_unique<state>(shape, workspace, s)) {}

void sealer::use(stream s) {
    if (s == state_->s) return;
    state_->s = s;
    state_->solve.use(s);
}

sealer::~sealer() = default;

void sealer::fit_epoch(const layer_layout& layer, const seal_rows& rows, const double* metric, double power, std::byte* key_buffer, std::byte* epoch_buffer, std::byte* encoder_buffer) {
    auto& x = *state_;
    x.begin(layer);
    const exact_source source(x.layer, rows, x.s);
    const auto skip = std::clamp<std::int64_t>(rows.skip, 0, source.blocks().tokens() - 1);
    const auto from = source.blocks().begin() + skip, count = source.blocks().tokens() - skip;
    const auto& e = x.layer.epoch;
    const auto key_mean = x.epoch_array(epoch_buffer, e.key_mean), value_mean = x.epoch_array(epoch_buffer, e.value_mean);
    x.fit_key_basis(source, from, count, metric, power, key_mean, key_buffer, encoder_buffer);
    x.fit_value_basis(source, from, count, epoch_buffer);
    x.find_rough_variance(source, epoch_buffer);
    x.allot(key_buffer, epoch_buffer);
    const auto& k = x.layer.key;
    x.find_steps(source, from, count, sketch_samples, key_mean, value_mean,
                 {x.search(false, false, x.key_array(key_buffer, k.bits), x.key_array(key_buffer, k.step), x.key_array(key_buffer, k.error)),
                  x.search(false, true, x.epoch_array(epoch_buffer, e.bits), x.epoch_array(epoch_buffer, e.step), {})});
    x.find_steps(source, from, count, line_samples, key_mean, value_mean,
                 {x.search(true, false, x.epoch_array(epoch_buffer, e.key_widths), x.epoch_array(epoch_buffer, e.key_step), {}),
                  x.search(true, true, x.epoch_array(epoch_buffer, e.value_widths), x.epoch_array(epoch_buffer, e.value_step), {})});
    x.finish();
}

void sealer::refit_keys(const layer_layout& layer, const sequence_view* sequence, std::int32_t first, std::int32_t count, std::int32_t skip, const double* metric, double power, std::byte* key_buffer,
                        std::byte* encoder_buffer, std::uint8_t* const* sketches) {
    auto& x = *state_;
    x.begin(layer);
    const auto seen = to_host(sequence, 1, x.s).front();
    const auto blocks = to_host(seen.sealed + first, count, x.s);
    const auto epoch = to_host(seen.epochs + blocks.front().epoch, 1, x.s).front();
    const decoded_source source(x.layer, sequence, seen.sealed + first, blocks, first, x.epoch_array(epoch.statistics, x.layer.epoch.key_mean), x.space.values, x.shape.chunk, x.s);
    const auto skipped = std::clamp<std::int64_t>(skip, 0, source.blocks().tokens() - 1);
    const auto from = source.blocks().begin() + skipped, fitted = source.blocks().tokens() - skipped;
    const auto& k = x.layer.key;
    x.fit_key_basis(source, from, fitted, metric, power, {}, key_buffer, encoder_buffer);
    x.allot(key_buffer, nullptr);
    x.find_steps(source, from, fitted, sketch_samples, {}, {}, {x.search(false, false, x.key_array(key_buffer, k.bits), x.key_array(key_buffer, k.step), x.key_array(key_buffer, k.error))});
    x.each_run(source, false, [&](std::int32_t at, std::int32_t n, const auto& keys, const auto&) {
        x.stage_targets(source.blocks(), at, n, sketches, nullptr, nullptr);
        x.project_keys(keys, {}, x.space.encoder);
        launch_pack_sketch(x.space.targets, n, x.key_codes(keys.rows), {}, x.key_sketch(key_buffer), x.layer.sketch_page, 0, x.layer.key_planes, x.s);
    });
    x.finish();
}

void sealer::encode(const layer_layout& layer, const seal_rows& rows, const std::byte* epoch_buffer, const std::byte* epoch_encoder,
                    const std::byte* sketch_keys, const std::byte* sketch_encoder, std::uint8_t* const* sketches, std::uint8_t* const* lines, std::uint8_t* const* exact) {
    auto& x = *state_;
    x.begin(layer);
    const auto& l = x.layer;
    const auto h = l.kv_heads;
    const exact_source source(l, rows, x.s);
    const auto encoder = [&](const std::byte* from, float* to) { launch_load_matrix({const_cast<std::byte*>(from), l.encoder_buffer, 0}, dtype::f32, h, l.key_size, to, x.s); };
    const bool one_basis = epoch_encoder == sketch_encoder;
    encoder(epoch_encoder, x.space.encoder);
    if (!one_basis) encoder(sketch_encoder, x.space.sketch_encoder);
    launch_load_matrix(x.epoch_array(epoch_buffer, l.epoch.value_basis), dtype::f16, h, l.value_size, x.space.basis, x.s);
    launch_load_typical(x.epoch_array(epoch_buffer, l.epoch.typical_scale), h, x.space.typical_inverse, x.s);
    const sketch_place value_sketch{epoch_buffer, l.epoch_buffer, l.epoch.bits, l.epoch.step, l.epoch.fields, l.epoch.field_count};
    x.each_run(source, true, [&](std::int32_t at, std::int32_t n, const auto& keys, const auto& values) {
        x.stage_targets(source.blocks(), at, n, sketches, lines, exact);
        if (exact != nullptr) launch_store_exact(l, x.space.targets, n, keys, values, x.s);
        x.project_values(values, x.epoch_array(epoch_buffer, l.epoch.value_mean));
        x.project_keys(keys, x.epoch_array(epoch_buffer, l.epoch.key_mean), x.space.encoder);
        const auto k = x.key_codes(keys.rows), v = x.value_codes(values.rows);
        launch_pack_lines(l, x.space.targets, n, k, v, x.by_row(), x.space.bytes, epoch_buffer, x.space.levels, x.s);
        if (!one_basis) x.project_keys(keys, {}, x.space.sketch_encoder);
        launch_pack_sketch(x.space.targets, n, k, {}, x.key_sketch(sketch_keys), l.sketch_page, 0, l.key_planes, x.s);
        launch_pack_sketch(x.space.targets, n, v, x.by_head(), value_sketch, l.sketch_page, l.key_planes, l.value_planes, x.s);
    });
    x.finish();
}

}  // namespace sekv::cuda
