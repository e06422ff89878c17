// What is needed of CUDA's driver, from whichever library is there at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi_layers.h"

namespace cpu_experts::ffi {

using Stream = void*;
using Context = void*;
using Module = void*;
using Function = void*;
using Address = unsigned long long;

// Under the names of the driver's functions, less "cu"; a result other than 0 is a failure.
struct Driver {
    int (*GetErrorString)(int result, const char** words);
    int (*StreamGetCtx)(Stream, Context*);
    int (*StreamIsCapturing)(Stream, int* whether);
    int (*StreamSynchronize)(Stream);
    int (*ThreadExchangeStreamCaptureMode)(int* mode);
    int (*CtxPushCurrent)(Context);
    int (*CtxPopCurrent)(Context*);
    int (*CtxSynchronize)();
    int (*MemHostAlloc)(void** memory, size_t bytes, unsigned flags);
    int (*MemHostGetDevicePointer)(Address*, void* memory, unsigned flags);
    int (*MemFreeHost)(void* memory);
    int (*MemHostRegister)(void* memory, size_t bytes, unsigned flags);
    int (*MemHostUnregister)(void* memory);
    int (*MemAlloc)(Address*, size_t bytes);
    int (*MemFree)(Address);
    int (*MemcpyHtoD)(Address, const void* memory, size_t bytes);
    int (*MemcpyHtoDAsync)(Address, const void* memory, size_t bytes, Stream);
    int (*MemcpyDtoDAsync)(Address, Address, size_t bytes, Stream);
    int (*MemcpyDtoHAsync)(void* memory, Address, size_t bytes, Stream);
    int (*ModuleLoadData)(Module*, const void* text);
    int (*ModuleGetFunction)(Function*, Module, const char* name);
    int (*LaunchKernel)(Function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared_bytes, Stream, void** arguments, void** extra);

    Status said(const char* what, int result) const;
};

// Once in a process; another library than the first is an error.
Status open_driver(const char* path);
const Driver& driver();

// Makes a stream's context this thread's, and lets it allocate though the stream is being captured into a graph.
class Within {
public:
    explicit Within(Context context);
    ~Within();
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;
    Status status;

private:
    int mode_;
};

}  // namespace cpu_experts::ffi
