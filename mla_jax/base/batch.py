"""What one step brings: a pytree made once and shared by all layers."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """New tokens of several rows. Padding may stand anywhere: masked tokens are neither remembered nor attended to.

    `span` (static) bounds the cache slots that are read, so that an early chunk of a prompt does not pay for all the context."""

    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    span: int | None = dataclasses.field(default=None, metadata={"static": True})

    @staticmethod
    def dense(rows: int, tokens: int) -> "Batch":
        """Whole sequences from position 0, nothing padded."""
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (rows, tokens))
        return Batch(positions, jnp.ones((rows, tokens), bool))


def bucket(n: int, least: int = 1) -> int:
    """The power of two that holds `n`, `least` at least."""
    return max(least, 1 << max(n - 1, 0).bit_length())
