"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its four forms side by side, and the layer around them.

A form defines the cached arrays of a token and the attention over them; `register_form` adds one. All four use the same two
weights, the halves of kv_b_proj: `uk [N P R]` maps the latent to a head's plain key, `uv [N V R]` to its value; fp8_up.py
multiplies by halves in FP8. They give equal results and differ in caching, arithmetic and copies; `base/roofline.py` compares
their costs. A form makes scores and values of a block of cached tokens; `block_attention.attend` is the softmax over all blocks.

Letters: B batch, T query tokens, S cached tokens, N heads, R kv rank, P nope, E rope, V value; H is P + E, L is R + E."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mla_jax.base.axes import TENSOR
from mla_jax.base.config import LATENT_NORM_EPS, Config
from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.options import OWN_ATTENTION
from mla_jax.cache import paged
from mla_jax.cache.paged import Layer
from mla_jax.mesh import across
from mla_jax.model import block_attention, rope
from mla_jax.model.attention_scores import Watch
from mla_jax.model.block_attention import Cached, HeldTokens, StepCache
from mla_jax.model.fp8_up import Up, from_latent, plain_up, to_latent
from mla_jax.model.indexer import Indexer, Picks
from mla_jax.model.kernels import contracted, linear
from mla_jax.model.ops import norm_weight, parameter, plain, rms_norm

if TYPE_CHECKING:
    from mla_jax.model.dispatch import Choosing, Selection

Queries = tuple[Float[Array, "B T N P"], Float[Array, "B T N E"]]


def latents(
    c_kv: Float[Array, "B S R"], k_pe: Float[Array, "B S E"], up: Up, x: Any = None
) -> dict[str, Array]:
    return {"c_kv": c_kv, "k_pe": k_pe}


def heads(
    c_kv: Float[Array, "B S R"], k_pe: Float[Array, "B S E"], up: Up, x: Any = None
) -> dict[str, Array]:
    """Every head's key and value, rebuilt from the latent; the rotary key is shared by all heads."""
    uk, uv = plain_up(up, c_kv.dtype)
    k_nope = jnp.einsum("bsr,npr->bsnp", c_kv, uk)
    v = jnp.einsum("bsr,nvr->bsnv", c_kv, uv)
    shared = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], k_pe.shape[-1]))
    return {"k": jnp.concatenate([k_nope, shared], -1), "v": v}


def naive(q: Queries, held: HeldTokens, up: Up, scale: float) -> Float[Array, "B T N V"]:
    """Caches every head's key and value, as any transformer does."""
    joined = jnp.concatenate(q, -1)

    def block(cached: Cached) -> tuple[Array, Array]:
        scores = jnp.einsum("btnh,bsnh->btns", joined, cached["k"], preferred_element_type=jnp.float32)
        return scores * scale, cached["v"]

    return held.attend(block).astype(joined.dtype)


def compressed(q: Queries, held: HeldTokens, up: Up, scale: float) -> Float[Array, "B T N V"]:
    """Caches latents, rebuilds the heads at every step: little memory, much arithmetic."""
    up = plain_up(up, q[0].dtype)  # once, not for each block
    rebuilt = held._replace(reads=lambda cached: heads(**held.reads(cached), up=up))
    return naive(q, rebuilt, up, scale)


def absorbed(q: Queries, held: HeldTokens, up: Up, scale: float) -> Float[Array, "B T N V"]:
    """Moves `uk` to the query and `uv` to the output, so heads are never rebuilt. As published, each head gets its own copy of
    the joint key [c_kv, k_pe]: that copy is what `move_elided` elides (a GPU compiler may fuse it away)."""
    uk, uv = plain_up(up, q[0].dtype)
    # `uk` comes first, else a GPU keeps the result strided: 6 times slower at 32 rows of 512
    q_c = jnp.einsum("npr,btnp->btnr", uk, q[0])
    joined = jnp.concatenate([q_c, q[1]], -1)

    def block(cached: Cached) -> tuple[Array, Array]:
        key = jnp.concatenate([cached["c_kv"], cached["k_pe"]], -1)
        key = jnp.broadcast_to(key[:, :, None], (*key.shape[:2], joined.shape[2], key.shape[-1]))
        scores = jnp.einsum("btnh,bsnh->btns", joined, key, preferred_element_type=jnp.float32)
        return scores * scale, cached["c_kv"]

    return jnp.einsum("btnr,nvr->btnv", held.attend(block).astype(q_c.dtype), uv)


def move_elided(q: Queries, held: HeldTokens, up: Up, scale: float) -> Float[Array, "B T N V"]:
    """Absorbed, with the plain and the rotary score added instead of their vectors joined: nothing is copied."""
    q_c = to_latent(q[0], up[0])

    def block(cached: Cached) -> tuple[Array, Array]:
        scores = jnp.einsum("btnr,bsr->btns", q_c, cached["c_kv"], preferred_element_type=jnp.float32)
        scores += jnp.einsum("btne,bse->btns", q[1], cached["k_pe"], preferred_element_type=jnp.float32)
        return scores * scale, cached["c_kv"]

    return from_latent(held.attend(block), up[1], q_c.dtype)


class Form(NamedTuple):
    """A row of a table of forms.

    remembers(c_kv, k_pe, up, x) -> the cached arrays of new tokens; `x [B T D]` is the layer's input. Forms with the same
    function share a cache.
    attends(queries, held, up, scale) -> `[B T N V]`.
    prepare(batch, pool, config, block) -> the plan that all layers of a step share; `pool` is None without a cache.
    The softmax over the cache goes by blocks of about `block` slots, except in kernels.
    appends(q, kv, norm, layer, step, config) -> queries and layer: one kernel for the work between projections and attention.
    reads(cached) -> the stored arrays, as `attends` takes them."""

    remembers: Callable[..., dict[str, Array]]
    attends: Callable[..., Array]
    prepare: Callable[..., Any] = block_attention.prepare
    appends: Callable[..., tuple[Queries, Layer]] | None = None
    reads: Callable[[Cached], Cached] = dict


FORMS = {
    "naive": Form(heads, naive),
    "compressed": Form(latents, compressed),
    "absorbed": Form(latents, absorbed),
    "move_elided": Form(latents, move_elided),
}


def register_form(name: str, form: Form) -> None:
    """Adds a form of your own to FORMS, or replaces it: `LLM(model, attention=name)` then computes by it.

    Raises BadRequest for a name that the library has, and for a value that is no Form."""
    if not isinstance(form, Form):
        raise BadRequest(f"the form {name} is {shown(form)}", "expected Form(remembers, attends)")
    OWN_ATTENTION.add(name)
    FORMS[name] = form


def rescaled(weight: Float[Array, " R"], factor: float) -> Float[Array, " R"]:
    return weight if factor == 1 else weight * factor


class MLA(nnx.Module):
    """The attention layer: projections around a form, `x [B T D]` in and out."""

    def __init__(self, config: Config, rngs: nnx.Rngs, indexes: bool = False):
        self.config = config
        self.indexer = Indexer(config, rngs) if indexes else None
        if config.q_lora_rank is None:
            self.q_proj = parameter(config, rngs, "heads*query", "model")
        else:
            self.q_a_proj = parameter(config, rngs, "q_rank", "model")
            self.q_a_norm = norm_weight(config, rngs, "q_rank")
            self.q_b_proj = parameter(config, rngs, "heads*query", "q_rank")
        self.kv_a_proj = parameter(config, rngs, "latent", "model")
        self.kv_a_norm = norm_weight(config, rngs, "kv_rank")
        self.uk = parameter(config, rngs, "heads", "nope", "kv_rank", packs=False, role="heads")
        self.uv = parameter(config, rngs, "heads", "value", "kv_rank", packs=False, role="heads")
        self.o_proj = parameter(config, rngs, "model", "heads*value")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        layer: Layer | None,
        form: Form,
        step: Any,
        turns: rope.Turns,
        retrieving: "Selection | None" = None,
        choosing: "Choosing | None" = None,
        chosen: Picks = None,
    ) -> tuple[Float[Array, "B T D"], Layer | None, Picks]:
        """Attends to the new tokens and, where `layer` is given, to those cached before; returns the layer with both.

        `step` is what `form.prepare` returned, `turns` are the angles of the new tokens. With `retrieving` it attends to some of
        the cached pages alone. With `choosing` it attends to the tokens that the layer's indexer chooses, or to those `chosen` by
        a layer below; these it returns, too."""
        up, scale = self.up, rope.softmax_scale(self.config)
        c_q = self.query_latent(x)
        q, kv = rope.grown(self.query_heads(c_q), turns), linear(x, self.kv_a_proj[...])
        if layer is not None and form.appends is not None:
            q, layer = form.appends(q, kv, self.kv_weight, layer, step, self.config)
            new = {}
        else:
            q = self.turned(q, turns)
            new = form.remembers(*self.keys(kv, turns), up, x)
            layer = None if layer is None else paged.append(layer, new, step.rows)
        if self.indexer is not None:
            layer, chosen = self.indexer(x, c_q, turns, layer, step, choosing)
        attends = form.attends
        if layer is not None and retrieving is not None:
            layer = retrieving.noted(layer, q, up, form.reads)
            attends = functools.partial(retrieving.attended, form.attends)
        if choosing is not None:
            attends = functools.partial(choosing.attended, chosen, form.attends)
        out = attends(q, StepCache(new, layer, step, form.reads), up, scale)
        return self.projected(out), layer, chosen

    def watched(
        self, x: Float[Array, "B T D"], layer: Layer, form: Form, step: Any, turns: rope.Turns, watch: Watch
    ) -> tuple[Float[Array, "B T D"], Any]:
        """As `__call__`, of tokens that are cached already; with what `watch` says of the layer's attention."""
        q = self.turned(rope.grown(self.queries(x), turns), turns)
        held = StepCache({}, layer, step, form.reads)
        scale = rope.softmax_scale(self.config)
        out = form.attends(q, held, self.up, scale)
        own = across.part(plain(self.o_proj[...], x.dtype), out.shape[2] * out.shape[3], TENSOR, along=1)
        return self.projected(out), watch(q, held, self.up, own, scale)

    def projected(self, out: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """The layer's output; on a mesh `out` is of a device's own heads."""
        inner = self.config.num_attention_heads * self.config.v_head_dim
        return contracted(out.reshape(*out.shape[:2], -1), self.o_proj[...], inner)

    @property
    def up(self) -> Up:
        return self.uk[...], self.uv[...]

    @property
    def kv_weight(self) -> Float[Array, " R"]:
        """The factors on the normed latent."""
        return rescaled(self.kv_a_norm[...], self.config.kv_lora_scale)

    def queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """Of the heads whose keys and values this device can make."""
        return self.query_heads(self.query_latent(x))

    def query_latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T _"]:
        """The input of the queries' projection: their normed latent, or `x` itself where they have none."""
        if self.config.q_lora_rank is None:
            return x
        weight = rescaled(self.q_a_norm[...], self.config.q_lora_scale)
        return rms_norm(linear(x, self.q_a_proj[...]), weight, LATENT_NORM_EPS)

    def query_heads(self, c_q: Float[Array, "B T _"]) -> Float[Array, "B T N H"]:
        """The queries of a latent."""
        q = linear(c_q, (self.q_proj if self.config.q_lora_rank is None else self.q_b_proj)[...])
        q = q.reshape(*c_q.shape[:2], -1, self.config.qk_nope_head_dim + self.config.qk_rope_head_dim)
        return across.part(q, self.uk.shape[0], TENSOR, along=2)

    def turned(self, q: Float[Array, "B T N H"], turns: rope.Turns) -> Queries:
        q_nope, q_pe = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        return q_nope, rope.rotate(q_pe, turns, self.config.rope_interleave)

    def keys(
        self, kv: Float[Array, "B T L"], turns: rope.Turns
    ) -> tuple[Float[Array, "B T R"], Float[Array, "B T E"]]:
        c_kv, k_pe = jnp.split(kv, [self.config.kv_lora_rank], axis=-1)
        k_pe = rope.rotate(k_pe, turns, self.config.rope_interleave)
        return rms_norm(c_kv, self.kv_weight, LATENT_NORM_EPS), k_pe
