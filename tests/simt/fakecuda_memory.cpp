// Memory of the fake runtime: fresh bytes are 0xff, device memory can't be read by the host (ASan), freed memory is kept aside and watched.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "simt/fakecuda_state.hpp"
#include "simt/sanitizers.hpp"

namespace fakecuda::detail {
namespace {

constexpr std::size_t alignment = 256;
constexpr std::size_t tail_bytes = 256;
constexpr int fill = 0xff;
constexpr int canary = 0xa5;
constexpr int freed_fill = 0xfd;
constexpr std::size_t most_quarantined = std::size_t{32} << 20;

std::size_t reserved_bytes(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment + tail_bytes; }

bool all_are(const char* bytes, std::size_t n, int value) {
    return n == 0 || (static_cast<unsigned char>(bytes[0]) == value && std::memcmp(bytes, bytes + 1, n - 1) == 0);
}

std::size_t& used(place where) { return where == place::device ? the_runtime().device_used : the_runtime().pinned_used; }

cudaError_t allocate(void** out, std::size_t bytes, place where) {
    runtime& r = the_runtime();
    *out = nullptr;
    if (bytes == 0) return cudaSuccess;
    const std::size_t total = where == place::device ? r.device_total : r.pinned_total;
    if (bytes > total || used(where) > total - bytes) return cudaErrorMemoryAllocation;
    const simt::detail::ignore_races quiet;
    const std::size_t reserved = reserved_bytes(bytes);
    auto* p = static_cast<char*>(std::aligned_alloc(alignment, reserved));
    if (p == nullptr) return cudaErrorMemoryAllocation;
    std::memset(p, fill, bytes);
    std::memset(p + bytes, canary, reserved - bytes);
    simt::detail::poison_bytes(p + bytes, reserved - bytes);
    if (where == place::device && r.device_hidden) simt::detail::poison_bytes(p, bytes);
    r.memory[p] = {bytes, where};
    used(where) += bytes;
    *out = p;
    return cudaSuccess;
}

void let_go(const freed_block& b) {
    simt::detail::unpoison_bytes(b.bytes, b.reserved);
    if (!all_are(b.bytes, b.what.bytes, freed_fill)) problem("freed memory was written: " + std::to_string(b.what.bytes) + " bytes that had been freed");
    std::free(b.bytes);
}

void quarantine(char* p, const allocation& a) {
    runtime& r = the_runtime();
    const std::size_t reserved = reserved_bytes(a.bytes);
    simt::detail::unpoison_bytes(p, reserved);
    if (!all_are(p + a.bytes, reserved - a.bytes, canary)) problem("bytes behind an allocation of " + std::to_string(a.bytes) + " were written");
    std::memset(p, freed_fill, a.bytes);
    simt::detail::poison_bytes(p, reserved);
    r.quarantine.push_back({p, a, reserved});
    r.quarantined += reserved;
    while (r.quarantined > most_quarantined) {
        r.quarantined -= r.quarantine.front().reserved;
        let_go(r.quarantine.front());
        r.quarantine.pop_front();
    }
}

cudaError_t release(void* p, place where) {
    runtime& r = the_runtime();
    if (p == nullptr) return cudaSuccess;
    const auto found = r.memory.find(static_cast<char*>(p));
    if (found == r.memory.end() || found->second.where != where) return problem("a free of something that was not allocated, or is freed already");
    ++r.waits;
    drain_all();
    const simt::detail::ignore_races quiet;
    const allocation a = found->second;
    r.memory.erase(found);
    used(where) -= a.bytes;
    quarantine(static_cast<char*>(p), a);
    return r.lost;
}

/// With a lost context the call fails, but the memory goes with the context.
cudaError_t release_call(void* p, place where) {
    runtime& r = the_runtime();
    const std::lock_guard lock(r.mutex);
    if (r.lost != cudaSuccess) {
        release(p, where);
        return remember(r.lost);
    }
    return api(call::other, capture_rule::unsafe, [&] { return release(p, where); });
}

void set_visible(bool visible) {
    for (const auto& [p, a] : the_runtime().memory) {
        if (a.where != place::device) continue;
        if (visible)
            simt::detail::unpoison_bytes(p, a.bytes);
        else
            simt::detail::poison_bytes(p, a.bytes);
    }
}

}  // namespace

void show_device_memory() {
    if (!SIMT_ASAN || !the_runtime().device_hidden) return;
    the_runtime().device_hidden = false;
    set_visible(true);
}

void hide_device_memory() {
    if (!SIMT_ASAN || the_runtime().device_hidden) return;
    the_runtime().device_hidden = true;
    set_visible(false);
}

std::map<char*, allocation>::iterator find_allocation(const void* p) {
    auto& memory = the_runtime().memory;
    auto i = memory.upper_bound(const_cast<char*>(static_cast<const char*>(p)));
    if (i == memory.begin()) return memory.end();
    --i;
    return p < i->first + i->second.bytes ? i : memory.end();
}

std::string range_fault(const void* p, std::size_t bytes) {
    const auto* first = static_cast<const char*>(p);
    const auto i = find_allocation(p);
    if (i != the_runtime().memory.end()) {
        const auto left = static_cast<std::size_t>(i->first + i->second.bytes - first);
        return bytes <= left ? "" : std::to_string(bytes) + " bytes where the allocation has " + std::to_string(left);
    }
    for (const freed_block& b : the_runtime().quarantine)
        if (first >= b.bytes && first < b.bytes + b.what.bytes) return "memory that is freed";
    return "";
}

}  // namespace fakecuda::detail

namespace fakecuda {

std::size_t live_allocations() {
    const std::lock_guard lock(detail::the_runtime().mutex);
    return detail::the_runtime().memory.size();
}

std::size_t live_bytes() {
    const std::lock_guard lock(detail::the_runtime().mutex);
    return detail::the_runtime().device_used + detail::the_runtime().pinned_used;
}

void set_memory(std::size_t device_bytes, std::size_t pinned_bytes) {
    const std::lock_guard lock(detail::the_runtime().mutex);
    detail::the_runtime().device_total = device_bytes;
    detail::the_runtime().pinned_total = pinned_bytes;
}

}  // namespace fakecuda

using namespace fakecuda::detail;
using fakecuda::call;

extern "C" {

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
    return api(call::allocation, capture_rule::unsafe, [&] { return allocate(p, bytes, place::device); });
}
cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) {
    return api(call::allocation, capture_rule::unsafe, [&] { return allocate(p, bytes, place::pinned); });
}
cudaError_t cudaMallocHost(void** p, std::size_t bytes) { return cudaHostAlloc(p, bytes, cudaHostAllocDefault); }
cudaError_t cudaFree(void* p) { return release_call(p, place::device); }
cudaError_t cudaFreeHost(void* p) { return release_call(p, place::pinned); }

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    return api(call::other, capture_rule::safe, [&] {
        const auto i = find_allocation(host);
        if (i == the_runtime().memory.end() || i->second.where != place::pinned) return cudaErrorInvalidValue;
        *device = host;
        return cudaSuccess;
    });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
    return api(call::other, capture_rule::safe, [&] {
        *out = cudaPointerAttributes{};
        const auto i = find_allocation(p);
        const bool known = i != the_runtime().memory.end();
        out->type = !known ? cudaMemoryTypeUnregistered : i->second.where == place::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        if (known) out->devicePointer = const_cast<void*>(p);
        if (known && i->second.where == place::pinned) out->hostPointer = const_cast<void*>(p);
        return cudaSuccess;
    });
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
    return api(call::other, capture_rule::safe, [&] {
        *total = the_runtime().device_total;
        *free_bytes = *total - std::min(*total, the_runtime().device_used);
        return cudaSuccess;
    });
}
}
