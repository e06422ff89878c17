"""Contents of whole pages as two programs: `copy_out` takes them from the pool, `copy_in` puts them into other pages of it.

A page is one of every layer, MTP's included, so it holds all that is cached of its tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mla_jax.cache.paged import NOWHERE, Pool
from mla_jax.model.transformer import Transformer

Contents = dict[str, Shaped[Array, "K L Z ..."]]


def copy_out(model: Transformer, pool: Pool, pages: Int[Array, " K"]) -> tuple[Pool, Contents]:
    """The pool as it is, and what `pages` hold; for one past the last page anything."""
    at = _in_layers(model, pool, pages)
    return pool, {name: array.at[at].get(mode="clip") for name, array in pool.items()}


def copy_in(
    model: Transformer, pool: Pool, contents: Contents, pages: Int[Array, " K"]
) -> tuple[Pool, Contents]:
    """The pool with `contents` in `pages`, without those for a page past the last; and the contents, whose memory was donated."""
    at = _in_layers(model, pool, pages)
    return {name: array.at[at].set(contents[name], mode="drop") for name, array in pool.items()}, contents


def _in_layers(model: Transformer, pool: Pool, pages: Int[Array, " K"]) -> Int[Array, "K L"]:
    """Where a page of each layer is in the pool; NOWHERE for one past the last."""
    layers = model.cached_layers
    count = next(iter(pool.values())).shape[0] // layers
    return jnp.where(
        pages[:, None] < count, pages[:, None] + count * jnp.arange(layers, dtype=jnp.int32), NOWHERE
    )


# The programs by name: their functions, and how many of the arguments are donated
FUNCTIONS = {"copy_out": (copy_out, 1), "copy_in": (copy_in, 2)}
