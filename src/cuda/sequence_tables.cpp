#include "src/cuda/sequence_tables.hpp"

#include <algorithm>
#include <cstring>

namespace sekv::cuda {
namespace {

constexpr std::size_t alignment = 64;

// Appends arrays to an image whose head is a sequence_view, and says where each will lie.
class image_builder {
public:
    explicit image_builder(std::byte* at) : at_(at), bytes_(sizeof(sequence_view)) {}
    template <class T>
    [[nodiscard]] const T* add(const std::vector<T>& list) {
        const auto begin = (bytes_.size() + alignment - 1) / alignment * alignment;
        bytes_.resize(begin + list.size() * sizeof(T));
        if (!list.empty()) std::memcpy(bytes_.data() + begin, list.data(), list.size() * sizeof(T));
        return reinterpret_cast<const T*>(at_ + begin);
    }
    [[nodiscard]] std::vector<std::byte> finish(const sequence_view& head) {
        std::memcpy(bytes_.data(), &head, sizeof head);
        return std::move(bytes_);
    }

private:
    std::byte* at_;
    std::vector<std::byte> bytes_;
};

// Rows past a block's reserved ones are never seen, since a query sees none behind its own position; so the last block counts as whole, and the tables change once in 64 tokens.
std::vector<exact_block> list_exact(const std::vector<row_block>& blocks) {
    std::vector<exact_block> out;
    for (std::size_t i = 0; i < blocks.size(); ++i) out.push_back({blocks[i].rows->data(), blocks[i].begin, i + 1 == blocks.size() ? block_tokens : blocks[i].count, 0});
    return out;
}

void add_sealed(image_builder& image, sequence_view& v, const sealed_lists& lists) {
    v.sealed = image.add(lists.blocks);
    v.segments = image.add(lists.segments);
    v.epochs = image.add(lists.epochs);
    v.key_bases = image.add(lists.key_bases);
    v.sealed_count = static_cast<std::int32_t>(lists.blocks.size());
    v.segment_count = static_cast<std::int32_t>(lists.segments.size());
    v.epoch_count = static_cast<std::int32_t>(lists.epochs.size());
    v.key_bases_count = static_cast<std::int32_t>(lists.key_bases.size());
}

}  // namespace

sealed_lists list_sealed(const std::vector<unit>& units) {
    sealed_lists out;
    for (const auto& u : units) {
        const auto& p = u.payload;
        if (out.epochs.empty() || out.epochs.back().statistics != p.statistics->device()) out.epochs.push_back({p.statistics->device(), p.statistics->keys->device()});
        if (out.key_bases.empty() || out.key_bases.back() != p.keys->device()) out.key_bases.push_back(p.keys->device());
        const auto e = static_cast<std::int32_t>(out.epochs.size()) - 1;
        const auto k = static_cast<std::int32_t>(out.key_bases.size()) - 1;
        const auto b = static_cast<std::int32_t>(out.blocks.size());
        auto* s = out.segments.empty() ? nullptr : &out.segments.back();
        if (s == nullptr || s->epoch != e || s->keys != k || s->count == segment_blocks)
            out.segments.push_back({b, 1, e, k});
        else
            ++s->count;
        out.blocks.push_back({p.sketch->as<std::uint8_t>(), p.lines->as<std::uint8_t>(), p.exact ? p.exact->as<std::uint8_t>() : nullptr, u.begin, u.count, e, k, 0});
    }
    return out;
}

std::vector<std::byte> table_image(const sequence_record<cuda_progressive_codec>& r, std::int32_t line_slots, std::byte* at) {
    image_builder image(at);
    sequence_view v;
    for (std::size_t c = 0; c < layer_classes; ++c) {
        const auto list = list_exact(r.rows[c].blocks());
        v.exact[c] = image.add(list);
        v.exact_count[c] = static_cast<std::int32_t>(list.size());
    }
    v.sinks = r.sinks ? r.sinks->data() : nullptr;
    v.sink_count = r.sink_count;
    v.line_slots = line_slots;
    v.line_cache = line_slots > 0 ? r.own.cache.data() : nullptr;
    v.query_ring = r.own.ring.data();
    add_sealed(image, v, list_sealed(r.sealed));
    return image.finish(v);
}

std::vector<std::byte> sealed_image(const sealed_lists& lists, std::byte* at) {
    image_builder image(at);
    sequence_view v;
    add_sealed(image, v, lists);
    return image.finish(v);
}

std::size_t table_bytes(std::size_t exact, std::size_t sealed, std::size_t epochs) {
    const auto segments = sealed / segment_blocks + 2 * epochs + 2;
    return sizeof(sequence_view) + exact * sizeof(exact_block) + sealed * sizeof(sealed_block) + segments * sizeof(segment) + epochs * (sizeof(epoch_ref) + sizeof(void*)) + 8 * alignment;
}

}  // namespace sekv::cuda
