"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2): each query chooses the tokens that it attends to.

An indexer has a few narrow heads of its own, which share one key a token. A token's score is the sum over heads of
w relu(q . k), and the tokens with the highest scores are chosen, for all heads of the attention alike. No gradient flows through
the choice. A layer without an indexer takes the choice of the nearest one below that has one.

Letters: B lines, T new tokens, S cached tokens, J heads of the indexer, I numbers of such a head."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mla_jax.base.config import Config
from mla_jax.cache import paged
from mla_jax.cache.paged import Layer
from mla_jax.model import fp8_index, rope
from mla_jax.model.kernels import linear
from mla_jax.model.ops import norm_weight, parameter

NORM_EPS = 1e-6  # of k_norm, in every family

Picks = Any  # of a layer: what the `chosen` of a plan returns, which later layers may take


class IndexQueries(NamedTuple):
    """Of new tokens: queries of the indexer's heads, and the heads' weights."""

    q: Float[Array, "B T J I"]
    weights: Float[Array, "B T J"]


class Indexer(nnx.Module):
    """The weights of one layer's indexer."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.wq_b = parameter(config, rngs, "index_heads*index", "q_rank")
        self.wk = parameter(config, rngs, "index", "model")
        self.k_norm = norm_weight(config, rngs, "index")
        self.k_norm_bias = parameter(config, rngs, "index", scale=0.0)
        self.weights_proj = parameter(config, rngs, "index_heads", "model", exact=True, packs=False)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        c_q: Float[Array, "B T Q"],
        turns: rope.Turns,
        layer: Layer | None,
        step: Any,
        choosing: Any,
    ) -> tuple[Layer | None, Picks]:
        """The layer with the keys of the new tokens, and what these choose; None where they attend to everything.

        `x` is the layer's input, `c_q` the normed latent of the attention's queries, `turns` are the angles of the tokens."""
        keys = jax.lax.stop_gradient(self.keys(x, turns))
        format = fp8_index.key_format_of({} if layer is None else layer.pool)
        if layer is not None:
            cached = paged.append(layer.of_index, format.remembers(keys), step.rows)
            layer = dataclasses.replace(layer, pool=cached.pool)
        if choosing is None:
            return layer, None
        with jax.named_scope("choose_tokens"):
            queries = jax.lax.stop_gradient(self.queries(x, c_q, turns))
            return layer, choosing.chosen(queries._replace(q=format.asks(queries.q)), keys, layer)

    def keys(self, x: Float[Array, "B T D"], turns: rope.Turns) -> Float[Array, "B T I"]:
        """The keys of tokens, as they are computed."""
        k = linear(x, self.wk[...])
        return self._turned(layer_norm(k, self.k_norm[...], self.k_norm_bias[...]), turns)

    def queries(
        self, x: Float[Array, "B T D"], c_q: Float[Array, "B T Q"], turns: rope.Turns
    ) -> IndexQueries:
        """Both scales are in the weights, which are float32."""
        heads, width = self.weights_proj.shape[0], self.k_norm.shape[0]
        q = linear(c_q, self.wq_b[...]).reshape(*c_q.shape[:2], heads, width)
        weights = jnp.einsum(
            "btd,jd->btj", x.astype(jnp.float32), self.weights_proj[...], precision=jax.lax.Precision.HIGHEST
        )
        return IndexQueries(self._turned(q, turns), weights * (heads * width) ** -0.5)

    def _turned(self, x: Float[Array, "B T *J I"], turns: rope.Turns) -> Float[Array, "B T *J I"]:
        """Rotates the first numbers of each head, by the angles of the attention."""
        c = self.config
        first, rest = jnp.split(x, [c.qk_rope_head_dim], axis=-1)
        return jnp.concatenate([rope.rotate(first, turns, bool(c.indexer_rope_interleave)), rest], axis=-1)


def layer_norm(
    x: Float[Array, "*B I"], weight: Float[Array, " I"], bias: Float[Array, " I"]
) -> Float[Array, "*B I"]:
    """In float32."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPS)
    return (y * weight + bias).astype(x.dtype)


def index_scores(queries: IndexQueries, keys: Float[Array, "B S I"]) -> Float[Array, "B T S"]:
    """In float32, for near-ties would choose differently in less."""
    products = jnp.einsum("btji,bsi->btjs", queries.q, keys, preferred_element_type=jnp.float32)
    # Not as a matrix product, which a GPU rounds
    return (jax.nn.relu(products) * queries.weights[..., None]).sum(2)
