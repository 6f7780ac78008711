#include "src/cuda/seal_space.hpp"

#include <algorithm>
#include <string>

#include "sekv/core/error.hpp"

namespace sekv::cuda {
namespace {

constexpr std::size_t blas_bytes = std::size_t{4} << 20;

class cutter {
public:
    explicit cutter(std::byte* base) : base_(base) {}
    template <class T>
    T* take(std::size_t count) {
        const auto at = used_;
        used_ = (used_ + count * sizeof(T) + 255) / 256 * 256;
        return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
    }
    [[nodiscard]] std::size_t used() const noexcept { return used_; }

private:
    std::byte* base_;
    std::size_t used_ = 0;
};

// The most over head sizes: a smaller one may need more.
std::size_t eigen_bytes(const seal_shape& shape) {
    const owned_eigen eigen;
    std::size_t most = 0;
    for (const std::int32_t size : {64, 80, 96, 128, 256}) {
        if (size <= shape.most_size) most = std::max(most, eigen.scratch_bytes(size, shape.most_heads).first);
    }
    return most;
}

}  // namespace

seal_space cut_seal_space(const seal_shape& shape, std::byte* base) {
    if (shape.most_heads < 1 || shape.most_size < 64 || shape.most_size > 256)
        throw invalid_argument("A seal needs at least one KV head and a head size of 64 to 256, not " + std::to_string(shape.most_heads) + " heads of size " + std::to_string(shape.most_size) + ".");
    if (shape.chunk < block_tokens || shape.chunk % block_tokens != 0) throw invalid_argument("seal_shape::chunk must be a positive multiple of 64, not " + std::to_string(shape.chunk) + ".");
    const auto heads = static_cast<std::size_t>(shape.most_heads), size = static_cast<std::size_t>(shape.most_size), chunk = static_cast<std::size_t>(shape.chunk);
    const auto rows = heads * chunk * size, matrix = heads * size * size, vector = heads * size;
    cutter c(base);
    seal_space s{};
    s.keys = c.take<float>(rows), s.values = c.take<float>(rows);
    s.key_codes = c.take<float>(rows), s.value_codes = c.take<float>(rows);  // rows * 4 is a multiple of 256: no gap
    s.wide = reinterpret_cast<double*>(s.key_codes);
    s.bytes = c.take<std::uint8_t>(heads * chunk), s.inverse = c.take<float>(heads * chunk);
    for (auto& m : s.matrices) m = c.take<double>(matrix);
    s.encoder = c.take<float>(matrix), s.sketch_encoder = c.take<float>(matrix), s.basis = c.take<float>(matrix);
    for (auto* v : {&s.key_sums, &s.value_sums, &s.scale_squares, &s.metric_values, &s.key_values, &s.value_values, &s.key_squares, &s.value_squares}) *v = c.take<double>(vector);
    for (auto& v : s.variances) v = c.take<double>(vector);
    s.key_errors = c.take<double>(vector * 8), s.value_errors = c.take<double>(vector * 8);
    s.typical_inverse = c.take<float>(heads);
    s.allotments = c.take<allotment>(heads);
    s.targets = c.take<seal_target>(chunk / block_tokens);
    s.levels = c.take<float>(level_table);
    s.scratch.blas_bytes = blas_bytes, s.scratch.blas = c.take<std::byte>(blas_bytes);
    s.scratch.eigen_bytes = eigen_bytes(shape), s.scratch.eigen = c.take<std::byte>(s.scratch.eigen_bytes);
    s.scratch.info = c.take<int>(heads);
    s.size = c.used();
    return s;
}

std::size_t seal_workspace_bytes(const seal_shape& shape) { return cut_seal_space(shape, nullptr).size; }

}  // namespace sekv::cuda
