"""Mixture of experts: the routers of DeepSeek-V2 and V3, and the backends that compute the chosen experts.

A backend is `(x [n D], topk_ids [n K], topk_weights [n K], gate [X F D], up [X F D], down [X D F]) -> [n D]`; the id X stands for
no expert at all. `dense` is the reference; the others compute the same and are chosen by `pick_backend`; `register_backend` adds
one. A layer's `Experts` may
be replaced by a module of the same call that computes them elsewhere (mla_jax.offload)."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base import axes
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.options import OWN_EXPERTS
from mla_jax.model.exchange import Exchange
from mla_jax.model.exchange import by_gathering as gather_tokens
from mla_jax.model.grouped import ExpertWeights, Grouped, chosen_weights, ragged
from mla_jax.model.kernels import contracted, linear, moe_decode, router, swiglu
from mla_jax.model.ops import parameter, plain, take_one

Backend = Callable[[Array, Array, Array, ExpertWeights], Array]


class Router(nnx.Module):
    """Scores every expert for every token and keeps the best few."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.weight = parameter(config, rngs, "scores", "model", packs=False)
        if config.topk_method == "noaux_tc":
            self.bias = parameter(config, rngs, "scores", exact=True)

    def __call__(
        self, x: Float[Array, "n D"], some: Bool[Array, " n"] | None = None
    ) -> tuple[Int[Array, "n K"], Float[Array, "n K"]]:
        """The chosen experts and their weights. Tokens that are not in `some`, if given, get no expert."""
        return router(self.logits(x), self.biases(), some, **rule_of(self.config))

    def biases(self) -> Float[Array, " X"] | None:
        """Added to the scores by which experts are chosen; zeros where a router of V3's kind has none of its own."""
        if self.config.topk_method == "noaux_tc":
            return self.bias[...]
        return jnp.zeros(self.weight.shape[0]) if self.config.topk_method == "none" else None

    def logits(self, x: Float[Array, "n D"]) -> Float[Array, "n X"]:
        """In float32: near-ties would route differently in less."""
        weight = self.weight[...].astype(jnp.float32)
        return jnp.dot(x.astype(jnp.float32), weight.T, precision=jax.lax.Precision.HIGHEST)

    def choice(self, logits: Float[Array, "n X"], scores: Float[Array, "n X"]) -> Float[Array, "n X"]:
        """The numbers by which experts and groups are chosen. V2's logits are in the order of its scores, and need not wait."""
        if self.config.topk_method == "noaux_tc":
            return scores + self.bias[...]
        return scores if self.config.topk_method == "none" else logits


def rule_of(config: Config) -> dict[str, Any]:
    """How experts are chosen and weighed, as `kernels.router` takes it.

    V2's released code normalises or scales, V3's does both."""
    v2 = config.topk_method in ("greedy", "group_limited_greedy")
    chosen = config.num_experts_per_tok or 1
    normalise = config.norm_topk_prob and not (v2 and chosen == 1)
    groups = 1 if config.topk_method == "greedy" else config.n_group or 1
    return {
        "num_experts_per_tok": chosen,
        "scoring_func": config.scoring_func,
        "n_group": groups,
        "topk_group": min(config.topk_group or groups, groups),
        "norm_topk_prob": normalise,
        "scale": 1.0 if normalise and v2 else config.routed_scaling_factor,
    }


def dense(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    experts: ExpertWeights,
) -> Float[Array, "n D"]:
    """Every expert on every token, weighted by zero where not chosen: the reference."""
    gate, up, down = (plain(w, x.dtype) for w in experts)
    share = jnp.einsum("nk,nkx->nx", topk_weights, jax.nn.one_hot(topk_ids, gate.shape[0]))
    hidden = jax.nn.silu(jnp.einsum("nd,xfd->nxf", x, gate)) * jnp.einsum("nd,xfd->nxf", x, up)
    return jnp.einsum("nxd,nx->nd", jnp.einsum("nxf,xdf->nxd", hidden, down), share.astype(x.dtype))


def gather(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    experts: ExpertWeights,
) -> Float[Array, "n D"]:
    """Each token times its own experts: for few tokens on a GPU."""
    return moe_decode(x, topk_ids, topk_weights, *experts)


def loop(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    experts: ExpertWeights,
) -> Float[Array, "n D"]:
    """Tiles of tokens of one expert, one after the other: for a CPU, where only the touched experts are read.

    Tiles of one token become matrix-vector products that XLA fuses with the choice of the expert, which is 5 times faster than
    any larger tile for few tokens; 32 is the best tile for many (measured on two cores, V2-Lite geometry)."""
    n_experts, pairs = experts[0].shape[0], topk_ids.size
    tile = 1 if pairs <= 2 * n_experts else 32
    grouped = Grouped.of(topk_ids, n_experts)
    tiles = -(-grouped.sizes // tile)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(grouped.sizes)
    rows = jnp.pad(x[grouped.token], ((0, tile), (0, 0)))

    def one_tile(i: Array, out: Array) -> Array:
        expert = jnp.searchsorted(last_tile, i, side="right")
        start = last_row[expert] - grouped.sizes[expert] + (i - (last_tile[expert] - tiles[expert])) * tile
        gate, up, down = (take_one(w, expert) for w in experts)
        y = swiglu(jax.lax.dynamic_slice_in_dim(rows, start, tile), gate, up, down)
        mine = (start + jnp.arange(tile) < last_row[expert])[:, None]
        kept = jnp.where(mine, y, jax.lax.dynamic_slice_in_dim(out, start, tile))
        return jax.lax.dynamic_update_slice_in_dim(out, kept, start, axis=0)

    y = jax.lax.fori_loop(0, last_tile[-1], one_tile, jnp.zeros_like(rows))
    return grouped.combine(y, chosen_weights(topk_ids, topk_weights, n_experts))


BACKENDS: dict[str, Backend] = {"dense": dense, "loop": loop, "gather": gather, "ragged": ragged}


def register_backend(name: str, backend: Backend) -> None:
    """Adds an expert backend of your own to BACKENDS, or replaces it: `LLM(model, experts=name)` then computes by it.

    `backend(x, topk_ids, topk_weights, experts) -> [n D]`, where `experts` are gate, up and down. Raises BadRequest for a name
    that the library has, and for a value that cannot be called."""
    if not callable(backend):
        raise BadRequest(
            f"the backend {name} is {shown(backend)}", "expected a function such as mla_jax.model.moe.dense"
        )
    OWN_EXPERTS.add(name)
    BACKENDS[name] = backend


UNPACKED = 1 << 30  # bytes of one stack of packed experts, beyond which they are unpacked one by one


def pick_backend(platform: str, pairs: int, experts: int, unpacked: int = 0, kernel: bool = False) -> str:
    """The backend for `pairs` (token, expert) pairs; packed experts take `unpacked` bytes a stack once all are unpacked.

    `kernel`: there is one for grouped matmuls, which unpacks in registers what "gather" unpacks in memory. Without, on an H200
    with V2-Lite's 64 experts of which 6 are chosen, us a layer for 1, 8, 64, 1024 tokens: gather 58, 254, -, -; dense 274, 287,
    327, 1844; ragged 501, 913, 1244, 9477 (XLA has no grouped matmul for GPUs: it multiplies everything and masks)."""
    if platform == "cpu":
        return "loop"
    if kernel:
        return "gather" if 8 * pairs <= experts and not unpacked else "ragged"
    if 5 * pairs <= 4 * experts:
        return "gather"
    return "loop" if unpacked > UNPACKED else "dense" if platform == "gpu" else "ragged"


class ExpertPlan(NamedTuple):
    """How one step computes its routed experts. The fields after the first are for experts that the CPU holds:
    `defer` of each token's experts are added one layer later (SOSP'25, KTransformers); `streamed` is the backend when the step
    copies the weights to the device, None when it does not; `replicated` is the backend of the replicas, None: `backend`. On a
    mesh tokens go to their experts by `exchange`."""

    backend: Backend
    defer: int = 0
    streamed: Backend | None = None
    replicated: Backend | None = None
    exchange: Exchange = gather_tokens


@runtime_checkable
class Deferred(Protocol):
    """Experts whose sum is still to be added."""

    def collect(self, after: Array) -> Float[Array, "n D"]:
        """The sum, waited for once `after` is computed."""
        ...


class Experts(nnx.Module):
    """The routed experts' weights, stacked, on the device. Modules that compute experts elsewhere have the same two methods."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.gate = parameter(config, rngs, "experts", "expert_mlp", "model", role="expert")
        self.up = parameter(config, rngs, "experts", "expert_mlp", "model", role="expert")
        self.down = parameter(config, rngs, "experts", "model", "expert_mlp", role="expert")

    def __call__(
        self,
        x: Float[Array, "n D"],
        topk_ids: Int[Array, "n K"],
        topk_weights: Float[Array, "n K"],
        plan: ExpertPlan,
        concurrent: Callable[[Array], Array],
    ) -> tuple[Array, Array, Deferred | None]:
        """The chosen experts' sum, the result of `concurrent(x)`, and the deferred sum of a later layer: none here."""
        weights = self.gate[...], self.up[...], self.down[...]

        def compute(x: Array, topk_ids: Array, topk_weights: Array) -> Array:
            return plan.backend(x, topk_ids, topk_weights, weights)

        return plan.exchange(x, topk_ids, topk_weights, weights[0].shape[0], compute), concurrent(x), None

    def stacks(self, dtype: jnp.dtype) -> dict[str, tuple[Any, ...]]:
        """gate and down as the backends get them in a model of `dtype`, or their shapes, by where they are."""
        return {"device": (self.gate.get_value(), self.down.get_value())}


class Delayed(NamedTuple):
    """The whole sum of a layer's experts, which the next layer adds."""

    sum: Float[Array, "n D"]

    def collect(self, after: Array) -> Float[Array, "n D"]:
        return self.sum


def settle(x: Float[Array, "B T D"], pending: Deferred | None) -> Float[Array, "B T D"]:
    """`x` and what an earlier layer has left to be added, which is waited for only once `x` is computed."""
    return x if pending is None else x + pending.collect(after=x).reshape(x.shape)


class Places(nnx.Variable):
    """`[X + 1, R]`: the slots of each expert in the stacks, where devices of a mesh have copies of some, and the slot of none."""


def slots_of(topk_ids: Int[Array, "n K"], places: Int[Array, "X1 R"]) -> Int[Array, "n K"]:
    """Of the copies of each expert the one whose turn it is: tokens take turns."""
    turn = jnp.arange(topk_ids.shape[0]) % places.shape[1]
    return places[topk_ids, turn[:, None]]


class MoE(nnx.Module):
    """Routed experts plus the shared ones or a dense MLP, which see every token unweighted.

    Experts without weights give back what they get. Beside a dense MLP the routed experts' sum is for the next layer to add
    (LongCat-Flash, arXiv 2509.01322)."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.router = Router(config, rngs)
        self.places: Places | None = nnx.data(None)
        self.experts: Any = Experts(config, rngs)
        self.shared = MLP(config, rngs, "shared_mlp") if config.n_shared_experts else None
        self.dense = MLP(config, rngs) if config.shortcut_moe else None

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"], plan: ExpertPlan
    ) -> tuple[Array, Int[Array, " X"], Any]:
        """The layer's output `[B T D]`, the number of unmasked tokens of each expert, and the deferred sum for a later layer.

        Masked tokens cost no expert."""
        flat = x.reshape(-1, x.shape[-1])
        n_experts = self.router.config.n_routed_experts or 0
        topk_ids, topk_weights = self.router(flat, mask.reshape(-1))
        has_zeros = self.router.config.zero_expert_num > 0
        if has_zeros:
            is_zero = (topk_ids >= n_experts) & mask.reshape(-1, 1)
            zero_weight = jnp.where(is_zero, topk_weights, 0).sum(-1, keepdims=True).astype(x.dtype)
            topk_ids = jnp.minimum(topk_ids, n_experts)
        every = self.shared if self.dense is None else self.dense

        def on_every_token(flat: Array) -> Array:
            return every(flat.reshape(x.shape)) if every is not None else jnp.zeros_like(x)

        slots = topk_ids if self.places is None else slots_of(topk_ids, self.places[...])
        y, beside, pending = self.experts(flat, slots, topk_weights, plan, on_every_token)
        load = jnp.bincount(topk_ids.reshape(-1), length=n_experts + 1)[:-1]
        if has_zeros:
            y += zero_weight * flat
        if self.dense is not None:
            return beside, load, Delayed(y)
        return y.reshape(x.shape) + beside, load, pending

    def routing(self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> dict[str, Array]:
        """The experts `[B T K]` that each token goes to, and their weights, as `__call__` chooses them."""
        chosen = self.router(x.reshape(-1, x.shape[-1]), mask.reshape(-1))
        ids, weights = (each.reshape(*mask.shape, -1) for each in chosen)
        return {"experts": ids, "expert_weights": weights}


class MLP(nnx.Module):
    """A gated feed-forward layer of the width that `axis` names."""

    def __init__(self, config: Config, rngs: nnx.Rngs, axis: str = "mlp"):
        self.width = axes.axis_size(config, axis)
        self.gate = parameter(config, rngs, axis, "model")
        self.up = parameter(config, rngs, axis, "model")
        self.down = parameter(config, rngs, "model", axis)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden = jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...])
        return contracted(hidden, self.down[...], self.width)
