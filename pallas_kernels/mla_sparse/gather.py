"""Copies chosen rows of an array in global memory to a tile in shared memory, as the matrix units read it.

Hopper's copy engine takes neighbouring rows only. So the threads of a warpgroup copy 16 bytes each, asynchronously; eight of them
copy 128 bytes of a row, a span of the swizzle."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.hopper import swizzled

ROWS = 64  # of a tile
SPAN = 64  # columns that eight threads copy
NONE = -1  # the number of a row of zeros
# Eight threads have the numbers of the same four rows, each sixteen further: those that they copy
NUMBERS = plgpu.Layout.TILED(plgpu.Tiling(((16,), (4,), (1,))), (-3,), (-2, plgpu.Replicated(8)), -1)


def numbers(slots_g, held, count):
    """The rows to copy: those in `slots_g`, up to `held`, of the `count` that there are. The others are zeros."""
    at = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=NUMBERS)
    chosen = plgpu.load(slots_g, layout=NUMBERS, optimized=False)
    return jnp.where(at < held, jnp.clip(chosen, 0, count - 1), NONE)


def fetch(source, first, chosen, tile, interpret):
    """Starts to copy columns from `first` on of the `chosen` rows of `source` to all of `tile`, `[ROWS width]`."""
    if interpret:
        _fetch_row_by_row(source, first, chosen, tile)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), NUMBERS, plgpu.RefType(swizzled(SPAN))))
    def copies(_, source, chosen, tile):
        stride, spans = 2 * source.type.shape[-1], tile.type.shape[-3]
        to, lane = _of_thread(tile, spans)
        source = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(source))
        for k, register in enumerate(chosen.registers.flat):
            at, size = _row(register, stride)
            row = utils.getelementptr(source, [arith.addi(at, lane)], _int(8))
            for span in range(spans):
                there = utils.getelementptr(to, [1024 * (2 * k * spans + span)], _int(8))
                here = utils.getelementptr(row, [2 * (first + SPAN * span)], _int(8))
                nvvm.cp_async_shared_global(there, here, 16, nvvm.LoadCacheModifierKind.CG, cp_size=size)

    copies(source, chosen, tile)


def arrive(interpret):
    """Waits for the copies of all threads of this warpgroup; the matrix units see them then."""
    if not interpret:

        @plgpu.inline_mgpu()
        def wait(_):
            nvvm.cp_async_commit_group()
            nvvm.cp_async_wait_group(0)

        wait()
    plgpu.commit_smem()


def _int(bits):
    return ir.IntegerType.get_signless(bits)


def _of_thread(tile, spans):
    """Where this thread writes in the first span of its first row, and its bytes of a span."""
    i32 = _int(32)
    thread = utils.thread_idx()
    part = arith.andi(thread, utils.c(7, i32))
    row = arith.andi(
        arith.shrui(thread, utils.c(3, i32)), utils.c(7, i32)
    )  # of the eight that are swizzled together
    eight = arith.andi(arith.shrui(thread, utils.c(6, i32)), utils.c(1, i32))
    to = arith.shli(arith.xori(part, row), utils.c(4, i32))
    to = arith.addi(to, arith.shli(row, utils.c(7, i32)))
    to = arith.addi(to, arith.muli(eight, utils.c(1024 * spans, i32)))
    lane = arith.extui(_int(64), arith.shli(part, utils.c(4, i32)))
    return utils.getelementptr(utils.memref_ptr(tile), [to], _int(8)), lane


def _row(register, stride):
    """The offset in bytes of the row whose number a register has, and how many of 16 bytes to read: the others become zeros."""
    i32 = _int(32)
    number = vector.extract(register, dynamic_position=[], static_position=[0])
    some = arith.cmpi(arith.CmpIPredicate.sge, number, utils.c(0, i32))
    size = arith.select(some, utils.c(16, i32), utils.c(0, i32))
    at = arith.extui(_int(64), arith.select(some, number, utils.c(0, i32)))
    return arith.muli(at, utils.c(stride, _int(64))), size


def _fetch_row_by_row(source, first, chosen, tile):
    """The same for the interpreter."""

    def row(k, _):
        number = chosen[k]
        values = source[jnp.maximum(number, 0), first : first + tile.shape[-1]]
        tile[k] = jnp.where(number >= 0, values, jnp.zeros_like(values))
        return ()

    lax.fori_loop(0, ROWS, row, ())
