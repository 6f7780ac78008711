// What kernels read of a sequence, built on the host from its record.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/types.hpp"
#include "sekv/attend/cuda_codec.hpp"
#include "sekv/attend/record.hpp"

namespace sekv::cuda {

using unit = progressive_books::unit;

/// Sealed blocks and what they refer to.
struct sealed_lists {
    std::vector<sealed_block> blocks;
    std::vector<segment> segments;
    std::vector<epoch_ref> epochs;
    std::vector<const std::byte*> key_bases;
};
[[nodiscard]] sealed_lists list_sealed(const std::vector<unit>& units);

/// The image of a sequence's tables: sequence_view at its head, its lists behind, pointing to where the image will lie.
[[nodiscard]] std::vector<std::byte> table_image(const sequence_record<cuda_progressive_codec>& r, std::int32_t line_slots, std::byte* at);
/// The image of sealed lists alone, for kernels that decode units outside a step.
[[nodiscard]] std::vector<std::byte> sealed_image(const sealed_lists& lists, std::byte* at);
/// Bytes that an image of `exact` and `sealed` blocks, of so many epochs and no more key bases, takes at most.
[[nodiscard]] std::size_t table_bytes(std::size_t exact, std::size_t sealed, std::size_t epochs);

}  // namespace sekv::cuda
