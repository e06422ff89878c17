"""Compiles all programs of models of a few layers, most shaped as V2-Lite, for an H200 without having one; prints JSON lines.

    python compile_steps.py [KIND ..]       (of KINDS; by default all)

For each: how often kernels of ours are called, the bytes of the pool, of temporaries and of what the plan has for these,
operations that copy the pool, and those that write a half of kv_b_proj in bfloat16."""

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mla_jax import Config, Transformer
from mla_jax.base import qtensor, roofline
from mla_jax.base.qtensor import BY_COLUMN, REORDERED
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.paged import COPIED, PAGE
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, Retrieval
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.decode.programs import Program
from mla_jax.decode.speculative import NOBODY, Drafter, Mtp
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.temporaries import choosing, temporaries
from pallas_kernels import choice, packed

DEVICE, PAGES, ROWS, PIECES = "NVIDIA H200", 20_000, 1024, 64
NARROW, WIDE = 64, 2560  # pages of a row
# the description that the kernels of pallas_kernels are compiled with
H200 = (Path(__file__).parents[1] / "pallas_kernels" / "compile.py").read_text().split('H200 = """')[1].split('"""')[0]

choice.DEVICES = {"mosaic_gpu": (lambda: True, DEVICE), "mosaic_tpu": (lambda: False, "")}
choice.device = lambda: DEVICE
target = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")
here = NamedSharding(Mesh(np.array(target.devices[:1]), ("x",)), PartitionSpec())


class Kind(NamedTuple):
    dispatch: Mapping[str, Any] = MappingProxyType({})
    format: str = "bf16"  # of the weights
    drafter: Drafter = NOBODY
    evicts: Selection | None = None
    wide: int = WIDE
    preset: str = "v2_lite"
    changes: Mapping[str, Any] = MappingProxyType({})  # of the config


INDEXERS = {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "q_lora_rank": 1536}
KINDS = {
    "bf16": Kind(drafter=Mtp(3)),
    "fp8 cache": Kind({"kv_cache": "fp8"}),
    "fp8 weights": Kind(format="fp8_block"),
    "Q4_K": Kind(format="Q4_K"),
    "indexers": Kind(drafter=Mtp(3), changes={**INDEXERS, "indexer_types": ("full", "shared", "full")}),
    "naive": Kind({"attention": "naive"}, wide=NARROW),
    "evicting": Kind(evicts=Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["ada"]), wide=NARROW),
    "evicting heads": Kind(
        {"attention": "naive"}, evicts=Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["ada"]), wide=NARROW
    ),
    "growing queries": Kind(preset="mistral_small_4"),
    # layers in pairs, and the experts of one of two devices
    "experts added late": Kind(preset="longcat_flash", changes={"num_hidden_layers": 4, "n_routed_experts": 256}),
} | {name: Kind({"retrieval": Retrieval(policy, 1024, dense=1)}) for name, policy in RETRIEVAL_POLICIES.items()}


def on_target(variable: nnx.Variable, format: str) -> Any:
    """The shape of a parameter, packed where it may be, on the device that is compiled for."""
    about = variable.get_metadata()
    value: Any = jax.ShapeDtypeStruct(variable.shape, jnp.float32 if about["exact"] else jnp.bfloat16)
    if about["packs"] and format != "bf16":
        format = "Q5_0" if format == "Q4_K" and variable.shape[-1] % 256 else format
        is_reordered = about["role"] != "rows" and packed.why_not(format, variable.shape) is None
        value = qtensor.abstract(format + REORDERED * is_reordered, variable.shape)
    if about["role"] == "heads" and format == "fp8_block":
        value = qtensor.abstract(BY_COLUMN, variable.shape)
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=here), value)


def model_of(kind: Kind) -> Transformer:
    mtp = int(isinstance(kind.drafter, Mtp))
    layers = {"num_hidden_layers": 3, "num_nextn_predict_layers": mtp}
    config = Config.preset(kind.preset, **(layers | kind.changes))
    dispatch = Dispatch(device=roofline.DEVICES[DEVICE], **kind.dispatch)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dispatch=dispatch, mtp=bool(mtp)))
    graph, state = nnx.split(model)
    for _, variable in nnx.to_flat_state(state):
        variable.set_value(on_target(variable, kind.format))
    return nnx.merge(graph, state)


def shapes_of(kind: Kind, chunk: int) -> Iterator[ProgramShape]:
    """The largest of its programs, and a small one of each form of attention."""
    for rows, width in ((8, NARROW), (ROWS, kind.wide)):
        yield ProgramShape("run", width, rows)
        yield ProgramShape("mixed_step", width, rows, chunk, PIECES)
        if kind.preset != "v2_lite":
            return  # only layers are others
    yield ProgramShape("prefill", kind.wide, line=64, pieces=PIECES, scores=True)
    if kind.drafter is not NOBODY:
        yield ProgramShape("run_with_drafts", kind.wide, 8)
    if kind.evicts is not None:
        yield from (ProgramShape(name, kind.wide, 1) for name in ("observe", "move"))
    elif not kind.dispatch:
        yield from (ProgramShape(name, rows=COPIED) for name in ("copy_out", "copy_in"))


def compiled(program: Program, given: tuple, pool: dict[str, jax.ShapeDtypeStruct], half: tuple[int, ...]) -> dict[str, Any]:
    found = program.lower(*given).compile()
    text, memory = found.as_text(), found.memory_analysis()
    sizes = {",".join(map(str, flat)) for a in pool.values() for flat in (a.shape, (prod(a.shape[:2]), *a.shape[2:]))}
    moving = re.compile(r" = \w+\[(" + "|".join(sizes) + r")\]\S* (copy|copy-start|convert|transpose|scatter)\(")
    return {
        "kernels": text.count('custom_call_target="mosaic_gpu'),
        "pool": sum(prod(a.shape) * a.dtype.itemsize for a in pool.values()),
        "temporaries": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "sorts": text.count(" sort("),
        "slices": text.count('"name":"dynamic_slice_fusion"'),
        "widened": len(re.findall(rf" = bf16\[{','.join(map(str, half))}\]\S* fusion\(", text)),
        "copies": [one.group(0) for one in moving.finditer(text) if one.group(2) != "scatter"],
    }


def main(names: list[str]) -> None:
    for name in names or KINDS:
        kind = KINDS[name]
        model = model_of(kind)
        programs = Programs(model, drafter=kind.drafter, evicts=kind.evicts)
        made, text = programs.new.function, 0 if kind.evicts is None else PAGE * kind.wide
        pool, rows = jax.eval_shape(functools.partial(made, model, ROWS, PAGES, text))
        planned = temporaries(model, ROWS, kind.drafter.most, 8) + choosing(model, ROWS, WIDE)
        about = {"kind": name, "planned": planned, "heads": model.dispatch.caches_heads}
        for shape in shapes_of(kind, model.dispatch.chunk(model)):
            given = programs._arguments(pool, rows, shape)
            found = compiled(programs.all[shape.name], given, pool, model.layers[0].attn.uk.shape)
            print(json.dumps(about | shape._asdict() | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
