#include "src/cuda/runtime.hpp"

namespace sekv::cuda {

bool is_sticky(cudaError_t result) noexcept {
    switch (result) {
        case cudaErrorIllegalAddress:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc:
        case cudaErrorIllegalInstruction:
        case cudaErrorHardwareStackError:
        case cudaErrorLaunchFailure:
        case cudaErrorLaunchTimeout:
        case cudaErrorAssert:
        case cudaErrorECCUncorrectable:
        case cudaErrorNvlinkUncorrectable:
        case cudaErrorContextIsDestroyed:
        case cudaErrorDeviceUninitialized:
        case cudaErrorContained:
        case cudaErrorTensorMemoryLeak:
        case cudaErrorMpsClientTerminated:
        case cudaErrorExternalDevice:
        case cudaErrorCudartUnloading:
        case cudaErrorUnknown:
            return true;
        default:
            return false;
    }
}

void check(cudaError_t result, const char* call) {
    if (result == cudaSuccess) return;
    (void)cudaGetLastError();
    const auto what = std::string(call) + " failed with " + cudaGetErrorName(result) + " (" + cudaGetErrorString(result) + ")";
    if (result == cudaErrorMemoryAllocation) throw budget_error(what + "; free device or pinned memory, close sequences, or lower the budgets.", 0, 0);
    if (is_sticky(result))
        throw device_error(what + "; the device context is lost, so nothing in its memory can be read any more: destroy the cache, and restart the process before using the device again.", true);
    if (result == cudaErrorInsufficientDriver || result == cudaErrorNoDevice)
        throw device_error(what + "; install a driver that serves this CUDA runtime and make a GPU visible to the process, or use the host backend.", false);
    throw device_error(what + "; the call was refused before it ran, so that the device is as it was: check its arguments against the device's limits.", false);
}

int current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
}

device_guard::device_guard(int device) : before_(current_device()), now_(device) {
    if (now_ != before_) check(cudaSetDevice(now_), "cudaSetDevice");
}

device_guard::~device_guard() {
    if (now_ != before_ && cudaSetDevice(before_) != cudaSuccess) (void)cudaGetLastError();
}

bool capturing(cudaStream_t s) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(s, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

owned_stream::owned_stream(priority p) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, p == priority::least ? least : 0), "cudaStreamCreateWithPriority");
}

owned_stream::~owned_stream() {
    if (handle_ != nullptr && cudaStreamDestroy(handle_) != cudaSuccess) (void)cudaGetLastError();
}

void owned_stream::synchronize() const { check(cudaStreamSynchronize(handle_), "cudaStreamSynchronize"); }

owned_event::owned_event(timing t) {
    check(cudaEventCreateWithFlags(&handle_, t == timing::on ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

owned_event::~owned_event() {
    if (handle_ != nullptr && cudaEventDestroy(handle_) != cudaSuccess) (void)cudaGetLastError();
}

void owned_event::record(cudaStream_t s) { check(cudaEventRecord(handle_, s), "cudaEventRecord"); }

void owned_event::order(cudaStream_t s) const { check(cudaStreamWaitEvent(s, handle_, 0), "cudaStreamWaitEvent"); }

bool owned_event::done() const {
    const auto result = cudaEventQuery(handle_);
    if (result == cudaErrorNotReady) {
        (void)cudaGetLastError();  // not ready is not an error, but the runtime keeps it as one
        return false;
    }
    check(result, "cudaEventQuery");
    return true;
}

void owned_event::wait() const { check(cudaEventSynchronize(handle_), "cudaEventSynchronize"); }

}  // namespace sekv::cuda
