"""Which form of attention and which expert backend a step takes: as asked, or for "auto" the fastest on the device.

A `Dispatch` is the requested settings and the device. It holds no weights. The model asks it once per step, while the step is
traced; `explain()`, the memory plan and the benchmarks ask the same object. Whether a kernel can take a step is not worked out
from shapes that are written a second time: the function that will run is traced on shapes, and its kernels answer."""

import dataclasses
import functools
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.base import roofline
from mla_jax.base.batch import AnyBatch, Batch, MixedBatch, by_layer
from mla_jax.base.config import Config
from mla_jax.base.qtensor import QTensor
from mla_jax.cache import paged
from mla_jax.cache.paged import Pool
from mla_jax.cache.retrieve import Retrieval
from mla_jax.mesh import comm_cost
from mla_jax.mesh.partition import ONE, Layout, of_device
from mla_jax.model import (
    far_positions,
    fp8_index,
    fp8_latent,
    kernels,
    mixed_attention,
    mla,
    moe,
    page_selection,
    rope,
    token_choice,
)
from mla_jax.model.attention_scores import Watch
from mla_jax.model.exchange import EXCHANGES
from mla_jax.model.kernel_attention import KERNELS
from mla_jax.model.mixed_attention import MixedChoice, MixedSelection
from mla_jax.model.mla import MLA
from mla_jax.model.moe import BACKENDS, ExpertPlan, pick_backend
from mla_jax.model.ops import Shapes
from mla_jax.model.page_selection import PageSelection
from mla_jax.model.token_choice import MaskChoice, TokenChoice

if TYPE_CHECKING:
    from mla_jax.model.transformer import Transformer

Selection = PageSelection | MixedSelection
Choosing = TokenChoice | MaskChoice | MixedChoice


def form_named(name: str, kv_cache: str = "auto") -> mla.Form:
    """The form of this name, kernels' among them, over a cache in this format."""
    form = (mla.FORMS | KERNELS)[name]
    return fp8_latent.over(form) if kv_cache == "fp8" else form


class AttentionPlan(NamedTuple):
    """How one step attends."""

    form: mla.Form
    prepare: Callable[[Any], Any]  # makes what the form needs of a batch
    retrieving: Selection | None = None  # some of the pages, where that is asked for
    choosing: Choosing | None = None  # some of the tokens, where the model has indexers and more are cached


class StepPlan(NamedTuple):
    """How one step computes, the same for all its layers; chosen from static shapes while tracing."""

    form: mla.Form
    shared: Any  # what `form.prepare` made of the batch and the pool; with layers in front where these differ
    turns: rope.Turns
    experts: ExpertPlan
    layers_differ: bool = False  # each has dropped tokens of its own
    watch: Watch | None = None  # what is asked of each layer's attention
    retrieving: Selection | None = None  # some of the pages, where that is asked for
    choosing: Choosing | None = None  # some of the tokens, where the model has indexers and more are cached

    def of_layer(self, number: Any) -> "StepPlan":
        """The plan for a layer; the same for all unless layers have dropped tokens."""
        if not self.layers_differ:
            return self
        return self._replace(shared=jax.tree.map(lambda x: x[number], self.shared), layers_differ=False)

    def attending_to_all(self) -> "StepPlan":
        """The plan for a layer that chooses no pages."""
        return self._replace(retrieving=None)


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """`attention` is "auto", a name in mla.FORMS, or "fused", the kernel for a step's number of new tokens. `experts` is a
    backend or "auto", `kv_cache` "auto" or "fp8" (latents and keys of indexers in E4M3).

    The last two are for layers whose experts the CPU holds: `defer` experts of each token are added one layer later while few
    tokens are new, and steps of at least `stream` tokens (0: none) copy the experts to the device. With a `retrieval` decode
    steps attend to some of the cached pages. On a mesh of this `layout` each device has a part of the model, and
    tokens reach their experts by an `exchange`, or "auto". With `remat` a layer keeps its input alone for its gradients."""

    attention: str = "auto"
    experts: str = "auto"
    kv_cache: str = "auto"
    device: roofline.Device = roofline.DEVICES["cpu"]
    defer: int = 0
    stream: int = 0
    retrieval: Retrieval | None = None
    layout: Layout = ONE
    exchange: str = "auto"
    remat: bool = False

    def step(self, model: "Transformer", batch: AnyBatch, pool: Pool | None) -> StepPlan:
        """The plan for a step on this batch; without a pool nothing is cached."""
        if isinstance(batch, Batch):
            attention = self._attention(model, batch, pool, self._name(model, batch, pool))
        else:
            assert pool is not None, "rows that decode have a cache"
            attention = self._mixed(model, batch, pool)
        return self._plan(model, batch, attention)

    def watching(self, model: "Transformer", batch: Batch, pool: Pool, watch: Watch) -> StepPlan:
        """The plan for a step on tokens that are cached, of whose attention something is asked, by a form that XLA computes."""
        attention = self._attention(model, batch, pool, self.form_of_scores)
        return self._plan(model, batch, attention)._replace(watch=watch)

    def _plan(self, model: "Transformer", batch: AnyBatch, attention: AttentionPlan) -> StepPlan:
        experts, turns = (
            self._expert_plan(model, *batch.positions.shape),
            (rope.turns if self.window is None else rope.unturned)(batch.positions, model.config),
        )
        form, prepare, retrieving, choosing = attention
        differ = batch.tables is not None
        shared = by_layer(prepare, batch) if differ else prepare(batch)
        edits = {"retrieving": retrieving, "choosing": choosing}
        return StepPlan(form, shared, turns, experts, differ, **edits)

    def _attention(self, model: "Transformer", batch: Batch, pool: Pool | None, name: str) -> AttentionPlan:
        form = form_named(name, "auto" if pool is None else self.kv_cache)
        if self.window is not None:
            form = far_positions.windowed(form, self.window, model.config)
        slots = self.block_slots(model, name, *batch.positions.shape)

        def prepare(batch: Batch) -> Any:
            return form.prepare(batch, pool, self.seen(model.config), slots)

        if choosing := self._choice(model, batch, pool, name, prepare):
            return AttentionPlan(form, prepare, choosing=choosing)
        if pool is None or self.retrieval is None:
            return AttentionPlan(form, prepare)
        size, turned = paged.page_size(pool), functools.partial(self._turned_to_pages, model.config)
        retrieving = page_selection.of_step(self.retrieval, batch, size, prepare, turned)
        return AttentionPlan(form, prepare, retrieving)

    @property
    def window(self) -> int | None:
        """Tokens behind which all are at one distance; None: each is at its own."""
        return None if self.retrieval is None else self.retrieval.window

    def _turned_to_pages(self, config: Config, q_pe: jax.Array) -> jax.Array:
        """Rotary queries as they meet the keys of pages that they choose among."""
        if self.window is None:
            return q_pe
        return far_positions.turned(q_pe, jnp.full(q_pe.shape[:2], self.window), config)

    def _mixed(self, model: "Transformer", batch: MixedBatch, pool: Pool) -> AttentionPlan:
        """Each kind of tokens as in a batch of its own."""
        line, decode = (
            self._attention(model, part, pool, self._name(model, part, pool))
            for part in (batch.line, batch.decode)
        )

        def prepare(batch: MixedBatch) -> Any:
            return mixed_attention.prepared(batch, line.prepare, decode.prepare)

        forms = line.form, decode.form
        form, retrieving, choosing = mixed_attention.mixed(*forms), None, None
        if isinstance(line.retrieving, PageSelection) and isinstance(decode.retrieving, PageSelection):
            retrieving = MixedSelection(line.retrieving, decode.retrieving, forms)
        if line.choosing or decode.choosing:
            of_line, of_rows = (cast(TokenChoice | None, part.choosing) for part in (line, decode))
            rows, tokens = batch.decode.mask.shape
            choosing = MixedChoice(of_line, of_rows, forms, (rows, tokens))
        return AttentionPlan(form, prepare, retrieving, choosing)

    def _choice(
        self, model: "Transformer", batch: Batch, pool: Pool | None, name: str, prepare: Callable
    ) -> TokenChoice | MaskChoice | None:
        """How the tokens of a step choose; None where there are no more than each may attend to."""
        config, (lines, new) = model.config, batch.mask.shape
        if not roofline.chooses(config, new if pool is None else batch.width * paged.page_size(pool)):
            return None
        if pool is None:
            return MaskChoice(config.index_topk or 0, prepare(batch))
        sizes = (self.device.platform, name, lines, new, model.dtype.itemsize)
        return token_choice.choice_of_step(
            batch, pool, config, roofline.choice_sizes(self.seen(config), *sizes)
        )

    def seen(self, config: Config) -> Config:
        """The config as the attention of one device sees it, which has its part of the heads."""
        return of_device(config, self.layout)

    def attends_to_all(self, layer: int) -> bool:
        """Whether this layer always reads all that is cached."""
        return self.retrieval is None or layer < self.retrieval.dense

    def _name(self, model: "Transformer", batch: Batch, pool: Pool | None) -> str:
        rows, new = batch.positions.shape
        # Kernels need a cache: without one, padding may stand between tokens
        if pool is None or batch.page_table is None:
            name = self.form_name(model, rows, new, new)
            return name if name in mla.FORMS else "move_elided"
        attended = batch.width * paged.page_size(pool)
        if batch.row is not None:
            new = max(new, roofline.FEW + 1)  # the kernel over latents takes a line of each row's own
        return self.form_name(model, rows, new, attended)

    def block_slots(self, model: "Transformer", name: str, rows: int, new: int) -> int:
        """Cached tokens per row that the form of this name takes at a time; kernels write no scores."""
        scored = 0 if name in KERNELS else new
        return roofline.block_slots(
            self.seen(model.config), self.device.platform, rows, scored, model.dtype.itemsize
        )

    def cached(self) -> mla.Form:
        """A form that caches what all forms of this dispatch do."""
        return form_named(self.form_of_scores, self.kv_cache)

    @property
    def remembers(self) -> Callable[..., dict[str, jax.Array]]:
        """The function that makes the cached arrays of new tokens, as the form that is asked for has it."""
        return mla.FORMS[self.attention].remembers if self.attention in mla.FORMS else mla.latents

    @property
    def functions(self) -> tuple[Any, ...]:
        """The form and the expert backend that are asked for by name; none where these are chosen."""
        return tuple(
            table[name]
            for table, name in ((mla.FORMS, self.attention), (BACKENDS, self.experts))
            if name in table
        )

    def packs_index_keys(self, config: Config) -> bool:
        """Whether the keys of indexers are cached in E4M3."""
        return self.kv_cache == "fp8" and fp8_index.keys_fit(config)

    @property
    def caches_heads(self) -> bool:
        """Whether each head's keys and values are cached."""
        return self.remembers is mla.heads

    @property
    def shares_cache(self) -> bool:
        """Whether all heads share what is cached, so that devices along `tensor` cache the same."""
        return self.remembers is mla.latents

    @property
    def form_of_scores(self) -> str:
        """The form whose scores a policy sees: over latents, over cached heads, or the form of a user's own."""
        if self.shares_cache:
            return "move_elided"
        return "naive" if self.caches_heads else self.attention

    def form_name(self, model: "Transformer", rows: int, new: int, attended: int) -> str:
        """The form for `rows` rows of `new` tokens that attend to `attended` tokens each."""
        forms = self.forms(model, rows, new, attended)
        return roofline.pick_form(self.seen(model.config), self.device, rows, new, attended, forms)

    def forms(self, model: "Transformer", rows: int, new: int, attended: int) -> tuple[str, ...]:
        """The forms of which such a step takes the fastest."""
        kernel = "kernel_latents" if new <= roofline.FEW else "kernel_heads"
        if roofline.chooses(model.config, attended):
            return (self._form_of_chosen(model, rows, new, attended),)
        if self.window is not None:
            return ("move_elided",)
        if self.attention == "naive" and new == 1:
            has_kernel = self.attention_kernel(model, "kernel_naive", rows, new, attended) != "xla"
            return ("kernel_naive" if has_kernel else "naive",)
        if self.attention != "auto":
            return (kernel if self.attention == "fused" else self.attention,)
        if self.attention_kernel(model, kernel, rows, new, attended) == "xla":
            return "move_elided", "compressed"
        # The kernel writes no scores; where arithmetic alone decides, it comes first
        return kernel, "move_elided"

    def _form_of_chosen(self, model: "Transformer", rows: int, new: int, attended: int) -> str:
        """The form for new tokens that each attend to tokens of their own."""
        if self.attention in mla.FORMS:
            return self.attention
        if self.attention == "fused":
            return "kernel_chosen"
        has_kernel = self.attention_kernel(model, "kernel_chosen", rows, new, attended) != "xla"
        return "kernel_chosen" if has_kernel else "move_elided"

    def attention_kernel(self, model: "Transformer", form: str, rows: int, new: int, attended: int) -> str:
        """Who computes `form` for such a step: "mosaic_gpu", "mosaic_tpu", or "xla" where no kernel can."""
        if form not in KERNELS or not kernels.kernels_here():
            return "xla"
        if form == "kernel_latents" and new > 1 and self.layout.context > 1:
            return "xla"  # it takes a row's queries for the last tokens that are on the device
        row, config = form_named(form, self.kv_cache), self.seen(model.config)
        graph, weights = nnx.split(MLA(config, Shapes()))
        weights = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, model.dtype), weights)
        x = jax.ShapeDtypeStruct((rows, new, config.hidden_size), model.dtype)
        pages = -(-attended // paged.PAGE)

        def attend(weights: Any, x: jax.Array) -> Any:
            batch = Batch.after(
                jnp.zeros(rows, jnp.int32), jnp.ones((rows, new), bool), paged.in_order(rows, attended)
            )
            layer = paged.Layer(model.new_pool(rows * pages, layers=1), jnp.int32(0))
            step = row.prepare(batch, layer.pool, config, paged.PAGE)
            turns = rope.turns(batch.positions, config)
            choosing = chosen = None
            if form == "kernel_chosen":
                of_step = (self.device.platform, form, rows, new, model.dtype.itemsize)
                sizes = roofline.choice_sizes(config, *of_step)
                choosing = token_choice.choice_of_step(batch, layer.pool, config, sizes)
                chosen = token_choice.nothing(choosing)
            return nnx.merge(graph, weights)(x, layer, row, step, turns, None, choosing, chosen)[0]

        return kernels.who_computes(attend, weights, x).get(_OPS[form], "xla")

    def chunk(self, model: "Transformer") -> int:
        """New tokens of all rows together that one dispatch reads of prompts: a power of two.

        Enough that the weights are read seldom; more where experts are copied from the host for each chunk."""
        chunk = roofline.chunk(
            model.config, self.device, self.layout.data if model.config.n_routed_experts else 1
        )
        return max(chunk, roofline.STREAMED) if self.stream else chunk

    def reach(self, model: "Transformer") -> int:
        """Tokens, held and new, of prompts that share a line. An indexer scores all of a line's tokens with all of these."""
        if model.config.index_topk is not None:
            return roofline.REACH
        chunk = self.chunk(model)
        name = self.form_name(model, 1, chunk, chunk)
        has_kernel = name == "kernel_heads" and self.attention_kernel(model, name, 1, chunk, chunk) != "xla"
        return roofline.REACH_OF_KERNEL if has_kernel else roofline.REACH

    def _expert_plan(self, model: "Transformer", rows: int, new: int) -> ExpertPlan:
        tokens = rows * new
        streams, replicates = 0 < self.stream <= tokens, model.replicated > 0
        return ExpertPlan(
            BACKENDS[self.backend_name(model, tokens)],
            self.defer if new <= roofline.FEW else 0,
            BACKENDS[self.backend_name(model, tokens, "streamed")] if streams else None,
            BACKENDS[self.backend_name(model, tokens, "replicated")] if replicates else None,
            EXCHANGES[self.exchange_name(model, tokens)],
        )

    def exchange_name(self, model: "Transformer", tokens: int) -> str:
        """How `tokens` tokens of each data shard reach the experts on all devices."""
        if self.exchange != "auto":
            return self.exchange
        return comm_cost.pick_exchange(model.config, self.layout.sizes, tokens, self.device)

    def backend_name(self, model: "Transformer", tokens: int, where: str = "device") -> str:
        """The expert backend for `tokens` tokens, of experts on the "device", "streamed" to it, or "replicated" there."""
        if self.experts != "auto":
            return self.experts
        config = model.config
        tokens *= self.layout.data if where == "device" else 1  # those of all shards meet there
        pairs, experts = tokens * (config.num_experts_per_tok or 0), config.n_routed_experts or 0
        stacks = model.stacks(where)
        packed = [w for w in stacks if isinstance(w, QTensor)] if where != "streamed" else []
        unpacked = max((prod(w.shape) * model.dtype.itemsize for w in packed), default=0)
        if where == "replicated":
            experts = max(w.shape[0] for w in stacks)
        kernel = self.expert_kernel(model, tokens, where) != "xla"
        return pick_backend(self.device.platform, pairs, experts, unpacked, kernel)

    def expert_kernel(self, model: "Transformer", tokens: int, where: str = "device") -> str:
        """Who computes the backend "ragged" for such a step of experts that are stored there."""
        stacks = model.stacks(where)
        if not stacks or not kernels.kernels_here():
            return "xla"
        if any(isinstance(w, QTensor) and not (w.reordered or w.format == "fp8_block") for w in stacks):
            return "xla"  # they would be unpacked first
        gate, down = stacks[:2]
        chosen = (tokens, model.config.num_experts_per_tok or 0)
        x = jax.ShapeDtypeStruct((tokens, model.config.hidden_size), model.dtype)
        ids, weights = jax.ShapeDtypeStruct(chosen, jnp.int32), jax.ShapeDtypeStruct(chosen, jnp.float32)
        found = set(kernels.who_computes(moe.ragged, x, ids, weights, (gate, gate, down)).values())
        return found.pop() if len(found) == 1 else "xla"  # a kernel pays only if it takes both products


# The op that a form is named for
_OPS = {
    "kernel_latents": "mla_decode",
    "kernel_heads": "mla_prefill",
    "kernel_naive": "heads_decode",
    "kernel_chosen": "mla_sparse",
}
