"""Rows: what running requests need on the device, in a table of fixed height, so that programs repeat for any mix of requests.

A request takes a row when it is admitted and leaves it without a word: the next one to be admitted overwrites it."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt16

from mla_jax.base.options import MAX_BIASES, MAX_ENDS
from mla_jax.decode.sampling import PROMPT, Given, Sampling

if TYPE_CHECKING:
    from mla_jax.model.transformer import Transformer

ADMITTED = 8  # rows that one call admits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """What a request brings with it, by row."""

    held: Int[Given, " H"]  # tokens in its pages
    prompt: Int[Given, " H"]  # tokens before its output
    limit: Int[Given, " H"]  # tokens it may still generate
    ends: Int[Given, "H M"]  # token ids that end it, -1 for none
    logprobs: Bool[Given, " H"]  # whether it asks for log-probabilities
    sampling: Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Open:
    """How far each row is."""

    last: Float[Array, "H D"]  # hidden state of the newest token in the cache
    held: Int[Array, " H"]  # tokens in the cache
    position: Int[Array, " H"]  # of the next token
    count: Int[Array, " H"]  # tokens generated since it was admitted
    done: Bool[Array, " H"]
    finite: Bool[Array, " H"]  # false once its logits were not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A table of H rows."""

    entry: Entry
    open: Open
    seen: UInt16[Array, "H W"]  # see `sampling.PROMPT`
    load: Int[Array, "moe X"] | None  # how often each expert of each layer was chosen, where that is counted


def blank(rows: int, width: int, dtype: Any) -> tuple[Entry, Open]:
    """`rows` rows that nobody has; `width` of a hidden state. No two share an array, for tables are donated."""

    def filled(value: float, dtype: Any, *shape: int) -> Array:
        return jnp.full((rows, *shape), value, dtype)

    def whole() -> Array:
        return filled(0, jnp.int32)

    def number(value: float) -> Array:
        return filled(value, jnp.float32)

    sampling = Sampling(
        temperature=number(0),
        top_k=whole(),
        top_p=number(1),
        min_p=number(0),
        presence_penalty=number(0),
        frequency_penalty=number(0),
        repetition_penalty=number(1),
        seed=filled(0, jnp.uint32, 2),
        bias_ids=filled(-1, jnp.int32, MAX_BIASES),
        bias=filled(0, jnp.float32, MAX_BIASES),
    )
    entry = Entry(whole(), whole(), whole(), filled(-1, jnp.int32, MAX_ENDS), filled(0, bool), sampling)
    return entry, Open(filled(0, dtype, width), whole(), whole(), whole(), filled(1, bool), filled(1, bool))


def new_rows(model: "Transformer", rows: int, counts: bool = False) -> Rows:
    """A table without requests. With `counts` it counts how often experts are chosen."""
    config = model.config
    entry, is_open = blank(rows, config.hidden_size, model.dtype)
    layers = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
    load = jnp.zeros((layers, config.n_routed_experts or 0), jnp.int32) if counts else None
    return Rows(entry, is_open, jnp.zeros((rows, config.vocab_size), jnp.uint16), load)


def admit(model: "Transformer", rows: Rows, at: Int[Array, " K"], entry: Entry) -> Rows:
    """Gives the rows `at` to requests; an index past the table is none."""
    _, fresh = blank(at.shape[0], rows.open.last.shape[1], rows.open.last.dtype)
    fresh = dataclasses.replace(fresh, held=entry.held, position=entry.held, done=entry.limit <= 0)
    put = jax.tree.map(lambda old, new: old.at[at].set(new, mode="drop"), (rows.entry, rows.open), (entry, fresh))
    return dataclasses.replace(rows, entry=put[0], open=put[1], seen=rows.seen.at[at].set(0, mode="drop"))


def taken(table: Entry | Open, at: Int[Array, " B"]):
    """The rows `at`, for an index past the table the last one."""
    return jax.tree.map(lambda array: array.at[at].get(mode="clip"), table)


def returned(rows: Rows, at: Int[Array, " B"], is_open: Open) -> Rows:
    """The table with how far the rows `at` are now."""
    put = jax.tree.map(lambda old, new: old.at[at].set(new, mode="drop"), rows.open, is_open)
    return dataclasses.replace(rows, open=put)


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
