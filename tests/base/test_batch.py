"""A step's batch as JAX sees it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.base.batch import Batch, bucket


def test_a_dense_batch_is_every_token_from_position_0():
    batch = Batch.dense(2, 3)
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2], [0, 1, 2]])
    assert np.asarray(batch.mask).all()
    assert batch.positions.dtype == np.int32


def test_a_batch_behind_held_tokens_counts_on_from_them():
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    table = jnp.arange(6).reshape(3, 2)
    batch = Batch.after(jnp.array([0, 5, 9]), jnp.asarray(mask), table)
    assert np.asarray(batch.positions)[mask].tolist() == [0, 1, 2, 5]
    assert batch.seq_lens.tolist() == [3, 6, 9]
    assert batch.page_table is table
    assert batch.positions.dtype == batch.seq_lens.dtype == np.int32


def test_a_line_has_the_tokens_of_one_row_after_the_other_and_then_padding():
    held, position, counts = (jnp.array(numbers, jnp.int32) for numbers in ([0, 5, 9, 3], [0, 7, 9, 3], [2, 0, 3, 1]))
    table = jnp.arange(8).reshape(4, 2)
    batch = Batch.in_line(held, position, counts, 8, table)
    assert batch.mask.tolist() == [[True] * 6 + [False] * 2]
    assert batch.row[0, :6].tolist() == [0, 0, 2, 2, 2, 3]
    assert batch.positions[0, :6].tolist() == [0, 1, 9, 10, 11, 3]
    assert batch.seq_lens.tolist() == [2, 5, 12, 4]
    assert batch.page_table is table


def test_all_that_a_batch_says_is_data_and_only_its_shapes_are_part_of_the_program():
    traced = []

    @jax.jit
    def last(batch):
        traced.append(batch.page_table is not None)
        return batch.positions[:, -1]

    dense, mask = Batch.dense(1, 3), jnp.ones((1, 3), bool)
    behind = [Batch.after(jnp.array([held]), mask, jnp.array([[page]])) for held, page in ((0, 0), (4, 0), (4, 7))]
    for batch in (dense, Batch(dense.positions + 5, dense.mask), *behind):
        assert last(batch)[0] == batch.positions[0, 2]
    assert traced == [False, True]


@pytest.mark.parametrize(
    ("n", "least", "expected"), [(0, 1, 1), (1, 1, 1), (2, 1, 2), (3, 1, 4), (64, 1, 64), (65, 1, 128), (3, 16, 16)]
)
def test_a_bucket_is_the_power_of_two_that_holds_a_number(n, least, expected):
    assert bucket(n, least) == expected
