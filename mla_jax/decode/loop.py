"""Generation as jitted programs over one table of rows and one pool: `prefill` (pieces of some rows' prompts, in one line) and
`run` (any number of tokens for some rows).

`run` chooses a token from the hidden state of the newest one, then reads it, and so on in one while_loop. It returns the tokens
as arrays of their own, so that the next program can be sent before anyone looks at them. Pool and table are donated."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from mla_jax.base.batch import Batch
from mla_jax.cache.paged import Pool
from mla_jax.decode import rows as table
from mla_jax.decode.chosen import STEPS, Chosen, Found, Likely, likely, nothing_chosen
from mla_jax.decode.packing import pack
from mla_jax.decode.programs import Program, Shared
from mla_jax.decode.rows import ADMITTED, Entry, Open, Rows
from mla_jax.decode.sampling import choose
from mla_jax.decode.store import Store
from mla_jax.model.transformer import Transformer
from mla_jax.offload import experts


class Going(NamedTuple):
    """What a `run` has come to."""

    taken: Int[Array, ""]  # steps
    pool: Pool
    rows: Rows
    is_open: Open
    last: Float[Array, "B D"]  # hidden states of the newest tokens
    chosen: Chosen
    scored: Likely


def prefill(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    at: Int[Array, " R"],
    tokens: Int[Array, " T"],
    counts: Int[Array, " R"],
    page_table: Int[Array, "R P"],
    following: Int[Array, " T"] | None = None,
) -> tuple[Pool, Rows, Likely | None]:
    """Reads tokens behind what the rows `at` hold: `counts` of them each, one row's after the other's. An index past the table is
    no row, and what comes after the last row's tokens is not read.

    Where `following` says which token comes after each of them, it returns the log-probabilities of those."""
    entry, is_open, last = table.taken(rows, at)
    counts = jnp.where(at < rows.seen.shape[0], counts, 0)
    batch = Batch.in_line(is_open.held, is_open.position, counts, tokens.size, page_table)
    hidden, filled, aux = model(tokens[None], batch, pool, collect=rows.load is not None)
    newest = hidden[0, jnp.maximum(jnp.cumsum(counts) - 1, 0)]
    last = jnp.where(counts[:, None] > 0, newest, last)
    is_open = dataclasses.replace(is_open, held=is_open.held + counts, position=is_open.position + counts)
    rows = dataclasses.replace(
        table.returned(rows, at, is_open, last),
        seen=_mark_read(rows.seen, at, entry, tokens, batch),
        load=_counted(rows.load, aux),
    )
    assert filled is not None
    return filled, rows, None if following is None else likely(model.unembed(hidden), following[None])


def _mark_read(
    seen: UInt16[Array, "H W"], at: Int[Array, " R"], entry: Entry, tokens: Int[Array, " T"], batch: Batch
) -> UInt16[Array, "H W"]:
    """Notes the tokens of a line as read, each in its row; some were generated before their row was preempted."""
    assert batch.row is not None
    row = batch.row[0]
    output = batch.positions[0] >= entry.prompt[row]
    return table.mark(seen, at[row], *(array[:, None] for array in (tokens, batch.mask[0], output)))


def run(
    model: Transformer, pool: Pool, rows: Rows, at: Int[Array, " B"], page_table: Int[Array, "B P"], steps: Int[Array, ""]
) -> tuple[Pool, Rows, Found]:
    """Up to `steps` more tokens, STEPS at most, for each of the rows `at`; stops early when all have ended."""
    entry, is_open, last = table.taken(rows, at)
    is_open = dataclasses.replace(is_open, done=is_open.done | (at >= rows.seen.shape[0]))
    nothing = jax.tree.map(jnp.zeros_like, nothing_chosen(at.shape[0]))

    def unfinished(going: Going) -> Array:
        return (going.taken < jnp.minimum(steps, STEPS)) & ~going.is_open.done.all()

    def step(going: Going) -> Going:
        going, token = _choose(model, going, at, entry)
        return _read(model, going, token, page_table)

    going = jax.lax.while_loop(unfinished, step, Going(jnp.int32(0), pool, rows, is_open, last, *nothing))
    chosen = going.chosen._replace(done=going.is_open.done, finite=going.is_open.finite)
    rows = table.returned(going.rows, at, going.is_open, going.last)
    return going.pool, rows, Found(pack(chosen, 1), pack(going.scored, 1))


def _choose(model: Transformer, going: Going, at: Int[Array, " B"], entry: Entry) -> tuple[Going, Int[Array, " B"]]:
    """One more token for every open row; ends the rows that are full, at an end token, or whose logits are not finite."""
    rows, is_open, chosen = going.rows, going.is_open, going.chosen
    with jax.named_scope("unembed"):
        logits = model.unembed(going.last)
    with jax.named_scope("choose"):
        token, fit = choose(logits, rows.seen, at, is_open.position, entry.sampling)
    takes = ~is_open.done & fit
    count = is_open.count + takes
    ended = (token[:, None] == entry.ends).any(1) | (count >= entry.limit)
    still_open = dataclasses.replace(
        is_open, count=count, done=is_open.done | ended | ~fit, finite=is_open.finite & (fit | is_open.done)
    )
    seen = table.mark(rows.seen, at, token[:, None], takes[:, None], jnp.ones_like(takes)[:, None])
    slot = jnp.where(takes, chosen.count, STEPS)  # STEPS: nowhere
    scored = jax.lax.cond(
        (takes & entry.logprobs).any(), lambda: _scored(going.scored, slot, logits, token), lambda: going.scored
    )
    chosen = chosen._replace(tokens=_put(chosen.tokens, slot, token), count=chosen.count + takes)
    rows = dataclasses.replace(rows, seen=seen)
    return going._replace(rows=rows, is_open=still_open, chosen=chosen, scored=scored), token


def _scored(scored: Likely, slot: Int[Array, " B"], logits: Float[Array, "B W"], token: Int[Array, " B"]) -> Likely:
    """With the log-probabilities of one more token."""
    found = likely(logits[:, None], token[:, None])
    return Likely(*(_put(old, slot, new[:, 0]) for old, new in zip(scored, found, strict=True)))


def _put(buffer: Array, slot: Int[Array, " B"], value: Array) -> Array:
    return buffer.at[jnp.arange(slot.shape[0]), slot].set(value, mode="drop")


def _read(model: Transformer, going: Going, token: Int[Array, " B"], page_table: Int[Array, "B P"]) -> Going:
    """The tokens of rows that are still open, read by the model."""
    is_open, more = going.is_open, ~going.is_open.done
    batch = Batch(is_open.position[:, None], more[:, None], is_open.held + 1, page_table)
    hidden, pool, aux = model(token[:, None], batch, going.pool, collect=going.rows.load is not None)
    assert pool is not None
    return going._replace(
        taken=going.taken + 1,
        pool=pool,
        rows=dataclasses.replace(going.rows, load=_counted(going.rows.load, aux)),
        is_open=dataclasses.replace(is_open, held=is_open.held + more, position=is_open.position + more),
        last=jnp.where(more[:, None], hidden[:, 0], going.last),
    )


def _counted(load: Int[Array, "moe X"] | None, aux: dict[str, list[Array]]) -> Int[Array, "moe X"] | None:
    """What experts were chosen so far, with those of one more step."""
    return None if load is None else load + jnp.stack(aux["load"]).astype(jnp.int32)


# On a CPU, XLA computes bfloat16 and packed weights in float32. By default it converts all weights before a loop begins, and all
# layers' weights before the first is used: a float32 copy of the model. With these options each weight is converted where it is
# used, which also takes less time (two cores, 0.9 GiB in bfloat16, 40 tokens: 1.5 s instead of 2.7, 0.06 GiB instead of 1.8).
CONVERT_LATE = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
# On a GPU, kernels that do not depend on each other run concurrently inside a CUDA graph, such as shared and routed experts: 10 %
# less time for a decode step of V2-Lite's shape on an H200, 1 and 8 rows.
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
# With loops in the graph as well, a call returns before it is done (H100: a run with 8 rows after 2 of 66 ms, 256 tokens of a
# prompt after 3 of 15), so that the next one can be sent ahead.
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
OPTIONS: dict[str, dict[str, str]] = {"cpu": CONVERT_LATE}  # of the compiler, by platform: for every program,
LOOP_OPTIONS = {"cpu": CONVERT_LATE, "gpu": CONCURRENT | {"xla_gpu_enable_command_buffer": GRAPHS}}  # and for those with loops


def new(model: Transformer, rows: int, pages: int, *, counts: bool) -> tuple[Pool, Rows]:
    """An empty pool with `pages` pages per layer, and a table of `rows` rows. With `counts` it counts chosen experts."""
    return model.new_pool(pages), table.new_rows(model, rows, counts)


def logits(model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
    """Of whole sequences, nothing cached."""
    return model.unembed(model(tokens, Batch.dense(*tokens.shape))[0])


class Sizes(NamedTuple):
    """What programs are compiled for."""

    width: int  # pages of a row
    pieces: int  # of prompts in one line
    decode: Sequence[int] = ()  # numbers of rows of `run`
    read: Sequence[int] = ()  # tokens of a line
    scored: int = 0  # tokens of a line whose log-probabilities are computed; 0: of none


class Programs:
    """The programs of one model. Each is compiled once a shape, and shapes come in few sizes.

    With `counts` they count how often each expert is chosen, which costs a kernel or two a layer. They are stored in `folder`, if
    one is given, and read from there at the next start, except where they call experts on the host by their addresses."""

    def __init__(self, model: Transformer, counts: bool = False, folder: Path | None = None):
        self.model, self.device = model, model.dispatch.device
        self._calls_host = bool(model.on_host())
        shared = Shared.of(None if folder is None or self._calls_host else Store.of(folder, model))
        self.waits = shared.waits
        options, loop_options = (options.get(self.device.platform) for options in (OPTIONS, LOOP_OPTIONS))
        program = functools.partial(Program, model=model, shared=shared)
        self.new = program(functools.partial(new, counts=counts), static_argnums=(1, 2))
        self.admit = program(table.admit, donate_argnums=(1,), compiler_options=options)
        self.prefill = program(prefill, donate_argnums=(1, 2), compiler_options=loop_options)
        self.run = program(run, donate_argnums=(1, 2), compiler_options=loop_options)
        self.logits = program(logits, compiler_options=options)
        self.all = (self.new, self.admit, self.prefill, self.run, self.logits)

    def refresh(self) -> bool:
        """Takes the parameters as the model has them now; whether any has changed."""
        changed = [program.refresh() for program in self.all]
        return any(changed)

    @property
    def compiled(self) -> int:
        """How many programs there are."""
        return sum(program.count for program in self.all)

    def prepare(self, pool: Pool, rows: Rows, sizes: Sizes) -> None:
        """Compiles concurrently what these sizes need, and returns once all are there: what a GPU's compiler measures must not
        run with a prompt."""
        pieces, width = sizes.pieces, sizes.width
        with self.waits.record():
            started = [self.run.start(pool, rows, *_shapes((n,), (n, width), ())) for n in sizes.decode]  # the largest first
            for tokens in sizes.read:
                started.append(self.prefill.start(pool, rows, *_shapes((pieces,), (tokens,), (pieces,), (pieces, width)), None))
            if tokens := sizes.scored:
                line = _shapes((pieces,), (tokens,), (pieces,), (pieces, width), (tokens,))
                started.append(self.prefill.start(pool, rows, *line))
            started.append(self.admit.start(rows, *_shapes((ADMITTED,)), table.blank(ADMITTED)))
            for future in started:
                future.result()

    def check(self) -> None:
        """Raises what went wrong with experts on the host: programs of a GPU run on when a call fails, with NaN."""
        if self._calls_host:
            experts.check()


def _shapes(*shapes: tuple[int, ...]) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
