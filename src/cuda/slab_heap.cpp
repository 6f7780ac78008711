#include "src/cuda/slab_heap.hpp"

#include <algorithm>
#include <exception>
#include <iterator>

namespace sekv::cuda {

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr std::uint64_t bit(std::size_t i) { return std::uint64_t{1} << i; }

}  // namespace

slab_heap::~slab_heap() {
    int before = device_;
    (void)cudaGetDevice(&before);
    if (before != device_) (void)cudaSetDevice(device_);
    if (cudaDeviceSynchronize() != cudaSuccess) (void)cudaGetLastError();
    for (const auto& [slab, bytes] : slabs_) source_.release(slab);
    if (before != device_) (void)cudaSetDevice(before);
}

std::byte* slab_heap::allocate(std::size_t bytes) { return allocate_range(bytes, nullptr); }

std::byte* slab_heap::allocate(std::size_t bytes, cudaStream_t s) { return allocate_range(bytes, &s); }

std::byte* slab_heap::allocate_range(std::size_t bytes, const cudaStream_t* order) {
    const auto size = size_class(bytes);
    if (size == 0 || size > options_.limit) return nullptr;
    const std::lock_guard lock(mutex_);
    const device_guard device(device_);
    close_open();
    reuse_finished();
    if (auto* p = cut(size, bytes)) return p;
    if (order != nullptr) {
        if (auto* p = take_in_order(size, bytes, *order)) return p;
    }
    if (grow(size)) return cut(size, bytes);
    while (!closed_.empty()) {
        reuse_oldest();
        if (auto* p = cut(size, bytes)) return p;
    }
    if (release_unused_slabs() > 0 && grow(size)) return cut(size, bytes);
    return nullptr;
}

void slab_heap::free(std::byte* p, std::span<const cudaStream_t> users) noexcept {
    if (p == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(p);
    if (found == ranges_.end() || found->second.now != state::live) std::terminate();
    auto& r = found->second;
    for (const auto s : users) {
        const auto slot = slot_of(s);
        if (slot < most_streams)
            r.users |= bit(slot);
        else if (cudaStreamSynchronize(s) != cudaSuccess)
            (void)cudaGetLastError();
    }
    if (unfenced_) r.users = 0;
    r.now = state::pending;
    r.next = std::exchange(open_.head, p);
    asked_.fetch_sub(r.asked, relaxed);
    held_.fetch_sub(r.bytes, relaxed);
    pending_.fetch_add(r.bytes, relaxed);
    live_.fetch_sub(1, relaxed);
}

void slab_heap::forget(cudaStream_t s) {
    const std::lock_guard lock(mutex_);
    const device_guard device(device_);
    close_open();
    check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    const auto slot = static_cast<std::size_t>(std::find(streams_.begin(), streams_.begin() + static_cast<std::ptrdiff_t>(stream_count_), s) - streams_.begin());
    if (slot == stream_count_) return;
    // The last stream takes over the slot.
    const auto last = --stream_count_;
    const auto renamed = [&](std::uint64_t users) {
        users &= ~bit(slot);
        return (users & bit(last)) != 0 ? (users & ~bit(last)) | bit(slot) : users;
    };
    streams_[slot] = streams_[last];
    for (auto& [p, r] : ranges_) r.users = renamed(r.users);
    for (auto& b : closed_) {
        std::erase_if(b.fences, [&](const auto& f) { return f.first == slot; });
        for (auto& f : b.fences)
            if (f.first == last) f.first = slot;
    }
}

std::size_t slab_heap::trim() {
    const std::lock_guard lock(mutex_);
    const device_guard device(device_);
    close_open();
    reuse_finished();
    return release_unused_slabs();
}

bool slab_heap::contains(const void* p) const {
    const auto* byte = static_cast<const std::byte*>(p);
    const std::lock_guard lock(mutex_);
    auto slab = slabs_.upper_bound(const_cast<std::byte*>(byte));
    return slab != slabs_.begin() && byte < std::prev(slab)->first + std::prev(slab)->second;
}

slab_usage slab_heap::usage() const noexcept {
    return {asked_.load(relaxed),     held_.load(relaxed), pending_.load(relaxed), reserved_.load(relaxed), slab_count_.load(relaxed),
            most_held_.load(relaxed), live_.load(relaxed), waits_.load(relaxed),   reordered_.load(relaxed)};
}

std::byte* slab_heap::cut(std::size_t size, std::size_t asked) {
    const auto fit = unused_.lower_bound({size, nullptr});
    if (fit == unused_.end()) return nullptr;
    const auto r = ranges_.find(fit->second);
    if (r->second.bytes > size) {
        const auto rest = r->second.bytes - size;
        const auto behind = ranges_.emplace(r->first + size, range{.bytes = rest, .slab = r->second.slab}).first;
        try {
            unused_.emplace(rest, behind->first);
        } catch (...) {
            ranges_.erase(behind);
            throw;
        }
        r->second.bytes = size;
    }
    r->second.entry = unused_.extract(fit);
    make_live(r, asked);
    return r->first;
}

void slab_heap::make_live(ranges::iterator r, std::size_t asked) {
    r->second.now = state::live;
    r->second.asked = asked;
    r->second.users = 0;
    r->second.next = nullptr;
    asked_.fetch_add(asked, relaxed);
    const auto held = held_.fetch_add(r->second.bytes, relaxed) + r->second.bytes;
    if (held > most_held_.load(relaxed)) most_held_.store(held, relaxed);
    live_.fetch_add(1, relaxed);
}

// A pending range of this very size, whose users other than s are ordered before s on the device.
std::byte* slab_heap::take_in_order(std::size_t size, std::size_t asked, cudaStream_t s) {
    const auto own = slot_of(s);
    if (own == most_streams) return nullptr;
    for (auto& b : closed_) {
        std::byte** link = &b.head;
        while (*link != nullptr) {
            const auto r = ranges_.find(*link);
            if (r->second.bytes != size) {
                link = &r->second.next;
                continue;
            }
            for (const auto& [slot, event] : b.fences)
                if (slot != own && (r->second.users & bit(slot)) != 0) event.order(s);
            *link = r->second.next;
            pending_.fetch_sub(size, relaxed);
            reordered_.fetch_add(1, relaxed);
            make_live(r, asked);
            return r->first;
        }
    }
    return nullptr;
}

bool slab_heap::grow(std::size_t size) {
    const auto left = options_.limit - static_cast<std::size_t>(reserved_.load(relaxed));
    if (size > left) return false;
    const auto usual = std::min(std::max(size, options_.slab_bytes / range_alignment * range_alignment), left / range_alignment * range_alignment);
    if (add_slab(usual) != nullptr) return true;
    return usual > size && add_slab(size) != nullptr;  // little memory is left: no more than what is asked for
}

std::byte* slab_heap::add_slab(std::size_t bytes) {
    auto* slab = static_cast<std::byte*>(source_.allocate(bytes));
    if (slab == nullptr) return nullptr;
    try {
        slabs_.emplace(slab, bytes);
        ranges_.emplace(slab, range{.bytes = bytes, .slab = slab});
        unused_.emplace(bytes, slab);
    } catch (...) {
        ranges_.erase(slab);
        slabs_.erase(slab);
        source_.release(slab);
        throw;
    }
    reserved_.fetch_add(bytes, relaxed);
    slab_count_.fetch_add(1, relaxed);
    return slab;
}

std::size_t slab_heap::release_unused_slabs() {
    std::size_t released = 0;
    for (auto slab = slabs_.begin(); slab != slabs_.end();) {
        const auto whole = ranges_.find(slab->first);
        if (whole->second.now != state::unused || whole->second.bytes != slab->second) {
            ++slab;
            continue;
        }
        unused_.erase({slab->second, slab->first});
        ranges_.erase(whole);
        source_.release(slab->first);
        released += slab->second;
        slab_count_.fetch_sub(1, relaxed);
        slab = slabs_.erase(slab);
    }
    reserved_.fetch_sub(released, relaxed);
    return released;
}

// Records the events of what was freed since the last allocation.
void slab_heap::close_open() {
    if (open_.head == nullptr) return;
    std::uint64_t users = 0;
    for (auto* p = open_.head; p != nullptr; p = ranges_.find(p)->second.next) users |= ranges_.find(p)->second.users;
    for (std::size_t slot = 0; slot < stream_count_; ++slot) {  // an event that was recorded during capture can't be asked later
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        if ((users & bit(slot)) != 0) check(cudaStreamIsCapturing(streams_[slot], &status), "cudaStreamIsCapturing");
        if (status != cudaStreamCaptureStatusNone) throw state_error("Memory was asked for while a stream is being captured; make plans, reserve and begin steps before the capture begins.");
    }
    batch next;
    for (std::size_t slot = 0; slot < stream_count_; ++slot) {
        if ((users & bit(slot)) == 0) continue;
        next.fences.emplace_back(slot, take_event());
        next.fences.back().second.record(streams_[slot]);
    }
    closed_.push_back(std::move(next));
    std::swap(closed_.back().head, open_.head);
}

void slab_heap::reuse_finished() {
    while (!closed_.empty()) {
        for (const auto& [slot, event] : closed_.front().fences)
            if (!event.done()) return;
        reuse_front();
    }
}

void slab_heap::reuse_oldest() {
    bool waited = false;
    for (const auto& [slot, event] : closed_.front().fences) {
        if (event.done()) continue;
        event.wait();
        waited = true;
    }
    if (waited) waits_.fetch_add(1, relaxed);
    reuse_front();
}

// The oldest frees, whose events have passed.
void slab_heap::reuse_front() {
    auto finished = std::move(closed_.front());
    closed_.pop_front();
    reuse(finished.head);
    for (auto& f : finished.fences) events_.push_back(std::move(f.second));
}

void slab_heap::reuse(std::byte* head) noexcept {
    while (head != nullptr) {
        const auto r = ranges_.find(head);
        head = r->second.next;
        pending_.fetch_sub(r->second.bytes, relaxed);
        merge(r);
    }
}

// Makes r, and unused neighbours of its slab, one unused range.
void slab_heap::merge(ranges::iterator r) noexcept {
    const auto joins = [&](ranges::iterator n) { return n->second.now == state::unused && n->second.slab == r->second.slab; };
    const auto absorb = [&](ranges::iterator into, ranges::iterator n) {
        into->second.bytes += n->second.bytes;
        ranges_.erase(n);
    };
    auto entry = std::move(r->second.entry);
    if (const auto behind = std::next(r); behind != ranges_.end() && joins(behind)) {
        unused_.erase({behind->second.bytes, behind->first});
        absorb(r, behind);
    }
    if (r != ranges_.begin() && joins(std::prev(r))) {
        const auto before = std::prev(r);
        unused_.erase({before->second.bytes, before->first});
        absorb(before, r);
        r = before;
    }
    r->second.now = state::unused;
    r->second.users = 0;
    r->second.next = nullptr;
    entry.value() = {r->second.bytes, r->first};
    unused_.insert(std::move(entry));
}

std::size_t slab_heap::slot_of(cudaStream_t s) noexcept {
    for (std::size_t i = 0; i < stream_count_; ++i)
        if (streams_[i] == s) return i;
    if (stream_count_ == most_streams) return most_streams;
    streams_[stream_count_] = s;
    return stream_count_++;
}

owned_event slab_heap::take_event() {
    if (events_.empty()) return owned_event();
    auto event = std::move(events_.back());
    events_.pop_back();
    return event;
}

}  // namespace sekv::cuda
