#include "src/cuda/transfer.hpp"

#include <algorithm>
#include <cstring>

namespace sekv::cuda {

namespace {

constexpr std::array<cudaMemcpyKind, direction_count> kinds{cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};

void enqueue_rows(direction d, const copy_shape& c, cudaStream_t s) {
    const auto kind = kinds[static_cast<std::size_t>(d)];
    if (c.rows == 1)
        check(cudaMemcpyAsync(c.to, c.from, c.width, kind, s), "cudaMemcpyAsync");
    else
        check(cudaMemcpy2DAsync(c.to, c.to_pitch, c.from, c.from_pitch, c.width, c.rows, kind, s), "cudaMemcpy2DAsync");
}

void copy_on_host(const copy_shape& c) {
    for (std::size_t row = 0; row < c.rows; ++row)
        std::memcpy(static_cast<std::byte*>(c.to) + row * c.to_pitch, static_cast<const std::byte*>(c.from) + row * c.from_pitch, c.width);
}

/// Calls f with pieces of at most `bytes`: whole rows, or runs of one row where it is longer than that.
template <class F>
void for_chunks(const copy_shape& c, std::size_t bytes, F&& f) {
    const auto part = [&](std::size_t row, std::size_t rows, std::size_t column, std::size_t width) {
        f(copy_shape{static_cast<std::byte*>(c.to) + row * c.to_pitch + column, static_cast<const std::byte*>(c.from) + row * c.from_pitch + column, width, rows, c.to_pitch, c.from_pitch});
    };
    if (c.width > bytes) {
        for (std::size_t row = 0; row < c.rows; ++row)
            for (std::size_t column = 0; column < c.width; column += bytes) part(row, 1, column, std::min(bytes, c.width - column));
    } else {
        const auto rows = bytes / c.width;
        for (std::size_t row = 0; row < c.rows; row += rows) part(row, std::min(rows, c.rows - row), 0, c.width);
    }
}

}  // namespace

transfer::transfer(pinned_arena& arena, const transfer_options& options) : arena_(arena), options_(options) {
    if (options_.chunk_bytes == 0) throw invalid_argument("The staging buffers of a transfer have 0 bytes; give chunk_bytes at least 1.");
    try {
        for (auto& b : staging_) {
            b.bytes = arena_.allocate(options_.chunk_bytes);
            if (b.bytes == nullptr)
                throw budget_error("The pinned arena of " + std::to_string(arena_.options().limit) + " bytes can't give a staging buffer of " + std::to_string(options_.chunk_bytes) +
                                       " bytes; raise its limit or lower transfer_options::chunk_bytes.",
                                   options_.chunk_bytes, 0);
        }
    } catch (...) {
        for (auto& b : staging_) arena_.free(b.bytes, {});
        throw;
    }
}

transfer::~transfer() {
    // In-line copies out of the staging buffers are covered by the buffers' events.
    for (auto& b : staging_)
        if (cudaEventSynchronize(b.used.get()) != cudaSuccess) (void)cudaGetLastError();
    if (cudaStreamSynchronize(copy_stream_.get()) != cudaSuccess) (void)cudaGetLastError();
    for (auto& b : staging_) arena_.free(b.bytes, {});
}

transfer::ticket transfer::copy(direction d, const copy_shape& shape, cudaStream_t compute, lane l) {
    if (shape.width == 0 || shape.rows == 0) return 0;
    if (shape.rows > 1 && (shape.to_pitch < shape.width || shape.from_pitch < shape.width))
        throw invalid_argument("A copy of rows of " + std::to_string(shape.width) + " bytes has pitches of " + std::to_string(shape.to_pitch) + " and " + std::to_string(shape.from_pitch) +
                               " bytes, less than a row; give the distance of the rows' starts.");
    const auto s = l == lane::in_line ? compute : copy_stream_.get();
    if (l == lane::beside || l == lane::ahead) follow(compute);
    const bool staged = (d == direction::to_device && !arena_.contains(shape.from)) || (d == direction::to_host && !arena_.contains(shape.to));
    const auto bytes = shape.width * shape.rows;
    auto* timing = l == lane::in_line ? nullptr : begin_timing(bytes, s);
    if (!staged)
        enqueue_rows(d, shape, s);
    else if (d == direction::to_device)
        stage_in(shape, s);
    else
        stage_out(shape, s);
    if (timing != nullptr) {
        const std::lock_guard lock(metrics_mutex_);
        timing->end.record(s);
        timing->running = true;
    }
    count(d, bytes, staged ? bytes : 0);
    return l == lane::in_line ? 0 : finish(compute, l);
}

void transfer::zero(void* device, std::size_t bytes, cudaStream_t compute) {
    if (bytes > 0) check(cudaMemsetAsync(device, 0, bytes, compute), "cudaMemsetAsync");
}

void transfer::follow(cudaStream_t s) {
    edge_.record(s);
    edge_.order(copy_stream_.get());
}

transfer::ticket transfer::finish(cudaStream_t compute, lane l) {
    auto& event = finished_[(last_ + 1) % tickets_kept];
    event.record(copy_stream_.get());
    ++last_;
    if (l == lane::beside) event.order(compute);
    return last_;
}

void transfer::order(ticket t, cudaStream_t s) const {
    if (t != 0) finished_[t % tickets_kept].order(s);
}

bool transfer::done(ticket t) const { return t == 0 || finished_[t % tickets_kept].done(); }

void transfer::wait(ticket t) const {
    if (t != 0) finished_[t % tickets_kept].wait();
}

transfer::staging& transfer::next_staging() {
    auto& b = staging_[staging_next_];
    staging_next_ = (staging_next_ + 1) % staging_buffers;
    if (!b.used.done()) {
        b.used.wait();
        const std::lock_guard lock(metrics_mutex_);
        ++metrics_.waits;
    }
    return b;
}

void transfer::stage_in(const copy_shape& shape, cudaStream_t s) {
    for_chunks(shape, options_.chunk_bytes, [&](const copy_shape& part) {
        auto& b = next_staging();
        copy_on_host({b.bytes, part.from, part.width, part.rows, part.width, part.from_pitch});
        enqueue_rows(direction::to_device, {part.to, b.bytes, part.width, part.rows, part.to_pitch, part.width}, s);
        b.used.record(s);
    });
}

// The host empties one buffer while the device fills the other.
void transfer::stage_out(const copy_shape& shape, cudaStream_t s) {
    staging* full = nullptr;
    copy_shape held;
    const auto empty = [&] {
        if (full == nullptr) return;
        full->used.wait();
        copy_on_host(held);
    };
    for_chunks(shape, options_.chunk_bytes, [&](const copy_shape& part) {
        auto& b = next_staging();
        enqueue_rows(direction::to_host, {b.bytes, part.from, part.width, part.rows, part.width, part.from_pitch}, s);
        b.used.record(s);
        empty();
        full = &b;
        held = {part.to, b.bytes, part.width, part.rows, part.to_pitch, part.width};
    });
    empty();
}

transfer::timed_copy* transfer::begin_timing(std::size_t bytes, cudaStream_t s) {
    if (bytes < options_.timed_bytes) return nullptr;
    const std::lock_guard lock(metrics_mutex_);
    poll_timing();
    const auto place = std::find_if(timed_.begin(), timed_.end(), [](const timed_copy& t) { return !t.running; });
    if (place == timed_.end()) {
        ++metrics_.untimed;
        return nullptr;
    }
    place->start.record(s);
    return &*place;
}

void transfer::poll_timing() const {
    for (auto& t : timed_) {
        if (!t.running) continue;
        float milliseconds = 0;
        const auto result = cudaEventElapsedTime(&milliseconds, t.start.get(), t.end.get());
        if (result != cudaSuccess) (void)cudaGetLastError();
        if (result == cudaErrorNotReady) continue;
        t.running = false;
        if (result == cudaSuccess)
            metrics_.latency.add(static_cast<std::uint64_t>(static_cast<double>(milliseconds) * 1e6));
        else
            ++metrics_.untimed;  // the device is lost; the next call that needs it says so
    }
}

void transfer::count(direction d, std::uint64_t bytes, std::uint64_t staged) {
    const std::lock_guard lock(metrics_mutex_);
    metrics_.bytes[static_cast<std::size_t>(d)] += bytes;
    ++metrics_.copies[static_cast<std::size_t>(d)];
    metrics_.staged_bytes += staged;
}

transfer_metrics transfer::metrics() const {
    const std::lock_guard lock(metrics_mutex_);
    poll_timing();
    return metrics_;
}

}  // namespace sekv::cuda
