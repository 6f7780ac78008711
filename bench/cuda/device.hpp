// The device as the measurements see it: memory, timing with cold caches, and one JSON line per result.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/cuda/runtime.hpp"

namespace sekv::bench {

using nlohmann::json;

/// Every result is one line on stdout at once, so that a crash later takes nothing back.
inline void emit(const json& row) {
    std::puts(row.dump().c_str());
    std::fflush(stdout);
}

class device_memory {
public:
    device_memory() = default;
    explicit device_memory(std::size_t bytes) : bytes_(bytes) { cuda::check(cudaMalloc(&data_, bytes), "cudaMalloc"); }
    ~device_memory() { (void)cudaFree(data_); }
    device_memory(device_memory&& o) noexcept : data_(std::exchange(o.data_, nullptr)), bytes_(o.bytes_) {}
    device_memory& operator=(device_memory&& o) noexcept {
        std::swap(data_, o.data_), std::swap(bytes_, o.bytes_);
        return *this;
    }
    template <class T>
    [[nodiscard]] T* as() const noexcept {
        return static_cast<T*>(data_);
    }
    [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

class timed_event {
public:
    timed_event() { cuda::check(cudaEventCreate(&handle_), "cudaEventCreate"); }
    ~timed_event() { (void)cudaEventDestroy(handle_); }
    timed_event(const timed_event&) = delete;
    timed_event& operator=(const timed_event&) = delete;
    void record(cudaStream_t s) const { cuda::check(cudaEventRecord(handle_, s), "cudaEventRecord"); }
    /// Microseconds from `begin` to this event, after both.
    [[nodiscard]] double since(const timed_event& begin) const {
        float ms = 0;
        cuda::check(cudaEventSynchronize(handle_), "cudaEventSynchronize");
        cuda::check(cudaEventElapsedTime(&ms, begin.handle_, handle_), "cudaEventElapsedTime");
        return 1e3 * static_cast<double>(ms);
    }

private:
    cudaEvent_t handle_ = nullptr;
};

[[nodiscard]] inline double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::ranges::sort(values);
    return values[values.size() / 2];
}

/// Measures on a stream of its own, each time with an L2 that holds nothing of what is measured.
class stopwatch {
public:
    explicit stopwatch(bool small) {
        int device = 0, l2 = 0;
        cuda::check(cudaGetDevice(&device), "cudaGetDevice");
        cuda::check(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
        flushed_ = device_memory(small ? 4096 : std::max<std::size_t>(static_cast<std::size_t>(l2) * 4, std::size_t{256} << 20));
    }
    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_.get(); }
    void flush() const { cuda::check(cudaMemsetAsync(flushed_.as<void>(), 0, flushed_.bytes(), stream()), "cudaMemsetAsync"); }
    /// Microseconds of one run after a flush.
    [[nodiscard]] double once(const std::function<void()>& work) const {
        flush();
        begin_.record(stream());
        work();
        end_.record(stream());
        return end_.since(begin_);
    }
    /// Median of `rounds` runs, after one that doesn't count.
    [[nodiscard]] double cold(int rounds, const std::function<void()>& work) const {
        (void)once(work);
        std::vector<double> all;
        for (int i = 0; i < rounds; ++i) all.push_back(once(work));
        return median(std::move(all));
    }

private:
    cuda::owned_stream stream_;
    device_memory flushed_;
    timed_event begin_, end_;
};

struct part_options {
    bool small = false;  ///< tiny sizes: the emulation, or a first look
    int rounds = 11;
    std::vector<std::int64_t> tokens = {32768, 131072, 8192};
    std::vector<std::int32_t> batches = {1, 8, 32};
};

/// Runs one case and turns what it throws into a row, so that the others follow.
template <class F>
void attempt(json row, F&& work) {
    try {
        work(row);
    } catch (const std::exception& e) {
        row["error"] = e.what();
        (void)cudaGetLastError();
    }
    emit(row);
}

void measure_full_kv(const part_options& o);
void measure_decode(const part_options& o);
void measure_zoom(const part_options& o);
void measure_pcie(const part_options& o);

}  // namespace sekv::bench
