"""Drafts: proposed next tokens, verified in one pass with the token before them; a draft is accepted if the sampler draws it.

A pass of the loop chooses a token, has a drafter propose the next ones, runs the model over all of them at once, and accepts one
draft after the other as long as each equals the sampled token of its place. A sampled token depends on the logits, the row's
seed and the position alone, so drafts never change the output. Nothing is undone for a rejected draft: a row's length excludes
it, and later tokens overwrite it."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from mla_jax.base.batch import Batch, Table
from mla_jax.cache.paged import Pool
from mla_jax.decode import sharded_sampling
from mla_jax.decode.loop_state import (
    RunInputs,
    RunState,
    accept_token,
    accepted,
    begun,
    ended,
    forward,
    next_token,
)
from mla_jax.decode.outputs import Found
from mla_jax.decode.rows import Rows, replay_token
from mla_jax.mesh import across
from mla_jax.model.transformer import Transformer

Proposal = tuple[Pool, Int[Array, "B K"], Int[Array, " B"]]  # as `Drafter.propose` says


class Draft(NamedTuple):
    """A pass that drafts: each row's `token`, chosen just now, and its room for `counts` guesses; -1: it has not read `token`."""

    model: Transformer
    going: RunState
    asked: RunInputs
    token: Int[Array, " B"]
    counts: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Guesses tokens; `most` at a time."""

    most: int = 3

    name: ClassVar[str] = "a drafter"
    ahead: ClassVar[int] = 0  # tokens after one on which what is cached of it may depend
    needs_text: ClassVar[bool] = False  # of rows, on the device
    runs_layer: ClassVar[bool] = False  # of the model, for each guess
    hoped: ClassVar[float] = 0.5  # how often a guess stands, until that is known

    def propose(self, given: Draft) -> Proposal:
        """The pool, the guesses that follow each row's token, and how many of them each row has."""
        raise NotImplementedError

    def keep(
        self,
        model: Transformer,
        pool: Pool,
        before: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        batch: Batch,
    ) -> Pool:
        """Takes note of tokens that are read, each with the hidden state of the token before it."""
        return pool


@dataclasses.dataclass(frozen=True)
class Nobody(Drafter):
    """Guesses nothing."""

    most: int = 0

    def propose(self, given: Draft) -> Proposal:
        return given.going.pool, jnp.zeros((given.token.size, 0), jnp.int32), given.counts


NOBODY = Nobody()


@dataclasses.dataclass(frozen=True)
class Mtp(Drafter):
    """The model's own layer for multi-token prediction, which guesses from a token and the hidden state before it.

    Run on its own normed output, it guesses further. Its cache has an entry for each token but the newest, made from the token
    after and the model's own hidden state: an entry made from a guess is overwritten. An entry is in the slot of the hidden
    state's token, one before the slot of the token that it was made with."""

    name = "the model's layer for multi-token prediction"
    ahead = 1
    runs_layer = True
    hoped = 0.8

    def propose(self, given: Draft) -> Proposal:
        model, going, asked, token, counts = given
        needed = counts + (counts == 0)  # the first entry is needed also where nothing is guessed

        def guess(i: Array, carry: tuple) -> tuple:
            pool, hidden, newest, guesses = carry
            one = Batch.behind(
                going.held + i, going.position + i, (i < needed).astype(jnp.int32), 1, asked.page_table
            )
            found, pool, _ = model.draft(0, newest[:, None], hidden[:, None], _one_back(one), pool)
            hidden = found[:, 0]
            newest, _ = sharded_sampling.sample(
                sharded_sampling.row_logits(model, hidden),
                going.rows.seen,
                asked.at,
                going.position + 1 + i,
                asked.entry.sampling,
            )
            return pool, hidden, newest, guesses.at[:, i].set(newest)

        guesses = jnp.zeros((token.size, self.most), jnp.int32)
        start = going.pool, going.last, token, guesses
        with jax.named_scope("draft"):
            pool, _, _, guesses = jax.lax.fori_loop(
                0, across.maximum(jnp.maximum(needed.max(), 0)), guess, start
            )
        return pool, guesses, counts

    def keep(
        self,
        model: Transformer,
        pool: Pool,
        before: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        batch: Batch,
    ) -> Pool:
        # Only what it caches: the compiler drops the rest
        kept = model.draft(0, tokens, before, _one_back(batch), pool)[1]
        assert kept is not None
        return kept


def _one_back(batch: Batch) -> Batch:
    """The slots of the tokens before; the first token of all has none before it."""
    assert batch.index is not None
    assert batch.seq_lens is not None
    return dataclasses.replace(
        batch,
        positions=batch.positions - 1,
        index=batch.index - 1,
        seq_lens=batch.seq_lens - 1,
        mask=batch.mask & (batch.index > 0),
    )


@dataclasses.dataclass(frozen=True)
class Lookup(Drafter):
    """Prompt lookup: what followed the newest tokens where they stood before in the row's text, latest place first.

    Of places it prefers those with the longest equal beginning, up to `longest` tokens."""

    longest: int = 3

    name = "looking up what followed before"
    needs_text = True
    hoped = 0.4

    def propose(self, given: Draft) -> Proposal:
        going, asked = given.going, given.asked
        assert going.rows.text is not None, "prompt lookup needs the rows' text"
        # The position of `token`, which is in the text already
        text, position = going.rows.text.at[asked.at].get(mode="clip"), going.position
        place = jnp.arange(text.shape[1])
        equal = jnp.zeros(text.shape, jnp.int32)  # tokens up to a place that are the newest ones
        same = place < position[:, None]
        for back in range(self.longest):
            newest = jnp.take_along_axis(text, jnp.maximum(position - back, 0)[:, None], axis=1)
            there = jnp.roll(text, back, axis=1) == newest
            same = same & there & (place >= back)
            equal += same
        best = jnp.argmax(jnp.where(equal > 0, equal * text.shape[1] + place, -1), axis=1)
        found = (equal > 0).any(1)
        after = best[:, None] + 1 + jnp.arange(self.most)
        guesses = jnp.take_along_axis(text, jnp.minimum(after, text.shape[1] - 1), axis=1)
        known = jnp.where(found, position - best, 0)  # tokens from there up to the newest
        return going.pool, guesses, jnp.minimum(given.counts, known)


def stands(guess: Int[Array, " B"], drawn: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether a guess stays, where this token is drawn."""
    return guess == drawn


def run_with_drafts(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    at: Int[Array, " B"],
    page_table: Table,
    steps: Int[Array, ""],
    drafts: Int[Array, ""],
    *,
    drafter: Drafter,
) -> tuple[Pool, Rows, Found]:
    """As `loop.run`, with up to `drafts` guesses a pass. Each row gets exactly the tokens that it gets there."""
    asked, going = begun(pool, rows, at, page_table, steps)

    def one_pass(carry: tuple[RunState, Array]) -> tuple[RunState, Array]:
        going, token, more = next_token(carry[0], asked, carry[1])
        room = jnp.minimum(asked.steps - going.chosen.count, asked.entry.limit - going.is_open.count - 1)
        counts = jnp.where(more, jnp.clip(room, 0, jnp.minimum(drafts, drafter.most)), -1)
        pool, guesses, counts = drafter.propose(Draft(model, going, asked, token, counts))
        return verified(model, going._replace(pool=pool), asked, drafter, Guessed(token, guesses, counts))

    start = going, sharded_sampling.row_logits(model, going.last)
    going, _ = jax.lax.while_loop(lambda carry: carry[0].goes_on(asked), one_pass, start)
    return ended(going, asked)


class Guessed(NamedTuple):
    """A chosen token, and what may follow it."""

    token: Int[Array, " B"]
    guesses: Int[Array, "B K"]
    counts: Int[Array, " B"]  # of the guesses; -1: not even the token is read
    masks: UInt32[Array, "B K words"] | None = (
        None  # tokens that may come in the place of each guess; all without them
    )


def verified(
    model: Transformer, going: RunState, asked: RunInputs, drafter: Drafter, given: Guessed
) -> tuple[RunState, Float[Array, "b W"]]:
    """Runs the model over a token and its drafts, and accepts drafts; also returns the row shard of each last token's logits."""
    before, most = going, given.guesses.shape[1]
    tokens = jnp.concatenate([given.token[:, None], given.guesses], axis=1)
    going, hidden = forward(model, going, asked, tokens, given.counts + 1)
    logits = sharded_sampling.row_logits(model, hidden)
    going = _checked(going, asked, given, hidden, logits)
    stood = jnp.maximum(going.held - before.held - 1, 0)
    batch = Batch.behind(before.held + 1, before.position + 1, stood, most, asked.page_table)
    pool = drafter.keep(model, going.pool, hidden[:, :most], given.guesses, batch)
    last = jnp.take_along_axis(logits, sharded_sampling.own_rows(stood)[:, None, None], axis=1)[:, 0]
    return going._replace(pool=pool), last


def _checked(
    going: RunState,
    asked: RunInputs,
    given: Guessed,
    hidden: Float[Array, "B T D"],
    logits: Float[Array, "b T W"],
) -> RunState:
    """Accepts the token that was read, then one draft after the other, as long as each equals the sampled token of its place."""

    def is_unfinished(carry: tuple[Array, RunState, Array]) -> Array:
        i, _, live = carry
        return across.any_of((live & (i < given.counts)).any())

    def check(carry: tuple[Array, RunState, Array]) -> tuple[Array, RunState, Array]:
        i, going, live = carry
        mine, guess = logits[:, i], given.guesses[:, i]
        asks = live & (i < given.counts)
        open_logits = mine if given.masks is None else sharded_sampling.masked_logits(mine, given.masks[:, i])
        drawn, fit = sharded_sampling.sample(
            open_logits, going.rows.seen, asked.at, going.position, asked.entry.sampling
        )
        drawn = replay_token(going.rows, asked.at, asked.entry, going.is_open, drawn)
        right = asks & fit & stands(guess, drawn)
        going = accept_token(_tallied(going, i, asks, right), asked, drawn, right, mine)
        live = right & ~going.is_open.done
        return i + 1, accepted(going, live, hidden[:, i + 1]), live

    was_read = given.counts >= 0
    start = jnp.int32(0), accepted(going, was_read, hidden[:, 0]), was_read
    return jax.lax.while_loop(is_unfinished, check, start)[1]


def _tallied(going: RunState, place: Array, asks: Bool[Array, " B"], right: Bool[Array, " B"]) -> RunState:
    chosen = going.chosen
    drafted = chosen.drafted.at[:, place].add(asks)
    stood = chosen.stood.at[:, place].add(right)
    return going._replace(chosen=chosen._replace(drafted=drafted, stood=stood))
