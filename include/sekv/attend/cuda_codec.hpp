// The progressive preset on the CUDA backend: the same books, sealed by device kernels.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "sekv/attend/progressive.hpp"
#include "sekv/core/view.hpp"
#include "sekv/exec/cuda_backend.hpp"

namespace sekv {

namespace cuda {
struct cache_layout;
class sealer;
}  // namespace cuda

/// Seals on the device: bases by cuSOLVER, projection by cuBLAS, quantisation by kernels; bits are allotted on the host. Sealing waits for the device.
class cuda_progressive_codec final : public progressive_books {
public:
    static constexpr const char* name = "progressive";

    /// What one sequence owns on the device beside the books.
    struct sequence : progressive_sequence {
        buffer ring;                                   ///< the queries of the last positions, which are not in the moments yet
        std::vector<std::int64_t> ring_begin, ring_end;  ///< positions in the ring, by layer
        buffer tables;                                 ///< what kernels read of the sequence: kernels/types.hpp's sequence_view and its lists
        std::vector<std::byte> shadow;                 ///< the tables' content as last sent
        std::uint64_t sent = ~std::uint64_t{0};        ///< sequence_record::version of it
        std::int32_t segments = 0, epoch_runs = 0, key_runs = 0;  ///< in it
        std::int64_t stale_lines = std::numeric_limits<std::int64_t>::max();  ///< the line cache may hold lines of tokens from here on that were truncated
    };

    /// stored: bf16 or f16. Throws unsupported for others; as progressive_books; budget_error when the device can't hold the seal's workspace.
    cuda_progressive_codec(const model_shape& model, const options& o, dtype stored, block_pool& pool, cuda_backend& where);
    ~cuda_progressive_codec() override;

    [[nodiscard]] sequence open(std::int64_t capacity);
    [[nodiscard]] sequence fork(const sequence& from, std::int64_t length);
    void truncate(sequence& s, std::int64_t length) noexcept;
    [[nodiscard]] usage sequence_usage(const sequence& s, const std::vector<unit>& units) const;
    /// As the books', and the pinned bytes that the seal, or making all sketches anew, takes for its time.
    [[nodiscard]] demand seal_bytes(const sequence& s, const std::vector<unit>& before, token_range range, std::int64_t blocks, const segmenter& spans) const;
    [[nodiscard]] std::vector<unit> seal(sequence& s, const std::vector<unit>& before, const seal_request& request);
    bool advance(sequence& s, std::vector<unit>& units, std::int64_t length, std::uint64_t device_room);

    /// Takes truncated tokens' lines out of the line cache, before kernels read it. Enqueues.
    void forget_lines(sequence& s);
    /// Gives s moments of its own, so that what enters them next can't fail for memory. Throws budget_error.
    void own(sequence& s) { own_moments(s); }
    /// Queries on their way into the moments: the ring's of a layer (of all layers when it is -1), and behind them [tokens, query_heads, key_size] in device-accessible memory, which that layer has just been
    /// asked with; without data, the ring's alone.
    struct intake {
        sequence* to = nullptr;
        std::int32_t layer = -1;
        rows_view queries;
    };
    /// Takes them in one launch: when it throws, no query counts and the rings are as they were, so that a call made again counts each once. Enqueues. Throws budget_error.
    void take(std::span<const intake> from);
    /// One sequence's rings.
    void fold(sequence& s, std::int32_t layer = -1);
    /// One sequence's queries of a layer, behind its ring's.
    void observe(sequence& s, std::int32_t layer, const rows_view& queries);

    /// Where kernels report what they can't throw (kernels/types.hpp's deferred_flags), and what is thrown for it: invalid_argument, once.
    [[nodiscard]] std::byte* flags() const noexcept { return flags_.data(); }
    void check_flags();
    [[nodiscard]] const cuda::cache_layout& places() const noexcept { return *places_; }

protected:
    void copy_moments(const page& from, page& to) override;
    void fit_and_encode(const progressive_sequence& s, const std::vector<std::shared_ptr<epoch>>& epochs, const std::vector<token_range>& ranges, std::vector<unit>& units, const seal_request& request) override;
    void fit_decoded(const progressive_sequence& s, epoch& e, const std::vector<unit>& units, token_range range, std::int64_t length) override;
    void encode_units(std::vector<unit>& units, const seal_request& request) override;
    void sketch_anew(const progressive_sequence& s, const std::vector<unit>& units, const std::vector<sketch_run>& runs, std::byte* planes, std::int64_t length) override;

private:
    [[nodiscard]] bool owns(std::int32_t layer) const noexcept { return layout_.head_index(layer, 0) >= 0; }
    [[nodiscard]] std::vector<double> metric(const progressive_sequence& s, std::int32_t layer, std::int64_t length) const;
    struct moment_list;
    /// What folding the rings takes.
    [[nodiscard]] std::size_t moment_bytes(const sequence& s) const;

    cuda_backend where_;
    std::unique_ptr<cuda::cache_layout> places_;
    buffer seal_workspace_;
    std::unique_ptr<cuda::sealer> sealer_;
    buffer flags_;           ///< pinned deferred_flags
};
static_assert(codec<cuda_progressive_codec>);

}  // namespace sekv
