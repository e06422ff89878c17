"""Functions that change rows' logits: checked before a request is taken, with a state for each request on the host."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.logits_processor import LogitsProcessor
from mla_jax.cache.paged import PAGE
from mla_jax.decode.packing import here
from mla_jax.decode.processed import Function, Processing, TokensSoFar
from mla_jax.engine.core.job import Job, Processor

TRACED_WITH = PAGE, 2 * PAGE  # tokens of a text: a function must take any number


def processor_of(given: LogitsProcessor | None, words: int) -> Processor | None:
    """At the beginning of an answer, for a vocabulary of this size. Raises BadRequest for a function that cannot be traced, or
    gives other shapes than it takes."""
    if given is None:
        return None
    state = jax.tree.map(_as_array, given.state)
    logits = jax.ShapeDtypeStruct((words,), jnp.float32)
    expected = jax.eval_shape(lambda *given: given, logits, state)
    for size in TRACED_WITH:
        _refuse_other_shapes(_traced(given.function, logits, size, state), expected)
    return Processor(given.function, state, (given.function, str(_shapes(state))))


def _traced(function: Function, logits: Any, size: int, state: Any) -> Any:
    """The shapes that a function returns, for texts of this size."""
    tokens = jax.eval_shape(lambda: TokensSoFar(jnp.zeros(size, jnp.int32), jnp.int32(0), jnp.int32(0)))
    try:
        return jax.eval_shape(function, logits, tokens, state)
    except Exception as e:
        reason = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
        raise BadRequest("the function in logits cannot be traced", reason) from e


def _refuse_other_shapes(found: Any, expected: Any) -> None:
    if _shapes(found) != _shapes(expected):
        raise BadRequest(
            "the function in logits does not return (logits, state) as it takes them",
            f"found {shown(_shapes(found))}",
            f"expected {shown(_shapes(expected))}",
        )


def processors_of(jobs: Sequence[Job]) -> dict[Hashable, Processor]:
    """One of each kind that these jobs have."""
    return {job.processor.kind: job.processor for job in jobs if job.processor is not None}


def processing_of(
    jobs: Sequence[Job], kinds: Mapping[Hashable, Processor], rows: int, width: int
) -> Processing:
    """Arguments for the jobs of a shard; rows beyond are nobody's. `width` are pages of a row."""
    text, which = np.zeros((rows, width * PAGE), np.int32), np.full(rows, -1, np.int32)
    numbers = {kind: number for number, kind in enumerate(kinds)}
    states = [[like.state] * rows for like in kinds.values()]
    for row, job in enumerate(jobs):
        if job.processor is not None:
            which[row] = number = numbers[job.processor.kind]
            text[row, : len(job.tokens)] = job.tokens
            states[number][row] = job.processor.state
    return Processing(text, which, tuple(jax.tree.map(lambda *each: np.stack(each), *one) for one in states))


class States(NamedTuple):
    """States of functions behind a dispatch, by row."""

    kinds: tuple[Hashable, ...]
    states: Any

    def give(self, job: Job, place: int) -> None:
        """Gives a job its state behind its new tokens, that of row `place`."""
        if job.processor is not None:
            mine = self.states[self.kinds.index(job.processor.kind)]
            job.processor.state = jax.tree.map(lambda leaf: here(leaf)[place], mine)


def _as_array(leaf: Any) -> np.ndarray:
    """A number or an array as numpy has it, of 32 bits."""
    array = np.asarray(leaf)
    if np.issubdtype(array.dtype, np.bool_):
        return array
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.uint32 if array.dtype == np.uint32 else np.int32)
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32)
    raise BadRequest(f"a state of logits has {shown(leaf)}, expected numbers")


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return [(leaf.shape, leaf.dtype.name) for leaf in leaves], str(structure)
