// Bytes on the device and in pinned memory, for tests of who may use them when.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/runtime_modes.hpp"
#include "src/cuda/runtime.hpp"

namespace sekv::cuda {

/// One byte value, `count` times.
[[nodiscard]] inline std::vector<std::byte> pattern(std::size_t count, unsigned value) { return std::vector<std::byte>(count, static_cast<std::byte>(value)); }

/// Bytes that tell their place: position, mixed with a seed.
[[nodiscard]] inline std::vector<std::byte> numbered(std::size_t count, unsigned seed) {
    std::vector<std::byte> bytes(count);
    for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 31 + (i >> 8) * 7 + seed * 101) & 255);
    return bytes;
}

/// Pinned memory outside every heap.
class pinned_bytes {
public:
    explicit pinned_bytes(std::size_t size, unsigned value = 0) : size_(size) {
        void* p = nullptr;
        check(cudaHostAlloc(&p, size, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
        bytes_ = static_cast<std::byte*>(p);
        std::memset(bytes_, static_cast<int>(value), size);
    }
    ~pinned_bytes() { (void)cudaFreeHost(bytes_); }
    pinned_bytes(const pinned_bytes&) = delete;
    pinned_bytes& operator=(const pinned_bytes&) = delete;
    [[nodiscard]] std::byte* data() const { return bytes_; }
    [[nodiscard]] std::vector<std::byte> read() const { return {bytes_, bytes_ + size_}; }
    [[nodiscard]] bool all(unsigned value) const { return std::all_of(bytes_, bytes_ + size_, [&](std::byte b) { return b == static_cast<std::byte>(value); }); }

private:
    std::byte* bytes_ = nullptr;
    std::size_t size_;
};

/// Device memory outside every heap.
class device_bytes {
public:
    explicit device_bytes(std::size_t size) : size_(size) {
        void* p = nullptr;
        check(cudaMalloc(&p, size), "cudaMalloc");
        bytes_ = static_cast<std::byte*>(p);
    }
    ~device_bytes() { (void)cudaFree(bytes_); }
    device_bytes(const device_bytes&) = delete;
    device_bytes& operator=(const device_bytes&) = delete;
    [[nodiscard]] std::byte* data() const { return bytes_; }
    /// Writes and reads at once, by a stream of its own.
    void write(const std::vector<std::byte>& from) const {
        const owned_stream s;
        const pinned_bytes staged(from.size());
        std::memcpy(staged.data(), from.data(), from.size());
        check(cudaMemcpyAsync(bytes_, staged.data(), from.size(), cudaMemcpyHostToDevice, s.get()), "cudaMemcpyAsync");
        s.synchronize();
    }
    [[nodiscard]] std::vector<std::byte> read() const {
        const owned_stream s;
        const pinned_bytes staged(size_);
        check(cudaMemcpyAsync(staged.data(), bytes_, size_, cudaMemcpyDeviceToHost, s.get()), "cudaMemcpyAsync");
        s.synchronize();
        return staged.read();
    }

private:
    std::byte* bytes_ = nullptr;
    std::size_t size_;
};

inline void enqueue(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t s) { check(cudaMemcpyAsync(to, from, bytes, kind, s), "cudaMemcpyAsync"); }

}  // namespace sekv::cuda
