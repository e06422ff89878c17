"""Unpacks weights of packed.py in the registers of a Hopper GPU."""

from collections.abc import Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from pallas_kernels import packed
from pallas_kernels.packed import KINDS, PART, ROWS


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _constant(word: int | np.integer) -> ir.Value:
    word = int(word)
    return utils.c(word - (word >> 31 << 32), _i32())


def _twice(x: float) -> int:
    """A word of two bfloat16; x is exact in them."""
    return int(np.float32(x).view(np.uint32) >> 16) * 0x00010001


class Word:
    """32 bits in a register."""

    def __init__(self, value: ir.Value | int):
        self.value = _constant(value) if isinstance(value, int) else value

    def __rshift__(self, bits: int):
        return Word(arith.shrui(self.value, _constant(bits)))

    def __lshift__(self, bits: int):
        return Word(arith.shli(self.value, _constant(bits)))

    def __and__(self, mask: int | np.integer):
        return Word(arith.andi(self.value, _constant(mask)))

    def __or__(self, other: "Word | int"):
        return Word(arith.ori(self.value, other.value if isinstance(other, Word) else _constant(other)))


class Real:
    """A float32 in a register."""

    def __init__(self, value: ir.Value | float):
        self.value = utils.c(value, _f32()) if isinstance(value, float) else value

    def __sub__(self, other: "Real"):
        return Real(arith.subf(self.value, other.value))

    def __mul__(self, factor: float):
        return Real(arith.mulf(self.value, Real(factor).value))


def _asm(result: ir.Type, code: str, constraints: str, *operands: Word | Real) -> ir.Value:
    return llvm.inline_asm(result, [x.value for x in operands], code, constraints)


class Lanes:
    """The arithmetic of `packed.pairs` as instructions of a thread."""

    def constant(self, x: float) -> Word:
        return Word(_twice(x))

    def times(self, a: Word, b: Word) -> Word:
        return Word(_asm(_i32(), "mul.bf16x2 $0, $1, $2;", "=r,r,r", a, b))

    def number(self, code: Word, scale: Word, least: Word) -> Word:
        return Word(_asm(_i32(), "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", code, scale, least))

    def both(self, word: Word, half: int) -> Word:
        return Word(_asm(_i32(), f"prmt.b32 $0, $1, $1, {0x3232 if half else 0x1010};", "=r,r", word))

    def half(self, word: Word, half: int) -> Real:
        bits = arith.trunci(ir.IntegerType.get_signless(16), (word >> 16 * half).value)
        return Real(arith.extf(_f32(), arith.bitcast(ir.F16Type.get(), bits)))

    def real(self, word: Word) -> Real:
        return Real(arith.bitcast(_f32(), word.value))

    def times_byte(self, x: Real, word: Word, byte: int) -> Real:
        """A byte below the bits of 2**23 is that number plus the byte; the product with the sum is exact before 2**23 x leave."""
        bits = _asm(_i32(), f"prmt.b32 $0, $1, $2, {0x7540 | byte};", "=r,r,r", word, Word(0x4B000000))
        large = Real(arith.bitcast(_f32(), bits))
        return Real(_asm(_f32(), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", large, x, x * -(2.0**23)))

    def pair(self, x: Real) -> Word:
        return Word(_asm(_i32(), "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", x))


def _words(ref, first, count: int) -> list[Word]:
    """Neighbouring words of shared memory, one load for up to four."""
    one = ir.VectorType.get((count,), _i32())
    words = llvm.load(one, utils.getelementptr(utils.memref_ptr(ref), [first], _i32()))
    return [Word(vector.extract(words, dynamic_position=[], static_position=[k])) for k in range(count)]


def _thread() -> Word:
    """The number of this thread in its warpgroup."""
    return Word(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))) & 127


def _plane(ref, bits: int, part: int) -> list[Word]:
    """This thread's words of a plane of a tile."""
    count = packed.vector(bits)
    mine = arith.muli(_thread().value, _constant(count))
    starts = (arith.addi(mine, _constant((part * bits + k) * 128)) for k in range(0, bits, count))
    return [word for start in starts for word in _words(ref, start, count)]


def _scales(ref, extra: packed.Extra, part: int) -> list[Word]:
    """The words of this thread's two rows: those of four threads."""
    row = _thread() >> 2
    start = 32 * extra.words * part if extra.period == PART else 0
    mine = arith.addi(arith.muli(row.value, _constant(extra.words)), _constant(start))
    return _words(ref, mine, extra.words)


def unpack(format: str, tile: Sequence, part: int, interpret) -> jax.Array:
    """64 rows and the part (0 or 1) of their columns, `[64 64]` bfloat16 as a left operand, from a tile in shared memory.

    `tile` has a reference for each array but scales per row, which are left to the sums."""
    if interpret:
        return packed.part(format, [ref[...] for ref in tile], part)
    kind, shape, layout = KINDS[format], (ROWS, PART), plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(tile),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=layout),
    )
    def registers(_, *refs):
        codes = refs[: len(kind.planes)]
        scales = refs[len(kind.planes) :]
        planes = [_plane(ref, bits, part) for ref, bits in zip(codes, kind.planes, strict=True)]
        extras = [_scales(ref, extra, part) for ref, extra in zip(scales, kind.extras, strict=True)]
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        words = [utils.bitcast(word.value, pair) for word in packed.pairs(format, Lanes(), planes, extras)]
        of = layout.to_mgpu()
        ordered = np.array(words, dtype=object).reshape(of.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=ordered, _layout=of, _is_signed=None)

    return registers(*tile)
