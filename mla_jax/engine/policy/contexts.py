"""Compressed contexts between the device and the host, a few whole pages at a time.

What stays of a row is scattered over its pages, other ones in each layer and head. `move` gathers it in whole pages, which
`copy_out` brings to the host; the way back is the same. So a context of any length needs room for few pages besides its own."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from mla_jax.base.batch import Tables
from mla_jax.cache.paged import COPIED, NOWHERE, PAGE
from mla_jax.decode.evict_programs import Kept
from mla_jax.decode.loop import Programs
from mla_jax.decode.packing import here
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.pages import Held
from mla_jax.engine.policy.evicted_pages import Evicted, EvictedPages, Root

AT_A_TIME = COPIED * PAGE  # tokens of each layer and head that are copied at a time


class Contexts:
    """For the programs of one device."""

    def __init__(self, programs: Programs):
        self.programs = programs

    def taken(self, job: Job, kept: Kept, tokens: int, device: Dispatcher) -> CompressedContext:
        """Fetches what stays of the first `tokens` of a job's tokens, as `observe` has found it."""
        assert job.shard is not None
        pages, (pool, rows) = job.shard.pages, device.state()
        assert isinstance(pages, EvictedPages)
        counts, source = here(kept.told)[0, :, :, 0], here(kept.source)
        width = source.shape[-1] // PAGE
        old, desk = device.tables(device.alone(job), 1, width), _desk(pages)
        to = Tables(pages.table(desk, width)[:, :, None], np.zeros((*counts.shape, 1), np.int32))
        blocks = []
        for start in range(0, int(counts.max()), AT_A_TIME):
            some = Kept(
                *map(jnp.asarray, (_shifted(source, start), _within(counts, start)[..., None], kept.told))
            )
            pool, _ = self.programs.move(pool, some, old, to)
            pool, block = self.programs.copy_out(pool, _places(desk))
            blocks.append({name: here(array) for name, array in block.items()})
        device.keep(pool, rows)
        pages.release(desk)
        arrays = {name: self._joined([block[name] for block in blocks], counts) for name in blocks[0]}
        return CompressedContext(job.tokens[:tokens], counts, arrays)

    def planted(self, context: CompressedContext, pages: EvictedPages, device: Dispatcher) -> Root:
        """A context in parts of its own."""
        root, desk, (pool, rows) = pages.plant(context), _desk(pages), device.state()
        first = np.zeros_like(root.full)
        for start, block in self._blocks(context):
            sent = {name: jnp.asarray(array) for name, array in block.items()}
            pool, _ = self.programs.copy_in(pool, sent, _places(desk))
            counts, entry = _within(context.counts, start), first + start // PAGE
            pool = self._moved(
                pool, counts, pages.table(desk, COPIED), pages.entries(root.held, entry, COPIED)
            )
        device.keep(pool, rows)
        pages.release(desk)
        return root

    def grown(self, root: Root, more: int, pages: EvictedPages, device: Dispatcher) -> Evicted:
        """The parts of a request that begins with a context, with the tokens in them that fill no part of the context's."""
        held, (pool, rows) = pages.grow(root, more), device.state()
        rest = (root.tokens - root.held.dropped) % PAGE
        old, new = (pages.entries(one, root.full, COPIED) for one in (root.held, held))
        pool = self._moved(pool, rest.reshape(old.shape[:2]), old, new)
        device.keep(pool, rows)
        return held

    def _moved(self, pool, counts: np.ndarray, old: np.ndarray, new: np.ndarray):
        """The pool with the first `counts` tokens of each layer and head moved between parts, `[L H COPIED]`."""
        source = np.broadcast_to(np.arange(AT_A_TIME, dtype=np.int32), (*counts.shape, 1, AT_A_TIME))
        kept = Kept(
            *map(
                jnp.asarray,
                (source, counts[..., None].astype(np.int32), counts[None, ..., None].astype(np.int32)),
            )
        )
        none = np.zeros((*counts.shape, 1), np.int32)
        return self.programs.move(pool, kept, Tables(old[:, :, None], none), Tables(new[:, :, None], none))[0]

    def _joined(self, blocks: list[np.ndarray], counts: np.ndarray) -> np.ndarray:
        """The tokens that stay, `[sum(counts) ..]`, of whole pages `[K L Z ..]`."""
        whole = np.concatenate([self._by_part(block, counts.shape) for block in blocks], axis=2)
        return whole[np.arange(whole.shape[2]) < counts[..., None]]

    def _by_part(self, block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Whole pages `[K L Z ..]` by layer and head: `[L H K*Z ..]`."""
        layers, lanes = shape
        block = np.swapaxes(block, 0, 1)[:layers]
        block = block[:, None] if lanes == 1 else np.moveaxis(block, 3, 1)
        return block.reshape(layers, lanes, -1, *block.shape[4:])

    def _blocks(self, context: CompressedContext) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Whole pages with the tokens of a context, and the number of each layer's and head's tokens before them."""
        shape, ends = context.counts.shape, context.counts.ravel().cumsum()
        begins = ends - context.counts.ravel()
        for start in range(0, int(context.counts.max()), AT_A_TIME):
            at = begins[:, None] + start + np.arange(AT_A_TIME)
            there = at < ends[:, None]
            at = np.where(there, at, 0).reshape(*shape, AT_A_TIME)
            yield start, {name: self._as_pages(array[at], name) for name, array in context.arrays.items()}

    def _as_pages(self, array: np.ndarray, name: str) -> np.ndarray:
        """Tokens `[L H K*Z ..]` as whole pages `[K L Z ..]`; what MTP's layers cache is empty."""
        like = self.programs.page[name]
        layers, lanes = array.shape[:2]
        array = array.reshape(layers, lanes, COPIED, PAGE, *array.shape[3:])
        array = array[:, 0] if lanes == 1 else np.moveaxis(array, 1, 3)
        pages = np.zeros((COPIED, *like.shape), like.dtype)
        pages[:, :layers] = np.swapaxes(array, 0, 1)
        return pages


def _desk(pages: EvictedPages) -> Held:
    """Whole pages that hold tokens for the time of a copy. There is room for them."""
    return pages.admit([0] * AT_A_TIME, use_index=False)


def _places(desk: Held) -> np.ndarray:
    places = np.full(COPIED, NOWHERE, np.int32)
    places[: len(desk.pages)] = desk.pages
    return places


def _within(counts: np.ndarray, start: int) -> np.ndarray:
    """How many of the tokens from `start` on are within AT_A_TIME."""
    return np.clip(counts - start, 0, AT_A_TIME).astype(np.int32)


def _shifted(source: np.ndarray, start: int) -> np.ndarray:
    """Old slots from the new slot `start` on; what comes after the last one is never read."""
    return np.roll(source, -start, axis=-1)
