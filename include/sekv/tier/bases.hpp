// The basis store: what it takes to decode (device) and to encode (host) the codes of a position range.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sekv/codec/format.hpp"
#include "sekv/codec/sketch.hpp"
#include "sekv/core/scalar.hpp"
#include "sekv/exec/memory.hpp"

namespace sekv {

/// Lays typed arrays one after the other in a byte range, 64-byte aligned.
class array_layout {
public:
    template <class T>
    std::size_t add(std::int64_t count) {
        const auto at = bytes_;
        bytes_ = (bytes_ + static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return at;
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

private:
    std::size_t bytes_ = 0;
};

/// One head's quantiser of a sketch, as it lies in a device buffer.
struct sketch_view {
    const float* step = nullptr;
    const std::uint8_t* bits = nullptr;
    std::span<const host::sketch_field> fields;
};

/// One head's key basis with the R1 quantiser: k ~ mean + A c.
struct key_view {
    const fp16* a = nullptr;         ///< [size, size] row-major
    const float* error = nullptr;    ///< [size] R1's mean squared code error by component
    sketch_view sketch;
    const float* encoder = nullptr;  ///< host: B, [size, size] row-major
};

/// One head's value basis, both its quantisers, and the key's R2 quantiser.
struct value_view {
    const fp16* basis = nullptr;  ///< U transposed: [size, size], row j is component j
    const float* mean = nullptr;
    float typical_scale = 1;
    sketch_view sketch;
};
struct line_view {
    const std::uint8_t* key_widths = nullptr;
    const float* key_step = nullptr;
    const std::uint8_t* value_widths = nullptr;
    const float* value_step = nullptr;
};

/// Byte offsets inside the buffers below, by (layer, head); the same for every epoch of a cache.
class basis_layout {
public:
    basis_layout(const model_shape& model, const progressive_options& options);
    /// Index of (layer, head) among the layers that are sealed; -1 for a layer that isn't (sliding window, or shared).
    [[nodiscard]] std::int32_t head_index(std::int32_t layer, std::int32_t head) const noexcept {
        const auto first = first_head_[static_cast<std::size_t>(layer)];
        return first < 0 ? -1 : first + head;
    }
    [[nodiscard]] std::int32_t heads() const noexcept { return static_cast<std::int32_t>(places_.size()); }
    [[nodiscard]] const head_format& format(std::int32_t index) const noexcept { return places_[static_cast<std::size_t>(index)].format; }
    [[nodiscard]] std::size_t sketch_offset(std::int32_t index) const noexcept { return places_[static_cast<std::size_t>(index)].sketch; }
    [[nodiscard]] std::size_t line_offset(std::int32_t index) const noexcept { return places_[static_cast<std::size_t>(index)].lines; }
    [[nodiscard]] std::size_t moment_offset(std::int32_t index) const noexcept { return places_[static_cast<std::size_t>(index)].moment; }
    [[nodiscard]] std::size_t sketch_block_bytes() const noexcept { return sketch_bytes_; }
    [[nodiscard]] std::size_t line_block_bytes() const noexcept { return line_bytes_; }
    [[nodiscard]] std::size_t key_device_bytes() const noexcept { return key_device_.bytes(); }
    [[nodiscard]] std::size_t key_host_bytes() const noexcept { return key_host_.bytes(); }
    [[nodiscard]] std::size_t epoch_bytes() const noexcept { return epoch_.bytes(); }
    [[nodiscard]] std::size_t moment_bytes() const noexcept { return moment_bytes_; }


    struct sketch_place {
        std::size_t step, bits, fields, field_count;
    };
    struct place {
        head_format format;
        std::size_t sketch, lines, moment;              ///< in a sketch page, a line page, a page of moments
        std::size_t a, error;                           ///< in key_bases::device
        sketch_place key_sketch;
        std::size_t encoder;                            ///< in key_bases::host
        std::size_t key_mean, value_basis, value_mean, typical_scale;  ///< in epoch::device
        sketch_place value_sketch;
        std::size_t key_widths, key_step, value_widths, value_step;
    };
    /// Heads of one layer lie at equal distances.
    [[nodiscard]] const place& place_of(std::int32_t index) const noexcept { return places_[static_cast<std::size_t>(index)]; }

private:
    friend class key_bases;
    friend class epoch;
    std::vector<std::int32_t> first_head_;
    std::vector<place> places_;
    std::size_t sketch_bytes_ = 0, line_bytes_ = 0, moment_bytes_ = 0;
    array_layout key_device_, key_host_, epoch_;
};

/// Key bases and R1 key quantisers of all heads for one epoch and one sketch generation.
class key_bases {
public:
    key_bases(const basis_layout& layout, memory& mem) : layout_(&layout), device_(mem.allocate(tier::device, kind::basis, layout.key_device_bytes())), host_(mem.allocate(tier::host, kind::basis, layout.key_host_bytes())) {}
    [[nodiscard]] key_view view(std::int32_t index) const noexcept;
    /// Fills one head; heads may be filled by several threads at once. a, b: [size, size]. Host memory only.
    void set(std::int32_t index, std::span<const float> a, std::span<const float> b, const sketch_code& code) noexcept;
    [[nodiscard]] std::byte* device() const noexcept { return device_.data(); }
    [[nodiscard]] std::byte* host() const noexcept { return host_.data(); }

private:
    const basis_layout* layout_;
    buffer device_, host_;
};

/// Statistics of one position range: means, value bases, and R2's quantisers, beside the key bases that R2 was made in.
class epoch {
public:
    epoch(const basis_layout& layout, memory& mem) : keys(std::make_shared<key_bases>(layout, mem)), layout_(&layout), device_(mem.allocate(tier::device, kind::basis, layout.epoch_bytes())) {}
    [[nodiscard]] const float* key_mean(std::int32_t index) const noexcept;
    [[nodiscard]] value_view values(std::int32_t index) const noexcept;
    [[nodiscard]] line_view lines(std::int32_t index) const noexcept;

    struct head_statistics {
        std::span<const float> key_mean, value_mean, value_basis_transposed;
        float typical_scale = 1;
        const sketch_code* value_sketch = nullptr;
        std::span<const std::uint8_t> key_widths, value_widths;
        std::span<const float> key_step, value_step;
    };
    /// Fills one head; heads may be filled by several threads at once. Host memory only.
    void set(std::int32_t index, const head_statistics& s) noexcept;
    [[nodiscard]] std::byte* device() const noexcept { return device_.data(); }

    std::shared_ptr<key_bases> keys;

private:
    const basis_layout* layout_;
    buffer device_;
};

}  // namespace sekv
