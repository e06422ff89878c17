"""Contents of whole pages as two programs: `copy_out` takes them from the pool, `copy_in` puts them into other pages of it.

A page is one of every layer, MTP's included, so it holds all that is cached of its tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mla_jax.cache.paged import NOWHERE, Pool
from mla_jax.model.transformer import Transformer

Contents = dict[str, Shaped[Array, "K _ Z ..."]]  # of as many layers as have the name


def copy_out(model: Transformer, pool: Pool, pages: Int[Array, " K"]) -> tuple[Pool, Contents]:
    """The pool as it is, and what `pages` hold; for one past the last page anything."""
    at = _in_layers(model, pool, pages)
    return pool, {name: array.at[at[name]].get(mode="clip") for name, array in pool.items()}


def copy_in(
    model: Transformer, pool: Pool, contents: Contents, pages: Int[Array, " K"]
) -> tuple[Pool, Contents]:
    """The pool with `contents` in `pages`, without those for a page past the last; and the contents, whose memory was donated."""
    at = _in_layers(model, pool, pages)
    filled = {name: array.at[at[name]].set(contents[name], mode="drop") for name, array in pool.items()}
    return filled, contents


def _in_layers(model: Transformer, pool: Pool, pages: Int[Array, " K"]) -> dict[str, Int[Array, "K L"]]:
    """Where a page of each layer is in each array of the pool; NOWHERE for one past the last."""
    count = model.pages_of_layer(pool)

    def places(layers: int) -> Int[Array, "K L"]:
        firsts = count * jnp.arange(layers, dtype=jnp.int32)
        return jnp.where(pages[:, None] < count, pages[:, None] + firsts, NOWHERE)

    return {name: places(array.shape[0] // count) for name, array in pool.items()}


# The programs by name: their functions, and how many of the arguments are donated
FUNCTIONS = {"copy_out": (copy_out, 1), "copy_in": (copy_in, 2)}
