// Named tensors in a safetensors file: calibrations, trained controllers, captures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "sekv/core/error.hpp"

namespace sekv {

/// Element types of a stored tensor.
enum class tensor_type : std::uint8_t { f32, f16, bf16, f64 };

[[nodiscard]] constexpr std::size_t size_of(tensor_type type) noexcept { return type == tensor_type::f64 ? 8 : type == tensor_type::f32 ? 4 : 2; }

/// A dense row-major tensor; `bytes` holds the product of `shape` times size_of(type), little-endian. An empty shape is a scalar.
struct tensor {
    tensor_type type = tensor_type::f32;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> bytes;
    friend bool operator==(const tensor&, const tensor&) = default;
};

/// A safetensors file in memory (https://github.com/huggingface/safetensors#format): an 8-byte header length, a JSON header,
/// and the tensors without gaps. Only floating types are known; a file with others is refused.
class tensor_file {
public:
    static constexpr std::uint64_t max_header_bytes = 100'000'000;  ///< as the reference implementation
    static constexpr std::size_t max_dimensions = 8;

    /// Reads and checks a whole file. Throws io_error where the system refuses, format_error where the file is damaged or
    /// holds what it shouldn't: a header length past the limit or the file, bad JSON, duplicate names, unknown types, shapes
    /// that overflow or disagree with the byte range, ranges that overlap, leave gaps or don't end with the file.
    [[nodiscard]] static tensor_file load(const std::filesystem::path& path);
    /// The same from bytes in memory; `origin` names them in messages.
    [[nodiscard]] static tensor_file parse(std::span<const std::byte> bytes, const std::string& origin = "The tensor file");

    /// The file's bytes: wide types first, then by name, so that every tensor is aligned to its element; equal contents give
    /// equal bytes. Throws invalid_argument where a name or metadata isn't UTF-8.
    [[nodiscard]] std::vector<std::byte> serialize() const;
    /// Writes to a temporary file beside `path`, syncs and renames it: `path` is the old file or the whole new one, at any
    /// time. Throws io_error, leaving no temporary file, and as serialize.
    void save(const std::filesystem::path& path) const;

    /// Adds a tensor. Throws invalid_argument for a name in use, empty or "__metadata__", or bytes that disagree with the shape.
    void add(const std::string& name, tensor value);
    void add(const std::string& name, const std::vector<std::int64_t>& shape, std::span<const float> values);   ///< stored as f32
    void add(const std::string& name, const std::vector<std::int64_t>& shape, std::span<const double> values);  ///< stored as f64

    [[nodiscard]] bool contains(const std::string& name) const { return tensors_.contains(name); }
    [[nodiscard]] const std::map<std::string, tensor>& tensors() const noexcept { return tensors_; }
    /// Throws format_error naming what is missing.
    [[nodiscard]] const tensor& at(const std::string& name) const;
    /// A tensor's elements, converted from whatever type is stored (f64 rounds to float). Throws format_error where it is
    /// missing or of another shape.
    [[nodiscard]] std::vector<float> floats(const std::string& name, const std::vector<std::int64_t>& expected_shape) const;
    [[nodiscard]] std::vector<double> doubles(const std::string& name, const std::vector<std::int64_t>& expected_shape) const;

    /// Free strings; the header's "__metadata__".
    std::map<std::string, std::string> metadata;
    /// A metadata entry. Throws format_error naming what is missing.
    [[nodiscard]] const std::string& metadata_at(const std::string& key) const;

    friend bool operator==(const tensor_file&, const tensor_file&) = default;

private:
    std::map<std::string, tensor> tensors_;
};

}  // namespace sekv
