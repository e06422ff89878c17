"""Copies chosen rows of codes in E4M3, and converts them to float16 in shared memory.

A tile is two halves of columns. The codes arrive in the right half, where a thread's own values will be: so it converts what it
has copied, and waits for no other thread. Its values are 16 columns of every 128."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.fp8 import GROUP
from pallas_kernels.mla_sparse.gather import (
    EIGHT,
    NUMBERS,
    TILE,
    integer,
    moved,
    of,
    row_by_row,
    rows,
    this_thread,
)

COPIES = 4  # rows of a thread


def fetch(codes, scale, chosen, halves, scale_s, interpret):
    """Starts to copy the `chosen` rows of `codes` and `scale` to the right of the `halves`, and to `scale_s`."""
    if interpret:
        _fetch_values(codes, scale, chosen, halves)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), NUMBERS, TILE, plgpu.RefType()))
    def copies(_, codes, scale, chosen, tile, scale_s):
        thread, groups = this_thread(), scale.type.shape[-1]
        own = _own(tile, thread)
        for k, row in enumerate(rows(codes, chosen, thread)):
            for group in range(groups):
                row.copy(GROUP * group, _at(own, k, group // 2, group % 2, groups))
        to = moved(utils.memref_ptr(scale_s), _scales_at(thread, groups))
        for k, row in enumerate(rows(scale, chosen, thread, part=0)):
            row.copy(0, moved(to, 16 * k * 4 * groups), 4 * groups)

    copies(codes, scale, chosen, halves[1], scale_s)


def convert(halves, rotary, scale_s, interpret):
    """Converts what this thread has copied, also of the rotary part, which is bfloat16."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(TILE, TILE, TILE, plgpu.RefType()))
    def converts(_, left, right, rotary, scale_s):
        thread, groups = this_thread(), scale_s.type.shape[-1]
        owns = [_own(half, thread) for half in (left, right)]
        scales = moved(utils.memref_ptr(scale_s), _scales_at(thread, groups))
        swap = arith.cmpi(arith.CmpIPredicate.uge, thread.part, of(4))
        for k in range(COPIES):
            codes = [_load(_at(owns[1], k, g // 2, g % 2, groups)) for g in range(groups)]
            for group, some in enumerate(codes):
                scale = llvm.load(ir.F32Type.get(), moved(scales, 4 * (16 * k * groups + group)))
                own, column = owns[group * 2 // groups], group % (groups // 2)
                for which, values in enumerate(_values(some, scale, swap)):
                    llvm.store(values, _at(own, k, column, which, groups), alignment=16)
        position = arith.addi(arith.muli(thread.eight, of(EIGHT)), thread.chunk(thread.part))
        for k in range(COPIES):
            _to_float16(moved(utils.memref_ptr(rotary), arith.addi(position, of(2 * EIGHT * k))))

    converts(*halves, rotary, scale_s)


def _own(half, thread):
    """Pointers to the two spans of 16 bytes of a half that are this thread's in its first row and 128 columns.

    Of the upper four threads the second comes first: so the eight of a row never write to the same banks."""
    spans = half.type.shape[-3]
    upper = arith.shrui(thread.part, of(2))
    chunk = arith.ori(arith.shli(arith.andi(thread.part, of(3)), of(1)), upper)
    base = arith.addi(arith.muli(thread.eight, of(EIGHT * spans)), arith.muli(upper, of(EIGHT)))
    pointer = moved(utils.memref_ptr(half), base)
    return [moved(pointer, thread.chunk(arith.xori(chunk, of(which)))) for which in range(2)]


def _at(own, k, column, which, groups):
    """The pointer for row k and 128 columns of a half, which has as many spans as the codes have groups."""
    return moved(own[which], EIGHT * (2 * k * groups + 2 * column))


def _scales_at(thread, groups):
    """The offset of the scales of this thread's first row."""
    row = arith.addi(arith.shli(thread.eight, of(3)), thread.row)
    return arith.muli(row, of(4 * groups))


def _load(pointer):
    return llvm.load(ir.VectorType.get((4,), integer(32)), pointer, alignment=16)


def _values(codes, scale, swap):
    """The values of 16 codes in float16: two vectors of eight, the second first if `swap`."""
    pair = llvm.inline_asm(integer(32), [scale], "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f")
    words = [vector.extract(codes, dynamic_position=[], static_position=[k]) for k in range(4)]
    values = [half for word in words for half in _widened(word, pair)]
    first, second = values[:4], values[4:]
    eights = ir.VectorType.get((4,), integer(32))
    for one, other in ((first, second), (second, first)):
        yield vector.from_elements(
            eights, [arith.select(swap, b, a) for a, b in zip(one, other, strict=True)]
        )


def _widened(codes, scale):
    """Four codes times a pair of equal scales -> two pairs in float16."""
    word = integer(32)
    made = llvm.inline_asm(
        llvm.StructType.get_literal([word, word]),
        [codes, scale],
        """{
        .reg .b16 low, high;
        .reg .b32 first, second;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 second, high;
        mul.rn.f16x2 $0, first, $3;
        mul.rn.f16x2 $1, second, $3;
        }""",
        "=r,=r,r,r",
    )
    return [llvm.extractvalue(word, made, [k]) for k in range(2)]


def _to_float16(pointer):
    """Converts eight numbers in bfloat16 where they are."""

    def eight(kind):
        return ir.VectorType.get((8,), kind.get())

    wide = arith.extf(eight(ir.F32Type), llvm.load(eight(ir.BF16Type), pointer, alignment=16))
    llvm.store(arith.truncf(eight(ir.F16Type), wide), pointer, alignment=16)


def _fetch_values(codes, scale, chosen, halves):
    """The same with its conversion, for the interpreter."""
    first = 0
    for half in halves:
        width = half.shape[-1]

        def read(number, first=first, width=width):
            scales = jnp.repeat(scale[number].astype(jnp.float16), GROUP)[first : first + width]
            return codes[number, first : first + width].astype(jnp.float16) * scales

        row_by_row(read, chosen, half)
        first += width
