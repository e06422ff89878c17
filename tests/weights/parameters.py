"""A model's parameters as numpy arrays, and their comparison."""

import jax
import numpy as np
from flax import nnx


def state(model: nnx.Module) -> nnx.State:
    """All parameters as stored in memory, packed ones with all their parts."""
    return nnx.split(model)[1]


def of(model: nnx.Module) -> dict[str, np.ndarray]:
    _, state = nnx.split(model)
    return {".".join(map(str, path)): np.asarray(variable[...]) for path, variable in nnx.to_flat_state(state)}


def by_path(model: nnx.Module) -> dict:
    """The same, packed ones as QTensors."""
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state(model))}


def assert_equal(one: nnx.Module, other: nnx.Module) -> None:
    """The same parameters, dtypes and bits; of packed ones the same parts."""
    a, b = ({jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state(m))} for m in (one, other))
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=path)
