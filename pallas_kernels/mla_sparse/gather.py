"""Copies chosen rows of an array in global memory to a tile in shared memory, as the matrix units read it.

Hopper's copy engine takes neighbouring rows only. So the threads of a warpgroup copy 16 bytes each, asynchronously; eight of them
copy 128 bytes of a row, a span of the swizzle."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.hopper import swizzled

ROWS = 64  # of a tile
SPAN = 64  # columns of 16 bits that eight threads copy
EIGHT = 1024  # bytes of eight rows of a span, which lie together
NONE = -1  # the number of a row of zeros
# Eight threads have the numbers of the same four rows, each sixteen further: those that they copy
NUMBERS = plgpu.Layout.TILED(plgpu.Tiling(((16,), (4,), (1,))), (-3,), (-2, plgpu.Replicated(8)), -1)
TILE = plgpu.RefType(swizzled(SPAN))


def numbers(slots_g, held, count):
    """The rows to copy: those in `slots_g`, up to `held`, of the `count` that there are. The others are zeros."""
    at = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=NUMBERS)
    chosen = plgpu.load(slots_g, layout=NUMBERS, optimized=False)
    return jnp.where(at < held, jnp.clip(chosen, 0, count - 1), NONE)


def fetch(source, first, chosen, tile, interpret):
    """Starts to copy columns from `first` on of the `chosen` rows of `source` to all of `tile`, `[ROWS width]`."""
    if interpret:
        row_by_row(lambda number: source[number, first : first + tile.shape[-1]], chosen, tile)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), NUMBERS, TILE))
    def copies(_, source, chosen, tile):
        spans, thread = tile.type.shape[-3], this_thread()
        position = arith.addi(arith.muli(thread.eight, of(EIGHT * spans)), thread.chunk(thread.part))
        to = moved(utils.memref_ptr(tile), position)
        for k, row in enumerate(rows(source, chosen, thread)):
            for span in range(spans):
                row.copy(2 * (first + SPAN * span), moved(to, EIGHT * (2 * k * spans + span)))

    copies(source, chosen, tile)


def wait(interpret):
    """Waits for the copies that this thread has started."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def waits(_):
        nvvm.cp_async_commit_group()
        nvvm.cp_async_wait_group(0)

    waits()


def row_by_row(read, chosen, tile):
    """The copies for the interpreter: `read(number)` is a row."""

    def row(k, _):
        number = chosen[k]
        values = read(jnp.maximum(number, 0)).astype(tile.dtype)
        tile[k] = jnp.where(number >= 0, values, jnp.zeros_like(values))
        return ()

    lax.fori_loop(0, ROWS, row, ())


# What follows is for code in MLIR, by thread.


def integer(bits):
    return ir.IntegerType.get_signless(bits)


def of(number):
    """A constant of 32 bits."""
    return utils.c(number, integer(32))


def moved(pointer, offset):
    """A pointer so many bytes further."""
    return utils.getelementptr(pointer, [offset], integer(8))


class Thread(NamedTuple):
    """The place of a thread: its part (of eight) of a row, that row (of eight), and these eight (of sixteen)."""

    part: Any
    row: Any
    eight: Any

    def chunk(self, number):
        """Where the 16 bytes of that number in a span of this row are, from the start of the eight rows."""
        swizzled = arith.shli(arith.xori(number, self.row), of(4))
        return arith.addi(arith.shli(self.row, of(7)), swizzled)


def this_thread():
    thread = utils.thread_idx()
    fields = ((0, 7), (3, 7), (6, 1))
    return Thread(*(arith.andi(arith.shrui(thread, of(shift)), of(mask)) for shift, mask in fields))


class Row(NamedTuple):
    """A chosen row: the pointer to this thread's first part, and whether there is such a row."""

    pointer: Any
    some: Any

    def copy(self, offset, to, size=16):
        """Starts to copy `size` bytes, zeros if there is no such row."""
        kind = nvvm.LoadCacheModifierKind.CG if size == 16 else nvvm.LoadCacheModifierKind.CA
        read = arith.select(self.some, of(size), of(0))
        nvvm.cp_async_shared_global(to, moved(self.pointer, offset), size, kind, cp_size=read)


def rows(source, chosen, thread, part=16):
    """The Row of each number that this thread has; its first part is `part` bytes long, or the row whole if that is 0."""
    kind = ir.MemRefType(source.type)
    stride = kind.shape[-1] * utils.bitwidth(kind.element_type) // 8
    first = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(source))
    own = arith.extui(integer(64), arith.muli(thread.part, of(part)))
    for register in chosen.registers.flat:
        number = vector.extract(register, dynamic_position=[], static_position=[0])
        some = arith.cmpi(arith.CmpIPredicate.sge, number, of(0))
        number = arith.extui(integer(64), arith.select(some, number, of(0)))
        offset = arith.addi(arith.muli(number, utils.c(stride, integer(64))), own)
        yield Row(moved(first, offset), some)
