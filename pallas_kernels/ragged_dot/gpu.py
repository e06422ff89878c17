"""Grouped matmul for Hopper, in Pallas Mosaic GPU.

The weights are the left operand of the matrix units and the tokens the right one, so that few tokens waste nothing: a sum is
features by tokens. A block takes 256 rows of weights (for a SwiGLU 128 of gate and the same 128 of up) and a tile of tokens,
and runs the program for the smallest number of tokens that holds the tile. Two warpgroups take two times 64 of these rows each.
A third copies weights and tokens through a ring of slots, ahead into the next piece, so that loads never pause. The sums are
transposed on their way to shared memory, and only the tile's own rows are written. If there are too few pieces for all
multiprocessors, the depth is split too: the parts are written in float32, each tile at a place of its own, and XLA adds them.

There are four kinds of operands:
  bf16   both in bfloat16
  w8     weights in E4M3, tokens in bfloat16. Weights are converted to float16 in registers, which is exact and takes one
         instruction for two. Tokens are converted before, each row times a power of two that brings its maximum below 2**15; this
         loses less than 2**-39 of the row's maximum, far less than a sum in float32.
  w8a8   both in E4M3
  a format of packed.KINDS: weights of 4 to 8 bits become bfloat16 in registers, times their scales, tokens in bfloat16. Part by
         part of 64 columns: while the matrix units multiply one, a worker unpacks the next.
The matrix units add E4M3 with about 14 bits, so their sum over each 128 of the depth, times its scales, is added in float32.

Tried without gain: two blocks of a cluster that share the loads of tokens (6 % slower at 16,384 rows, 16 at 8,192) or of
weights, with half of a tile's tokens each (2 and 4 % faster for randomly sized groups, 2.5 % slower for even ones); 3 slots, or
2 of 128."""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import packed, packed_gpu, tuning
from pallas_kernels.fp8 import GROUP, Fp8
from pallas_kernels.hopper import LOG2E, ROW, over, zeros
from pallas_kernels.packed import KINDS, Packed
from pallas_kernels.ragged_dot.plan import (
    ALIGNED,
    Table,
    Tile,
    best_width,
    columns_of,
    locate,
    most_tiles,
    tiles_of,
)

ROWS = 64  # rows of weights in a product
WORKERS, FEEDER = 2, 2
HALF = WORKERS * ROWS  # rows of weights of both workers, in each half of a block
STORED = 64  # features in a row of the staged output: one span of the swizzle
STAGED = 72  # tokens of it, at most: these are written at a time
SPAN = 128  # bytes
GROUPS = 64  # groups whose sizes are summed together
SHORT = 2  # steps of a part of the depth, at least
# As SHORT, where fewer rows than all are expected: adding up parts of V3's down takes 8 us, and splitting saves less
LONG = 14
# On a mesh a single request leaves other shards' rows empty: a device may have one in so many of the expected groups
FEWER = 4
COLUMN = plgpu.Layout.WGMMA.reduce(0)


class Operands(NamedTuple):
    """The inputs of the kernel, or their copies in shared memory."""

    x: jax.Array  # [M D]
    # One, or gate and up: [X F D]; packed: its arrays [X steps tiles ..]
    weights: tuple[jax.Array | tuple[jax.Array, ...], ...]
    x_scale: jax.Array | None  # w8: [M + width], per row; w8a8: [D/128 M]
    scales: tuple[jax.Array, ...]  # of the weights: [X F/128 D/128]; packed by rows: [X F]


class Job(NamedTuple):
    """The constants of a kernel."""

    kind: str
    programs: tuple[int, ...]  # numbers of tokens; the last is a full tile
    depth: int  # of a step
    slots: int
    registers: tuple[int, int]  # of a worker, of the feeder
    units: int
    groups: int  # a multiple of GROUPS
    rows: int  # of x
    weights: int
    features: int
    steps: int  # of the whole depth
    parts: int  # into which it is split
    staged: bool  # rows are written in bfloat16; else sums in float32, features by tokens

    @property
    def width(self) -> int:
        """The most tokens in a tile."""
        return self.programs[-1]

    @property
    def grain(self) -> int:
        """Tiles are multiples of this many rows; sums are written at full width."""
        return ALIGNED if self.staged else self.width

    @property
    def taken(self) -> int:
        """Features of a block."""
        return 2 * HALF // self.weights

    @property
    def blocks(self) -> int:
        return -(-self.features // self.taken)

    @property
    def part(self) -> int:
        """Steps of a part; the last may have fewer."""
        return -(-self.steps // self.parts)


class Same(NamedTuple):
    """A column of the table for a single group, without memory."""

    number: int

    def __getitem__(self, _):
        return jnp.int32(self.number)


class Piece(NamedTuple):
    """A tile times a block of features over a part of the depth."""

    tile: Tile
    feature: jax.Array  # the block's first
    part: jax.Array
    start: jax.Array  # steps
    stop: jax.Array


def _plan(job: Job, sizes_g, table: Table):
    """The groups and their tiles, computed by every block for itself: XLA would launch five kernels for it."""
    shape = GROUPS, GROUPS
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in range(2)
    )

    def sums(numbers, before):
        """Exclusive and inclusive prefix sums, and the total."""
        numbers = plgpu.layout_cast(lax.broadcast_in_dim(numbers, shape, [1]), plgpu.Layout.WGMMA)
        masks = column < row, column <= row, column >= 0
        return [before + jnp.where(some, numbers, 0).sum(axis=1) for some in masks]

    def some(k):
        return pl.ds(pl.multiple_of(k * GROUPS, GROUPS), GROUPS)

    def rows(k, before):
        start, end, before = sums(plgpu.load(sizes_g.at[some(k)], layout=COLUMN, optimized=False), before)
        for to, x in zip(table, (start, end, tiles_of(start, end, job.width)), strict=True):
            to[some(k)] = x
        return before

    def tiles(k, before):
        _, last, before = sums(plgpu.load(table.last.at[some(k)], layout=COLUMN), before)
        plgpu.commit_smem()
        table.last[some(k)] = last
        return before

    for step in (rows, tiles):
        zero = plgpu.layout_cast(jnp.zeros((GROUPS,), jnp.int32), ROW)
        lax.fori_loop(0, job.groups // GROUPS, step, zero)
        plgpu.commit_smem()


def _piece(job: Job, table: Table, i) -> Piece:
    """This unit's piece i."""
    at = lax.axis_index("unit") + i * job.units
    at, part = (
        (at, jnp.int32(0))
        if job.parts == 1
        else (lax.div(at, jnp.int32(job.parts)), lax.rem(at, jnp.int32(job.parts)))
    )
    tile, block = locate(at, table, groups=job.groups, width=job.width, grain=job.grain, blocks=job.blocks)
    tile = tile._replace(row=pl.multiple_of(tile.row, ALIGNED))
    start = part * job.part
    return Piece(tile, block * job.taken, part, start, jnp.minimum(start + job.part, job.steps))


def _pieces(job: Job, table: Table, run):
    """Calls `run(i, step)` for this unit's pieces; `step` counts the steps that went through the ring."""
    all_pieces = table.last[job.groups - 1] * (job.blocks * job.parts)
    count = lax.div(all_pieces - lax.axis_index("unit") + (job.units - 1), jnp.int32(job.units))
    return lax.fori_loop(0, count, run, jnp.int32(0))


def _sized(tile: Tile, programs, do):
    """Calls `do(tokens)` for the smallest number of tokens that holds the tile."""
    tokens, *more = programs
    if more:
        fits = tile.stop - tile.row <= tokens
        pl.when(fits)(lambda: do(tokens))
        pl.when(jnp.logical_not(fits))(lambda: _sized(tile, more, do))
    else:
        do(tokens)


def _slot(job: Job, step):
    return lax.rem(step, jnp.int32(job.slots))


def _load_plain(job: Job, source: Operands, piece: Piece, k, ring: Operands, slot, full):
    """Issues the loads of a step's weights."""
    features = pl.ds(pl.multiple_of(piece.feature, HALF), job.taken)
    columns = pl.ds(pl.multiple_of(k * job.depth, job.depth), job.depth)
    for j, w_g in enumerate(source.weights):
        to = ring.weights[0].at[slot, pl.ds(j * job.taken, job.taken)]
        plgpu.copy_gmem_to_smem(w_g.at[piece.tile.group, features, columns], to, full)


def _load_packed(job: Job, source: Operands, piece: Piece, k, ring: Operands, slot, full):
    """The same of every array; a step of one may be two steps here."""
    tiles = job.taken // packed.ROWS
    of = pl.ds(lax.div(piece.feature, jnp.int32(packed.ROWS)), tiles)
    for j, arrays in enumerate(source.weights):
        for array, to, columns in zip(arrays, ring.weights[0], KINDS[job.kind].columns, strict=True):
            at = lax.div(k, jnp.int32(columns // job.depth))
            plgpu.copy_gmem_to_smem(
                array.at[piece.tile.group, at, of], to.at[slot, pl.ds(j * tiles, tiles)], full
            )


LOADS = dict.fromkeys(("bf16", "w8", "w8a8"), _load_plain)


def _feed(job: Job, source: Operands, table: Table, ring: Operands, full, free):
    """Issues the loads of every step of every piece, as far ahead as the ring has slots."""

    def run(i, step):
        piece = _piece(job, table, i)

        def load(k, step):
            slot = _slot(job, step)
            columns = pl.ds(pl.multiple_of(k * job.depth, job.depth), job.depth)
            pl.when(step >= job.slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            LOADS.get(job.kind, _load_packed)(job, source, piece, k, ring, slot, full.at[slot])

            def rows(tokens):
                of, to = pl.ds(piece.tile.row, tokens), pl.ds(0, tokens)
                plgpu.copy_gmem_to_smem(source.x.at[of, columns], ring.x.at[slot, to], full.at[slot])
                if ring.x_scale is not None:
                    plgpu.copy_gmem_to_smem(
                        source.x_scale.at[k, of], ring.x_scale.at[slot, to], full.at[slot]
                    )

            _sized(piece.tile, job.programs, rows)
            return step + 1

        return lax.fori_loop(piece.start, piece.stop, load, step)

    step = _pieces(job, table, run)

    def drain(step, _):  # every completion must be observed
        plgpu.barrier_wait(free.at[_slot(job, step)])
        return ()

    lax.fori_loop(jnp.maximum(step - job.slots, 0), step, drain, ())


class Worker(NamedTuple):
    """The inputs of a warpgroup for its sums."""

    job: Job
    source: Operands
    ring: Operands
    full: object
    free: object
    role: jax.Array
    tokens: int  # of the program
    interpret: object

    @property
    def mine(self):
        """Its first row in each half of a block."""
        return pl.multiple_of(self.role * ROWS, ROWS)

    def rows(self, half: int):
        """The weights of this warpgroup in one half of a slot."""
        return pl.ds(half * HALF + self.mine, ROWS)

    def x(self, slot):
        return self.ring.x.at[slot, pl.ds(0, self.tokens)]


def _whole(at: Worker, piece: Piece, step):
    """The sums of both halves over the depth, in the accumulators of the matrix units."""
    job = at.job

    def run(*accs):
        def add(k, step):
            slot = _slot(job, step)
            plgpu.barrier_wait(at.full.at[slot])
            for half, acc in enumerate(accs):
                plgpu.wgmma(acc, at.ring.weights[0].at[slot, at.rows(half)], at.x(slot).transpose((1, 0)))
            plgpu.wgmma_wait(len(accs))  # the previous step is done

            @pl.when(k > piece.start)
            def _():
                plgpu.barrier_arrive(at.free.at[_slot(job, step - 1)])

            return step + 1

        lax.fori_loop(piece.start, piece.stop, add, step)
        return [acc[...] for acc in accs]

    sums = pl.run_scoped(run, *[plgpu.ACC((ROWS, at.tokens), jnp.float32)] * 2)
    plgpu.barrier_arrive(at.free.at[_slot(job, step + piece.stop - piece.start - 1)])
    return sums


def _across(tokens):
    """A number per token, broadcast to every feature."""
    return lax.broadcast_in_dim(tokens, (ROWS, tokens.shape[0]), [1])


def _promoted(at: Worker, piece: Piece, step):
    """The same with scales: the sums of one step are added to sums in float32."""
    job, scales = at.job, at.source.scales

    def scale(half, k):
        """The scale of this half's weights; prefetched a step ahead, because it comes from global memory."""
        table = scales[half % job.weights]
        row = lax.div(piece.feature, jnp.int32(GROUP)) + (half if job.weights == 1 else 0)
        return table[piece.tile.group, jnp.minimum(row, table.shape[1] - 1), jnp.minimum(k, job.steps - 1)]

    def factor(slot, scale):
        if at.ring.x_scale is None:
            return scale
        return _across(plgpu.load(at.ring.x_scale.at[slot, pl.ds(0, at.tokens)], layout=COLUMN) * scale)

    def add(k, carry):
        step, sums, now = carry
        slot = _slot(job, step)
        ahead = [scale(half, k + 1) for half in range(2)]
        plgpu.barrier_wait(at.full.at[slot])
        sums = [
            x + y * factor(slot, scale) for x, y, scale in zip(sums, _products(at, slot), now, strict=True)
        ]
        if at.interpret:  # it expects a fence between a read and a later copy; the arrival orders them
            plgpu.commit_smem()
        plgpu.barrier_arrive(at.free.at[slot])
        return step + 1, sums, ahead

    zero = [zeros((ROWS, at.tokens), plgpu.Layout.WGMMA)] * 2
    first = [scale(half, piece.start) for half in range(2)]
    return lax.fori_loop(piece.start, piece.stop, add, (step, zero, first))[1]


def _products(at: Worker, slot):
    """The products of both halves of a slot."""
    weights = [at.ring.weights[0].at[slot, at.rows(half)] for half in range(2)]
    if at.job.kind == "w8" and at.interpret:  # the interpreter does not support a left operand in registers
        return [jnp.dot(_half(w), at.x(slot)[...].T, preferred_element_type=jnp.float32) for w in weights]

    def run(*accs):
        for acc, w in zip(accs, weights, strict=True):
            plgpu.wgmma(acc, _half(w) if at.job.kind == "w8" else w, at.x(slot).transpose((1, 0)))
        return [plgpu.wgmma_accumulator_load(acc, wait_n=len(accs) - 1 - i) for i, acc in enumerate(accs)]

    return pl.run_scoped(run, *[plgpu.ACC((ROWS, at.tokens), jnp.float32)] * 2)


def _half(weights):
    """E4M3 as float16, in the layout of a left operand."""
    codes = plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    return plgpu.layout_cast(codes, plgpu.Layout.WGMMA).astype(jnp.float16)


def _converted(at: Worker, piece: Piece, step):
    """`_promoted`, with the tokens' powers of two undone."""
    tokens = plgpu.load(
        at.source.x_scale.at[pl.ds(piece.tile.row, at.tokens)], layout=COLUMN, optimized=False
    )
    return [x * _across(tokens) for x in _promoted(at, piece, step)]


def _unpacked(at: Worker, piece: Piece, step):
    """The sums of both halves of packed weights."""
    sums = [x * (1 / packed.DOWN) for x in (_summed_plainly if at.interpret else _summed)(at, piece, step)]
    if not KINDS[at.job.kind].by_row:
        return sums
    scales = []
    for half in range(2):
        first = piece.feature + at.mine + (half * HALF if at.job.weights == 1 else 0)
        rows = pl.ds(pl.multiple_of(first, ROWS), ROWS)
        scales.append(
            plgpu.load(
                at.source.scales[half % at.job.weights].at[piece.tile.group, rows],
                layout=ROW,
                optimized=False,
            )
        )
    return [x * over(scale, x.shape) for x, scale in zip(sums, scales, strict=True)]


def _parts_of(at: Worker, slot):
    """Half, weights `[64 64]` and tokens of each product of a slot, in order."""
    for part in range(at.job.depth // packed.PART):
        for half in range(2):
            tile = [array.at[slot, 2 * half + at.role] for array in at.ring.weights[0]]
            columns = pl.ds(part * packed.PART, packed.PART)
            weights = packed_gpu.unpack(at.job.kind, tile, part, at.interpret)
            yield half, weights, at.ring.x.at[slot, pl.ds(0, at.tokens), columns]


def _summed(at: Worker, piece: Piece, step):
    """In the accumulators of the matrix units, which multiply a part while the next is unpacked."""
    job = at.job

    def run(*accs):
        def add(k, step):
            slot = _slot(job, step)
            plgpu.barrier_wait(at.full.at[slot])
            for number, (half, weights, x) in enumerate(_parts_of(at, slot)):
                plgpu.wgmma_wait(0)  # whose weights are in registers
                if number == 0:

                    @pl.when(k > piece.start)
                    def _():
                        plgpu.barrier_arrive(at.free.at[_slot(job, step - 1)])

                plgpu.wgmma(accs[half], weights, x.transpose((1, 0)))
            return step + 1

        lax.fori_loop(piece.start, piece.stop, add, step)
        return [acc[...] for acc in accs]

    sums = pl.run_scoped(run, *[plgpu.ACC((ROWS, at.tokens), jnp.float32)] * 2)
    plgpu.barrier_arrive(at.free.at[_slot(job, step + piece.stop - piece.start - 1)])
    return sums


def _summed_plainly(at: Worker, piece: Piece, step):
    """The same for the interpreter, which does not support a left operand in registers."""

    def add(k, carry):
        step, sums = carry
        slot = _slot(at.job, step)
        plgpu.barrier_wait(at.full.at[slot])
        for half, weights, x in _parts_of(at, slot):
            sums[half] += jnp.dot(weights, x[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # as in `_promoted`
        plgpu.barrier_arrive(at.free.at[slot])
        return step + 1, sums

    zero = [zeros((ROWS, at.tokens), plgpu.Layout.WGMMA)] * 2
    return lax.fori_loop(piece.start, piece.stop, add, (step, zero))[1]


SUMS = {"bf16": _whole, "w8": _converted, "w8a8": _promoted} | dict.fromkeys(KINDS, _unpacked)


def _store(sums, tile: Tile, feature, out_g, staged):
    """Writes sums of ROWS features for the tile's own rows, as many tokens at a time as `staged` holds."""
    for first in range(0, sums.shape[1], staged.shape[0]):
        part = sums[:, first : first + staged.shape[0]].astype(out_g.dtype)
        row, tokens = tile.row + first, part.shape[1]
        start = jnp.clip(tile.start - row, 0, tokens)
        count = jnp.clip(tile.stop - row, 0, tokens) - start
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged.at[pl.ds(0, tokens)].transpose((1, 0))[...] = part
        plgpu.commit_smem()
        for rows in (1 << bit for bit in reversed(range(tokens.bit_length()))):  # copies have static sizes

            @pl.when(count & rows != 0)
            def _(start=start, rows=rows, row=row):
                to = out_g.at[pl.ds(row + start, rows), pl.ds(pl.multiple_of(feature, STORED), STORED)]
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(start, rows)], to, commit_group=False)

            start = start + (count & rows)
        plgpu.commit_smem_to_gmem_group()


def _swiglu(gate, up):
    return gate * (1 / (1 + jnp.exp2(gate * -LOG2E))) * up


def _leave(at: Worker, sums, piece: Piece, out_g, staged):
    """Writes the sums as the job says."""
    job = at.job
    if job.staged:
        for half, x in enumerate(sums if job.weights == 1 else [_swiglu(*sums)]):
            _store(x, piece.tile, piece.feature + half * HALF + at.mine, out_g, staged)
        return
    for half, x in enumerate(sums):
        number, feature = (half, piece.feature) if job.weights == 2 else (0, piece.feature + half * HALF)
        features = pl.ds(pl.multiple_of(feature + at.mine, ROWS), ROWS)
        columns = pl.ds(pl.multiple_of(piece.tile.number * job.width, ALIGNED), at.tokens)
        out_g[piece.part, number, features, columns] = x


def _work(at: Worker, table: Table, out_g, staged):
    job = at.job

    def run(i, step):
        piece = _piece(job, table, i)

        def do(tokens):
            here = at._replace(tokens=tokens)
            sums = SUMS[job.kind](here, piece, step)
            # the piece is recomputed: kept, it would cost registers over the loop
            _leave(here, sums, _piece(job, table, i), out_g, staged)

        _sized(piece.tile, job.programs, do)
        return step + piece.stop - piece.start

    _pieces(job, table, run)
    plgpu.wait_smem_to_gmem(0)


def _kernel(
    source: Operands,
    sizes_g,
    out_g,
    ring: Operands,
    out_s,
    table,
    full,
    free,
    planned,
    *,
    job: Job,
    interpret,
):
    role = lax.axis_index("role")
    if sizes_g is None:
        table = Table(Same(0), Same(job.rows), Same(-(-job.rows // job.width)))
    else:
        table = Table(*(table.at[k] for k in range(3)))

        @pl.when(role == 0)
        def _():
            _plan(job, sizes_g, table)
            plgpu.barrier_arrive(planned)

        plgpu.barrier_wait(planned)

    @pl.when(role < WORKERS)
    def _():
        plgpu.set_max_registers(job.registers[0], action="increase")
        at = Worker(job, source, ring, full, free, role, job.width, interpret)
        _work(at, table, out_g, out_s.at[role])

    @pl.when(role == FEEDER)
    def _():
        plgpu.set_max_registers(job.registers[1], action="decrease")
        _feed(job, source, table, ring, full, free)


def _tiled(*shape, dtype):
    """Shared memory as the matrix units read it."""
    transforms = plgpu.TilingTransform((8, SPAN // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(SPAN)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _ring(job: Job, source: Operands) -> Operands:
    w8a8, (first, *_) = job.kind == "w8a8", source.weights
    if isinstance(first, tuple):
        weights = tuple(
            plgpu.SMEM((job.slots, 2 * HALF // packed.ROWS, *a.shape[3:]), a.dtype) for a in first
        )
    else:
        weights = _tiled(job.slots, 2 * HALF, job.depth, dtype=first.dtype)
    return Operands(
        _tiled(job.slots, job.width, job.depth, dtype=source.x.dtype),
        (weights,),
        # Copies start at multiples of 128 bytes
        plgpu.SMEM((job.slots, max(job.width, 32)), jnp.float32) if w8a8 else None,
        (),
    )


def _launch(job: Job, source: Operands, sizes: jax.Array | None, out_type, interpret):
    loads = 1 + len(jax.tree.leaves(source.weights)) + (job.kind == "w8a8")
    return plgpu.kernel(
        functools.partial(_kernel, job=job, interpret=interpret),
        out_type=out_type,
        scratch_types=[
            _ring(job, source),
            plgpu.SMEM(
                (WORKERS, min(job.width, STAGED), STORED),
                jnp.bfloat16,
                transforms=(plgpu.SwizzleTransform(SPAN),),
            ),
            plgpu.SMEM((3, job.groups), jnp.int32),
            plgpu.Barrier(num_arrivals=loads, num_barriers=job.slots),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=job.slots),
            plgpu.Barrier(),
        ],
        grid=(job.units,),
        grid_names=("unit",),
        num_threads=WORKERS + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(source, sizes)


def _float16(x, spare):
    """Rows in float16 times powers of two that bring their maximum to 2**14 or above; the inverse factors, plus `spare` more."""
    exact = x.astype(jnp.float32)
    exponent = lax.bitcast_convert_type(jnp.max(jnp.abs(exact), axis=1), jnp.int32) & 0x7F800000
    power = jnp.maximum(lax.bitcast_convert_type(exponent, jnp.float32), 2.0**-100)
    return (exact * (2.0**14 / power)[:, None]).astype(jnp.float16), jnp.pad(power * 2.0**-14, (0, spare))


def _operands(kind, x, weights, width) -> Operands:
    """`x` padded to tiles of 8 rows."""

    def padded(rows):
        return jnp.pad(rows, ((0, -rows.shape[0] % ALIGNED), (0, 0)))

    if kind == "bf16":
        return Operands(padded(x), tuple(weights), None, ())
    if kind in KINDS:
        count = len(KINDS[kind].columns)
        return Operands(
            padded(x),
            tuple(w.arrays[:count] for w in weights),
            None,
            sum((w.arrays[count:] for w in weights), ()),
        )
    codes, scales = zip(*weights, strict=True)
    if kind == "w8a8":
        return Operands(padded(x.codes), codes, padded(x.scale).T, scales)
    x, undo = _float16(padded(x), width)
    return Operands(x, codes, undo, scales)


def _kind(x, weights):
    if isinstance(weights[0], Packed):
        return weights[0].format
    return "bf16" if not isinstance(weights[0], Fp8) else "w8a8" if isinstance(x, Fp8) else "w8"


def _parts(pieces, steps, units, each):
    """The number of parts of the depth with which every multiprocessor has work, of at least `each` steps."""
    return max(min(units // pieces, steps // each), 1)


@functools.partial(jax.jit, static_argnames=("expected", "out_dtype", "units", "width", "parts", "interpret"))
def grouped(
    x, weights, group_sizes, *, out_dtype, units, expected=None, width=None, parts=None, interpret=None
):
    """The rows of x times the weights of their groups; with two weights the SwiGLU of both products.

    `group_sizes` may be None for a single group of all rows; about `expected` rows have a group. `width` of a tile and `parts` of
    the depth are chosen where they are not given."""
    kind = _kind(x, weights)
    (M, D), (X, F, *_) = jax.tree.leaves(x)[0].shape, jax.tree.leaves(weights)[0].shape
    F = weights[0].shape[0] if kind in KINDS else F
    table = tuning.RAGGED_DOT[kind]
    registers = tuning.PACKED_REGISTERS if kind in KINDS else tuning.RAGGED_DOT_REGISTERS
    expected = expected or M
    width = width or best_width(expected, X, table)
    slots, depth, *fewer = table[width]
    if tuning.RAGGED_DOT_GROUPS.get((kind, width), X) < X:
        slots -= 1
    depth = min(depth, D)
    groups = -(-X // GROUPS) * GROUPS
    count = len(weights)
    groups = 1 if group_sizes is None else groups
    job = Job(
        kind, (*fewer, width), depth, slots, registers, units, groups, M, count, F, -(-D // depth), 1, True
    )
    if parts is None:
        tiles = -(-M // width) if X == 1 else min(M, X)
        each = SHORT
        if expected < M:
            tiles, each = min(-(-expected // FEWER), X), LONG
        parts = _parts(tiles * job.blocks, job.steps, units, each)
    parts = -(-job.steps // -(-job.steps // parts))  # no part is empty
    if parts > 1 or out_dtype != jnp.bfloat16:
        job = job._replace(parts=parts, staged=False, programs=(width,))
    source = _operands(kind, x, weights, width)
    sizes = None if group_sizes is None else jnp.pad(group_sizes.astype(jnp.int32), (0, groups - X))
    if job.staged:
        return _launch(job, source, sizes, jax.ShapeDtypeStruct((M, F), out_dtype), interpret)
    shape = parts, count, job.blocks * job.taken, most_tiles(M, X, width) * width
    sums = _launch(job, source, sizes, jax.ShapeDtypeStruct(shape, jnp.float32), interpret)
    sums = jnp.sum(sums[..., :M] if X == 1 else sums[..., columns_of(group_sizes, M, width)], axis=0)[:, :F]
    if count == 2:
        return (jax.nn.silu(sums[0]) * sums[1]).T.astype(out_dtype)
    out = sums[0].T.astype(out_dtype)
    # or XLA adds the parts where it takes a norm of the result, in a single block: 10 us instead of 4
    return lax.optimization_barrier(out) if parts > 1 else out
