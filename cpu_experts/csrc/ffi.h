/* The experts inside XLA programs: the C ABI of the second library, which is built on the FFI headers of one jaxlib.
 *
 * Layers of the first library are told to this one, which gives them numbers: a program names a layer by its number, never by an
 * address, so that a forgotten one is an error. The handlers that XLA calls are exported too; jax.ffi registers them. */
#ifndef CPU_EXPERTS_FFI_H
#define CPU_EXPERTS_FFI_H

#include "cpu_experts.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CPU_EXPERTS_FFI_ABI 3

typedef struct {
    int32_t struct_bytes;
    int32_t experts, model; /* X, D */
    int32_t read_only;      /* whether the memory of the weights is, as that of a mapped file */
    uint64_t handle;
    const void *gate_up, *down; /* packed, as the layer was opened over them */
    uint64_t gate_up_bytes, down_bytes;
    int32_t (*forward)(uint64_t handle, const cpu_experts_batch* batch); /* of the library that opened the handle */
    const char* (*last_error)(void);
} cpu_experts_ffi_layer;

CPU_EXPERTS_API int32_t cpu_experts_ffi_abi(void);
/* Of XLA's FFI, as the headers say that this was built on: 1000 times the major version, plus the minor one. */
CPU_EXPERTS_API int32_t cpu_experts_ffi_api(void);
/* The layer's number, or 0: no memory, or a struct of another size. */
CPU_EXPERTS_API uint64_t cpu_experts_ffi_know(const cpu_experts_ffi_layer* layer);
/* Waits for fetches under way: after it the weights are the caller's to free, once the layer is closed, too. */
CPU_EXPERTS_API void cpu_experts_ffi_forget(uint64_t layer);

/* CUDA's driver for the programs of GPUs, "libcuda.so.1": a status. */
CPU_EXPERTS_API int32_t cpu_experts_ffi_open_driver(const char* path);
/* The status of the first call from a GPU that failed since this was last asked; what it answered is NaN. */
CPU_EXPERTS_API int32_t cpu_experts_ffi_failure(void);
/* Before the process ends: no more calls from GPUs; those that wait get NaN. */
CPU_EXPERTS_API void cpu_experts_ffi_stop(void);
/* Of this thread's last call that gave a status; valid until its next one. */
CPU_EXPERTS_API const char* cpu_experts_ffi_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
