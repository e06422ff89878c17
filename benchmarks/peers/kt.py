"""kt-kernel (KTransformers), initialised from memory as its wrappers do from files, with all experts on the CPU.

Its methods are named AMX on any processor: the package loads the variant for this processor, which is part of the name we
print. BF16, FP8 and RAWINT4 take the weights as they are; AMXINT8 and AMXINT4 quantise bf16 with one scale per output (so
AMXINT4 has a larger error than weights in groups). Runs on one NUMA node, with threads on the first cores."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from functools import cache

import numpy as np

from cpu_experts import layout
from peers import Batch

METHODS = {"bf16": ("BF16",), "int8": ("AMXINT8",), "int4_g32": ("RAWINT4", "AMXINT4"), "fp8_block": ("FP8",)}
CLASSES = {
    "BF16": "AMXBF16_MOE",
    "AMXINT8": "AMXInt8_MOE",
    "AMXINT4": "AMXInt4_MOE",
    "RAWINT4": "AMXInt4_KGroup_MOE",
    "FP8": "AMXFP8_MOE",
}
GROUPS = {"RAWINT4": (4, 32), "FP8": (8, 128)}  # bits, values per scale
MAX_TOKENS, MAX_CHOSEN = 4096, 8


def about() -> str:
    import kt_kernel

    return f"kt-kernel {kt_kernel.__version__}, variant {kt_kernel.__cpu_variant__}, int8 by {kt_kernel.__int8_kernel__}"


def named(method: str) -> str:
    import kt_kernel

    return f"kt-kernel {method} ({kt_kernel.__cpu_variant__})"


@cache
def _pool(threads: int):
    """Its thread pool, one per process."""
    from kt_kernel import kt_kernel_ext

    config = kt_kernel_ext.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    with _silence():
        return kt_kernel_ext.CPUInfer(config)


class Layer:
    def __init__(
        self, method: str, parts: list[tuple[np.ndarray, ...]], formats: tuple[str, ...], threads: int
    ):
        from kt_kernel import kt_kernel_ext

        experts, width, _ = parts[0][0].shape[:3]
        self.pool, model = _pool(threads), parts[2][0].shape[1]
        inputs = (model, model, width)
        given = [_given(method, p, f, k) for p, f, k in zip(parts, formats, inputs, strict=True)]
        config = kt_kernel_ext.moe.MOEConfig(experts, MAX_CHOSEN, model, width, 0)
        config.max_len, config.pool = MAX_TOKENS, self.pool.backend_
        config.gate_proj, config.up_proj, config.down_proj = (g[0].ctypes.data for g in given)
        if method in GROUPS:
            config.gate_scale, config.up_scale, config.down_scale = (g[1].ctypes.data for g in given)
            config.quant_config.bits, config.quant_config.group_size = GROUPS[method]
            config.quant_config.zero_point = False
        order = np.arange(experts)
        with _silence():
            self.moe = getattr(kt_kernel_ext.moe, CLASSES[method])(config)
            self.pool.submit(self.moe.load_weights_task(order.ctypes.data))
            self.pool.sync()

    def __call__(self, batch: Batch) -> np.ndarray:
        if len(batch.bits) > MAX_TOKENS or batch.ids.shape[1] > MAX_CHOSEN:
            raise ValueError(
                f"{batch.ids.shape}: the layer was set up for {MAX_TOKENS} tokens and {MAX_CHOSEN} experts of each"
            )
        out = np.empty_like(batch.bits)
        ids = batch.ids.astype(np.int64)
        count = np.array([len(batch.bits)], np.int32)
        arrays = (ids, batch.weights, batch.bits, out)
        self.pool.submit(
            self.moe.forward_task(count.ctypes.data, ids.shape[1], *(a.ctypes.data for a in arrays), False)
        )
        self.pool.sync()
        return out


def _given(method: str, parts: tuple[np.ndarray, ...], format: str, inputs: int) -> tuple[np.ndarray, ...]:
    """A matrix and its scales as the method takes them: two codes per byte in order, or bf16 to quantise."""
    if method == "RAWINT4":
        codes = layout.int4_codes(parts[0]).reshape(*parts[0].shape[:2], -1)
        return codes[..., 0::2] | codes[..., 1::2] << 4, parts[1]
    if method in ("AMXINT8", "AMXINT4"):
        import torch

        values = torch.from_numpy(layout.dequantize(parts, format, inputs)).to(torch.bfloat16)
        return (values.view(torch.int16).numpy(),)
    return parts


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppresses what C++ prints meanwhile."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
