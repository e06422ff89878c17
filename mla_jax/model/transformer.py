"""The decoder: blocks of latent attention and experts between an embedding and a head.

Prefill, a chunk of a prompt on top of a cached prefix, and decode are this one forward; they differ in batch and cache."""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mla_jax.base import qtensor, roofline
from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.base.qtensor import QTensor
from mla_jax.cache import latent
from mla_jax.model import fused, moe, packed_latents
from mla_jax.model.mla import FORMS, MLA, Form
from mla_jax.model.moe import BACKENDS, MLP, Experts, HostExperts, MoE, pick_backend, settle
from mla_jax.model.mtp import MTP
from mla_jax.model.ops import entries, implementation, linear, norm_weight, operand, parameter, rms_norm
from mla_jax.model.stream import CHUNK


class How(NamedTuple):
    """How one step computes, the same for all its layers; chosen from static shapes while tracing."""

    form: Form
    experts: moe.How


class Block(nnx.Module):
    """One layer. It takes and returns `(x, pending)`; `pending` is what a layer leaves for a later one to add."""

    def __init__(self, config: Config, rngs: nnx.Rngs, layer: int):
        self.eps = config.rms_norm_eps
        self.attn_norm = norm_weight(config, rngs, "model")
        self.attn = MLA(config, rngs)
        self.mlp_norm = norm_weight(config, rngs, "model")
        self.mlp = MoE(config, rngs) if config.is_moe(layer) else MLP(config, rngs)

    def __call__(self, x: Float[Array, "B T D"], pending: Any, batch: Batch, held: latent.Layer | None, how: How):
        """Returns `((x, pending), held, load)`; `load` counts each expert's tokens, None for a dense layer."""
        with jax.named_scope("attention"):
            y, held = self.attn(rms_norm(x, self.attn_norm[...], self.eps), batch, held, how.form)
        x = x + y
        with jax.named_scope("experts" if isinstance(self.mlp, MoE) else "mlp"):
            y = rms_norm(x, self.mlp_norm[...], self.eps)
            y, load, left = self.mlp(y, batch.mask, how.experts) if isinstance(self.mlp, MoE) else (self.mlp(y), None, None)
        return (settle(x + y, pending), left), held, load


class Transformer(nnx.Module):
    """An MLA model. `attention` names a form or "fused", the kernel; `experts` a backend; "auto" chooses by shapes and device.

    `kv_cache` "fp8" holds latents in E4M3. `defer` experts of each token are added a layer later while few tokens are new, where
    a layer's experts lie on the host."""

    def __init__(
        self,
        config: Config,
        rngs: nnx.Rngs,
        *,
        attention: str = "auto",
        experts: str = "auto",
        device: roofline.Device = roofline.DEVICES["cpu"],
        mtp: bool = False,
        defer: int = 0,
        kv_cache: str = "auto",
    ):
        self.config, self.attention, self.experts, self.device, self.defer = config, attention, experts, device, defer
        self.kv_cache = kv_cache
        self.embed = parameter(config, rngs, "vocab", "model")
        self.layers = nnx.List([Block(config, rngs, i) for i in range(config.num_hidden_layers)])
        self.norm = norm_weight(config, rngs, "model")
        self.head = None if config.tie_word_embeddings else parameter(config, rngs, "vocab", "model")
        depth = config.num_nextn_predict_layers if mtp else 0
        self.mtp = nnx.List([MTP(config, rngs, Block(config, rngs, config.num_hidden_layers + i)) for i in range(depth)])

    def __call__(
        self, tokens: Int[Array, "B T"], batch: Batch, cache: latent.Cache | None = None, *, collect: bool = False
    ) -> tuple[Float[Array, "B T D"], latent.Cache | None, dict[str, list[Array]]]:
        """Hidden states after the last norm, the cache with the new tokens in it, and, if `collect`, each MoE layer's load.

        Without a cache the tokens attend to each other alone, as in training."""
        how, x, pending = self.how(batch, None if cache is None else cache[0]), self.embedded(tokens), None
        layers, loads = [], []

        def layer_of(graph: Any, weights: Any, x: Array, pending: Any, held: latent.Layer | None):
            return nnx.merge(graph, weights)(x, pending, batch, held, how)

        # layers of one structure are traced and lowered once; XLA inlines the calls
        apply = jax.jit(layer_of, static_argnums=0) if isinstance(x, jax.core.Tracer) else layer_of
        for i, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                held = None if cache is None else cache[i]
                (x, pending), layer, load = apply(*nnx.split(block), x, pending, held)
            layers.append(layer)
            loads += [load] if load is not None else []
        hidden = rms_norm(settle(x, pending), self.norm[...], self.config.rms_norm_eps)
        return hidden, None if cache is None else tuple(layers), {"load": loads} if collect else {}

    @property
    def dtype(self) -> jnp.dtype:
        """What the model computes in; packed weights are unpacked to it."""
        return self.norm.get_value().dtype  # which may be a shape only

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return entries(self.embed[...], tokens, self.dtype)

    def unembed(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B W"]:
        """Logits in float32."""
        return linear(hidden, (self.embed if self.head is None else self.head)[...], out="float32")

    def draft(
        self,
        depth: int,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        batch: Batch,
        layer: latent.Layer | None = None,
        *,
        collect: bool = False,
    ) -> tuple[Float[Array, "B T D"], latent.Layer | None, dict[str, list[Array]]]:
        """Runs MTP layer `depth` on the normed `hidden` of position t and the token of t + 1; `unembed` gives logits for t + 2.

        The layer has a cache of its own. Its output is normed and takes the place of `hidden` at the next depth."""
        how = self.how(batch, layer)
        how = how._replace(experts=how.experts._replace(defer=0))  # there is no layer after it
        x, layer, load = self.mtp[depth](self.embedded(tokens), hidden, batch, layer, how)
        return x, layer, {"load": [load] if load is not None else []} if collect else {}

    def new_cache(self, rows: int, slots: int, layers: int | None = None) -> latent.Cache:
        """An empty cache of what this model's form remembers, in the dtype of its weights or in FP8.

        On a CPU it has a second row even for one sequence: XLA copies a one-row cache at every turn of a while_loop there."""
        rows = max(rows, 2) if self.device.platform == "cpu" else rows
        config, attn = self.config, self.layers[0].attn
        up = (attn.uk.get_value(), attn.uv.get_value())  # which may be shapes only
        shapes = [jax.ShapeDtypeStruct((1, 1, n), up[0].dtype) for n in (config.kv_lora_rank, config.qk_rope_head_dim)]
        token = jax.eval_shape(self._held(FORMS.get(self.attention, FORMS["move_elided"])).remembers, *shapes, up)
        return latent.init(token, config.num_hidden_layers if layers is None else layers, rows, slots)

    def form_name(self, rows: int, new: int, attended: int) -> str:
        """The form taken for `new` tokens a row that attend to `attended`."""
        if self.attention != "auto":
            return self.attention
        form = roofline.pick_form(self.config, self.device, rows, new, attended)
        kernel = self.kernel_of_attention(rows, new, attended) != "xla"
        return "fused" if kernel and (form == "compressed" or new <= roofline.FEW) else form

    def chunk(self, rows: int, slots: int, scores: int) -> int:
        """New tokens a row that prompts are read by, so that attention scores over `slots` take no more than so many bytes.

        More, where experts are brought from the host for each chunk and a kernel writes no scores."""
        chunk, most = roofline.chunk_tokens(self.config, rows, slots, scores), max(CHUNK // rows, 1)
        kernel = self.form_name(rows, most, slots) == "fused" and self.kernel_of_attention(rows, most, slots) != "xla"
        return max(chunk, most) if self.stream and kernel else chunk

    def kernel_of_attention(self, rows: int, new: int, attended: int) -> str:
        """What the form "fused" takes, "xla" where there is no kernel for such a step here."""
        return fused.implementation(self.config, self.dtype, rows, new, attended, self.kv_cache == "fp8")

    def kernel_of_experts(self, tokens: int, where: str = "device") -> str:
        """What the backend "ragged" takes, "xla" where there is no kernel for such a step of experts that lie there."""
        stacks = self._stacks(where)
        if not stacks or any(isinstance(w, QTensor) and w.format != "fp8_block" for w in stacks):
            return "xla"
        rows = tokens * (self.config.num_experts_per_tok or 0)

        def of(w: Any) -> str:
            x = jax.ShapeDtypeStruct((rows, w.shape[-1]), self.dtype)
            w = operand(w, self.dtype) if isinstance(w, QTensor) else jax.ShapeDtypeStruct(w.shape, self.dtype)
            return implementation("ragged_dot", x, w)

        gate, down = (of(w) for w in stacks[:2])
        return "xla" if down == "xla" else gate

    def backend_name(self, tokens: int, where: str = "device") -> str:
        """The expert backend taken for `tokens` tokens, of experts on the "device", "streamed" to it, or "hot" ones."""
        if self.experts != "auto":
            return self.experts
        pairs, experts = tokens * (self.config.num_experts_per_tok or 0), self.config.n_routed_experts or 0
        stacks = [] if where == "streamed" else self._stacks(where)
        packed = [prod(w.shape) * self.dtype.itemsize for w in stacks if isinstance(w, QTensor)]
        if where == "hot":
            experts = max(w.shape[0] for w in stacks)
        kernel = self.kernel_of_experts(tokens, where) != "xla"
        return pick_backend(self.device.platform, pairs, experts, max(packed, default=0), kernel)

    def on_host(self) -> dict[int, Any]:
        """The `cpu_experts.Experts` of each layer whose routed experts lie on the host."""
        found = {i: block.mlp.experts for i, block in enumerate(self.layers) if isinstance(block.mlp, MoE)}
        return {i: experts.layer for i, experts in found.items() if isinstance(experts, HostExperts)}

    @property
    def stream(self) -> int:
        """Tokens of a step from which experts on the host are computed on the device; 0 for never."""
        return next((experts.stream for experts in self._on_host()), 0)

    @property
    def hot(self) -> int:
        """Experts that lie on the host and on the device, too."""
        return sum(e.hot.count for e in self._on_host() if e.hot is not None)

    def _stacks(self, where: str) -> list[Any]:
        """Gate and down, or their shapes, of each layer with experts on the "device" alone, "hot" ones, or "streamed" ones."""
        if where == "streamed":
            return self._streamed_stacks()
        held = (e.hot for e in self._on_host()) if where == "hot" else (e for e in self._experts() if isinstance(e, Experts))
        return [w.get_value() for e in held if e is not None for w in (e.gate, e.down)]

    def _streamed_stacks(self) -> list[Any]:
        """Stacks of the host's experts as they come to the device: FP8 stays packed, all else is unpacked whole."""
        c = self.config
        count, width = c.n_routed_experts or 0, c.moe_intermediate_size or 0
        packed = any(getattr(experts.layer, "precision", None) == "fp8_block" for experts in self._on_host())
        shapes = (count, width, c.hidden_size), (count, c.hidden_size, width)
        return [qtensor.abstract("fp8_block", s) if packed else jax.ShapeDtypeStruct(s, self.dtype) for s in shapes]

    def _on_host(self) -> list[HostExperts]:
        blocks = [*self.layers, *(further.block for further in self.mtp)]
        experts = (block.mlp.experts for block in blocks if isinstance(block.mlp, MoE))
        return [e for e in experts if isinstance(e, HostExperts)]

    def _experts(self) -> list[Experts | HostExperts]:
        return [block.mlp.experts for block in self.layers if isinstance(block.mlp, MoE)]

    def _held(self, form: Form) -> Form:
        """`form`, over what the cache holds."""
        return packed_latents.over(form) if self.kv_cache == "fp8" else form

    def how(self, batch: Batch, layer: latent.Layer | None) -> How:
        """What this step's shapes, known while tracing, decide for all layers; `layer` is any of the cache's."""
        rows, new = batch.positions.shape
        attended = new if layer is None else batch.span or layer["positions"].shape[1]
        name = self.form_name(rows, new, attended)
        if name == "fused" and layer is not None:
            form = fused.form(batch, layer, self.config)
        else:  # without a cache, padding may stand between tokens
            form = FORMS[name if name != "fused" else "move_elided"]
            form = form if layer is None else self._held(form)
        tokens = rows * new
        streamed = BACKENDS[self.backend_name(tokens, "streamed")] if 0 < self.stream <= tokens else None
        hot = BACKENDS[self.backend_name(tokens, "hot")] if self.hot else None
        backend, defer = BACKENDS[self.backend_name(tokens)], self.defer if new <= roofline.FEW else 0
        return How(form, moe.How(backend, defer, streamed, hot))
