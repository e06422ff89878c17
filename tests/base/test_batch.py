"""A step's batch as JAX sees it."""

import jax
import numpy as np

from mla_jax.base.batch import Batch


def test_a_dense_batch_is_every_token_from_position_0():
    batch = Batch.dense(2, 3)
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2], [0, 1, 2]])
    assert np.asarray(batch.mask).all()
    assert batch.positions.dtype == np.int32


def test_positions_are_data_and_the_span_is_part_of_the_program():
    traced = []

    @jax.jit
    def last(batch):
        traced.append(batch.span)
        return batch.positions[:, -1]

    dense = Batch.dense(1, 3)
    for batch in (dense, Batch(dense.positions + 5, dense.mask), Batch(dense.positions, dense.mask, span=8)):
        assert last(batch)[0] == batch.positions[0, 2]
    assert traced == [None, 8]
