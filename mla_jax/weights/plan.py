"""The memory plan of a model, worked out from shapes alone, and whether it fits."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from mla_jax.base.axes import shown_mesh
from mla_jax.base.batch import bucket
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.base.limits import free_memory, gib
from mla_jax.base.options import MAX_ROWS
from mla_jax.cache.paged import COPIED, COPIES, PAGE
from mla_jax.hosts import distributed
from mla_jax.mesh.devices import Devices
from mla_jax.model.parts import page_bytes
from mla_jax.model.transformer import Transformer
from mla_jax.offload.place import Placement
from mla_jax.weights.fill import IN_MEMORY
from mla_jax.weights.load import ON_DEVICE, Checkpoint
from mla_jax.weights.temporaries import ROWS, choosing, temporaries

TEXTS = 4  # of the size of the rows' texts, in int32: these, and what is compared
TOKENS_OF_ROW = 1024  # tokens of the pool for each request that runs, at least, where nobody says how many do
MOST_OF_SHARD = 256  # of these requests on a shard, where there are many shards
# Tokens of the cache on a CPU, unless more are asked for: there it would take the memory of all else
CPU_TOKENS = 16_384


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device, for `batch` sequences of `context` tokens each, and the pool that is made.

    On a mesh these are bytes of one of its devices. Sequences are shared by the data shards: rows and tokens are those of one."""

    weights: int
    host: int  # of experts in the host's memory; on a CPU a part of the weights
    cache: int  # of `held` sequences of `resident` tokens
    temporaries: int
    available: int
    context: int
    longest: int  # the largest context that fits
    tokens: int  # that the pool holds, of all sequences together
    rows: int  # requests that run at a time, on one shard
    resident: int  # tokens of a sequence of `context` tokens that the pool holds at a time
    batch: int = 1
    shards: int = 1  # that share the sequences
    mesh: str = ""  # such as data=4,tensor=2; empty for one device
    why_mesh: str = ""  # in a sentence, where the user left the choice
    loading: int = 0  # of the host's memory, for what is read and not on a device yet
    host_cache: int = 0  # of pages in the host's memory
    host_free: int = 0  # that the rest leaves there, where such pages are asked for
    hosted: int = 0  # tokens of these pages

    @property
    def needed(self) -> int:
        return self.weights + self.cache + self.temporaries

    @property
    def fits(self) -> bool:
        return self.needed <= self.available and self.tokens >= self.held * self.resident

    @property
    def held(self) -> int:
        """Sequences of the batch that one shard holds."""
        return held(self.batch, self.shards)

    def lines(self) -> list[str]:
        """A table, and what to change when it does not fit."""
        rows = {
            "weights": self.weights,
            **({"experts on the host": self.host} if self.host else {}),
            f"cache of {f'{self.held} x ' * (self.held > 1)}{self.resident:,} tokens": self.cache,
            "temporaries, about": self.temporaries,
            **({"pages on the host": self.host_cache} if self.host_cache else {}),
            "needed": self.needed,
            "available": self.available,
            **({"read at a time, on the host": self.loading} if self.mesh else {}),
        }
        return [
            *([f"mesh {self.mesh}: per device"] if self.mesh else []),
            *(f"{name:<28}{size:>12}" for name, size in zip(rows, map(gib, rows.values()), strict=True)),
            self._verdict(),
            *self.advice(),
        ]

    def _verdict(self) -> str:
        if not self.longest:
            return "not even a short context fits"
        cache = f"the cache of each of {self.shards} shards" if self.shards > 1 else "the cache"
        together = (
            f"; {cache} holds {self.tokens:,} tokens of up to {self.rows} sequences" if self.fits else ""
        )
        return f"largest context that fits: {self.longest:,} tokens{together}"

    def advice(self) -> list[str]:
        if self.host_cache > self.host_free:
            return [
                f"it does not fit the host: the model leaves {gib(self.host_free)} free; give less as --host-cache"
            ]
        if self.fits:
            return []
        if self.needed <= self.available:
            given = self.tokens * self.shards
            return [
                f"it does not fit: --cache-tokens {given} is less than {self.batch} x {self.resident:,} tokens"
            ]
        if self.longest:
            return [
                f"it does not fit: ask for --context {self.longest} or less, or free memory with a larger --memory-fraction"
            ]
        more = "a mesh with more devices along tensor" if self.mesh else "a device with more memory"
        return [f"it does not fit: take --dtype bfloat16, a larger --memory-fraction, or {more}"]

    def refuse(self) -> None:
        """Raises DoesNotFit unless the context that is asked for fits, and the pages on the host."""
        if not self.longest:
            raise DoesNotFit("the model does not fit the device's memory", *self.lines())
        if not self.fits:
            raise DoesNotFit(
                f"a cache of {self.batch} x {self.resident:,} tokens does not fit", *self.lines()
            )
        if self.host_cache > self.host_free:
            raise DoesNotFit(f"pages of {gib(self.host_cache)} do not fit the host's memory", *self.lines())


def memory_plan(
    checkpoint: Checkpoint,
    context: int | None = None,
    batch: int = 1,
    placement: Placement = ON_DEVICE,
    cache_tokens: int | None = None,
    drafts: int = 0,
    keeps_text: bool = False,
    host_cache: float = 0.0,
    max_rows: int | None = None,
    drafting_rows: int | None = None,
    resident: Callable[[int], int] | None = None,
) -> MemoryPlan:
    """The plan for `batch` sequences of `context` tokens, by default as long as the model allows and as fits.

    The pool has `cache_tokens` tokens; by default, on a GPU, as many as fit and as all rows can use. At most `max_rows` requests
    run at a time; by default as many as find room for some tokens each. A pass reads up to `drafts` guesses of each of up to
    `drafting_rows` rows, which may be looked up in the rows' texts. `host_cache` is in GiB. Data shards of a mesh share all that.
    `resident` says how many tokens of a sequence the pool holds at a time, for one that drops some as it is read; by default all.
    Raises BadRequest if the host's part is less than a page."""
    rows = max_rows, drafting_rows
    wanted = Budget(
        checkpoint, placement, context, batch, cache_tokens, drafts, keeps_text, host_cache, *rows, resident
    )
    layout = checkpoint.layout
    return MemoryPlan(
        weights=wanted.weights,
        host=wanted.host,
        cache=pages_for(wanted.resident) * wanted.held * wanted.page,
        temporaries=wanted.temporaries,
        available=wanted.available,
        context=wanted.context,
        longest=wanted.longest,
        tokens=wanted.tokens,
        rows=wanted.rows,
        resident=wanted.resident,
        batch=batch,
        shards=layout.data,
        mesh=shown_mesh(layout.sizes) if layout.devices > 1 else "",
        loading=(IN_MEMORY + checkpoint.copies) * checkpoint.largest_piece(placement),
        host_cache=wanted.hosted * wanted.page_of_shard * layout.data,
        host_free=wanted.host_free,
        hosted=wanted.hosted * PAGE,
    )


@dataclass(frozen=True)
class Budget:
    """The lines of a plan, each worked out when it is asked for: bytes of one device, and rows and tokens of one data shard."""

    checkpoint: Checkpoint
    placement: Placement
    asked_context: int | None
    batch: int
    cache_tokens: int | None  # of all shards
    drafts: int
    keeps_text: bool
    host_cache: float  # GiB
    max_rows: int | None  # of all shards
    drafting_rows: int | None  # of all shards
    resident_of: Callable[[int], int] | None  # tokens of a sequence that the pool holds at a time

    @cached_property
    def model(self) -> Transformer:
        return self.checkpoint.model(self.placement)

    @property
    def on_cpu(self) -> bool:
        return self.checkpoint.device.platform == "cpu"

    @property
    def held(self) -> int:
        """Sequences."""
        return held(self.batch, self.checkpoint.layout.data)

    @cached_property
    def rows(self) -> int:
        """Requests that run at a time."""
        shards = self.checkpoint.layout.data
        if self.max_rows is not None:
            return max(-(-self.max_rows // shards), self.held)
        rows = ROWS if self.on_cpu else max(MAX_ROWS // shards, MOST_OF_SHARD)
        while rows > ROWS and self._tokens_with(rows) < TOKENS_OF_ROW * rows:
            rows //= 2
        return max(rows, self.held)

    @property
    def host(self) -> int:
        """Of experts, before they are packed."""
        return self.checkpoint.bytes(self.placement, host=True)

    @cached_property
    def weights(self) -> int:
        """On a CPU with the device's part of the experts on the host, which is the same memory."""
        on_host = -(-self.host // self.checkpoint.layout.devices) if self.on_cpu else 0
        return self.checkpoint.bytes(self.placement) + on_host

    @cached_property
    def page(self) -> int:
        return page_bytes(self.model)

    @property
    def page_of_shard(self) -> int:
        """On all devices of a shard that have different parts of it."""
        return self.page * page_parts(self.model)

    @cached_property
    def hosted(self) -> int:
        """Pages in the host's memory."""
        return _host_pages(self.host_cache / self.checkpoint.layout.data, self.page_of_shard)

    @cached_property
    def temporaries(self) -> int:
        return self._temporaries(self.rows)

    def _temporaries(self, rows: int) -> int:
        rows, most = bucket(rows), self.asked_context or self._most  # as the programs have them
        drafting = (
            None if self.drafting_rows is None else -(-self.drafting_rows // self.checkpoint.layout.data)
        )
        found = temporaries(self.model, rows, self.drafts, drafting)
        found += choosing(self.model, rows, pages_for(most))
        if self.keeps_text:
            found += TEXTS * 4 * rows * most
        if self.hosted:
            found += 2 * COPIES * COPIED * self.page
        return found

    @cached_property
    def available(self) -> int:
        return available(self.checkpoint.devices)

    @property
    def _most(self) -> int:
        return self.checkpoint.config.max_position_embeddings

    @property
    def _fitting(self) -> int:
        """Tokens that the rest of the memory holds."""
        return max(self.available - self.weights - self.temporaries, 0) // self.page * PAGE

    def _tokens_with(self, rows: int) -> int:
        """Tokens of the pool where `rows` requests run at a time."""
        fitting = max(self.available - self.weights - self._temporaries(rows), 0) // self.page * PAGE
        return min(fitting, self._asked_tokens or fitting)

    @property
    def longest(self) -> int:
        """The largest context that fits."""
        fitting = self._fitting // PAGE // self.held * PAGE
        if self.resident_of is None:
            return min(self._most, fitting)
        return bisect.bisect_right(range(self._most + 1), fitting, key=self.resident_of) - 1

    @property
    def resident(self) -> int:
        return self.context if self.resident_of is None else self.resident_of(self.context)

    @property
    def _asked_tokens(self) -> int | None:
        return None if self.cache_tokens is None else -(-self.cache_tokens // self.checkpoint.layout.data)

    @property
    def context(self) -> int:
        if self.asked_context:
            return self.asked_context
        usual = min(self._most, (self._asked_tokens or self._most * self.held) // self.held)
        if self.on_cpu:
            usual = min(CPU_TOKENS, self._asked_tokens or CPU_TOKENS) // self.held
        return max(1, min(self.longest, usual))

    @property
    def tokens(self) -> int:
        """Of the pool: as asked, else as many as fit and as all rows can use, and at least those of the sequences."""
        if self._asked_tokens:
            return pages_for(self._asked_tokens) * PAGE
        row = pages_for(self.resident) * PAGE
        useful = CPU_TOKENS if self.on_cpu else row * self.rows
        return max(min(useful, self._fitting), row * self.held)

    @property
    def host_free(self) -> int:
        """Of the host's memory, where pages are asked for there."""
        if not self.hosted:
            return 0
        taken = self.host
        if self.on_cpu:
            each = self.weights + self.tokens // PAGE * self.page + self.temporaries
            taken = self.checkpoint.layout.devices * each
        return max(free_memory() - taken, 0)


def held(batch: int, shards: int) -> int:
    """Of `batch` sequences, those that one of the data shards holds at most."""
    return -(-batch // shards)


def _host_pages(size: float, page: int) -> int:
    """Pages that fit `size` GiB."""
    count = int(size * 2**30) // page
    if size and not count:
        raise BadRequest(
            f"host_cache is {size:g} GiB, but a page takes {gib(page)}",
            f"give at least {page / 2**30:.2g}, or 0",
        )
    return count


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def page_parts(model: Transformer) -> int:
    """Devices of a shard that have different parts of a page: of its tokens, and of heads where these do not share it."""
    layout = model.dispatch.layout
    return layout.context * (1 if model.dispatch.shares_cache else layout.tensor)


def available(devices: Devices) -> int:
    """Bytes that may be taken of each device, of the fullest one of all processes; devices on a CPU share its free memory."""
    on_cpu, processes = devices.platform == "cpu", distributed.running()
    free = free_memory() // len(devices.mesh.local_devices) if on_cpu else devices.free_bytes() or 0
    return free if processes is None else processes.least(free)
