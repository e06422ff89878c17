"""The contiguous cache: one row a sequence, one slot a held token, filled in order of arrival.

A layer is `{name: [B S ..]}` with the held tokens' `positions [B S]` and the `length [B]`; a cache is a tuple of layers. It knows
nothing of what the names mean: a form of attention says what it remembers. Unused slots hold zeros and the position EMPTY."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mla_jax.base.batch import Batch, bucket

EMPTY = jnp.iinfo(jnp.int32).max  # later than every query, so a causal mask hides it
STEP = 1 << 14

Layer = dict[str, Array]
Cache = tuple[Layer, ...]


def slots_for(tokens: int) -> int:
    """The slots of a row that is to hold so many: few different numbers, so that programs repeat, and none far too large."""
    return bucket(tokens, 64) if tokens <= STEP else -(-tokens // STEP) * STEP


def init(token: Mapping[str, jax.ShapeDtypeStruct], layers: int, rows: int, slots: int) -> Cache:
    """An empty cache for `rows` sequences; `token` shows the shape and dtype of what one token leaves in each layer."""

    def layer() -> Layer:
        held = {name: jnp.zeros((rows, slots, *one.shape[2:]), one.dtype) for name, one in token.items()}
        return held | {"positions": jnp.full((rows, slots), EMPTY, jnp.int32), "length": jnp.zeros(rows, jnp.int32)}

    return tuple(layer() for _ in range(layers))


def append(layer: Layer, new: Mapping[str, Shaped[Array, "B T ..."]], batch: Batch) -> Layer:
    """Writes the unmasked tokens of `new` behind those held; tokens beyond the last slot are dropped."""
    rows, slots = batch.positions.shape[0], layer["positions"].shape[1]
    count = jnp.cumsum(batch.mask, axis=1, dtype=jnp.int32)
    slot = jnp.where(batch.mask, layer["length"][:rows, None] + count - 1, slots)
    at = (jnp.arange(rows)[:, None], slot)
    written = {name: layer[name].at[at].set(value, mode="drop") for name, value in {**new, "positions": batch.positions}.items()}
    return written | {"length": layer["length"].at[:rows].add(count[:, -1])}


def positions_after(layer: Layer, batch: Batch) -> Int[Array, "B S"]:
    """The positions that `read` gives once the batch's tokens are appended to `layer`."""
    return read(append({name: layer[name] for name in ("positions", "length")}, {}, batch), batch)[1]


def read(layer: Layer, batch: Batch) -> tuple[Layer, Int[Array, "B S"]]:
    """What the batch's rows hold, and the positions of it (EMPTY where nothing is)."""
    held = {name: value[: batch.positions.shape[0], : batch.span] for name, value in layer.items() if name != "length"}
    return held, held.pop("positions")
