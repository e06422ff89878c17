"""Programs of a model as artefacts of `jax.export`, with a manifest that says how they are called, and a script that calls them.

Everything is traced from shapes: neither the platform nor the devices of the mesh need be here. Weights are arguments of the
programs, and files beside them."""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from mla_jax.base import roofline
from mla_jax.base.axes import MESH_AXES, parse_mesh
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported, shown
from mla_jax.base.limits import gib
from mla_jax.base.options import Options
from mla_jax.base.qtensor import QTensor
from mla_jax.cache.paged import PAGE
from mla_jax.decode import loop, rows
from mla_jax.decode.outputs import STEPS
from mla_jax.decode.packing import of_shards
from mla_jax.decode.program_sharding import Spread
from mla_jax.decode.programs import Program
from mla_jax.engine import export_manifest, exported_run
from mla_jax.engine.core.size import PIECES
from mla_jax.mesh import partition
from mla_jax.mesh.partition import Layout, refuse_uneven
from mla_jax.model import ops
from mla_jax.model.transformer import Transformer
from mla_jax.weights.safetensors import DTYPES
from mla_jax.weights.save import write_tensors

# By JAX's name of a platform for programs: its name for devices
PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
CONTEXT = 4096  # tokens of a request, unless more are asked for
FILE = 4 << 30  # bytes of weights in one file
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class Wanted(NamedTuple):
    """What an export is for. Numbers of rows are those of one data shard."""

    prompt: int
    rows: int
    context: int
    platforms: tuple[str, ...]
    layout: Layout
    kernels: bool

    @classmethod
    def of(cls, model: Transformer, longest: int, asked: Mapping[str, Any]) -> "Wanted":
        """What the arguments of `LLM.export` say; raises BadRequest or Unsupported."""
        context = min(longest, CONTEXT) if asked["context"] is None else asked["context"]
        for name, number in {"prompt": asked["prompt"], "rows": asked["rows"], "context": context}.items():
            if type(number) is not int or number < 1:
                raise BadRequest(f"{name} is {shown(number)}, expected a whole number from 1 on")
        if context > longest:
            raise BadRequest(
                f"context is {context:,}, expected 1 to {longest:,}", "open the model with a longer context"
            )
        plan = _layout(model, asked["mesh"])
        platforms = _platforms(asked["platforms"], model)
        refuse_uneven(model.config, plan)
        if asked["kernels"]:
            _refuse_kernels(platforms, model)
        return cls(asked["prompt"], asked["rows"], context, platforms, plan, bool(asked["kernels"]))

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
        return {
            "rows": self.rows,
            "prompt": self.prompt,
            "context": self.context,
            "page": PAGE,
            "pages": self.pages,
            "width": self.width,
            "steps": STEPS,
        }


def _layout(model: Transformer, mesh: Any) -> Layout:
    if mesh is None:
        return model.dispatch.layout
    if not isinstance(mesh, str | Mapping):
        raise BadRequest(f"mesh is {shown(mesh)}", 'expected "data=4,tensor=2", or sizes by axis')
    return Layout(**parse_mesh(mesh, "mesh"))


def _platforms(asked: Any, model: Transformer) -> tuple[str, ...]:
    if asked is None:
        here = model.dispatch.device.platform
        return tuple(name for name, device in PLATFORMS.items() if device == here)
    names = (asked,) if isinstance(asked, str) else asked
    if not isinstance(names, Sequence) or not names or any(name not in PLATFORMS for name in names):
        raise BadRequest(f"platforms is {shown(asked)}", f"expected some of {', '.join(PLATFORMS)}")
    return tuple(dict.fromkeys(names))


def _refuse_kernels(platforms: tuple[str, ...], model: Transformer) -> None:
    """Raises Unsupported unless this machine has kernels, for the only platform that is asked for."""
    here = model.dispatch.device.platform
    if not ops.kernels_here() or [PLATFORMS[platform] for platform in platforms] != [here]:
        found = f"kernels for {', '.join(platforms)} cannot be exported here"
        raise Unsupported(
            found,
            f"they are exported on the kind of device that they are for, this is {model.dispatch.device.name}",
        )


def export(
    path: str | Path,
    model: Transformer,
    options: Options,
    name: str,
    ends: Sequence[int],
    longest: int,
    asked: Mapping[str, Any],
    weights: bool,
) -> None:
    """What `LLM.export` does, whose arguments are `asked`, with a model of arrays, or of shapes if no `weights` are written.

    `ends` are the tokens that end an answer, and `longest` is the most that `context` may be."""
    if options.eviction.evict != "off":
        raise Unsupported("eviction cannot be exported", 'open the model with evict="off"')
    refuse(Path(path), model)
    wanted = Wanted.of(model, longest, asked)
    write(path, model, wanted, {"model": name, "ends": list(ends)}, weights)


def write(
    path: str | Path, model: Transformer, wanted: Wanted, facts: Mapping[str, Any], weights: bool
) -> None:
    """Writes programs, manifest, script and, if asked to, `weights` of a model that has them, into the new folder `path`.

    `facts` go into the manifest. Raises BadRequest, Unsupported or DoesNotFit, and leaves nothing behind then."""
    path = Path(path)
    model = _without_drafts(model)
    platforms = {platform: _of_platform(model, platform, wanted) for platform in wanted.platforms}
    programs = {name: content for one in platforms.values() for name, content in one.files.items()}
    arrays = export_manifest.names(nnx.state(model)) if weights else {}
    files = _files(arrays) if weights else {}
    entries = {platform: one.entry for platform, one in platforms.items()}
    stored = next(iter(platforms.values())).weights
    mesh, sizes = wanted.layout.sizes, wanted.sizes
    manifest = export_manifest.manifest(model.config, mesh, sizes, entries, stored, files) | dict(facts)
    needed = sum(map(len, programs.values())) + sum(map(_nbytes, arrays.values()))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        _refuse_full(partial, needed)
        _write_programs(partial, programs)
        _write_weights(partial, files, arrays)
        shutil.copyfile(exported_run.__file__, partial / "run.py")
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        partial.rename(path)
    except OSError as e:
        raise BadRequest(f"{path} cannot be written", e.strerror or str(e)) from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_programs(folder: Path, programs: Mapping[str, bytes]) -> None:
    for name, content in programs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _write_weights(folder: Path, files: Mapping[str, Sequence[str]], arrays: Mapping[str, Any]) -> None:
    """Each file with the arrays of these names."""
    for file, names in files.items():
        specs = {name: (NAMES[np.dtype(arrays[name].dtype)], tuple(arrays[name].shape)) for name in names}
        write_tensors(folder / file, specs, ((name, np.asarray(arrays[name])) for name in names))


def refuse(path: Path, model: Transformer) -> None:
    """Raises BadRequest or Unsupported for what cannot be exported, or cannot be written there."""
    if os.path.lexists(path):
        raise BadRequest(f"{path} exists already", "choose another path, or delete it first")
    if not path.parent.is_dir():
        raise BadRequest(f"{path} cannot be written", f"there is no folder {path.parent}")
    if model.on_host():
        raise Unsupported(
            "experts on the CPU cannot be exported",
            'open the model with experts="auto" where it fits, or on a mesh',
        )
    if model.dispatch.retrieval is not None:
        raise Unsupported("retrieval cannot be exported", 'open the model with retrieve="off"')
    if jax.process_count() > 1:
        raise Unsupported(
            "a model of several processes cannot be exported",
            "open it in one; mesh= may be larger than its own",
        )
    try:
        import flatbuffers  # noqa: F401
    except ImportError as e:
        raise Unsupported(
            "an export needs the package flatbuffers", 'in the checkout: pip install ".[export]"'
        ) from e


def _refuse_full(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DoesNotFit(
            f"the export does not fit the disk of {folder.parent}",
            f"it takes {gib(needed)}, {gib(free)} are free",
        )


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


class Exported(NamedTuple):
    """The programs for one platform: their files by name, and their part of the manifest."""

    files: dict[str, bytes]
    entry: dict[str, Any]
    weights: list[dict[str, Any]]


class Call(NamedTuple):
    """A program, the arrays that it keeps, by name and as one device makes them, and what is sent to it."""

    program: Program
    kept: list[str]
    make: Callable[[Transformer], tuple]
    sent: dict[str, Any]  # to one data shard, by argument; of it only shapes and dtypes are read


def _of_platform(model: Transformer, platform: str, wanted: Wanted) -> Exported:
    """Traces the programs."""
    model = _on_mesh(model, platform, wanted.layout)
    kept = _kept(model, wanted)
    files, entries = {}, {}
    for name, call in _calls(model, wanted, list(kept)).items():
        file = f"{platform}/{name}.bin"
        sent = of_shards([list(call.sent.values())] * wanted.layout.data)
        with contextlib.nullcontext() if wanted.kernels else ops.without_kernels():
            exported = call.program.export(platform, call.make, *sent)
        files[file] = bytes(exported.serialize())
        entries[name] = _entry(name, file, call, exported)
    entry = {
        "kernels": "pallas" if wanted.kernels else "xla",
        "device": model.dispatch.device.name if wanted.kernels else "any",
        "compiler_options": loop.LOOP_OPTIONS.get(PLATFORMS[platform], {}),
        "kept": [export_manifest.described(name, array) for name, array in kept.items()],
        "programs": entries,
    }
    weights = [
        export_manifest.described(name, array)
        for name, array in export_manifest.names(nnx.state(model)).items()
    ]
    return Exported(files, entry, weights)


def _calls(model: Transformer, wanted: Wanted, kept: list[str]) -> dict[str, Call]:
    """The programs by name."""
    new = functools.partial(_new, wanted)
    table = [name for name in kept if name.startswith("rows.")]
    admit = Program(rows.admit, model, donate_argnums=(1,))
    prefill = Program(loop.prefill, model, donate_argnums=(1, 2))
    run = Program(loop.run, model, donate_argnums=(1, 2))
    return {
        "admit": Call(admit, table, lambda local: new(local)[1:], _admitting()),
        "prefill": Call(prefill, kept, new, _reading(wanted.prompt, min(wanted.rows, PIECES), wanted.width)),
        "run": Call(run, kept, new, _decoding(wanted.rows, wanted.width)),
    }


def _admitting() -> dict[str, Any]:
    """What is sent to `admit`."""
    return {"at": _numbers(rows.ADMITTED), "entry": rows.blank(rows.ADMITTED)}


def _reading(tokens: int, pieces: int, width: int) -> dict[str, Any]:
    """What is sent to `prefill`."""
    counts = _numbers(pieces)
    return {"at": counts, "tokens": _numbers(tokens), "counts": counts, "page_table": _numbers(pieces, width)}


def _decoding(rows: int, width: int) -> dict[str, Any]:
    """What is sent to `run`."""
    return {"at": _numbers(rows), "page_table": _numbers(rows, width), "steps": _numbers()}


def _new(wanted: Wanted, model: Transformer) -> tuple[Any, rows.Rows]:
    """The pool and the rows of one device."""
    return loop.new(model, wanted.rows, wanted.pages, counts=False)


def _entry(name: str, file: str, call: Call, exported: Any) -> dict[str, Any]:
    """A program's part of the manifest."""
    return {
        "file": file,
        "kept": call.kept,
        "sent": export_manifest.fields(call.sent),
        "returned": export_manifest.returned(name, exported, len(call.kept)),
        "calling_convention_version": exported.calling_convention_version,
    }


def _kept(model: Transformer, wanted: Wanted) -> dict[str, Any]:
    """The arrays that programs keep, by name, as shapes; on a mesh those of all devices."""
    spread, names = Spread.of(model), []
    graph, state = nnx.split(model)
    local = nnx.merge(graph, spread.local(state))

    def made() -> list[Any]:
        pool, table = _new(wanted, local)
        found = export_manifest.names({"pool": pool, "rows": table})
        names.extend(found)
        return list(found.values())

    shapes = spread.whole(jax.eval_shape(made))
    return dict(zip(names, shapes, strict=True))


def _files(arrays: Mapping[str, Any]) -> dict[str, list[str]]:
    """Which arrays each file of weights has."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        if groups[-1] and size + _nbytes(array) > FILE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += _nbytes(array)
    return {f"weights-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def _nbytes(array: Any) -> int:
    return prod(array.shape) * array.dtype.itemsize


def _numbers(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
