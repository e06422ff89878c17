"""Parts of tensors as boxes: which bytes of a file hold one, and which boxes of a packed tensor's parts.

A box is counted in values of the tensor, also where these are packed in blocks; it begins and ends between blocks."""

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from mla_jax.base import qtensor
from mla_jax.base.errors import Unsupported
from mla_jax.base.qtensor import Shape

Box = tuple[tuple[int, int], ...]  # the first index and the end, along each axis


def whole_box(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    return tuple(end - start for start, end in box)


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """`box` as an index into an array that starts at `origin`."""
    return tuple(
        slice(i - o, j - o) for (i, j), (o, _) in zip(box, origin or ((0, 0),) * len(box), strict=True)
    )


def common(a: Box, b: Box) -> Box | None:
    """The intersection, None if it is empty."""
    box = tuple((max(i, m), min(j, n)) for (i, j), (m, n) in zip(a, b, strict=True))
    return box if all(i < j for i, j in box) else None


def is_packed(format: str) -> bool:
    """Whether a tensor is stored as a QTensor's parts."""
    try:
        qtensor.format_of(format)
    except Unsupported:
        return False
    return True


def blocks(format: str, dimensions: int) -> Shape:
    """Values along each axis that no box parts; 1 everywhere in a plain `format`."""
    if not is_packed(format):
        return (1,) * dimensions
    return ((1,) * dimensions + qtensor.unit(format))[2:]


def outward(box: Box, shape: Shape, sizes: Shape) -> Box:
    """The smallest box around `box` that parts no blocks of these sizes, in a tensor of `shape`."""
    return tuple((i // b * b, min(-(-j // b) * b, n)) for (i, j), n, b in zip(box, shape, sizes, strict=True))


def of_parts(format: str, shape: Shape, box: Box) -> list[Box]:
    """The boxes of the parts of a packed tensor of `shape` that make up a `box` of it."""
    sizes = blocks(format, len(shape))

    def along(axis: int, size: int) -> tuple[int, int]:
        if axis >= len(shape):
            return 0, size
        (start, end), block = box[axis], sizes[axis]
        return (start, end) if size == shape[axis] else (start // block, -(-end // block))

    return [
        tuple(along(*each) for each in enumerate(part.shape))
        for part in qtensor.abstract(format, shape).parts
    ]


def box_bytes(format: str, shape: Shape, size: int, box: Box) -> int:
    """The bytes of a box of a tensor of this shape, which has `size` bytes."""
    if not is_packed(format):
        return size // prod(shape) * prod(box_shape(box))
    parts = zip(of_parts(format, shape, box), qtensor.abstract(format, shape).parts, strict=True)
    return sum(prod(box_shape(part)) * np.dtype(like.dtype).itemsize for part, like in parts)


def runs(shape: Shape, box: Box) -> tuple[int, Iterator[int]]:
    """The length of the pieces of a box that lie next to each other in an array, and where each begins, in elements."""
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    inner = max((axis for axis, pair in enumerate(box) if pair != (0, shape[axis])), default=0)
    start, end = box[inner] if box else (0, 1)
    step = steps[inner] if steps else 1
    outer = product(*(range(*pair) for pair in box[:inner]))
    starts = (sum(i * s for i, s in zip(index, steps, strict=False)) + start * step for index in outer)
    return (end - start) * step, starts


def fitted(array: np.ndarray, shape: Shape) -> np.ndarray:
    """An array with zeros behind it, so that it has this shape."""
    if array.shape == shape:
        return array
    found = np.zeros(shape, array.dtype)
    found[tuple(map(slice, array.shape))] = array
    return found
