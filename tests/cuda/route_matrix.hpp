// The weights of R1's fields as project writes them for tensor cores, taken apart by the layout that PTX gives for mma.m16n8k16's second factor.
#pragma once

#include "cuda/route_step.hpp"

namespace sekv::cuda::route_tests {

/// One basis of one (row, head): the fp16 of (matrix, step, row k, column).
class weight_matrices {
public:
    weight_matrices(const step& s, std::int32_t row, std::int32_t head, std::int32_t basis) : per_step_(s.ws.group < 8 ? 1 : s.ws.group / 4) {
        const auto words = static_cast<std::int64_t>((s.ws.fields + 15) / 16 * per_step_) * 64;
        const auto all = s.read(s.ws.field_matrix, row, head, s.ws.key_bases * words);
        words_.assign(all.begin() + basis * words, all.begin() + (basis + 1) * words);
    }
    [[nodiscard]] double at(std::int32_t matrix, std::int32_t step, std::int32_t k, std::int32_t column) const {
        const auto lane = column * 4 + k % 8 / 2;
        const auto word = words_.at(static_cast<std::size_t>(((step * per_step_ + matrix) * 32 + lane) * 2 + k / 8));
        fp16 x;
        x.bits = static_cast<std::uint16_t>(k % 2 == 0 ? word : word >> 16);
        return static_cast<double>(static_cast<float>(x));
    }
    [[nodiscard]] std::int32_t per_step() const { return per_step_; }

private:
    std::int32_t per_step_;
    std::vector<std::uint32_t> words_;
};

/// Where field i of a step lies along k: lane q of four reads fields q, q + 4, q + 8, q + 12, and holds rows 2 q, 2 q + 1, 2 q + 8, 2 q + 9.
inline std::int32_t row_of_field(std::int32_t i) { return i % 4 * 2 + i / 4 % 2 + i / 8 * 8; }

/// High and low part of each weight together have 22 bits of it, or what fp16 leaves of the query's largest; what lies past the fields is 0. Up to four queries: high parts in columns 0-3, repeated, low
/// ones in 4-7.
inline void check_matrices(const step& s, std::int32_t row, std::int32_t head) {
    const auto g_count = s.ws.group;
    const auto weight = s.read(s.ws.field_weight, row, head, static_cast<std::int64_t>(s.ws.key_bases) * s.ws.fields * g_count);
    const auto units = s.read(s.ws.field_unit, row, head, s.ws.key_bases * g_count);
    for (std::int32_t b = 0; b < s.sequence(row)->view.key_bases_count; ++b) {
        const weight_matrices m(s, row, head, b);
        const auto fields = s.sequence(row)->keys(b, head).sketch.fields;
        const auto count = static_cast<std::int32_t>(fields.size());
        for (std::int32_t c = 0; c < (g_count < 8 ? 4 : g_count); ++c) {
            const auto g = c % g_count, matrix = g_count < 8 ? 0 : c / 8 * 2;
            const double unit = static_cast<double>(units[static_cast<std::size_t>(b * g_count + g)]);
            int exponent = 0;
            ASSERT_EQ(std::frexp(unit, &exponent), 0.5) << "a unit is a power of two";
            double most = 0;
            for (std::int32_t f = 0; f < (count + 15) / 16 * 16; ++f) {
                const auto k = row_of_field(f % 16);
                const double high = m.at(matrix, f / 16, k, c % 8), low = g_count < 8 ? m.at(0, f / 16, k, c + 4) : m.at(matrix + 1, f / 16, k, c % 8);
                if (f >= count) {
                    ASSERT_TRUE(high == 0 && low == 0) << "field " << f;
                    continue;
                }
                const double expected = static_cast<double>(weight[static_cast<std::size_t>((b * s.ws.fields + f) * g_count + g)]) / (1 << fields[static_cast<std::size_t>(f)].shift);
                ASSERT_NEAR((high + low) * unit, expected, std::ldexp(std::abs(expected), -22) + std::ldexp(unit, -25)) << "field " << f << " query " << g;
                ASSERT_LE(std::abs(low), std::ldexp(std::abs(high), -11) + std::ldexp(1.0, -24));
                most = std::max(most, std::abs(high));
            }
            ASSERT_TRUE(most == 0 || (most >= 1 << 14 && most <= 1 << 15)) << most;
        }
    }
}

}  // namespace sekv::cuda::route_tests
