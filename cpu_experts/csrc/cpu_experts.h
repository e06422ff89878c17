/* Mixture-of-experts layers on the CPU: the whole C ABI.
 *
 * A layer is opened over packed weights (layout.py states the layout), run, and closed. Functions return a status and never throw
 * or abort; cpu_experts_last_error() tells more. Handles are numbers, not pointers: a closed one is an error, never a fault. */
#ifndef CPU_EXPERTS_H
#define CPU_EXPERTS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CPU_EXPERTS_ABI 2
#define CPU_EXPERTS_MAX_CHOSEN 64
#define CPU_EXPERTS_API __attribute__((visibility("default")))

typedef enum {
    CPU_EXPERTS_OK = 0,
    CPU_EXPERTS_INVALID = 1,     /* an argument is wrong; nothing was written */
    CPU_EXPERTS_UNSUPPORTED = 2, /* this processor or build cannot do it */
    CPU_EXPERTS_NO_MEMORY = 3,
    CPU_EXPERTS_CLOSED = 4, /* no such handle, or no longer */
    CPU_EXPERTS_FAILED = 5  /* anything else */
} cpu_experts_status;

typedef enum {
    CPU_EXPERTS_BF16 = 0,
    CPU_EXPERTS_INT8 = 1,
    CPU_EXPERTS_INT4_G32 = 2,
    CPU_EXPERTS_INT4_G128 = 3,
    CPU_EXPERTS_FP8_BLOCK = 4,
    CPU_EXPERTS_Q8_0 = 5, /* GGUF's; so are those below, of which every matrix has a multiple of 256 inputs */
    CPU_EXPERTS_Q4_K = 6,
    CPU_EXPERTS_Q6_K = 7
} cpu_experts_precision;

typedef enum { CPU_EXPERTS_F32 = 0, CPU_EXPERTS_BFLOAT16 = 1 } cpu_experts_dtype;

typedef enum {
    CPU_EXPERTS_BEST = 0, /* the best this processor has */
    CPU_EXPERTS_PORTABLE = 1,
    CPU_EXPERTS_AVX2 = 2,
    CPU_EXPERTS_AVX512 = 3, /* with VNNI, BF16 and VBMI: Sapphire Rapids, Zen 4 and later */
    CPU_EXPERTS_AMX = 4
} cpu_experts_isa;

typedef struct {
    int32_t struct_bytes; /* its size, as the caller knows it; another is an error */
    int32_t gate_up_precision, down_precision;
    int32_t experts, model, width; /* X, D, F */
    const void *gate_up, *down;    /* packed; aligned to 64 bytes; they outlive the layer; with several NUMA nodes opening moves
                                      their pages, to have of every expert a share on each */
    uint64_t gate_up_bytes, down_bytes;
    int32_t threads;  /* the calling one included; 0: one a usable core */
    int32_t isa;      /* a cpu_experts_isa */
    int32_t max_rows; /* tokens times experts chosen that are worked on at once: scratch for them is allocated at opening, and
                           more are worked through one after the other */
} cpu_experts_weights;

typedef struct {
    int32_t struct_bytes;
    int32_t tokens, chosen;     /* n, K; K at most CPU_EXPERTS_MAX_CHOSEN and max_rows */
    int32_t x_dtype, out_dtype; /* a cpu_experts_dtype each */
    const void* x;              /* [n D] */
    const int32_t* topk_ids;    /* [n K], 0 to X; X stands for no expert */
    const float* topk_weights;  /* [n K], finite */
    void* out;                  /* [n D] */
} cpu_experts_batch;

CPU_EXPERTS_API int32_t cpu_experts_abi(void);
/* The best instruction set that is usable here. */
CPU_EXPERTS_API int32_t cpu_experts_best_isa(void);
CPU_EXPERTS_API int32_t cpu_experts_open(const cpu_experts_weights* weights, uint64_t* handle);
/* What forward says of a batch before it computes. */
CPU_EXPERTS_API int32_t cpu_experts_check(uint64_t handle, const cpu_experts_batch* batch);
/* Serialised per number of threads: layers share their workers and their scratch. Allocates nothing. */
CPU_EXPERTS_API int32_t cpu_experts_forward(uint64_t handle, const cpu_experts_batch* batch);
/* Waits for calls that run: after it the weights are the caller's to free. */
CPU_EXPERTS_API int32_t cpu_experts_close(uint64_t handle);
/* Of this thread's last call that failed; valid until its next call. */
CPU_EXPERTS_API const char* cpu_experts_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
