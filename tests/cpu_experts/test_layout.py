"""The packed layouts, and the numbers in them."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from moe_layers import fitting, random_layer

from cpu_experts import blocks, layout
from cpu_experts.reference import rounded


@pytest.mark.parametrize("format", layout.FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 32), (33, 70), (130, 260)])
def test_unpack_is_the_inverse_of_pack(format, outputs, inputs):
    (inputs,) = fitting(format, inputs)
    gate, up, _ = random_layer(1, inputs, outputs)
    pair = [layout.quantize(w[0], format) for w in (gate, up)]
    for matrices in (pair, pair[:1]):
        count = -(-outputs // (16 if len(matrices) == 2 else 32))
        out = np.full((count, layout.panel_bytes(format, inputs)[2]), 255, np.uint8)
        layout.pack(matrices, format, inputs, out)
        codes = layout.unpack(out, format, outputs, inputs, len(matrices) == 2)
        for (held, *_), found in zip(matrices, codes, strict=True):
            if format in blocks.BYTES:
                held, _ = blocks.split(held, format)
            elif format.startswith("int4"):
                held = layout.int4_codes(held).reshape(outputs, -1)[:, :inputs]
            assert (found == held).all()


CSRC = Path(layout.__file__).parent / "csrc"
FIELDS = ["step_k", "group_k", "block_k", "tile_bytes", "scale_bytes", "per_panel"]


def found_in(file: str, pattern: str) -> str:
    (found,) = re.findall(pattern, (CSRC / file).read_text(), re.DOTALL)
    return found


def test_formats_are_those_of_the_kernels():
    """gemm.h is read as text: the library answers no questions about its formats."""
    *names, count = found_in("gemm.h", r"enum Precision \{ (.*?) \};").split(", ")
    assert count == "kPrecisions"
    assert re.findall(r"^ +\w+ (\w+);", found_in("gemm.h", r"struct Format \{\n(.*?)\n\};"), re.MULTILINE) == FIELDS
    rows = re.findall(r"\{(.*?)\},", found_in("gemm.h", r"kFormats\[kPrecisions\] = \{\n(.*?)\n\};"))
    assert [name.removeprefix("k").replace("_", "").lower() for name in names] == [f.replace("_", "") for f in layout.FORMATS]
    assert [f.id for f in layout.FORMATS.values()] == [*range(len(rows))]
    for (name, f), row in zip(layout.FORMATS.items(), rows, strict=True):
        block = blocks.VALUES if name in blocks.BYTES else 1
        expected = f.step, f.group or f.step, block, f.tile_bytes, f.scale_bytes, str(not f.group).lower()
        assert row == ", ".join(map(str, expected)), name


def test_formats_have_the_names_and_numbers_of_the_public_header():
    found = found_in("cpu_experts.h", r"typedef enum \{([^}]*)\} cpu_experts_precision;")
    ids = {name.lower(): int(number) for name, number in re.findall(r"CPU_EXPERTS_(\w+) = (\d+)", found)}
    assert ids == {name: f.id for name, f in layout.FORMATS.items()}


def test_tiles_and_lines_are_those_of_the_kernels():
    assert int(found_in("gemm.h", r"kTile = (\d+);")) == layout.TILE
    assert int(found_in("gemm.h", r"kLine = (\d+);")) == layout.LINE
    assert found_in("gemm.h", r"kPanel = (.*?);") == "2 * kTile"
    assert layout.PANEL == 2 * layout.TILE


def test_packed_memory_starts_at_a_page_of_its_own():
    parts = layout.quantize(random_layer(2, 40, 20)[0], "bf16")
    assert layout.pack_experts([parts], "bf16", 40).ctypes.data % 4096 == 0


@pytest.mark.parametrize("format", layout.FORMATS)
def test_one_expert_repeated_is_packed_as_its_copies_are(format):
    (inputs,) = fitting(format, 70)
    gate, up, _ = random_layer(1, inputs, 33)
    pair = [layout.quantize(w[0], format) for w in (gate, up)]
    repeated = [tuple(np.broadcast_to(part, (3, *part.shape)) for part in parts) for parts in pair]
    copies = [tuple(np.array(part) for part in parts) for parts in repeated]
    assert (layout.pack_experts(repeated, format, inputs) == layout.pack_experts(copies, format, inputs)).all()
    copies[1][0][1] ^= 1
    mixed = [repeated[0], copies[1]]
    found = layout.pack_experts(mixed, format, inputs)
    assert (found[0] == found[2]).all()
    assert not (found[0] == found[1]).all()


def test_bfloat16_and_e4m3_are_those_of_ml_dtypes():
    x = np.concatenate([np.random.default_rng(0).standard_normal(10000) * 10.0 ** np.arange(-40, 40).repeat(125), [np.inf, 0]])
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    assert (layout.to_bf16(x) == x.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(layout.e4m3_values(), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize(
    ("format", "most"),
    [("bf16", 0.002), ("int8", 0.01), ("int4_g32", 0.13), ("fp8_block", 0.04), ("q8_0", 0.008), ("q4_k", 0.08), ("q6_k", 0.02)],
)
def test_quantised_weights_are_near(format, most):
    w = random_layer(2, 256, 130)[0]
    near = layout.dequantize(layout.quantize(w, format), format, 256)
    assert np.linalg.norm(near - w) < most * np.linalg.norm(w)


def test_fp8_takes_the_nearest_code():
    w = random_layer(1, 128, 128)[0][0]
    codes, scale = layout.quantize(w, "fp8_block")
    expected = (w / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (np.abs(layout.e4m3_values()[codes] - w / scale) <= np.abs(expected - w / scale)).all()


def test_rows_of_zeros_or_of_next_to_nothing_quantise_to_zeros():
    x = np.array([[0, 0], [1e-38, 0], [1, -2]], np.float32)
    assert (rounded(x, "int8")[:2] == 0).all()
    assert np.abs(rounded(x, "int8")[2] - x[2]).max() < 2 / 127
