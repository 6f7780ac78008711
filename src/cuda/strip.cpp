#include "src/cuda/strip.hpp"

namespace sekv::cuda {

strip::strip(transfer& copies, std::byte* memory, std::size_t slot_bytes, std::size_t slots, cudaStream_t owner) : copies_(copies), memory_(memory), slot_bytes_(slot_bytes), slots_(slots) {
    for (auto& s : slots_) s.released.record(owner);  // what the memory was before ends there
}

strip::state& strip::at(std::size_t slot, phase expected, const char* call) {
    static constexpr const char* names[] = {"released", "being filled", "being read"};
    if (slot >= slots_.size()) throw invalid_argument(std::string(call) + " names slot " + std::to_string(slot) + " of a strip that has " + std::to_string(slots_.size()) + " slots.");
    if (slots_[slot].now != expected)
        throw state_error(std::string(call) + " needs slot " + std::to_string(slot) + " of the strip to be " + names[static_cast<int>(expected)] + ", but it is " +
                          names[static_cast<int>(slots_[slot].now)] + "; call acquire, prefetch, ready and release in this order.");
    return slots_[slot];
}

std::byte* strip::acquire(std::size_t slot, const cudaStream_t* writer) {
    auto& s = at(slot, phase::released, "acquire");
    s.released.order(copies_.copy_stream());
    if (writer != nullptr) s.released.order(*writer);
    s.now = phase::filling;
    return this->slot(slot);
}

void strip::prefetch(std::size_t slot, std::span<const page_range> pages) {
    (void)at(slot, phase::filling, "prefetch");
    for (const auto& p : pages)
        if (p.to > slot_bytes_ || p.bytes > slot_bytes_ - p.to)
            throw invalid_argument("A page of " + std::to_string(p.bytes) + " bytes at byte " + std::to_string(p.to) + " passes the end of a strip's slot of " + std::to_string(slot_bytes_) + " bytes.");
    for (std::size_t i = 0; i < pages.size();) {
        auto run = pages[i];
        for (++i; i < pages.size() && pages[i].from == run.from + run.bytes && pages[i].to == run.to + run.bytes; ++i) run.bytes += pages[i].bytes;
        copies_.to_device(this->slot(slot) + run.to, run.from, run.bytes, nullptr, lane::alone);
    }
}

void strip::ready(std::size_t slot, cudaStream_t reader) {
    auto& s = at(slot, phase::filling, "ready");
    s.filled.record(copies_.copy_stream());
    s.filled.order(reader);
    s.now = phase::reading;
}

void strip::release(std::size_t slot, cudaStream_t reader) {
    auto& s = at(slot, phase::reading, "release");
    s.released.record(reader);
    s.now = phase::released;
}

}  // namespace sekv::cuda
