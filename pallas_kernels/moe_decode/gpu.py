"""Experts of a few tokens on a Hopper GPU: two kernels that stream the chosen weights through the matrix units.

The speed of HBM reads decides. Every multiprocessor takes the same number of pieces of 64 rows of weights, and keeps a ring of
loads in flight across pieces; one warpgroup issues the loads, the other multiplies. A product takes at least eight tokens, so
each token has a column, and the columns of other tokens are ignored. The copy engine fills those of no token with zeros.

The first kernel writes SwiGLU's activations times the expert's weight. So the second is, for each token, one sum over the
activations of all its experts. Its depth can be cut anywhere: into as many parts as keep the multiprocessors evenly busy. The
parts are written in float32, and XLA fuses their sum with the next op."""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.hopper import LOG2E, swizzled

ROWS = 64  # of weights in a product
COLUMNS = 8  # of tokens
WORKER, FEEDER = 0, 1


class Job(NamedTuple):
    """The constants of a kernel. A line is the range of one sum: an expert, or all experts of a token."""

    units: int
    lines: int
    blocks: int  # of ROWS rows of weights
    steps: int  # of a line
    depth: int  # of a step
    slots: int
    weights: int  # gate and up, or down
    parts: int = 1  # into which the depth of a line is cut

    @property
    def part(self) -> int:
        """Steps of a part; the last may have fewer."""
        return -(-self.steps // self.parts)

    @property
    def pieces(self) -> int:
        return self.lines * self.blocks * self.parts


class Piece(NamedTuple):
    line: jax.Array
    block: jax.Array
    part: jax.Array
    start: jax.Array  # steps
    stop: jax.Array


def _piece(job: Job, i) -> Piece:
    """This unit's piece i; adjacent pieces are of one line."""
    at = lax.axis_index("unit") + i * job.units
    line = lax.div(at, jnp.int32(job.blocks * job.parts))
    rest = lax.rem(at, jnp.int32(job.blocks * job.parts))
    block = lax.div(rest, jnp.int32(job.parts))
    part = lax.rem(rest, jnp.int32(job.parts))
    return Piece(line, block, part, part * job.part, jnp.minimum((part + 1) * job.part, job.steps))


def _stream(job: Job, load, leave, x_s, w_s, full, free):
    """Processes this unit's pieces: `load(piece, k, slot)` issues a step's loads, `leave(piece, sums)` takes a piece's sums."""
    count = lax.div(job.pieces - lax.axis_index("unit") + (job.units - 1), jnp.int32(job.units))
    role = lax.axis_index("role")

    def slot_of(step):
        return lax.rem(step, jnp.int32(job.slots))

    def feed(i, step):
        piece = _piece(job, i)

        def order(k, step):
            pl.when(step >= job.slots)(lambda: plgpu.barrier_wait(free.at[slot_of(step)]))
            load(piece, k, slot_of(step))
            return step + 1

        return lax.fori_loop(piece.start, piece.stop, order, step)

    def work(i, step):
        piece = _piece(job, i)

        def run(*accs):
            def add(k, step):
                slot = slot_of(step)
                plgpu.barrier_wait(full.at[slot])
                for w, acc in enumerate(accs):
                    plgpu.wgmma(acc, w_s.at[slot, pl.ds(w * ROWS, ROWS)], x_s.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(len(accs))  # the previous step is done
                pl.when(k > piece.start)(lambda: plgpu.barrier_arrive(free.at[slot_of(step - 1)]))
                return step + 1

            lax.fori_loop(piece.start, piece.stop, add, step)
            return [acc[...] for acc in accs]

        sums = pl.run_scoped(run, *[plgpu.ACC((ROWS, COLUMNS), jnp.float32)] * job.weights)
        step = step + (piece.stop - piece.start)
        plgpu.barrier_arrive(free.at[slot_of(step - 1)])
        leave(piece, sums)
        return step

    @pl.when(role == WORKER)
    def _():
        lax.fori_loop(0, count, work, jnp.int32(0))

    @pl.when(role == FEEDER)
    def _():
        step = lax.fori_loop(0, count, feed, jnp.int32(0))

        def drain(step, _):  # every completion must be observed
            plgpu.barrier_wait(free.at[slot_of(step)])
            return ()

        lax.fori_loop(jnp.maximum(step - job.slots, 0), step, drain, ())


def _expert(ids_g, pair, experts):
    """The expert of a (token, choice) pair; any expert if there is none."""
    return jnp.clip(ids_g[pair], 0, experts - 1)


def _tokens(k):
    """The rows of all tokens, and of as many more as a product takes. Pallas takes a static slice only within an array."""
    return pl.ds(pl.multiple_of(k * 0, COLUMNS), COLUMNS)


def _of_token(sums, token):
    """The column of a token."""
    column = plgpu.broadcasted_iota(jnp.int32, sums.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(column == token, sums, 0.0).sum(axis=1)


def _hidden(ids_g, share_g, x_g, gate_g, up_g, out_g, x_s, w_s, full, free, *, job: Job, chosen):
    def load(piece, k, slot):
        expert = _expert(ids_g, piece.line, gate_g.shape[0])
        columns = pl.ds(pl.multiple_of(k * job.depth, job.depth), job.depth)
        rows = pl.ds(pl.multiple_of(piece.block * ROWS, ROWS), ROWS)
        for w, source in enumerate((gate_g, up_g)):
            plgpu.copy_gmem_to_smem(
                source.at[expert, rows, columns], w_s.at[slot, pl.ds(w * ROWS, ROWS)], full.at[slot]
            )
        plgpu.copy_gmem_to_smem(x_g.at[_tokens(k), columns], x_s.at[slot], full.at[slot])

    def leave(piece, sums):
        token = lax.div(piece.line, jnp.int32(chosen))
        gate, up = (_of_token(x, token) for x in sums)
        is_some = ids_g[piece.line] < gate_g.shape[0]
        share = jnp.where(is_some, share_g[piece.line].astype(jnp.float32), 0.0)
        share = lax.broadcast_in_dim(share, (ROWS,), ())
        hidden = gate * (1 / (1 + jnp.exp2(gate * -LOG2E))) * up * share
        hidden = jnp.where(share == 0, 0.0, hidden)  # a token without this expert may hold anything
        rows = pl.ds(pl.multiple_of(piece.block * ROWS, ROWS), ROWS)
        out_g[piece.line - token * chosen, token, rows] = hidden.astype(out_g.dtype)

    _stream(job, load, leave, x_s, w_s, full, free)


def _down(ids_g, hidden_g, down_g, out_g, h_s, w_s, full, free, *, job: Job, chosen):
    each = job.steps // chosen  # of an expert

    def load(piece, k, slot):
        choice = lax.div(k, jnp.int32(each))
        expert = _expert(ids_g, piece.line * chosen + choice, down_g.shape[0])
        columns = pl.ds(pl.multiple_of((k - choice * each) * job.depth, job.depth), job.depth)
        rows = pl.ds(pl.multiple_of(piece.block * ROWS, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(down_g.at[expert, rows, columns], w_s.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(hidden_g.at[choice, _tokens(k), columns], h_s.at[slot], full.at[slot])

    def leave(piece, sums):
        out_g[piece.line, piece.part, pl.ds(pl.multiple_of(piece.block * ROWS, ROWS), ROWS)] = _of_token(
            sums[0], piece.line
        )

    _stream(job, load, leave, h_s, w_s, full, free)


def _launch(kernel, job: Job, out_type, interpret, *arrays):
    rows = job.weights * ROWS
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((job.slots, COLUMNS, job.depth), jnp.bfloat16, transforms=swizzled(64)),
            plgpu.SMEM((job.slots, rows, job.depth), jnp.bfloat16, transforms=swizzled(64)),
            plgpu.Barrier(num_arrivals=1 + job.weights, num_barriers=job.slots),
            plgpu.Barrier(num_barriers=job.slots),
        ],
        grid=(min(job.units, job.pieces),),
        grid_names=("unit",),
        num_threads=2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(*arrays)


def parts_of(pieces: int, steps: int, units: int, most: int = 16) -> int:
    """The number of parts of each piece's depth with which the busiest multiprocessor has the least to do."""

    def busiest(parts):
        return -(-pieces * parts // units) * -(-steps // parts)

    parts = min(range(1, min(most, steps) + 1), key=busiest)
    return -(-steps // -(-steps // parts))  # no part is empty


# Jitted, so that all layers of a model are lowered once
@functools.partial(jax.jit, static_argnames=("units", "interpret"))
def moe_decode(x, topk_ids, topk_weights, gate, up, down, *, units, interpret=None):
    """As `moe_decode` of the package; `interpret` runs the kernels on a CPU."""
    (n, D), K, F = x.shape, topk_ids.shape[1], gate.shape[1]
    share, ids = topk_weights.reshape(-1), topk_ids.reshape(-1).astype(jnp.int32)

    def launch(kernel, job, out_type, *arrays):
        job = job._replace(units=min(units, job.pieces))
        return _launch(functools.partial(kernel, job=job, chosen=K), job, out_type, interpret, ids, *arrays)

    depth, slots = min(tuning.MOE_DECODE["depth"], D), tuning.MOE_DECODE["slots"]
    job = Job(units, n * K, F // ROWS, -(-D // depth), depth, slots[0], 2)
    hidden = launch(_hidden, job, jax.ShapeDtypeStruct((K, n, F), x.dtype), share, x, gate, up)
    depth = min(tuning.MOE_DECODE["depth"], F)
    job = Job(units, n, D // ROWS, K * -(-F // depth), depth, slots[1], 1)
    job = job._replace(parts=parts_of(job.pieces, job.steps, units))
    parts = launch(_down, job, jax.ShapeDtypeStruct((n, job.parts, D), jnp.float32), hidden, down)
    return parts.sum(1).astype(x.dtype)
