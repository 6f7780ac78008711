#include "sekv/codec/calibration.hpp"

#include <algorithm>
#include <cmath>
#include <complex>
#include <numbers>
#include <numeric>
#include <utility>

#include "sekv/core/tensor_file.hpp"

namespace sekv {

namespace {

constexpr const char* calibration_format = "sekv-calibration-1";
constexpr const char* router_format = "sekv-paper-router-1";

std::size_t pair_count(const rope_shape& rope, std::size_t d) {
    const std::size_t pairs = rope.pairs == rope_shape::pairing::none ? 0 : rope.inverse_frequency.size();
    if (2 * pairs > d) throw invalid_argument("RoPE turns " + std::to_string(pairs) + " pairs, more than a vector of " + std::to_string(d) + " elements has.");
    for (std::size_t p = 0; p < pairs; ++p) {
        if (!std::isfinite(rope.inverse_frequency[p]))
            throw invalid_argument("RoPE's inverse frequency of pair " + std::to_string(p) + " is " + std::to_string(rope.inverse_frequency[p]) +
                                   "; it must be finite.");
    }
    return pairs;
}

// The two elements of pair p.
std::pair<std::size_t, std::size_t> pair_at(const rope_shape& rope, std::size_t p) {
    if (rope.pairs == rope_shape::pairing::interleaved) return {2 * p, 2 * p + 1};
    return {p, p + rope.inverse_frequency.size()};
}

void rotate(std::span<const double> in, const rope_shape& rope, double position, std::span<double> out) {
    if (in.size() != out.size())
        throw invalid_argument("A turned vector has as many elements as the one before, " + std::to_string(in.size()) + ", not " + std::to_string(out.size()) +
                               ".");
    const std::size_t pairs = pair_count(rope, in.size());
    for (std::size_t p = 0; p < pairs; ++p) {
        const auto [a, b] = pair_at(rope, p);
        const double angle = position * static_cast<double>(rope.inverse_frequency[p]);
        const double c = std::cos(angle), s = std::sin(angle), x = in[a], y = in[b];
        out[a] = c * x - s * y;
        out[b] = s * x + c * y;
    }
    if (in.data() != out.data()) std::copy(in.begin() + static_cast<std::ptrdiff_t>(2 * pairs), in.end(), out.begin() + static_cast<std::ptrdiff_t>(2 * pairs));
}

// Mean of exp(i w t) over the integers t in [begin, end). t being whole, w may first lose its multiples of 2 pi: sin(w/2) is
// then 0 only at w = 0, and the quotient of sines (Dirichlet's kernel) is well conditioned.
std::complex<double> mean_phase(double w, std::int64_t begin, std::int64_t end) {
    const double step = std::remainder(w, 2.0 * std::numbers::pi);
    const double n = static_cast<double>(end - begin);
    const double ratio = step == 0.0 ? 1.0 : std::sin(0.5 * n * step) / (n * std::sin(0.5 * step));
    return std::polar(1.0, step * (static_cast<double>(begin) + 0.5 * (n - 1.0))) * ratio;
}

// The 2 x 2 blocks (j, k) and (k, j) of the turned moment.
void turn_pairs(std::span<const double> m0, std::vector<double>& out, std::size_t d, std::pair<std::size_t, std::size_t> j,
                std::pair<std::size_t, std::size_t> k, std::complex<double> difference, std::complex<double> sum) {
    const auto [a, b] = j;
    const auto [x, y] = k;
    const double ax = m0[a * d + x], ay = m0[a * d + y], bx = m0[b * d + x], by = m0[b * d + y];
    const auto against = std::complex<double>(ax + by, bx - ay) * difference;  // E[z_j conj z_k]
    const auto along = std::complex<double>(ax - by, bx + ay) * sum;           // E[z_j z_k]
    out[a * d + x] = out[x * d + a] = 0.5 * (against.real() + along.real());
    out[b * d + y] = out[y * d + b] = 0.5 * (against.real() - along.real());
    out[b * d + x] = out[x * d + b] = 0.5 * (along.imag() + against.imag());
    out[a * d + y] = out[y * d + a] = 0.5 * (along.imag() - against.imag());
}

std::string layer_name(std::size_t layer, const char* what) { return "layer." + std::to_string(layer) + "." + what; }

tensor_file open_file(const std::filesystem::path& path, const char* format, const model_shape& model, std::size_t tensors) {
    auto file = tensor_file::load(path);
    const auto at = "\"" + path.string() + "\" ";
    if (file.metadata_at("format") != format) throw format_error(at + "has format \"" + file.metadata_at("format") + "\", not \"" + format + "\".");
    const auto& found = file.metadata_at("fingerprint");
    if (found.empty() || found != model.fingerprint)
        throw format_error(at + "was made for the model \"" + found + "\", not \"" + model.fingerprint + "\"; make it anew for this model.");
    if (file.tensors().size() != tensors)
        throw format_error(at + "holds " + std::to_string(file.tensors().size()) + " tensors; a model of " + std::to_string(model.layers.size()) +
                           " layers needs " + std::to_string(tensors) + ".");
    return file;
}

tensor_file new_file(const char* format, const std::string& fingerprint) {
    if (fingerprint.empty()) throw invalid_argument("A file without the model's fingerprint can't be told from another model's; set it.");
    tensor_file file;
    file.metadata = {{"format", format}, {"fingerprint", fingerprint}};
    return file;
}

// Refuses what no mean of q q^T can be, up to float rounding.
void check_moment(std::span<const float> m, double count, std::size_t d, const std::string& at) {
    double largest = 0.0;
    for (std::size_t i = 0; i < d; ++i) {
        if (!(m[i * d + i] >= 0.0F)) throw format_error(at + " has a negative or undefined mean square; the file is damaged.");
        largest = std::max(largest, static_cast<double>(m[i * d + i]));
    }
    if (!(count >= 0.0) || !std::isfinite(count)) throw format_error(at + " counts " + std::to_string(count) + " queries; the file is damaged.");
    for (std::size_t i = 0; i < d; ++i) {
        for (std::size_t j = i; j < d; ++j) {
            const double upper = static_cast<double>(m[i * d + j]), lower = static_cast<double>(m[j * d + i]);
            const double bound = std::sqrt(static_cast<double>(m[i * d + i]) * static_cast<double>(m[j * d + j]));
            if (!std::isfinite(upper) || !(std::abs(upper) <= bound + 1e-5 * largest))
                throw format_error(at + " is not a second moment: an element passes Cauchy-Schwarz; the file is damaged.");
            if (!(std::abs(upper - lower) <= 1e-5 * largest)) throw format_error(at + " is not symmetric; the file is damaged.");
        }
    }
    if (count == 0.0 && largest > 0.0) throw format_error(at + " has values but no queries; the file is damaged.");
}

}  // namespace

void turn_query(std::span<const double> in, const rope_shape& rope, std::int64_t position, std::span<double> out) {
    rotate(in, rope, static_cast<double>(position), out);
}

void unturn_query(std::span<const double> in, const rope_shape& rope, std::int64_t position, std::span<double> out) {
    rotate(in, rope, -static_cast<double>(position), out);
}

std::vector<double> turn_moment(std::span<const double> m0, const rope_shape& rope, std::int64_t position_begin, std::int64_t position_end) {
    const auto d = static_cast<std::size_t>(std::llround(std::sqrt(static_cast<double>(m0.size()))));
    if (m0.empty() || d * d != m0.size()) throw invalid_argument("A second moment is a square matrix; " + std::to_string(m0.size()) + " elements aren't.");
    if (position_begin < 0 || position_end <= position_begin)
        throw invalid_argument("Positions [" + std::to_string(position_begin) + ", " + std::to_string(position_end) + ") must not be negative or none.");
    const std::size_t pairs = pair_count(rope, d);
    std::vector<double> out(m0.begin(), m0.end());
    for (std::size_t j = 0; j < pairs; ++j) {
        const double w = static_cast<double>(rope.inverse_frequency[j]);
        for (std::size_t k = j; k < pairs; ++k) {
            const double v = static_cast<double>(rope.inverse_frequency[k]);
            turn_pairs(m0, out, d, pair_at(rope, j), pair_at(rope, k), mean_phase(w - v, position_begin, position_end),
                       mean_phase(w + v, position_begin, position_end));
        }
        const auto phase = mean_phase(w, position_begin, position_end);
        const auto [a, b] = pair_at(rope, j);
        for (std::size_t u = 2 * pairs; u < d; ++u) {
            const auto z = std::complex<double>(m0[a * d + u], m0[b * d + u]) * phase;
            out[a * d + u] = out[u * d + a] = z.real();
            out[b * d + u] = out[u * d + b] = z.imag();
        }
    }
    return out;
}

std::vector<double> turn_moment(std::span<const float> m0, const rope_shape& rope, std::int64_t position_begin, std::int64_t position_end) {
    const std::vector<double> wide(m0.begin(), m0.end());
    return turn_moment(std::span<const double>(wide), rope, position_begin, position_end);
}

std::span<const float> calibration::layer::moment(std::int32_t kv_head) const {
    if (kv_head < 0 || kv_head >= kv_heads) throw invalid_argument("KV head " + std::to_string(kv_head) + " is outside [0, " + std::to_string(kv_heads) + ").");
    const auto size = static_cast<std::size_t>(key_size) * static_cast<std::size_t>(key_size);
    return std::span<const float>(moments).subspan(static_cast<std::size_t>(kv_head) * size, size);
}

calibration calibration::load(const std::filesystem::path& path, const model_shape& model) {
    const auto file = open_file(path, calibration_format, model, 2 * model.layers.size());
    calibration c{model.fingerprint, {}};
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        const std::int64_t heads = model.layers[i].kv_heads, d = model.layers[i].key_size;
        layer l{model.layers[i].kv_heads, model.layers[i].key_size, file.floats(layer_name(i, "moments"), {heads, d, d}),
                file.doubles(layer_name(i, "counts"), {heads})};
        for (std::int32_t h = 0; h < l.kv_heads; ++h)
            check_moment(l.moment(h), l.counts[static_cast<std::size_t>(h)], static_cast<std::size_t>(d),
                         "\"" + path.string() + "\": the moment of layer " + std::to_string(i) + ", KV head " + std::to_string(h));
        c.layers.push_back(std::move(l));
    }
    return c;
}

void calibration::save(const std::filesystem::path& path) const {
    auto file = new_file(calibration_format, fingerprint);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const auto& l = layers[i];
        file.add(layer_name(i, "moments"), {l.kv_heads, l.key_size, l.key_size}, std::span<const float>(l.moments));
        file.add(layer_name(i, "counts"), {l.kv_heads}, std::span<const double>(l.counts));
    }
    file.save(path);
}

calibration_collector::calibration_collector(model_shape model) : model_(std::move(model)) {
    model_.validate();
    if (model_.fingerprint.empty()) throw invalid_argument("Calibration needs model_shape::fingerprint, which later tells this model's file from another's.");
    for (const auto& l : model_.layers) {
        const auto d = static_cast<std::size_t>(l.key_size);
        layers_.emplace_back(static_cast<std::size_t>(l.kv_heads), head{std::vector<double>(d * (d + 1) / 2), 0.0});
        if (turned_.size() < d) turned_.resize(d);
    }
}

void calibration_collector::add(std::int32_t layer, std::int32_t kv_head, std::span<const float> query, std::int64_t position) {
    if (layer < 0 || static_cast<std::size_t>(layer) >= layers_.size())
        throw invalid_argument("Layer " + std::to_string(layer) + " is outside [0, " + std::to_string(layers_.size()) + ").");
    const auto& shape = model_.layers[static_cast<std::size_t>(layer)];
    if (kv_head < 0 || kv_head >= shape.kv_heads)
        throw invalid_argument("KV head " + std::to_string(kv_head) + " is outside [0, " + std::to_string(shape.kv_heads) + ").");
    if (query.size() != static_cast<std::size_t>(shape.key_size))
        throw invalid_argument("A query of layer " + std::to_string(layer) + " has " + std::to_string(shape.key_size) + " elements, not " +
                               std::to_string(query.size()) + ".");
    if (position < 0) throw invalid_argument("A query's position can't be negative (" + std::to_string(position) + ").");
    for (const float x : query) {
        if (!std::isfinite(x))
            throw invalid_argument("A query of layer " + std::to_string(layer) + " at position " + std::to_string(position) + " holds " + std::to_string(x) +
                                   "; queries must be finite.");
    }
    const auto q = std::span(turned_).first(query.size());
    std::copy(query.begin(), query.end(), q.begin());
    unturn_query(q, shape.rope, position, q);
    auto& to = layers_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(kv_head)];
    double* sum = to.sum.data();
    for (std::size_t i = 0; i < q.size(); ++i) {
        for (std::size_t j = i; j < q.size(); ++j) *sum++ += q[i] * q[j];
    }
    to.count += 1.0;
}

calibration calibration_collector::finish() const {
    calibration c{model_.fingerprint, {}};
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const auto& shape = model_.layers[i];
        const auto d = static_cast<std::size_t>(shape.key_size);
        calibration::layer l{shape.kv_heads, shape.key_size, std::vector<float>(layers_[i].size() * d * d), {}};
        for (std::size_t h = 0; h < layers_[i].size(); ++h) {
            const auto& from = layers_[i][h];
            l.counts.push_back(from.count);
            if (from.count == 0.0) continue;
            const double* sum = from.sum.data();
            float* m = l.moments.data() + h * d * d;
            for (std::size_t r = 0; r < d; ++r) {
                for (std::size_t s = r; s < d; ++s) m[r * d + s] = m[s * d + r] = static_cast<float>(*sum++ / from.count);
            }
        }
        c.layers.push_back(std::move(l));
    }
    return c;
}

std::size_t calibration_collector::bytes() const noexcept {
    std::size_t total = sizeof(calibration_collector) + turned_.size() * sizeof(double);
    for (const auto& heads : layers_) {
        for (const auto& h : heads) total += sizeof(head) + h.sum.size() * sizeof(double);
    }
    return total;
}

paper_weights paper_weights::untrained(const model_shape& model) {
    model.validate();
    paper_weights w{model.fingerprint, {}};
    for (const auto& shape : model.layers) {
        const auto d = static_cast<std::size_t>(shape.key_size);
        std::vector<float> frequency(d, 0.0F);
        for (std::size_t p = 0; p < pair_count(shape.rope, d); ++p) {
            const auto [a, b] = pair_at(shape.rope, p);
            frequency[a] = frequency[b] = std::abs(shape.rope.inverse_frequency[p]);
        }
        std::vector<std::size_t> slowest(d);
        std::iota(slowest.begin(), slowest.end(), std::size_t{0});
        std::stable_sort(slowest.begin(), slowest.end(), [&](std::size_t x, std::size_t y) { return frequency[x] < frequency[y]; });
        layer l{shape.key_size, std::vector<float>(static_cast<std::size_t>(route_size) * d), initial_tau};
        for (std::size_t r = 0; r < static_cast<std::size_t>(route_size); ++r) l.weight[r * d + slowest[r]] = 1.0F;
        w.layers.push_back(std::move(l));
    }
    return w;
}

std::uint64_t paper_weights::parameters() const noexcept {
    std::uint64_t n = 0;
    for (const auto& l : layers) n += l.weight.size() + 1;
    return n;
}

paper_weights paper_weights::load(const std::filesystem::path& path, const model_shape& model) {
    const auto file = open_file(path, router_format, model, model.layers.size() + 1);
    const auto tau = file.floats("tau", {static_cast<std::int64_t>(model.layers.size())});
    paper_weights w{model.fingerprint, {}};
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        layer l{model.layers[i].key_size, file.floats(layer_name(i, "weight"), {route_size, model.layers[i].key_size}), tau[i]};
        const auto at = "\"" + path.string() + "\": layer " + std::to_string(i);
        if (!(l.tau > 0.0F && l.tau < 1.0F)) throw format_error(at + " has tau " + std::to_string(l.tau) + ", outside (0, 1); the file is damaged.");
        if (!std::all_of(l.weight.begin(), l.weight.end(), [](float x) { return std::isfinite(x); }))
            throw format_error(at + " has weights that are not finite; the file is damaged.");
        w.layers.push_back(std::move(l));
    }
    return w;
}

void paper_weights::save(const std::filesystem::path& path) const {
    auto file = new_file(router_format, fingerprint);
    std::vector<float> tau;
    for (std::size_t i = 0; i < layers.size(); ++i) {
        file.add(layer_name(i, "weight"), {route_size, layers[i].key_size}, std::span<const float>(layers[i].weight));
        tau.push_back(layers[i].tau);
    }
    file.add("tau", {static_cast<std::int64_t>(layers.size())}, std::span<const float>(tau));
    file.save(path);
}

}  // namespace sekv
