"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its four forms side by side, and the layer around them.

A form is what it caches of a token and how queries attend to the cache. All four use the same two weights, the halves of
kv_b_proj: `uk [N P R]` maps the latent to a head's plain key, `uv [N V R]` to its value. They give equal results and differ in
what they cache, compute and copy; `base/roofline.py` compares their costs.

Letters: B batch, T query tokens, S cached tokens, N heads, R kv rank, P nope, E rope, V value; H is P + E, L is R + E."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from mla_jax.base.batch import Batch
from mla_jax.base.config import LATENT_NORM_EPS, Config
from mla_jax.cache import latent
from mla_jax.model import rope
from mla_jax.model.ops import linear, masked_exp, norm_weight, parameter, rms_norm

Queries = tuple[Float[Array, "B T N P"], Float[Array, "B T N E"]]
Up = tuple[Float[Array, "N P R"], Float[Array, "N V R"]]
Mask = Bool[Array, "B T 1 S"]


def latents(c_kv: Float[Array, "B S R"], k_pe: Float[Array, "B S E"], up: Up, x: Any = None) -> dict[str, Array]:
    return {"c_kv": c_kv, "k_pe": k_pe}


def heads(c_kv: Float[Array, "B S R"], k_pe: Float[Array, "B S E"], up: Up, x: Any = None) -> dict[str, Array]:
    """Every head's key and value, rebuilt from the latent; the rotary key is shared by all heads."""
    k_nope, v = jnp.einsum("bsr,npr->bsnp", c_kv, up[0]), jnp.einsum("bsr,nvr->bsnv", c_kv, up[1])
    shared = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], k_pe.shape[-1]))
    return {"k": jnp.concatenate([k_nope, shared], -1), "v": v}


def naive(q: Queries, cached: dict[str, Array], up: Up, mask: Mask, scale: float) -> Float[Array, "B T N V"]:
    """Caches every head's key and value, as any transformer does."""
    scores = jnp.einsum("btnh,bsnh->btns", jnp.concatenate(q, -1), cached["k"], preferred_element_type=jnp.float32)
    weights, total = masked_exp(scores * scale, mask)
    return jnp.einsum("btns,bsnv->btnv", (weights / total).astype(cached["v"].dtype), cached["v"])


def compressed(q: Queries, cached: dict[str, Array], up: Up, mask: Mask, scale: float) -> Float[Array, "B T N V"]:
    """Caches latents, rebuilds the heads at every step: little memory, much arithmetic."""
    return naive(q, heads(cached["c_kv"], cached["k_pe"], up), up, mask, scale)


def absorbed(q: Queries, cached: dict[str, Array], up: Up, mask: Mask, scale: float) -> Float[Array, "B T N V"]:
    """Moves `uk` to the query and `uv` to the output, so heads are never rebuilt. As published, each head gets its own copy of
    the joint key [c_kv, k_pe]: that copy is what `move_elided` elides (a GPU compiler may fuse it away)."""
    q_c = jnp.einsum("npr,btnp->btnr", up[0], q[0])  # in this order, or a GPU keeps it strided: 6 times slower at 32 rows of 512
    key = jnp.concatenate([cached["c_kv"], cached["k_pe"]], -1)
    key = jnp.broadcast_to(key[:, :, None], (*key.shape[:2], q_c.shape[2], key.shape[-1]))
    scores = jnp.einsum("btnh,bsnh->btns", jnp.concatenate([q_c, q[1]], -1), key, preferred_element_type=jnp.float32)
    return over_latents(scores * scale, cached["c_kv"], up, mask)


def move_elided(q: Queries, cached: dict[str, Array], up: Up, mask: Mask, scale: float) -> Float[Array, "B T N V"]:
    """Absorbed, with the plain and the rotary score added instead of their vectors joined: nothing is copied."""
    q_c = jnp.einsum("btnp,npr->btnr", q[0], up[0])
    scores = jnp.einsum("btnr,bsr->btns", q_c, cached["c_kv"], preferred_element_type=jnp.float32)
    scores += jnp.einsum("btne,bse->btns", q[1], cached["k_pe"], preferred_element_type=jnp.float32)
    return over_latents(scores * scale, cached["c_kv"], up, mask)


def over_latents(scores: Float[Array, "B T N S"], c_kv: Float[Array, "B S R"], up: Up, mask: Mask) -> Float[Array, "B T N V"]:
    """The second half of both absorbed forms: each head's weighted latent, then its value. Dividing the weighted latent, not the
    weights, saves a pass over the scores (a fifth of the time at 131,072 cached tokens; over heads it does not pay)."""
    weights, total = masked_exp(scores, mask)
    o_c = jnp.einsum("btns,bsr->btnr", weights.astype(c_kv.dtype), c_kv, preferred_element_type=jnp.float32)
    return jnp.einsum("btnr,nvr->btnv", (o_c / total).astype(c_kv.dtype), up[1])


def visible(batch: Batch, layer: latent.Layer | None, config: Config) -> Mask:
    """The slots that each query attends to: cached tokens at its own position or before."""
    positions = jnp.where(batch.mask, batch.positions, latent.EMPTY) if layer is None else latent.positions_after(layer, batch)
    return (positions[:, None, None, :] <= batch.positions[:, :, None, None]) & batch.mask[:, :, None, None]


class Form(NamedTuple):
    """A row of a table of forms.

    remembers(c_kv, k_pe, up, x) -> what the cache stores of new tokens; `x [B T D]` is the layer's input.
    attends(queries, cached, up, step, scale) -> `[B T N V]`; `step` is what `prepare` returned.
    prepare(batch, layer, config) -> what all layers of a step share, made once; `layer` is any layer before the step, or None.
    appends(q, kv, norm, layer, step, config) -> queries and layer: a kernel for what is between projections and attention."""

    remembers: Callable[..., dict[str, Array]]
    attends: Callable[..., Array]
    prepare: Callable[..., Any] = visible
    appends: Callable[..., tuple[Queries, latent.Layer]] | None = None


FORMS = {
    "naive": Form(heads, naive),
    "compressed": Form(latents, compressed),
    "absorbed": Form(latents, absorbed),
    "move_elided": Form(latents, move_elided),
}


class MLA(nnx.Module):
    """The attention layer: projections around a form, `x [B T D]` in and out."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        if config.q_lora_rank is None:
            self.q_proj = parameter(config, rngs, "heads*query", "model")
        else:
            self.q_a_proj = parameter(config, rngs, "q_rank", "model")
            self.q_a_norm = norm_weight(config, rngs, "q_rank")
            self.q_b_proj = parameter(config, rngs, "heads*query", "q_rank")
        self.kv_a_proj = parameter(config, rngs, "latent", "model")
        self.kv_a_norm = norm_weight(config, rngs, "kv_rank")
        self.uk = parameter(config, rngs, "heads", "nope", "kv_rank", packs=False)
        self.uv = parameter(config, rngs, "heads", "value", "kv_rank", packs=False)
        self.o_proj = parameter(config, rngs, "model", "heads*value")

    def __call__(
        self, x: Float[Array, "B T D"], batch: Batch, layer: latent.Layer | None, form: Form, step: Any
    ) -> tuple[Float[Array, "B T D"], latent.Layer | None]:
        """Attends to the new tokens and, where `layer` is given, to those cached before; returns the layer with both."""
        up = (self.uk[...], self.uv[...])
        q, kv = self.queries(x), linear(x, self.kv_a_proj[...])
        if form.appends is None:
            q, cached = self.turned(q, batch), form.remembers(*self.keys(kv, batch), up, x)
            layer = None if layer is None else latent.append(layer, cached, batch)
        else:
            q, layer = form.appends(q, kv, self.kv_a_norm[...], layer, step, self.config)
        cached = cached if layer is None else latent.read(layer, batch)[0]
        out = form.attends(q, cached, up, step, rope.softmax_scale(self.config))
        return linear(out.reshape(*x.shape[:2], -1), self.o_proj[...]), layer

    def queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        if self.config.q_lora_rank is None:
            q = linear(x, self.q_proj[...])
        else:
            q = linear(rms_norm(linear(x, self.q_a_proj[...]), self.q_a_norm[...], LATENT_NORM_EPS), self.q_b_proj[...])
        return q.reshape(*x.shape[:2], self.config.num_attention_heads, -1)

    def turned(self, q: Float[Array, "B T N H"], batch: Batch) -> Queries:
        q_nope, q_pe = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        return q_nope, rope.rotate(q_pe, batch.positions, self.config)

    def keys(self, kv: Float[Array, "B T L"], batch: Batch) -> tuple[Float[Array, "B T R"], Float[Array, "B T E"]]:
        c_kv, k_pe = jnp.split(kv, [self.config.kv_lora_rank], axis=-1)
        return rms_norm(c_kv, self.kv_a_norm[...], LATENT_NORM_EPS), rope.rotate(k_pe, batch.positions, self.config)
