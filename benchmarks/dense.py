"""The demo model without pages and engine: one text read with full attention, and what follows read with a mask of what stays."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from mla_jax import Transformer
from mla_jax.cache import evict
from mla_jax.cache.evict import BUDGET_RULES
from mla_jax.model import rope
from mla_jax.model.moe import BACKENDS, ExpertPlan, MoE
from mla_jax.model.ops import rms_norm

CHUNK = 256  # queries at a time
SINKS, RECENT = 4, 16  # tokens that always stay


class Read(NamedTuple):
    """The arrays of each layer of one text that was read with full attention."""

    hidden: Array  # [S D] after the last norm
    q: Array  # [L S N H]
    k: Array  # [L S N H]
    v: Array  # [L S N V]
    latent: Array  # [L S R+E]


def layer_input(block: Any, x: Array, positions: Array) -> tuple[Array, ...]:
    """Queries, keys, values and latents of the tokens `x [T D]` at `positions`."""
    attn = block.attn
    normed = rms_norm(x, block.attn_norm[...], block.eps)[None]
    turns = rope.turns(positions[None], attn.config)
    q = jnp.concatenate(attn.turned(attn.queries(normed), turns), -1)[0]
    c_kv, k_pe = (part[0] for part in attn.keys(normed @ attn.kv_a_proj[...].T, turns))
    k_nope = jnp.einsum("sr,npr->snp", c_kv, attn.uk[...])
    shared = jnp.broadcast_to(k_pe[:, None], (*k_nope.shape[:2], k_pe.shape[-1]))
    v = jnp.einsum("sr,nvr->snv", c_kv, attn.uv[...])
    return q, jnp.concatenate([k_nope, shared], -1), v, jnp.concatenate([c_kv, k_pe], -1)


def after_attention(block: Any, x: Array, values: Array) -> Array:
    x = x + values.reshape(len(x), -1) @ block.attn.o_proj[...].T
    y = rms_norm(x, block.mlp_norm[...], block.eps)[None]
    if not isinstance(block.mlp, MoE):
        return x + block.mlp(y)[0]
    plan = ExpertPlan(BACKENDS["dense"], 0, None, None)
    return x + block.mlp(y, jnp.ones(y.shape[:2], bool), plan)[0][0]


def softmax(q: Array, k: Array, sees: Array, scale: float) -> Array:
    """`[T N S]` of queries `[T N H]` and keys `[S N H]`."""
    return jax.nn.softmax(jnp.where(sees, jnp.einsum("tnh,snh->tns", q, k) * scale, -jnp.inf), axis=-1)


@nnx.jit
def read(model: Transformer, tokens: Array) -> Read:
    """A text `[S]`; S is a multiple of CHUNK, and what follows the text may be anything."""
    positions, found = jnp.arange(len(tokens)), []
    x, scale = model.embedded(tokens[None])[0], rope.softmax_scale(model.config)
    for block in model.layers:
        q, k, v, latent = layer_input(block, x, positions)

        def attended(chunk: tuple[Array, Array], k: Array = k, v: Array = v) -> Array:
            queries, at = chunk
            sees = positions <= at[:, None, None]
            return jnp.einsum("tns,snv->tnv", softmax(queries, k, sees, scale), v)

        chunks = q.reshape(-1, CHUNK, *q.shape[1:]), positions.reshape(-1, CHUNK)
        values = jax.lax.map(attended, chunks).reshape(v.shape)
        x = after_attention(block, x, values)
        found.append((q, k, v, latent))
    hidden = rms_norm(x, model.norm[...], model.config.rms_norm_eps)
    return Read(hidden, *(jnp.stack(parts) for parts in zip(*found, strict=True)))


@jax.jit
def looked_at(text: Read, at: Array, scale: float) -> Array:
    """The weights `[L W N S]` of the queries of tokens `at [W]`."""
    sees = jnp.arange(text.k.shape[1]) <= at[:, None, None]
    return jax.vmap(lambda q, k: softmax(q[at], k, sees, scale))(text.q, text.k)


class Followed(NamedTuple):
    hidden: Array  # [T D]
    q: Array  # [L T N H]
    most: Array  # [L N S]: the largest weight that a token of the text got


@nnx.jit
def follow(
    model: Transformer, text: Read, tokens: Array, count: Array, start: Array, keeps: Array
) -> Followed:
    """The first `count` of the tokens `[T]`, behind the first `start` of a text, of which each layer and head sees those that it
    `keeps [L #N S]`."""
    positions, found = start + jnp.arange(len(tokens)), []
    x, scale = model.embedded(tokens[None])[0], rope.softmax_scale(model.config)
    own, is_token = np.tri(len(tokens), dtype=bool)[:, None], (jnp.arange(len(tokens)) < count)[:, None, None]
    held = jnp.arange(text.k.shape[1]) < start
    for number, block in enumerate(model.layers):
        q, k, v, _ = layer_input(block, x, positions)
        before = jnp.broadcast_to(keeps[number] & held, (len(tokens), k.shape[1], text.k.shape[1]))
        sees = jnp.concatenate([before, jnp.broadcast_to(own, (*before.shape[:2], len(tokens)))], -1)
        keys, values = jnp.concatenate([text.k[number], k]), jnp.concatenate([text.v[number], v])
        weights = softmax(q, keys, sees, scale)
        x = after_attention(block, x, jnp.einsum("tns,snv->tnv", weights, values))
        found.append((q, jnp.where(is_token, weights[..., : text.k.shape[1]], 0).max(0)))
    q, most = (jnp.stack(parts) for parts in zip(*found, strict=True))
    return Followed(rms_norm(x, model.norm[...], model.config.rms_norm_eps), q, most)


@functools.partial(jax.jit, static_argnames=("budget", "first"))
def keeps(scores: Array, held: Array, keep: Array, budget: str, first: float | None) -> Array:
    """`[L H S]` of scores `[L 1 M S]`."""
    count = jnp.maximum(jnp.round(keep * held).astype(jnp.int32), 1)[None]
    everywhere = jnp.broadcast_to(held, (len(scores), 1, 1))
    rule = BUDGET_RULES[budget]
    return evict.kept(scores, everywhere, count, rule, sinks=SINKS, window=RECENT, first=first)[:, 0]


@nnx.jit
def log_probabilities(model: Transformer, hidden: Array) -> Array:
    return jax.nn.log_softmax(model.unembed(hidden))


def padded(tokens: np.ndarray, size: int) -> Array:
    return jnp.pad(jnp.asarray(tokens, jnp.int32), (0, size - len(tokens)))
