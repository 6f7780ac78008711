#include "sekv/core/tensor_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include "sekv/core/scalar.hpp"

namespace sekv {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian; a big-endian target needs swaps here");

namespace {

using nlohmann::json;

constexpr std::array<std::pair<tensor_type, const char*>, 4> type_names{
    {{tensor_type::f32, "F32"}, {tensor_type::f16, "F16"}, {tensor_type::bf16, "BF16"}, {tensor_type::f64, "F64"}}};

constexpr const char* metadata_key = "__metadata__";
constexpr std::size_t length_bytes = 8;

std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text = "[";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    return text + "]";
}

// Bytes of a dense tensor; nothing where the shape is negative, too deep or overflows.
std::optional<std::uint64_t> dense_bytes(tensor_type type, const std::vector<std::int64_t>& shape) {
    if (shape.size() > tensor_file::max_dimensions) return std::nullopt;
    std::uint64_t product = size_of(type);
    for (const std::int64_t n : shape) {
        if (n < 0) return std::nullopt;
        const auto factor = static_cast<std::uint64_t>(n);
        if (factor != 0 && product > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) / factor) return std::nullopt;
        product *= factor;
    }
    return product;
}

// Of a JSON object with a key twice nlohmann keeps the last; two readings of one file are no reading.
json parse_header(const char* text, std::size_t size, const std::string& origin) {
    std::vector<std::set<std::string>> open;
    const auto check = [&](int, json::parse_event_t event, json& value) {
        if (event == json::parse_event_t::object_start) open.emplace_back();
        if (event == json::parse_event_t::object_end) open.pop_back();
        if (event == json::parse_event_t::key && !open.back().insert(value.get<std::string>()).second)
            throw format_error(origin + " names \"" + value.get<std::string>() + "\" twice in its header; it is damaged.");
        return true;
    };
    try {
        json header = json::parse(text, text + size, check);
        if (header.is_object()) return header;
    } catch (const json::exception& e) {
        throw format_error(origin + " has a header that is not JSON (" + e.what() + ").");
    }
    throw format_error(origin + " has a header that is not a JSON object.");
}

struct entry {
    std::string name;
    tensor_type type = tensor_type::f32;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

std::uint64_t whole_number(const json& value, const std::string& at) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        throw format_error(at + " has a shape or offset that is not a whole number below 2^63.");
    return value.get<std::uint64_t>();
}

entry read_entry(const std::string& name, const json& value, const std::string& origin) {
    const std::string at = origin + ": tensor \"" + name + "\"";
    if (name.empty()) throw format_error(origin + " holds a tensor without a name.");
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets"))
        throw format_error(at + " must have exactly dtype, shape and data_offsets.");
    const json& type = value["dtype"];
    const auto known =
        std::find_if(type_names.begin(), type_names.end(), [&](const auto& t) { return type.is_string() && type.get_ref<const std::string&>() == t.second; });
    if (known == type_names.end()) throw format_error(at + " has a dtype other than F32, F16, BF16 and F64.");
    entry e{name, known->first, {}, 0, 0};
    if (!value["shape"].is_array()) throw format_error(at + " has a shape that is not a list.");
    for (const auto& n : value["shape"]) e.shape.push_back(static_cast<std::int64_t>(whole_number(n, at)));
    const json& range = value["data_offsets"];
    if (!range.is_array() || range.size() != 2) throw format_error(at + " must have two data_offsets.");
    e.begin = whole_number(range[0], at);
    e.end = whole_number(range[1], at);
    const auto bytes = dense_bytes(e.type, e.shape);
    if (!bytes) throw format_error(at + " has a shape of more than 8 dimensions or 2^63 bytes.");
    if (e.end < e.begin || e.end - e.begin != *bytes)
        throw format_error(at + " of shape " + shape_text(e.shape) + " needs " + std::to_string(*bytes) + " bytes; its data_offsets are " +
                           std::to_string(e.begin) + " and " + std::to_string(e.end) + ".");
    return e;
}

void check_coverage(std::vector<entry>& entries, std::uint64_t total, const std::string& origin) {
    std::sort(entries.begin(), entries.end(), [](const entry& a, const entry& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    std::uint64_t at = 0;
    for (const auto& e : entries) {
        if (e.begin != at || e.end > total)
            throw format_error(origin + ": tensor \"" + e.name + "\" lies at [" + std::to_string(e.begin) + ", " + std::to_string(e.end) + ") of " +
                               std::to_string(total) + " data bytes, where " + std::to_string(at) +
                               " must be its begin; tensors must neither overlap, leave gaps nor pass the file's end.");
        at = e.end;
    }
    if (at != total) throw format_error(origin + " has " + std::to_string(total) + " data bytes, of which its tensors take " + std::to_string(at) + ".");
}

template <class Stored, class Out>
void convert(const std::vector<std::byte>& bytes, std::vector<Out>& out) {
    for (std::size_t i = 0; i < out.size(); ++i) {
        Stored x;
        std::memcpy(&x, bytes.data() + i * sizeof(Stored), sizeof(Stored));
        if constexpr (std::is_same_v<Stored, double>) {
            out[i] = static_cast<Out>(x);
        } else {
            out[i] = static_cast<Out>(static_cast<float>(x));
        }
    }
}

template <class Out>
std::vector<Out> elements(const tensor& t, const std::string& name, const std::vector<std::int64_t>& expected) {
    if (t.shape != expected)
        throw format_error("Tensor \"" + name + "\" has shape " + shape_text(t.shape) + ", not " + shape_text(expected) +
                           "; the file belongs to another model or format.");
    std::vector<Out> out(t.bytes.size() / size_of(t.type));
    switch (t.type) {
        case tensor_type::f32:
            convert<float>(t.bytes, out);
            break;
        case tensor_type::f16:
            convert<fp16>(t.bytes, out);
            break;
        case tensor_type::bf16:
            convert<bf16>(t.bytes, out);
            break;
        case tensor_type::f64:
            convert<double>(t.bytes, out);
            break;
    }
    return out;
}

template <class T>
tensor make_tensor(tensor_type type, const std::vector<std::int64_t>& shape, std::span<const T> values) {
    const auto bytes = std::as_bytes(values);
    return {type, shape, {bytes.begin(), bytes.end()}};
}

[[noreturn]] void refuse(const char* what, const std::filesystem::path& path) {
    throw io_error(std::string("Can't ") + what + " \"" + path.string() + "\": " + std::strerror(errno) + ".");
}

struct descriptor {
    int fd;
    explicit descriptor(int opened) : fd(opened) {}
    descriptor(const descriptor&) = delete;
    descriptor& operator=(const descriptor&) = delete;
    ~descriptor() {
        if (fd >= 0) ::close(fd);
    }
};

std::vector<std::byte> read_file(const std::filesystem::path& path) {
    const descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat about {};
    if (file.fd < 0 || ::fstat(file.fd, &about) != 0) refuse("open", path);
    if (!S_ISREG(about.st_mode)) throw io_error("Can't read \"" + path.string() + "\": it is not a regular file.");
    std::vector<std::byte> bytes(static_cast<std::size_t>(about.st_size));
    for (std::size_t at = 0; at < bytes.size();) {
        const auto n = ::read(file.fd, bytes.data() + at, bytes.size() - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) refuse("read", path);
        if (n == 0) throw io_error("\"" + path.string() + "\" became shorter while it was read.");
        at += static_cast<std::size_t>(n);
    }
    return bytes;
}

void write_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
    const descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (file.fd < 0) refuse("create", path);
    for (std::size_t at = 0; at < bytes.size();) {
        const auto n = ::write(file.fd, bytes.data() + at, bytes.size() - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) refuse("write", path);
        at += static_cast<std::size_t>(n);
    }
    if (::fsync(file.fd) != 0) refuse("sync", path);
}

}  // namespace

tensor_file tensor_file::load(const std::filesystem::path& path) { return parse(read_file(path), "\"" + path.string() + "\""); }

tensor_file tensor_file::parse(std::span<const std::byte> bytes, const std::string& origin) {
    std::uint64_t header_bytes = 0;
    if (bytes.size() < length_bytes) throw format_error(origin + " has " + std::to_string(bytes.size()) + " bytes; a safetensors file has 8 at least.");
    std::memcpy(&header_bytes, bytes.data(), length_bytes);
    if (header_bytes > max_header_bytes || header_bytes > bytes.size() - length_bytes)
        throw format_error(origin + " claims a header of " + std::to_string(header_bytes) +
                           " bytes, past the file's end or the limit of 100,000,000; it is cut short or no safetensors file.");
    const auto data = bytes.subspan(length_bytes + static_cast<std::size_t>(header_bytes));
    const json header = parse_header(reinterpret_cast<const char*>(bytes.data()) + length_bytes, static_cast<std::size_t>(header_bytes), origin);

    tensor_file file;
    std::vector<entry> entries;
    for (const auto& [name, value] : header.items()) {
        if (name != metadata_key) {
            entries.push_back(read_entry(name, value, origin));
            continue;
        }
        if (!value.is_object()) throw format_error(origin + " has metadata that is not an object of strings.");
        for (const auto& [key, text] : value.items()) {
            if (!text.is_string()) throw format_error(origin + ": metadata \"" + key + "\" is not a string.");
            file.metadata[key] = text.get<std::string>();
        }
    }
    check_coverage(entries, data.size(), origin);
    for (auto& e : entries) {
        const auto range = data.subspan(static_cast<std::size_t>(e.begin), static_cast<std::size_t>(e.end - e.begin));
        file.tensors_[e.name] = {e.type, std::move(e.shape), {range.begin(), range.end()}};
    }
    return file;
}

std::vector<std::byte> tensor_file::serialize() const {
    std::vector<const std::pair<const std::string, tensor>*> order;
    for (const auto& named : tensors_) order.push_back(&named);
    std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return size_of(a->second.type) > size_of(b->second.type); });
    json header = json::object();
    if (!metadata.empty()) header[metadata_key] = metadata;
    std::uint64_t at = 0;
    for (const auto* named : order) {
        const auto& [name, t] = *named;
        header[name] = {{"dtype", type_names[static_cast<std::size_t>(t.type)].second}, {"shape", t.shape}, {"data_offsets", {at, at + t.bytes.size()}}};
        at += t.bytes.size();
    }
    std::string text;
    try {
        text = header.dump();
    } catch (const json::exception& e) {
        throw invalid_argument(std::string("A tensor's name or metadata can't be written as JSON (") + e.what() + ").");
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    if (text.size() > max_header_bytes)
        throw invalid_argument("The header has " + std::to_string(text.size()) +
                               " bytes, past the limit of 100,000,000; shorten the metadata or split the file.");
    const std::uint64_t header_bytes = text.size();
    std::vector<std::byte> bytes(length_bytes + text.size());
    bytes.reserve(bytes.size() + static_cast<std::size_t>(at));
    std::memcpy(bytes.data(), &header_bytes, length_bytes);
    std::memcpy(bytes.data() + length_bytes, text.data(), text.size());
    for (const auto* named : order) bytes.insert(bytes.end(), named->second.bytes.begin(), named->second.bytes.end());
    return bytes;
}

void tensor_file::save(const std::filesystem::path& path) const {
    static std::atomic<std::uint64_t> counter{0};
    const auto bytes = serialize();
    auto temporary = path;
    temporary += ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
    try {
        write_file(temporary, bytes);
        if (::rename(temporary.c_str(), path.c_str()) != 0) refuse("replace", path);
    } catch (...) {
        ::unlink(temporary.c_str());
        throw;
    }
}

void tensor_file::add(const std::string& name, tensor value) {
    if (name.empty() || name == metadata_key) throw invalid_argument("A tensor can't be named \"" + name + "\".");
    const auto bytes = dense_bytes(value.type, value.shape);
    if (!bytes || *bytes != value.bytes.size())
        throw invalid_argument("Tensor \"" + name + "\" of shape " + shape_text(value.shape) + " can't have " + std::to_string(value.bytes.size()) + " bytes.");
    if (!tensors_.emplace(name, std::move(value)).second) throw invalid_argument("The file has a tensor \"" + name + "\" already.");
}

void tensor_file::add(const std::string& name, const std::vector<std::int64_t>& shape, std::span<const float> values) {
    add(name, make_tensor(tensor_type::f32, shape, values));
}

void tensor_file::add(const std::string& name, const std::vector<std::int64_t>& shape, std::span<const double> values) {
    add(name, make_tensor(tensor_type::f64, shape, values));
}

const tensor& tensor_file::at(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw format_error("The file has no tensor \"" + name + "\"; it is of another model or format.");
    return found->second;
}

std::vector<float> tensor_file::floats(const std::string& name, const std::vector<std::int64_t>& expected_shape) const {
    return elements<float>(at(name), name, expected_shape);
}

std::vector<double> tensor_file::doubles(const std::string& name, const std::vector<std::int64_t>& expected_shape) const {
    return elements<double>(at(name), name, expected_shape);
}

const std::string& tensor_file::metadata_at(const std::string& key) const {
    const auto found = metadata.find(key);
    if (found == metadata.end()) throw format_error("The file's metadata has no \"" + key + "\"; it was written by something else.");
    return found->second;
}

}  // namespace sekv
