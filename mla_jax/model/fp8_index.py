"""Keys of an indexer as they are cached: as computed, or in E4M3 after a Hadamard transform; a token's scale is a power of two.

The transform turns queries and keys alike, so that their products stay, and spreads the columns that are large in both over a
whole head: rounding then loses less. Queries are rounded in the same way. So does DeepSeek-V3.2's released code for inference."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax.base.config import Config
from mla_jax.cache.paged import INDEX_K, INDEX_SCALE
from mla_jax.model import kernels


class KeyFormat(NamedTuple):
    """A format of cached keys.

    remembers(keys `[B T I]`) -> the cached arrays of new tokens.
    reads(cached, dtype) -> keys, as numbers.
    asks(queries `[B T J I]`) -> queries for such keys."""

    remembers: Callable[[Array], dict[str, Array]]
    reads: Callable[[dict[str, Array], jnp.dtype], Array]
    asks: Callable[[Array], Array]


def keys_fit(config: Config) -> bool:
    """Whether keys of this width can be cached in E4M3: as many numbers as have one scale, a power of two for the transform."""
    return config.index_head_dim == kernels.fp8_group()


def transformed(x: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
    """The Hadamard transform of each head, in float32; its own inverse."""
    signs = jnp.asarray(_signs(x.shape[-1]), x.dtype)
    return jnp.matmul(x, signs, preferred_element_type=jnp.float32) * x.shape[-1] ** -0.5


@functools.cache
def _signs(width: int) -> np.ndarray:
    """Sylvester's matrix of a width that is a power of two."""
    found = np.ones((1, 1), np.int8)
    while len(found) < width:
        found = np.block([[found, found], [found, -found]])
    return found


def _remembers(keys: Float[Array, "B T I"]) -> dict[str, Array]:
    codes, scales = kernels.quantize_latent(transformed(keys))
    return {INDEX_K: codes, INDEX_SCALE: scales}


def _reads(cached: dict[str, Array], dtype: jnp.dtype) -> Float[Array, "B S I"]:
    """Exact in bfloat16."""
    return kernels.dequantize_latent(cached[INDEX_K], cached[INDEX_SCALE], dtype)


def _asks(q: Float[Array, "B T J I"]) -> Float[Array, "B T J I"]:
    """The numbers that the codes of the queries stand for."""
    heads = transformed(q).reshape(q.shape[0], -1, q.shape[-1])
    return kernels.dequantize_latent(*kernels.quantize_latent(heads), q.dtype).reshape(q.shape)


AS_COMPUTED = KeyFormat(lambda keys: {INDEX_K: keys}, lambda cached, dtype: cached[INDEX_K], lambda q: q)
IN_E4M3 = KeyFormat(_remembers, _reads, _asks)


def key_format_of(cached: dict[str, Array]) -> KeyFormat:
    """Of a pool, or of what is read from it."""
    return IN_E4M3 if INDEX_SCALE in cached else AS_COMPUTED
