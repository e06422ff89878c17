"""Reordered weights against the formats' own definitions: file bytes, numbers and a kernel's unpacking by threads; the kernel,
interpreted, against the specification."""

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from mla_jax.base import qtensor
from mla_jax.base.qtensor import QTensor
from pallas_kernels import choice, packed, testing
from pallas_kernels.packed import COLUMNS, KINDS, PART, ROWS
from pallas_kernels.quantized_matmul import CHECKS, Unsupported, quantized_matmul
from pallas_kernels.ragged_dot import CHECKS as GROUPED
from pallas_kernels.ragged_dot import ragged_dot

pytestmark = pytest.mark.deep

each_format = pytest.mark.parametrize("format", KINDS)
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")
SHAPE = 136, 512


def any_parts(format, shape, seed=0):
    """Parts of any bytes."""
    rng = np.random.default_rng(seed)
    specs = qtensor.abstract(format, shape).parts
    parts = (rng.integers(0, 256, (*s.shape, np.dtype(s.dtype).itemsize), np.uint8).view(s.dtype)[..., 0] for s in specs)
    return tuple(jnp.asarray(part) for part in parts)


def reordered(format, shape=SHAPE, seed=0):
    parts = packed.random_parts(format, shape, seed)
    qtensor.validated(QTensor(format, parts, shape))
    return packed.reorder(format, parts), np.asarray(qtensor.dequantize(QTensor(format, parts, shape)), np.float64)


@each_format
@pytest.mark.parametrize("shape", [SHAPE, (2, 64, 256), (1, 256)])
def test_reordering_is_undone_to_the_bit(format, shape):
    parts = any_parts(format, shape)
    w = packed.reorder(format, parts)
    assert w.shape == shape[-2:]
    for found, part in zip(packed.restore(w), parts, strict=True):
        assert (found.shape, found.dtype) == (part.shape, part.dtype)
        assert np.asarray(found).tobytes() == np.asarray(part).tobytes()


@each_format
def test_reordered_weights_have_the_numbers_of_the_file(format):
    w, wanted = reordered(format)
    np.testing.assert_array_equal(np.asarray(packed.dequantize(w), np.float64), wanted)
    if format.startswith("Q"):
        (blocks,) = packed.restore(w)
        by_package = gguf.quants.dequantize(np.asarray(blocks).reshape(SHAPE[0], -1), GGMLQuantizationType[format])
        np.testing.assert_array_equal(by_package, wanted)


@each_format
def test_reordered_weights_take_hardly_more_memory(format):
    shape = 128, 4096
    w = packed.reorder(format, packed.random_parts(format, shape))
    assert sum(array.nbytes for array in w.arrays) <= 1.03 * qtensor.nbytes(format, shape) + 1024  # scales per row are padded


def by_threads(w):
    """All weights as a kernel's threads unpack them."""
    kind, F, format = KINDS[w.format], SHAPE[0], w.format
    unpack = jax.jit(packed.part, static_argnums=(0, 2))
    got = np.zeros((-(-F // ROWS) * ROWS, SHAPE[1]))
    for tile in range(len(got) // ROWS):
        for column in range(0, SHAPE[1], PART):
            arrays = [a[column // columns, tile] for a, columns in zip(w.arrays, kind.columns, strict=False)]
            place = slice(tile * ROWS, (tile + 1) * ROWS), slice(column, column + PART)
            got[place] = np.asarray(unpack(format, arrays, column % COLUMNS // PART), np.float64) / packed.DOWN
    if kind.by_row:
        got *= np.asarray(w.arrays[-1], np.float64)[: len(got), None]
    assert not got[F:].any()
    return got[:F]


@each_format
def test_threads_unpack_every_weight_to_its_place(format):
    """To bfloat16: scales, minima and products are rounded, codes are not."""
    w, wanted = reordered(format)
    got = by_threads(w)
    np.testing.assert_allclose(got, wanted, atol=2.01 * 2**-8 * np.abs(wanted).max(), rtol=0)
    assert testing.error(got, wanted) < 2**-8


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-15, 1.0, 1000.0])
@pytest.mark.parametrize("format", ["Q8_0", "Q4_K", "Q6_K"])
def test_scales_may_be_the_smallest_and_large_float16(format, scale):
    (blocks,) = packed.random_parts(format, SHAPE)
    halves = {"Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[format]
    bytes = np.array([scale], np.float16).view(np.uint8)
    for at in halves:
        blocks = blocks.at[..., at : at + 2].set(bytes)
    wanted = np.asarray(qtensor.dequantize(QTensor(format, (blocks,), SHAPE)), np.float64)
    assert testing.error(by_threads(packed.reorder(format, (blocks,))), wanted) < 2**-8


@each_format
def test_the_fallback_multiplies_reordered_weights(format):
    w, wanted = reordered(format)
    x = jax.random.normal(jax.random.key(1), (3, SHAPE[1]))
    assert testing.error(quantized_matmul(x, w, impl="xla"), np.asarray(x, np.float64) @ wanted.T) < 1e-5
    stack, sizes = w[None], jnp.array([2])
    assert testing.error(ragged_dot(x, stack, sizes, impl="xla")[:2], np.asarray(x[:2], np.float64) @ wanted.T) < 1e-5


def test_formats_and_depths_that_cannot_be_reordered_are_refused_with_the_reason():
    assert packed.why_not("Q4_K", (100, 512)) is None
    assert "multiples of 256, not [100, 128]" in packed.why_not("Q4_K", (100, 128))
    assert "multiples of 128" in packed.why_not("int4_g32", (2, 100, 96))
    assert "not IQ2_XXS" in packed.why_not("IQ2_XXS", (100, 512))


@hopper
def test_the_gpu_kernel_takes_one_format_and_rows_as_deep():
    (four, _), (eight, _) = reordered("Q4_K"), reordered("int8")
    x = jnp.zeros((2, 512), jnp.bfloat16)
    assert CHECKS["mosaic_gpu"](x, four) is None
    assert "256 and 512" in CHECKS["mosaic_gpu"](x[:, :256], four)
    assert "float32" in CHECKS["mosaic_gpu"](x.astype(jnp.float32), four)
    assert GROUPED["mosaic_gpu"](x, four[None], four[None]) is None
    assert "one format" in GROUPED["mosaic_gpu"](x, four[None], eight[None])
    with pytest.raises(Unsupported, match="multiples of 8"):
        quantized_matmul(x, reordered("int8", (100, 512))[0], impl="mosaic_gpu")


@hopper
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted):
    text, rows = interpreted("packed")
    assert {name.split(",")[0] for name in rows} == KINDS.keys()
    assert all(row["error"] <= 2 * row["fallback"] for row in rows.values()), json.dumps(rows)
    assert "RACE DETECTED" not in text
