// The fake device: what it says of itself, and names of errors.
#include <cstring>
#include <string>

#include "simt/fakecuda_state.hpp"

using namespace fakecuda::detail;
using fakecuda::call;

namespace {

constexpr int multiprocessors = 8;
constexpr int shared_per_block = 48 * 1024;
constexpr int shared_optin = 227 * 1024;

struct error_text {
    cudaError_t code;
    const char* name;
    const char* text;
};
constexpr error_text error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "capture was not begun in this stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const error_text* find_text(cudaError_t e) {
    for (const error_text& t : error_texts)
        if (t.code == e) return &t;
    return nullptr;
}

int attribute_value(cudaDeviceAttr attribute) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor:
            return 9;
        case cudaDevAttrComputeCapabilityMinor:
            return 0;
        case cudaDevAttrMultiProcessorCount:
            return multiprocessors;
        case cudaDevAttrMaxThreadsPerBlock:
            return 1024;
        case cudaDevAttrWarpSize:
            return 32;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            return shared_per_block;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            return shared_optin;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            return shared_optin + 1024;
        case cudaDevAttrL2CacheSize:
            return 50 << 20;
        case cudaDevAttrCanMapHostMemory:
            return 1;
        case cudaDevAttrUnifiedAddressing:
            return 1;
        case cudaDevAttrAsyncEngineCount:
            return 2;
        case cudaDevAttrConcurrentKernels:
            return 1;
        default:
            return 0;
    }
}

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t e) {
    const error_text* t = find_text(e);
    return t != nullptr ? t->name : "unrecognized error code";
}

// A lost context's text carries what the kernel did, so that it reaches the test's output.
const char* cudaGetErrorString(cudaError_t e) {
    const error_text* t = find_text(e);
    const char* plain = t != nullptr ? t->text : "unrecognized error code";
    runtime& r = the_runtime();
    const std::lock_guard lock(r.mutex);
    if (e == cudaSuccess || e != r.lost) return plain;
    static thread_local std::string full;
    full = std::string(plain) + " (" + r.lost_reason + ")";
    return full.c_str();
}

cudaError_t cudaGetDeviceCount(int* count) {
    return api(call::other, capture_rule::safe, [&] {
        *count = 1;
        return cudaSuccess;
    });
}

cudaError_t cudaGetDevice(int* device) {
    return api(call::other, capture_rule::safe, [&] {
        *device = 0;
        return cudaSuccess;
    });
}

cudaError_t cudaSetDevice(int device) {
    return api(call::other, capture_rule::safe, [&] { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return api(call::other, capture_rule::safe, [&] {
        if (device != 0) return cudaErrorInvalidDevice;
        *value = attribute_value(attribute);
        return cudaSuccess;
    });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    return api(call::other, capture_rule::safe, [&] {
        if (device != 0) return cudaErrorInvalidDevice;
        std::memset(static_cast<void*>(p), 0, sizeof *p);
        std::strcpy(p->name, "SIMT emulation");
        p->totalGlobalMem = the_runtime().device_total;
        p->major = attribute_value(cudaDevAttrComputeCapabilityMajor);
        p->minor = attribute_value(cudaDevAttrComputeCapabilityMinor);
        p->multiProcessorCount = multiprocessors;
        p->warpSize = 32;
        p->maxThreadsPerBlock = 1024;
        p->sharedMemPerBlock = shared_per_block;
        p->sharedMemPerBlockOptin = shared_optin;
        p->l2CacheSize = attribute_value(cudaDevAttrL2CacheSize);
        p->canMapHostMemory = 1;
        p->unifiedAddressing = 1;
        return cudaSuccess;
    });
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
    return api(call::other, capture_rule::safe, [&] {
        if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && (value < 0 || value > shared_optin)) return cudaErrorInvalidValue;
        return cudaSuccess;
    });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
}
