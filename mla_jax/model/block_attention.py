"""Attention of a step's queries in one layer over the cached tokens of their rows, read block by block.

A form of attention makes scores and values of a block. The softmax over all blocks is computed here, once for all forms, so
that neither scores nor rebuilt heads ever take more memory than a block's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.axes import CONTEXT
from mla_jax.base.batch import Batch, Known
from mla_jax.base.config import Config
from mla_jax.cache import paged
from mla_jax.cache.paged import Layer, Pool, StepRows, View
from mla_jax.mesh import across
from mla_jax.model.ops import masked_exp

Cached = dict[str, Array]  # `{name: [B S ..]}`
OfBlock = Callable[[Cached], tuple[Float[Array, "B T N S"], Float[Array, "B S ..."]]]


class Blocks(NamedTuple):
    """How the rows of a step are read: `count` pages of each line at a time."""

    rows: StepRows
    pages: View
    count: Known
    size: Known  # of a page
    mask: Bool[Array, "B T"]

    def visible(self, first: Array | int, slots: int) -> Bool[Array, "B T #N S"]:
        """The slots of a block that each query attends to: its own, and those of its row before it."""
        slot = first + jnp.arange(slots)

        def seen(rows: StepRows, start: Array) -> Bool[Array, "B T S"]:
            start = rows.of_tokens(start * self.size)[:, :, None]
            return (slot >= start) & (paged.order_of(slot - start, self.size) <= rows.index[:, :, None])

        if self.rows.lanes > 1:
            found = jax.vmap(seen, out_axes=2)(self.rows, self.pages.start)
        else:
            found = seen(self.rows, self.pages.start)[:, :, None]
        return found & self.mask[:, :, None, None]


class StepCache(NamedTuple):
    """`new` is what the form remembers of the step's own tokens. With a cache they are in `layer` already."""

    new: Cached
    layer: Layer | None
    step: Any  # what the form's `prepare` returned
    reads: Callable[[Cached], Cached] = dict  # from what is stored to what the form knows

    def attend(self, of_block: OfBlock) -> Float[Array, "B T N V"]:
        """The softmax of all scores times all values, `of_block(block)` being a block's; values are per head, or shared."""
        if self.layer is None:
            return _finish(*_scored(of_block, self.reads(self.new), self.step)[1:])
        layer, pages, count = self.layer, self.step.pages, self.step.count

        def block(i: Array | int) -> tuple[Array, Array, Array]:
            cached = self.reads(paged.read(layer, pages, i * count, count))
            seen = self.step.visible(i * count * layer.size, count * layer.size)
            return _scored(of_block, cached, seen, self.step.rows.row is not None)

        if pages.table.shape[-1] == count:
            return _finish(*_joined(block(0))[1:])
        used = -(-pages.used // count)
        shapes = jax.eval_shape(block, 0)
        start = (
            jnp.full(shapes[0].shape, -jnp.inf),
            *(jnp.zeros(one.shape, one.dtype) for one in shapes[1:]),
        )
        return _finish(
            *_joined(jax.lax.fori_loop(0, used, lambda i, carry: _merged(carry, block(i)), start))[1:]
        )


class ChosenTokens(NamedTuple):
    """As a StepCache, of new tokens that attend to tokens of their own each: the first `counts` of its slots.

    A kernel takes lines of new tokens, other forms a row for each."""

    layer: Layer
    slots: Int[Array, "*B K"]  # counted from the layer's first page
    counts: Int[Array, "*B"]
    reads: Callable[[Cached], Cached] = dict

    def attend(self, of_block: OfBlock) -> Float[Array, "B 1 N V"]:
        """The softmax of all scores times all values."""
        cached = self.reads(paged.read_slots(self.layer, self.slots, self.counts))
        seen = jnp.arange(self.slots.shape[1]) < self.counts[:, None]
        return _finish(*_scored(of_block, cached, seen[:, None, None])[1:])


class RecordedStep(NamedTuple):
    """As a StepCache without a cache; the weights of its attention are written to `found`."""

    new: Cached
    step: Bool[Array, "B T 1 S"]
    reads: Any
    found: dict[str, Array]

    def attend(self, of_block: OfBlock) -> Float[Array, "B T N V"]:
        """The softmax of all scores times all values."""
        scores, _ = of_block(self.reads(self.new))
        _, weights, total = masked_exp(scores, self.step)
        self.found["attention"] = (weights / jnp.where(total > 0, total, 1.0)).swapaxes(1, 2)
        return StepCache(self.new, None, self.step, self.reads).attend(of_block)


HeldTokens = StepCache | ChosenTokens | RecordedStep  # what a form attends to


def prepare(batch: Batch, pool: Pool | None, config: Config, block: int) -> Blocks | Bool[Array, "B T 1 S"]:
    """For the forms that XLA computes: blocks of about `block` slots; without a cache, the mask of the attended tokens."""
    if pool is None:
        positions = jnp.where(batch.mask, batch.positions, jnp.iinfo(jnp.int32).max)
        causal = positions[:, None, None, :] <= batch.positions[:, :, None, None]
        return causal & batch.mask[:, :, None, None]
    size = paged.page_size(pool)
    rows = paged.rows_of(batch, size)
    pages = paged.view_of(rows, rows.seq_lens, size)
    count = min(max(block // size, 1), pages.table.shape[-1])
    return Blocks(rows, pages.in_blocks(count), Known(count), Known(size), batch.mask)


def finite(values: Array) -> Array:
    """Zeros instead of NaN and infinities, which must not reach other rows of a line: a weight of zero times NaN is NaN. The
    row's own queries learn of them by its keys."""
    return jnp.where(jnp.isfinite(values), values, 0)


def _scored(of_block: OfBlock, cached: Cached, mask: Array, line: bool = False) -> tuple[Array, Array, Array]:
    """The largest score of a block's queries `[B T N 1]`, and sums relative to it: of weights, and of weighted values."""
    scores, values = of_block(cached)
    values = finite(values) if line else values
    top, weights, total = masked_exp(scores, mask)
    mix = "btns,bsnv->btnv" if values.ndim == 4 else "btns,bsv->btnv"
    return (
        top,
        total,
        jnp.einsum(mix, weights.astype(values.dtype), values, preferred_element_type=jnp.float32),
    )


def _merged(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The same of two blocks together."""
    top = jnp.maximum(a[0], b[0])
    by = [
        jnp.where(jnp.isfinite(one), jnp.exp(one - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
        for one in (a[0], b[0])
    ]
    return top, a[1] * by[0] + b[1] * by[1], a[2] * by[0] + b[2] * by[1]


def _joined(mine: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The same of what all devices have of the rows."""
    if across.size(CONTEXT) == 1:
        return mine
    top = across.maximum(mine[0], CONTEXT)
    by = jnp.where(jnp.isfinite(mine[0]), jnp.exp(mine[0] - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total, weighted = across.total((mine[1] * by, mine[2] * by), CONTEXT)
    return top, total, weighted


def _finish(total: Float[Array, "B T N 1"], weighted: Float[Array, "B T N V"]) -> Float[Array, "B T N V"]:
    """Zeros where a query attends to nothing."""
    return weighted / jnp.where(total > 0, total, 1.0)
