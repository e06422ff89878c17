"""Rows: what running requests need on the device, in a table of fixed height, so that programs repeat for any mix of requests.

Rows are not cleared when requests leave them: admission overwrites them."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16

from mla_jax.base.batch import Batch, Table
from mla_jax.base.options import MAX_BIASES, MAX_ENDS
from mla_jax.decode.packing import Either, pack, unpack
from mla_jax.decode.sampling import PROMPT, Given, Sampling

if TYPE_CHECKING:
    from mla_jax.model.transformer import Transformer

ADMITTED = 8  # rows that one call admits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """A request's parameters, by row; with an axis of data shards in front where several are sent theirs."""

    held: Int[Given, "*D H"]  # tokens in its pages
    prompt: Int[Given, "*D H"]  # tokens before its output
    limit: Int[Given, "*D H"]  # tokens it may still generate, those that it generates again included
    # Tokens it generates again: they are in its text, and are taken whatever is drawn
    again: Int[Given, "*D H"]
    logprobs: Bool[Given, "*D H"]  # whether it asks for log-probabilities
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Open:
    """How far each row is."""

    held: Int[Either, " H"]  # tokens in the cache
    position: Int[Either, " H"]  # of the next token
    count: Int[Either, " H"]  # tokens generated since it was admitted
    done: Bool[Either, " H"]
    finite: Bool[Either, " H"]  # false once its logits were not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A table of H rows, or of their shapes; `taken` unpacks some of them."""

    entry: Int[Any, "H entry"]  # an Entry
    open: Int[Any, "H open"]  # an Open
    last: Float[Any, "H D"]  # hidden state of the newest token in the cache
    seen: UInt16[Any, "H W"]  # see `sampling.PROMPT`
    text: Int[Any, "H C"] | None  # tokens by position, where drafts are looked up in them
    load: Int[Any, "moe X"] | None  # how often each expert of each layer was chosen, where that is counted


def default_entries(rows: int) -> Entry:
    """Default entries, used as padding."""

    def filled(value: float, dtype: Any, *shape: int) -> np.ndarray:
        return np.full((rows, *shape), value, dtype)

    def whole() -> np.ndarray:
        return filled(0, np.int32)

    def number(value: float) -> np.ndarray:
        return filled(value, np.float32)

    sampling = Sampling(
        temperature=number(0),
        top_k=whole(),
        top_p=number(1),
        min_p=number(0),
        presence_penalty=number(0),
        frequency_penalty=number(0),
        repetition_penalty=number(1),
        seed=filled(0, np.uint32, 2),
        bias_ids=filled(-1, np.int32, MAX_BIASES),
        bias=filled(0, np.float32, MAX_BIASES),
        ends=filled(-1, np.int32, MAX_ENDS),
        may_end=whole(),
    )
    return Entry(whole(), whole(), whole(), whole(), filled(0, bool), sampling)


def fresh(held: Int[Either, " H"], limit: Int[Either, " H"]) -> Open:
    """Rows that have just been admitted; one that may generate nothing is done."""
    return Open(held, held, 0 * held, limit <= 0, held >= 0)


ENTRY = default_entries(1)
OPEN = fresh(ENTRY.held, ENTRY.limit)


def new_rows(model: "Transformer", rows: int, counts: bool = False, text: int = 0) -> Rows:
    """A table without requests. With `counts` it counts how often experts are chosen. It keeps `text` tokens a row."""
    config = model.config
    entry, is_open = (jnp.tile(pack(one, 1), (rows, 1)) for one in (ENTRY, OPEN))
    last = jnp.zeros((rows, config.hidden_size), model.dtype)
    seen = jnp.zeros((rows, config.vocab_size), jnp.uint16)
    layers = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
    load = jnp.zeros((layers, config.n_routed_experts or 0), jnp.int32) if counts else None
    tokens = jnp.zeros((rows, text), jnp.int32) if text else None
    return Rows(entry, is_open, last, seen, tokens, load)


def admit(
    model: "Transformer",
    rows: Rows,
    at: Int[Array, " K"],
    entry: Entry,
    text: Int[Array, "K C"] | None = None,
) -> Rows:
    """Gives the rows `at` to requests; an index past the table is none. `text` has the known tokens of each."""
    return dataclasses.replace(
        rows,
        text=rows.text if text is None or rows.text is None else _put(rows.text, at, text),
        entry=_put(rows.entry, at, pack(entry, 1)),
        open=_put(rows.open, at, pack(fresh(entry.held, entry.limit), 1)),
        last=_put(rows.last, at, 0),
        seen=_put(rows.seen, at, 0),
    )


def taken(rows: Rows, at: Int[Array, " B"]) -> tuple[Entry, Open, Float[Array, "B D"]]:
    """The rows `at`, for an index past the table the last one, and their newest hidden states."""
    entry, is_open, last = (array.at[at].get(mode="clip") for array in (rows.entry, rows.open, rows.last))
    return unpack(entry, ENTRY, 1), unpack(is_open, OPEN, 1), last


def returned(rows: Rows, at: Int[Array, " B"], is_open: Open, last: Float[Array, "B D"]) -> Rows:
    """The table with how far the rows `at` are now."""
    return dataclasses.replace(
        rows, open=_put(rows.open, at, pack(is_open, 1)), last=_put(rows.last, at, last)
    )


def _put(table: Array, at: Int[Array, " B"], rows: Array | int) -> Array:
    return table.at[at].set(rows, mode="drop")


def newest(
    rows: Rows, at: Int[Array, " B"], page_table: Table, window: int, most: Int[Array, " B"]
) -> tuple[Int[Array, "B W"], Batch]:
    """The newest tokens of the rows `at`, at most `most` and at most `window`, as they pass the layers once more, cached as they
    are."""
    assert rows.text is not None, "the rows' text is not kept"
    _, is_open, _ = taken(rows, at)
    again = jnp.where(at < rows.seen.shape[0], jnp.minimum(jnp.minimum(is_open.held, window), most), 0)
    place = (is_open.position - again)[:, None] + jnp.arange(window)
    tokens = rows.text.at[at[:, None], place].get(mode="clip")
    return tokens, Batch.behind(is_open.held - again, is_open.position - again, again, window, page_table)


def replay_token(
    rows: Rows, at: Int[Array, " B"], entry: Entry, is_open: Open, token: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The recorded token while a preempted request is replayed, else the sampled `token`."""
    if rows.text is None:
        return token
    return jnp.where(is_open.count < entry.again, rows.text.at[at, is_open.position].get(mode="clip"), token)


def chose(
    rows: Rows,
    at: Int[Array, " B"],
    position: Int[Array, " B"],
    token: Int[Array, " B"],
    takes: Bool[Array, " B"],
) -> Rows:
    """Notes a token that each of the rows `at` `takes` as its output, at its position."""
    seen = mark(rows.seen, at, token[:, None], takes[:, None], jnp.ones_like(takes)[:, None])
    if rows.text is None:
        return dataclasses.replace(rows, seen=seen)
    place = jnp.where(takes, position, rows.text.shape[1])
    return dataclasses.replace(rows, seen=seen, text=rows.text.at[at, place].set(token, mode="drop"))


def mark(
    seen: UInt16[Array, "H W"],
    at: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    output: Bool[Array, "B T"],
) -> UInt16[Array, "H W"]:
    """Notes that rows `at` have read these tokens, of their prompts or of their output."""
    rows = jnp.broadcast_to(at[:, None], tokens.shape)
    words = seen.shape[1]
    seen = seen.at[rows, jnp.where(mask & output, tokens, words)].add(1, mode="drop")
    return seen.at[rows, jnp.where(mask & ~output, tokens, words)].apply(_in_prompt, mode="drop")


def _in_prompt(seen: Any) -> Any:
    return seen | PROMPT
