"""Compiles the kernels at real sizes for TPUs on a machine without one; prints a JSON line per kernel and device.

`vmem`: bytes of scoped memory in use; `copied`: whether XLA copies a cache before the call."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import mla_decode, mla_prefill, tuning
from pallas_kernels.mla_decode import tpu as decode
from pallas_kernels.mla_prefill import tpu as prefill

DECODE = [  # batch, tokens, heads, rank, rope, page, cached tokens
    (128, 1, 128, 512, 64, 64, 16384),
    (64, 1, 16, 512, 64, 64, 4096),
    (8, 8, 128, 512, 64, 16, 4096),
    (64, 1, 20, 512, 64, 256, 4096),
    (128, 1, 128, 512, 64, 64, 65536),  # as large as a page table may be
    (2, 1, 8, 256, 32, 64, 4096),
    (2, 3, 5, 128, 64, 1024, 4096),
]
PREFILL = [  # batch, queries, keys, heads, width, value
    (1, 4096, 4096, 128, 192, 128),
    (1, 4096, 16384, 16, 192, 128),
    (2, 4096, 4096, 20, 256, 256),
    (3, 100, 300, 8, 64, 32),
]
bf16, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.bfloat16, jnp.int32))


def report(device, op, shape, call, arrays):
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    formats = tuple(Format(Layout(tuple(range(x.ndim))), sharding) for x in arrays)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):  # gives the kernel its device
        text = jax.jit(call, in_shardings=formats, out_shardings=sharding).lower(*arrays).compile().as_text()
    kernel = next(line for line in text.splitlines() if "tpu_custom_call" in line)
    vmem = re.search(r'"used_scoped_memory_configs":\[{"memory_space":"1","offset":"0","size":"(\d+)"', kernel)
    cache = "bf16[" + ",".join(map(str, arrays[2].shape[:2]))  # as pools of pages begin
    copied = op == "mla_decode" and any(f"= {cache}" in line and " copy(" in line for line in text.splitlines())
    row = {"op": op, "device": device.device_kind, "shape": shape, "vmem": int(vmem[1]), "copied": copied}
    print(json.dumps(row), flush=True)


def decode_on(device, shape):
    B, T, N, R, E, Z, held = shape
    arrays = bf16((B, T, N, R)), bf16((B, T, N, E)), bf16((16384, Z, R)), bf16((16384, Z, E)), i32((B, held // Z)), i32((B,))
    assert not mla_decode.CHECKS["mosaic_tpu"](*arrays[:5])
    sizes = tuning.MLA_DECODE_TPU.get(device.device_kind, tuning.MLA_DECODE_TPU["other"])
    report(device, "mla_decode", shape, functools.partial(decode.mla_decode, scale=0.1, sizes=sizes), arrays)


def prefill_on(device, shape):
    B, T, S, N, H, V = shape
    arrays = bf16((B, T, N, H)), bf16((B, S, N, H)), bf16((B, S, N, V)), i32((B, T)), i32((B, T))
    assert not mla_prefill.CHECKS["mosaic_tpu"](*arrays[:3])
    sizes = tuning.MLA_PREFILL_TPU.get(device.device_kind, tuning.MLA_PREFILL_TPU["other"])
    report(device, "mla_prefill", shape, functools.partial(prefill.mla_prefill, scale=0.1, sizes=sizes), arrays)


for name in ("v5e:2x2", "v6e:2x2"):
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    for shape in DECODE:
        decode_on(device, shape)
    for shape in PREFILL:
        prefill_on(device, shape)
