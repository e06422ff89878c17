"""Routed experts packed for the CPU's library, in the number format they have where it computes in that."""

import json
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, BadRequest, Unsupported, printable
from mla_jax.base.files import read_json, write_json
from mla_jax.base.qtensor import QTensor
from mla_jax.model import stream
from mla_jax.model.hot import HotExperts
from mla_jax.model.moe import Experts, HostExperts, MoE
from mla_jax.model.ops import plain
from mla_jax.model.stream import FORMATS
from mla_jax.weights.orbax_manifest import MAX_MANIFEST
from mla_jax.weights.orbax_store import writing

PRECISIONS = {ours: precision for precision, ours in FORMATS.items()}  # of the library, by our names of formats


def stored(kind: str, shape: tuple[int, ...], dtype: str | None) -> QTensor | jax.ShapeDtypeStruct:
    """What a stack read from numbers of a `kind` waits as until it is packed; `dtype` None keeps what the library computes in."""
    keep = dtype is None and kind in PRECISIONS
    return qtensor.abstract(kind, shape) if keep else jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def precision_of(gate: str, up: str) -> str:
    """What both are computed in, as one matrix, that are stored in such kinds."""
    return PRECISIONS.get(gate, "bf16") if gate == up else "bf16"


def packed_bytes(config: Config, precision: str, down: str | None = None) -> int:
    """What an expert takes once it is packed, `down` in a precision of its own (None: the same)."""
    from cpu_experts.layout import PANEL, TILE, panel_bytes

    model, width = config.hidden_size, config.moe_intermediate_size or 0
    return -(-width // TILE) * panel_bytes(precision, model)[2] + -(-model // PANEL) * panel_bytes(down or precision, width)[2]


def pack(gate: Any, up: Any, down: Any, precision: str | None = None) -> Any:
    """A `cpu_experts.Experts` of stacks `[X F D]`, `[X F D]` and `[X D F]`, packed or not.

    `precision` None keeps their own, and makes floats bf16."""
    from cpu_experts import Experts as Layer

    of_gate = precision or precision_of(_kind(gate), _kind(up))
    of_down = precision or PRECISIONS.get(_kind(down), "bf16")
    return Layer(_matrix(gate, of_gate), _matrix(up, of_gate), _matrix(down, of_down), of_gate, down_precision=of_down)


class Folder:
    """Packed experts that are kept in files, to be mapped at the next start; `made_of` says of what, and in which precision.

    Raises BadFile for a folder that was made of something else, BadRequest where there can be none."""

    def __init__(self, path: Path, made_of: dict[str, Any]):
        self.path, manifest = path, path / "packed_experts.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not any(path.iterdir()):
                write_json(manifest, made_of)
            known = manifest.exists()
        except (OSError, ValueError) as e:
            reason = printable(getattr(e, "strerror", None) or str(e))
            what = "expected a folder that can be read, or made and written"
            raise BadRequest(f"{path} cannot keep packed experts: {reason}", what, "choose another host_folder") from e
        if not known:
            raise BadFile(f"{path} is no folder of packed experts", "choose another folder, or an empty one")
        found, expected = read_json(manifest, MAX_MANIFEST), json.loads(json.dumps(made_of))
        if differing := [key for key in {**found, **expected} if found.get(key) != expected.get(key)]:
            what = "what differs: " + ", ".join(map(printable, differing))
            raise BadFile(f"{path} keeps packed experts of something else", what, "choose another folder, or delete it")

    def has(self, number: int) -> bool:
        return self._file(number).exists()

    def open(self, number: int) -> Any:
        """The `cpu_experts.Experts` of a layer, its weights mapped and not read."""
        from cpu_experts import Experts as Layer
        from cpu_experts import Unsupported as Other

        try:
            return Layer.open(self._file(number))
        except (ValueError, Other, OSError) as e:
            raise BadFile(f"{self._file(number)} cannot be used", str(e), "delete it, and it is made again") from e

    def keep(self, number: int, layer: Any) -> Any:
        """Saves a layer and gives what is mapped from the file in its place."""
        with writing(self._file(number), "layers saved before"), layer:
            layer.save(self._file(number))
        return self.open(number)

    def _file(self, number: int) -> Path:
        return self.path / f"layer_{number:03d}.experts"


def offload(layer: MoE, precision: str | None = None) -> None:
    """Moves a layer's routed experts from the device to the host."""
    if isinstance(layer.experts, Experts):
        weights = (layer.experts.gate[...], layer.experts.up[...], layer.experts.down[...])
        gate, up, down = jax.device_put(weights, device())
        layer.experts = HostExperts(pack(gate, up, down, precision))


def copies(layer: Any, ids: Sequence[int], dtype: jnp.dtype, target: Any) -> HotExperts:
    """Some experts of a packed layer on the device `target`, one by one: the numbers that the host has, and no more read."""
    from cpu_experts import ffi

    kind, waiting = stream.Kind.of(layer), device()
    fetch = jax.jit(lambda first: ffi.fetch(layer, first, 1))
    stacks = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=target), like_copies(kind, len(ids), dtype))
    for i, expert in enumerate(ids):
        with jax.default_device(waiting):  # as the CPU's program: a GPU's would pin all of the layer's memory
            sections = fetch(jnp.int32(expert))
        stacks = _insert(stacks, jax.device_put(sections, target), i, kind=kind, dtype=dtype)
    return HotExperts(ids, stacks, layer.experts)


def like_copies(kind: stream.Kind, count: int, dtype: jnp.dtype) -> tuple[jax.ShapeDtypeStruct | QTensor, ...]:
    """The stacks of so many copies, without memory."""
    return jax.eval_shape(partial(_for_kernels, dtype=dtype), stream.abstract(kind, count, dtype))


def _for_kernels(stacks: Sequence[Any], dtype: jnp.dtype) -> tuple[Any, ...]:
    """FP8 in blocks, which kernels take, as it is; all else as numbers: unpacked at every step, a few rows take longer with it
    than on the host (an H200, V2-Lite's shape, int8, 8 rows: 204 ms a step against 33)."""
    return tuple(w if isinstance(w, QTensor) and w.format == "fp8_block" else plain(w, dtype) for w in stacks)


@partial(jax.jit, static_argnames=("kind", "dtype"), donate_argnums=0)
def _insert(stacks: Any, sections: tuple[jax.Array, ...], index: jax.Array, *, kind: stream.Kind, dtype: jnp.dtype) -> Any:
    one = jax.tree.leaves(_for_kernels(stream.unpacked(kind, sections, dtype), dtype))
    held, tree = jax.tree.flatten(stacks)
    put = (jax.lax.dynamic_update_index_in_dim(stack, leaf[0], index, 0) for stack, leaf in zip(held, one, strict=True))
    return jax.tree.unflatten(tree, put)


def notes(layers: Collection[int]) -> tuple[str, ...]:
    """What a user should know of experts on this CPU, if those of any layers are there."""
    from cpu_experts import note

    found = note() if layers else None
    return () if found is None else (found,)


def refuse_without_library() -> None:
    """Raises Unsupported where programs of this platform cannot call experts on the CPU."""
    from cpu_experts import Unsupported as Missing
    from cpu_experts import ffi, isa

    platform, reason = jax.devices()[0].platform, None
    try:
        isa()
    except Missing as e:
        reason = str(e)
    if reason := reason or ffi.why_not("cuda" if platform == "gpu" else platform):
        raise Unsupported("experts cannot be computed on the CPU here", reason)


def device() -> Any:
    """Where stacks wait to be packed."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as e:
        raise Unsupported("experts on the host need JAX's CPU backend", "set JAX_PLATFORMS to cuda,cpu, or unset it") from e


def _kind(w: Any) -> str:
    return w.format if isinstance(w, QTensor) else "BF16"


def _matrix(w: Any, precision: str) -> Any:
    """What the library takes: parts of its own format, else numbers to be quantised."""
    if isinstance(w, QTensor) and PRECISIONS.get(w.format) == precision:
        return tuple(np.asarray(part) for part in w.parts)
    return np.asarray(plain(w, jnp.dtype("bfloat16" if precision == "bf16" else "float32")))
