"""The specification against sums in float64; the fallback and the kernel, interpreted, against the specification."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choice, fp8, ragged_dot, testing
from pallas_kernels.fp8 import Fp8
from pallas_kernels.ragged_dot import CHECKS, Unsupported, plan, reference

pytestmark = pytest.mark.deep

each_case = pytest.mark.parametrize("case", testing.RAGGED_DOT, ids=lambda case: case.name)
each_held = pytest.mark.parametrize("held", ["bf16", "w8", "w8a8"])
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")
OPS = {"ragged_dot": ["gate"], "ragged_swiglu": ["gate", "up"]}


def operands(case, op, held="bf16", seed=0, dtype=jnp.bfloat16):
    """The inputs of an op, with operands of the kind `held`."""
    inputs = testing.ragged_dot_inputs(case, seed, dtype)
    weights = [inputs[name] for name in OPS[op]]
    if held != "bf16":
        weights = [fp8.quantize_weight(w) for w in weights]
    return fp8.quantize(inputs["x"]) if held == "w8a8" else inputs["x"], *weights, inputs["group_sizes"]


def exact(x, rows=1):
    return np.asarray(fp8.dequantize(x, rows) if isinstance(x, Fp8) else x.astype(jnp.float32), np.float64)


def double(case, x, *weights):
    """Group by group in float64, by numpy: what the reference itself is judged by."""
    x, ends = exact(x), np.cumsum(case.group_sizes)
    sums = []
    for w in (exact(w, fp8.GROUP) for w in weights):
        parts = [x[end - size : end] @ w[g].T for g, (size, end) in enumerate(zip(case.group_sizes, ends, strict=True))]
        sums.append(np.concatenate(parts))
    return sums[0] if len(sums) == 1 else sums[0] / (1 + np.exp(-sums[0])) * sums[1]


def skip_odd(case, held):
    if held == "w8a8" and case.depth % fp8.GROUP:
        pytest.skip("rows in E4M3 come in groups of 128")


@each_case
@each_held
@pytest.mark.parametrize("op", OPS)
def test_the_reference_is_the_sum_it_says_and_the_fallback_follows_whatever_lies_past_the_end(case, held, op):
    skip_odd(case, held)
    *args, sizes = operands(case, op, held)
    sums = double(case, *args)
    wanted = getattr(reference, op)(*args, sizes)[: case.rows]
    assert testing.error(wanted, sums) < 1e-5
    out = getattr(ragged_dot, op)(*args, sizes, impl="xla")
    assert out.dtype == jnp.bfloat16
    assert testing.error(out[: case.rows], wanted) < (3e-3 if held == "bf16" else 6e-3)


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    depth=st.integers(1, 70),
    features=st.integers(1, 40),
    spare=st.integers(0, 9),
    op=st.sampled_from(sorted(OPS)),
    seed=st.integers(0, 9),
)
def test_the_fallback_holds_for_any_sizes(sizes, depth, features, spare, op, seed):
    case = testing.RaggedDotCase("any", tuple(sizes), depth, features, spare)
    *args, group_sizes = operands(case, op, seed=seed, dtype=jnp.float32)
    out = getattr(ragged_dot, op)(*args, group_sizes, impl="xla")
    assert out.shape == (case.rows + spare, features)
    assert testing.error(out[: case.rows], double(case, *args)) < 1e-5


@pytest.mark.parametrize("op", OPS)
def test_the_fallback_takes_weights_in_e4m3_as_exactly_as_its_rows(op):
    case = testing.RAGGED_DOT[1]
    *args, sizes = operands(case, op, "w8", dtype=jnp.float32)
    assert testing.error(getattr(ragged_dot, op)(*args, sizes, impl="xla")[: case.rows], double(case, *args)) < 1e-5


def test_padding_that_looks_like_numbers_is_as_harmless_as_nan():
    case = testing.RAGGED_DOT[1]
    for op in OPS:
        x, *rest = operands(case, op)
        a, b = (getattr(ragged_dot, op)(y, *rest, impl="xla")[: case.rows] for y in (x, jnp.nan_to_num(x, nan=3.0)))
        np.testing.assert_array_equal(a, b)


def test_the_result_comes_in_the_dtype_asked_for():
    case = testing.RAGGED_DOT[1]
    for op in OPS:
        assert getattr(ragged_dot, op)(*operands(case, op), impl="xla", out_dtype=jnp.float32).dtype == jnp.float32


@jax.jit
def located(pieces, table, width, grain, blocks):
    """Group, number, first row, own rows and block of every piece."""
    sizes = {"groups": table.start.size, "width": width, "grain": grain, "blocks": blocks}
    tile, block = jax.vmap(lambda at: plan.locate(at, table, **sizes))(pieces)
    return *tile, block


@settings(max_examples=60)
@given(
    sizes=st.lists(st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 3000)), min_size=1, max_size=70),
    width=st.sampled_from([8, 16, 32, 64, 96, 144]),
    shared=st.booleans(),
    blocks=st.integers(1, 40),
)
def test_every_row_meets_every_block_of_features_once_and_tiles_are_even(sizes, width, shared, blocks):
    sizes = np.pad(sizes, (0, 70 - len(sizes)))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    tiles = np.array([-(-(end - start // 8 * 8) // width) if end > start else 0 for start, end in zip(starts, ends, strict=True)])
    lasts = np.cumsum(tiles)
    np.testing.assert_array_equal(jax.jit(plan.tiles_of)(starts, ends, width), tiles)
    count = lasts[-1] * blocks
    table = plan.Table(*(x.astype(np.int32) for x in (starts, ends, lasts)))
    grain = 8 if shared else width
    found = located(np.arange(-(-count // 65536) * 65536, dtype=np.int32), table, width, grain, blocks)
    group, number, row, start, stop, block = (np.asarray(x)[:count] for x in found)
    assert (row % 8 == 0).all()
    assert ((row <= start) & (start < stop) & (stop <= row + width)).all()
    assert ((starts[group] <= start) & (stop <= ends[group])).all()
    met = np.zeros((blocks, ends[-1] + 1), int)  # every start counts up, every stop down
    np.add.at(met, (block, start), 1)
    np.add.at(met, (block, stop), -1)
    assert (np.cumsum(met, axis=1)[:, :-1] == 1).all()
    taken = np.maximum(tiles, 1) * grain
    taken = -((starts // 8 * 8 - ends) // taken) * grain  # by all tiles of a group but its last
    assert (taken <= width).all()
    assert ((row + taken[group] == stop) | (stop == ends[group])).all()
    assert (number == (lasts - tiles)[group] + (row - (starts // 8 * 8)[group]) // taken[group]).all()
    assert lasts[-1] <= plan.most_tiles(ends[-1], len(sizes), width)
    # who reads a block of weights at the same time are neighbours
    same = (np.diff(group) == 0) & (np.diff(block) == 0)
    assert (np.diff(row) == taken[group[1:]])[same].all()
    runs = np.split(np.arange(count), np.flatnonzero(~same) + 1)
    assert max(map(len, runs)) <= plan.SHARE or blocks == 1


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 70), min_size=8, max_size=8), width=st.sampled_from([8, 16, 64]), spare=st.integers(0, 9))
def test_a_tile_at_a_place_of_its_own_has_its_rows_where_they_are_looked_for(sizes, width, spare):
    ends = np.cumsum(sizes)
    starts = ends - sizes
    lasts = np.cumsum(jax.jit(plan.tiles_of)(starts, ends, width))
    table = plan.Table(*(x.astype(np.int32) for x in (starts, ends, lasts)))
    found = located(np.arange(512, dtype=np.int32), table, width, width, 1)
    column = np.full(600, -1)
    for number, row, start, stop in zip(*(np.asarray(x)[: lasts[-1]] for x in found[1:5]), strict=True):
        column[start:stop] = np.arange(start, stop) - row + number * width
    places = np.asarray(jax.jit(plan.columns_of, static_argnums=(1, 2))(np.array(sizes), 600, width))
    np.testing.assert_array_equal(places[: ends[-1]], column[: ends[-1]])
    assert (column < plan.most_tiles(ends[-1] + spare, 8, width) * width).all()


@pytest.mark.parametrize(("rows", "groups", "width"), [(8, 256, 8), (64, 256, 16), (512, 256, 16), (1024, 32, 64),
                                                       (16384, 32, 144), (64, 1, 64), (65, 1, 144)])  # fmt: skip
def test_the_width_of_a_tile_holds_an_average_group(rows, groups, width):
    assert plan.best_width(rows, groups, [8, 16, 32, 64, 144]) == width


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    x, w, sizes = operands(testing.RaggedDotCase("", (3, 4), 48, 32), "ragged_dot")
    with pytest.raises(Unsupported, match="no impl"):
        ragged_dot.ragged_dot(x, w, sizes, impl="mosaic_tpu")
    with pytest.raises(Unsupported, match="multiples of 64" if choice.too_old() is None else "JAX"):
        ragged_dot.ragged_dot(x, w, sizes, impl="mosaic_gpu")
    assert ragged_dot.ragged_dot(x, w, sizes).shape == (12, 32)
    whole = operands(testing.RAGGED_DOT[1], "ragged_dot")
    with pytest.raises(Unsupported, match="bfloat16, not float32" if choice.too_old() is None else "JAX"):
        ragged_dot.ragged_dot(*whole, impl="mosaic_gpu", out_dtype=jnp.float32)


@hopper
def test_what_the_gpu_kernel_cannot_take_is_said():
    def says(x, *weights):
        return CHECKS["mosaic_gpu"](x, *weights)

    x, w = jax.ShapeDtypeStruct((8, 192), jnp.bfloat16), jax.ShapeDtypeStruct((4, 64, 192), jnp.bfloat16)
    packed = Fp8(jax.ShapeDtypeStruct(w.shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct((4, 1, 2), jnp.float32))
    assert says(x, w, w) is None
    assert "128" in says(x, packed)
    assert "all E4M3 or none" in says(x, w, packed)
    assert "float32" in says(jax.ShapeDtypeStruct(x.shape, jnp.float32), w)
    assert "features in multiples of 8" in says(x, jax.ShapeDtypeStruct((4, 60, 192), jnp.bfloat16))
    assert "groups" in says(x, jax.ShapeDtypeStruct((400, 64, 192), jnp.bfloat16))
    assert "as deep as the weights, not 192 and 256" in says(x, jax.ShapeDtypeStruct((4, 64, 256), jnp.bfloat16))


@hopper
@pytest.mark.parametrize("odd", [0, 1], ids=["rows", "weights"])
def test_the_gpu_kernel_takes_no_other_8_bit_numbers_than_e4m3(odd):
    *both, _ = operands(testing.RaggedDotCase("", (3, 4), 128, 32), "ragged_dot", "w8a8")
    assert CHECKS["mosaic_gpu"](*both) is None
    both[odd] = Fp8(both[odd].codes.astype(jnp.float8_e5m2), both[odd].scale)
    assert "float8_e4m3fn, not float8_e5m2" in CHECKS["mosaic_gpu"](*both)


@hopper
def test_rows_become_float16_without_loss():
    from pallas_kernels.ragged_dot import gpu

    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 256)) * 2.0 ** rng.integers(-20, 1, (40, 256)) * 10.0 ** rng.integers(-25, 35, (40, 1))
    x = jnp.asarray(x, jnp.bfloat16).at[3].set(0)
    half, undo = gpu._float16(x, 4)
    assert undo.shape == (44,)
    np.testing.assert_array_equal(half.astype(jnp.float32) * undo[:40, None], x.astype(jnp.float32))


@hopper
def test_the_depth_is_split_where_few_of_many_rows_have_a_group():
    from pallas_kernels.ragged_dot import gpu

    def program(rows, expected):
        x, w = jax.ShapeDtypeStruct((rows, 7168), jnp.bfloat16), jax.ShapeDtypeStruct((32, 2048, 7168), jnp.bfloat16)
        options = {"out_dtype": jnp.bfloat16, "units": 132, "expected": expected}
        sizes = jnp.zeros(32, jnp.int32)
        return jax.make_jaxpr(lambda x, w, sizes: gpu.grouped.__wrapped__(x, (w, w), sizes, **options))(x, w, sizes)

    def is_split(rows, expected):
        shapes = [found.aval.shape for step in program(rows, expected).eqns for found in step.outvars]
        return (4, 2, 2048) in [shape[:3] for shape in shapes]  # four parts of gate and up

    assert is_split(64, 8)
    assert not is_split(64, 64)
    assert not is_split(8, 8)


@hopper
@each_case
@pytest.mark.parametrize(("op", "held"), testing.RAGGED_DOT_KINDS)
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case, op, held):
    if held != "bf16" and case.depth % fp8.GROUP:
        pytest.skip("E4M3 comes in blocks of 128")
    row = interpreted("ragged_dot")[1][f"{op}, {case.name}, {held}"]
    assert row["error"] <= 2 * row["fallback"]


@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("ragged_dot")[0]
