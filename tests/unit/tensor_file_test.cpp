#include "sekv/core/tensor_file.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <string>

#include "sekv/core/scalar.hpp"

namespace {

using sekv::format_error;
using sekv::tensor_file;
using sekv::tensor_type;

class scratch_directory {
public:
    scratch_directory() {
        std::string pattern = (std::filesystem::temp_directory_path() / "sekv-tensor-XXXXXX").string();
        if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
        path_ = pattern;
    }
    scratch_directory(const scratch_directory&) = delete;
    scratch_directory& operator=(const scratch_directory&) = delete;
    ~scratch_directory() { std::filesystem::remove_all(path_); }
    [[nodiscard]] std::filesystem::path operator/(const char* name) const { return path_ / name; }
    [[nodiscard]] std::ptrdiff_t entries() const { return std::distance(std::filesystem::directory_iterator(path_), {}); }

private:
    std::filesystem::path path_;
};

tensor_file sample() {
    tensor_file f;
    f.metadata = {{"format", "test-1"}, {"quote", "a \"b\" \\ \n ü"}};
    f.add("weights", {2, 3}, std::vector<float>{1, -2, 3.5F, 0, 5, std::numeric_limits<float>::infinity()});
    f.add("count", {3}, std::vector<double>{1e300, 0.1, -7});
    f.add("scalar", {}, std::vector<float>{9});
    f.add("empty", {0, 4}, std::vector<float>{});
    const std::vector<sekv::fp16> half{sekv::fp16(1.5F), sekv::fp16(-0.25F)};
    const std::vector<sekv::bf16> brain{sekv::bf16(2.0F)};
    const auto bytes = [](const auto& v) {
        const auto b = std::as_bytes(std::span(v));
        return std::vector<std::byte>(b.begin(), b.end());
    };
    f.add("half", sekv::tensor{tensor_type::f16, {2, 1}, bytes(half)});
    f.add("brain", sekv::tensor{tensor_type::bf16, {1}, bytes(brain)});
    return f;
}

// A file from a header and so many data bytes.
std::vector<std::byte> file_of(const std::string& header, std::size_t data) {
    std::vector<std::byte> bytes(8 + header.size() + data);
    const std::uint64_t n = header.size();
    std::memcpy(bytes.data(), &n, 8);
    std::memcpy(bytes.data() + 8, header.data(), header.size());
    return bytes;
}

TEST(TensorFile, SurvivesAFile) {
    const scratch_directory dir;
    const auto f = sample();
    f.save(dir / "a.safetensors");
    const auto back = tensor_file::load(dir / "a.safetensors");
    EXPECT_EQ(back, f);
    EXPECT_EQ(back.serialize(), f.serialize());
    EXPECT_EQ(back.floats("half", {2, 1}), (std::vector<float>{1.5F, -0.25F}));
    EXPECT_EQ(back.floats("brain", {1}), (std::vector<float>{2.0F}));
    EXPECT_EQ(back.doubles("count", {3})[1], 0.1);
    EXPECT_EQ(back.floats("count", {3})[1], 0.1F);
    EXPECT_EQ(back.doubles("weights", {2, 3})[2], 3.5);
    EXPECT_EQ(back.floats("scalar", {}), (std::vector<float>{9}));
    EXPECT_TRUE(back.floats("empty", {0, 4}).empty());
    EXPECT_EQ(back.metadata_at("format"), "test-1");
}

TEST(TensorFile, SaveReplacesAndLeavesNothingBehind) {
    const scratch_directory dir;
    sample().save(dir / "a");
    tensor_file{}.save(dir / "a");
    EXPECT_EQ(tensor_file::load(dir / "a"), tensor_file{});
    EXPECT_EQ(dir.entries(), 1);
    std::filesystem::create_directories(dir / "d" / "inside");
    EXPECT_THROW(sample().save(dir / "d"), sekv::io_error);  // a directory can't be replaced
    EXPECT_THROW(sample().save(dir / "none" / "a"), sekv::io_error);
    EXPECT_EQ(dir.entries(), 2);
    EXPECT_THROW((void)tensor_file::load(dir / "absent"), sekv::io_error);
    EXPECT_THROW((void)tensor_file::load(dir / "d"), sekv::io_error);
}

TEST(TensorFile, DataIsAlignedToItsElements) {
    const auto f = sample();
    const auto bytes = f.serialize();
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    EXPECT_EQ(header % 8, 0U);
    double first = 0;
    std::memcpy(&first, bytes.data() + 8 + header, 8);  // the f64 tensor leads
    EXPECT_EQ(first, 1e300);
}

TEST(TensorFile, RefusesWhatItCantHold) {
    auto f = sample();
    const auto before = f;
    EXPECT_THROW(f.add("weights", {1}, std::vector<float>{1}), sekv::invalid_argument);
    EXPECT_THROW(f.add("", {1}, std::vector<float>{1}), sekv::invalid_argument);
    EXPECT_THROW(f.add("__metadata__", {1}, std::vector<float>{1}), sekv::invalid_argument);
    EXPECT_THROW(f.add("x", {2}, std::vector<float>{1}), sekv::invalid_argument);
    EXPECT_THROW(f.add("x", {-1, -1}, std::vector<float>{1}), sekv::invalid_argument);
    EXPECT_THROW(f.add("x", std::vector<std::int64_t>(9, 1), std::vector<float>{1}), sekv::invalid_argument);
    EXPECT_EQ(f, before);
    EXPECT_THROW((void)f.floats("weights", {3, 2}), format_error);
    EXPECT_THROW((void)f.floats("weights", {6}), format_error);
    EXPECT_THROW((void)f.floats("absent", {6}), format_error);
    EXPECT_THROW((void)f.metadata_at("absent"), format_error);
    f.metadata["bad"] = "\xff\xfe";
    EXPECT_THROW((void)f.serialize(), sekv::invalid_argument);
}

TEST(TensorFile, RefusesBadHeaders) {
    const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    EXPECT_EQ(tensor_file::parse(file_of(good, 8)).floats("a", {2}).size(), 2U);
    EXPECT_NO_THROW((void)tensor_file::parse(file_of("{}", 0)));
    const std::vector<std::pair<std::string, std::size_t>> bad{
        {good, 7},
        {good, 9},
        {"", 0},
        {"[]", 0},
        {"{", 0},
        {"{} x", 0},
        {"null", 0},
        {std::string(100'000, '['), 0},
        {R"({"a":)" + std::string(100'000, '['), 0},
        {R"({"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2]}})", 8},
        {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})", 9},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", 8},
        {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0},
        {R"({"a":{"dtype":"F32","shape":[4611686018427387904,2],"data_offsets":[0,0]}})", 0},
        {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0},
        {R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}})", 4},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", 16},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8},
        {R"({"__metadata__":{"a":1}})", 0},
        {R"({"__metadata__":"a"})", 0},
        {"{\"\xff\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8},
    };
    for (const auto& [header, data] : bad) EXPECT_THROW((void)tensor_file::parse(file_of(header, data)), format_error) << header.substr(0, 200);
    auto huge = file_of(good, 8);
    for (const std::uint64_t n :
         {std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max(), std::uint64_t{1} << 63, std::uint64_t{huge.size()}, std::uint64_t{100'000'001}}) {
        std::memcpy(huge.data(), &n, 8);
        EXPECT_THROW((void)tensor_file::parse(huge), format_error) << n;
    }
}

TEST(TensorFile, RefusesEveryTruncation) {
    const auto bytes = sample().serialize();
    for (std::size_t n = 0; n < bytes.size(); ++n) {
        const std::vector<std::byte> cut(bytes.begin(),
                                         bytes.begin() + static_cast<std::ptrdiff_t>(n));  // its own heap block, so that ASan sees a read past it
        EXPECT_THROW((void)tensor_file::parse(cut), format_error) << n;
    }
    auto longer = bytes;
    longer.push_back(std::byte{0});
    EXPECT_THROW((void)tensor_file::parse(longer), format_error);
}

// A mutant is refused, or is a file that can be written and read again.
void expect_sane(const std::vector<std::byte>& mutant) {
    try {
        const auto f = tensor_file::parse(mutant);
        EXPECT_EQ(tensor_file::parse(f.serialize()), f);
    } catch (const format_error&) {
    }
}

TEST(TensorFile, EveryBitFlipOfTheHeaderIsSane) {
    const auto bytes = sample().serialize();
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    for (std::size_t i = 0; i < 8 + header; ++i) {
        for (int bit = 0; bit < 8; ++bit) {
            auto mutant = bytes;
            mutant[i] ^= static_cast<std::byte>(1 << bit);
            expect_sane(mutant);
        }
    }
}

TEST(TensorFile, PropertyRandomMutationsAreSane) {
    const auto bytes = sample().serialize();
    for (std::uint64_t seed = 1; seed <= 4000; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        std::mt19937_64 random(seed);
        auto mutant = bytes;
        for (auto edits = 1 + random() % 4; edits > 0; --edits) {
            const auto at = static_cast<std::ptrdiff_t>(random() % mutant.size());
            const auto run = std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(1 + random() % 30), std::ssize(mutant) - at);
            switch (random() % 5) {
                case 0:
                    mutant[static_cast<std::size_t>(at)] = static_cast<std::byte>(random());
                    break;
                case 1:
                    mutant[static_cast<std::size_t>(at)] = static_cast<std::byte>("0123456789{}[]\",:"[random() % 17]);
                    break;
                case 2:
                    mutant.insert(mutant.begin() + at, static_cast<std::byte>(random()));
                    break;
                case 3:
                    if (std::ssize(mutant) > run) mutant.erase(mutant.begin() + at, mutant.begin() + at + run);
                    break;
                default: {
                    const std::vector<std::byte> copy(mutant.begin() + at, mutant.begin() + at + run);
                    mutant.insert(mutant.begin() + static_cast<std::ptrdiff_t>(random() % mutant.size()), copy.begin(), copy.end());
                }
            }
        }
        if (random() % 2 == 0 && mutant.size() > 8) {  // a plausible length, so that the JSON is reached
            const std::uint64_t header = random() % 2 == 0 ? mutant.size() - 8 : random() % (mutant.size() - 7);
            std::memcpy(mutant.data(), &header, 8);
        }
        expect_sane(mutant);
    }
}

}  // namespace
