"""Attention of a pass that reads prompts and decodes rows: the tokens of each kind by a form of their own, all else as one."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mla_jax.base.batch import MixedBatch
from mla_jax.cache.paged import Layer, StepRows
from mla_jax.model.block_attention import StepCache
from mla_jax.model.fp8_up import Up
from mla_jax.model.indexer import IndexQueries
from mla_jax.model.mla import Form, Queries
from mla_jax.model.page_selection import PageSelection
from mla_jax.model.token_choice import Attends, TokenChoice


class MixedStep(NamedTuple):
    """The plan of both kinds, each as its own form has it. `rows` says where all new tokens are cached."""

    rows: StepRows
    line: Any
    decode: Any


def mixed(line: Form, decode: Form) -> Form:
    """The form of a MixedBatch, of forms that cache the same."""
    return Form(line.remembers, both(line.attends, decode.attends), reads=line.reads)


def both(line: Attends, decode: Attends) -> Attends:
    """A form's `attends` over the tokens of a MixedBatch."""

    def attends(q: Queries, held: StepCache, up: Up, scale: float) -> Float[Array, "1 T N V"]:
        step: MixedStep = held.step
        tokens = step.line.rows.slots.shape[-1]
        shape = step.decode.rows.slots.shape[-2:]
        queries, new = (_parts(tree, tokens, shape) for tree in (q, held.new))
        first = line(queries[0], held._replace(new=new[0], step=step.line), up, scale)
        rest = decode(queries[1], held._replace(new=new[1], step=step.decode), up, scale)
        return jnp.concatenate([first, _in_line(rest)], axis=1)

    return attends


def prepared(batch: MixedBatch, line: Callable[..., Any], decode: Callable[..., Any]) -> MixedStep:
    """The plan of a batch, by the `prepare` of each form."""
    first, rest = line(batch.line), decode(batch.decode)
    slots = rest.rows.slots
    slots = slots.reshape(*slots.shape[:-2], 1, -1)
    rows = first.rows._replace(slots=jnp.concatenate([first.rows.slots, slots], axis=-1))
    return MixedStep(rows, first, rest)


class MixedSelection(NamedTuple):
    """Retrieval of both kinds: both are noted, and what is decoded chooses pages."""

    line: PageSelection
    decode: PageSelection
    forms: tuple[Form, Form]

    def noted(self, layer: Layer, q: Queries, up: Up, reads: Callable) -> Layer:
        """As PageSelection has it."""
        tokens, shape = self.line.batch.mask.shape[1], self.decode.batch.mask.shape
        of_line, of_rows = _parts(q, tokens, shape)
        return self.decode.noted(self.line.noted(layer, of_line, up, reads), of_rows, up, reads)

    def attended(self, attends: Attends, q: Queries, held: StepCache, up: Up, scale: float) -> Array:
        """As PageSelection has it."""
        line, decode = self.forms
        return both(line.attends, functools.partial(self.decode.attended, decode.attends))(q, held, up, scale)


class MixedChoice(NamedTuple):
    """The choice of tokens of both kinds; None where a kind attends to everything."""

    line: TokenChoice | None
    decode: TokenChoice | None
    forms: tuple[Form, Form]
    shape: tuple[int, int]  # of the tokens that are decoded

    def chosen(self, queries: IndexQueries, keys: Float[Array, "1 T I"], layer: Layer) -> tuple[Any, Any]:
        """As TokenChoice has it."""
        parts = _parts((queries, keys), keys.shape[1] - math.prod(self.shape), self.shape)
        line, decode = (
            None if kind is None else kind.chosen(queries, keys, layer)
            for kind, (queries, keys) in zip((self.line, self.decode), parts, strict=True)
        )
        return line, decode

    def attended(
        self, chosen: tuple[Any, Any], attends: Attends, q: Queries, held: StepCache, up: Up, scale: float
    ) -> Array:
        """As TokenChoice has it."""
        kinds = zip((self.line, self.decode), chosen, self.forms, strict=True)
        line, decode = (
            form.attends if kind is None else functools.partial(kind.attended, found, form.attends)
            for kind, found, form in kinds
        )
        return both(line, decode)(q, held, up, scale)


def _parts(tree: Any, tokens: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Arrays `[1 T ..]` of a line's first `tokens` tokens, and `[B K ..]` of the rows behind it, which have this shape."""
    rest = jax.tree.map(lambda x: x[0, tokens:].reshape(*shape, *x.shape[2:]), tree)
    return jax.tree.map(lambda x: x[:, :tokens], tree), rest


def _in_line(x: Float[Array, "B K N V"]) -> Float[Array, "1 T N V"]:
    return x.reshape(1, -1, *x.shape[2:])
