// The tile instructions, or for tests a model of them in plain C++: it runs where there is no AMX, and AddressSanitizer sees its
// loads and stores, which it does not of the instructions.
#pragma once

#include "gemm.h"

#ifdef CPU_EXPERTS_EMULATE_TILES
#include "tests/emulated_tiles.h"
#else
#include <immintrin.h>
#endif

namespace cpu_experts {

inline const Kernels& few_row_kernels() {
#ifdef CPU_EXPERTS_EMULATE_TILES
    const Kernels* vectors = kernels_of(kAvx512);
    return vectors ? *vectors : portable_kernels();
#else
    return avx512_kernels();
#endif
}

}  // namespace cpu_experts
