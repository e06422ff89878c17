// Which instruction sets are usable here: CPUID and what the operating system saves, found when the library is loaded.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "gemm.h"

namespace cpu_experts {
namespace {

#ifdef CPU_EXPERTS_X86
// Linux enables the 8 KiB of tile registers only for processes that ask; it may refuse.
bool tiles_permitted() {
    constexpr int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool tiles_usable() {
#ifdef CPU_EXPERTS_EMULATE_TILES
    return tiles_permitted() || errno != EPERM;  // what cannot be had here is emulated, what is forbidden is not
#else
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           tiles_permitted();
#endif
}
#endif

Isa found() {
#ifdef CPU_EXPERTS_X86
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
                  __builtin_cpu_supports("avx512bf16");
    return avx512 ? kAvx512 : avx2 ? kAvx2 : kPortable;
#else
    return kPortable;
#endif
}

struct Usable {
    Isa vectors = found();
#ifdef CPU_EXPERTS_EMULATE_TILES
    bool tiles = tiles_usable();
#elif defined(CPU_EXPERTS_X86)
    bool tiles = vectors == kAvx512 && tiles_usable();
#else
    bool tiles = false;
#endif
};

const Usable usable;

}  // namespace

Isa best_isa() { return usable.tiles ? kAmx : usable.vectors; }

const Kernels* kernels_of(Isa isa) {
    if (isa == kBest) isa = best_isa();
    if (isa == kAmx ? !usable.tiles : isa > usable.vectors) return nullptr;
#ifdef CPU_EXPERTS_X86
    if (isa == kAmx) return &amx_kernels();
    if (isa == kAvx512) return &avx512_kernels();
    if (isa == kAvx2) return &avx2_kernels();
#endif
    return &portable_kernels();
}

}  // namespace cpu_experts
