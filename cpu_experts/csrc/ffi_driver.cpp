#include "ffi_driver.h"

#include <dlfcn.h>

#include <mutex>

namespace cpu_experts::ffi {
namespace {

constexpr int kCaptureModeRelaxed = 2;

struct Opened {
    std::mutex mutex;
    std::string path;  // empty: none yet
    Driver driver{};
};

Opened& opened() {
    static auto* o = new Opened;
    return *o;
}

template <class Pointer>
bool find(void* library, const char* name, Pointer& function, std::string& missing) {
    void* found = dlsym(library, name);
    if (!found) missing = name;
    function = reinterpret_cast<Pointer>(found);
    return found;
}

// The names that cuda.h gives these functions since CUDA 4; the newest versions of some take other arguments.
bool find_all(void* library, Driver& d, std::string& missing) {
    return find(library, "cuGetErrorString", d.GetErrorString, missing) &&
           find(library, "cuStreamGetCtx", d.StreamGetCtx, missing) &&
           find(library, "cuStreamIsCapturing", d.StreamIsCapturing, missing) &&
           find(library, "cuStreamSynchronize", d.StreamSynchronize, missing) &&
           find(library, "cuThreadExchangeStreamCaptureMode", d.ThreadExchangeStreamCaptureMode, missing) &&
           find(library, "cuCtxPushCurrent_v2", d.CtxPushCurrent, missing) &&
           find(library, "cuCtxPopCurrent_v2", d.CtxPopCurrent, missing) &&
           find(library, "cuCtxSynchronize", d.CtxSynchronize, missing) &&
           find(library, "cuMemHostAlloc", d.MemHostAlloc, missing) &&
           find(library, "cuMemHostGetDevicePointer_v2", d.MemHostGetDevicePointer, missing) &&
           find(library, "cuMemFreeHost", d.MemFreeHost, missing) &&
           find(library, "cuMemHostRegister_v2", d.MemHostRegister, missing) &&
           find(library, "cuMemHostUnregister", d.MemHostUnregister, missing) &&
           find(library, "cuMemAlloc_v2", d.MemAlloc, missing) && find(library, "cuMemFree_v2", d.MemFree, missing) &&
           find(library, "cuMemcpyHtoD_v2", d.MemcpyHtoD, missing) &&
           find(library, "cuMemcpyHtoDAsync_v2", d.MemcpyHtoDAsync, missing) &&
           find(library, "cuMemcpyDtoDAsync_v2", d.MemcpyDtoDAsync, missing) &&
           find(library, "cuMemcpyDtoHAsync_v2", d.MemcpyDtoHAsync, missing) &&
           find(library, "cuModuleLoadData", d.ModuleLoadData, missing) &&
           find(library, "cuModuleGetFunction", d.ModuleGetFunction, missing) &&
           find(library, "cuLaunchKernel", d.LaunchKernel, missing);
}

}  // namespace

Status Driver::said(const char* what, int result) const {
    if (!result) return {};
    const char* words = nullptr;
    GetErrorString(result, &words);
    return {CPU_EXPERTS_FAILED, std::string(what) + ": " + (words ? words : "error " + std::to_string(result))};
}

Status open_driver(const char* path) {
    Opened& o = opened();
    std::lock_guard<std::mutex> hold(o.mutex);
    if (o.path == path) return {};
    if (!o.path.empty()) return {CPU_EXPERTS_UNSUPPORTED, "CUDA's driver is already that of " + o.path};
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return {CPU_EXPERTS_UNSUPPORTED, std::string("CUDA's driver cannot be loaded: ") + dlerror()};
    Driver found{};
    std::string missing;
    if (!find_all(library, found, missing)) return {CPU_EXPERTS_UNSUPPORTED, std::string(path) + " has no " + missing};
    o.driver = found, o.path = path;
    return {};
}

const Driver& driver() { return opened().driver; }

Within::Within(Context context)
    : status(driver().said("cuCtxPushCurrent", driver().CtxPushCurrent(context))), mode_(kCaptureModeRelaxed) {
    if (!status) driver().ThreadExchangeStreamCaptureMode(&mode_);
}

Within::~Within() {
    if (status) return;
    driver().ThreadExchangeStreamCaptureMode(&mode_);
    Context popped;
    driver().CtxPopCurrent(&popped);
}

}  // namespace cpu_experts::ffi
