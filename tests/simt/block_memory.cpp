// A block's shared memory, and the asynchronous copies into it.
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "simt/sanitizers.hpp"
#include "simt/scheduler.hpp"

namespace simt {
namespace detail {
namespace {

constexpr std::size_t alignment = 128;
constexpr std::size_t tail_bytes = 256;  // behind the shared memory, never to be touched
constexpr int fill = 0xff;               // NaN in every float format, -1 in every integer
constexpr int canary = 0xa5;

struct region {
    unsigned char* bytes;
    std::size_t count;
};

struct copy {
    void* shared;
    const void* global;
    int bytes, source_bytes;
    bool arrived;
};

struct thread_copies {
    std::vector<copy> issued;
    std::vector<std::size_t> groups;  // ends of committed groups in `issued`
};

struct block_memory {
    unsigned char* bytes = nullptr;
    std::size_t size = 0, capacity = 0;
    const void* type = nullptr;
    std::vector<region> red_zones;
    std::array<thread_copies, most_threads> copies;
};
block_memory& M = *new block_memory;

void free_bytes() {
    if (M.bytes == nullptr) return;
    unpoison_bytes(M.bytes, M.capacity);
    std::free(M.bytes);
    M.bytes = nullptr;
    M.capacity = 0;
}

bool copied_late() {
    const options& o = current_options();
    if (o.late_copies >= 0) return o.late_copies == 1;
    return o.schedule == order::forward || (o.schedule == order::random && (draw() & 1) != 0);
}

void arrive(copy& c) {
    if (c.arrived) return;
    c.arrived = true;
    const auto given = static_cast<std::size_t>(c.source_bytes);
    const auto all = static_cast<std::size_t>(c.bytes);
    tsan_reads(c.global, given);
    tsan_writes(c.shared, all);
    const ignore_races quiet;
    std::memcpy(c.shared, c.global, given);
    std::memset(static_cast<unsigned char*>(c.shared) + given, 0, all - given);
}

}  // namespace

void open_shared(std::size_t bytes) {
    const ignore_races quiet;
    const std::size_t capacity = (bytes + alignment - 1) / alignment * alignment + tail_bytes;
    // A new allocation per block under ThreadSanitizer: blocks don't share this memory.
    if (SIMT_TSAN || capacity != M.capacity) {
        free_bytes();
        M.bytes = static_cast<unsigned char*>(std::aligned_alloc(alignment, capacity));
        if (M.bytes == nullptr) throw std::bad_alloc();
        M.capacity = capacity;
    }
    unpoison_bytes(M.bytes, M.capacity);
    M.size = bytes;
    M.type = nullptr;
    M.red_zones.clear();
    std::memset(M.bytes, fill, bytes);
    poison(M.bytes + bytes, capacity - bytes);
}

void check_shared() {
    if (SIMT_ASAN) return;
    const ignore_races quiet;
    for (const region& r : M.red_zones)
        for (std::size_t i = 0; i < r.count; ++i)
            if (r.bytes[i] != canary) {
                const auto place = static_cast<std::ptrdiff_t>(&r.bytes[i] - M.bytes);
                fail("a thread of " + describe_block() + " wrote between or past the shared arrays, at byte " + std::to_string(place) + " of " +
                     std::to_string(M.size));
            }
}

void close_shared() {
    const ignore_races quiet;
    M.red_zones.clear();
    if (SIMT_TSAN) free_bytes();
    if (M.bytes != nullptr) unpoison_bytes(M.bytes, M.capacity);
    M.size = 0;
}

void* shared_bytes() { return M.bytes; }
std::size_t shared_size() { return M.size; }

bool claim_shared(const void* type) {
    if (M.type != nullptr && M.type != type) fail("one block views its shared memory as two types");
    const bool first = M.type == nullptr;
    M.type = type;
    return first;
}

void forget_copies(int threads) {
    for (int i = 0; i < threads; ++i) {
        M.copies[static_cast<std::size_t>(i)].issued.clear();
        M.copies[static_cast<std::size_t>(i)].groups.clear();
    }
}

bool copies_pending(int id) { return !M.copies[static_cast<std::size_t>(id)].issued.empty(); }

void cp_async(void* shared, const void* global, int bytes, int source_bytes) {
    auto* to = static_cast<unsigned char*>(shared);
    if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async of " + std::to_string(bytes) + " bytes; 4, 8 or 16 are possible");
    if (source_bytes < 0 || source_bytes > bytes) fail("cp.async reads " + std::to_string(source_bytes) + " of " + std::to_string(bytes) + " bytes");
    const auto misaligned = [&](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes) != 0; };
    if (misaligned(shared) || misaligned(global)) fail("cp.async with an address that is no multiple of its " + std::to_string(bytes) + " bytes");
    if (to < M.bytes || to + bytes > M.bytes + M.size) fail("cp.async to an address outside the block's shared memory");
    copy c{shared, global, bytes, source_bytes, false};
    if (copied_late()) {
        const ignore_races quiet;
        std::memset(shared, fill, static_cast<std::size_t>(bytes));
    } else {
        arrive(c);
    }
    const ignore_races quiet;
    M.copies[static_cast<std::size_t>(the_engine().current->id)].issued.push_back(c);
}

void cp_commit() {
    const ignore_races quiet;
    thread_copies& mine = M.copies[static_cast<std::size_t>(the_engine().current->id)];
    mine.groups.push_back(mine.issued.size());
}

void cp_wait(int pending) {
    thread_copies& mine = M.copies[static_cast<std::size_t>(the_engine().current->id)];
    const auto left = static_cast<std::size_t>(pending);
    if (mine.groups.size() <= left) return;
    const std::size_t done_groups = mine.groups.size() - left;
    const std::size_t done = mine.groups[done_groups - 1];
    for (std::size_t i = 0; i < done; ++i) arrive(mine.issued[i]);
    const ignore_races quiet;
    mine.issued.erase(mine.issued.begin(), mine.issued.begin() + static_cast<std::ptrdiff_t>(done));
    mine.groups.erase(mine.groups.begin(), mine.groups.begin() + static_cast<std::ptrdiff_t>(done_groups));
    for (std::size_t& end : mine.groups) end -= done;
}

}  // namespace detail

void poison(void* bytes, std::size_t count) {
    if (count == 0) return;
    detail::poison_bytes(bytes, count);
    if (SIMT_ASAN) return;
    const detail::ignore_races quiet;
    if (!SIMT_TSAN) std::memset(bytes, detail::canary, count);
    if (!SIMT_TSAN) detail::M.red_zones.push_back({static_cast<unsigned char*>(bytes), count});
}

}  // namespace simt
