"""Retrieval by its definition, in plain loops: a whole sequence without a cache, in which each token sees its chosen pages."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax import Transformer
from mla_jax.model import rope
from mla_jax.model.mla import MLA
from mla_jax.model.moe import BACKENDS, ExpertPlan, MoE
from mla_jax.model.ops import rms_norm


def hidden_states(
    model: Transformer,
    tokens: list[int],
    prompt: int,
    policy: str,
    most: int,
    size: int,
    dense: int,
    recent: int = 2,
    window: int | None = None,
) -> np.ndarray:
    """`[S D]`, after the last norm. The first `prompt` tokens see all before them, the others `most` pages of `size` tokens in
    all layers but the first `dense`. Tokens farther back than a `window` are as far as its edge."""
    scale = rope.softmax_scale(model.config)

    def mask_of(number: int, q: np.ndarray, kv: np.ndarray, asking: np.ndarray) -> np.ndarray:
        mask = np.tri(len(tokens), dtype=bool)
        for token in range(prompt, len(tokens)) if number >= dense else ():
            seen = (x[: token + 1] for x in (q, kv, asking))
            pages = chosen(scores_of(*seen, policy, size, scale), most, recent)
            mask[token] &= np.isin(np.arange(len(tokens)) // size, pages)
        return mask

    return forward(model, tokens, mask_of, window)[0]


def forward(
    model: Transformer, tokens: list[int], mask_of: Callable, window: int | None = None
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Hidden states `[S D]` after the last norm, and each layer's queries and keys; a layer's tokens see what `mask_of` says of
    its number, of these, and of the queries that ask for representatives. With a `window` these are the far queries, keys as at
    the beginning, and queries as there."""
    config, count, found = model.config, len(tokens), []
    x, scale = model.embedded(jnp.asarray([tokens], jnp.int32)), rope.softmax_scale(config)
    for number, block in enumerate(model.layers):
        normal = normed(x, block.attn_norm[...], block.eps)
        q, kv = attention_of(block.attn, normal)
        products, asking = np.einsum("tnl,sl->nts", q, kv, optimize=True), q
        if window is not None:
            q, _ = attention_of(block.attn, normal, np.full(count, window))
            asking, kv = attention_of(block.attn, normal, np.zeros(count, int))
            is_far = np.arange(count)[:, None] - np.arange(count) > window
            products = np.where(is_far, np.einsum("tnl,sl->nts", q, kv, optimize=True), products)
        found.append((q, kv))
        logits = np.where(mask_of(number, q, kv, asking), products * scale, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        up, out = (np.asarray(weight[...], np.float64) for weight in (block.attn.uv, block.attn.o_proj))
        values = np.einsum("nts,sr,nvr->tnv", weights, kv[:, : config.kv_lora_rank], up, optimize=True)
        x = x + jnp.asarray(values.reshape(count, -1) @ out.T, jnp.float32)[None]
        x = x + fed_forward(*nnx.split(block.mlp), normed(x, block.mlp_norm[...], block.eps))
    return np.asarray(normed(x, model.norm[...], config.rms_norm_eps))[0], found


normed = jax.jit(rms_norm, static_argnums=2)


@functools.partial(jax.jit, static_argnums=0)
def fed_forward(graph: nnx.GraphDef, weights: nnx.State, x: jax.Array) -> jax.Array:
    mlp = nnx.merge(graph, weights)
    plan = ExpertPlan(BACKENDS["dense"], 0, None, None)
    return mlp(x, jnp.ones(x.shape[:2], bool), plan)[0] if isinstance(mlp, MoE) else mlp(x)


def attention_of(attn: MLA, x: jax.Array, positions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Absorbed queries `[S N L]` and keys `[S L]` of one sequence `[1 S D]`, at these positions or at their own."""
    at = np.arange(x.shape[1]) if positions is None else positions
    q_nope, q_pe, *latents = (np.asarray(part, np.float64)[0] for part in projected(*nnx.split(attn), x, jnp.asarray(at)))
    q_c = np.einsum("tnp,npr->tnr", q_nope, np.asarray(attn.uk[...], np.float64))
    return np.concatenate([q_c, q_pe], -1), np.concatenate(latents, -1)


@functools.partial(jax.jit, static_argnums=0)
def projected(graph: nnx.GraphDef, weights: nnx.State, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
    attn = nnx.merge(graph, weights)
    turns = rope.turns(positions[None], attn.config)
    return *attn.turned(attn.queries(x), turns), *attn.keys(jnp.einsum("btd,ld->btl", x, attn.kv_a_proj[...]), turns)


def scores_of(q: np.ndarray, kv: np.ndarray, asking: np.ndarray, policy: str, size: int, scale: float) -> np.ndarray:
    """Each page's score for the last of these tokens; Quest's as logarithms. `asking` are queries as pages' tokens ask."""
    pages = [slice(start, start + size) for start in range(0, len(kv), size)]
    if policy == "infllm":
        return np.array([q[-1].sum(0) @ representative(asking[page].sum(1), kv[page]) for page in pages])
    bounds = [np.maximum(q[-1] * kv[page].min(0), q[-1] * kv[page].max(0)).sum(-1) * scale for page in pages]
    votes = np.exp(np.stack(bounds, 1) - np.max(bounds, 0)[:, None])
    return np.log((votes / votes.sum(1, keepdims=True)).sum(0))


def chosen(scores: np.ndarray, most: int, recent: int) -> list[int]:
    """The first page, the newest, and the best, `most` in all."""
    scores = scores.copy()
    scores[[0, *range(max(len(scores) - recent, 0), len(scores))]] = np.inf
    return sorted(np.argsort(-scores, kind="stable")[:most].tolist())


def representative(queries: np.ndarray, keys: np.ndarray, count: int = 4) -> np.ndarray:
    """InfLLM's, of one page: the mean of the `count` keys that the tokens from them on ask for most."""
    asked = [np.mean([queries[t] @ keys[m] for t in range(m, len(keys))]) for m in range(len(keys))]
    return keys[np.argsort(-np.array(asked), kind="stable")[:count]].mean(0)


def bounds_of(keys: np.ndarray) -> np.ndarray:
    """Quest's, of one page `[2 L]`."""
    return np.stack([keys.min(0), keys.max(0)])
