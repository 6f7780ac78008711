#include "sekv/exec/memory.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "oracle/random.hpp"

namespace sekv {
namespace {

constexpr std::uint32_t seed = 20240810;

// Counts what is out, and checks that everything comes back as it went.
class counting_resource final : public memory_resource {
public:
    enum class mood { gives, returns_null, throws };
    mood now = mood::gives;
    std::map<void*, std::pair<tier, std::size_t>> out;

    void* allocate(tier t, std::size_t bytes, std::size_t alignment) override {
        if (now == mood::returns_null) return nullptr;
        if (now == mood::throws) throw std::bad_alloc();
        void* p = ::operator new(bytes, std::align_val_t{alignment});
        std::memset(p, 0xa5, bytes);
        out[p] = {t, bytes};
        return p;
    }
    void deallocate(tier t, void* p, std::size_t bytes, std::size_t alignment) noexcept override {
        EXPECT_EQ(out.at(p), std::make_pair(t, bytes));
        out.erase(p);
        ::operator delete(p, std::align_val_t{alignment});
    }
};

TEST(Memory, GivesZeroedAlignedPaddedBytes) {
    const auto mem = std::make_shared<memory>(std::make_shared<counting_resource>(), 1000, 1000);
    const auto b = mem->allocate(tier::host, kind::lines, 100);
    EXPECT_EQ(b.size(), 100U);
    EXPECT_EQ(b.where(), tier::host);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data()) % buffer::alignment, 0U);
    for (std::size_t i = 0; i < 100 + buffer::padding; ++i) EXPECT_EQ(b.data()[i], std::byte{0});
    const auto none = mem->allocate(tier::host, kind::lines, 0);
    EXPECT_EQ(none.size(), 0U);
    EXPECT_EQ(mem->used().total(tier::host), 100U);
}

TEST(Memory, BudgetsAreHardAndSeparate) {
    const auto mem = std::make_shared<memory>(make_heap_resource(), 1000, 500);
    const auto a = mem->allocate(tier::device, kind::exact, 600);
    try {
        (void)mem->allocate(tier::device, kind::sketch, 401);
        FAIL() << "401 bytes were taken from 400";
    } catch (const budget_error& e) {
        EXPECT_EQ(e.requested(), 401U);
        EXPECT_EQ(e.available(), 400U);
        EXPECT_EQ(e.code(), errc::budget);
    }
    EXPECT_EQ(mem->used().total(tier::device), 600U);
    const auto b = mem->allocate(tier::device, kind::sketch, 400);
    const auto c = mem->allocate(tier::host, kind::sketch, 500);
    EXPECT_EQ(mem->available(tier::device), 0U);
    EXPECT_THROW((void)mem->allocate(tier::host, kind::exact, 1), budget_error);
    EXPECT_THROW((void)mem->allocate(tier::device, kind::exact, ~std::size_t{0}), budget_error);
}

TEST(Memory, ARequestThatPaddingWouldOverflowIsRefused) {
    const auto resource = std::make_shared<counting_resource>();
    const auto mem = std::make_shared<memory>(resource, memory::unlimited, memory::unlimited);
    EXPECT_THROW((void)mem->allocate(tier::device, kind::exact, ~std::size_t{0} - 8), budget_error);
    EXPECT_TRUE(resource->out.empty());
    EXPECT_EQ(mem->used(), usage{});
}

TEST(Memory, AResourceWithoutMemoryIsABudgetError) {
    const auto resource = std::make_shared<counting_resource>();
    const auto mem = std::make_shared<memory>(resource, memory::unlimited, memory::unlimited);
    for (const auto mood : {counting_resource::mood::returns_null, counting_resource::mood::throws}) {
        resource->now = mood;
        EXPECT_THROW((void)mem->allocate(tier::device, kind::exact, 64), budget_error);
        EXPECT_EQ(mem->used(), usage{});
        EXPECT_EQ(mem->peak(tier::device), 0U);
    }
}

TEST(Memory, LedgerIsExactAfterAnyMoves) {
    SCOPED_TRACE(seed);
    oracle::draws random(seed);
    const auto resource = std::make_shared<counting_resource>();
    auto mem = std::make_shared<memory>(resource, 20000, memory::unlimited);
    std::vector<buffer> held(12);
    std::vector<kind> kinds(12, kind::exact);
    std::uint64_t peak = 0;
    for (std::int64_t i = 0; i < oracle::iterations(20000); ++i) {
        const auto a = random.below(held.size()), b = random.below(held.size());
        switch (random.below(4)) {
            case 0: {
                const auto k = static_cast<kind>(random.below(static_cast<int>(kind_count)));
                try {
                    held[a] = mem->allocate(random.below(2) == 0 ? tier::device : tier::host, k, random.below<std::size_t>(4000));
                    kinds[a] = k;
                } catch (const budget_error& e) {
                    EXPECT_GT(e.requested(), e.available());
                }
                break;
            }
            case 1:
                held[a] = std::move(held[b]);  // a itself among them
                kinds[a] = kinds[b];
                break;
            case 2: {
                buffer taken(std::move(held[a]));
                break;
            }
            default:
                std::swap(held[a], held[b]);
                std::swap(kinds[a], kinds[b]);
        }
        usage expected;
        for (std::size_t j = 0; j < held.size(); ++j) expected.at(held[j].where(), kinds[j]) += held[j].size();
        ASSERT_EQ(mem->used(), expected) << "after step " << i;
        ASSERT_LE(mem->used().total(tier::device), 20000U);
        peak = std::max(peak, mem->used().total(tier::device));
    }
    EXPECT_GE(mem->peak(tier::device), peak);
    EXPECT_LE(mem->peak(tier::device), 20000U);
    held.clear();
    EXPECT_EQ(mem->used(), usage{});
    EXPECT_TRUE(resource->out.empty());
}

TEST(Memory, BuffersOutliveTheirMemory) {
    const auto resource = std::make_shared<counting_resource>();
    buffer b;
    {
        const auto mem = std::make_shared<memory>(resource, 100, 100);
        b = mem->allocate(tier::host, kind::exact, 10);
    }
    EXPECT_EQ(resource->out.size(), 1U);
    b = buffer();
    EXPECT_TRUE(resource->out.empty());
}

TEST(Memory, RequireAsksBeforeAnythingHappens) {
    const auto mem = std::make_shared<memory>(make_heap_resource(), 1000, 1000);
    const auto a = mem->allocate(tier::device, kind::exact, 900);
    EXPECT_NO_THROW(mem->require({100, 1000}, "a test"));
    EXPECT_THROW(mem->require({101, 0}, "a test"), budget_error);
    EXPECT_THROW(mem->require({0, 1001}, "a test"), budget_error);
    EXPECT_NO_THROW(mem->require({200, 0}, "a test", {100, 0}));
    EXPECT_THROW(mem->require({201, 0}, "a test", {100, 0}), budget_error);
    const auto free = std::make_shared<memory>(make_heap_resource(), memory::unlimited, memory::unlimited);
    const auto b = free->allocate(tier::device, kind::exact, 10);
    EXPECT_NO_THROW(free->require({memory::unlimited, memory::unlimited}, "a test", {5, 5}));
    try {
        mem->require({500, 0}, "a seal");
        FAIL();
    } catch (const budget_error& e) {
        EXPECT_NE(std::string(e.what()).find("a seal"), std::string::npos) << e.what();
        EXPECT_EQ(e.requested(), 500U);
        EXPECT_EQ(e.available(), 100U);
    }
}

TEST(Memory, NamesEveryTierAndKind) {
    EXPECT_STREQ(name_of(tier::device), "device");
    EXPECT_STREQ(name_of(tier::host), "host");
    EXPECT_STREQ(name_of(kind::exact), "exact");
    EXPECT_STREQ(name_of(kind::workspace), "workspace");
}

}  // namespace
}  // namespace sekv
