"""Trees of small arrays as one array of int32, for the arrays that a call sends, that rows keep, and that a call returns.

Every array costs a call about a microsecond. One from the host costs a copy as well. One whose address changes from call to call
costs an update of each node of a CUDA graph that uses it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")
if TYPE_CHECKING:
    from typing import Any as Either
else:
    Either = jax.Array | np.ndarray  # what is computed on the device, and read on the host
Packed = Any  # `[*axes C]` of int32, of NumPy where all numbers are


def pack(tree: Any, axes: int = 0) -> Packed:
    """All numbers of a tree next to each other; the first `axes` axes are the same in all its arrays. Floats keep their bits.

    Raises TypeError for numbers other than bool and those of 32 bits."""
    columns = [_bits(array) for array in jax.tree.leaves(tree)]
    columns = [array.reshape(*array.shape[:axes], -1) for array in columns]
    numpy = all(isinstance(array, np.ndarray) for array in columns)
    return (np if numpy else jnp).concatenate(columns, axis=-1) if columns else np.zeros(0, np.int32)


def unpack(packed: Packed, like: Tree, axes: int = 0) -> Tree:
    """The tree again. Of `like` only the structure, the dtypes and the axes after the first `axes` are read."""
    arrays, tree = jax.tree.flatten(like)
    found, start = [], 0
    for array in arrays:
        shape = array.shape[axes:]
        stop = start + int(np.prod(shape))
        found.append(_numbers(packed[..., start:stop].reshape(*packed.shape[:axes], *shape), array.dtype))
        start = stop
    return jax.tree.unflatten(tree, found)


def of_shards(shards: Sequence[Any]) -> Any:
    """Stacks the data shards' trees into one to send: with an axis of shards in front, where there are several."""
    if len(shards) == 1:
        return shards[0]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *shards)


def here(array: Any) -> np.ndarray:
    """A replicated array, on the host."""
    return np.asarray(part_here(array))


def part_here(array: Any) -> Any:
    """The array of one device of this process, on the device."""
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1:
        return array
    return array.addressable_shards[0].data


def _bits(array: Any) -> Any:
    if np.issubdtype(array.dtype, np.bool_):
        return array.astype(np.int32)
    if array.dtype.itemsize != 4:
        raise TypeError(f"numbers of 32 bits are packed, not {array.dtype}")
    return _cast(array, np.dtype(np.int32))


def _numbers(bits: Any, dtype: np.dtype) -> Any:
    return bits != 0 if np.issubdtype(dtype, np.bool_) else _cast(bits, dtype)


def _cast(array: Any, dtype: np.dtype) -> Any:
    return array.view(dtype) if isinstance(array, np.ndarray) else jax.lax.bitcast_convert_type(array, dtype)
