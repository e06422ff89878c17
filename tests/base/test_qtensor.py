"""Packed tensors against those who define their formats: the `gguf` package, ml_dtypes and torch, bit for bit."""

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.errors import BadFile, Unsupported
from mla_jax.base.gguf_blocks import PLAIN_TYPES, TYPES
from mla_jax.base.qtensor import FORMATS, QTensor, abstract, dequantize, format_of, nbytes, unsound, validated

OURS = sorted(FORMATS.keys() - TYPES.keys())
unpacked = jax.jit(dequantize, static_argnums=1)
SPECIAL = np.frombuffer(bytes.fromhex("0001028083fcfbfe7c7b7e7fff0304"), np.uint8)  # zeros, denormals, infinities and NaN as f16


def assert_same_bits(found: np.ndarray, expected: np.ndarray):
    """Equal to the sign of a zero; NaN counts as NaN, whatever its payload."""
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape
    same = found.view(np.uint32) == expected.view(np.uint32)
    np.testing.assert_array_equal(same | (np.isnan(found) & np.isnan(expected)), True)


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Half of the blocks of any bytes alike, half of those that make extreme scales."""
    extreme = rng.random((*shape[:-1], 1)) < 0.5
    return np.where(extreme, rng.choice(SPECIAL, shape), rng.integers(0, 256, shape, np.uint8))


def packed(name: str, rng: np.random.Generator, *lead: int, blocks: int) -> QTensor:
    kind = TYPES[name]
    part = random_bytes(rng, (*lead, blocks, kind.bytes))
    return validated(QTensor(name, (jnp.asarray(part),), (*lead, blocks * kind.values)))


def q2_0(blocks: np.ndarray) -> np.ndarray:
    """As llama.cpp's dequantize_row_q2_0 has it, one value after the other: the package does not know the type yet."""
    codes = np.stack([blocks[..., 2 + j // 4] >> 2 * (j % 4) & 3 for j in range(64)], axis=-1).astype(np.float32) - 1
    with np.errstate(all="ignore"):
        values = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32) * codes
    return values.reshape(*blocks.shape[:-2], -1)


def by_package(q: QTensor) -> np.ndarray:
    if q.format == "Q2_0":
        return q2_0(np.asarray(q.parts[0]))
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(np.asarray(q.parts[0]).reshape(*q.shape[:-1], -1), Kind[q.format])


def random_part(rng: np.random.Generator, spec: jax.ShapeDtypeStruct) -> jax.Array:
    if np.dtype(spec.dtype).itemsize == 1:
        return jnp.asarray(rng.integers(0, 256, spec.shape, np.uint8).view(spec.dtype))
    return jnp.asarray(rng.standard_normal(spec.shape).astype(spec.dtype))


def random_tensor(format: str, shape: tuple[int, ...], seed: int = 0) -> QTensor:
    rng = np.random.default_rng(seed)
    return validated(QTensor(format, tuple(random_part(rng, spec) for spec in abstract(format, shape).parts), shape))


@pytest.mark.deep
@pytest.mark.parametrize("lead", [(400,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_of_every_gguf_type_unpack_to_the_bits_that_the_gguf_package_finds(name, lead):
    q = packed(name, np.random.default_rng(len(lead)), *lead, blocks=3)
    assert_same_bits(unpacked(q), by_package(q))


@pytest.mark.deep
@pytest.mark.parametrize("name", TYPES)
def test_a_row_of_one_block_unpacks_outside_jit_as_well(name):
    q = packed(name, np.random.default_rng(7), blocks=1)
    assert_same_bits(dequantize(q), by_package(q))


@settings(max_examples=30)
@given(st.sampled_from(sorted(TYPES)), st.integers(0, 2**32 - 1))
def test_any_blocks_unpack_to_the_bits_that_the_gguf_package_finds(name, seed):
    q = packed(name, np.random.default_rng(seed), 400, blocks=3)
    assert_same_bits(unpacked(q), by_package(q))


def test_every_scale_and_code_of_mxfp4_unpacks_exactly_denormals_and_infinities_included():
    codes = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 1))
    part = np.concatenate([np.arange(256, dtype=np.uint8)[:, None], codes], axis=1)[:, None]
    q = validated(QTensor("MXFP4", (jnp.asarray(part),), (256, 32)))
    assert_same_bits(unpacked(q), by_package(q))


def test_the_table_of_types_agrees_with_the_gguf_package_on_numbers_and_sizes():
    assert {name: (t.id, t.values, t.bytes) for name, t in TYPES.items() if name != "Q2_0"} == {
        name: (Kind[name].value, *gguf.GGML_QUANT_SIZES[Kind[name]]) for name in TYPES if name != "Q2_0"
    }
    assert {name: (id, 1, np.dtype(dtype).itemsize) for name, (id, dtype) in PLAIN_TYPES.items()} == {
        name: (Kind[name].value, *gguf.GGML_QUANT_SIZES[Kind[name]]) for name in PLAIN_TYPES
    }


def test_every_type_that_the_gguf_package_can_dequantise_is_known():
    def can_be_dequantised(kind: Kind) -> bool:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    assert {kind.name for kind in Kind if can_be_dequantised(kind)} == (TYPES.keys() | PLAIN_TYPES.keys()) - {"Q2_0"}


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XS", "Q8_0", "fp8_block"])
def test_bfloat16_is_the_float32_value_rounded_once(name):
    q = random_tensor(name, (64, 512))
    found, exact = np.asarray(unpacked(q, jnp.bfloat16)), np.asarray(unpacked(q))
    assert found.dtype == ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        assert_same_bits(found, exact.astype(ml_dtypes.bfloat16))


def test_all_fp8_codes_mean_what_ml_dtypes_says():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 128)
    q = validated(QTensor("fp8_block", (jnp.asarray(codes), jnp.ones((1, 1))), (2, 128)))
    assert_same_bits(unpacked(q), codes.astype(np.float32))


@pytest.mark.parity
def test_all_fp8_codes_mean_what_torch_says():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    q = QTensor("fp8_block", (jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.ones((1, 1))), (2, 128))
    assert_same_bits(unpacked(q), torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy())


@pytest.mark.parametrize(
    ("format", "block"), [("fp8_block", (128, 128)), ("fp8_block_64x32", (64, 32)), ("fp8_block_1x128", (1, 128))]
)
@pytest.mark.parametrize("shape", [(256, 128), (576, 100), (3, 130, 257), (2, 2, 1, 1)], ids=str)
def test_fp8_weights_are_multiplied_by_the_scale_of_their_block_up_to_ragged_edges(format, block, shape):
    q = random_tensor(format, shape)
    weight, scale = (np.asarray(part) for part in q.parts)
    rows, columns = np.arange(shape[-2]) // block[0], np.arange(shape[-1]) // block[1]
    assert_same_bits(unpacked(q), weight.astype(np.float32) * scale[..., rows[:, None], columns])
    assert format_of(format).block == block


@pytest.mark.parametrize("shape", [(7,), (5, 64), (2, 3, 33)], ids=str)
def test_int8_weights_are_multiplied_by_the_scale_of_their_row(shape):
    q = random_tensor("int8", shape)
    weight, scale = (np.asarray(part) for part in q.parts)
    assert_same_bits(unpacked(q), weight.astype(np.float32) * scale[..., None])


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", [(256,), (5, 300), (2, 3, 16)], ids=str)
def test_int4_codes_are_read_low_nibbles_first_and_filled_up_groups_are_cut(group, shape):
    q = random_tensor(f"int4_g{group}", shape)
    low_high, scale = (np.asarray(part) for part in q.parts)
    expected = np.empty(shape, np.float32)
    for *at, k in np.ndindex(*shape):
        which, place = divmod(k, group)
        byte = low_high[(*at, which, place % (group // 2))]
        expected[(*at, k)] = np.float32(int(byte >> 4 if place >= group // 2 else byte & 15) - 8) * np.float32(
            scale[(*at, which)]
        )
    assert_same_bits(unpacked(q), expected)


@pytest.mark.deep
@pytest.mark.parametrize("format", FORMATS)
def test_a_stack_can_be_mapped_scanned_and_indexed_without_being_unpacked_as_a_whole(format):
    q = random_tensor(format, (3, 4, 256))
    whole = np.asarray(unpacked(q))
    mapped = jax.jit(jax.vmap(dequantize))(q)
    scanned = jax.jit(lambda q: jax.lax.scan(lambda _, one: (None, dequantize(one)), None, q)[1])(q)
    chosen = jax.jit(lambda q, i: dequantize(q.one(i)))(q, 1)
    for found, expected in [(mapped, whole), (scanned, whole), (chosen, whole[1])]:
        assert_same_bits(found, expected)
    assert q.one(0).shape == (4, 256)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(256,), (130, 512), (2, 3, 256)], ids=str)
def test_bytes_are_counted_without_memory_and_are_what_arrays_take(format, shape):
    if len(shape) < 2 and format in ("fp8_block", "fp8_column"):
        shape = (1, *shape)
    assert nbytes(format, shape) == random_tensor(format, shape).nbytes == abstract(format, shape).nbytes


def test_a_tensor_as_large_as_the_experts_of_a_layer_is_counted_in_no_time():
    assert nbytes("Q4_K", (256, 2048, 7168)) == 256 * 2048 * 7168 // 256 * 144
    assert nbytes("fp8_block", (256, 2048, 7168)) == 256 * (2048 * 7168 + 4 * 16 * 56)


def test_a_tensor_is_a_pytree_whose_leaves_are_its_parts():
    q = random_tensor("fp8_block", (130, 140))
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(130, 140), (2, 2)]
    shapes = jax.eval_shape(lambda q: q, q)
    assert isinstance(shapes, QTensor)
    assert (shapes.format, shapes.shape) == ("fp8_block", (130, 140))
    assert validated(shapes) is shapes
    assert jax.eval_shape(dequantize, shapes).shape == (130, 140)


@pytest.mark.parametrize("shape", [(), (100,), (256, 40)], ids=str)
def test_rows_that_do_not_end_with_a_block_are_refused(shape):
    with pytest.raises(BadFile, match=r"no Q4_K tensor has the shape .*\n.*multiple of 256"):
        abstract("Q4_K", shape)


@pytest.mark.parametrize(("format", "shape"), [("fp8_block", (5,)), ("fp8_column", (5,)), ("int8", ()), ("int4_g32", ())])
def test_shapes_of_too_few_axes_are_refused(format, shape):
    with pytest.raises(BadFile, match=f"no {format} tensor has the shape"):
        abstract(format, shape)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (jnp.zeros((4, 2, 144), jnp.int8),),
        (jnp.zeros((4, 2, 143), jnp.uint8),),
        (jnp.zeros((4, 3, 144), jnp.uint8),),
        (jnp.zeros((4, 2, 144), jnp.uint8), jnp.zeros(())),
    ],
    ids=["none", "dtype", "bytes", "blocks", "two"],
)
def test_parts_that_do_not_fit_the_shape_are_refused_with_what_was_found_and_expected(parts):
    with pytest.raises(BadFile, match="layer 0 is not a Q4_K tensor of shape") as caught:
        validated(QTensor("Q4_K", parts, (4, 512)), "layer 0")
    assert caught.value.args[2] == "expected uint8[4, 2, 144]"


@pytest.mark.parametrize("name", ["Q4_9", "fp8_block_0x4", "fp8_block_4x", "fp8", "\x1b[31m"])
def test_unknown_formats_are_refused_with_those_that_are_known(name):
    with pytest.raises(Unsupported, match=r"no quantised format .*\n.*fp8_block, int8, .*Q4_K"):
        format_of(name)


@pytest.mark.parametrize("format", OURS)
def test_nan_in_a_scale_stays_in_its_block(format):
    q = random_tensor(format, (256, 256))
    weight = jnp.ones_like(q.parts[0])
    scale = jnp.ones_like(q.parts[1]).at[(0,) * q.parts[1].ndim].set(jnp.nan)
    found = np.isnan(unpacked(QTensor(format, (weight, scale, *q.parts[2:]), q.shape)))
    rows, columns = (n or 256 for n in FORMATS[format].block)
    assert found[:rows, :columns].all()
    assert found.sum() == rows * columns


def test_a_matmul_takes_a_packed_tensor_in_one_program():
    q = random_tensor("Q8_0", (16, 64))
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    q = QTensor("Q8_0", (q.parts[0].at[..., 1].set(0x2C),), q.shape)  # scales near 0.06
    found = jax.jit(lambda x, q: x @ dequantize(q).T)(x, q)
    np.testing.assert_allclose(found, x.astype(np.float64) @ by_package(q).T.astype(np.float64), rtol=1e-4, atol=1e-3)


@pytest.mark.deep
@pytest.mark.parametrize("name", [*TYPES, "fp8_block", "int8", "int4_g32"])
def test_what_is_not_finite_is_found_without_unpacking(name):
    rng = np.random.default_rng(3)
    parts = []
    for part in abstract(name, (4, 256, 512)).parts:
        bits = rng.integers(0, 256, (*part.shape, np.dtype(part.dtype).itemsize), np.uint8)
        parts.append(jnp.asarray(bits.view(part.dtype)[..., 0]))
    one = [QTensor(name, tuple(p[i] for p in parts), (256, 512)) for i in range(4)]
    plain = [bool(jnp.isfinite(dequantize(q)).all()) for q in one]
    assert [int(unsound(name, q.parts)) == 0 for q in one] == plain
    zeros = tuple(jnp.zeros(p.shape, p.dtype) for p in one[0].parts)
    assert int(unsound(name, zeros)) == 0


@pytest.mark.deep
@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if kind.halves])
def test_one_infinite_scale_is_found_in_every_place(name):
    kind = TYPES[name]
    for at in kind.halves:
        blocks = np.zeros((3, 4, kind.bytes), np.uint8)
        blocks[1, 2, at : at + 2] = 0x00, 0x7C
        assert int(unsound(name, (jnp.asarray(blocks),))) == 1
        assert not np.isfinite(np.asarray(kind.unpack(jnp.asarray(blocks)))[1, 2]).all()
