"""Experts that were fetched are, once unpacked, to the bit those that were packed."""

import jax
import numpy as np
import pytest
from moe_layers import fitting, parts_of, random_layer

from cpu_experts import Experts, ffi, layout
from cpu_experts.unpack import unpack_layer

SIZES = [(5, 64, 48), (3, 33, 17), (4, 300, 150), (2, 16, 130)]


def expected(parts: layout.Parts, precision: str, inputs: int) -> list[np.ndarray]:
    """The parts as `unpack` gives them: Q8_0 in GGUF's blocks."""
    if precision != "q8_0":
        return list(parts)
    codes, scale = parts
    padded = np.pad(codes, [(0, 0), (0, 0), (0, -inputs % 32)]).reshape(*scale.shape, 32)
    return [np.concatenate([scale[..., None].view(np.uint8), padded.view(np.uint8)], axis=-1)]


def bits(part) -> np.ndarray:
    return np.ascontiguousarray(part).view(np.uint8)


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("precision", layout.FORMATS)
def test_what_is_fetched_and_unpacked_is_what_was_packed(precision, size):
    experts, model, width = size[0], *fitting(precision, *size[1:])
    parts = parts_of(random_layer(experts, model, width), precision)
    with Experts(*parts, precision) as layer:
        for first, count in ((0, experts), (1, experts - 1), (experts - 1, 1)):
            found = jax.jit(lambda first, count=count: unpack_layer(layer, *ffi.fetch(layer, first, count)))(first)
            for given, inputs, matrix in zip(parts, (model, model, width), found, strict=True):
                wanted = expected(given, precision, inputs)
                assert [part.shape[1:] for part in matrix] == [part.shape[1:] for part in wanted]
                for part, of in zip(matrix, wanted, strict=True):
                    np.testing.assert_array_equal(bits(part), bits(of[first : first + count]))
