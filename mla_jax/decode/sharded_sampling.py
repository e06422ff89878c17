"""Distributed sampling: an all-to-all turns vocabulary shards into row shards; each device samples its rows.

So no device ever has the logits of all rows, and sampling is the one-device code. `own_rows` is a device's part of the rows along
the axis `TENSOR`, `of_all` all-gathers the results. On one device both do nothing."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from mla_jax.base.axes import TENSOR
from mla_jax.decode import sampling
from mla_jax.decode.outputs import Likely, likely
from mla_jax.decode.sampling import Sampling
from mla_jax.mesh import across
from mla_jax.model.transformer import Transformer


def own_rows(rows: Any) -> Any:
    """This device's part of the rows, on the first axis; padded with copies of the last row."""
    parts = across.size(TENSOR)
    if parts == 1:
        return rows
    return across.own(jax.tree.map(lambda leaf: _padded(leaf, parts), rows), TENSOR)


def of_all(found: Any, rows: int) -> Any:
    """All-gathers the devices' results, cut to `rows` rows."""
    if across.size(TENSOR) == 1:
        return found
    return jax.tree.map(lambda leaf: leaf[:rows], across.gathered(found, TENSOR))


def _padded(leaf: Array, parts: int) -> Array:
    padding = jnp.minimum(jnp.arange(leaf.shape[0] + -leaf.shape[0] % parts), leaf.shape[0] - 1)
    return leaf if padding.size == leaf.shape[0] else leaf[padding]


def row_logits(model: Transformer, hidden: Float[Array, "B *T D"]) -> Float[Array, "b *T W"]:
    """Whole logits of the rows that this device samples."""
    with jax.named_scope("unembed"):
        if not model.cuts_words:
            return model.own_words(own_rows(hidden))
        parts = across.size(TENSOR)
        return across.swapped(model.own_words(_padded(hidden, parts)), TENSOR, cut=0, join=-1)


def masked_logits(logits: Float[Array, "b W"], masks: UInt32[Array, "B words"]) -> Float[Array, "b W"]:
    """The logits of the tokens that masks of all rows allow, else -inf. A token is a bit of a word, the lowest first."""
    mine = own_rows(masks)
    bits = mine[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(mine.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def sample(
    logits: Float[Array, "b W"],
    seen: UInt16[Array, "H W"],
    rows: Int[Array, " B"],
    position: Int[Array, " B"],
    asked: Sampling,
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """As `sampling.choose`, for all rows, from the logits of this device's."""
    mine, at, given = own_rows((rows, position, jax.tree.map(jnp.asarray, asked)))
    return of_all(sampling.choose(logits, seen, mine, at, given), rows.shape[0])


def likely_of(logits: Float[Array, "b T W"], tokens: Int[Array, "B T"]) -> Likely:
    """As `outputs.likely`, for all rows, from the logits of this device's."""
    return of_all(likely(logits, own_rows(tokens)), tokens.shape[0])
