// Sealed sequences of random codes for the tests of routing: bases, sketches and fields are laid out and packed by the host library; lines are random bytes that tell their place.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/rows_world.hpp"
#include "kernels/decode_workspace.cuh"
#include "sekv/codec/sketch.hpp"
#include "sekv/tier/bases.hpp"
#include "src/cuda/layer_layout.hpp"

namespace sekv::cuda::route_tests {

using rows_tests::array;

struct world_shape {
    std::int32_t group = 2, kv_heads = 2, dk = 64, dv = 64;
    std::int32_t key_bits = 0, value_bits = 0;
    bool exact_tier = false;
    float soft_cap = 0;
    std::int32_t slots = 0;
    std::vector<std::int32_t> epochs = {20, 9, 8};  ///< sealed blocks of each; segments of up to 16 blocks
    bool resketched = false;                        ///< the epochs' R1 key bases are others than R2's
    std::int32_t longest_segment = segment_blocks;
    std::int32_t patterns = 0;                      ///< distinct codes of a basis, 0: every token has its own
    std::uint32_t seed = 1;
    double decay = 0;           ///< of the codes' variance; 0: 0.5 to 0.9, by epoch
    float basis = 0.45F;        ///< deviation of A's elements
    float code_scale = 1;       ///< of key codes
    double decades = 0;         ///< by which key codes of one basis differ in scale
    float means = 1;            ///< deviation of the epochs' mean keys
};

/// Model, formats and one basis per (epoch, generation); the tested layer is the second, so that nothing begins at 0.
class world {
public:
    explicit world(const world_shape& s) : shape(s), random(s.seed), model_(make_model(s)), options(make_options(s)), memory_(std::make_shared<memory>(make_heap_resource(), memory::unlimited, memory::unlimited)), bases(model_, options), layer(cache_layout(model_, options, dtype::bf16).layers[1]) {}

    [[nodiscard]] std::int32_t index(std::int32_t head) const { return bases.head_index(1, head); }
    [[nodiscard]] memory& budget() const { return *memory_; }
    [[nodiscard]] std::size_t exact_page_bytes() const { return cache_layout(model_, options, dtype::bf16).exact_line_block_bytes; }

    world_shape shape;
    oracle::draws random;

private:
    static model_shape make_model(const world_shape& s) {
        model_shape m;
        layer_shape l;
        l.kv_heads = s.kv_heads, l.group = s.group, l.key_size = s.dk, l.value_size = s.dv, l.soft_cap = s.soft_cap;
        m.layers = {l, l};
        return m;
    }
    static progressive_options make_options(const world_shape& s) {
        progressive_options o;
        o.key_sketch_bits = s.key_bits, o.value_sketch_bits = s.value_bits, o.exact_tier = s.exact_tier, o.line_slots = s.slots;
        return o;
    }
    model_shape model_;

public:
    progressive_options options;

private:
    std::shared_ptr<memory> memory_;

public:
    basis_layout bases;
    layer_layout layer;
};

/// Codes whose variance falls off, and the sketch that the host fits on them.
struct coded_basis {
    std::vector<float> codes;  ///< [patterns, size]
    sketch_code sketch;
};
inline coded_basis make_codes(world& w, std::int32_t size, std::int32_t bits, double decay, float scale = 1, double decades = 0) {
    coded_basis b;
    if (w.shape.decay > 0) decay = w.shape.decay;
    const std::int32_t count = w.shape.patterns > 0 ? w.shape.patterns : 512;
    std::vector<double> variance;
    for (std::int32_t j = 0; j < size; ++j) variance.push_back(30 * (1 - decay) * std::pow(decay, j));
    b.codes = w.random.normals(static_cast<std::int64_t>(count) * size);
    for (std::size_t i = 0; i < b.codes.size(); ++i) {
        const auto j = i % static_cast<std::size_t>(size);
        b.codes[i] *= scale * static_cast<float>(std::sqrt(variance[j]) * std::pow(10.0, -decades * static_cast<double>(j * 7 % 11) / 10));
    }
    b.sketch = fit_sketch(b.codes.data(), count, size, variance, bits);
    return b;
}

/// One sequence's pages, in host memory and on the device.
class sealed_sequence {
public:
    /// truncated: tokens that are missing from the sixth block on.
    sealed_sequence(world& w, std::int32_t sinks, std::int32_t truncated) : w_(w), epochs_in_use_(w.shape.epochs.size()) {
        view.sink_count = sinks;
        for (std::size_t e = 0; e < epochs_in_use_; ++e) make_epoch(e);
        std::int64_t begin = 0;
        for (std::size_t e = 0; e < epochs_in_use_; ++e) {
            for (std::int32_t b = 0; b < w.shape.epochs[e]; ++b) {
                const auto place = blocks.size();
                const bool last = e + 1 == epochs_in_use_ && b + 1 == w.shape.epochs[e];
                const std::int32_t count = place == 5 ? block_tokens - truncated : last ? 37 : block_tokens;
                make_block(e, begin, count);
                begin += count;
            }
        }
        length = begin;
        cut_segments();
        upload();
    }

    [[nodiscard]] const sequence_view* device() const { return view_->get(); }
    [[nodiscard]] key_view keys(std::int32_t basis, std::int32_t head) const { return bases_[static_cast<std::size_t>(basis)]->view(w_.index(head)); }
    [[nodiscard]] const epoch& statistics(std::int32_t e) const { return *epochs_[static_cast<std::size_t>(e)]; }
    [[nodiscard]] const std::uint8_t* planes(std::int32_t block, std::int32_t head) const { return sketches_[static_cast<std::size_t>(block)].data() + w_.bases.sketch_offset(w_.index(head)); }
    /// Where the host tier keeps a token's line.
    [[nodiscard]] const std::uint8_t* line(std::int32_t block, std::int32_t token, std::int32_t head) const {
        const auto& l = w_.layer;
        const auto& b = blocks[static_cast<std::size_t>(block)];
        if (l.exact_line_bytes > 0) return b.exact + l.exact_line_page.first + static_cast<std::size_t>(head) * l.exact_line_page.stride + static_cast<std::size_t>(token * l.exact_line_bytes);
        return b.lines + l.line_page.first + static_cast<std::size_t>(head) * l.line_page.stride + static_cast<std::size_t>(token * l.line_stride);
    }
    [[nodiscard]] std::vector<std::byte> cache() const { return cache_->read(); }

    sequence_view view;
    std::vector<sealed_block> blocks;
    std::vector<segment> segments;
    std::int64_t length = 0;

private:
    // R1 basis e is epoch e's; a resketched sequence has further ones for R1, numbered from the epochs' count on.
    void make_epoch(std::size_t e) {
        auto& w = w_;
        epochs_.push_back(std::make_shared<epoch>(w.bases, w.budget()));
        std::vector<std::shared_ptr<key_bases>> made = {epochs_.back()->keys};
        if (w.shape.resketched) made.push_back(std::make_shared<key_bases>(w.bases, w.budget()));
        key_codes_.emplace_back();
        value_codes_.emplace_back();
        for (std::int32_t h = 0; h < w.shape.kv_heads; ++h) {
            const auto& f = w.bases.format(w.index(h));
            for (auto& b : made) {
                auto codes = make_codes(w, f.key_size, f.key_bits, e % 2 == 0 ? 0.5 : 0.85, w.shape.code_scale, w.shape.decades);
                const auto a = w.random.normals(f.key_size * f.key_size, w.shape.basis);
                b->set(w.index(h), a, a, codes.sketch);
                if (b == made.back()) key_codes_.back().push_back(std::move(codes));
            }
            auto values = make_codes(w, f.value_size, f.value_bits, e % 2 == 0 ? 0.6 : 0.9);
            const auto mean = w.random.normals(f.key_size, w.shape.means), value_mean = w.random.normals(f.value_size), key_step = w.random.normals(f.key_size), value_step = w.random.normals(f.value_size);
            const std::vector<std::uint8_t> key_widths(static_cast<std::size_t>(f.key_size / 8), 4), value_widths(static_cast<std::size_t>(f.value_size / 8), 4);
            epochs_.back()->set(w.index(h), {mean, value_mean, w.random.normals(f.value_size * f.value_size), 1.5F + static_cast<float>(h), &values.sketch, key_widths, value_widths, key_step, value_step});
            value_codes_.back().push_back(std::move(values));
        }
        if (!w.shape.resketched) {
            bases_.push_back(made.back());
        } else {
            bases_.insert(bases_.begin() + static_cast<std::ptrdiff_t>(e), made[0]);
            bases_.push_back(made[1]);
        }
    }

    void make_block(std::size_t e, std::int64_t begin, std::int32_t count) {
        auto& w = w_;
        std::vector<std::uint8_t> sketch(w.bases.sketch_block_bytes(), 0);
        for (std::int32_t h = 0; h < w.shape.kv_heads; ++h) {
            const auto& f = w.bases.format(w.index(h));
            auto* planes = sketch.data() + w.bases.sketch_offset(w.index(h));
            pack(key_codes_[e][static_cast<std::size_t>(h)], f.key_size, planes);
            pack(value_codes_[e][static_cast<std::size_t>(h)], f.value_size, planes + f.key_planes() * plane_bytes);
        }
        sketches_.push_back(std::move(sketch));
        sealed_block b;
        b.begin = begin, b.count = count, b.epoch = static_cast<std::int32_t>(e), b.keys = static_cast<std::int32_t>(e + (w.shape.resketched ? epochs_in_use_ : 0));
        b.sketch = reinterpret_cast<const std::uint8_t*>(put(sketches_.back(), false));
        // R2 is there with R3, too, and must not be read then.
        b.lines = reinterpret_cast<const std::uint8_t*>(put(w.random.bytes(static_cast<std::int64_t>(w.bases.line_block_bytes())), true));
        if (w.shape.exact_tier) b.exact = reinterpret_cast<const std::uint8_t*>(put(w.random.bytes(static_cast<std::int64_t>(w.exact_page_bytes())), true));
        blocks.push_back(b);
    }
    void pack(const coded_basis& from, std::int32_t size, std::uint8_t* planes) {
        const auto d = static_cast<std::size_t>(size);
        const auto patterns = from.codes.size() / d;
        std::vector<float> codes(block_tokens * d);
        for (std::size_t i = 0; i < block_tokens; ++i) {
            const auto pick = static_cast<std::size_t>(w_.random.below(static_cast<std::int64_t>(patterns)));
            std::copy_n(from.codes.begin() + static_cast<std::ptrdiff_t>(pick * d), d, codes.begin() + static_cast<std::ptrdiff_t>(i * d));
            if (w_.shape.patterns == 0) codes[i * d] += w_.random.normal(0.5F);
        }
        pack_sketch(codes.data(), block_tokens, size, from.sketch.fields, from.sketch.bits.data(), from.sketch.step.data(), planes);
    }

    void cut_segments() {
        for (std::int32_t b = 0; b < static_cast<std::int32_t>(blocks.size()); ++b) {
            const auto& x = blocks[static_cast<std::size_t>(b)];
            const bool fits = !segments.empty() && segments.back().count < w_.shape.longest_segment && segments.back().epoch == x.epoch && segments.back().keys == x.keys;
            if (!fits) segments.push_back({b, 0, x.epoch, x.keys});
            ++segments.back().count;
        }
    }

    std::byte* put(const std::vector<std::uint8_t>& bytes, bool pinned) {
        std::vector<std::byte> copy(bytes.size());
        std::memcpy(copy.data(), bytes.data(), bytes.size());
        storage_.push_back(std::make_unique<array<std::byte>>(copy, pinned));
        return storage_.back()->get();
    }
    std::byte* put(const std::byte* from, std::size_t bytes) { return put(std::vector<std::uint8_t>(reinterpret_cast<const std::uint8_t*>(from), reinterpret_cast<const std::uint8_t*>(from) + bytes), false); }

    void upload() {
        std::vector<const std::byte*> keys;
        for (const auto& b : bases_) keys.push_back(put(b->device(), w_.bases.key_device_bytes()));
        std::vector<epoch_ref> epochs;
        for (std::size_t e = 0; e < epochs_.size(); ++e) epochs.push_back({put(epochs_[e]->device(), w_.bases.epoch_bytes()), keys[e]});
        device_keys_ = std::make_unique<array<const std::byte*>>(keys);
        device_epochs_ = std::make_unique<array<epoch_ref>>(epochs);
        device_blocks_ = std::make_unique<array<sealed_block>>(blocks);
        device_segments_ = std::make_unique<array<segment>>(segments);
        view.exact_count[0] = 2 * exact_split_blocks;  // what exact_sums of route_step.hpp stand for
        view.sealed_count = static_cast<std::int32_t>(blocks.size()), view.segment_count = static_cast<std::int32_t>(segments.size());
        view.epoch_count = static_cast<std::int32_t>(epochs.size()), view.key_bases_count = static_cast<std::int32_t>(keys.size());
        view.sealed = device_blocks_->get(), view.segments = device_segments_->get(), view.epochs = device_epochs_->get(), view.key_bases = device_keys_->get();
        view.line_slots = w_.shape.slots;
        const auto heads = static_cast<std::size_t>(w_.bases.heads());
        cache_ = std::make_unique<array<std::byte>>(std::vector<std::byte>(std::max<std::size_t>(heads * w_.layer.line_cache.stride, 1), std::byte{0}));
        view.line_cache = w_.shape.slots > 0 ? cache_->get() : nullptr;
        view_ = std::make_unique<array<sequence_view>>(std::vector<sequence_view>{view});
    }

    world& w_;
    std::size_t epochs_in_use_;
    std::vector<std::shared_ptr<epoch>> epochs_;
    std::vector<std::shared_ptr<key_bases>> bases_;
    std::vector<std::vector<coded_basis>> key_codes_, value_codes_;  // [epoch][head]
    std::vector<std::vector<std::uint8_t>> sketches_;
    std::vector<std::unique_ptr<array<std::byte>>> storage_;
    std::unique_ptr<array<const std::byte*>> device_keys_;
    std::unique_ptr<array<epoch_ref>> device_epochs_;
    std::unique_ptr<array<sealed_block>> device_blocks_;
    std::unique_ptr<array<segment>> device_segments_;
    std::unique_ptr<array<std::byte>> cache_;
    std::unique_ptr<array<sequence_view>> view_;
};

}  // namespace sekv::cuda::route_tests
