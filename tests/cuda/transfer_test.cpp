// Copies, their order, the strip, and the backend's memory resource.
#include "src/cuda/transfer.hpp"

#include <gmock/gmock.h>

#include <thread>

#include "cuda/memory_fixtures.hpp"
#include "oracle/random.hpp"
#include "src/cuda/resource.hpp"
#include "src/cuda/strip.hpp"

namespace sekv::cuda {
namespace {

constexpr std::size_t kib = 1024;

class Transfers : public in_every_mode {
protected:
    pinned_arena arena_{{.slab_bytes = 64 * kib, .limit = 1024 * kib}};
    transfer copies_{arena_, {.chunk_bytes = kib, .timed_bytes = 512}};
    owned_stream compute_;
    static constexpr std::size_t most_ = 16 * kib;
    device_bytes x_{most_}, y_{most_};
    std::byte* pinned_ = arena_.allocate(most_);
    ~Transfers() override {
        compute_.synchronize();
        arena_.free(pinned_, {});
    }
};
INSTANTIATE_TEST_SUITE_P(Modes, Transfers, testing::ValuesIn(runtime_modes()), name_of_mode);

TEST_P(Transfers, MovePinnedAndPageableBytesBothWaysInEveryLane) {
    unsigned seed = 0;
    std::uint64_t down = 0, up = 0, across = 0, staged = 0;
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{511}, kib, 2 * kib, 3 * kib + 17, most_}) {
        for (const auto l : {lane::in_line, lane::beside}) {
            for (const bool pageable : {false, true}) {
                SCOPED_TRACE(std::to_string(bytes) + " bytes, lane " + std::to_string(static_cast<int>(l)) + (pageable ? ", pageable" : ", pinned"));
                auto source = numbered(bytes, ++seed);
                const auto expected = source;
                if (!pageable) std::memcpy(pinned_, source.data(), bytes);
                copies_.to_device(x_.data(), pageable ? source.data() : pinned_, bytes, compute_.get(), l);
                if (pageable) source.assign(bytes, std::byte{0xee});  // it was read when the call returned
                copies_.on_device(y_.data(), x_.data(), bytes, compute_.get(), l);
                std::vector<std::byte> back(bytes, std::byte{0xdd});
                const auto t = copies_.to_host(pageable ? back.data() : pinned_, y_.data(), bytes, compute_.get(), l);
                EXPECT_EQ(t == 0, l == lane::in_line);
                if (!pageable) {
                    copies_.wait(t);
                    EXPECT_TRUE(copies_.done(t));
                    compute_.synchronize();
                    back.assign(pinned_, pinned_ + bytes);
                }
                EXPECT_EQ(back, expected);
                down += bytes;
                up += bytes;
                across += bytes;
                staged += pageable ? 2 * bytes : 0;
            }
        }
    }
    const auto m = copies_.metrics();
    EXPECT_EQ(m.bytes, (std::array<std::uint64_t, 3>{down, up, across}));
    EXPECT_EQ(m.copies, (std::array<std::uint64_t, 3>{24, 24, 24}));
    EXPECT_EQ(m.staged_bytes, staged);
}

TEST_P(Transfers, MoveRowsWithPitches) {
    const std::size_t to_pitch = 200;
    for (const std::size_t width : {std::size_t{1}, std::size_t{48}, std::size_t{130}}) {
        for (const std::size_t rows : {1, 2, 21, 64}) {
            for (const bool pageable : {false, true}) {
                SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(width) + (pageable ? ", pageable" : ", pinned"));
                const std::size_t from_pitch = width + 3;
                const auto source = numbered(rows * from_pitch, static_cast<unsigned>(width));
                std::memcpy(pinned_, source.data(), source.size());
                copies_.zero(x_.data(), most_, compute_.get());
                copies_.copy(direction::to_device, {x_.data(), pageable ? source.data() : pinned_, width, rows, to_pitch, from_pitch}, compute_.get());
                std::vector<std::byte> expected(rows * to_pitch), back(rows * to_pitch, std::byte{0});
                for (std::size_t r = 0; r < rows; ++r) std::memcpy(expected.data() + r * to_pitch, source.data() + r * from_pitch, width);
                compute_.synchronize();
                auto device = x_.read();
                device.resize(rows * to_pitch);
                EXPECT_EQ(device, expected);
                std::memset(pinned_, 0, back.size());
                copies_.copy(direction::to_host, {pageable ? back.data() : pinned_, x_.data(), width, rows, to_pitch, to_pitch}, compute_.get());
                compute_.synchronize();
                if (!pageable) back.assign(pinned_, pinned_ + back.size());
                EXPECT_EQ(back, expected);
            }
        }
    }
}

TEST_P(Transfers, RowsLongerThanAStagingBufferAreCut) {
    const std::size_t width = 2 * kib + 5, rows = 3, pitch = 2 * kib + 64;
    const auto source = numbered(rows * pitch, 5);
    copies_.copy(direction::to_device, {x_.data(), source.data(), width, rows, pitch, pitch}, compute_.get());
    std::vector<std::byte> back(rows * pitch);
    copies_.copy(direction::to_host, {back.data(), x_.data(), width, rows, pitch, pitch}, compute_.get());
    for (std::size_t r = 0; r < rows; ++r) EXPECT_EQ(std::memcmp(back.data() + r * pitch, source.data() + r * pitch, width), 0) << "row " << r;
}

TEST_P(Transfers, RefusePitchesBelowTheWidthAndIgnoreEmptyCopies) {
    EXPECT_THROW(copies_.copy(direction::to_device, {x_.data(), pinned_, 64, 2, 63, 64}, compute_.get()), invalid_argument);
    EXPECT_THROW(copies_.copy(direction::to_device, {x_.data(), pinned_, 64, 2, 64, 63}, compute_.get()), invalid_argument);
    EXPECT_EQ(copies_.to_device(x_.data(), pinned_, 0, compute_.get()), 0U);
    EXPECT_EQ(copies_.copy(direction::to_device, {x_.data(), pinned_, 64, 0, 64, 64}, compute_.get()), 0U);
    EXPECT_THROW(transfer(arena_, {.chunk_bytes = 0}), invalid_argument);
    EXPECT_THROW(transfer(arena_, {.chunk_bytes = 2048 * kib}), budget_error);
    EXPECT_EQ(copies_.metrics().bytes, (std::array<std::uint64_t, 3>{0, 0, 0}));
}

// compute writes, the copy stream reads, compute overwrites: the copy sees the first value.
TEST_P(Transfers, ACopyBesideComesAfterWhatTheStreamHeldAndBeforeWhatItGetsNext) {
    const std::size_t bytes = 4 * kib;
    for (int round = 0; round < 4; ++round) {
        check(cudaMemsetAsync(x_.data(), 0x10 + round, bytes, compute_.get()), "cudaMemsetAsync");
        const auto t = copies_.to_host(pinned_, x_.data(), bytes, compute_.get());
        check(cudaMemsetAsync(x_.data(), 0x20 + round, bytes, compute_.get()), "cudaMemsetAsync");
        compute_.synchronize();
        copies_.wait(t);
        EXPECT_EQ(std::vector<std::byte>(pinned_, pinned_ + bytes), pattern(bytes, static_cast<unsigned>(0x10 + round))) << "round " << round;
    }
}

TEST_P(Transfers, ACopyAheadIsWaitedForWhereItIsUsed) {
    const std::size_t bytes = 4 * kib;
    const pinned_bytes read(bytes);
    for (unsigned round = 0; round < 4; ++round) {
        std::memset(pinned_, static_cast<int>(0x30 + round), bytes);
        const auto t = copies_.to_device(x_.data(), pinned_, bytes, compute_.get(), lane::ahead);
        check(cudaMemsetAsync(y_.data(), 0, bytes, compute_.get()), "cudaMemsetAsync");
        copies_.order(t, compute_.get());
        enqueue(read.data(), x_.data(), bytes, cudaMemcpyDeviceToHost, compute_.get());
        compute_.synchronize();
        EXPECT_TRUE(read.all(0x30 + round));
    }
}

TEST_P(Transfers, AnOldTicketIsStillGood) {
    const std::size_t bytes = 64;
    std::vector<transfer::ticket> tickets;
    for (unsigned i = 0; i < 100; ++i) {
        std::memset(pinned_ + i * bytes, static_cast<int>(i), bytes);
        tickets.push_back(copies_.to_device(x_.data() + i * bytes, pinned_ + i * bytes, bytes, compute_.get(), lane::ahead));
    }
    const pinned_bytes read(bytes);
    for (const std::size_t i : {0, 50, 99}) {
        copies_.order(tickets[i], compute_.get());
        enqueue(read.data(), x_.data() + i * bytes, bytes, cudaMemcpyDeviceToHost, compute_.get());
        compute_.synchronize();
        EXPECT_TRUE(read.all(static_cast<unsigned>(i)));
    }
    copies_.wait(tickets.back());
    for (const auto t : tickets) EXPECT_TRUE(copies_.done(t));
}

TEST_P(Transfers, CountWaitsForStagingAndTimeBulkCopiesWithoutWaiting) {
    const auto source = numbered(most_, 9);
    copies_.to_device(x_.data(), source.data(), most_, compute_.get());
    for (int i = 0; i < 3; ++i) copies_.to_device(x_.data(), pinned_, 512, compute_.get());
    copies_.to_device(x_.data(), pinned_, 511, compute_.get());  // too small to be timed
    const auto waits = host_waits();
    std::thread([&] { EXPECT_LE(copies_.metrics().latency.count(), 4U); }).join();
    EXPECT_EQ(host_waits(), waits);
    compute_.synchronize();
    const auto m = copies_.metrics();
    EXPECT_EQ(m.latency.count() + m.untimed, 4U);
    EXPECT_EQ(m.untimed, 0U);
    EXPECT_LE(m.waits, most_ / kib);
}

TEST_P(Transfers, MoreBulkCopiesInFlightThanAreTimedAreCounted) {
    for (int i = 0; i < 100; ++i) copies_.to_device(x_.data(), pinned_, 1024, compute_.get(), lane::ahead);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const auto m = copies_.metrics();
    EXPECT_EQ(m.latency.count() + m.untimed, 100U);
    EXPECT_GE(m.latency.count(), 32U);
}

// Blocks of pages stream through two slots; a kernel (here a copy) reads each slot. Sizes are ragged, some pages neighbours.
TEST_P(Transfers, AStripFillsOneSlotWhileTheOtherIsRead) {
    constexpr std::size_t slot_bytes = 2 * kib, rounds = 7;
    oracle::draws random(99);
    const device_bytes memory(2 * slot_bytes), out(rounds * slot_bytes);
    auto* pages = arena_.allocate(rounds * slot_bytes);
    const auto content = numbered(rounds * slot_bytes, 77);
    std::memcpy(pages, content.data(), content.size());
    check(cudaMemsetAsync(out.data(), 0, rounds * slot_bytes, compute_.get()), "cudaMemsetAsync");
    check(cudaMemsetAsync(memory.data(), 0, 2 * slot_bytes, compute_.get()), "cudaMemsetAsync");  // what the strip's memory was before
    strip s(copies_, memory.data(), slot_bytes, 2, compute_.get());
    std::vector<std::byte> expected(rounds * slot_bytes);
    const auto waits = host_waits();
    for (std::size_t round = 0; round < rounds; ++round) {
        const std::size_t bytes = round + 1 == rounds ? 700 : slot_bytes;
        std::vector<page_range> ranges;
        for (std::size_t at = 0; at < bytes;) {
            const auto piece = std::min(bytes - at, 100 + random.below<std::size_t>(500));
            ranges.push_back({pages + round * slot_bytes + at, at, piece});
            at += piece;
        }
        std::reverse(ranges.begin() + static_cast<std::ptrdiff_t>(ranges.size() / 2), ranges.end());
        std::memcpy(expected.data() + round * slot_bytes, content.data() + round * slot_bytes, bytes);
        const auto slot = round % 2;
        auto* data = s.acquire(slot);
        EXPECT_EQ(data, memory.data() + slot * slot_bytes);
        s.prefetch(slot, ranges);
        s.ready(slot, compute_.get());
        enqueue(out.data() + round * slot_bytes, data, bytes, cudaMemcpyDeviceToDevice, compute_.get());
        s.release(slot, compute_.get());
    }
    EXPECT_EQ(host_waits(), waits) << "the host never waits for a slot";
    check(cudaStreamSynchronize(copies_.copy_stream()), "cudaStreamSynchronize");  // the copies first, as far as they may go
    compute_.synchronize();
    EXPECT_EQ(out.read(), expected);
    EXPECT_EQ(copies_.metrics().bytes[0], (rounds - 1) * slot_bytes + 700);
    arena_.free(pages, std::array{copies_.copy_stream()});
}

TEST_P(Transfers, AStripIsFilledByKernelsToo) {
    const device_bytes memory(2 * kib);
    const pinned_bytes read(kib);
    strip s(copies_, memory.data(), kib, 2, compute_.get());
    const auto writer = compute_.get();
    std::memset(pinned_, 0x77, kib);
    auto* data = s.acquire(1, &writer);
    check(cudaMemsetAsync(data, 0x66, kib / 2, writer), "cudaMemsetAsync");
    const page_range page{pinned_, kib / 2, kib / 2};
    s.prefetch(1, {&page, 1});
    s.ready(1, compute_.get());
    enqueue(read.data(), data, kib, cudaMemcpyDeviceToHost, compute_.get());
    s.release(1, compute_.get());
    compute_.synchronize();
    std::vector<std::byte> expected(kib, std::byte{0x77});
    std::fill_n(expected.begin(), kib / 2, std::byte{0x66});
    EXPECT_EQ(read.read(), expected);
}

TEST_P(Transfers, KernelsThatFillAStripWaitForThoseThatReadIt) {
    const device_bytes memory(kib);
    const pinned_bytes read(kib);
    const owned_stream fills;
    const auto writer = fills.get();
    strip s(copies_, memory.data(), kib, 1, compute_.get());
    std::memset(pinned_, 0x31, kib);
    auto* data = s.acquire(0);
    const page_range page{pinned_, 0, kib};
    s.prefetch(0, {&page, 1});
    s.ready(0, compute_.get());
    check(cudaStreamSynchronize(copies_.copy_stream()), "cudaStreamSynchronize");
    enqueue(read.data(), data, kib, cudaMemcpyDeviceToHost, compute_.get());
    s.release(0, compute_.get());
    s.acquire(0, &writer);
    check(cudaMemsetAsync(data, 0x32, kib, writer), "cudaMemsetAsync");
    fills.synchronize();
    compute_.synchronize();
    EXPECT_TRUE(read.all(0x31));
}

TEST_P(Transfers, AStripRefusesCallsOutOfOrder) {
    const device_bytes memory(2 * kib);
    strip s(copies_, memory.data(), kib, 2, compute_.get());
    const page_range page{pinned_, 0, kib}, beyond{pinned_, 1, kib}, far{pinned_, 2 * kib, 0};
    EXPECT_THROW(s.prefetch(0, {&page, 1}), state_error);
    EXPECT_THROW(s.ready(0, compute_.get()), state_error);
    EXPECT_THROW(s.release(0, compute_.get()), state_error);
    EXPECT_THROW(s.acquire(2), invalid_argument);
    s.acquire(0);
    EXPECT_THROW(s.acquire(0), state_error);
    EXPECT_THROW(s.prefetch(0, {&beyond, 1}), invalid_argument);
    EXPECT_THROW(s.prefetch(0, {&far, 1}), invalid_argument);
    s.ready(0, compute_.get());
    EXPECT_THROW(s.ready(0, compute_.get()), state_error);
    s.release(0, compute_.get());
    EXPECT_EQ(copies_.metrics().bytes[0], 0U);
}

class Resources : public in_every_mode {
protected:
    owned_stream first_, second_;
    cuda_resource resource_{first_.get(), {.device = {.slab_bytes = 64 * kib, .limit = 64 * kib}, .host = {.slab_bytes = 64 * kib, .limit = 64 * kib}, .copies = {.chunk_bytes = kib}}};
    static constexpr std::size_t bytes_ = 4 * kib;
    std::byte* take(tier t, std::size_t bytes = bytes_) { return static_cast<std::byte*>(resource_.allocate(t, bytes, 64)); }
    void give(tier t, std::byte* p) { resource_.deallocate(t, p, bytes_, 64); }
    [[nodiscard]] static std::vector<std::byte> view(const std::byte* p, std::size_t n = bytes_) { return {p, p + n}; }
};
INSTANTIATE_TEST_SUITE_P(Modes, Resources, testing::ValuesIn(runtime_modes()), name_of_mode);

TEST_P(Resources, CopyBetweenAllTiersInOrder) {
    auto *a = take(tier::host), *b = take(tier::host), *x = take(tier::device), *y = take(tier::device);
    const auto content = numbered(bytes_, 3);
    std::memcpy(a, content.data(), bytes_);
    resource_.zero(tier::device, y, bytes_);
    resource_.copy(x, tier::device, a, tier::host, bytes_);
    resource_.copy_rows(y, tier::device, 64, x, tier::device, 64, 32, bytes_ / 64);
    resource_.copy(b, tier::host, y, tier::device, bytes_);
    auto* c = take(tier::host);
    resource_.zero(tier::host, c, bytes_);
    resource_.copy(c, tier::host, b, tier::host, bytes_);  // waits for b
    auto expected = content;
    for (std::size_t i = 0; i < bytes_; ++i)
        if (i % 64 >= 32) expected[i] = std::byte{0};
    EXPECT_EQ(view(c), expected);
    resource_.copy(a, tier::host, x, tier::device, bytes_);
    resource_.zero(tier::host, a, bytes_);  // not before the copy into it
    resource_.synchronize();
    EXPECT_EQ(view(a), pattern(bytes_, 0));
    std::vector<std::byte> pageable(bytes_);
    resource_.copy(pageable.data(), tier::host, x, tier::device, bytes_);
    EXPECT_EQ(pageable, content);
    for (auto* p : {a, b, c}) give(tier::host, p);
    for (auto* p : {x, y}) give(tier::device, p);
}

TEST_P(Resources, StreamsFollowEachOther) {
    auto *a = take(tier::host), *x = take(tier::device);
    std::memset(a, 0x19, bytes_);
    resource_.zero(tier::device, x, bytes_);
    resource_.copy(x, tier::device, a, tier::host, bytes_);
    resource_.use(second_.get());
    EXPECT_EQ(resource_.stream(), second_.get());
    auto* b = take(tier::host);
    resource_.zero(tier::host, b, bytes_);
    resource_.copy(b, tier::host, x, tier::device, bytes_);
    second_.synchronize();
    EXPECT_EQ(view(b), pattern(bytes_, 0x19));
    EXPECT_THROW(resource_.forget(second_.get()), state_error);
    resource_.forget(first_.get());
    resource_.use(first_.get());
    give(tier::device, x);
    for (auto* p : {a, b}) give(tier::host, p);
}

// The page is written on the stream, then beside it, then on it again; on the stream itself nothing waits for what is beside.
TEST_P(Resources, WorkBesideComesAfterWhatIsThereAndBeforeWhatTheResourceEnqueuesNext) {
    auto *a = take(tier::host), *x = take(tier::device), *early = take(tier::host), *late = take(tier::host);
    for (const unsigned round : {1U, 2U}) {
        resource_.synchronize();
        const auto content = numbered(bytes_, round);
        std::memcpy(a, content.data(), bytes_);
        resource_.copy(x, tier::device, a, tier::host, bytes_);
        const auto beside = resource_.beside();
        EXPECT_NE(beside, resource_.stream());
        enqueue(early, x, bytes_, cudaMemcpyDeviceToHost, beside);
        enqueue(x + bytes_ / 2, x, bytes_ / 2, cudaMemcpyDeviceToDevice, beside);
        first_.synchronize();
        if (round == 1) {
            resource_.copy(late, tier::host, x, tier::device, bytes_);
            resource_.zero(tier::device, x, bytes_);
        } else {
            enqueue(late, x, bytes_, cudaMemcpyDeviceToHost, resource_.joined());
        }
        resource_.synchronize();
        EXPECT_EQ(view(early), content);
        EXPECT_TRUE(std::equal(content.begin(), content.begin() + bytes_ / 2, late + bytes_ / 2)) << "round " << round;
    }
    give(tier::device, x);
    for (auto* p : {a, early, late}) give(tier::host, p);
}

TEST_P(Resources, WhatWorkBesideReadsIsNotGivenToOthers) {
    auto *page = take(tier::host), *x = take(tier::device), *seen = take(tier::host);
    std::memset(page, 0x21, bytes_);
    enqueue(x, page, bytes_, cudaMemcpyHostToDevice, resource_.beside());
    give(tier::host, page);
    std::vector<std::byte*> others;  // all that there is
    for (auto* p = take(tier::host); p != nullptr; p = take(tier::host)) std::memset(others.emplace_back(p), 0x22, bytes_);
    EXPECT_GT(others.size(), 3U);
    resource_.copy(seen, tier::host, x, tier::device, bytes_);
    resource_.synchronize();
    EXPECT_EQ(view(seen), pattern(bytes_, 0x21));
    give(tier::device, x);
    give(tier::host, seen);
    for (auto* p : others) give(tier::host, p);
}

// Pages are freed while copies on both streams still use them, and what takes their place is written by the host at once.
TEST_P(Resources, WhatIsFreedInFlightIsNotOverwritten) {
    constexpr int pages = 40;
    const pinned_bytes results(pages * bytes_);
    const owned_stream* streams[] = {&first_, &second_};
    oracle::draws random(5);
    for (int page = 0; page < pages; ++page) {
        resource_.use(streams[random.below(2)]->get());
        auto *a = take(tier::host), *x = take(tier::device);
        ASSERT_TRUE(a != nullptr && x != nullptr);
        resource_.zero(tier::host, a, bytes_);
        resource_.zero(tier::device, x, bytes_);
        std::memset(a, page + 1, bytes_);
        const auto t = resource_.copies().to_device(x, a, bytes_, resource_.stream(), lane::ahead);
        resource_.copies().order(t, resource_.stream());
        enqueue(results.data() + page * static_cast<int>(bytes_), x, bytes_, cudaMemcpyDeviceToHost, resource_.stream());
        give(tier::host, a);
        give(tier::device, x);
    }
    resource_.synchronize();
    for (int page = 0; page < pages; ++page)
        EXPECT_EQ(view(results.data() + page * static_cast<int>(bytes_)), pattern(bytes_, static_cast<unsigned>(page + 1))) << "page " << page;
}

TEST_P(Resources, RefuseWhatDoesNotFit) {
    EXPECT_EQ(take(tier::device, 65 * kib), nullptr);
    EXPECT_EQ(take(tier::host, 65 * kib), nullptr);
    EXPECT_THROW((void)resource_.allocate(tier::device, 64, 512), invalid_argument);
    EXPECT_EQ(resource_.pool().usage().held, 0U);
    resource_.deallocate(tier::device, nullptr, 0, 64);
}

TEST_P(Resources, ServeTheLedger) {
    auto shared = std::make_shared<cuda_resource>(first_.get(), resource_options{.device = {.slab_bytes = 64 * kib}, .host = {.slab_bytes = 64 * kib}, .copies = {.chunk_bytes = kib}});
    auto ledger = std::make_shared<memory>(shared, 32 * kib, 32 * kib);
    {
        const auto device = ledger->allocate(tier::device, kind::exact, 5000);
        const auto host = ledger->allocate(tier::host, kind::lines, 5000);
        shared->copy(host.data(), tier::host, device.data(), tier::device, 5000);
        shared->synchronize();
        EXPECT_EQ(view(host.data(), 5000), pattern(5000, 0)) << "buffers start as zeros";
        EXPECT_THROW((void)ledger->allocate(tier::device, kind::exact, 30 * kib), budget_error);
        EXPECT_EQ(shared->pool().usage().asked, 5000 + buffer::padding);
    }
    EXPECT_EQ(shared->pool().usage().held, 0U);
}

}  // namespace
}  // namespace sekv::cuda
