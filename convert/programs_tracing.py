"""Traces a model's programs for platforms and meshes that need not be here, and describes their arguments."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from convert import programs_manifest
from mla_jax.base import roofline
from mla_jax.base.axes import MESH_AXES
from mla_jax.base.qtensor import QTensor
from mla_jax.cache.paged import PAGE
from mla_jax.decode import loop, rows
from mla_jax.decode.model_weights import Weights
from mla_jax.decode.outputs import STEPS
from mla_jax.decode.packing import of_shards
from mla_jax.decode.program_sharding import Spread
from mla_jax.decode.programs import Program
from mla_jax.mesh import partition
from mla_jax.mesh.partition import Layout
from mla_jax.model import kernels
from mla_jax.model.transformer import Transformer

# By JAX's name of a platform for programs: its name for devices
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


class Wanted(NamedTuple):
    """Sizes and devices of an export. Numbers of rows are those of one data shard."""

    prompt: int
    rows: int
    context: int
    platforms: tuple[str, ...]
    layout: Layout
    kernels: bool

    @property
    def width(self) -> int:
        """Pages of a row."""
        return -(-self.context // PAGE)

    @property
    def pages(self) -> int:
        return self.rows * self.width

    @property
    def sizes(self) -> dict[str, int]:
        """For the manifest."""
        own = {"rows": self.rows, "prompt": self.prompt, "context": self.context}
        return own | {"page": PAGE, "pages": self.pages, "width": self.width, "steps": STEPS}


class Traced(NamedTuple):
    """Programs: their files by name, each platform's entry of the manifest, and the model whose weights they take."""

    files: dict[str, bytes]
    platforms: dict[str, dict[str, Any]]
    weights: list[dict[str, Any]]
    model: Transformer


class Call(NamedTuple):
    """A program, the names of the arrays that it keeps, a function that makes them on one device, and its other arguments."""

    program: Program
    kept: list[str]
    make: Callable[[Transformer], tuple]
    sent: dict[str, Any]  # to one data shard, by argument; only shapes and dtypes are read


def traced(model: Transformer, wanted: Wanted) -> Traced:
    """The programs of `model`, of arrays or of shapes, for each platform; none of them drafts."""
    model = _without_drafts(model)
    files, entries, weights = {}, {}, []
    for platform in wanted.platforms:
        placed = _on_mesh(model, platform, wanted.layout)
        found, entries[platform] = _of_platform(placed, platform, wanted)
        files |= found
        arrays = programs_manifest.names(nnx.state(placed))
        weights = [programs_manifest.described(name, array) for name, array in arrays.items()]
    return Traced(files, entries, weights, model)


def _without_drafts(model: Transformer) -> Transformer:
    """The model alone: nothing that is exported drafts."""
    found = nnx.merge(*nnx.split(model))
    found.mtp = nnx.List([])
    return found


def _on_mesh(model: Transformer, platform: str, plan: Layout) -> Transformer:
    """The shapes of a model on devices that may not be here."""
    mesh = AbstractMesh(tuple(plan), MESH_AXES)

    def shaped(value: Any, spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec) if plan.devices > 1 else None
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def laid(words: tuple[str, ...], value: Any) -> Any:
        specs = plan.specs(words, value)
        if not isinstance(value, QTensor):
            return shaped(value, specs)
        return dataclasses.replace(value, parts=tuple(map(shaped, value.parts, specs.parts)))

    graph, state = nnx.split(model)
    found = nnx.merge(graph, partition.of_parameters(state, laid))
    device = model.dispatch.device
    if device.platform != PLATFORMS[platform]:
        device = roofline.device("", PLATFORMS[platform])
    found.dispatch = dataclasses.replace(model.dispatch, layout=plan, device=device)
    return found


def _of_platform(
    model: Transformer, platform: str, wanted: Wanted
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The programs' files, and the platform's entry of the manifest."""
    kept = _kept(model, wanted)
    files, entries = {}, {}
    for name, call in _calls(model, wanted, list(kept)).items():
        file = f"{platform}/{name}.bin"
        exported = _exported(call, platform, wanted)
        files[file] = bytes(exported.serialize())
        entries[name] = _entry(name, file, call, exported)
    return files, {
        "kernels": "pallas" if wanted.kernels else "xla",
        "device": model.dispatch.device.name if wanted.kernels else "any",
        "compiler_options": loop.LOOP_OPTIONS.get(PLATFORMS[platform], {}),
        "kept": [programs_manifest.described(name, array) for name, array in kept.items()],
        "programs": entries,
    }


def _exported(call: Call, platform: str, wanted: Wanted) -> Any:
    sent = of_shards([list(call.sent.values())] * wanted.layout.data)
    with contextlib.nullcontext() if wanted.kernels else kernels.without_kernels():
        return call.program.export(platform, call.make, *sent)


def _calls(model: Transformer, wanted: Wanted, kept: list[str]) -> dict[str, Call]:
    """The programs by name."""
    new = functools.partial(_new, wanted)
    table = [name for name in kept if name.startswith("rows.")]
    weights = Weights(model)
    admit = Program(rows.admit, weights, donated=1)
    prefill, run = (Program(function, weights, donated=2) for function in (loop.prefill, loop.run))
    return {
        "admit": Call(admit, table, lambda local: new(local)[1:], _admitting()),
        "prefill": Call(prefill, kept, new, _reading(wanted.prompt, wanted.width)),
        "run": Call(run, kept, new, _decoding(wanted.rows, wanted.width)),
    }


def _admitting() -> dict[str, Any]:
    """Arguments of `admit`."""
    return {"at": _numbers(rows.ADMITTED), "entry": rows.default_entries(rows.ADMITTED)}


def _reading(tokens: int, width: int) -> dict[str, Any]:
    """Arguments of `prefill`, which reads tokens of one row."""
    one = _numbers(1)
    return {"at": one, "tokens": _numbers(tokens), "counts": one, "page_table": _numbers(1, width)}


def _decoding(rows: int, width: int) -> dict[str, Any]:
    """Arguments of `run`."""
    return {"at": _numbers(rows), "page_table": _numbers(rows, width), "steps": _numbers()}


def _new(wanted: Wanted, model: Transformer) -> tuple[Any, rows.Rows]:
    """The pool and the rows of one device."""
    return loop.new(model, wanted.rows, wanted.pages, counts=False)


def _entry(name: str, file: str, call: Call, exported: Any) -> dict[str, Any]:
    """A program's part of the manifest."""
    return {
        "file": file,
        "kept": call.kept,
        "sent": programs_manifest.fields(call.sent),
        "returned": programs_manifest.returned(name, exported, len(call.kept)),
        "calling_convention_version": exported.calling_convention_version,
    }


def _kept(model: Transformer, wanted: Wanted) -> dict[str, Any]:
    """The arrays that programs keep, by name, as shapes; on a mesh those of all devices."""
    spread, names = Spread.of(model), []
    graph, state = nnx.split(model)
    local = nnx.merge(graph, spread.local(state))

    def made() -> list[Any]:
        pool, table = _new(wanted, local)
        found = programs_manifest.names({"pool": pool, "rows": table})
        names.extend(found)
        return list(found.values())

    shapes = spread.whole(jax.eval_shape(made))
    return dict(zip(names, shapes, strict=True))


def _numbers(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
