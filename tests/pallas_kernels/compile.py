"""Compiles the kernels for an H200 on a machine without one; prints the assembler's figures, a JSON line per kernel."""

import functools
import glob
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import mla_decode, packed, tuning
from pallas_kernels.fp8 import Fp8
from pallas_kernels.heads_decode import gpu as heads_gpu
from pallas_kernels.mla_decode import gpu as decode_gpu
from pallas_kernels.mla_prefill import gpu as prefill_gpu
from pallas_kernels.mla_sparse import gpu as sparse_gpu
from pallas_kernels.moe_decode import gpu as few_gpu
from pallas_kernels.ragged_dot import gpu as grouped_gpu
from pallas_kernels.rope_append import Latents, Tokens
from pallas_kernels.rope_append import gpu as append_gpu
from pallas_kernels.router import Rule
from pallas_kernels.router import gpu as router_gpu

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
  l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096 registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""
bf16, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, jnp.int32))


def decode(B, T, N, R, E, Z, packed=False):
    def call(q_c, q_pe, c_kv, k_pe, page_table, seq_lens):
        plan = mla_decode.schedule(seq_lens, heads=N, tokens=T, units=132)
        return decode_gpu.mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, scale=0.1, schedule=plan)

    pool = latent((256, Z, R), packed)
    return call, (bf16((B, T, N, R)), bf16((B, T, N, E)), pool, bf16((256, Z, E)), i32((B, 4096 // Z)), i32((B,)))


def latent(shape, packed):
    scale = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 128), jnp.float32)
    return Fp8(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scale) if packed else bf16(shape)


def sparse(B, T, N, K, R=512, packed=False):
    call = functools.partial(sparse_gpu.mla_sparse, scale=0.1, units=132)
    queries, pool = (bf16((B, T, N, R)), bf16((B, T, N, 64))), (latent((90000, 64, R), packed), bf16((90000, 64, 64)))
    return call, (*queries, *pool, i32((B, T, K)), i32((B, T)))  # more numbers than 32 bits count


def prefill(B, T, S, N, H, V):
    call = functools.partial(prefill_gpu.mla_prefill, scale=0.1, sizes=tuning.MLA_PREFILL[H, V], units=132)
    return call, (bf16((B, T, N, H)), bf16((B, S, N, H)), bf16((B, S, N, V)), i32((B, T)), i32((B, T)))


def experts(held, M, X, F, D, weights, width, parts=1):
    codes, f32 = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float8_e4m3fn, jnp.float32))
    w = bf16((X, F, D)) if held == "bf16" else Fp8(codes((X, F, D)), f32((X, -(-F // 128), D // 128)))
    x = Fp8(codes((M, D)), f32((M, D // 128))) if held == "w8a8" else bf16((M, D))
    more = {"out_dtype": jnp.bfloat16, "units": 132, "width": width, "parts": parts}

    def call(x, group_sizes, *weights):
        return grouped_gpu.grouped(x, weights, group_sizes, **more)

    return call, (x, i32((X,)), *[w] * weights)


def packed_experts(kind, M, X, F, D, width):
    arrays = jax.eval_shape(lambda: packed.reorder(kind, packed.random_parts(kind, (X, F, D))))

    def call(x, group_sizes, weights):
        return grouped_gpu.grouped(x, (weights,), group_sizes, out_dtype=jnp.bfloat16, units=132, width=width)

    return call, (bf16((M, D)), i32((X,)), arrays)


def append(B, T, N, H, R, E, G, Z):
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tokens = Tokens(i32((B, T)), f32((B, T, E // 2)), f32((B, T, E // 2)))
    call = functools.partial(append_gpu.rope_append, eps=1e-6, interleave=True)
    return call, (bf16((B, T, N, H)), bf16((B, T, R + E)), bf16((R,)), tokens, Latents(bf16((G, Z, R)), bf16((G, Z, E))))


def heads(B, N, H, V, G, own):
    call = functools.partial(heads_gpu.heads_decode, scale=1.0, units=132)
    of_heads = N if own else 1
    return call, (bf16((B, N, H)), bf16((G, 64, N, H)), bf16((G, 64, N, V)), i32((of_heads, B, 9)), i32((of_heads, B)))


def few_experts(n, K, X, F, D):
    call = functools.partial(few_gpu.moe_decode, units=132)
    f32 = jax.ShapeDtypeStruct((n, K), jnp.float32)
    return call, (bf16((n, D)), i32((n, K)), f32, bf16((X, F, D)), bf16((X, F, D)), bf16((X, D, F)))


def route(n, X, bias, **rule):
    def call(logits, bias, some):
        return router_gpu.router(logits, bias, some, rule=Rule(**rule))

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return call, (f32((n, X)), f32((X,)) if bias else None, jax.ShapeDtypeStruct((n,), jnp.bool))


V3 = {"scoring_func": "sigmoid", "norm_topk_prob": True}

PROGRAMS = [
    (append, (1, 1, 16, 192, 512, 64, 90000, 64)),  # more numbers than 32 bits count
    (append, (3, 2, 20, 256, 512, 64, 20, 7)),
    (append, (2, 1, 8, 128, 128, 32, 16, 16)),
    (decode, (4, 1, 16, 512, 64, 64)),
    (decode, (4, 4, 8, 512, 64, 16)),
    (decode, (4, 1, 20, 128, 32, 256)),
    (decode, (4, 1, 16, 512, 64, 64, True)),
    (decode, (4, 1, 8, 256, 32, 16, True)),
    (decode, (4, 1, 20, 128, 32, 256, True)),
    (decode, (4, 2, 8, 128, 64, 32, True)),
    (decode, (4, 1, 128, 512, 64, 64)),
    (decode, (4, 2, 128, 512, 64, 16)),
    (decode, (2, 1, 8, 256, 32, 64)),
    (prefill, (1, 4096, 4096, 128, 192, 128)),
    (prefill, (2, 1000, 1100, 16, 192, 128)),
    (prefill, (1, 4096, 4096, 20, 256, 256)),
    (heads, (8, 16, 192, 128, 90000, True)),  # more numbers than 32 bits count
    (heads, (64, 16, 192, 128, 100, False)),
    (heads, (2, 8, 64, 64, 100, True)),
    (heads, (1, 4, 256, 256, 100, True)),
    (sparse, (1, 1, 16, 2048)),
    (sparse, (128, 1, 64, 2048)),
    (sparse, (1, 4096, 128, 2048)),
    (sparse, (2, 3, 20, 100, 128)),
    (sparse, (128, 1, 128, 2048, 512, True)),
    (few_experts, (1, 6, 64, 1408, 2048)),
    (few_experts, (4, 8, 256, 2048, 7168)),
    (route, (1, 64, False), {"num_experts_per_tok": 6}),
    (route, (256, 160, False), {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}),
    (route, (64, 256, True), {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4} | V3),
    (route, (8, 512, True), {"num_experts_per_tok": 8} | V3),
    (experts, ("bf16", 48, 64, 1408, 2048, 2, 16)),
    (experts, ("bf16", 16384, 384, 7168, 2048, 1, 144)),
    (experts, ("bf16", 16384, 384, 2048, 7168, 2, 144)),
    (experts, ("w8", 64, 256, 2048, 7168, 2, 16)),
    (experts, ("w8", 64, 1, 576, 7168, 1, 64, 28)),
    (experts, ("bf16", 16384, 512, 2048, 6144, 2, 144)),
    (experts, ("w8", 512, 512, 2048, 6144, 2, 16)),
    (packed_experts, ("Q4_K", 16384, 384, 2048, 7168, 128)),
    (experts, ("w8a8", 16384, 384, 7168, 2048, 1, 96)),
    (experts, ("w8a8", 16384, 384, 2048, 7168, 2, 96)),
]

target = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")
sharding = NamedSharding(Mesh(np.array(target.devices), ("x",)), PartitionSpec())
dump = os.environ["MOSAIC_GPU_DUMP_TO"]


def wraps(ptx):
    """Whether an address is computed in 32 bits: there, nothing may be multiplied by the width of a row."""
    factors = [1 << int(bits) for bits in re.findall(r"shl\.b32\s.*, (\d+);", ptx)]
    factors += map(int, re.findall(r"m(?:ul|ad)\.lo\.[su]32\s+\S+ \S+ (\d+)[,;]", ptx))
    return max(factors, default=1) >= 64


def in_place(compiled, pool):
    """Whether the program returns the pool that it was given, without a copy of an array on the way."""
    sizes, memory = [x.size * x.dtype.itemsize for x in pool], compiled.memory_analysis()
    return memory.alias_size_in_bytes >= sum(sizes) and memory.temp_size_in_bytes < min(sizes)


for make, shape, *options in PROGRAMS:
    call, arrays = make(*shape, **dict(*options))
    before = set(glob.glob(dump + "/*.ptxas"))
    donated = (len(arrays) - 1,) if make is append else ()
    program = jax.jit(call, in_shardings=(sharding,) * len(arrays), out_shardings=sharding, donate_argnums=donated)
    compiled = program.lower(*arrays).compile()
    new = sorted(set(glob.glob(dump + "/*.ptxas")) - before)
    assert new, f"the assembler said nothing of {make.__name__} {shape}"
    for path in new:
        text = Path(path).read_text()
        spills = max(map(int, re.findall(r"(\d+) bytes spill stores", text)))
        row = {"op": make.__name__, "shape": shape, "spills": spills, "serialized": "C7512" in text or "C7510" in text}
        if make is append:
            row |= {"in_place": in_place(compiled, arrays[-1]), "wraps": wraps(Path(path).with_suffix(".ptx").read_text())}
        print(json.dumps(row), flush=True)
