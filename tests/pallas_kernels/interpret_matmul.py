"""The same as interpret.py for the ops that multiply by weights."""

import json
import sys

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import fp8, moe_decode, packed, quantized_matmul, ragged_dot, testing
from pallas_kernels.moe_decode import gpu as moe_gpu
from pallas_kernels.moe_decode import reference as moe_reference
from pallas_kernels.quantized_matmul import gpu as quantized_gpu
from pallas_kernels.quantized_matmul import reference as quantized_reference
from pallas_kernels.ragged_dot import gpu as ragged_gpu
from pallas_kernels.ragged_dot import reference as ragged_reference

interpret = plgpu.InterpretGPUParams(detect_races=True)
COMMON = {"out_dtype": jnp.bfloat16, "units": 3, "interpret": interpret}


def show(name, got, wanted, fallback):
    row = {"name": name, "error": testing.error(got, wanted), "fallback": testing.error(fallback, wanted)}
    print(json.dumps(row), flush=True)


def grouped(case, op, held):
    """Rows of no group are left out."""
    inputs = testing.ragged_dot_inputs(case)
    x, sizes = inputs["x"], inputs["group_sizes"]
    weights = [inputs["gate"]] if op == "ragged_dot" else [inputs["gate"], inputs["up"]]
    if held != "bf16":
        weights = [fp8.quantize_weight(w) for w in weights]
    if held == "w8a8":
        x = fp8.quantize(x)
    got = ragged_gpu.grouped(x, weights, sizes, **COMMON)
    wanted = getattr(ragged_reference, op)(x, *weights, sizes)
    fallback = getattr(ragged_dot, op)(x, *weights, sizes, impl="xla")
    show(f"{op}, {case.name}, {held}", *(out[: case.rows] for out in (got, wanted, fallback)))


def single(case, held):
    inputs = testing.quantized_matmul_inputs(case)
    x, w = inputs["x"] if held == "w8" else fp8.quantize(inputs["x"]), fp8.quantize_weight(inputs["w"])
    size = jnp.max(jnp.abs(inputs["x"].astype(jnp.float32)), axis=1, keepdims=True)  # so that every row counts
    got = quantized_gpu.quantized_matmul(x, w, **COMMON)
    fallback = quantized_matmul.quantized_matmul(x, w, impl="xla")
    wanted = quantized_reference.quantized_matmul(x, w)
    show(f"{case.name}, {held}", *(out / size for out in (got, wanted, fallback)))


def few(case):
    inputs = testing.moe_decode_inputs(case)
    got = moe_gpu.moe_decode(**inputs, units=7, interpret=interpret)
    show(case.name, got, moe_reference.moe_decode(**inputs), moe_decode.moe_decode(**inputs, impl="xla"))


def reordered(format, rows, depth, features):
    x = jax.random.normal(jax.random.key(0), (rows, depth), jnp.bfloat16)
    w = packed.reorder(format, packed.random_parts(format, (features, depth)))
    got = quantized_gpu.quantized_matmul(x, w, **COMMON)
    fallback = quantized_matmul.quantized_matmul(x, w, impl="xla")
    show(f"{format}, {rows} rows", got, quantized_reference.quantized_matmul(x, w), fallback)


def reordered_groups(format, sizes, depth, features, **options):
    sizes = jnp.array(sizes)
    x = jax.random.normal(jax.random.key(0), (int(sizes.sum()), depth), jnp.bfloat16)
    weights = [packed.reorder(format, packed.random_parts(format, (len(sizes), features, depth), seed)) for seed in range(2)]
    got = ragged_gpu.grouped(x, weights, sizes, **options, **COMMON)
    wanted = ragged_reference.ragged_swiglu(x, *weights, sizes)
    show(f"{format}, groups, {options}", got, wanted, ragged_dot.ragged_swiglu(x, *weights, sizes, impl="xla"))


if sys.argv[1] == "moe_decode":
    for case in testing.MOE_DECODE:
        few(case)
elif sys.argv[1] == "ragged_dot":
    for case in testing.RAGGED_DOT:
        for op, held in testing.RAGGED_DOT_KINDS:
            if held == "bf16" or case.depth % fp8.GROUP == 0:
                grouped(case, op, held)
elif sys.argv[1] == "packed":
    for format in packed.KINDS:
        reordered(format, 5, 256, 136)
    reordered("int4_g32", 1, 384, 264)  # an odd number of steps
    reordered("Q4_K", 130, 256, 72)  # two tiles
    reordered_groups("Q4_K", (3, 0, 9, 1), 512, 136)
    reordered_groups("int8", (3, 0, 9, 1), 128, 136)
    reordered_groups("Q4_K", (0, 3, 0, 1, 1), 512, 136, parts=2)  # each in a tile of its own, half of the depth at a time
    reordered_groups("Q4_K", (5, 0, 19, 1, 9), 512, 136, parts=2, width=8)  # some in several
else:
    for case in testing.QUANTIZED_MATMUL:
        for held in ("w8", "w8a8"):
            single(case, held)
