"""Generation as jitted programs over one table of rows and one pool: `mixed_step` (pieces of some rows' prompts in one line, and
one token of others) and `run` (any number of tokens for some rows).

`run` chooses a token from the hidden state of the newest one, then reads it, and so on in one while_loop. It returns the tokens
as arrays of their own, so that the next program can be sent before anyone looks at them. Pool and table are donated."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16

from mla_jax.base.axes import DATA
from mla_jax.base.batch import Batch, MixedBatch, Table, Tables
from mla_jax.base.grammar import mask_words
from mla_jax.cache.paged import Pool, page_size
from mla_jax.decode import evict_programs, page_copy, sharded_sampling
from mla_jax.decode import rows as table
from mla_jax.decode.evict_programs import Kept, Selection
from mla_jax.decode.guided import Guide, guided_step
from mla_jax.decode.loop_state import RunState, accepted, begun, counted, ended, forward, next_token
from mla_jax.decode.model_weights import Weights
from mla_jax.decode.outputs import Found, Likely
from mla_jax.decode.packing import here, of_shards
from mla_jax.decode.processed import run_processed
from mla_jax.decode.programs import Program, Shared
from mla_jax.decode.rows import Entry, Open, Rows
from mla_jax.decode.sequences import captured, logits
from mla_jax.decode.speculative import NOBODY, Drafter, run_with_drafts
from mla_jax.decode.store import ProgramStore
from mla_jax.mesh import across
from mla_jax.model.capture import Capture
from mla_jax.model.transformer import Transformer
from mla_jax.offload import experts


class Line(NamedTuple):
    """Pieces of prompts, one behind the other in one line of T tokens. On the host these are arrays of numpy."""

    at: Any  # Int[Array, "R"]: rows of the table; an index past it is none
    tokens: Any  # Int[Array, "T"]: what comes after the last piece is padding
    counts: Any  # Int[Array, "R"]: tokens of each row
    page_table: Any  # Table


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
    """Reads pieces of prompts, as a Line has them, behind what their rows hold.

    Where `following` says which token comes after each of a line's, it returns the log-probabilities of those."""
    line = Line(at, tokens, counts, page_table)
    reading = _begun_line(rows, line)
    hidden, filled, aux = model(line.tokens[None], reading.batch, pool, collect=rows.load is not None)
    assert filled is not None
    rows = dataclasses.replace(_read(rows, line, reading, hidden), load=counted(rows.load, aux))
    filled = _kept(model, filled, line, reading, hidden, drafter)
    return filled, rows, None if following is None else _scores(model, hidden, following)


def mixed_step(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    line: Line,
    at: Int[Array, " B"],
    page_table: Table,
    *,
    drafter: Drafter = NOBODY,
) -> tuple[Pool, Rows, Found]:
    """One pass for both: reads pieces of prompts, and chooses one more token for each of the rows `at` that decode.

    The weights are read once for the tokens of both. No row is in both."""
    asked, going = begun(pool, rows, at, page_table, jnp.int32(1))
    going, token, more = next_token(going, asked, sharded_sampling.row_logits(model, going.last))
    decode = Batch.behind(going.held, going.position, more.astype(jnp.int32), 1, page_table)
    going = going._replace(pool=drafter.keep(model, going.pool, going.last[:, None], token[:, None], decode))
    reading = _begun_line(going.rows, line)
    tokens = jnp.concatenate([line.tokens, token])[None]
    hidden, filled, aux = model(
        tokens, MixedBatch(reading.batch, decode), going.pool, collect=rows.load is not None
    )
    assert filled is not None
    of_line, of_rows = hidden[:, : line.tokens.size], hidden[0, line.tokens.size :]
    filled = _kept(model, filled, line, reading, of_line, drafter)
    rows = dataclasses.replace(_read(going.rows, line, reading, of_line), load=counted(rows.load, aux))
    return ended(accepted(going._replace(pool=filled, rows=rows), more, of_rows), asked)


class Reading(NamedTuple):
    """A line as its rows were before."""

    entry: Entry
    is_open: Open
    last: Float[Array, "R D"]
    batch: Batch
    counts: Int[Array, " R"]


def _begun_line(rows: Rows, line: Line) -> Reading:
    entry, is_open, last = table.taken(rows, line.at)
    counts = jnp.where(line.at < rows.seen.shape[0], line.counts, 0)
    batch = Batch.in_line(is_open.held, is_open.position, counts, line.tokens.size, line.page_table)
    return Reading(entry, is_open, last, batch, counts)


def _read(rows: Rows, line: Line, reading: Reading, hidden: Float[Array, "1 T D"]) -> Rows:
    """The table once the rows have read their pieces, whose hidden states these are."""
    counts, was_open = reading.counts, reading.is_open
    newest = hidden[0, jnp.maximum(jnp.cumsum(counts) - 1, 0)]
    last = jnp.where(counts[:, None] > 0, newest, reading.last)
    is_open = dataclasses.replace(was_open, held=was_open.held + counts, position=was_open.position + counts)
    return dataclasses.replace(
        table.returned(rows, line.at, is_open, last),
        seen=_mark_read(rows.seen, line.at, reading.entry, line.tokens, reading.batch),
    )


def _kept(
    model: Transformer,
    pool: Pool,
    line: Line,
    reading: Reading,
    hidden: Float[Array, "1 T D"],
    drafter: Drafter,
) -> Pool:
    """The pool with what the drafter caches of a line."""
    held = reading.is_open.held
    fresh = held == reading.entry.held  # of the token before nobody knows the hidden state
    before, known = _before(hidden, reading.last, fresh, held, reading.batch)
    batch = dataclasses.replace(reading.batch, mask=reading.batch.mask & known)
    return drafter.keep(model, pool, before, line.tokens[None], batch)


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
GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
# Else XLA gives kernels slices of arrays where they are, aligned to 128 bytes; those of Mosaic want 256 (JAX 0.11.2).
WHOLE_ARRAYS = {"xla_gpu_enable_dynamic_slice_fusion": False}
# Before XLA knows that a program changes the pool in place, it counts the pool three times, and looks in vain for what it could
# compute again to save memory: that takes 1 to 3 s a program, and ends with a warning.
NO_RECOMPUTING = {"xla_disable_hlo_passes": "rematerialization"}
# Options of the compiler, by platform: for every program, and for those with loops
OPTIONS: dict[str, dict[str, Any]] = {"cpu": CONVERT_LATE, "gpu": NO_RECOMPUTING}
LOOP_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": CONVERT_LATE,
    "gpu": CONCURRENT | WHOLE_ARRAYS | NO_RECOMPUTING | {"xla_gpu_enable_command_buffer": GRAPH_COMMANDS},
}


def new(model: Transformer, rows: int, pages: int, text: int = 0, *, counts: bool) -> tuple[Pool, Rows]:
    """An empty pool with `pages` pages per layer, and a table of `rows` rows. With `counts` it counts chosen experts. It keeps
    `text` tokens of each row."""
    return model.new_pool(pages), table.new_rows(model, rows, counts, text)


def _loops(drafter: Drafter) -> dict[str, tuple[Callable, int]]:
    """The programs with loops by name: their functions, and how many of the arguments are donated, pool and rows."""
    functions = {
        "prefill": prefill,
        "mixed_step": mixed_step,
        "run": run,
        "run_with_drafts": run_with_drafts,
        "guided_step": guided_step,
    }
    return {name: (functools.partial(each, drafter=drafter), 2) for name, each in functions.items()}


def _others(evicts: Selection | None) -> dict[str, tuple[Callable, int]]:
    """The same of the other programs."""
    between = evict_programs.functions(evicts) | page_copy.FUNCTIONS
    return {"admit": (table.admit, 1), "logits": (logits, 0), **between}


class ProgramShape(NamedTuple):
    """The sizes that the program of this name is compiled for; 0 for what it does not have."""

    name: str
    width: int = 0  # pages of a row
    rows: int = 0  # that decode, drop tokens or are admitted, or pages that are copied
    line: int = 0  # tokens of prompts
    pieces: int = 0  # of prompts in a line
    scores: bool = False  # whether it computes log-probabilities of a line
    places: int = 0  # of tokens, for which each row has masks


class Programs:
    """The programs of one model, or of its shapes until `take` brings the model. Each is compiled once a shape, and shapes come
    in few sizes.

    With `counts` they count how often each expert is chosen, which costs a kernel or two a layer. They are stored in `folder`, if
    one is given, and read from there at the next start, except where they call experts on the host by their addresses. If
    there is a `drafter`, `run_with_drafts` may take the place of `run`, from one call to the next. Where rows drop tokens as
    `evicts` says, page tables are `Tables`."""

    new: Program
    admit: Program
    prefill: Program
    mixed_step: Program
    run: Program
    run_with_drafts: Program
    guided_step: Program
    run_processed: Program
    logits: Program
    captured: Program
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
        self.all["captured"] = program(captured, static=1, compiler_options=OPTIONS.get(platform))
        # A function of the user's has no name that another process knows it by: its program is not stored
        self.all["run_processed"] = program(
            functools.partial(run_processed, drafter=drafter),
            shared=shared._replace(store=None),
            donated=2,
            static=1,
            compiler_options=LOOP_OPTIONS.get(platform),
        )
        for options, functions in ((LOOP_OPTIONS, _loops(drafter)), (OPTIONS, _others(evicts))):
            for name, (function, donated) in functions.items():
                self.all[name] = program(function, donated=donated, compiler_options=options.get(platform))
        vars(self).update(self.all)

    def take(self, model: Transformer) -> None:
        """The model of whose shapes these programs are."""
        self.model = model
        self.weights.take(model)

    def shapes_of_new(self, rows: int, pages: int, text: int) -> tuple[Mapping[str, Any], Rows]:
        """The shapes of what `new` returns."""
        local, function = self.weights.local_model(), self.new.function
        return self.spread.whole(jax.eval_shape(lambda: function(local, rows, pages, text)))

    @property
    def page(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of one page as one device has it, `[L Z ..]`."""
        local = self.weights.local_model()
        return jax.eval_shape(lambda: local.new_pool(1))

    @property
    def compiled(self) -> int:
        """How many programs there are."""
        return sum(program.count for program in self.all.values())

    @property
    def temporaries(self) -> int:
        """The most bytes that one of them takes besides weights, pool and rows, by XLA's account."""
        return max(program.temporaries for name, program in self.all.items() if name != "new")

    def prepare(self, pool: Mapping[str, Any], rows: Rows, shapes: Iterable[ProgramShape]) -> None:
        """Compiles the programs of these shapes concurrently, and returns once all are there."""
        with self.waits.record():
            for future in [self.start(pool, rows, shape) for shape in shapes]:
                future.result()

    def start(self, pool: Mapping[str, Any], rows: Rows, shape: ProgramShape) -> Future:
        """Begins to compile a program. Shapes of pool and rows will do, here and in `prepare`."""
        return self.all[shape.name].start(*self._arguments(pool, rows, shape))

    def trace(self, pool: Mapping[str, Any], rows: Rows, shape: ProgramShape) -> Future:
        """As `start`, but returns once the program is traced."""
        return self.all[shape.name].trace(*self._arguments(pool, rows, shape))

    def _arguments(self, pool: Mapping[str, Any], rows: Rows, shape: ProgramShape) -> tuple:
        """The shapes of a program's arguments."""
        width, n = shape.width, shape.rows
        at, tables = _numbers(n), self._tables(n, width)
        match shape.name:
            case "run":
                return pool, rows, at, tables, _numbers()
            case "run_with_drafts":
                return pool, rows, at, tables, _numbers(), _numbers()
            case "guided_step":
                return pool, rows, at, tables, self._guide(shape)
            case "mixed_step":
                return pool, rows, self._line(shape), at, tables
            case "prefill":
                return pool, rows, *self._line(shape), _numbers(shape.line) if shape.scores else None
            case "observe":
                return pool, rows, at, tables, at, at
            case "move":
                return pool, self.spread.whole(self._kept(pool, width, n)), tables, tables
            case "copy_out":
                return pool, at
            case "copy_in":
                return pool, self.spread.whole(self._contents(n)), at
            case "admit":
                texts = [] if rows.text is None else [_numbers(n, rows.text.shape[1])]
                entries = of_shards([table.default_entries(n)] * self.spread.shards)
                return rows, at, entries, *texts
        raise KeyError(shape.name)

    def _line(self, shape: ProgramShape) -> Line:
        pieces = shape.pieces
        return Line(
            _numbers(pieces), _numbers(shape.line), _numbers(pieces), self._tables(pieces, shape.width)
        )

    def _guide(self, shape: ProgramShape) -> Guide:
        each, words = (shape.rows, shape.places), mask_words(self.model.config.vocab_size)
        masks = jax.ShapeDtypeStruct((*each, words), jnp.uint32)
        return Guide(masks, _numbers(*each), _numbers(shape.rows))

    def _tables(self, rows: int, width: int) -> Any:
        """The shapes of a page table."""
        if self.evicts is None:
            return _numbers(rows, width)
        each = len(self.model.layers), self.model.lanes
        return Tables(_numbers(*each, rows, width), _numbers(*each, rows))

    def _kept(self, pool: Mapping[str, Any], width: int, rows: int) -> Kept:
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
        """The logits of sequences `[B T]`, on the host."""
        return here(self.logits(self._sequences(tokens)))[: len(tokens)]

    def captured_of(self, tokens: np.ndarray, capture: Capture) -> dict[str, np.ndarray]:
        """The logits and captures of sequences `[B T]`, on the host, in float32."""
        found = {name: here(array) for name, array in self.captured(capture, self._sequences(tokens)).items()}
        logits = found.pop("logits")[: len(tokens)]
        return {"logits": logits} | {name: _float32(array[:, : len(tokens)]) for name, array in found.items()}

    def _sequences(self, tokens: np.ndarray) -> Any:
        """For each data shard equally many; the last one fills up."""
        rows, shards = len(tokens), self.spread.shards
        each = -(-rows // shards)
        padded = tokens[np.minimum(np.arange(each * shards), rows - 1)]
        return of_shards(np.split(padded, shards))

    def check(self) -> None:
        """Raises what went wrong with experts on the host: programs of a GPU run on when a call fails, with NaN."""
        if self._calls_host:
            experts.raise_failed()


def _float32(array: np.ndarray) -> np.ndarray:
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float32)


def _numbers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
