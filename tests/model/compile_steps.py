"""Compiles steps of a V2-Lite-shaped model of three layers for an H200 on a machine without one; prints a JSON line per step.

For each: how often kernels of ours are called, the bytes of the pool and of temporaries, and operations that copy the pool."""

import functools
import json
import re
import sys
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mla_jax import Config, Transformer
from mla_jax.base import roofline
from mla_jax.cache.paged import COPIED
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, Retrieval
from mla_jax.decode import loop, page_copy, rows, speculative
from mla_jax.decode.packing import unpack
from mla_jax.model.dispatch import Dispatch
from pallas_kernels import choice

DEVICE, PAGES, WIDTH = "NVIDIA H200", 20_000, 64
# the description that the kernels of pallas_kernels are compiled with
H200 = (Path(__file__).parents[1] / "pallas_kernels" / "compile.py").read_text().split('H200 = """')[1].split('"""')[0]

choice.DEVICES = {"mosaic_gpu": (lambda: True, DEVICE), "mosaic_tpu": (lambda: False, "")}
choice.device = lambda: DEVICE
target = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")
here = NamedSharding(Mesh(np.array(target.devices[:1]), ("x",)), PartitionSpec())


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), tree)


def whole(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=here)


def model_of(kv_cache: str, retrieval: Retrieval | None = None) -> Transformer:
    config = Config.preset("v2_lite", num_hidden_layers=3, num_nextn_predict_layers=1)
    dispatch = Dispatch(kv_cache=kv_cache, device=roofline.DEVICES[DEVICE], retrieval=retrieval)
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dispatch=dispatch, mtp=True)))
    return nnx.merge(graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), state))


def compiled(model: Transformer, function, *args) -> dict:
    graph, state = nnx.split(model)
    pool, table = jax.eval_shape(lambda: (model.new_pool(PAGES), rows.new_rows(model, 64)))

    numbers = all(array.dtype == jnp.int32 for array in jax.tree.leaves(args))  # which are sent as one array

    def step(state, pool, table, sent):
        return function(nnx.merge(graph, state), pool, table, *(unpack(sent, args) if numbers else sent))

    given = shapes(state), shapes(pool), shapes(table), packed(args) if numbers else args
    program = jax.jit(step, donate_argnums=(1, 2), compiler_options=loop.LOOP_OPTIONS["gpu"]).trace(*given).lower().compile()
    text = program.as_text()
    sizes = {",".join(map(str, flat)) for a in pool.values() for flat in (a.shape, (prod(a.shape[:2]), *a.shape[2:]))}
    moving = re.compile(r" = \w+\[(" + "|".join(sizes) + r")\]\S* (copy|copy-start|convert|transpose|scatter)\(")
    return {
        "kernels": text.count('custom_call_target="mosaic_gpu'),
        "pool": sum(prod(a.shape) * a.dtype.itemsize for a in pool.values()),
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "aliased": program.memory_analysis().alias_size_in_bytes,
        "sorts": text.count(" sort("),
        "slices": text.count('"name":"dynamic_slice_fusion"'),
        "copies": [found.group(0) for found in moving.finditer(text) if found.group(2) != "scatter"],
    }


def packed(args: tuple) -> jax.ShapeDtypeStruct:
    """Numbers as one array."""
    return whole(sum(prod(array.shape) for array in jax.tree.leaves(args)))


def copied_out(model, pool, table, pages):
    return *page_copy.copy_out(model, pool, pages), table


def copied_in(model, pool, table, some, pages):
    return *page_copy.copy_in(model, pool, some, pages), table


def contents_of(model: Transformer) -> dict:
    """Of as many pages as are copied at a time."""
    page = jax.eval_shape(lambda: model.new_pool(1))
    return shapes({name: jax.ShapeDtypeStruct((COPIED, *one.shape), one.dtype) for name, one in page.items()})


LINE = loop.Line(whole(64), whole(512), whole(64), whole(64, WIDTH))
with_mtp = functools.partial(functools.partial, drafter=speculative.Mtp(3))

if __name__ == "__main__":
    for kv_cache in ("auto", "fp8"):
        model = model_of(kv_cache)
        steps = {
            "run, 8 rows": (with_mtp(loop.run), whole(8), whole(8, WIDTH), whole()),
            "run with drafts, 8 rows": (with_mtp(speculative.run_with_drafts), whole(8), whole(8, WIDTH), whole(), whole()),
            "prefill, 2048": (with_mtp(loop.prefill), whole(8), whole(2048), whole(8), whole(8, WIDTH)),
            "mixed step, 512, 8 rows": (with_mtp(loop.mixed_step), LINE, whole(8), whole(8, WIDTH)),
            "pages to the host": (copied_out, whole(COPIED)),
            "pages from the host": (copied_in, contents_of(model), whole(COPIED)),
        }
        for name, (function, *args) in steps.items():
            print(json.dumps({"step": f"{name}, {kv_cache}"} | compiled(model, function, *args)), flush=True)
    for policy in RETRIEVAL_POLICIES.values():
        model = model_of("auto", Retrieval(policy, 1024, dense=1))
        found = compiled(model, loop.run, whole(8), whole(8, WIDTH), whole())
        print(json.dumps({"step": f"run, 8 rows, {policy.name}"} | found), flush=True)
    sys.exit()
