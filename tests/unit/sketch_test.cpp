#include "sekv/codec/sketch.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>

#include "oracle/random.hpp"
#include "sekv/codec/quantizer.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240804;

std::vector<std::uint8_t> random_bits(oracle::draws& random, std::int32_t size) {
    static constexpr std::array<std::uint8_t, 5> choices{0, 1, 2, 4, 8};
    std::vector<std::uint8_t> bits(static_cast<std::size_t>(size));
    for (auto& b : bits) b = choices[random.below(choices.size())];
    return bits;
}

int planes_of(const std::vector<std::uint8_t>& bits) {
    int sum = 0;
    for (const auto b : bits) sum += b;
    return (sum + 3) / 4;
}

TEST(Sketch, FieldsNeverStraddleNorOverlap) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    for (std::int64_t i = 0; i < oracle::iterations(500); ++i) {
        const auto bits = random_bits(random, 1 + random.below(100));
        const auto fields = lay_fields(bits);
        std::vector<int> taken(static_cast<std::size_t>(planes_of(bits)), 0);
        std::vector<int> held(bits.size(), 0);
        for (const auto& f : fields) {
            const int width = std::popcount(f.mask);
            ASSERT_LE(f.shift + width, 4);
            ASSERT_LT(f.plane, taken.size());
            const int place = f.mask << f.shift;
            ASSERT_EQ(taken[f.plane] & place, 0) << "two fields share a bit of plane " << int{f.plane};
            taken[f.plane] |= place;
            held[f.component] += width;
        }
        for (std::size_t j = 0; j < bits.size(); ++j) ASSERT_EQ(held[j], bits[j]);
    }
}

TEST(Sketch, EveryComponentUpTo256HasItsPlace) {
    const std::vector<std::uint8_t> bits(256, 2);
    const auto fields = lay_fields(bits);
    ASSERT_EQ(fields.size(), 256U);
    EXPECT_EQ(fields.back().component, 255);
    EXPECT_EQ(fields.back().plane, 127);
}

void expect_round_trip(oracle::draws& random, std::int32_t size, std::int64_t count) {
    const auto bits = random_bits(random, size);
    const auto fields = lay_fields(bits);
    const auto codes = random.normals(count * size, 2.0F);
    std::vector<float> step(bits.size(), 0.0F);
    for (std::size_t j = 0; j < bits.size(); ++j) step[j] = bits[j] > 0 ? 4.0F / static_cast<float>(1 << bits[j]) * static_cast<float>(0.5 + random.uniform()) : 0.0F;
    std::vector<std::uint8_t> planes(static_cast<std::size_t>(planes_of(bits)) * host::plane_bytes + 1, 0);
    planes.back() = 0xa5;
    pack_sketch(codes.data(), count, size, fields, bits.data(), step.data(), planes.data());
    EXPECT_EQ(planes.back(), 0xa5);
    for (std::size_t p = 0; p + 1 < planes.size(); ++p) {
        const auto token = static_cast<std::int64_t>(p % 32);
        const int mine = (token < count ? 0x0f : 0) | (token + 32 < count ? 0xf0 : 0);
        ASSERT_EQ(planes[p] & ~mine, 0) << "a token past the count was written";
    }
    std::vector<float> out(codes.size() + 1, -7.0F);
    unpack_sketch(planes.data(), count, size, fields, bits.data(), step.data(), out.data());
    EXPECT_EQ(out.back(), -7.0F);
    for (std::size_t i = 0; i < codes.size(); ++i) {
        const auto j = i % bits.size();
        const double expected = bits[j] == 0 ? 0.0 : (quantize(codes[i], 1.0F / step[j], bits[j]) + lowest_level(bits[j])) * static_cast<double>(step[j]);
        ASSERT_NEAR(out[i], expected, 1e-6 * 256 * step[j]) << "token " << i / bits.size() << " component " << j << " bits " << int{bits[j]};
    }
}

TEST(Sketch, PackedCodesDecodeAsTheQuantizer) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 1);
    for (std::int64_t count = 1; count <= 64; ++count) expect_round_trip(random, 64, count);
    for (const std::int32_t size : {1, 80, 96, 128, 256}) expect_round_trip(random, size, 64);
}

TEST(Sketch, FitMeasuresItsErrors) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed + 2);
    const std::int64_t count = 1500;
    const std::int32_t size = 64;
    std::vector<float> codes(static_cast<std::size_t>(count * size));
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = random.normal(std::pow(0.9F, static_cast<float>(i % 64)));
    std::vector<double> variance(64, 0.0);
    for (std::size_t i = 0; i < codes.size(); ++i) variance[i % 64] += static_cast<double>(codes[i]) * codes[i] / static_cast<double>(count);
    for (const std::int32_t budget : {0, 4, 32, 80, 256, 512}) {
        const auto code = fit_sketch(codes.data(), count, size, variance, budget);
        int spent = 0;
        for (const auto b : code.bits) spent += b;
        EXPECT_LE(spent, budget);
        std::vector<double> error(64, 0.0);
        for (std::int64_t first = 0; first < count; first += 64) {
            const auto n = std::min<std::int64_t>(64, count - first);
            std::vector<std::uint8_t> planes(static_cast<std::size_t>(budget / 4) * host::plane_bytes + 1, 0);
            std::vector<float> out(static_cast<std::size_t>(n * size));
            pack_sketch(codes.data() + first * size, n, size, code.fields, code.bits.data(), code.step.data(), planes.data());
            unpack_sketch(planes.data(), n, size, code.fields, code.bits.data(), code.step.data(), out.data());
            for (std::size_t i = 0; i < out.size(); ++i) error[i % 64] += std::pow(static_cast<double>(out[i]) - codes[static_cast<std::size_t>(first * size) + i], 2) / static_cast<double>(count);
        }
        for (std::size_t j = 0; j < 64; ++j) EXPECT_NEAR(code.error[j], error[j], 1e-3 * error[j]) << "component " << j << " bits " << int{code.bits[j]};
    }
}

TEST(Sketch, FitOfComponentsThatNeverMove) {
    std::vector<float> codes(100 * 64, 0.0F);
    for (std::size_t i = 0; i < codes.size(); i += 64) codes[i] = i % 128 == 0 ? 1.0F : -1.0F;
    std::vector<double> variance(64, 0.0);
    variance[0] = 1;
    variance[1] = 1e-60;  // rounding noise of a rank-deficient fit
    const auto code = fit_sketch(codes.data(), 100, 64, variance, 80);
    EXPECT_EQ(code.bits[0], 8);
    for (std::size_t j = 0; j < 64; ++j) EXPECT_TRUE(std::isfinite(code.error[j]) && (code.bits[j] == 0 || code.step[j] > 0));
    std::vector<std::uint8_t> planes(20 * host::plane_bytes, 0);
    std::vector<float> out(64 * 64);
    pack_sketch(codes.data(), 64, 64, code.fields, code.bits.data(), code.step.data(), planes.data());
    unpack_sketch(planes.data(), 64, 64, code.fields, code.bits.data(), code.step.data(), out.data());
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], codes[i], 0.02);
}

}  // namespace
}  // namespace sekv
