"""Exports a model as programs that run without mla-jax: artefacts of `jax.export`, weights, a manifest, and a script for calls.

Everything is traced from shapes: neither the platform nor the devices of the mesh need be here. Weights are arguments of the
programs, and files with them."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import mla_jax
from convert import programs_manifest, programs_run
from convert.programs_tracing import PLATFORMS, Traced, Wanted, traced
from mla_jax.base.axes import parse_mesh
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported, shown
from mla_jax.base.limits import gib
from mla_jax.engine.llm import LLM
from mla_jax.engine.opening.opened import Opened
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.partition import Layout, refuse_uneven
from mla_jax.model import kernels
from mla_jax.model.transformer import Transformer
from mla_jax.weights.load import Progress
from mla_jax.weights.safetensors import STORED_DTYPES
from mla_jax.weights.save import write_tensors

CONTEXT = 4096  # tokens of a request, unless more are asked for
FILE = 4 << 30  # bytes of weights in one file
NAMES = {np.dtype(dtype): name for name, dtype in STORED_DTYPES.items()}


def export(
    source: LLM | Opened,
    path: str | Path,
    *,
    prompt: int = 256,
    rows: int = 8,
    context: int | None = None,
    platforms: str | Sequence[str] | None = None,
    mesh: str | Mapping[str, int] | None = None,
    kernels: bool = False,
    weights: bool = True,
    progress: Progress | None = None,
) -> None:
    """Writes the new folder `path`. The weights of an `Opened` model are loaded for it; without them, the model need not fit.

    - `prompt`: prompt tokens that one call reads. `rows`: requests at a time, on each data shard.
    - `context`: the most tokens of prompt and output together. None is the model's, at most 4,096.
    - `platforms`: some of "cpu", "cuda" and "tpu", which need not be here. None is the platform of the model's devices.
    - `mesh`: "data=4,tensor=2", or sizes by axis; the devices need not be here. None is the model's.
    - `kernels`: whether to take the kernels of this machine's device, on which alone the programs then run. Without they are
      XLA's, for any device of the platform.
    - `progress` is called with the bytes loaded and the bytes of an `Opened` model.

    Raises BadRequest for a path that exists, Unsupported for a model that cannot be exported, DoesNotFit for a full disk."""
    path = Path(path)
    model = _shapes(source)
    _refuse_path(path)
    _refuse(source, model)
    wanted = Wanted(
        prompt, rows, _context(source, context), _platforms(platforms, model), _layout(source, mesh), kernels
    )
    _check(wanted, model)
    if isinstance(source, Opened) and weights:
        model = source.load(progress)
    found = traced(model, wanted)
    manifest = _manifest(source, wanted, found)
    with _complete(path) as folder:
        _write(folder, found.files, nnx.state(found.model) if weights else None, manifest)


def _shapes(source: LLM | Opened) -> Transformer:
    """The model; one that is not loaded as shapes, on one device."""
    if isinstance(source, LLM):
        return source.model
    return source.checkpoint.on(Devices.default(source.checkpoint.device)).model(source.placement)


def _manifest(source: LLM | Opened, wanted: Wanted, found: Traced) -> dict[str, Any]:
    """Everything that a caller needs, without the files and their checksums."""
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "format": programs_run.FORMAT,
        "model": source.name,
        "ends": list(source.inputs.text.end_ids),
        "calling": programs_manifest.CALLING,
        "config": source.config.to_hf(),
        "versions": {"mla_jax": mla_jax.__version__} | versions,
        "mesh": wanted.layout.sizes,
        "sizes": wanted.sizes,
        "platforms": found.platforms,
        "weights": found.weights,
    }


def _refuse_path(path: Path) -> None:
    if os.path.lexists(path):
        raise BadRequest(f"{path} exists already", "choose another path, or delete it first")
    if not path.parent.is_dir():
        raise BadRequest(f"{path} cannot be written", f"there is no folder {path.parent}")


def _refuse(source: LLM | Opened, model: Transformer) -> None:
    """Raises Unsupported for a model that cannot be exported."""
    if find_spec("flatbuffers") is None:
        raise Unsupported(
            "an export needs the package flatbuffers", 'in the checkout: pip install ".[export]"'
        )
    if source.options.eviction.evict != "off":
        raise Unsupported("eviction cannot be exported", 'open the model with evict="off"')
    if model.dispatch.retrieval is not None:
        raise Unsupported("retrieval cannot be exported", 'open the model with retrieve="off"')
    if model.on_host():
        advice = 'open the model with experts="auto" where it fits, or on a mesh'
        raise Unsupported("experts on the CPU cannot be exported", advice)
    if source.options.processes.several:
        advice = "open it in one; the mesh of an export may be larger than the model's"
        raise Unsupported("a model of several processes cannot be exported", advice)


def _context(source: LLM | Opened, asked: int | None) -> int:
    """Tokens of a request. The model's own length is the limit where nothing is loaded, whatever fits the devices here."""
    longest = source.options.model.context or source.config.max_position_embeddings
    if isinstance(source, LLM):
        longest = source.context
    context = min(longest, CONTEXT) if asked is None else asked
    if type(context) is int and context > longest:
        advice = "open the model with a longer context"
        raise BadRequest(f"context is {context:,}, expected 1 to {longest:,}", advice)
    return context


def _layout(source: LLM | Opened, mesh: Any) -> Layout:
    if mesh is None or mesh == "":
        return source.model.dispatch.layout if isinstance(source, LLM) else source.checkpoint.layout
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


def _check(wanted: Wanted, model: Transformer) -> None:
    """Raises BadRequest for numbers that are none, Unsupported for a mesh or kernels that the model cannot have here."""
    for name, number in (("prompt", wanted.prompt), ("rows", wanted.rows), ("context", wanted.context)):
        if type(number) is not int or not 1 <= number <= programs_run.MOST:
            expected = f"expected a whole number from 1 to {programs_run.MOST:,}"
            raise BadRequest(f"{name} is {shown(number)}, {expected}")
    refuse_uneven(model.config, wanted.layout)
    device = model.dispatch.device
    alone = [PLATFORMS[platform] for platform in wanted.platforms] == [device.platform]
    if wanted.kernels and not (alone and kernels.kernels_here()):
        found = f"kernels for {', '.join(wanted.platforms)} cannot be exported here"
        advice = f"they are exported on the kind of device that they are for, this is {device.name}"
        raise Unsupported(found, advice)


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A folder to write into, which gets the name `path` at the end; after an error nothing is left."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield partial
        partial.rename(path)
    except OSError as e:
        raise BadRequest(f"{path} cannot be written", e.strerror or str(e)) from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, programs: Mapping[str, bytes], weights: Any, manifest: dict[str, Any]) -> None:
    """Programs, weights if there are any, script and manifest, which has the size and the SHA-256 of each of the others."""
    arrays = {} if weights is None else programs_manifest.names(weights)
    _refuse_full(folder, sum(map(len, programs.values())) + sum(map(_nbytes, arrays.values())))
    for name, content in programs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    files = _files(arrays)
    for file, names in files.items():
        specs = {name: (NAMES[np.dtype(arrays[name].dtype)], tuple(arrays[name].shape)) for name in names}
        write_tensors(folder / file, specs, ((name, np.asarray(arrays[name])) for name in names))
    shutil.copyfile(programs_run.__file__, folder / "run.py")
    manifest |= {
        "weight_files": list(files),
        "files": {name: _digest(folder / name) for name in [*programs, *files]},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _digest(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _refuse_full(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        advice = f"it takes {gib(needed)}, {gib(free)} are free"
        raise DoesNotFit(f"the export does not fit the disk of {folder.parent}", advice)


def _files(arrays: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the arrays in each file of weights."""
    groups: list[list[str]] = []
    size = FILE + 1
    for name, array in arrays.items():
        size += _nbytes(array)
        if size > FILE:
            groups.append([])
            size = _nbytes(array)
        groups[-1].append(name)
    return {f"weights-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def _nbytes(array: Any) -> int:
    return prod(array.shape) * array.dtype.itemsize
