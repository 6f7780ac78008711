#include "simt/scheduler.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "simt/sanitizers.hpp"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace simt::detail {
namespace {

struct abandoned {};  // unwinds the stacks of the threads that a failure leaves waiting

engine& E = *new engine;
counters& work = work_done();
const options& rules = current_options();

void pass_barrier() {
    const thread* first = nullptr;
    for (int i = 0; i < E.count; ++i) {
        const thread& t = E.threads[static_cast<std::size_t>(i)];
        if (t.now != status::at_barrier) continue;
        if (first == nullptr) first = &t;
        const bool same = t.where.line == first->where.line && std::strcmp(t.where.file, first->where.file) == 0;
        if (!same) fail("threads of one block meet at different barriers in " + describe_block() + describe_waiters());
    }
    if (E.live != E.count) fail("threads have exited before a barrier of " + describe_block() + describe_waiters());
    E.voted = 0;
    for (int i = 0; i < E.count; ++i) {
        thread& t = E.threads[static_cast<std::size_t>(i)];
        E.voted += t.predicate ? 1 : 0;
        t.now = status::ready;
        E.ready.insert(i);
    }
    E.waiting = 0;
    E.spins = 0;
    ++E.generation;
    ++work.barriers;
}

int pick() {
    switch (rules.schedule) {
        case order::forward:
            return E.ready.lowest();
        case order::reverse:
            return E.ready.highest();
        case order::random:
            return E.ready.near(draw(), (E.count + 63) / 64);
    }
    return -1;
}

/// Whose turn it is; null when the block is over or has failed.
thread* next_thread() {
    if (E.failure) return nullptr;
    int id = pick();
    if (id < 0 && E.live != 0) {
        try {
            if (E.waiting != E.live) fail("threads wait for each other in " + describe_block() + describe_waiters());
            pass_barrier();
        } catch (...) {
            E.failure = std::current_exception();
            return nullptr;
        }
        id = pick();
    }
    if (id < 0) return nullptr;
    E.ready.erase(id);
    ++work.steps;
    return &E.threads[static_cast<std::size_t>(id)];
}

void make_current(thread& t) {
    E.current = &t;
    threadIdx = t.index;
}

void exit_thread(thread& t) {
    t.now = status::done;
    --E.live;
    E.spins = 0;
    E.warps[static_cast<std::size_t>(t.id / warp_lanes)].exited |= 1u << (t.id % warp_lanes);
}

void run_thread(thread& t) {
    try {
        tsan_acquire(&E.start_order);
        E.kernel(E.arguments);
        if (copies_pending(t.id)) fail("a thread exits while its cp.async copies are on their way");
    } catch (const abandoned&) {
    } catch (...) {
        if (!E.failure) E.failure = std::current_exception();
    }
    tsan_release(&E.end_order);
    exit_thread(t);
}

void thread_loop();

/// The stack for a thread that starts. Under ThreadSanitizer each thread has its own, and neighbouring blocks use different sets, so that nothing orders them.
fiber& stack_for(const thread& t) {
    if (SIMT_TSAN) return *E.fibers[E.block_number & 1][static_cast<std::size_t>(t.id)];
    if (E.idle.empty()) {
        E.fibers[0].push_back(std::make_unique<fiber>(rules.stack_bytes, &thread_loop));
        return *E.fibers[0].back();
    }
    fiber* f = E.idle.back();
    E.idle.pop_back();
    return *f;
}

/// From `me`, whose thread waits or is done, to the next thread, or to the launcher.
void hand_over(fiber& me, thread* next) {
    fiber* to = &E.launcher;
    E.current = nullptr;
    if (next != nullptr) {
        if (next->now == status::fresh) {
            next->now = status::ready;
            next->stack = &stack_for(*next);
        }
        to = next->stack;
        make_current(*next);
    }
    E.running = to;
    to->resume_from(me);
}

/// Bottom of every stack: runs threads from start to end. A thread that never waits costs no change of stack.
void thread_loop() {
    fiber::arrived();
    fiber& me = *E.running;
    for (;;) {
        run_thread(*E.current);
        thread* next = next_thread();
        if (!SIMT_TSAN && next != nullptr && next->now == status::fresh) {
            next->now = status::ready;
            next->stack = &me;
            make_current(*next);
            continue;
        }
        if (!SIMT_TSAN) E.idle.push_back(&me);
        hand_over(me, next);
    }
}

/// Lets others run until the current thread's turn comes again.
void wait_turn() {
    thread* self = E.current;
    thread* next = next_thread();
    if (next == self) return;
    hand_over(*self->stack, next);
    if (E.unwinding) throw abandoned{};
}

/// After a failure: every thread that has begun throws from where it waits.
void unwind_threads() {
    E.unwinding = true;
    for (int i = 0; i < E.count; ++i) {
        thread& t = E.threads[static_cast<std::size_t>(i)];
        if (t.now == status::done || t.now == status::fresh) continue;
        make_current(t);
        E.running = t.stack;
        t.stack->resume_from(E.launcher);
    }
    E.unwinding = false;
    E.current = nullptr;
    E.ready.clear();
}

void begin_block() {
    E.live = E.count;
    E.waiting = 0;
    E.spins = 0;
    for (auto& w : E.warps) w.exists = w.exited = w.arrived = 0;
    for (int i = 0; i < E.count; ++i) {
        thread& t = E.threads[static_cast<std::size_t>(i)];
        const auto n = static_cast<unsigned>(i);
        t.id = i;
        t.now = status::fresh;
        t.stack = nullptr;
        t.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / (blockDim.x * blockDim.y)};
        E.warps[static_cast<std::size_t>(i / warp_lanes)].exists |= 1u << (i % warp_lanes);
        E.ready.insert(i);
    }
}

void run_block(std::size_t shared) {
    open_shared(shared);
    begin_block();
    tsan_release(&E.start_order);
    if (thread* first = next_thread()) hand_over(E.launcher, first);
    if (E.failure) unwind_threads();
    ++E.block_number;
    ++work.blocks;
    work.threads += static_cast<std::uint64_t>(E.count);
    if (!E.failure) check_shared();
}

void make_stacks() {
    if (!SIMT_TSAN) return;
    for (auto& set : E.fibers)
        while (static_cast<int>(set.size()) < E.count) set.push_back(std::make_unique<fiber>(rules.stack_bytes, &thread_loop));
}

std::vector<unsigned> block_order(unsigned blocks) {
    std::vector<unsigned> ids(blocks);
    std::iota(ids.begin(), ids.end(), 0u);
    if (rules.schedule == order::reverse) std::reverse(ids.begin(), ids.end());
    if (rules.schedule == order::random)
        for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[draw() % i]);
    return ids;
}

void count_spin(const site* where) {
    if (++E.spins <= rules.most_spins) return;
    E.spins = 0;
    fail("watchdog: " + std::to_string(rules.most_spins) + " atomics or warp operations without progress" +
         (where != nullptr ? " at " + describe(*where) : ""));
}

}  // namespace

engine& the_engine() { return E; }

int ready_set::lowest(int from) const {
    for (int i = from >> 6; i < static_cast<int>(words_.size()); ++i) {
        std::uint64_t word = words_[static_cast<std::size_t>(i)];
        if (i == from >> 6) word &= ~0ull << (from & 63);
        if (word != 0) return i * 64 + std::countr_zero(word);
    }
    return -1;
}

int ready_set::highest() const {
    for (int i = static_cast<int>(words_.size()) - 1; i >= 0; --i)
        if (words_[static_cast<std::size_t>(i)] != 0) return i * 64 + 63 - std::countl_zero(words_[static_cast<std::size_t>(i)]);
    return -1;
}

int ready_set::near(std::uint64_t drawn, int words) const {
    const int from = static_cast<int>(drawn % static_cast<std::uint64_t>(words * 64));
    const int id = lowest(from);
    return id >= 0 ? id : lowest();
}

void run(dim3 grid, dim3 block, std::size_t shared, body kernel, const void* arguments) {
    if (E.active) throw error("simt: a kernel is launched while another runs");
    const std::uint64_t threads = static_cast<std::uint64_t>(block.x) * block.y * block.z;
    if (threads < 1 || threads > most_threads) throw error("simt: a block of " + std::to_string(threads) + " threads; 1 to 1024 are possible");
    if (shared > rules.most_shared)
        throw error("simt: " + std::to_string(shared) + " bytes of shared memory; a block has at most " + std::to_string(rules.most_shared));
    E.active = true;
    E.failure = nullptr;
    E.kernel = kernel;
    E.arguments = arguments;
    E.count = static_cast<int>(threads);
    E.draws = rules.seed * 0x9e3779b97f4a7c15ull | 1;
    gridDim = grid;
    blockDim = block;
    E.launcher.adopt_current();
    try {
        make_stacks();
        forget_copies(E.count);
        for (const unsigned b : block_order(grid.x * grid.y * grid.z)) {
            blockIdx = {b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y)};
            run_block(shared);
            if (E.failure) break;
        }
    } catch (...) {
        E.failure = std::current_exception();
    }
    close_shared();
    forget_copies(E.count);
    E.ready.clear();
    E.active = false;
    tsan_acquire(&E.end_order);
    if (E.failure) std::rethrow_exception(std::exchange(E.failure, nullptr));
}

int block_barrier_count(bool predicate, site where) {
    if (E.current == nullptr) fail(describe(where) + " outside a kernel");
    thread& t = *E.current;
    const unsigned parity = E.generation & 1;
    t.now = status::at_barrier;
    t.where = where;
    t.predicate = predicate;
    ++E.waiting;
    tsan_release(&E.barrier_order[parity]);
    wait_turn();
    tsan_acquire(&E.barrier_order[parity]);
    return E.voted;
}

void block_barrier(site where) { block_barrier_count(false, where); }

namespace {

void check_lanes(const warp& w, unsigned present, unsigned mask, warp_function together, const site& where) {
    for (unsigned rest = present; rest != 0; rest &= rest - 1) {
        const auto lane = static_cast<std::size_t>(std::countr_zero(rest));
        if (w.mask[lane] != mask) fail(describe(where) + ": lanes of one operation pass different masks");
        if (w.together[lane] != together || w.where[lane].line != where.line) fail(describe(where) + " meets " + describe(w.where[lane]) + " in one warp");
    }
}

void join_orders(warp& w, unsigned present) {
    for (unsigned rest = present; rest != 0; rest &= rest - 1) tsan_acquire(&w.order[static_cast<std::size_t>(std::countr_zero(rest))]);
    for (unsigned rest = present; rest != 0; rest &= rest - 1) tsan_release(&w.order[static_cast<std::size_t>(std::countr_zero(rest))]);
}

void release_lanes(warp& w, int first, unsigned present, const thread& last) {
    w.arrived &= ~present;
    for (unsigned rest = present; rest != 0; rest &= rest - 1) {
        thread& t = E.threads[static_cast<std::size_t>(first + std::countr_zero(rest))];
        if (&t == &last) continue;
        t.now = status::ready;
        E.ready.insert(t.id);
    }
}

}  // namespace

void warp_collective(unsigned mask, void* argument, warp_function together, site where, bool order_memory) {
    if (E.current == nullptr) fail(describe(where) + " outside a kernel");
    thread& t = *E.current;
    const auto lane = static_cast<std::size_t>(t.id % warp_lanes);
    warp& w = E.warps[static_cast<std::size_t>(t.id / warp_lanes)];
    if ((mask >> lane & 1) == 0) fail(describe(where) + ": the calling lane is not in its mask");
    const unsigned present = mask & w.exists;  // a partial last warp: the hardware takes no notice of lanes without a thread
    if ((present & w.exited) != 0) fail(describe(where) + ": the mask names a lane that has exited");
    w.mask[lane] = mask;
    w.argument[lane] = argument;
    w.together[lane] = together;
    w.where[lane] = where;
    w.arrived |= 1u << lane;
    ++work.warp_operations;
    count_spin(&where);
    if (order_memory) tsan_release(&w.order[lane]);
    if ((w.arrived & present) != present) {
        t.now = status::at_warp;
        t.where = where;
        wait_turn();
        if (order_memory) tsan_acquire(&w.order[lane]);
        return;
    }
    check_lanes(w, present, mask, together, where);
    if (order_memory && SIMT_TSAN) join_orders(w, present);
    {
        const ignore_races quiet;
        together(w.argument.data(), present);
    }
    release_lanes(w, t.id - static_cast<int>(lane), present, t);
    if (rules.schedule != order::random) return;
    E.ready.insert(t.id);
    t.now = status::ready;
    wait_turn();
}

int lane_id() {
    if (E.current == nullptr) fail("a warp operation outside a kernel");
    return E.current->id % warp_lanes;
}

void sleep() {
    if (E.current == nullptr || E.unwinding) return;
    thread& self = *E.current;
    count_spin(nullptr);
    // Others first, also where the order would choose the same thread again.
    thread* next = nullptr;
    int id = E.ready.lowest(self.id);
    if (id < 0) id = E.ready.lowest();
    E.ready.insert(self.id);
    if (id < 0) {
        E.ready.erase(self.id);
        return;
    }
    E.ready.erase(id);
    ++work.steps;
    next = &E.threads[static_cast<std::size_t>(id)];
    self.now = status::ready;
    hand_over(*self.stack, next);
    if (E.unwinding) throw abandoned{};
}

void preempt() {
    if (E.current == nullptr || E.unwinding) return;
    count_spin(nullptr);
    const bool random = rules.schedule == order::random && (draw() & 1) != 0;
    if (random || E.spins % 64 == 63) sleep();
}

std::uint64_t draw() {
    E.draws ^= E.draws << 13;
    E.draws ^= E.draws >> 7;
    E.draws ^= E.draws << 17;
    return E.draws;
}

}  // namespace simt::detail
