"""Boxes of tensors: of every kind of checkpoint they are what slicing the whole tensor gives, and no other byte is read."""

import os

import numpy as np
import pytest
from checkpoints import convert, packed_gguf, parts, released
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mla_jax.weights import boxes, safetensors
from mla_jax.weights.open import open_source
from mla_jax.weights.safetensors import open_folder

SIDES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def boxed(draw):
    """A shape and a box of it, which is not empty."""
    shape = tuple(draw(SIDES))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple((start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))


@given(boxed())
def test_the_runs_of_a_box_are_its_elements_in_their_order(case):
    shape, box = case
    length, starts = boxes.runs(shape, box)
    found = [element for start in starts for element in range(start, start + length)]
    numbered = np.arange(np.prod(shape)).reshape(shape)
    assert found == numbered[boxes.slices(box)].reshape(-1).tolist()


@pytest.fixture
def reads(monkeypatch):
    """The bytes that each call of the system has read."""
    found, preadv = [], os.preadv
    monkeypatch.setattr(safetensors.os, "preadv", lambda *where: (found.append(preadv(*where)), found[-1])[1])
    return found


@pytest.mark.parametrize(
    ("box", "calls"),
    [
        (((0, 3), (0, 4), (0, 5)), 1),
        (((1, 3), (0, 4), (0, 5)), 1),
        (((1, 2), (1, 3), (0, 5)), 1),
        (((0, 3), (1, 3), (0, 5)), 3),
        (((1, 3), (0, 4), (2, 4)), 8),
    ],
)
def test_of_a_file_nothing_else_is_read(tmp_path, reads, box, calls):
    whole = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    save_file({"x": whole, "y": whole}, tmp_path / "model.safetensors")
    found = open_folder(tmp_path).read("x", None, box)
    np.testing.assert_array_equal(found, whole[boxes.slices(box)])
    assert (len(reads), sum(reads)) == (calls, found.nbytes)


def test_a_box_of_an_entry_has_no_first_axis(tmp_path):
    whole = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    save_file({"x": whole}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(open_folder(tmp_path).read("x", 2, ((1, 3), (0, 2))), whole[2, 1:3, :2])


def checkpoint(kind: str, folder):
    if kind == "orbax":
        assert convert(released(folder / "hf", "v3", "fp8"), folder / kind, "--mesh", "tensor=2") == 0
        return folder / kind
    make = {"parts": parts, "gguf": lambda path: packed_gguf(path, "new")}
    return make[kind](folder / kind) if kind in make else released(folder / kind, "v3", kind)


@pytest.mark.parametrize("kind", ["bf16", "fp8_bf16", "parts", "gguf", pytest.param("orbax", marks=pytest.mark.deep)])
def test_halves_of_tensors_along_each_axis_join_to_the_whole(tmp_path, kind):
    source, cut = open_source(checkpoint(kind, tmp_path)), 0
    for name, entry in source.tensors.items():
        whole = source.read(name)
        sizes = boxes.blocks(entry.format, len(entry.shape))
        for axis, size in enumerate(entry.shape):
            middle = size // 2 // sizes[axis] * sizes[axis]
            if not middle:
                continue
            everything, cut = boxes.whole_box(entry.shape), cut + 1
            halves = [(*everything[:axis], pair, *everything[axis + 1 :]) for pair in ((0, middle), (middle, size))]
            found = [source.read(name, None, half) for half in halves]
            for number, part in enumerate(whole):
                np.testing.assert_array_equal(np.concatenate([half[number] for half in found], axis), part, name)
    assert cut > 20
    source.close()


@pytest.mark.parametrize(
    ("format", "shape", "box", "expected"),
    [
        ("fp8_block", (300, 200), ((128, 300), (0, 128)), [((128, 300), (0, 128)), ((1, 3), (0, 1))]),
        ("int8", (8, 6), ((2, 4), (0, 6)), [((2, 4), (0, 6)), ((2, 4),)]),
        ("int8", (8, 6), ((0, 8), (3, 6)), [((0, 8), (3, 6)), ((0, 8),)]),
        ("int4_g32", (4, 96), ((1, 2), (32, 96)), [((1, 2), (1, 3), (0, 16)), ((1, 2), (1, 3))]),
        ("Q4_K", (3, 4, 512), ((1, 2), (0, 4), (256, 512)), [((1, 2), (0, 4), (1, 2), (0, 144))]),
    ],
)
def test_the_parts_of_a_packed_box_are_its_codes_and_its_scales(format, shape, box, expected):
    assert boxes.of_parts(format, shape, box) == expected


def test_a_box_that_parts_blocks_grows_to_their_borders():
    assert boxes.outward(((5, 20), (0, 30)), (40, 30), (16, 24)) == ((0, 32), (0, 30))
    assert boxes.blocks("fp8_block_16x24", 3) == (1, 16, 24)
    assert boxes.blocks("int8", 2) == boxes.blocks("BF16", 2) == (1, 1)
