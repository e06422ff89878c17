"""Converts E4M3 codes to float16 in the registers that feed the left operand of Hopper's matrix units.

Cached tokens stay E4M3 in shared memory, a row of codes per token. The matrix units take 16-bit numbers, and each thread holds
pairs of adjacent ones, which is not the order in which codes are easy to load:
- `keys`, tokens by columns: a thread loads four adjacent codes and uses them as two pairs that are eight columns apart. So each
  16 columns are permuted, as by `shuffled`.
- `values`, columns by tokens: the transposing loads move 16 bits, two columns of a token. A pair of tokens is taken from two
  such loads; of each 16 columns the even ones come first, then the odd ones. `natural` restores the order in the sums over
  tokens."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

MATRIX = plgpu.Layout.WGMMA
QUADS = plgpu.Layout.TILED(plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), (-7,), (-3, -2), -1)
NATURAL = plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (8, 16), (2, 2))), (-5,), (-3, -4), -1)


def swizzled(width):
    """Transforms of a tile of codes: a row of `width` codes is one span of the swizzle."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width)


def wide(width):
    """A layout of 64 rows of `width` bytes, 8 per thread, free of bank conflicts for bytes and for 16-bit numbers."""
    rows = 256 // width
    return plgpu.Layout.TILED(plgpu.Tiling(((4 * rows, width), (rows, width), (8,))), (-5,), (-3, -2), -1)


def shuffled(q, interpret):
    """`q` with its columns in the order of `keys`."""
    if interpret:
        return q
    fours = q.reshape(*q.shape[:-1], -1, 4, 2, 2)
    return fours.swapaxes(-3, -2).reshape(q.shape)


def keys(ref, interpret):
    """`[tokens columns]` in float16, each 16 columns permuted as by `shuffled`."""
    if interpret:
        return ref[...].astype(jnp.float16)
    x = plgpu.load(ref, layout=QUADS).astype(jnp.float16)

    @plgpu.inline_mgpu(
        arg_types=(QUADS,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=MATRIX)
    )
    def relabelled(_, x):
        layout = MATRIX.to_mgpu()
        registers = np.empty(layout.registers_shape(x.shape), dtype=object)
        for (row, four, _, _, half, *_), register in np.ndenumerate(x.registers):
            for k in range(2):
                registers[row, 2 * four + k, 0, 0, half] = utils.vector_slice(
                    register, slice(2 * k, 2 * k + 2)
                )
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return relabelled(x)


def values(ref, interpret):
    """`[columns tokens]` in float16; of each 16 columns the even ones come first."""
    if interpret:
        return ref[...].astype(jnp.float16).T
    tokens, width = ref.shape
    out = plgpu.ShapeDtypeStruct((width, tokens), jnp.float16, layout=MATRIX)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(width)),), return_type=out)
    def transposed(_, ref):
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        pair, eights = (
            ir.VectorType.get((2,), ir.F16Type.get()),
            ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        )
        layout, base = MATRIX.to_mgpu(), utils.memref_ptr(ref)
        registers = np.empty(layout.registers_shape((width, tokens)), dtype=object)
        thread = utils.thread_idx()
        lane = arith.andi(thread, utils.c(31, i32))
        warp = arith.andi(arith.shrui(thread, utils.c(5, i32)), utils.c(3, i32))
        row = arith.muli(lane, utils.c(width, i32))
        # swizzled: the position of 16 bytes in a row is XORed with bits 7 and up of the row's offset
        spans = arith.andi(arith.shrui(row, utils.c(7, i32)), utils.c(width // 16 - 1, i32))
        for block in range(width // 64):
            span = arith.xori(arith.addi(warp, utils.c(4 * block, i32)), spans)
            at = arith.addi(row, arith.muli(span, utils.c(16, i32)))
            for some in range(tokens // 32):
                fours = nvvm.ldmatrix(
                    utils.getelementptr(base, [arith.addi(at, utils.c(32 * some * width, i32))], i8),
                    layout=nvvm.MMALayout.col,
                    num=4,
                    shape=eights,
                    elt_type=nvvm.LdStMatrixEltType.B16,
                )
                for k in range(4):
                    both = _widened(llvm.extractvalue(i32, fours, [k]))
                    for odd, register in enumerate(both):
                        registers[block, 4 * some + k, 0, 0, odd] = utils.bitcast(register, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return transposed(ref)


def _widened(codes):
    """The codes of two tokens and two columns -> for each column a pair of tokens in float16."""
    i32 = ir.IntegerType.get_signless(32)
    made = llvm.inline_asm(
        llvm.StructType.get_literal([i32, i32]),
        [codes],
        """{
        .reg .b32 turned;
        .reg .b16 even, odd;
        prmt.b32 turned, $2, 0, 0x3120;
        mov.b32 {even, odd}, turned;
        cvt.rn.f16x2.e4m3x2 $0, even;
        cvt.rn.f16x2.e4m3x2 $1, odd;
        }""",
        "=r,=r,r",
    )
    return [llvm.extractvalue(i32, made, [k]) for k in range(2)]


def natural(x, interpret):
    """Sums `[columns queries]` -> `[queries columns]`, with the columns in order."""
    if interpret:
        return x.T
    shape = x.shape[::-1]

    @plgpu.inline_mgpu(
        arg_types=(MATRIX,), return_type=plgpu.ShapeDtypeStruct(shape, x.dtype, layout=NATURAL)
    )
    def paired(_, x):
        layout = NATURAL.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for column, query in np.ndindex(x.registers.shape[:2]):
            even, odd = (x.registers[column, query, 0, 0, k, 0, 0, 0, 0] for k in range(2))
            for k in range(2):
                both = [vector.extract(one, dynamic_position=[], static_position=[k]) for one in (even, odd)]
                registers[query, column, 0, 0, 0, 0, k] = vector.from_elements(even.type, both)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return paired(x)


def clean(ref, held):
    """Writes zeros to the rows from `held` on: a weight of zero times NaN is NaN."""
    layout = wide(ref.shape[1])
    x = plgpu.load(ref, layout=layout).astype(jnp.float16)  # `where` does not take 8-bit numbers
    at = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
    ref[...] = jnp.where(at < held, x, jnp.zeros_like(x)).astype(ref.dtype)
