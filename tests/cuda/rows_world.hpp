// What the tests of exact rows and of reconstruction share: device arrays, strided tensors, pages of ragged blocks, and sealed blocks of random codes that the
// host library can decode too.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/rows.hpp"
#include "oracle/random.hpp"
#include "sekv/attend/progressive.hpp"
#include "src/cuda/layer_layout.hpp"
#if defined(SEKV_SIMT)
#include "simt/engine.hpp"
#endif

namespace sekv::cuda::rows_tests {

/// Exactly `count` elements of device memory, or of pinned host memory that the device reads; begins as copies of one byte.
template <class T>
class array {
public:
    explicit array(std::size_t count, bool pinned = false, int fill = 0xa5) : count_(count), pinned_(pinned) {
        void* p = nullptr;
        if ((pinned ? cudaMallocHost(&p, count * sizeof(T)) : cudaMalloc(&p, count * sizeof(T))) != cudaSuccess) throw std::bad_alloc();
        data_ = static_cast<T*>(p);
        const std::vector<unsigned char> bytes(count * sizeof(T), static_cast<unsigned char>(fill));
        EXPECT_EQ(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyDefault), cudaSuccess);
    }
    explicit array(const std::vector<T>& values, bool pinned = false) : array(values.size(), pinned) {
        EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyDefault), cudaSuccess);
    }
    array(array&& o) noexcept : data_(std::exchange(o.data_, nullptr)), count_(o.count_), pinned_(o.pinned_) {}
    array& operator=(array&&) = delete;
    ~array() {
        if (data_ != nullptr) pinned_ ? cudaFreeHost(data_) : cudaFree(data_);
    }
    [[nodiscard]] T* get() const { return data_; }
    [[nodiscard]] std::size_t size() const { return count_; }
    [[nodiscard]] std::vector<T> read() const {
        std::vector<T> values(count_);
        EXPECT_EQ(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDefault), cudaSuccess);
        return values;
    }

private:
    T* data_ = nullptr;
    std::size_t count_ = 0;
    bool pinned_ = false;
};

inline void finish() { ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); }

/// Runs body under the schedule that SEKV_SIMT_SEED sets, then under several others; on a device once.
template <class Body>
void under_schedules(int count, Body&& body) {
    body();
#if defined(SEKV_SIMT)
    const auto before = simt::current_options();
    for (int seed = 0; seed < count; ++seed) {
        simt::set_seed(static_cast<std::uint64_t>(seed));
        SCOPED_TRACE(simt::schedule_name());
        body();
    }
    simt::current_options() = before;
#else
    (void)count;
#endif
}

/// The bits of x in a type of 16 bits, and what an element holds.
inline std::uint16_t bits_of(dtype type, float x) { return type == dtype::f16 ? fp16(x).bits : bf16(x).bits; }
inline float value_of(dtype type, std::uint16_t bits) {
    return type == dtype::f16 ? static_cast<float>(std::bit_cast<fp16>(bits)) : static_cast<float>(std::bit_cast<bf16>(bits));
}

/// An engine's [tokens, heads, size] tensor in device memory that begins `lead` elements in, with `gap` elements behind every head and every token.
class tensor {
public:
    tensor(oracle::draws& random, dtype type, std::int64_t tokens, std::int32_t heads, std::int32_t size, std::int64_t lead, std::int64_t gap)
        : type_(type),
          lead_(lead),
          head_stride_(size + gap),
          token_stride_(heads * head_stride_ + gap),
          values_(random.normals(lead + tokens * token_stride_)) {
        for (auto& x : values_) x = type == dtype::f32 ? x : value_of(type, bits_of(type, x));
        upload();
    }
    void set(std::int64_t token, std::int32_t head, std::int32_t j, float x) {
        values_[index(token, head, j)] = x;
        upload();
    }
    [[nodiscard]] float at(std::int64_t token, std::int32_t head, std::int32_t j) const { return values_[index(token, head, j)]; }
    [[nodiscard]] tensor_in view() const { return {bytes_->get() + static_cast<std::size_t>(lead_) * size_of(type_), type_, token_stride_, head_stride_}; }

private:
    [[nodiscard]] std::size_t index(std::int64_t token, std::int32_t head, std::int32_t j) const {
        return static_cast<std::size_t>(lead_ + token * token_stride_ + head * head_stride_ + j);
    }
    void upload() {
        std::vector<std::byte> bytes(values_.size() * size_of(type_));
        for (std::size_t i = 0; i < values_.size(); ++i) {
            const auto half = type_ == dtype::f32 ? std::uint16_t{0} : bits_of(type_, values_[i]);
            std::memcpy(bytes.data() + i * size_of(type_), type_ == dtype::f32 ? static_cast<const void*>(&values_[i]) : &half, size_of(type_));
        }
        bytes_ = std::make_unique<array<std::byte>>(bytes);
    }
    dtype type_;
    std::int64_t lead_, head_stride_, token_stride_;
    std::vector<float> values_;
    std::unique_ptr<array<std::byte>> bytes_;
};

/// A layer with exact pages alone, heads neither at the page's begin nor packed.
inline layer_layout exact_layer(dtype stored, std::int32_t kv_heads, std::int32_t dk, std::int32_t dv) {
    layer_layout l;
    l.kv_heads = kv_heads, l.group = 1, l.key_size = dk, l.value_size = dv, l.stored = stored;
    l.exact_page = {48, static_cast<std::uint64_t>((dk + dv) * block_tokens * 2 + 32)};
    return l;
}
inline std::size_t page_bytes(const layer_layout& l) { return l.exact_page.first + static_cast<std::size_t>(l.kv_heads) * l.exact_page.stride; }

/// Element index of a key or value in a page of 16-bit elements.
inline std::size_t key_index(const head_stride& page, std::int32_t head, std::int32_t j, std::int64_t token, std::int32_t capacity = block_tokens) {
    return (page.first + static_cast<std::size_t>(head) * page.stride) / 2 + static_cast<std::size_t>(j) * static_cast<std::size_t>(capacity) +
           static_cast<std::size_t>(token);
}
inline std::size_t value_index(const head_stride& page, const layer_layout& l, std::int32_t head, std::int64_t token, std::int32_t i,
                               std::int32_t capacity = block_tokens) {
    return key_index(page, head, l.key_size, 0, capacity) + static_cast<std::size_t>(token * l.value_size + i);
}

/// A sequence's exact blocks, alternately in device and pinned memory.
struct block_list {
    block_list(std::size_t bytes, std::int64_t begin, const std::vector<std::int32_t>& counts) {
        for (const auto count : counts) {
            pages.emplace_back(bytes / 2, pages.size() % 2 == 1);
            blocks.push_back({reinterpret_cast<const std::byte*>(pages.back().get()), begin, count, 0});
            begin += count;
        }
        device = std::make_unique<array<exact_block>>(blocks);
    }
    std::vector<array<std::uint16_t>> pages;
    std::vector<exact_block> blocks;
    std::unique_ptr<array<exact_block>> device;
};

/// Sealed blocks of random codes of one layer: every width, steps and scales over many octaves, epochs of their own, R3 for some, sinks.
class sealed_world {
public:
    struct shape {
        dtype stored = dtype::bf16;
        std::int32_t kv_heads = 2, dk = 64, dv = 64, sinks = 4;
        std::vector<std::int32_t> counts = {64, 64, 64, 21};
        std::int64_t begin = 0;
        std::vector<bool> exact;  ///< blocks that have R3
        float line_factor = 0;
        bool empty_codes = false;  ///< widths of 0 throughout
        std::uint32_t seed = 1;
    };

    explicit sealed_world(const shape& s)
        : shape_(s),
          random_(s.seed),
          model_(make_model(s)),
          options_(make_options(s)),
          memory_(std::make_shared<memory>(make_heap_resource(), memory::unlimited, memory::unlimited)),
          pool_(memory_),
          bases_(model_, options_),
          codec_(model_, options_, s.stored, pool_, executor_),
          layer(cache_layout(model_, options_, s.stored).layers[0]) {
        for (int i = 0; i < 2; ++i) epochs_.push_back(make_epoch());
        std::int64_t begin = s.begin;
        for (std::size_t b = 0; b < s.counts.size(); ++b) {
            make_block(b, begin);
            begin += s.counts[b];
        }
        make_sinks();
        upload();
    }

    [[nodiscard]] const sequence_view* view() const { return view_->get(); }
    [[nodiscard]] std::int32_t blocks() const { return static_cast<std::int32_t>(units_.size()); }
    /// Rows of a block [64, size] as the host decodes them; at R2 even where R3 is, if so asked. Zeros behind its tokens.
    void decode(std::int32_t block, std::int32_t head, bool refined, std::vector<float>& keys, std::vector<float>& values) const {
        auto u = units_[static_cast<std::size_t>(block)];
        if (refined) u.payload.exact = nullptr;
        keys.assign(static_cast<std::size_t>(block_tokens * shape_.dk), 0.0F);
        values.assign(static_cast<std::size_t>(block_tokens * shape_.dv), 0.0F);
        codec_.decode(u, 0, head, {u.begin, u.count}, keys.data(), values.data());
    }
    [[nodiscard]] bool is_exact(std::int32_t block) const { return units_[static_cast<std::size_t>(block)].payload.exact != nullptr; }
    [[nodiscard]] bool is_sink(std::int32_t block, std::int32_t token) const { return position(block, token) < shape_.sinks; }
    [[nodiscard]] std::int32_t count(std::int32_t block) const { return units_[static_cast<std::size_t>(block)].count; }
    [[nodiscard]] float sink_key(std::int32_t block, std::int32_t head, std::int32_t j, std::int32_t token) const {
        return value_of(shape_.stored, sinks_[key_index(layer.sink_page, head, j, position(block, token), layer.sink_capacity)]);
    }
    [[nodiscard]] float sink_value(std::int32_t block, std::int32_t head, std::int32_t token, std::int32_t i) const {
        return value_of(shape_.stored, sinks_[value_index(layer.sink_page, layer, head, position(block, token), i, layer.sink_capacity)]);
    }

private:
    [[nodiscard]] std::int64_t position(std::int32_t block, std::int32_t token) const { return units_[static_cast<std::size_t>(block)].begin + token; }
    static model_shape make_model(const shape& s) {
        model_shape m;
        layer_shape l;
        l.kv_heads = s.kv_heads, l.group = 2, l.key_size = s.dk, l.value_size = s.dv;
        m.layers = {l};
        m.sinks = s.sinks;
        return m;
    }
    static progressive_options make_options(const shape& s) {
        progressive_options o;
        o.line_factor = s.line_factor;
        o.exact_tier = !s.exact.empty();
        o.line_slots = 0;
        return o;
    }

    struct half {
        std::vector<std::uint8_t> widths;
        std::vector<float> step, basis;
    };
    // Widths that fit the half's bytes; steps over a dozen octaves, the basis' columns the inverse, so that every component counts.
    half make_half(std::int32_t size, std::int32_t bytes, bool by_column) {
        half h;
        std::int32_t left = shape_.empty_codes ? 0 : bytes;
        for (std::int32_t c = 0; c < size / 8; ++c) {
            const auto width = std::min(left, random_.below(9));
            h.widths.push_back(static_cast<std::uint8_t>(width == 1 ? 0 : width));
            left -= h.widths.back();
        }
        std::vector<float> reach;
        for (std::int32_t j = 0; j < size; ++j) {
            const auto width = h.widths[static_cast<std::size_t>(j / 8)];
            reach.push_back(std::exp2(random_.normal(2.5F)));
            h.step.push_back(width == 0 ? 0.0F : 6.0F * reach.back() / static_cast<float>(1 << width));
        }
        h.basis = random_.normals(size * size);
        for (std::size_t i = 0; i < h.basis.size(); ++i) h.basis[i] /= reach[by_column ? i % reach.size() : i / reach.size()];
        return h;
    }

    std::shared_ptr<epoch> make_epoch() {
        auto e = std::make_shared<epoch>(bases_, *memory_);
        for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
            const auto& f = bases_.format(h);
            const auto k = make_half(shape_.dk, f.key_line_bytes, true), v = make_half(shape_.dv, f.value_line_bytes, false);
            sketch_code keys, values;  // R1's, not used here
            keys.bits.resize(static_cast<std::size_t>(shape_.dk)), keys.step.resize(keys.bits.size()), keys.error.resize(keys.bits.size());
            values.bits.resize(static_cast<std::size_t>(shape_.dv)), values.step.resize(values.bits.size()), values.error.resize(values.bits.size());
            e->keys->set(h, k.basis, k.basis, keys);
            const auto key_mean = random_.normals(shape_.dk, 3.0F), value_mean = random_.normals(shape_.dv);
            e->set(h, {key_mean, value_mean, v.basis, 1.0F, &values, k.widths, v.widths, k.step, v.step});
        }
        return e;
    }

    void make_block(std::size_t b, std::int64_t begin) {
        progressive_codec::unit u{begin, shape_.counts[b], {}};
        u.payload.statistics = epochs_[b % 3 == 1 ? 1 : 0];
        u.payload.keys = u.payload.statistics->keys;
        u.payload.lines = pool_.make(tier::host, kind::lines, bases_.line_block_bytes());
        const auto codes = random_.bytes(static_cast<std::int64_t>(u.payload.lines->size()));
        std::memcpy(u.payload.lines->data(), codes.data(), codes.size());
        for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {  // scales of 2^-2 to 2^2
            for (std::int32_t t = 0; t < block_tokens; ++t)
                *u.payload.lines->as<std::uint8_t>(bases_.line_offset(h) + static_cast<std::size_t>(t * layer.line_stride + layer.key_line_bytes)) =
                    static_cast<std::uint8_t>(144 + random_.below(33));
        }
        if (b < shape_.exact.size() && shape_.exact[b]) {
            const auto rows = random_.normals(static_cast<std::int64_t>(block_tokens * shape_.kv_heads * (shape_.dk + shape_.dv)));
            u.payload.exact = pool_.make(tier::host, kind::exact, rows.size() * 2);
            for (std::size_t i = 0; i < rows.size(); ++i) u.payload.exact->as<std::uint16_t>()[i] = bits_of(shape_.stored, rows[i]);
        }
        units_.push_back(std::move(u));
    }

    // Where R3 holds a sink, the sink page holds the same.
    void make_sinks() {
        for (const auto x :
             random_.normals(static_cast<std::int64_t>(layer.sink_page.first + static_cast<std::size_t>(shape_.kv_heads) * layer.sink_page.stride) / 2))
            sinks_.push_back(bits_of(shape_.stored, x));
        if (!is_exact(0) || shape_.begin > 0) return;
        const auto* rows = units_[0].payload.exact->as<std::uint16_t>();
        for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
            for (std::int32_t t = 0; t < shape_.sinks; ++t) {
                const auto* row = rows + (layer.exact_line_page.first + static_cast<std::size_t>(h) * layer.exact_line_page.stride +
                                          static_cast<std::size_t>(t * layer.exact_line_bytes)) /
                                             2;
                for (std::int32_t j = 0; j < shape_.dk; ++j) sinks_[key_index(layer.sink_page, h, j, t, layer.sink_capacity)] = row[j];
                for (std::int32_t i = 0; i < shape_.dv; ++i) sinks_[value_index(layer.sink_page, layer, h, t, i, layer.sink_capacity)] = row[shape_.dk + i];
            }
        }
    }

    template <class T>
    const T* put(const std::byte* from, std::size_t bytes, bool pinned) {
        storage_.emplace_back(std::vector<std::byte>(from, from + bytes), pinned);
        return reinterpret_cast<const T*>(storage_.back().get());
    }
    void upload() {
        std::vector<epoch_ref> epochs;
        for (const auto& e : epochs_)
            epochs.push_back({put<std::byte>(e->device(), bases_.epoch_bytes(), false), put<std::byte>(e->keys->device(), bases_.key_device_bytes(), false)});
        std::vector<sealed_block> blocks;
        for (const auto& u : units_) {
            sealed_block b;
            // Only the lines of the block's tokens in the last head are there to be read.
            b.lines = put<std::uint8_t>(u.payload.lines->data(),
                                        u.payload.lines->size() - static_cast<std::size_t>((block_tokens - u.count) * layer.line_stride), true);
            if (u.payload.exact)
                b.exact = put<std::uint8_t>(u.payload.exact->data(),
                                            u.payload.exact->size() - static_cast<std::size_t>((block_tokens - u.count) * layer.exact_line_bytes), true);
            b.begin = u.begin, b.count = u.count, b.epoch = u.payload.statistics == epochs_[1] ? 1 : 0;
            blocks.push_back(b);
        }
        sequence_view v;
        if (shape_.sinks > 0) v.sinks = put<std::byte>(reinterpret_cast<const std::byte*>(sinks_.data()), sinks_.size() * 2, false);
        v.sink_count = shape_.sinks;
        blocks_ = std::make_unique<array<sealed_block>>(blocks);
        epoch_refs_ = std::make_unique<array<epoch_ref>>(epochs);
        v.sealed_count = static_cast<std::int32_t>(blocks.size());
        v.sealed = blocks_->get(), v.epochs = epoch_refs_->get(), v.epoch_count = 2;
        view_ = std::make_unique<array<sequence_view>>(std::vector<sequence_view>{v});
    }

    struct inline_executor final : executor {
        void run(std::int64_t count, const std::function<void(std::int64_t, std::int32_t)>& body) override {
            for (std::int64_t i = 0; i < count; ++i) body(i, 0);
        }
        [[nodiscard]] std::int32_t workers() const noexcept override { return 1; }
    };

    shape shape_;
    oracle::draws random_;
    model_shape model_;
    progressive_options options_;
    std::shared_ptr<memory> memory_;
    block_pool pool_;
    inline_executor executor_;
    basis_layout bases_;
    progressive_codec codec_;

public:
    layer_layout layer;

private:
    std::vector<std::shared_ptr<epoch>> epochs_;
    std::vector<progressive_codec::unit> units_;
    std::vector<std::uint16_t> sinks_;
    std::vector<array<std::byte>> storage_;
    std::unique_ptr<array<sealed_block>> blocks_;
    std::unique_ptr<array<epoch_ref>> epoch_refs_;
    std::unique_ptr<array<sequence_view>> view_;
};

}  // namespace sekv::cuda::rows_tests
