#include "sekv/tier/bases.hpp"

#include <algorithm>

namespace sekv {
namespace {

template <class T>
void copy_to(const buffer& b, std::size_t offset, std::span<const T> from) noexcept {
    std::copy(from.begin(), from.end(), b.as<T>(offset));
}

void copy_halves(const buffer& b, std::size_t offset, std::span<const float> from) noexcept {
    std::transform(from.begin(), from.end(), b.as<fp16>(offset), [](float x) { return fp16(x); });
}

}  // namespace

basis_layout::basis_layout(const model_shape& model, const progressive_options& options) {
    const auto add_sketch = [](array_layout& l, std::int32_t size, std::int32_t bits) {
        return sketch_place{l.add<float>(size), l.add<std::uint8_t>(size), l.add<host::sketch_field>(bits), l.add<std::int32_t>(1)};
    };
    for (const auto& l : model.layers) {
        const bool sealed = l.kv_source < 0 && !l.windowed();
        first_head_.push_back(sealed ? heads() : -1);
        if (!sealed) continue;
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
            place p{};
            p.format = make_head_format(l, options);
            const std::int64_t dk = l.key_size, dv = l.value_size;
            p.sketch = sketch_bytes_;
            p.lines = line_bytes_;
            p.moment = moment_bytes_;
            sketch_bytes_ += static_cast<std::size_t>(p.format.sketch_bytes());
            line_bytes_ += static_cast<std::size_t>(p.format.line_block_bytes());
            moment_bytes_ += static_cast<std::size_t>(dk * dk) * sizeof(float);
            p.a = key_device_.add<fp16>(dk * dk);
            p.error = key_device_.add<float>(dk);
            p.key_sketch = add_sketch(key_device_, l.key_size, p.format.key_bits);
            p.encoder = key_host_.add<float>(dk * dk);
            p.key_mean = epoch_.add<float>(dk);
            p.value_basis = epoch_.add<fp16>(dv * dv);
            p.value_mean = epoch_.add<float>(dv);
            p.typical_scale = epoch_.add<float>(1);
            p.value_sketch = add_sketch(epoch_, l.value_size, p.format.value_bits);
            p.key_widths = epoch_.add<std::uint8_t>(dk / 8);
            p.key_step = epoch_.add<float>(dk);
            p.value_widths = epoch_.add<std::uint8_t>(dv / 8);
            p.value_step = epoch_.add<float>(dv);
            places_.push_back(p);
        }
    }
}

key_view key_bases::view(std::int32_t index) const noexcept {
    const auto& p = layout_->places_[static_cast<std::size_t>(index)];
    const auto count = static_cast<std::size_t>(*device_.as<std::int32_t>(p.key_sketch.field_count));
    return {device_.as<fp16>(p.a), device_.as<float>(p.error), {device_.as<float>(p.key_sketch.step), device_.as<std::uint8_t>(p.key_sketch.bits), {device_.as<host::sketch_field>(p.key_sketch.fields), count}},
            host_.as<float>(p.encoder)};
}

void key_bases::set(std::int32_t index, std::span<const float> a, std::span<const float> b, const sketch_code& code) noexcept {
    const auto& p = layout_->places_[static_cast<std::size_t>(index)];
    copy_halves(device_, p.a, a);
    copy_to<float>(device_, p.error, code.error);
    copy_to<float>(device_, p.key_sketch.step, code.step);
    copy_to<std::uint8_t>(device_, p.key_sketch.bits, code.bits);
    copy_to<host::sketch_field>(device_, p.key_sketch.fields, code.fields);
    *device_.as<std::int32_t>(p.key_sketch.field_count) = static_cast<std::int32_t>(code.fields.size());
    copy_to<float>(host_, p.encoder, b);
}

const float* epoch::key_mean(std::int32_t index) const noexcept { return device_.as<float>(layout_->places_[static_cast<std::size_t>(index)].key_mean); }

value_view epoch::values(std::int32_t index) const noexcept {
    const auto& p = layout_->places_[static_cast<std::size_t>(index)];
    const auto count = static_cast<std::size_t>(*device_.as<std::int32_t>(p.value_sketch.field_count));
    return {device_.as<fp16>(p.value_basis), device_.as<float>(p.value_mean), *device_.as<float>(p.typical_scale),
            {device_.as<float>(p.value_sketch.step), device_.as<std::uint8_t>(p.value_sketch.bits), {device_.as<host::sketch_field>(p.value_sketch.fields), count}}};
}

line_view epoch::lines(std::int32_t index) const noexcept {
    const auto& p = layout_->places_[static_cast<std::size_t>(index)];
    return {device_.as<std::uint8_t>(p.key_widths), device_.as<float>(p.key_step), device_.as<std::uint8_t>(p.value_widths), device_.as<float>(p.value_step)};
}

void epoch::set(std::int32_t index, const head_statistics& s) noexcept {
    const auto& p = layout_->places_[static_cast<std::size_t>(index)];
    copy_to(device_, p.key_mean, s.key_mean);
    copy_to(device_, p.value_mean, s.value_mean);
    copy_halves(device_, p.value_basis, s.value_basis_transposed);
    *device_.as<float>(p.typical_scale) = s.typical_scale;
    copy_to<float>(device_, p.value_sketch.step, s.value_sketch->step);
    copy_to<std::uint8_t>(device_, p.value_sketch.bits, s.value_sketch->bits);
    copy_to<host::sketch_field>(device_, p.value_sketch.fields, s.value_sketch->fields);
    *device_.as<std::int32_t>(p.value_sketch.field_count) = static_cast<std::int32_t>(s.value_sketch->fields.size());
    copy_to(device_, p.key_widths, s.key_widths);
    copy_to(device_, p.value_widths, s.value_widths);
    copy_to(device_, p.key_step, s.key_step);
    copy_to(device_, p.value_step, s.value_step);
}

}  // namespace sekv
