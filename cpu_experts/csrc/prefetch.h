// Asking for weights before they are read: the hardware's own streams stop at every page.
#pragma once

#include "gemm.h"

namespace cpu_experts {

// Bytes. With few rows prefetching halves the time on Zen 5.
constexpr int kAhead = 4096;

// In assembly, for gcc 12 takes a loop of nothing but __builtin_prefetch to have no effect, and drops it.
inline void prefetch(const uint8_t* at, size_t ahead = kAhead) { asm volatile("prefetcht0 %0" : : "m"(at[ahead])); }

// Into the L2, for the L1 holds the slice in use.
inline void prefetch(Ahead& ahead) {
    for (ahead.due += ahead.each; ahead.due >= Ahead::kStreams; ahead.due -= Ahead::kStreams, ahead.at += kLine) {
        for (int i = 0; i < Ahead::kStreams; ++i) asm volatile("prefetcht1 %0" : : "m"(ahead.at[size_t(i) * ahead.apart]));
    }
}

}  // namespace cpu_experts
