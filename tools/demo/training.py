"""A training step: the package's Transformer without a cache, AdamW or Muon, and load balancing of the experts.

Weights are stored in float32 and multiplied in bfloat16."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from demo.recipe import Recipe
from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch
from mla_jax.model import rope
from mla_jax.model.block_attention import StepCache, prepare
from mla_jax.model.dispatch import Dispatch, StepPlan
from mla_jax.model.mla import Form, heads
from mla_jax.model.moe import BACKENDS, ExpertPlan

Values = dict[str, jax.Array]


def fused(q: tuple, held: StepCache, up: tuple, scale: float) -> Float[Array, "B T N V"]:
    """`naive` for full rows from position 0, by cuDNN on a GPU: scores are not written to memory."""
    joined, k, v = jnp.concatenate(q, -1), held.new["k"], held.new["v"]
    padded = jnp.pad(v, [(0, 0)] * 3 + [(0, joined.shape[-1] - v.shape[-1])])  # cuDNN takes equal widths only
    on_gpu = jax.default_backend() == "gpu" and joined.dtype == jnp.bfloat16
    implementation = "cudnn" if on_gpu else "xla"
    out = jax.nn.dot_product_attention(
        joined, k, padded, scale=scale, is_causal=True, implementation=implementation
    )
    return out[..., : v.shape[-1]]


class InTraining(Dispatch):
    """A dispatch with attention of its own and with all experts on all tokens."""

    def step(self, model: Transformer, batch: Batch, pool: Any) -> StepPlan:
        turns = rope.turns(batch.positions, model.config)
        return StepPlan(
            Form(heads, fused), prepare(batch, pool, model.config, 0), turns, ExpertPlan(BACKENDS["dense"])
        )


class Trained(NamedTuple):
    """The state of a run. `bias` holds the routers' biases, which balance the experts and are not learnt by gradients."""

    values: Values
    bias: Values
    optimizer: Any
    step: Int[Array, ""]


class Model:
    """A Transformer as a function of its weights."""

    def __init__(self, config: Config):
        self.config = config
        build = lambda: Transformer(config, nnx.Rngs(0), dispatch=InTraining(), mtp=True)  # noqa: E731
        self.graph, self.state = nnx.split(nnx.eval_shape(build))

    def init(self, seed: int) -> tuple[Values, Values]:
        """Random weights, and the routers' biases."""
        model = Transformer(self.config, nnx.Rngs(seed), mtp=True)
        flat = {".".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(nnx.split(model)[1])}
        bias = {path: value for path, value in flat.items() if path.endswith("router.bias")}
        return {p: v for p, v in flat.items() if p not in bias}, {
            p: jnp.zeros_like(v) for p, v in bias.items()
        }

    def __call__(self, values: Values) -> Transformer:
        """The module around `values`."""
        flat = [
            (path, slot.replace(values[".".join(map(str, path))]))
            for path, slot in nnx.to_flat_state(self.state)
        ]
        return nnx.merge(self.graph, nnx.from_flat_state(flat))


def optimizer(recipe: Recipe, values: Values) -> optax.GradientTransformation:
    warm = min(200, recipe.steps // 10)
    rate = optax.warmup_constant_schedule(0.0, recipe.learning_rate, warm)
    rate = optax.join_schedules(
        [rate, optax.linear_schedule(recipe.learning_rate, 0.0, recipe.steps - warm)], [warm]
    )
    if recipe.optimizer == "adamw":
        update = optax.adamw(rate, 0.9, 0.95, weight_decay=recipe.weight_decay, mask=_decays)
    else:
        update = optax.contrib.muon(
            rate,
            weight_decay=recipe.weight_decay,
            adam_weight_decay=recipe.weight_decay,
            weight_decay_mask=_decays,
            adam_b2=0.95,
            muon_weight_dimension_numbers=_matrices(values),
            consistent_rms=0.2,  # so that Adam's learning rates are valid (Moonlight, arXiv 2502.16982)
        )
    return optax.chain(optax.clip_by_global_norm(1.0), update)


def is_linear(path: str) -> bool:
    """Whether a parameter is the weight of a linear layer between hidden states."""
    return not any(word in path for word in ("norm", "embed", "head"))


def _decays(values: Values) -> dict[str, bool]:
    return {path: "norm" not in path for path in values}


def _matrices(values: Values) -> dict[str, Any]:
    """The output and input axes of the weights that Muon updates; None: Adam updates it."""

    def axes(path: str, rank: int):
        if not is_linear(path):
            return None
        if "experts" in path:
            return optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
        return optax.contrib.MuonDimensionNumbers((rank - 1,), tuple(range(rank - 1)))

    return {path: axes(path, value.ndim) for path, value in values.items()}


def dropped(values: Values, key: Array, recipe: Recipe) -> Values:
    """The weights in bfloat16 with random elements dropped, against memorising a small corpus in many passes.

    Dropping full rows of the embedding would give zero states, whose norms have unbounded gradients."""

    def one(path: str, value: Array, key: Array) -> Array:
        if (is_linear(path) and "router" not in path) or path == "embed":
            value = jnp.where(
                jax.random.bernoulli(key, 1 - recipe.drop, value.shape), value / (1 - recipe.drop), 0
            )
        return value.astype(jnp.bfloat16)

    keys = jax.random.split(key, len(values))
    return {path: one(path, value, key) for (path, value), key in zip(values.items(), keys, strict=True)}


class Losses(NamedTuple):
    main: Float[Array, ""]
    mtp: Float[Array, ""]
    acceptance: Float[Array, ""]  # share of tokens for which MTP's best token is the main model's
    load: dict[str, Array]  # tokens of each expert, by router


def losses(model: Transformer, tokens: Int[Array, "B t"], weight: Float[Array, "B t"]) -> Losses:
    """Weighted cross entropies of the next token and of MTP's, two tokens shorter than `tokens`.

    A token of negative weight should not be generated (unlikelihood, arXiv 1908.04319). MTP learns half from the text and half
    from the main model's distribution, which it has to predict."""
    batch = Batch.dense(tokens.shape[0], tokens.shape[1] - 2)
    hidden, _, aux = model(tokens[:, :-2], batch, collect=True)
    drafted, _, ahead = model.draft(0, tokens[:, 1:-1], hidden, batch, collect=True)
    logits, guess = model.unembed(hidden), model.unembed(drafted)
    main = _mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:-1]), weight[:, 1:-1])
    weight = jnp.maximum(weight, 0)
    after, guess = jax.lax.stop_gradient(logits[:, 1:]), guess[:, :-1]
    said = optax.softmax_cross_entropy_with_integer_labels(guess, tokens[:, 2:-1])
    meant = optax.softmax_cross_entropy(guess, jax.nn.softmax(after))
    agrees = jnp.argmax(guess, -1) == jnp.argmax(after, -1)
    moe = [i for i, block in enumerate(model.layers) if hasattr(block.mlp, "router")]
    load = {f"layers.{i}.mlp.router.bias": n for i, n in zip(moe, aux["load"], strict=True)}
    load |= {"mtp.0.block.mlp.router.bias": ahead["load"][0]}
    return Losses(main, _mean((said + meant) / 2, weight[:, 2:-1]), jnp.mean(agrees), load)


def _mean(loss: Array, weight: Array) -> Array:
    """The weighted mean of `loss` = -log p, or of -log(1 - p) where the weight is negative."""
    unlikely = -jnp.log(jnp.maximum(-jnp.expm1(-loss), 1e-4))
    size = jnp.abs(weight)
    return jnp.sum(jnp.where(weight < 0, unlikely, loss) * size) / jnp.maximum(jnp.sum(size), 1)


def start(recipe: Recipe) -> Trained:
    values, bias = Model(recipe.config(False)).init(recipe.seed)
    return Trained(values, bias, optimizer(recipe, values).init(values), jnp.zeros((), jnp.int32))


def step_of(recipe: Recipe, config: Config):
    """The jitted step `(trained, tokens, weight) -> (trained, figures)` of one phase."""
    build = Model(config)

    def loss(values: Values, bias: Values, key: Array, tokens: Array, weight: Array):
        found = losses(build(dropped(values, key, recipe) | bias), tokens, weight)
        return found.main + recipe.mtp_weight * found.mtp, found

    def step(trained: Trained, tokens: Int[Array, "B t"], weight: Float[Array, "B t"]):
        key = jax.random.fold_in(jax.random.key(recipe.seed), trained.step)
        gradient, found = jax.grad(loss, has_aux=True)(trained.values, trained.bias, key, tokens, weight)
        update = optimizer(recipe, trained.values)
        change, state = update.update(gradient, trained.optimizer, trained.values)
        push = recipe.bias_step * (1 - trained.step / recipe.steps)
        # DeepSeek-V3's balancing without an auxiliary loss: raises the bias of experts with too few tokens
        bias = {
            path: value + push * jnp.sign(jnp.mean(found.load[path]) - found.load[path])
            for path, value in trained.bias.items()
        }
        least = jnp.min(jnp.stack([jnp.min(n) / jnp.mean(n) for n in found.load.values()]))
        figures = {"loss": found.main, "mtp": found.mtp, "acceptance": found.acceptance, "least_load": least}
        values = cast(Values, optax.apply_updates(cast(Any, trained.values), change))
        return Trained(values, bias, state, trained.step + 1), figures

    return jax.jit(step, donate_argnums=0)
