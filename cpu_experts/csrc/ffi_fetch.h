// Experts' packed bytes as arrays of a program, copied from where they are stored.
#pragma once

#include "ffi_driver.h"

namespace cpu_experts::ffi {

// Of some neighbouring experts: where gate and up go as one, and where down does.
struct Copies {
    int64_t count;
    void* to[2];
    uint64_t bytes[2];
};

Status fetch(uint64_t layer, int32_t first, const Copies& copies);
// On a stream, which is waited for: the first expert's number is in the GPU's memory.
Status fetch(Stream stream, uint64_t layer, const int32_t* first, const Copies& copies);
// Of a layer that is forgotten: waits for copies under way, and lets the system have the weights' pages again.
void unpin(uint64_t layer);

}  // namespace cpu_experts::ffi
