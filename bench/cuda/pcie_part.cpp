// Zero-copy reads of lines in pinned host memory by kernels, and the copy engine beside them.
#include "bench/cuda/device.hpp"
#include "bench/cuda/full_kv.hpp"

namespace sekv::bench {
namespace {

struct pinned_memory {
    explicit pinned_memory(std::size_t n) : bytes(n) { cuda::check(cudaHostAlloc(&data, n, cudaHostAllocMapped), "cudaHostAlloc"); }
    ~pinned_memory() { (void)cudaFreeHost(data); }
    pinned_memory(const pinned_memory&) = delete;
    pinned_memory& operator=(const pinned_memory&) = delete;
    void* data = nullptr;
    std::size_t bytes;
};

}  // namespace

void measure_pcie(const part_options& o) {
    const stopwatch watch(o.small);
    // Far more than any cache of the host; touched once, so that every page is there.
    const pinned_memory host(o.small ? std::size_t{1} << 16 : std::size_t{1} << 30);
    std::fill_n(static_cast<std::uint8_t*>(host.data), host.bytes, std::uint8_t{7});
    void* mapped = nullptr;
    cuda::check(cudaHostGetDevicePointer(&mapped, host.data, 0), "cudaHostGetDevicePointer");
    const std::int32_t warps = o.small ? 8 : 4096;
    const device_memory sums(static_cast<std::size_t>(warps) * 4), target(o.small ? std::size_t{1} << 14 : std::size_t{256} << 20);
    std::uint32_t seed = 0;
    const auto lines_of = [&](std::int64_t count, std::int32_t bytes) {
        return [&, count, bytes] { read_lines(static_cast<const std::byte*>(mapped), static_cast<std::int64_t>(host.bytes) / bytes, bytes, count, ++seed, sums.as<std::uint32_t>(), warps, watch.stream()); };
    };
    for (std::int32_t bytes = 64; bytes <= 4096; bytes *= 2) {
        attempt({{"part", "pcie"}, {"line_bytes", bytes}}, [&](json& row) {
            const std::int64_t lines = (o.small ? 8192 : 128 << 20) / bytes;
            row["us"] = watch.cold(o.rounds, lines_of(lines, bytes));
            row["GBps"] = static_cast<double>(lines) * bytes / row["us"].get<double>() / 1e3;
        });
    }
    // How many lines it takes until bandwidth rather than latency bounds.
    for (const std::int64_t count : {8, 32, 128, 512, 2048, 8192, 32768}) {
        if (o.small && count > 128) continue;
        attempt({{"part", "pcie_lines"}, {"line_bytes", 128}, {"lines", count}}, [&](json& row) { row["us"] = watch.cold(o.rounds, lines_of(count, 128)); });
    }
    for (const auto direction : {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost}) {
        attempt({{"part", "pcie_copy"}, {"direction", direction == cudaMemcpyHostToDevice ? "to_device" : "to_host"}}, [&](json& row) {
            const auto bytes = std::min(target.bytes(), host.bytes);
            void* to = direction == cudaMemcpyHostToDevice ? target.as<void>() : host.data;
            void* from = direction == cudaMemcpyHostToDevice ? host.data : target.as<void>();
            row["us"] = watch.cold(std::min(o.rounds, 5), [&] { cuda::check(cudaMemcpyAsync(to, from, bytes, direction, watch.stream()), "cudaMemcpyAsync"); });
            row["GBps"] = static_cast<double>(bytes) / row["us"].get<double>() / 1e3;
        });
    }
}

}  // namespace sekv::bench
