"""Compiles a checkpoint's programs for a mesh of H200s on a machine without one; prints a JSON line per program.

    python compile_mesh.py FOLDER data=8 [TOKENS]

For each: bytes of one device, how often kernels of ours are called, the messages, and seconds of the compiler. Of the files in
FOLDER only headers are read. Each data shard reads TOKENS of prompts at a time; the default is the model's own chunk."""

import collections
import json
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from mla_jax.base import roofline
from mla_jax.base.axes import MESH_AXES, parse_mesh
from mla_jax.base.qtensor import QTensor
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.mesh.devices import Devices
from mla_jax.weights.load import ON_DEVICE, Checkpoint
from pallas_kernels import choice

DEVICE, ROWS, CONTEXT = "NVIDIA H200", 64, 4096
PAGES = ROWS * CONTEXT // PAGE
# the description that the kernels of pallas_kernels are compiled with
H200 = (Path(__file__).parents[1] / "pallas_kernels" / "compile.py").read_text().split('H200 = """')[1].split('"""')[0]
MESSAGES = re.compile(r"= .*? (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all)(?:-start)?\(")

choice.DEVICES = {"mosaic_gpu": (lambda: True, DEVICE), "mosaic_tpu": (lambda: False, "")}
choice.device = lambda: DEVICE


def planned(text: str) -> Devices:
    """A mesh of devices that are not here."""
    sizes = [parse_mesh(text).get(axis, 1) for axis in MESH_AXES]
    target = topologies.get_topology_desc(
        platform="cuda", topology_name="h200s", target_config=H200, topology=f"1x1x{int(np.prod(sizes))}"
    )
    return Devices(Mesh(np.array(target.devices).reshape(sizes), MESH_AXES), roofline.DEVICES[DEVICE])


def on_mesh(checkpoint: Checkpoint):
    """The model of shapes that lie on the mesh."""

    def laid(path, value):
        specs = checkpoint.layout.specs(checkpoint.words(path), value)
        if isinstance(value, QTensor):
            return QTensor(value.format, tuple(map(shaped, value.parts, specs.parts)), value.shape)
        return shaped(value, specs)

    def shaped(value, spec):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(checkpoint.devices.mesh, spec))

    return checkpoint._merged({path: laid(path, value) for path, value in checkpoint.parameters().items()}, {}, ON_DEVICE)


def numbers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def measured(name: str, lowered: jax.stages.Lowered) -> dict:
    start = time.perf_counter()
    program = lowered.compile()
    text, memory = program.as_text(), program.memory_analysis()
    return {
        "program": name,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "kernels": text.count('custom_call_target="mosaic_gpu'),
        "messages": collections.Counter(MESSAGES.findall(text)),
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    folder, mesh, *tokens = sys.argv[1:]
    checkpoint = Checkpoint(Path(folder), devices=planned(mesh))
    model = on_mesh(checkpoint)
    programs, width = Programs(model), CONTEXT // PAGE
    kept = jax.eval_shape(lambda: checkpoint.model().new_pool(PAGES))
    pool = programs.spread.whole(kept)
    _, rows = jax.eval_shape(lambda: programs.new.function(checkpoint.model(), ROWS, PAGES))
    rows = programs.spread.whole(rows)
    print(json.dumps({"weights": checkpoint.bytes(), "pool": sum(a.size * a.dtype.itemsize for a in kept.values())}), flush=True)
    decode = programs.run.lower(pool, rows, numbers(ROWS), numbers(ROWS, width), numbers())
    print(json.dumps(measured(f"decode, {ROWS} rows a shard", decode)), flush=True)
    line = int(tokens[0]) if tokens else model.dispatch.chunk(checkpoint.model())
    read = programs.prefill.lower(pool, rows, numbers(8), numbers(line), numbers(8), numbers(8, width), None)
    print(json.dumps(measured(f"a prompt, {line:,} tokens a shard", read)), flush=True)
