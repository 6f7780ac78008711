#include "src/cuda/context.hpp"

#include <string>

namespace sekv {
namespace cuda {
namespace {

int checked_device(int device) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (device < 0 || device >= count) throw invalid_argument("There is no CUDA device " + std::to_string(device) + "; this machine has " + std::to_string(count) + ".");
    return device;
}

}  // namespace

context::context(const cuda_options& options) : device_(checked_device(options.device)) {
    const device_guard guard(device_);
    if (options.stream == nullptr) own_ = std::make_unique<owned_stream>();
    resource_options r;
    r.device.slab_bytes = options.device_slab;
    r.host.slab_bytes = options.pinned_slab;
    r.host.limit = options.pinned_limit;
    resource_ = std::make_shared<cuda_resource>(own_ ? own_->get() : options.stream, r);
}

context::~context() {
    if (own_) {
        // The memory may outlive this object, and must not fence on a stream that is gone.
        try {
            resource_->synchronize();
        } catch (const error&) {  // a lost context: nothing is left to wait for
        }
    }
}

bool context::capturing() const { return cuda::capturing(resource_->stream()); }

bool on_device(const void* p) {
    cudaPointerAttributes a{};
    check(cudaPointerGetAttributes(&a, p), "cudaPointerGetAttributes");
    if (a.type == cudaMemoryTypeDevice && a.device != current_device())
        throw invalid_argument("A tensor lies on CUDA device " + std::to_string(a.device) + ", but the cache is on device " + std::to_string(current_device()) + "; copy it there.");
    return a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged;
}

}  // namespace cuda

cuda_backend::cuda_backend(const cuda_options& options, std::shared_ptr<executor> exec) : context_(std::make_shared<cuda::context>(options)), executor_(exec ? std::move(exec) : make_thread_pool(1)) {}

std::shared_ptr<memory_resource> cuda_backend::resource() const noexcept { return context_->shared_memory(); }

void cuda_backend::use(CUstream_st* stream) { context_->memory().use(stream); }

CUstream_st* cuda_backend::stream() const noexcept { return context_->memory().stream(); }

void cuda_backend::synchronize() { context_->memory().synchronize(); }

transfer_counters cuda_backend::transfers() const {
    const auto m = context_->memory().copies().metrics();
    const auto a = context_->memory().arena().usage();
    const auto bytes = [&](cuda::direction d) { return m.bytes[static_cast<std::size_t>(d)]; };
    return {bytes(cuda::direction::to_device), bytes(cuda::direction::to_host), bytes(cuda::direction::on_device), m.waits + a.waits, m.latency};
}

}  // namespace sekv
