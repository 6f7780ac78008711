// Rows in pages, and the buffers and pages that a seal fills.
#pragma once

#include "seal_host.hpp"
#include "src/cuda/runtime.hpp"

namespace sekv::cuda::seal_tests {

/// A layer (the second of its model) with rows in pages, and everything that a seal reads and writes.
class seal_world {
public:
    struct shape {
        dtype stored = dtype::bf16;
        std::int32_t kv_heads = 2, dk = 64, dv = 64, skip = 4, chunk = 128;
        std::vector<std::int32_t> counts = {64, 64, 64, 64, 64, 37};
        std::int64_t begin = 0;
        double power = 1;
        bool exact_tier = false;
        enum class data { falling, constant_keys, zero_values, rank_one } rows = data::falling;
        std::uint32_t seed = 1;
    };

    explicit seal_world(const shape& s)
        : shape_(s), random_(s.seed), model_(make_model(s)), options_(make_options(s)), bases_(model_, options_), layer(cache_layout(model_, options_, s.stored).layers[1]),
          pages(page_bytes(), s.begin, s.counts), key_buffer(bases_.key_device_bytes()), epoch_buffer(bases_.epoch_bytes()), encoder_buffer(bases_.key_host_bytes(), true) {
        for (std::int32_t h = 0; h < s.kv_heads; ++h) {
            heads.push_back(make_rows());
            const auto moment = make_metric();
            metric.insert(metric.end(), moment.begin(), moment.end());
        }
        fill_pages();
        for (std::size_t b = 0; b < s.counts.size(); ++b) {
            sketch_pages.emplace_back(bases_.sketch_block_bytes());
            line_pages.emplace_back(bases_.line_block_bytes(), true);
            if (s.exact_tier) exact_pages.emplace_back(cache_layout(model_, options_, s.stored).exact_line_block_bytes, true);
            sketches.push_back(sketch_pages.back().get());
            lines.push_back(line_pages.back().get());
            if (s.exact_tier) exact.push_back(b % 2 == 0 ? exact_pages.back().get() : nullptr);
        }
    }

    [[nodiscard]] std::int64_t tokens() const { return heads.front().count; }
    [[nodiscard]] std::int64_t skip() const { return std::min<std::int64_t>(shape_.skip, tokens() - 1); }
    [[nodiscard]] seal_rows rows() const { return {pages.device->get(), static_cast<std::int32_t>(shape_.counts.size()), shape_.skip, tokens()}; }
    [[nodiscard]] seal_shape workspace_shape() const { return {shape_.kv_heads, std::max(shape_.dk, shape_.dv), shape_.chunk}; }

    void fit(sealer& s) { s.fit_epoch(layer, rows(), metric.data(), shape_.power, bytes(key_buffer), bytes(epoch_buffer), bytes(encoder_buffer)); }
    void encode(sealer& s) {
        s.encode(layer, rows(), bytes(epoch_buffer), bytes(encoder_buffer), bytes(key_buffer), bytes(encoder_buffer), sketches.data(), lines.data(), exact.empty() ? nullptr : exact.data());
    }

    /// Fit and encode with a workspace of its own.
    void seal() {
        const array<std::byte> workspace(seal_workspace_bytes(workspace_shape()));
        const owned_stream stream;
        sealer s(workspace_shape(), workspace.get(), stream.get());
        fit(s);
        encode(s);
    }

    [[nodiscard]] host_fit host(std::int32_t head) const { return fit_by_host(heads[static_cast<std::size_t>(head)], skip(), layer, head_metric(head), shape_.power); }
    [[nodiscard]] std::vector<double> head_metric(std::int32_t head) const {
        const auto d = static_cast<std::size_t>(shape_.dk * shape_.dk);
        return {metric.begin() + static_cast<std::ptrdiff_t>(d) * head, metric.begin() + static_cast<std::ptrdiff_t>(d) * (head + 1)};
    }

    /// What the buffers hold of one head.
    [[nodiscard]] head_codec codec(std::int32_t head, const array<std::byte>& keys, const array<std::byte>& encoder) const {
        head_codec c;
        c.dk = layer.key_size, c.dv = layer.value_size;
        const auto k = part(keys, layer.key_buffer, head), e = part(epoch_buffer, layer.epoch_buffer, head), b = part(encoder, layer.encoder_buffer, head);
        c.a = halves(k, layer.key.a, c.dk * c.dk);
        c.encoder = read<float>(b, 0, c.dk * c.dk);
        c.keys.bits = read<std::uint8_t>(k, layer.key.bits, c.dk), c.keys.step = read<float>(k, layer.key.step, c.dk), c.keys.error = read<float>(k, layer.key.error, c.dk);
        c.keys.fields = read<host::sketch_field>(k, layer.key.fields, read<std::int32_t>(k, layer.key.field_count, 1)[0]);
        const auto& p = layer.epoch;
        c.key_mean = read<float>(e, p.key_mean, c.dk), c.value_mean = read<float>(e, p.value_mean, c.dv), c.basis = halves(e, p.value_basis, c.dv * c.dv), c.typical = read<float>(e, p.typical_scale, 1)[0];
        c.values.bits = read<std::uint8_t>(e, p.bits, c.dv), c.values.step = read<float>(e, p.step, c.dv);
        c.values.fields = read<host::sketch_field>(e, p.fields, read<std::int32_t>(e, p.field_count, 1)[0]);
        c.key_lines = {read<std::uint8_t>(e, p.key_widths, c.dk / 8), read<float>(e, p.key_step, c.dk)};
        c.value_lines = {read<std::uint8_t>(e, p.value_widths, c.dv / 8), read<float>(e, p.value_step, c.dv)};
        return c;
    }
    [[nodiscard]] head_codec codec(std::int32_t head) const { return codec(head, key_buffer, encoder_buffer); }

    /// Rows of one block of one head.
    [[nodiscard]] head_rows block(std::int32_t head, std::int32_t b) const {
        std::int64_t first = 0;
        for (std::int32_t i = 0; i < b; ++i) first += shape_.counts[static_cast<std::size_t>(i)];
        const auto n = shape_.counts[static_cast<std::size_t>(b)];
        const auto& r = heads[static_cast<std::size_t>(head)];
        const auto cut = [&](const floats& rows, std::int32_t size) { return floats(rows.begin() + first * size, rows.begin() + (first + n) * size); };
        return {cut(r.keys, layer.key_size), cut(r.values, layer.value_size), n};
    }
    [[nodiscard]] std::vector<std::uint8_t> planes(std::int32_t head, std::int32_t b) const {
        const auto page = sketch_pages[static_cast<std::size_t>(b)].read();
        const auto at = page.begin() + static_cast<std::ptrdiff_t>(layer.sketch_page.first + static_cast<std::uint64_t>(head) * layer.sketch_page.stride);
        return {at, at + (layer.key_planes + layer.value_planes) * plane_bytes};
    }
    [[nodiscard]] std::vector<std::uint8_t> block_lines(std::int32_t head, std::int32_t b) const {
        const auto page = line_pages[static_cast<std::size_t>(b)].read();
        const auto at = page.begin() + static_cast<std::ptrdiff_t>(layer.line_page.first + static_cast<std::uint64_t>(head) * layer.line_page.stride);
        return {at, at + block_tokens * layer.line_stride};
    }
    [[nodiscard]] const basis_layout& bases() const { return bases_; }
    static std::byte* bytes(const array<std::byte>& a) { return a.get(); }

private:
    static model_shape make_model(const shape& s) {
        model_shape m;
        layer_shape first, second;
        first.kv_heads = 1, first.key_size = 64, first.value_size = 80;
        second.kv_heads = s.kv_heads, second.group = 2, second.key_size = s.dk, second.value_size = s.dv;
        m.layers = {first, second};
        return m;
    }
    static progressive_options make_options(const shape& s) {
        progressive_options o;
        o.exact_tier = s.exact_tier;
        return o;
    }
    [[nodiscard]] std::size_t page_bytes() const { return layer.exact_page.first + static_cast<std::size_t>(shape_.kv_heads) * layer.exact_page.stride; }

    head_rows make_rows() {
        head_rows r;
        for (const auto c : shape_.counts) r.count += c;
        using data = shape::data;
        const auto rank_one = [&](std::int32_t size) {
            const auto direction = random_.normals(size);
            floats rows;
            for (std::int64_t i = 0; i < r.count; ++i) {
                const float x = random_.normal();
                for (const auto y : direction) rows.push_back(x * y);
            }
            return rows;
        };
        r.keys = shape_.rows == data::rank_one ? rank_one(shape_.dk) : oracle::falling_rows(random_, r.count, shape_.dk, 0.93);
        r.values = shape_.rows == data::rank_one ? rank_one(shape_.dv) : oracle::falling_rows(random_, r.count, shape_.dv, 0.95);
        for (std::size_t i = 0; i < r.keys.size(); ++i) {
            if (shape_.rows == data::constant_keys) r.keys[i] = 0.5F;
            if (shape_.rows == data::falling) r.keys[i] += static_cast<float>(i % static_cast<std::size_t>(shape_.dk)) * 0.03F;  // a mean
            if (i < static_cast<std::size_t>(shape_.skip * shape_.dk) && shape_.rows == data::falling) r.keys[i] *= 20;  // sinks are unlike the rest
            r.keys[i] = rows_tests::value_of(shape_.stored, rows_tests::bits_of(shape_.stored, r.keys[i]));
        }
        std::vector<float> loudness;
        for (std::int64_t i = 0; i < r.count; ++i) loudness.push_back(std::exp2(random_.normal(0.7F)));
        for (std::size_t i = 0; i < r.values.size(); ++i) {
            r.values[i] *= loudness[i / static_cast<std::size_t>(shape_.dv)];
            if (shape_.rows == data::zero_values) r.values[i] = 0;
            r.values[i] = rows_tests::value_of(shape_.stored, rows_tests::bits_of(shape_.stored, r.values[i]));
        }
        return r;
    }
    std::vector<double> make_metric() {
        const auto queries = oracle::falling_rows(random_, 400, shape_.dk, 0.95);
        floats moment(static_cast<std::size_t>(shape_.dk * shape_.dk), 0.0F);
        sekv::add_queries({moment.data(), shape_.dk}, queries.data(), shape_.dk, 400, 1, 0.999);
        return blend_metric(moment.data(), 330, nullptr, shape_.dk, 0.01);
    }
    void fill_pages() {
        std::int64_t first = 0;
        for (std::size_t b = 0; b < shape_.counts.size(); ++b) {
            std::vector<std::uint16_t> page(page_bytes() / 2, 0x7fff);  // NaN behind the last token
            for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
                const auto& r = heads[static_cast<std::size_t>(h)];
                for (std::int32_t t = 0; t < shape_.counts[b]; ++t) {
                    for (std::int32_t j = 0; j < shape_.dk; ++j) page[rows_tests::key_index(layer.exact_page, h, j, t)] = rows_tests::bits_of(shape_.stored, r.keys[static_cast<std::size_t>((first + t) * shape_.dk + j)]);
                    for (std::int32_t i = 0; i < shape_.dv; ++i) page[rows_tests::value_index(layer.exact_page, layer, h, t, i)] = rows_tests::bits_of(shape_.stored, r.values[static_cast<std::size_t>((first + t) * shape_.dv + i)]);
                }
            }
            EXPECT_EQ(cudaMemcpy(pages.pages[b].get(), page.data(), page.size() * 2, cudaMemcpyDefault), cudaSuccess);
            first += shape_.counts[b];
        }
    }

    static std::vector<std::byte> part(const array<std::byte>& buffer, const head_stride& at, std::int32_t head) {
        const auto all = buffer.read();
        return {all.begin() + static_cast<std::ptrdiff_t>(at.first + static_cast<std::uint64_t>(head) * at.stride), all.end()};
    }
    template <class T>
    static std::vector<T> read(const std::vector<std::byte>& from, std::size_t offset, std::int32_t count) {
        std::vector<T> out(static_cast<std::size_t>(count));
        if (count > 0) std::memcpy(out.data(), from.data() + offset, out.size() * sizeof(T));
        return out;
    }
    static floats halves(const std::vector<std::byte>& from, std::size_t offset, std::int32_t count) {
        floats out;
        for (const auto x : read<fp16>(from, offset, count)) out.push_back(static_cast<float>(x));
        return out;
    }

    shape shape_;
    oracle::draws random_;
    model_shape model_;
    progressive_options options_;
    basis_layout bases_;

public:
    layer_layout layer;
    rows_tests::block_list pages;
    array<std::byte> key_buffer, epoch_buffer, encoder_buffer;
    std::vector<head_rows> heads;
    std::vector<double> metric;
    std::vector<array<std::uint8_t>> sketch_pages, line_pages, exact_pages;
    std::vector<std::uint8_t*> sketches, lines, exact;
};

}  // namespace sekv::cuda::seal_tests
