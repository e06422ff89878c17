"""Decode steps of rows whose logits are changed by functions of the user's, inside the loop.

Each function is traced for one row and mapped over all of a batch; a row takes the results of its own. So batches change nothing,
and rows without a function decode beside them. The host sends each row's text and state, and gets the state back: such a row has
one dispatch under way at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.axes import DATA
from mla_jax.base.batch import Batch, Table
from mla_jax.cache.paged import Pool
from mla_jax.decode import sharded_sampling
from mla_jax.decode.loop_state import RunInputs, RunState, accepted, begun, ended, forward, next_token
from mla_jax.decode.outputs import Found
from mla_jax.decode.rows import Rows
from mla_jax.decode.speculative import NOBODY, Drafter
from mla_jax.mesh import across
from mla_jax.model.transformer import Transformer

Function = Callable[[Array, Any, Any], tuple[Array, Any]]


class TokensSoFar(NamedTuple):
    """Of a row: its known tokens are the first `count` of `ids`, and of these the first `prompt` are its prompt."""

    ids: Int[Array, " C"]
    count: Int[Array, ""]
    prompt: Int[Array, ""]


class Processing(NamedTuple):
    """The functions' arguments for each row. On the host these are arrays of numpy."""

    text: Any  # Int[Array, "B C"]
    which: Any  # Int[Array, "B"]: the number of the row's function; -1: it has none
    states: Any  # of each function those of all rows, `[B ..]`


class _Carry(NamedTuple):
    going: RunState
    text: Int[Array, "B C"]
    states: Any


def run_processed(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    functions: tuple[Function, ...],
    at: Int[Array, " B"],
    page_table: Table,
    steps: Int[Array, ""],
    given: Processing,
    *,
    drafter: Drafter = NOBODY,
) -> tuple[Pool, Rows, Found, Any]:
    """As `loop.run`; also the states of the rows of all data shards behind their last tokens."""
    asked, going = begun(pool, rows, at, page_table, steps)

    def step(carry: _Carry) -> _Carry:
        going, text, states = carry
        active, position = going.is_active(asked), going.position
        logits = sharded_sampling.row_logits(model, going.last)
        changed, found = _processed(functions, logits, carry, asked, given.which)
        going, token, more = next_token(going, asked, logits, changed)
        batch = Batch.behind(going.held, position, more.astype(jnp.int32), 1, page_table)
        pool = drafter.keep(model, going.pool, going.last[:, None], token[:, None], batch)
        going, hidden = forward(
            model, going._replace(pool=pool), asked, token[:, None], more.astype(jnp.int32)
        )
        place = jnp.where(active, position, text.shape[1])
        text = text.at[jnp.arange(place.size), place].set(token, mode="drop")
        states = _where(active, found, states)
        return _Carry(accepted(going, more, hidden[:, 0]), text, states)

    start = _Carry(going, given.text, given.states)
    going, _, states = jax.lax.while_loop(lambda carry: carry.going.goes_on(asked), step, start)
    return *ended(going, asked), across.gathered(states, DATA)


def _processed(
    functions: tuple[Function, ...],
    logits: Float[Array, "b W"],
    carry: _Carry,
    asked: RunInputs,
    which: Int[Array, " B"],
) -> tuple[Float[Array, "b W"], Any]:
    """The logits of this device's rows as each row's own function changes them, and the new states of all rows."""
    rows = which.shape[0]
    tokens = TokensSoFar(carry.text, carry.going.position, jnp.asarray(asked.entry.prompt))
    tokens, mine, states = sharded_sampling.own_rows((tokens, which, carry.states))
    changed, found = logits, []
    for number, (function, state) in enumerate(zip(functions, states, strict=True)):
        out, new = jax.vmap(function)(logits, tokens, state)
        changed = jnp.where((mine == number)[:, None], out, changed)
        found.append(_where(mine == number, new, state))
    return changed, sharded_sampling.of_all(tuple(found), rows)


def _where(rows: Array, these: Any, those: Any) -> Any:
    """`these` for the rows that are so, else `those`."""

    def chosen(this: Array, that: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (that.ndim - 1)), this, that)

    return jax.tree.map(chosen, these, those)
