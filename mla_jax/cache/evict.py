"""Eviction of tokens from a row's cache: a policy scores the cached tokens, a rule gives each layer or head its count to keep.

Scores come block by block, from a layer's attention over a block of slots. `kept` chooses by the scores of all layers,
`new_slots` compacts the tokens that stay. Nothing is known here of pages, models or the engine; positions stay unchanged.

Where heads are cached, each keeps tokens of its own, as published. Latents serve all heads of a layer at once, so a token goes
for all of them or for none: there `shared` makes one score of the heads' scores, and Ada-KV shares out over layers what it
shares out over heads as published. The mean is the right one: the change of a layer's output is at most a constant less the
weights kept, summed over the heads (Ada-KV, theorem 3.1).

H is the number of heads where each head has a choice of its own, else 1. Scores have M = H, or 2 H where a policy has two
stages."""

import dataclasses
import functools
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base import radix

LEAST = float(np.finfo(np.float32).min)  # the score of a token without a finite one; -inf is for empty slots


class Seen(NamedTuple):
    """A policy's view of one layer's attention over a block of S slots. Of slots past a row's tokens, only `weights` are read as
    they are, and must be 0."""

    # Of each row's last W queries, after softmax over all slots; 0 for what a query may not see
    weights: Float[Array, "B W N S"]
    keys: Float[Array, "B S K D"]  # K heads; K = 1 for latents, joined to [c_kv, k_pe]
    anchor: Float[Array, "B K D"] | None  # the mean, over what a row holds, of keys divided by their norms
    worth: Float[Array, "B S N"] | None  # L1 norm of each head's value times W_o
    slot: Int[Array, " S"]  # their numbers in the row
    held: Int[Array, "B #H"]  # tokens of each row, or of each of its heads


@dataclasses.dataclass(frozen=True)
class EvictionPolicy:
    """Scores the tokens of a layer; those with high scores stay."""

    window: ClassVar[int] = 0  # queries it looks at: the newest W
    needs_anchor: ClassVar[bool] = False
    needs_worth: ClassVar[bool] = False
    stages: ClassVar[int] = 1
    first: ClassVar[float | None] = None  # of what is kept, the share that the first of two stages chooses

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        """Scores that do not depend on how slots are cut into blocks; M = 1 if they are the same for all heads."""
        raise NotImplementedError

    def finished(self, scores: Float[Array, "B M S"], held: Int[Array, "B #H"]) -> Float[Array, "B M S"]:
        """The final scores, from those of all slots."""
        return scores


@dataclasses.dataclass(frozen=True)
class Streaming(EvictionPolicy):
    """StreamingLLM: the newest stay (and the first, which `kept` keeps for every policy)."""

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        return _same(seen.slot.astype(jnp.float32), seen)


@dataclasses.dataclass(frozen=True)
class Random(EvictionPolicy):
    """A hash of seed and slot: the same tokens in all rows and layers. What any other policy has to beat."""

    seed: int = 0

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        mixed = seen.slot.astype(jnp.uint32) ^ np.uint32(self.seed * 0x9E3779B1 & 0xFFFFFFFF)
        # Wellons' lowbias32, less a step that only low bits see
        mixed = (mixed ^ mixed >> 16) * np.uint32(0x7FEB352D)
        mixed = (mixed ^ mixed >> 15) * np.uint32(0x846CA68B)
        return _same((mixed >> 8).astype(jnp.float32), seen)  # 24 bits: exact


def _same(score: Float[Array, " S"], seen: Seen) -> Float[Array, "B 1 S"]:
    return jnp.broadcast_to(score, (len(seen.held), 1, score.size))


@dataclasses.dataclass(frozen=True)
class H2O(EvictionPolicy):
    """The weight a token gets from the queries that see it, on average. Of the whole prompt, if the window is as long.

    H2O itself sums, which favours the oldest tokens: they are seen most often."""

    window: int = 64

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        queries = jnp.clip(seen.held[..., None] - seen.slot, 1, seen.weights.shape[1])
        return seen.weights.sum(1) / queries


@dataclasses.dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """The weight a token and its neighbours get from the window's queries: their mean, or the largest. The window itself is left
    to `kept`.

    Published defaults are 64 and 5. A question is shorter, so most of 64 queries ask for something else; and a fact is longer, so
    its ends are lost (docs/long_contexts.md has figures)."""

    window: int = 16
    kernel: int = 9  # tokens over which scores are pooled
    pooling: Literal["mean", "max"] = "mean"

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        return seen.weights.mean(1)

    def finished(self, scores: Float[Array, "B M S"], held: Int[Array, "B #H"]) -> Float[Array, "B M S"]:
        size = scores.shape[-1]
        before = jnp.arange(size) < held[..., None] - self.window
        scores = jnp.where(before, scores, 0.0)  # zeros count, at both ends
        padded = jnp.pad(scores, ((0, 0), (0, 0), (self.kernel // 2, (self.kernel - 1) // 2)))
        neighbours = [padded[..., i : i + size] for i in range(self.kernel)]
        pooled = (
            functools.reduce(jnp.maximum, neighbours)
            if self.pooling == "max"
            else sum(neighbours) / self.kernel
        )
        return jnp.where(before, pooled, 0.0)


@dataclasses.dataclass(frozen=True)
class KVzip(EvictionPolicy):
    """KVzip (arXiv 2505.23416): the largest weight that any query of the window gives a token.

    It is for `compress(text, questions=text)`: what is needed to write the text once more is needed for whatever is asked about
    it. The window bounds how much of the text's second copy looks at the first."""

    window: int = 4096

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        return seen.weights.max(1)


@dataclasses.dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """The weight a token gets from the newest query, on average over the heads."""

    window = 1

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        return seen.weights[:, -1].mean(1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class KeyDiff(EvictionPolicy):
    """How unlike the mean key a key is: the negative cosine. No query is looked at."""

    needs_anchor = True

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        assert seen.anchor is not None
        norms = jnp.linalg.norm(seen.keys, axis=-1) * jnp.linalg.norm(seen.anchor, axis=-1)[:, None]
        dots = jnp.einsum("bskd,bkd->bsk", seen.keys, seen.anchor, precision="highest")
        return -(dots / jnp.maximum(norms, 1e-8)).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Critical(EvictionPolicy):
    """CriticalKV: another policy chooses `first` of the kept tokens; the rest goes by its score times the token's worth.

    Its scores are those of both stages, M = 2 N; until they are finished, the second half is the worth alone. The products bound
    the change of the output more tightly, once half of the weight is kept: the first stage is there to keep it."""

    of: EvictionPolicy = SnapKV()
    first: float = dataclasses.field(default=0.5, kw_only=True)

    needs_worth = True
    stages = 2

    @property
    def window(self) -> int:
        return self.of.window

    @property
    def needs_anchor(self) -> bool:
        return self.of.needs_anchor

    def of_block(self, seen: Seen) -> Float[Array, "B M S"]:
        assert seen.worth is not None
        worth = seen.worth.swapaxes(1, 2)
        return jnp.concatenate([jnp.broadcast_to(self.of.of_block(seen), worth.shape), worth], axis=1)

    def finished(self, scores: Float[Array, "B M S"], held: Int[Array, "B #H"]) -> Float[Array, "B M S"]:
        scores, worth = jnp.split(scores, 2, axis=1)
        scores = self.of.finished(scores, held)
        # 1e-4 is added so that worth decides where no query looks
        return jnp.concatenate([scores, (scores + 1e-4) * worth], axis=1)


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "streaming": Streaming(),
    "h2o": H2O(),
    "snapkv": SnapKV(),
    "tova": TOVA(),
    "keydiff": KeyDiff(),
    "random": Random(),
    "critical": Critical(),
    "kvzip": KVzip(),
}


def shared(scores: Float[Array, "B M S"], stages: int = 1) -> Float[Array, "B {stages} S"]:
    """One score for all heads (in each stage): their mean."""
    return scores.reshape(len(scores), stages, -1, scores.shape[-1]).mean(2)


class Ranked(NamedTuple):
    """The tokens of all layers and heads with their scores, of which a rule gives each its count."""

    score: Float[Array, "L B H S"]  # inf for what is forced, -inf for what is not held
    newer: Int[Array, "L B #H S"]  # of equal scores, the one with the larger number is better
    held: Int[Array, "L B #H"]
    count: Int[Array, " B"]  # tokens each is to keep on average, at least 1
    forced: int

    def best(self, count: Int[Array, "L B #H"]) -> Bool[Array, "L B H S"]:
        """As many of the best of each layer and head."""
        return highest(self.score, self.newer, count)


@dataclasses.dataclass(frozen=True)
class Budget:
    """Says how many tokens each layer (and head) keeps, given how many are kept on average."""

    def counts(self, ranked: Ranked) -> Int[Array, "L B #H"]:
        """At least as many as are forced, if the count is; they may be more than are held. Here: the same everywhere."""
        return jnp.broadcast_to(ranked.count[:, None], ranked.held.shape)


@dataclasses.dataclass(frozen=True)
class Pyramid(Budget):
    """PyramidKV: many in the first layer, few in the last, evenly fewer in between; if the last has too few, all have the same.

    A layer's surplus over the count equals the deficit of the layer at the other end, rounded alike: the sum is exact."""

    beta: int = 20  # the count, as a multiple of what the last layer keeps

    def counts(self, ranked: Ranked) -> Int[Array, "L B #H"]:
        layers, count, beta = len(ranked.score), ranked.count, self.beta
        # The most that the first layer may have above the count
        spare = ranked.held.max((0, 2)) - ranked.forced - count
        above = jnp.minimum(count * (beta - 1), spare * beta)  # what it has above the count, times beta
        fits = (above >= 0) & (above <= (count - ranked.forced) * beta)
        step = np.arange(layers - 1, -layers, -2)[:, None]
        steps = beta * max(layers - 1, 1)
        # The product fits int32 for a million tokens
        apart = np.sign(step) * ((np.abs(step) * above + steps // 2) // steps)
        return (count + jnp.where(fits, apart, 0))[..., None]


@dataclasses.dataclass(frozen=True)
class Ada(Budget):
    """Ada-KV: the best tokens of all heads of a layer, or if heads share tokens, of all layers, say how many each one keeps.

    The count is `safeguard` times the number among the best, and the rest of 1 times the average (the paper's alpha). With a
    safeguard of 1 no other way to keep as many has a larger sum of scores."""

    safeguard: float = 0.5

    def counts(self, ranked: Ranked) -> Int[Array, "L B #H"]:
        return self.within(ranked, jnp.broadcast_to(ranked.count, ranked.score.shape[:2]))

    def within(self, ranked: Ranked, count: Int[Array, "L B"]) -> Int[Array, "L B H"]:
        """The counts where the heads of a layer keep `count` tokens on average."""
        best = among_best(ranked.score, ranked.newer, count)
        axis = 0 if best.shape[2] == 1 else 2
        fits = (best >= ranked.held).all(axis, keepdims=True)  # all that is held
        return jnp.where(fits, best, safeguarded(best, count[..., None], self.safeguard, axis))


@dataclasses.dataclass(frozen=True)
class AdaFloor(Budget):
    """Ada-KV with kvpress's safeguard: the share `floor` of each one's count is for its own best tokens, the rest for the best of
    all."""

    floor: float = 0.2

    def counts(self, ranked: Ranked) -> Int[Array, "L B #H"]:
        floors = jnp.minimum(_share(ranked.count, self.floor)[:, None], ranked.held)
        score = jnp.where(ranked.best(floors), jnp.inf, ranked.score)
        return among_best(score, ranked.newer, jnp.broadcast_to(ranked.count, score.shape[:2]))


@dataclasses.dataclass(frozen=True)
class AdaPyramid(Budget):
    """A pyramid over layers, and Ada-KV over the heads of each; where heads share tokens, the pyramid alone."""

    layers: Pyramid = Pyramid()
    heads: Ada = Ada()

    def counts(self, ranked: Ranked) -> Int[Array, "L B #H"]:
        of_layers = self.layers.counts(ranked)
        return of_layers if ranked.score.shape[2] == 1 else self.heads.within(ranked, of_layers[..., 0])


def among_best(
    score: Float[Array, "L B H S"], newer: Int[Array, "L B #H S"], count: Int[Array, "L B"]
) -> Int[Array, "L B H"]:
    """How many of the best tokens each head has: of the `H count` best of its layer, or for H = 1 of the best of all layers."""
    total, newer = count * score.shape[2], jnp.broadcast_to(newer, score.shape)
    over_layers = score.shape[2] == 1
    if over_layers:
        score, newer, total = score.swapaxes(0, 2), newer.swapaxes(0, 2), total.sum(0, keepdims=True)
    flat = *score.shape[:2], -1
    taken = highest(score.reshape(flat), newer.reshape(flat), total).reshape(score.shape)
    counts = taken.sum(-1, dtype=jnp.int32)
    return counts.swapaxes(0, 2) if over_layers else counts


def safeguarded(
    best: Int[Array, "L B H"], count: Int[Array, "L B 1"], share: float, axis: int
) -> Int[Array, "L B H"]:
    """`share` of `best` and the rest of 1 of `count`, rounded so that the sum over `axis` is the sum of `best`."""
    hundredths = round(100 * share)
    whole, rest = jnp.divmod(hundredths * best + (100 - hundredths) * count, 100)
    carried = (rest.cumsum(axis) + 50) // 100
    return (whole + jnp.diff(carried, axis=axis, prepend=0)).astype(jnp.int32)


BUDGET_RULES: dict[str, Budget] = {
    "uniform": Budget(),
    "pyramid": Pyramid(),
    "ada": Ada(),
    "ada_floor": AdaFloor(),
    "ada_pyramid": AdaPyramid(),
}


def kept(
    scores: Float[Array, "L B M S"],
    held: Int[Array, "L B #H"],
    count: Int[Array, " B"],
    rule: Budget,
    *,
    sinks: int,
    window: int,
    first: float | None = None,
) -> Bool[Array, "L B H S"]:
    """The tokens that stay: `count` of a row for each layer (and head) on average, or all if fewer are held.

    The first `sinks` tokens and the newest `window` are among them whatever their scores; if that is more than the count, the
    newest go first, then the sinks from slot 0 on. A count of 0 is the newest token. Scores that are not finite are lowest. Of
    equal ones the newer token stays, then the one of the earlier layer or head. `first` is the policy's, if it has two stages."""
    stages = jnp.split(scores, 1 if first is None else 2, axis=2)
    slot = jnp.arange(scores.shape[-1])
    end = held[..., None]
    recent = slot >= end - jnp.maximum(window, count < 1)[:, None, None]
    forced = recent | (slot < sinks)
    newer = jnp.where(forced & ~recent, -1 - slot - slot.size, slot - end)  # sinks come after any window
    count = jnp.maximum(count, 1)

    def ordered(score: Array, sure: Array) -> Array:
        score = jnp.where(sure, jnp.inf, jnp.where(jnp.isfinite(score), score, LEAST))
        return jnp.where(slot < end, score, -jnp.inf)

    score = ordered(stages[0], forced)
    ranked = Ranked(score, newer, held, count, sinks + window)
    counts = rule.counts(ranked)
    if first is not None:
        score = ordered(stages[1], forced | ranked.best(_share(counts, first)))
    return highest(score, newer, counts) & (slot < end)


def highest(
    score: Float[Array, "*H S"], newer: Int[Array, "*J S"], count: Int[Array, "*K"]
) -> Bool[Array, "*H S"]:
    """The `count` highest, of equal ones those with a larger number in `newer`, then the first."""
    size = score.shape[-1]
    older = ~jax.lax.bitcast_convert_type(newer, jnp.uint32) ^ np.uint32(1 << 31)
    rows = (
        radix.descending(score).reshape(-1, size),
        jnp.broadcast_to(count, score.shape[:-1]).ravel(),
        jnp.broadcast_to(older, score.shape).reshape(-1, size),
    )
    return radix.first(*rows).reshape(score.shape)


def _share(count: Int[Array, "*H"], part: float) -> Int[Array, "*H"]:
    """A part of a count, in hundredths and rounded down, but at least 1 if there are any. In integers halves are exact."""
    hundredths = round(100 * part)
    return jnp.maximum(count * hundredths // 100, min(hundredths, 1))


def new_slots(kept: Bool[Array, "*H S"]) -> tuple[Int[Array, "*H S"], Int[Array, "*H"]]:
    """For each new slot the old slot of its token, in the same order, and the number of tokens. The dropped slots follow."""
    count = kept.sum(-1, dtype=jnp.int32)
    before = jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - kept
    old = jnp.broadcast_to(jnp.arange(kept.shape[-1], dtype=jnp.int32), kept.shape)
    new = jnp.where(kept, before, count[..., None] + old - before)
    return jnp.put_along_axis(jnp.zeros_like(old), new, old, axis=-1, inplace=False), count
