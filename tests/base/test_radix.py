"""The first k of many numbers, beside a stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base import radix

FEW = np.float32([-np.inf, -3e38, -1.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, 1.5, 3e38, np.inf])


@jax.jit
def first(x, k):
    return radix.first(radix.descending(x), k)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), width=st.integers(1, 40), ties=st.booleans())
def test_the_largest_come_first_and_of_equal_ones_the_earlier(seed, width, ties):
    rng = np.random.default_rng(seed)
    x = rng.choice(FEW, (4, width)) if ties else rng.normal(size=(4, width)).astype(np.float32)
    k = rng.integers(0, width + 3, 4)
    taken = np.asarray(first(x, jnp.asarray(k, jnp.int32)))
    for row, count, found in zip(x, k, taken, strict=True):
        order = np.argsort(-row, kind="stable")[:count]
        assert np.flatnonzero(found).tolist() == sorted(order.tolist())


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), width=st.integers(1, 40))
def test_of_equal_ones_a_second_number_may_decide(seed, width):
    rng = np.random.default_rng(seed)
    x, then = rng.choice(FEW, (4, width)), rng.integers(0, 6, (4, width)).astype(np.uint32)
    k = rng.integers(0, width + 3, 4)
    taken = jax.jit(radix.first)(radix.descending(jnp.asarray(x)), jnp.asarray(k, jnp.int32), jnp.asarray(then))
    for row, second, count, found in zip(x, then, k, np.asarray(taken), strict=True):
        assert np.flatnonzero(found).tolist() == sorted(np.lexsort((second, -row))[:count].tolist())


@pytest.mark.parametrize("count", [1, 77, 4095])
def test_of_many_numbers_as_many_as_asked_are_taken(count):
    x = np.random.default_rng(0).normal(size=(3, 4096)).astype(np.float32)
    taken = np.asarray(first(x, jnp.full(3, count, jnp.int32)))
    assert (taken.sum(1) == count).all()
    assert (x.min(1, where=taken, initial=np.inf) > x.max(1, where=~taken, initial=-np.inf)).all()


def test_bits_fall_as_numbers_rise():
    bits = np.asarray(radix.descending(jnp.asarray(FEW)))
    assert (np.diff(bits.astype(np.int64)) <= 0).all()
    assert bits[4] == bits[5], "zeros are equal"
