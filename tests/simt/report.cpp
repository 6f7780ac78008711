// Options, counters, and what failures say.
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "simt/sanitizers.hpp"
#include "simt/scheduler.hpp"

extern uint3 blockIdx;

namespace simt {
namespace {

void apply_seed(options& o, std::uint64_t seed) {
    o.schedule = seed == 0 ? order::forward : seed == 1 ? order::reverse : order::random;
    o.seed = seed;
}

options options_of_environment() {
    options o;
    const char* seed = std::getenv("SEKV_SIMT_SEED");
    apply_seed(o, seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10));
    return o;
}

}  // namespace

options& current_options() {
    static options o = options_of_environment();
    return o;
}

void set_seed(std::uint64_t seed) { apply_seed(current_options(), seed); }

std::string schedule_name() {
    const options& o = current_options();
    if (o.schedule == order::forward) return "forward schedule (SEKV_SIMT_SEED=0)";
    if (o.schedule == order::reverse) return "reverse schedule (SEKV_SIMT_SEED=1)";
    return "random schedule (SEKV_SIMT_SEED=" + std::to_string(o.seed) + ")";
}

counters& work_done() {
    static counters c;
    return c;
}

namespace detail {
namespace {

std::string triple(const uint3& v) { return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")"; }

std::string state_of(const thread& t) {
    if (t.now == status::done) return "exited";
    if (t.now == status::fresh || t.now == status::ready) return "can run";
    std::ostringstream text;
    text << "in " << describe(t.where);
    if (t.now == status::at_warp) {
        const warp& w = the_engine().warps[static_cast<std::size_t>(t.id / warp_lanes)];
        text << std::hex << ", mask " << w.mask[static_cast<std::size_t>(t.id % warp_lanes)] << ", arrived " << w.arrived;
    }
    return text.str();
}

}  // namespace

std::string describe(const site& where) {
    const char* slash = std::strrchr(where.file, '/');
    return std::string(where.what) + " at " + (slash != nullptr ? slash + 1 : where.file) + ":" + std::to_string(where.line);
}

std::string describe_block() { return "block " + triple(blockIdx); }

std::string describe_waiters() {
    const engine& e = the_engine();
    std::vector<std::pair<std::string, std::pair<int, int>>> kinds;  // state, how many, the first
    for (int i = 0; i < e.count; ++i) {
        const std::string state = state_of(e.threads[static_cast<std::size_t>(i)]);
        auto known = kinds.begin();
        while (known != kinds.end() && known->first != state) ++known;
        if (known == kinds.end())
            kinds.push_back({state, {1, i}});
        else
            ++known->second.first;
    }
    std::string text;
    for (const auto& [state, seen] : kinds)
        text += "\n    " + std::to_string(seen.first) + " thread(s), the first is " + std::to_string(seen.second) + ": " + state;
    return text;
}

void fail(const std::string& message) {
    const ignore_races quiet;
    const engine& e = the_engine();
    std::string text = "simt: " + message;
    if (e.current != nullptr) text += " [thread " + triple(e.current->index) + " of " + describe_block() + "]";
    throw error(text + "; " + schedule_name());
}

void fail_index(std::int64_t index, std::int64_t size) { fail("index " + std::to_string(index) + " of a shared array of " + std::to_string(size)); }

}  // namespace detail
}  // namespace simt
