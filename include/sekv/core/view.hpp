// Non-owning views of the caller's tensors. Nothing here allocates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sekv/core/scalar.hpp"

namespace sekv {

/// A strided [tokens, heads, size] tensor to read; elements of a head are contiguous. Strides count elements.
struct rows_view {
    const void* data = nullptr;
    dtype type = dtype::f32;
    std::int64_t tokens = 0;
    std::int32_t heads = 0;
    std::int32_t size = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;

    /// The first element of one head of one token.
    [[nodiscard]] const void* row(std::int64_t token, std::int64_t head) const noexcept {
        return static_cast<const std::byte*>(data) + static_cast<std::size_t>(token * token_stride + head * head_stride) * size_of(type);
    }
};

/// A contiguous [tokens, heads, size] tensor as a view.
template <scalar T>
[[nodiscard]] rows_view rows(const T* data, std::int64_t tokens, std::int32_t heads, std::int32_t size) noexcept {
    return {data, dtype_of<T>, tokens, heads, size, static_cast<std::int64_t>(heads) * size, size};
}

/// A strided [tokens, heads, size] fp32 tensor to write; elements of a head are contiguous. Strides count elements.
struct out_view {
    float* data = nullptr;
    std::int64_t tokens = 0;
    std::int32_t heads = 0;
    std::int32_t size = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;

    [[nodiscard]] float* row(std::int64_t token, std::int64_t head) const noexcept { return data + token * token_stride + head * head_stride; }
};

[[nodiscard]] inline out_view out_rows(float* data, std::int64_t tokens, std::int32_t heads, std::int32_t size) noexcept {
    return {data, tokens, heads, size, static_cast<std::int64_t>(heads) * size, size};
}

}  // namespace sekv
