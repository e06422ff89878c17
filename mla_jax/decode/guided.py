"""A pass for rows with grammars: masks of the tokens that may come, which the host makes between two passes.

The host has seen a row's tokens before it makes the next masks, so a row takes one pass at a time. For a pass to give several
tokens, it ends by guessing what comes next: the token that the sampler would draw without a mask, and what the drafter expects
behind it. The host cuts these guesses where the grammar forbids them, and sends them back with a mask for each place. As in
`speculative`, a guess stands where the sampler draws it, so neither drafts nor passes change a row's tokens."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.axes import DATA
from mla_jax.base.batch import Batch, Table
from mla_jax.cache.paged import Pool
from mla_jax.decode import sharded_sampling
from mla_jax.decode.loop_state import RunInputs, RunState, accepted, begun, ended, forward, next_token
from mla_jax.decode.outputs import Found
from mla_jax.decode.rows import Rows
from mla_jax.decode.speculative import NOBODY, Draft, Drafter, Guessed, verified
from mla_jax.mesh import across
from mla_jax.model.transformer import Transformer


class Guide(NamedTuple):
    """Masks for K places of each row, and a draft: guesses of the next tokens. On the host these are arrays of numpy."""

    masks: Any  # UInt32[Array, "B K words"]: of the next token, and behind each of the first K - 1 guesses
    draft: Any  # Int[Array, "B K"]
    counts: Any  # Int[Array, "B"]: guesses of each row; none for a row without a grammar


class _Choice(NamedTuple):
    """The token that each row has chosen, and the rows that are to read it."""

    token: Int[Array, " B"]
    more: Bool[Array, " B"]


def guided_step(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    at: Int[Array, " B"],
    page_table: Table,
    guide: Guide,
    *,
    drafter: Drafter = NOBODY,
) -> tuple[Pool, Rows, Found, Int[Array, "all K"]]:
    """One more token for each of the rows `at`, and behind it those of its draft that stand; also guesses of what follows, -1 for
    none, of the rows of all data shards."""
    places = guide.draft.shape[1]
    asked, going = begun(pool, rows, at, page_table, jnp.int32(places))
    going, choice = _chosen(model, going, asked, guide, drafter)
    if places == 1:
        going = _read(model, going, asked, choice)
        guesses = jnp.full(guide.draft.shape, -1, jnp.int32)
    else:
        going, logits = verified(model, going, asked, drafter, _drafted(choice, guide))
        going, guesses = _guessed(model, going, asked, drafter, logits, places)
    return *ended(going, asked), across.gathered(guesses, DATA)


def _chosen(
    model: Transformer, going: RunState, asked: RunInputs, guide: Guide, drafter: Drafter
) -> tuple[RunState, _Choice]:
    """A token that each row's first mask allows; the drafter takes note of it."""
    logits = sharded_sampling.row_logits(model, going.last)
    open_logits = sharded_sampling.masked_logits(logits, guide.masks[:, 0])
    going, token, more = next_token(going, asked, logits, open_logits)
    batch = Batch.behind(going.held, going.position, more.astype(jnp.int32), 1, asked.page_table)
    pool = drafter.keep(model, going.pool, going.last[:, None], token[:, None], batch)
    return going._replace(pool=pool), _Choice(token, more)


def _read(model: Transformer, going: RunState, asked: RunInputs, choice: _Choice) -> RunState:
    going, hidden = forward(model, going, asked, choice.token[:, None], choice.more.astype(jnp.int32))
    return accepted(going, choice.more, hidden[:, 0])


def _drafted(choice: _Choice, guide: Guide) -> Guessed:
    """The draft behind a chosen token, if it is the draft's first one."""
    behind = jnp.maximum(guide.counts - 1, 0)
    stands = choice.token == guide.draft[:, 0]
    counts = jnp.where(choice.more, jnp.where(stands, behind, 0), -1)
    return Guessed(choice.token, guide.draft[:, 1:], counts, guide.masks[:, 1:])


def _guessed(
    model: Transformer,
    going: RunState,
    asked: RunInputs,
    drafter: Drafter,
    logits: Float[Array, "b W"],
    places: int,
) -> tuple[RunState, Int[Array, "B K"]]:
    """Guesses of each row's next tokens, and with what the drafter caches of them; later passes overwrite it."""
    token, fit = sharded_sampling.sample(
        logits, going.rows.seen, asked.at, going.position, asked.entry.sampling
    )
    # The last token that a row may have is cached by nobody: it has no page, perhaps
    room = asked.entry.limit - going.is_open.count - 1
    may = fit & ~going.is_open.done
    counts = jnp.where(may, jnp.clip(room, 0, places - 1), -1)
    tried = going._replace(rows=_with_text(going, asked, token))
    pool, guesses, counts = drafter.propose(Draft(model, tried, asked, token, counts))
    found = jnp.concatenate([token[:, None], guesses[:, : places - 1]], axis=1)
    known = jnp.arange(places) <= counts[:, None]
    return going._replace(pool=pool), jnp.where(known, found, -1)


def _with_text(going: RunState, asked: RunInputs, token: Int[Array, " B"]) -> Rows:
    """The table with a token that is only guessed in each row's text, for who looks it up there."""
    text = going.rows.text
    if text is None:
        return going.rows
    return dataclasses.replace(going.rows, text=text.at[asked.at, going.position].set(token, mode="drop"))
