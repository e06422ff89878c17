"""Routed experts packed for the CPU's library, in the number format they are stored in where it computes in that one."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base import qtensor
from mla_jax.base.errors import BadFile, Unsupported
from mla_jax.base.qtensor import QTensor
from mla_jax.model.ops import plain
from mla_jax.offload.streaming import KERNEL_FORMATS, Packing

# The library's precisions, by our names of formats
PRECISIONS = {ours: precision for precision, ours in KERNEL_FORMATS.items()}


def unpacked_shape(format: str, shape: tuple[int, ...], dtype: str | None) -> QTensor | jax.ShapeDtypeStruct:
    """Shape and format in which a stack stored in `format` is read before packing; a requested `dtype` makes floats of all."""
    keep = dtype is None and format in PRECISIONS
    return qtensor.abstract(format, shape) if keep else jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def precision_of(gate: str, up: str) -> str:
    """The library's number format for two matrices that are packed as one, from the formats they are stored in."""
    return PRECISIONS.get(gate, "bf16") if gate == up else "bf16"


def packed_bytes(packing: Packing) -> int:
    """Bytes of one packed expert."""
    from cpu_experts.layout import PANEL, TILE, panel_bytes

    gate_up = -(-packing.width // TILE) * panel_bytes(packing.precision, packing.model)[2]
    return gate_up + -(-packing.model // PANEL) * panel_bytes(packing.down_precision, packing.width)[2]


def pack_experts(gate: Any, up: Any, down: Any, precision: str | None = None) -> Any:
    """A `cpu_experts.Experts` of stacks `[X F D]`, `[X F D]` and `[X D F]`, quantised or not.

    `precision` None keeps their own, and makes bf16 of floats."""
    from cpu_experts import Experts as Layer

    of_gate = precision or precision_of(_format(gate), _format(up))
    of_down = precision or PRECISIONS.get(_format(down), "bf16")
    return Layer(
        _matrix(gate, of_gate), _matrix(up, of_gate), _matrix(down, of_down), of_gate, down_precision=of_down
    )


def gguf_blocks_of(w: np.ndarray, precision: str) -> np.ndarray:
    """GGUF's blocks of floats `[.. K]`, by the library's quantiser. Raises ValueError for floats of which it makes none."""
    from cpu_experts.blocks import quantize as blocks_of

    return blocks_of(w, precision)


def map_packed(path: Path) -> Any:
    """The `cpu_experts.Experts` of a file, its weights mapped and not read. Raises BadFile."""
    from cpu_experts import Experts as Layer
    from cpu_experts import Unsupported as Other

    try:
        return Layer.open(path)
    except (ValueError, Other, OSError) as e:
        raise BadFile(f"{path} cannot be used", str(e), "delete it, and it is made again") from e


def cpu_device() -> Any:
    """Where stacks are kept until they are packed."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as e:
        raise Unsupported(
            "experts on the host need JAX's CPU backend", "set JAX_PLATFORMS to cuda,cpu, or unset it"
        ) from e


def _format(w: Any) -> str:
    return w.format if isinstance(w, QTensor) else "BF16"


def _matrix(w: Any, precision: str) -> Any:
    """A weight as the library takes it: the parts of its own format, else numbers to quantise."""
    if isinstance(w, QTensor) and PRECISIONS.get(w.format) == precision:
        return tuple(np.asarray(part) for part in w.parts)
    return np.asarray(plain(w, jnp.dtype("bfloat16" if precision == "bf16" else "float32")))
