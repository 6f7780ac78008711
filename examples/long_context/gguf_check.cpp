#include "gguf_check.hpp"

#include <gguf.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string_view>
#include <vector>

#include "sekv/core/error.hpp"

namespace sekv::example {
namespace {

struct gguf_free_fn {
    void operator()(gguf_context* g) const noexcept { gguf_free(g); }
};
using gguf_handle = std::unique_ptr<gguf_context, gguf_free_fn>;

/// FNV-1a, 64 bits (Fowler, Noll, Vo).
class fnv_hash {
public:
    void add(const char* data, std::size_t size) noexcept {
        for (std::size_t i = 0; i < size; ++i) state_ = (state_ ^ static_cast<unsigned char>(data[i])) * 0x100000001B3ULL;
    }
    [[nodiscard]] std::string hex() const {
        std::array<char, 17> text{};
        std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(state_));
        return text.data();
    }

private:
    std::uint64_t state_ = 0xCBF29CE484222325ULL;
};

std::uint64_t readable_size(const std::string& path) {
    std::error_code failure;
    const auto status = std::filesystem::status(path, failure);
    if (!std::filesystem::exists(status)) throw io_error("The model file '" + path + "' doesn't exist; give the path of a GGUF file.");
    if (!std::filesystem::is_regular_file(status)) throw io_error("The model path '" + path + "' isn't a regular file; give the path of a GGUF file.");
    const auto size = std::filesystem::file_size(path, failure);
    if (failure) throw io_error("The size of the model file '" + path + "' can't be read: " + failure.message() + ".");
    return size;
}

void check_magic(const std::string& path, std::ifstream& file) {
    std::array<char, 4> magic{};
    if (!file) throw io_error("The model file '" + path + "' can't be opened for reading; check its permissions.");
    file.read(magic.data(), magic.size());
    if (!file || std::string_view(magic.data(), magic.size()) != "GGUF")
        throw format_error("The model file '" + path +
                           "' isn't a GGUF: it doesn't start with the four letters GGUF. Convert the model with llama.cpp's tools first.");
}

bool has_key(const gguf_context* g, const std::string& key) { return gguf_find_key(g, key.c_str()) >= 0; }

std::string text_value(const gguf_context* g, const char* key) {
    const auto id = gguf_find_key(g, key);
    return id >= 0 && gguf_get_kv_type(g, id) == GGUF_TYPE_STRING ? gguf_get_val_str(g, id) : "";
}

void check_length(const std::string& path, std::uint64_t size, const gguf_context* g) {
    std::uint64_t end = gguf_get_data_offset(g);
    for (std::int64_t i = 0; i < gguf_get_n_tensors(g); ++i)
        end = std::max<std::uint64_t>(end, gguf_get_data_offset(g) + gguf_get_tensor_offset(g, i) + gguf_get_tensor_size(g, i));
    if (end > size)
        throw format_error("The model file '" + path + "' is cut short: its tensors end at byte " + std::to_string(end) + " but the file has " +
                           std::to_string(size) + " bytes. Fetch it again.");
}

bool is_recurrent(const gguf_context* g, const std::string& architecture) {
    if (architecture.starts_with("mamba") || architecture.find("rwkv") != std::string::npos) return true;
    for (const auto* group : {".ssm.", ".wkv.", ".shortconv.", ".kda.", ".time_mix_extra_dim"}) {
        for (std::int64_t i = 0; i < gguf_get_n_kv(g); ++i)
            if (std::string_view(gguf_get_key(g, i)).starts_with(architecture + group)) return true;
    }
    return false;
}

bool is_encoder(const gguf_context* g, const std::string& architecture) {
    const auto causal = gguf_find_key(g, (architecture + ".attention.causal").c_str());
    const bool bidirectional = causal >= 0 && gguf_get_kv_type(g, causal) == GGUF_TYPE_BOOL && !gguf_get_val_bool(g, causal);
    return bidirectional || architecture == "t5" || architecture == "t5encoder" || architecture.find("bert") != std::string::npos;
}

void check_architecture(const std::string& path, const gguf_context* g, const std::string& architecture) {
    const auto kind = text_value(g, "general.type");
    if (architecture.empty()) throw format_error("The model file '" + path + "' names no architecture (general.architecture), so it is no language model.");
    if (!kind.empty() && kind != "model") throw format_error("The model file '" + path + "' holds a part of kind '" + kind + "', not a whole language model.");
    const auto refuse = [&](const std::string& why) {
        throw unsupported("The model file '" + path + "' (architecture '" + architecture + "') can't be hosted: " + why);
    };
    if (is_recurrent(g, architecture))
        refuse("it is recurrent or hybrid, so its memory is a running state, not keys and values per token that could be compressed.");
    for (const auto* key : {".attention.kv_lora_rank", ".attention.key_length_mla", ".attention.kv_lora_rank_swa"})
        if (has_key(g, architecture + key))
            refuse("it uses multi-head latent attention (MLA), which caches one latent vector instead of keys and values per head.");
    if (is_encoder(g, architecture)) refuse("it is an encoder or an encoder-decoder, and sekv holds the cache of causal decoders.");
    if (gguf_get_n_tensors(g) == 0) throw format_error("The model file '" + path + "' holds no tensors; it may be a vocabulary alone.");
}

/// The header, then 4 KiB at 64 places spread evenly over the weights.
std::string fingerprint(std::ifstream& file, std::uint64_t header, std::uint64_t size) {
    constexpr std::uint64_t places = 64;
    fnv_hash hash;
    std::vector<char> buffer(std::size_t{1} << 20);
    const auto add = [&](std::uint64_t from, std::uint64_t count) {
        file.clear();
        file.seekg(static_cast<std::streamoff>(from));
        while (count > 0 && file.read(buffer.data(), static_cast<std::streamsize>(std::min<std::uint64_t>(count, buffer.size()))).gcount() > 0) {
            hash.add(buffer.data(), static_cast<std::size_t>(file.gcount()));
            count -= static_cast<std::uint64_t>(file.gcount());
        }
    };
    add(0, header);
    for (std::uint64_t i = 0; i < places; ++i) add(header + (size - header) / places * i, 4096);
    return "gguf-" + hash.hex();
}

}  // namespace

gguf_identity check_gguf(const std::string& path) {
    const auto size = readable_size(path);
    std::ifstream file(path, std::ios::binary);
    check_magic(path, file);
    const gguf_handle g(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
    if (!g)
        throw format_error("The header of the model file '" + path + "' is damaged or cut short (" + std::to_string(size) +
                           " bytes are there). Fetch it again.");
    gguf_identity identity;
    identity.architecture = text_value(g.get(), "general.architecture");
    check_architecture(path, g.get(), identity.architecture);
    check_length(path, size, g.get());
    identity.long_rope = gguf_find_tensor(g.get(), "rope_factors_long.weight") >= 0;
    identity.fingerprint = fingerprint(file, gguf_get_data_offset(g.get()), size);
    return identity;
}

}  // namespace sekv::example
