// The rings of this process and the one thread that answers them.
//
// It looks for calls without rest for a few milliseconds after the last one, then gives way to others, then naps, so that an idle
// process costs no core. A launch wakes it; what a graph launches by itself is found at the end of a nap.
#pragma once

#include "ffi_ring.h"

namespace cpu_experts::ffi {

Status submit(Stream stream, const Call& call, uint64_t patience, const void* x, const void* ids, const void* weights,
              void* ticket);
Status collect(Stream stream, const Call& call, uint64_t patience, const void* ticket, void* y);
// Frees the rings that no other layer uses, unless a graph does.
void forget_rings(uint64_t layer);
// What went wrong since this was last asked, on whichever ring: the first of it.
Status failure();
// Before the process ends: kernels wait no longer, and there are no calls from here on.
void stop();

}  // namespace cpu_experts::ffi
