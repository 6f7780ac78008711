#include "src/cuda/resource.hpp"

#include <algorithm>
#include <cstring>

namespace sekv::cuda {

cuda_resource::cuda_resource(cudaStream_t compute, const resource_options& options)
    : device_(current_device()), pool_(options.device), arena_(options.host), copies_(arena_, options.copies), streams_{copies_.copy_stream(), beside_.get(), compute} {}

void cuda_resource::use(cudaStream_t s) {
    if (s == stream()) return;
    const device_guard guard(device_);
    const auto place = static_cast<std::size_t>(std::find(streams_.begin(), streams_.end(), s) - streams_.begin());
    streams_.reserve(streams_.size() + 1);
    edge_.record(stream());
    edge_.order(s);
    if (place == streams_.size()) streams_.push_back(s);
    current_ = place;
}

// A capture can wait for nothing that began before it.
void cuda_resource::refuse_old_work() const {
    if (capturing(stream()) && !capturing(beside_.get()))
        throw state_error("The stream is being captured, and a prefetch from before the capture is under way; call begin_step before the capture begins, and prefetch inside it.");
}

cudaStream_t cuda_resource::beside() {
    const device_guard guard(device_);
    if (apart_) refuse_old_work();
    edge_.record(stream());
    edge_.order(beside_.get());
    apart_ = true;
    return beside_.get();
}

cudaStream_t cuda_resource::joined() {
    if (apart_) {
        const device_guard guard(device_);
        refuse_old_work();
        edge_.record(beside_.get());
        edge_.order(stream());
        apart_ = false;
    }
    return stream();
}

void cuda_resource::forget(cudaStream_t s) {
    const auto known = std::find(streams_.begin() + 2, streams_.end(), s);
    if (known == streams_.end()) return;
    if (s == stream()) throw state_error("The stream to forget is the one in use; call use with another stream first.");
    pool_.forget(s);
    arena_.forget(s);
    const auto present = stream();
    streams_.erase(known);
    current_ = static_cast<std::size_t>(std::find(streams_.begin(), streams_.end(), present) - streams_.begin());
}

void cuda_resource::synchronize() {
    const device_guard guard(device_);
    for (const auto s : streams_) check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
}

void* cuda_resource::allocate(tier t, std::size_t bytes, std::size_t alignment) {
    if (alignment > range_alignment)
        throw invalid_argument("CUDA memory is given at multiples of " + std::to_string(range_alignment) + " bytes, which can't serve an alignment of " + std::to_string(alignment) + " bytes; ask for less.");
    if (t == tier::device) return pool_.allocate(bytes, stream());
    fresh_ = arena_.allocate(bytes);
    return const_cast<void*>(fresh_);
}

void cuda_resource::deallocate(tier t, void* p, std::size_t, std::size_t) noexcept {
    if (p == fresh_) fresh_ = nullptr;
    if (t == tier::device)
        pool_.free(static_cast<std::byte*>(p), streams_);
    else
        arena_.free(static_cast<std::byte*>(p), streams_);
}

void cuda_resource::zero(tier t, void* p, std::size_t bytes) {
    if (t == tier::device) {
        const device_guard guard(device_);
        return copies_.zero(p, bytes, joined());
    }
    if (p != fresh_) synchronize();
    fresh_ = nullptr;
    std::memset(p, 0, bytes);
}

void cuda_resource::copy(void* to, tier to_tier, const void* from, tier from_tier, std::size_t bytes) { copy_rows(to, to_tier, bytes, from, from_tier, bytes, bytes, 1); }

void cuda_resource::copy_rows(void* to, tier to_tier, std::size_t to_pitch, const void* from, tier from_tier, std::size_t from_pitch, std::size_t width, std::size_t rows) {
    if (width == 0 || rows == 0) return;
    fresh_ = nullptr;
    if (to_tier == tier::host && from_tier == tier::host) {
        synchronize();
        for (std::size_t row = 0; row < rows; ++row) std::memcpy(static_cast<std::byte*>(to) + row * to_pitch, static_cast<const std::byte*>(from) + row * from_pitch, width);
        return;
    }
    const device_guard guard(device_);
    const auto d = from_tier == tier::host ? direction::to_device : to_tier == tier::host ? direction::to_host : direction::on_device;
    copies_.copy(d, {to, from, width, rows, to_pitch, from_pitch}, joined(), lane::in_line);
}

}  // namespace sekv::cuda
