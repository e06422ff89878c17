"""Choosing a token: penalties, filters (top-k, then top-p, then min-p), and a draw that depends on seed and position alone.

Every filter keeps at least the likeliest token, and with a token all that are as likely. It runs inside jit, one setting a row.
Logits are "warm" once the largest is subtracted and they are divided by the temperature.

Nothing is sorted: a GPU takes long to sort a vocabulary. What the filters keep is all tokens from some logit upwards. So a token
is drawn from the whole vocabulary, and as long as it is not kept, another one from the tokens likelier than it. A draw takes the
largest sum of logit and noise, and the noise stays: the first token that is kept has the largest sum of all that are kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from mla_jax.base import radix

# A bit of `seen` says that a token is in the prompt; the others count it in the output
PROMPT, OUTPUT = 1 << 15, (1 << 15) - 1


Given = jax.Array | np.ndarray  # what requests bring is made on the host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """SamplingParams of a batch as arrays, one entry a row; with data shards in front where several are sent theirs."""

    temperature: Float[Given, "*D B"]
    top_k: Int[Given, "*D B"]
    top_p: Float[Given, "*D B"]
    min_p: Float[Given, "*D B"]
    presence_penalty: Float[Given, "*D B"]
    frequency_penalty: Float[Given, "*D B"]
    repetition_penalty: Float[Given, "*D B"]
    seed: UInt32[Given, "*D B 2"]  # high and low half
    bias_ids: Int[Given, "*D B J"]  # tokens whose logits are changed, -1 for none
    bias: Float[Given, "*D B J"]
    ends: Int[Given, "*D B M"]  # tokens that end the output, -1 for none
    may_end: Int[Given, "*D B"]  # the first position where one of them may stand

    def penalises(self, position: Int[Array, " B"]) -> Bool[Array, " B"]:
        """The rows whose logits are changed before a token is chosen."""
        penalised = (
            (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)
        )
        return penalised | (self.bias_ids >= 0).any(1) | (position < self.may_end)

    @property
    def cold(self) -> Bool[Array, " B"]:
        """The rows that take the likeliest token."""
        return jnp.asarray(self.temperature) < 1e-5  # smaller ones are greedy in effect

    @property
    def renormalises(self) -> Bool[Array, " B"]:
        """The rows whose top-p is a share of what top-k leaves, not of the whole vocabulary."""
        return ~self.cold & (self.top_k > 0) & (self.top_p < 1)


Logits = Float[Array, "B W"]


def penalise(
    logits: Logits, seen: UInt16[Array, "B W"], position: Int[Array, " B"], sampling: Sampling
) -> Logits:
    """Repetition penalty over prompt and output, presence and frequency penalty over the output; then the logit bias, and no end
    token where none may stand."""
    repetition = sampling.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    count = (seen & OUTPUT).astype(jnp.float32)
    logits -= (
        jnp.where(count > 0, sampling.presence_penalty[:, None], 0.0)
        + sampling.frequency_penalty[:, None] * count
    )
    rows = jnp.arange(logits.shape[0])[:, None]
    nothing = logits.shape[1]  # -1 would be the last token
    ids = jnp.where(sampling.bias_ids < 0, nothing, sampling.bias_ids)
    logits = logits.at[rows, ids].add(sampling.bias, mode="drop")
    is_early = (position < sampling.may_end)[:, None]
    ends = jnp.where(is_early & (sampling.ends >= 0), sampling.ends, nothing)
    return logits.at[rows, ends].set(-jnp.inf, mode="drop")


def is_kept(
    warm: Logits, border: Float[Array, " B"], token: Int[Array, " B"], sampling: Sampling
) -> Bool[Array, " B"]:
    """Whether top-k, and then top-p, keep this token of each row. `border` is from `after_top_k`.

    They do if the likelier tokens are fewer than k, and add up to less than p times what the k likeliest add up to. Both sums are
    rounded: where they differ by less than 2e-6 of them, the token may be kept or not."""
    likelier = warm > logit_of(token, warm)
    weight, least = jnp.exp(warm), jnp.exp(border)
    # A weight of the k likeliest is `least` and this; any others that equal `least` have 0 here
    more = jnp.maximum(weight - least[:, None], 0.0)
    count = likelier.sum(-1, dtype=jnp.int32)
    before = jnp.where(likelier, weight, 0.0).sum(-1)
    total = more.sum(-1) + sampling.top_k * least
    in_top_k = (count < sampling.top_k) | (sampling.top_k == 0)
    in_top_p = (before < sampling.top_p * total) | (sampling.top_p >= 1)
    return (in_top_k & in_top_p) | (count == 0)


def after_top_k(warm: Logits, sampling: Sampling) -> Float[Array, " B"]:
    """A number than which at most k logits are larger, and at least k not smaller; -inf for rows whose top-p does not need it.

    It is found by its bits, by counting larger logits."""
    # No logit is above 0, and below 0 a smaller number has larger bits
    bits = jax.lax.bitcast_convert_type(warm, jnp.uint32)
    k = sampling.top_k
    needed = sampling.renormalises & (k < warm.shape[1])

    found = radix.border(bits, jnp.asarray(k), needed)
    return jnp.where(needed, jax.lax.bitcast_convert_type(found, jnp.float32), -jnp.inf)


def logit_of(token: Int[Array, " B"], logits: Logits) -> Float[Array, "B 1"]:
    return jnp.take_along_axis(logits, token[:, None], axis=1)


def draw(
    warm: Logits,
    border: Float[Array, " B"],
    likeliest: Int[Array, " B"],
    position: Int[Array, " B"],
    sampling: Sampling,
) -> Int[Array, " B"]:
    """One token a row by the Gumbel trick, from a key made of the row's seed and the token's position; if cold, the likeliest."""

    def noise(seed: Array, at: Array) -> Array:
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), at), warm.shape[1:]
        )

    def draw_again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        token, done = carry
        likelier = warm > logit_of(token, warm)
        token = jnp.where(done, token, jnp.argmax(jnp.where(likelier, noisy, -jnp.inf), axis=-1))
        return token, done | is_kept(warm, border, token, sampling)

    noisy = warm + jax.vmap(noise)(jnp.asarray(sampling.seed), position)
    noisy = jnp.where(jnp.exp(warm) < sampling.min_p[:, None], -jnp.inf, noisy)
    token = jnp.where(sampling.cold, likeliest, jnp.argmax(noisy, axis=-1))
    first = token, is_kept(warm, border, token, sampling)
    return jax.lax.while_loop(lambda carry: ~carry[1].all(), draw_again, first)[0]


def choose(
    logits: Logits,
    seen: UInt16[Array, "H W"],
    rows: Int[Array, " B"],
    position: Int[Array, " B"],
    sampling: Sampling,
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """The token of each row, and whether its logits were fit to choose from (no NaN, no +inf, not all -inf).

    `seen[rows]` are the batch's. Costly parts run only when some row of the batch asks for them."""

    asks_more = (sampling.penalises(position) | sampling.renormalises).any()
    kind = jnp.where(asks_more, 2, ~sampling.cold.all())
    # The usual ones are one choice away: each costs a GPU some launches
    token, fit = jax.lax.switch(
        kind,
        [
            lambda: _greedy(logits),
            lambda: _sampled(logits, position, sampling),
            lambda: _as_asked(logits, seen.at[rows].get(mode="clip"), position, sampling),
        ],
    )
    return token.astype(jnp.int32), fit


def _greedy(logits: Logits) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    likeliest = jnp.argmax(logits, axis=-1)  # a NaN counts as the largest
    return likeliest, jnp.isfinite(logit_of(likeliest, logits))[:, 0]


def _sampled(
    logits: Logits, position: Int[Array, " B"], sampling: Sampling
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """By temperature and min-p alone."""
    likeliest, fit = _greedy(logits)
    any_number = jnp.full(position.shape, -jnp.inf)
    return draw(_warmed(logits, likeliest, sampling), any_number, likeliest, position, sampling), fit


def _as_asked(
    logits: Logits, seen: UInt16[Array, "B W"], position: Int[Array, " B"], sampling: Sampling
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """By everything that sampling offers."""
    # Not by max, which passes over NaN on a CPU
    fit = (logits < jnp.inf).all(axis=-1) & (logits > -jnp.inf).any(axis=-1)
    likely = penalise(logits, seen, position, sampling)
    likeliest = jnp.argmax(likely, axis=-1)

    def drawn() -> Array:
        warm = _warmed(likely, likeliest, sampling)
        return draw(warm, after_top_k(warm, sampling), likeliest, position, sampling)

    return jax.lax.cond(sampling.cold.all(), lambda: likeliest, drawn), fit


def _warmed(logits: Logits, likeliest: Int[Array, " B"], sampling: Sampling) -> Logits:
    """Logits over the temperature, the likeliest at 0: so a small temperature cannot overflow to +inf."""
    below = logits - logit_of(likeliest, logits)
    return below / jnp.where(sampling.cold, 1.0, sampling.temperature)[:, None]
