"""The outputs of the decode loop: chosen tokens, log-probabilities, draft statistics."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.options import MAX_LOGPROBS, MOST_DRAFTS
from mla_jax.decode.packing import Either, here, part_here, unpack

STEPS = 32  # tokens per row that one `run` chooses at most


class Likely(NamedTuple):
    """Log-probabilities of tokens, and of the likeliest in their places."""

    logprobs: Float[Either, "B T"]
    top: Float[Either, "B T J"]
    top_ids: Int[Either, "B T J"]


class Chosen(NamedTuple):
    """The tokens that one `run` chose for each of its rows: the first `count` of `tokens`."""

    tokens: Int[Either, "B STEPS"]
    count: Int[Either, " B"]
    done: Bool[Either, " B"]
    finite: Bool[Either, " B"]
    drafted: Int[Either, "B MOST_DRAFTS"]  # how often a draft was read in each place behind a token,
    stood: Int[Either, "B MOST_DRAFTS"]  # and how often it was what the sampler drew there


def nothing_chosen(rows: int) -> tuple[Chosen, Likely]:
    tokens, top = (rows, STEPS), (rows, STEPS, MAX_LOGPROBS)
    drafts = np.zeros((rows, MOST_DRAFTS), np.int32)
    no = np.zeros(rows, bool)
    chosen = Chosen(np.zeros(tokens, np.int32), np.zeros(rows, np.int32), no, no, drafts, drafts)
    return chosen, Likely(np.zeros(tokens, np.float32), np.zeros(top, np.float32), np.zeros(top, np.int32))


CHOSEN, LIKELY = nothing_chosen(1)


class Found(NamedTuple):
    """The packed outputs of one `run`, on the device, one data shard's rows after the other's; reading blocks until ready."""

    chosen: Int[Array, "B chosen"]
    likely: Int[Array, "B likely"]  # zeros unless a row of the batch asks

    @property
    def is_there(self) -> bool:
        """Whether reading would not block."""
        return part_here(self.chosen).is_ready()

    def tokens(self) -> Chosen:
        return unpack(here(self.chosen), CHOSEN, 1)

    def logprobs(self) -> Likely:
        return unpack(here(self.likely), LIKELY, 1)


def likely(logits: Float[Array, "B T W"], tokens: Int[Array, "B T"]) -> Likely:
    normal = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    ids = largest_tokens(normal, MAX_LOGPROBS)
    chosen = jnp.take_along_axis(normal, tokens[..., None], axis=-1)[..., 0]
    return Likely(chosen, jnp.take_along_axis(normal, ids, axis=-1), ids)


def largest_tokens(numbers: Float[Array, "*B W"], count: int) -> Int[Array, "*B J"]:
    """Where the `count` largest are, as `jax.lax.top_k` orders them, but without a sort.

    XLA sorts by a library, which a CUDA graph cannot hold: the decode loop would be a program of the host, whose call returns
    only when its steps are done."""

    def with_next(i: Array, carry: tuple) -> tuple:
        left, found = carry
        place = jnp.argmax(left, axis=-1, keepdims=True)
        left = jnp.put_along_axis(left, place, -jnp.inf, axis=-1, inplace=False)
        return left, found.at[..., i].set(place[..., 0])

    left = jnp.maximum(numbers, jnp.finfo(numbers.dtype).min)  # above the -inf of those that are taken
    found = jnp.zeros((*numbers.shape[:-1], count), jnp.int32)
    return jax.lax.fori_loop(0, count, with_next, (left, found))[1]
