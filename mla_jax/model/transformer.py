"""The decoder: blocks of latent attention and experts between an embedding and a head.

Prefill, a chunk of a prompt on top of a cached prefix, and decode are this one forward; they differ in batch and cache."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from mla_jax.base.axes import TENSOR
from mla_jax.base.batch import AnyBatch, Batch
from mla_jax.base.config import Config
from mla_jax.cache import paged
from mla_jax.cache.paged import Layer, Pool
from mla_jax.mesh import across
from mla_jax.model import fp8_index
from mla_jax.model.attention_scores import Watch
from mla_jax.model.capture import Capture, LayerCapture
from mla_jax.model.dispatch import Dispatch, StepPlan
from mla_jax.model.indexer import Picks
from mla_jax.model.kernels import linear
from mla_jax.model.mla import MLA
from mla_jax.model.moe import MLP, Experts, MoE, settle
from mla_jax.model.mtp import MTP
from mla_jax.model.ops import norm_weight, parameter, rms_norm, take


class Block(nnx.Module):
    """One layer. It takes and returns `(x, pending, chosen)`: `pending` is the deferred sum that a later layer adds, `chosen` the
    tokens that later layers without an indexer attend to."""

    def __init__(self, config: Config, rngs: nnx.Rngs, layer: int):
        self.eps, self.residual_scale = config.rms_norm_eps, config.residual_scale
        self.attn_norm = norm_weight(config, rngs, "model")
        self.attn = MLA(config, rngs, config.has_indexer(layer))
        self.attn_post_norm = norm_weight(config, rngs, "model") if config.sandwich_norm else None
        self.mlp_norm = norm_weight(config, rngs, "model")
        self.mlp = MoE(config, rngs) if config.is_moe(layer) else MLP(config, rngs)
        is_normed = config.sandwich_norm or (config.post_mlp_layernorm and config.is_moe(layer))
        self.mlp_post_norm = norm_weight(config, rngs, "model") if is_normed else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        pending: Any,
        batch: AnyBatch,
        layer: Layer | None,
        plan: StepPlan,
        chosen: Picks = None,
        capture: LayerCapture = LayerCapture(),  # noqa: B008  (immutable)
    ):
        """Returns `((x, pending, chosen), layer, found)`. `found["load"]` is the number of tokens of each expert, in MoE layers.

        With `plan.watch` the tokens are cached already, nothing is appended, and `found["watched"]` is the result of `watch`."""
        normed, found = rms_norm(x, self.attn_norm[...], self.eps), {}
        with jax.named_scope("attention"):
            if plan.watch is None:
                edits = plan.retrieving, plan.choosing, chosen
                form = capture.over(plan.form, found)
                y, layer, chosen = self.attn(normed, layer, form, plan.shared, plan.turns, *edits)
            else:
                assert layer is not None, "what is watched attends to what is cached"
                y, found["watched"] = self.attn.watched(
                    normed, layer, plan.form, plan.shared, plan.turns, plan.watch
                )
            y = y if self.attn_post_norm is None else rms_norm(y, self.attn_post_norm[...], self.eps)
        x = x + self.scaled(y)
        with jax.named_scope("experts" if isinstance(self.mlp, MoE) else "mlp"):
            y = rms_norm(x, self.mlp_norm[...], self.eps)
            load = left = None
            if isinstance(self.mlp, MoE):
                found |= self.mlp.routing(y, batch.mask) if capture.router else {}
                y, load, left = self.mlp(y, batch.mask, plan.experts)
            else:
                y = self.mlp(y)
            y = y if self.mlp_post_norm is None else rms_norm(y, self.mlp_post_norm[...], self.eps)
        found |= {} if load is None else {"load": load}
        return (settle(x + self.scaled(y), pending), left, chosen), layer, found

    def scaled(self, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The part of `y`, of attention or MLP, that is added to the hidden state."""
        return y if self.residual_scale == 1 else y * self.residual_scale


def _block_function(plan: StepPlan, batch: AnyBatch, traced: bool, remat: bool) -> Callable:
    """A function of a block's graph, whether it attends to all pages, its capture, weights, input, cache and number.

    Under a trace, layers of one structure are traced and lowered once; XLA inlines the calls. `remat`: as Dispatch has it."""

    def layer_of(
        graph: Any,
        reads_all: bool,
        capture: LayerCapture,
        weights: Any,
        x: Array,
        pending: Any,
        chosen: Picks,
        layer: Layer | None,
        number: Array,
    ):
        mine = plan.of_layer(number)
        mine = mine.attending_to_all() if reads_all else mine
        return nnx.merge(graph, weights)(x, pending, batch, layer, mine, chosen, capture)

    function = jax.checkpoint(layer_of, static_argnums=(0, 1, 2)) if remat else layer_of
    return jax.jit(function, static_argnums=(0, 1, 2)) if traced else function


class Transformer(nnx.Module):
    """An MLA model: its weights and the forward pass. `dispatch` chooses how each step computes."""

    def __init__(
        self,
        config: Config,
        rngs: nnx.Rngs,
        *,
        dispatch: Dispatch = Dispatch(),  # noqa: B008  (frozen)
        mtp: bool = False,
    ):
        self.config, self.dispatch = config, dispatch
        self.embed = parameter(config, rngs, "vocab", "model", role="rows")
        self.layers = nnx.List([Block(config, rngs, i) for i in range(config.num_hidden_layers)])
        self.norm = norm_weight(config, rngs, "model")
        self.head = None if config.tie_word_embeddings else parameter(config, rngs, "vocab", "model")
        depth = config.num_nextn_predict_layers if mtp else 0
        self.mtp = nnx.List(
            [MTP(config, rngs, Block(config, rngs, config.num_hidden_layers + i)) for i in range(depth)]
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        batch: AnyBatch,
        pool: Pool | None = None,
        *,
        collect: bool = False,
        watch: Watch | None = None,
        capture: Capture | None = None,
    ) -> tuple[Float[Array, "B T D"], Pool | None, dict[str, list[Any]]]:
        """Hidden states after the last norm, the pool with the new tokens in it, and, if `collect`, each MoE layer's load.

        Without a pool the tokens attend to each other alone, as in training. With a `watch` they are in the pool already, which
        stays unchanged, and its result for each layer is collected. A `capture`, without a pool, is collected by name."""
        if watch is None or pool is None:
            plan = self.dispatch.step(self, batch, pool)
        else:
            assert isinstance(batch, Batch), "one kind of tokens is watched"
            plan = self.dispatch.watching(self, batch, pool, watch)
        x, pending, chosen, aux, states = self.embedded(tokens), None, None, {}, []
        apply = _block_function(plan, batch, isinstance(x, Tracer), self.dispatch.remat)
        for i, block in enumerate(self.layers):
            (graph, weights), reads_all = nnx.split(block), self.dispatch.attends_to_all(i)
            with jax.named_scope(f"layer_{i}"):
                mine = self.layer_of(pool, i), jnp.int32(i)
                below = None if block.attn.indexer is not None else chosen
                layer_capture = LayerCapture() if capture is None else capture.of_layer(i)
                states.append(x)
                (x, pending, chosen), layer, found = apply(
                    graph, reads_all, layer_capture, weights, x, pending, below, *mine
                )
            pool = None if layer is None else layer.pool
            for name, value in found.items():
                aux.setdefault(name, []).append(value)
        states.append(settle(x, pending))
        hidden = self.normed(states[-1])
        if capture is not None:
            return hidden, pool, self._captured(states, aux, capture)
        return hidden, pool, aux if collect or watch else {}

    def normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The input of `unembed`, of the last layer's output."""
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps)

    def _captured(
        self, states: list[Array], aux: dict[str, list[Array]], capture: Capture
    ) -> dict[str, list[Array]]:
        """By name, in the order that was asked for; `states` are the layers' inputs and the last one's output."""
        shown = sorted(set(capture.attention))
        found = {name: layers for name, layers in aux.items() if name != "load"} | {
            "hidden": [states[i] for i in capture.hidden],
            "lens": [self.unembed(self.normed(states[i])) for i in capture.lens],
            "attention": [aux["attention"][shown.index(i)] for i in capture.attention],
        }
        return {name: layers for name, layers in found.items() if layers}

    def layer_of(self, pool: Pool | None, index: int | Int[Array, ""]) -> Layer | None:
        """The part of the pool that belongs to a layer; those of MTP come after the model's."""
        if pool is None:
            return None
        pages = self.pages_of_layer(pool)
        first = jnp.asarray(index * pages, jnp.int32)
        if not self.indexed:
            return Layer(pool, first)
        assert isinstance(index, int), "layers with and without an indexer are told apart before tracing"
        before = [layer for layer in self.indexed if layer < index]
        return Layer(pool, first, jnp.int32(len(before) * pages) if index in self.indexed else None)

    def pages_of_layer(self, pool: Pool) -> int:
        """Pages of each layer in a pool; not all layers have those of an indexer."""
        every = next(array for name, array in pool.items() if name not in paged.ASIDE)
        return every.shape[0] // self.cached_layers

    @property
    def indexed(self) -> list[int]:
        """The layers that have an indexer, MTP's behind the model's."""
        if self.config.index_topk is None:
            return []
        return [i for i, block in enumerate(self.blocks()) if block.attn.indexer is not None]

    @property
    def cached_layers(self) -> int:
        return len(self.layers) + len(self.mtp)

    @property
    def lanes(self) -> int:
        """Lanes of a page, each with tokens of its own: the heads where heads are cached, 1 where heads share latents."""
        return self.layers[0].attn.uk.shape[0] if self.dispatch.caches_heads else 1

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the arithmetic; packed weights are unpacked to it."""
        return self.norm.get_value().dtype  # which may be a shape only

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        found = self._rows_of(tokens)
        return found if self.config.scale_emb == 1 else found * self.config.scale_emb

    def _rows_of(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Those of the embedding, of which each device can have a part."""
        rows = self.embed.shape[0]
        if rows == self.config.vocab_size:
            return take(self.embed[...], tokens, self.dtype)
        here = tokens - across.index(TENSOR) * rows
        found = take(self.embed[...], jnp.clip(here, 0, rows - 1), self.dtype)
        return across.total(jnp.where(((here >= 0) & (here < rows))[..., None], found, 0), TENSOR)

    def unembed(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B W"]:
        """Logits in float32."""
        logits = self.own_words(hidden)
        return across.gathered(logits, TENSOR, along=-1) if self.cuts_words else logits

    def own_words(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B w"]:
        """Logits in float32, of the words whose part of the head this device has."""
        scaling = self.config.logits_scaling
        return linear(hidden if scaling == 1 else hidden / scaling, self._head[...], out="float32")

    @property
    def cuts_words(self) -> bool:
        """Whether each device has a part of the head."""
        return self._head.shape[0] < self.config.vocab_size

    @property
    def _head(self) -> nnx.Param:
        return self.embed if self.head is None else self.head

    def draft(
        self,
        depth: int,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        batch: Batch,
        pool: Pool | None = None,
        *,
        collect: bool = False,
    ) -> tuple[Float[Array, "B T D"], Pool | None, dict[str, list[Array]]]:
        """Runs MTP layer `depth` on the normed `hidden` of position t and the token of t + 1; `unembed` gives logits for t + 2.

        The layer has pages of its own in the pool. Its output is normed and takes the place of `hidden` at the next depth."""
        plan = self.dispatch.step(self, batch, pool)
        plan = plan._replace(experts=plan.experts._replace(defer=0))  # there is no layer after it
        layer = self.layer_of(pool, len(self.layers) + depth)
        x, layer, found = self.mtp[depth](self.embedded(tokens), hidden, batch, layer, plan)
        return (
            x,
            None if layer is None else layer.pool,
            {name: [value] for name, value in found.items()} if collect else {},
        )

    def new_pool(self, pages: int, size: int | None = None, layers: int | None = None) -> Pool:
        """An empty pool with `pages` pages per layer of what this model's forms remember, in its weights' dtype or in FP8.

        A page has `size` tokens on this device; by default its part of a page."""
        config = self.config
        attn = self.layers[0].attn
        size = size or paged.PAGE // self.dispatch.layout.context
        up = (attn.uk.get_value(), attn.uv.get_value())  # which may be shapes only
        shapes = [
            jax.ShapeDtypeStruct((1, 1, n), self.dtype)
            for n in (config.kv_lora_rank, config.qk_rope_head_dim, config.hidden_size)
        ]
        c_kv, k_pe, x = shapes
        token = jax.eval_shape(self.dispatch.cached().remembers, c_kv, k_pe, up, x)
        count = self.cached_layers if layers is None else layers
        on_cpu = self.dispatch.device.platform == "cpu"
        of_tokens, of_pages = self._notes()
        index, indexed = self._index_keys(), len(self.indexed) if layers is None else layers
        return paged.init(
            token | index | of_tokens,
            count,
            pages,
            size,
            page=of_pages,
            fewer=dict.fromkeys(index, indexed),
            as_bits=on_cpu,
        )

    def _index_keys(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of what indexers cache of a token; empty without them."""
        width = self.config.index_head_dim
        if self.config.index_topk is None or width is None:
            return {}
        key = jax.ShapeDtypeStruct((1, 1, width), self.dtype)
        packs = self.dispatch.packs_index_keys(self.config)
        return jax.eval_shape((fp8_index.IN_E4M3 if packs else fp8_index.AS_COMPUTED).remembers, key)

    def _notes(self) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
        """Shapes of retrieval's metadata of one token, and of one page; empty without retrieval."""
        if self.dispatch.retrieval is None:
            return {}, {}
        policy = self.dispatch.retrieval.policy
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        asked = {paged.ASKED: jax.ShapeDtypeStruct((1, 1), jnp.float32)} if policy.asks else {}
        return asked, {paged.SUMMARY: jax.ShapeDtypeStruct((1, policy.vectors, width), self.dtype)}

    def blocks(self) -> list[Block]:
        """All layers, MTP's after the model's."""
        return [*self.layers, *(cast(Block, further.block) for further in self.mtp)]

    def on_host(self) -> dict[int, Any]:
        """The packed experts of each layer whose routed experts the CPU computes."""
        found = {i: block.mlp.experts for i, block in enumerate(self.layers) if isinstance(block.mlp, MoE)}
        return {i: experts.layer for i, experts in found.items() if not isinstance(experts, Experts)}

    @property
    def replicated(self) -> int:
        """Experts that the CPU holds and that have a replica on the device."""
        return sum(gate.shape[0] for gate in self.stacks("replicated")[::2])

    def stacks(self, where: str) -> list[Any]:
        """gate and down, or their shapes, of each layer whose experts are on the "device", "replicated" or "streamed"."""
        experts = (block.mlp.experts for block in self.blocks() if isinstance(block.mlp, MoE))
        return [w for each in experts for w in each.stacks(self.dtype).get(where, ())]
