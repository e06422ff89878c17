"""Trees as one array of int32: the same numbers back, bit for bit, in NumPy and inside jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.decode.packing import pack, unpack

DTYPES = (np.int32, np.uint32, np.float32, np.bool_)


def tree_of(rows: int, widths: list[int], seed: int) -> dict[str, np.ndarray]:
    """Arrays `[rows]` (width 0) and `[rows width]` of random bits, NaN among them."""
    rng = np.random.default_rng(seed)
    tree = {}
    for i, width in enumerate(widths):
        shape = (rows, width) if width else (rows,)
        bits = rng.integers(0, 2**32, shape, np.uint32)
        dtype = np.dtype(DTYPES[i % len(DTYPES)])
        tree[str(i)] = bits % 2 == 1 if dtype == np.bool_ else bits.view(dtype)
    return tree


def assert_same_bits(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.asarray(found[name]).dtype == array.dtype
        assert np.asarray(found[name]).tobytes() == np.ascontiguousarray(array).tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from((0, 1)))
def test_the_same_bits_come_back(rows, widths, seed, axes):
    tree = tree_of(rows, widths, seed)
    packed = pack(tree, axes)
    assert packed.shape == (*(rows,) * axes, sum(map(np.size, tree.values())) // rows**axes)
    assert_same_bits(unpack(packed, tree, axes), tree)


def test_what_is_packed_on_the_host_is_unpacked_in_jit_and_the_other_way_round():
    tree = tree_of(3, [0, 2, 4, 0, 1], 1)
    inside = jax.jit(lambda packed: unpack(packed, tree))(pack(tree))
    assert_same_bits(inside, tree)
    assert_same_bits(unpack(np.asarray(jax.jit(lambda tree: pack(tree, 1))(tree)), tree, 1), tree)


def test_rows_are_unpacked_whatever_their_number():
    like, tree = tree_of(1, [0, 2, 3], 2), tree_of(5, [0, 2, 3], 3)
    assert_same_bits(unpack(pack(tree, 1)[1:4], like, 1), {name: array[1:4] for name, array in tree.items()})


def test_other_numbers_are_refused():
    with pytest.raises(TypeError, match="bfloat16"):
        pack([jnp.zeros(2, jnp.bfloat16)])
    with pytest.raises(TypeError, match="float64"):
        pack([np.zeros(2)])


def test_no_arrays_are_an_empty_one():
    assert pack([]).shape == (0,)
    assert unpack(pack([]), []) == []
