"""The parts of a decode step, choosing a token for each open row and reading it, and the state that a run carries.

A row is open until it has ended, and in one run until it has as many tokens as the run may choose for it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.axes import DATA
from mla_jax.base.batch import Batch, Table
from mla_jax.cache.paged import Pool
from mla_jax.decode import rows as table
from mla_jax.decode import sharded_sampling
from mla_jax.decode.outputs import STEPS, Chosen, Found, Likely, nothing_chosen
from mla_jax.decode.packing import pack
from mla_jax.decode.rows import Entry, Open, Rows
from mla_jax.mesh import across
from mla_jax.model.transformer import Transformer


class RunInputs(NamedTuple):
    """Inputs of a decode run that do not change between steps."""

    at: Int[Array, " B"]  # rows of the table; an index past it is none
    entry: Entry  # of these
    page_table: Table
    steps: Int[Array, ""]  # tokens that each row may choose, STEPS at most
    scores: Bool[Array, ""]  # whether any row of any device tells log-probabilities


class RunState(NamedTuple):
    """The carry of a decode run's loop."""

    pool: Pool
    rows: Rows
    is_open: Open
    last: Float[Array, "B D"]  # hidden states of the newest tokens that were read
    chosen: Chosen
    scored: Likely

    @property
    def held(self) -> Int[Array, " B"]:
        return self.is_open.held

    @property
    def position(self) -> Int[Array, " B"]:
        return self.is_open.position

    def goes_on(self, asked: RunInputs) -> Bool[Array, ""]:
        """Whether any row of any device may."""
        return across.any_of(self.is_active(asked).any())

    def is_active(self, asked: RunInputs) -> Bool[Array, " B"]:
        """The rows that may choose one more token in this run."""
        return ~self.is_open.done & (self.chosen.count < asked.steps)


def begun(
    pool: Pool, rows: Rows, at: Int[Array, " B"], page_table: Table, steps: Int[Array, ""]
) -> tuple[RunInputs, RunState]:
    entry, is_open, last = table.taken(rows, at)
    is_open = dataclasses.replace(is_open, done=is_open.done | (at >= rows.seen.shape[0]))
    nothing = jax.tree.map(jnp.zeros_like, nothing_chosen(at.shape[0]))
    scores = across.any_of((entry.logprobs & ~is_open.done).any())
    asked = RunInputs(at, entry, page_table, jnp.minimum(steps, STEPS), scores)
    return asked, RunState(pool, rows, is_open, last, *nothing)


def ended(going: RunState, asked: RunInputs) -> tuple[Pool, Rows, Found]:
    chosen = going.chosen._replace(done=going.is_open.done, finite=going.is_open.finite)
    rows = table.returned(going.rows, asked.at, going.is_open, going.last)
    return going.pool, rows, Found(*across.gathered((pack(chosen, 1), pack(going.scored, 1)), DATA))


def next_token(
    going: RunState,
    asked: RunInputs,
    logits: Float[Array, "b W"],
    open_logits: Float[Array, "b W"] | None = None,
) -> tuple[RunState, Int[Array, " B"], Bool[Array, " B"]]:
    """One more token for every active row, sampled from this device's row shard of logits, and the rows that are to read it; ends
    the rows whose logits are not finite. Tokens are drawn from `open_logits`, if given; log-probabilities are of `logits`."""
    with jax.named_scope("choose"):
        drawn_from = logits if open_logits is None else open_logits
        token, fit = sharded_sampling.sample(
            drawn_from, going.rows.seen, asked.at, going.position, asked.entry.sampling
        )
        token = table.replay_token(going.rows, asked.at, asked.entry, going.is_open, token)
    active = going.is_active(asked)
    going = accept_token(going, asked, token, active & fit, logits)
    failed = active & ~fit
    is_open = dataclasses.replace(
        going.is_open, done=going.is_open.done | failed, finite=going.is_open.finite & ~failed
    )
    return going._replace(is_open=is_open), token, active & ~is_open.done


def accept_token(
    going: RunState,
    asked: RunInputs,
    token: Int[Array, " B"],
    takes: Bool[Array, " B"],
    logits: Float[Array, "b W"],
) -> RunState:
    """With the token that each row `takes`, drawn from these logits; ends the rows that are full, or at an end token."""
    entry = asked.entry
    is_open = going.is_open
    chosen = going.chosen
    slot = jnp.where(takes, going.chosen.count, STEPS)
    count = is_open.count + takes
    ends = (token[:, None] == entry.sampling.ends).any(1) | (count >= entry.limit)
    rows = table.chose(going.rows, asked.at, going.position, token, takes)
    scored = jax.lax.cond(
        asked.scores, lambda: _scored(going.scored, slot, logits, token), lambda: going.scored
    )
    return going._replace(
        rows=rows,
        is_open=dataclasses.replace(is_open, count=count, done=is_open.done | (takes & ends)),
        chosen=chosen._replace(tokens=_put(chosen.tokens, slot, token), count=chosen.count + takes),
        scored=scored,
    )


def _scored(
    scored: Likely, slot: Int[Array, " B"], logits: Float[Array, "b W"], token: Int[Array, " B"]
) -> Likely:
    """With the log-probabilities of one more token."""
    found = sharded_sampling.likely_of(logits[:, None], token[:, None])
    return Likely(*(_put(old, slot, new[:, 0]) for old, new in zip(scored, found, strict=True)))


def _put(buffer: Array, slot: Int[Array, " B"], value: Array) -> Array:
    """`value` in each row's slot; STEPS is none."""
    return buffer.at[jnp.arange(slot.shape[0]), slot].set(value, mode="drop")


def forward(
    model: Transformer, going: RunState, asked: RunInputs, tokens: Int[Array, "B T"], counts: Int[Array, " B"]
) -> tuple[RunState, Float[Array, "B T D"]]:
    """Appends the first `counts` tokens to each row's cache; also returns their hidden states. `accepted` keeps some or all."""
    batch = Batch.behind(going.held, going.position, counts, tokens.shape[1], asked.page_table)
    hidden, pool, aux = model(tokens, batch, going.pool, collect=going.rows.load is not None)
    assert pool is not None
    rows = dataclasses.replace(going.rows, load=counted(going.rows.load, aux))
    return going._replace(pool=pool, rows=rows), hidden


def accepted(going: RunState, more: Bool[Array, " B"], hidden: Float[Array, "B D"]) -> RunState:
    """With one more token held by the rows that have `more`, whose hidden state this is."""
    is_open = dataclasses.replace(going.is_open, held=going.held + more, position=going.position + more)
    return going._replace(is_open=is_open, last=jnp.where(more[:, None], hidden, going.last))


def counted(load: Int[Array, "moe X"] | None, aux: dict[str, list[Array]]) -> Int[Array, "moe X"] | None:
    """Adds a step's tokens of each expert to the counts."""
    return None if load is None else load + jnp.stack(aux["load"]).astype(jnp.int32)
