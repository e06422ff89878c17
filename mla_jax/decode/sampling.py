"""Choosing a token: penalties and filters as logits -> logits, and a draw that depends on seed and position alone.

Every filter leaves at least the likeliest token. All of it runs inside jit, one setting a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

PROMPT, OUTPUT = 1 << 15, (1 << 15) - 1  # a bit of `seen` says that a token is in the prompt; the others count it in the output


Given = jax.Array | np.ndarray  # what requests bring is made on the host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """SamplingParams of a batch as arrays, one entry a row."""

    temperature: Float[Given, " B"]
    top_k: Int[Given, " B"]
    top_p: Float[Given, " B"]
    min_p: Float[Given, " B"]
    presence_penalty: Float[Given, " B"]
    frequency_penalty: Float[Given, " B"]
    repetition_penalty: Float[Given, " B"]
    seed: UInt32[Given, "B 2"]  # high and low half
    bias_ids: Int[Given, "B J"]  # tokens whose logits are changed, -1 for none
    bias: Float[Given, "B J"]

    @property
    def penalises(self) -> Bool[Array, " B"]:
        """The rows whose logits are changed before a token is chosen."""
        penalised = (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)
        return penalised | (self.bias_ids >= 0).any(1)


Logits = Float[Array, "B W"]


def penalise(logits: Logits, seen: UInt16[Array, "B W"], sampling: Sampling) -> Logits:
    """Repetition penalty over prompt and output, presence and frequency penalty over the output; then the logit bias."""
    repetition = sampling.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    count = (seen & OUTPUT).astype(jnp.float32)
    logits -= jnp.where(count > 0, sampling.presence_penalty[:, None], 0.0) + sampling.frequency_penalty[:, None] * count
    rows, words = jnp.arange(logits.shape[0])[:, None], logits.shape[1]
    ids = jnp.where(sampling.bias_ids < 0, words, sampling.bias_ids)  # -1 would be the last token
    return logits.at[rows, ids].add(sampling.bias, mode="drop")


def keep_likely(logits: Logits, sampling: Sampling) -> Logits:
    """top-k, then top-p, then min-p on logits already divided by the temperature; what falls out becomes -inf.

    Tokens as likely as the last one kept are kept too."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    words = logits.shape[-1]
    k = jnp.where(sampling.top_k == 0, words, jnp.clip(sampling.top_k, 1, words))
    ordered = jnp.where(jnp.arange(words) < k[:, None], ordered, -jnp.inf)
    likely = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(likely, axis=-1) - likely  # what the likelier ones add up to
    top_p = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)[:, None]  # a rounded sum may pass 1 before its last terms
    kept = (before < top_p) & (likely >= sampling.min_p[:, None] * likely[:, :1]) & jnp.isfinite(ordered)
    last = jnp.maximum(kept.sum(-1, keepdims=True) - 1, 0)
    return jnp.where(logits >= jnp.take_along_axis(ordered, last, axis=-1), logits, -jnp.inf)


def draw(logits: Logits, position: Int[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """One token a row by the Gumbel trick, from a key made of the row's seed and the token's position."""

    def noise(seed: Array, at: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), at), logits.shape[-1:])

    return jnp.argmax(logits + jax.vmap(noise)(jnp.asarray(sampling.seed), position), axis=-1)


def choose(
    logits: Logits, seen: UInt16[Array, "H W"], rows: Int[Array, " B"], position: Int[Array, " B"], sampling: Sampling
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """The token of each row, and whether its logits were fit to choose from (no NaN, no +inf, not all -inf).

    `seen[rows]` are the batch's. Costly parts run only when some row of the batch asks for them."""
    fit = ~(jnp.isnan(logits) | jnp.isposinf(logits)).any(-1) & jnp.isfinite(logits).any(-1)
    logits = jnp.where(fit[:, None], logits, 0.0)
    penalised = sampling.penalises
    cold = sampling.temperature < 1e-5  # smaller ones are greedy in effect
    filtered = ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)) & ~cold

    def plain() -> Array:
        return jnp.argmax(logits, axis=-1)

    def with_penalties(logits: Array) -> Array:
        return penalise(logits, seen.at[rows].get(mode="clip"), sampling)

    def as_asked() -> Array:
        likely = jax.lax.cond(penalised.any(), with_penalties, lambda logits: logits, logits)
        greedy = jnp.argmax(likely, axis=-1)
        return jax.lax.cond(cold.all(), lambda: greedy, lambda: sampled(likely, greedy))

    def sampled(likely: Logits, greedy: Array) -> Array:
        below_top = likely - likely.max(axis=-1, keepdims=True)  # so that a small temperature cannot overflow to +inf
        warm = below_top / jnp.where(cold, 1.0, sampling.temperature)[:, None]
        warm = jax.lax.cond(filtered.any(), keep_likely, lambda logits, _: logits, warm, sampling)
        return jnp.where(cold, greedy, draw(warm, position, sampling))

    # one choice where nothing is asked for: a GPU's program waits for the host at each
    return jax.lax.cond(cold.all() & ~penalised.any(), plain, as_asked).astype(jnp.int32), fit
