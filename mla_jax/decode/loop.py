"""Generation as jitted programs over one table of rows and one pool: `prefill` (pieces of some rows' prompts, in one line) and
`run` (any number of tokens for some rows).

`run` chooses a token from the hidden state of the newest one, then reads it, and so on in one while_loop. It returns the tokens
as arrays of their own, so that the next program can be sent before anyone looks at them. Pool and table are donated."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16

from mla_jax.base.axes import DATA
from mla_jax.base.batch import Batch, Table, Tables
from mla_jax.cache.paged import Pool, page_size
from mla_jax.decode import evict_programs, page_copy, sharded_sampling
from mla_jax.decode import rows as table
from mla_jax.decode.evict_programs import Kept, Selection
from mla_jax.decode.loop_state import RunState, accepted, begun, counted, ended, forward, next_token
from mla_jax.decode.model_weights import Weights
from mla_jax.decode.outputs import Found, Likely
from mla_jax.decode.packing import here, of_shards
from mla_jax.decode.programs import Program, Shared
from mla_jax.decode.rows import ADMITTED, Entry, Rows
from mla_jax.decode.speculative import NOBODY, Drafter, run_with_drafts
from mla_jax.decode.store import ProgramStore
from mla_jax.mesh import across
from mla_jax.model.transformer import Transformer
from mla_jax.offload import experts


def prefill(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    at: Int[Array, " R"],
    tokens: Int[Array, " T"],
    counts: Int[Array, " R"],
    page_table: Table,
    following: Int[Array, " T"] | None = None,
    *,
    drafter: Drafter = NOBODY,
) -> tuple[Pool, Rows, Likely | None]:
    """Prefills `counts` tokens of each of the rows `at`, concatenated in `tokens`, behind their cached ones. An index past the
    table is no row, and tokens after the last row's are padding.

    Where `following` says which token comes after each of them, it returns the log-probabilities of those."""
    entry, was_open, was_last = table.taken(rows, at)
    counts = jnp.where(at < rows.seen.shape[0], counts, 0)
    batch = Batch.in_line(was_open.held, was_open.position, counts, tokens.size, page_table)
    hidden, filled, aux = model(tokens[None], batch, pool, collect=rows.load is not None)
    newest = hidden[0, jnp.maximum(jnp.cumsum(counts) - 1, 0)]
    last = jnp.where(counts[:, None] > 0, newest, was_last)
    is_open = dataclasses.replace(was_open, held=was_open.held + counts, position=was_open.position + counts)
    rows = dataclasses.replace(
        table.returned(rows, at, is_open, last),
        seen=_mark_read(rows.seen, at, entry, tokens, batch),
        load=counted(rows.load, aux),
    )
    assert filled is not None
    fresh = was_open.held == entry.held  # of the token before nobody knows the hidden state
    before, known = _before(hidden, was_last, fresh, was_open.held, batch)
    filled = drafter.keep(
        model, filled, before, tokens[None], dataclasses.replace(batch, mask=batch.mask & known)
    )
    return filled, rows, None if following is None else _scores(model, hidden, following)


def _scores(model: Transformer, hidden: Float[Array, "1 T D"], following: Int[Array, " T"]) -> Likely:
    """Of the tokens that follow each of a line, of all data shards."""
    found = sharded_sampling.likely_of(
        sharded_sampling.row_logits(model, jnp.swapaxes(hidden, 0, 1)), following[:, None]
    )
    return across.gathered(Likely(*(jnp.swapaxes(array, 0, 1) for array in found)), DATA)


def _before(
    hidden: Float[Array, "1 T D"],
    last: Float[Array, "R D"],
    fresh: Bool[Array, " R"],
    held: Int[Array, " R"],
    batch: Batch,
) -> tuple[Float[Array, "1 T D"], Bool[Array, "1 T"]]:
    """The hidden state of the token before each of a line, and whether it is known: not where a row has read nothing yet."""
    assert batch.row is not None
    first = batch.index == held[batch.row]
    before = jnp.where(first[..., None], last[batch.row], jnp.roll(hidden, 1, axis=1))
    return before, ~(first & fresh[batch.row])


def _mark_read(
    seen: UInt16[Array, "H W"], at: Int[Array, " R"], entry: Entry, tokens: Int[Array, " T"], batch: Batch
) -> UInt16[Array, "H W"]:
    """Notes the tokens of a line as read, each in its row; some were generated before their row was preempted."""
    assert batch.row is not None
    row = batch.row[0]
    output = batch.positions[0] >= entry.prompt[row]
    return table.mark(seen, at[row], *(array[:, None] for array in (tokens, batch.mask[0], output)))


def run(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    at: Int[Array, " B"],
    page_table: Table,
    steps: Int[Array, ""],
    *,
    drafter: Drafter = NOBODY,
) -> tuple[Pool, Rows, Found]:
    """Up to `steps` more tokens, STEPS at most, for each of the rows `at`; stops early when all have ended.

    Nothing is drafted here, but the `drafter` keeps its cache of the tokens."""
    asked, going = begun(pool, rows, at, page_table, steps)

    def step(going: RunState) -> RunState:
        going, token, more = next_token(going, asked, sharded_sampling.row_logits(model, going.last))
        token, counts = token[:, None], more.astype(jnp.int32)
        batch = Batch.behind(going.held, going.position, counts, 1, page_table)
        going = going._replace(pool=drafter.keep(model, going.pool, going.last[:, None], token, batch))
        going, hidden = forward(model, going, asked, token, counts)
        return accepted(going, more, hidden[:, 0])

    return ended(jax.lax.while_loop(lambda going: going.goes_on(asked), step, going), asked)


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
GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
# Options of the compiler, by platform: for every program, and for those with loops
OPTIONS: dict[str, dict[str, str]] = {"cpu": CONVERT_LATE}
LOOP_OPTIONS = {"cpu": CONVERT_LATE, "gpu": CONCURRENT | {"xla_gpu_enable_command_buffer": GRAPH_COMMANDS}}


def new(model: Transformer, rows: int, pages: int, text: int = 0, *, counts: bool) -> tuple[Pool, Rows]:
    """An empty pool with `pages` pages per layer, and a table of `rows` rows. With `counts` it counts chosen experts. It keeps
    `text` tokens of each row."""
    return model.new_pool(pages), table.new_rows(model, rows, counts, text)


def logits(model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "R T W"]:
    """Of whole sequences, nothing cached; on a mesh of those of all data shards."""
    return across.gathered(model.unembed(model(tokens, Batch.dense(*tokens.shape))[0]), DATA)


def _loops(drafter: Drafter) -> dict[str, tuple[Callable, int]]:
    """The programs with loops by name: their functions, and how many of the arguments are donated, pool and rows."""
    functions = {"prefill": prefill, "run": run, "run_with_drafts": run_with_drafts}
    return {name: (functools.partial(each, drafter=drafter), 2) for name, each in functions.items()}


def _others(evicts: Selection | None) -> dict[str, tuple[Callable, int]]:
    """The same of the other programs."""
    between = evict_programs.functions(evicts) | page_copy.FUNCTIONS
    return {"admit": (table.admit, 1), "logits": (logits, 0), **between}


class ProgramSizes(NamedTuple):
    """The shapes that programs are compiled for."""

    width: int  # pages of a row
    pieces: int  # of prompts in one line
    decode: Sequence[int] = ()  # numbers of rows of `run`
    drafted: Sequence[int] = ()  # and of `run_with_drafts`
    read: Sequence[int] = ()  # tokens of a line
    scored: int = 0  # tokens of a line whose log-probabilities are computed; 0: of none
    evicted: int = 0  # rows whose tokens are dropped at a time
    copied: int = 0  # pages that are copied to the host at a time, or from there; 0: none are


class Programs:
    """The programs of one model. Each is compiled once a shape, and shapes come in few sizes.

    With `counts` they count how often each expert is chosen, which costs a kernel or two a layer. They are stored in `folder`, if
    one is given, and read from there at the next start, except where they call experts on the host by their addresses. If
    there is a `drafter`, `run_with_drafts` may take the place of `run`, from one call to the next. Where rows drop tokens as
    `evicts` says, page tables are `Tables`."""

    new: Program
    admit: Program
    prefill: Program
    run: Program
    run_with_drafts: Program
    logits: Program
    observe: Program
    move: Program
    copy_out: Program
    copy_in: Program

    def __init__(
        self,
        model: Transformer,
        counts: bool = False,
        folder: Path | None = None,
        drafter: Drafter = NOBODY,
        evicts: Selection | None = None,
    ):
        self.model, self.device, self.drafter, self.evicts = model, model.dispatch.device, drafter, evicts
        self._calls_host = bool(model.on_host())
        shared = Shared.of(None if folder is None or self._calls_host else ProgramStore.of(folder, model))
        self.weights, self.waits = Weights(model), shared.waits
        self.spread, platform = self.weights.spread, self.device.platform
        program = functools.partial(Program, weights=self.weights, shared=shared)
        self.all = {"new": program(functools.partial(new, counts=counts), static=3)}
        for options, functions in ((LOOP_OPTIONS, _loops(drafter)), (OPTIONS, _others(evicts))):
            for name, (function, donated) in functions.items():
                self.all[name] = program(function, donated=donated, compiler_options=options.get(platform))
        vars(self).update(self.all)

    @property
    def page(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of one page as one device has it, `[L Z ..]`."""
        local = self.weights.local_model()
        return jax.eval_shape(lambda: local.new_pool(1))

    @property
    def compiled(self) -> int:
        """How many programs there are."""
        return sum(program.count for program in self.all.values())

    def prepare(self, pool: Pool, rows: Rows, sizes: ProgramSizes) -> None:
        """Compiles the programs of these sizes concurrently, and returns once all are there: a GPU's compiler measures kernels,
        which must not run with a prompt."""
        with self.waits.record():
            started = [
                *self._generating(pool, rows, sizes),
                *self._reading(pool, rows, sizes),
                *self._between(pool, rows, sizes),
            ]
            texts = [] if rows.text is None else [_numbers(ADMITTED, rows.text.shape[1])]
            entries = of_shards([table.default_entries(ADMITTED)] * self.spread.shards)
            started.append(self.admit.start(rows, _numbers(ADMITTED), entries, *texts))
            for future in started:
                future.result()

    def _generating(self, pool: Pool, rows: Rows, sizes: ProgramSizes) -> Iterator[Future]:
        """Programs that decode, the largest first."""
        for n in sizes.decode:
            yield self.run.start(pool, rows, _numbers(n), self._tables(n, sizes.width), _numbers())
        for n in sizes.drafted:
            yield self.run_with_drafts.start(
                pool, rows, _numbers(n), self._tables(n, sizes.width), _numbers(), _numbers()
            )

    def _reading(self, pool: Pool, rows: Rows, sizes: ProgramSizes) -> Iterator[Future]:
        """Programs that prefill."""
        pieces, tables = sizes.pieces, self._tables(sizes.pieces, sizes.width)
        lines: list[tuple[int, Any]] = [(tokens, None) for tokens in sizes.read]
        if sizes.scored:  # beside a line of as many tokens that are only read
            lines.append((sizes.scored, _numbers(sizes.scored)))
        for tokens, after in lines:
            yield self.prefill.start(
                pool, rows, _numbers(pieces), _numbers(tokens), _numbers(pieces), tables, after
            )

    def _between(self, pool: Pool, rows: Rows, sizes: ProgramSizes) -> Iterator[Future]:
        """Programs that change rows' pages."""
        width = sizes.width
        if n := sizes.evicted:
            tables = self._tables(n, width)
            yield self.observe.start(pool, rows, _numbers(n), tables, _numbers(n))
            yield self.move.start(pool, self.spread.whole(self._kept(pool, width, n)), tables, tables)
        if n := sizes.copied:
            yield self.copy_out.start(pool, _numbers(n))
            yield self.copy_in.start(pool, self.spread.whole(self._contents(n)), _numbers(n))

    def _tables(self, rows: int, width: int) -> Any:
        """The shapes of a page table."""
        if self.evicts is None:
            return _numbers(rows, width)
        each = len(self.model.layers), self.model.lanes
        return Tables(_numbers(*each, rows, width), _numbers(*each, rows))

    def _kept(self, pool: Pool, width: int, rows: int) -> Kept:
        """The shapes of what `observe` has found."""
        each = len(self.model.layers), self.model.lanes
        return Kept(
            _numbers(*each, rows, width * page_size(pool) * self.spread.layout.context),
            _numbers(*each, rows),
            _numbers(self.spread.shards, *each, rows),
        )

    def _contents(self, pages: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of what this number of pages holds."""
        return {name: jax.ShapeDtypeStruct((pages, *one.shape), one.dtype) for name, one in self.page.items()}

    def logits_of(self, tokens: np.ndarray) -> np.ndarray:
        """The logits of sequences `[B T]`, on the host. Data shards have equally many; the last one fills up."""
        rows, shards = len(tokens), self.spread.shards
        each = -(-rows // shards)
        padded = tokens[np.minimum(np.arange(each * shards), rows - 1)]
        return here(self.logits(of_shards(np.split(padded, shards))))[:rows]

    def check(self) -> None:
        """Raises what went wrong with experts on the host: programs of a GPU run on when a call fails, with NaN."""
        if self._calls_host:
            experts.raise_failed()


def _numbers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
