"""GGUF's blocks as they are in files: the kernels compute with the numbers that the gguf package decodes."""

import gguf
import numpy as np
import pytest
from moe_layers import Batch, distance, random_batch, random_layer

from cpu_experts import Experts, blocks, layout
from cpu_experts.reference import BOUNDS

TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q8_0", "q4_k", "q6_k")}
HALVES = {"q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}


def random_blocks(format: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Any bytes, but for the scales in float16: both signs, of a size that gives values of about `shape[-1] ** -0.5`."""
    values, size = gguf.GGML_QUANT_SIZES[TYPES[format]]
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    for at in HALVES[format]:
        scales = rng.choice([-1, 1], (*made.shape[:-1], 1)) * rng.uniform(0.5, 2, (*made.shape[:-1], 1)) / 500 * shape[-1] ** -0.5
        made[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return made


def meant(made: np.ndarray, format: str) -> np.ndarray:
    """The blocks' numbers by the gguf package, as floats `[.. K]`."""
    flat = gguf.quants.dequantize(made.reshape(-1, made.shape[-2] * made.shape[-1]), TYPES[format])
    return flat.reshape(*made.shape[:-2], -1)


@pytest.mark.parametrize("format", TYPES)
def test_blocks_mean_what_the_gguf_package_says(format):
    made = random_blocks(format, 3, 17, 768)
    parts = blocks.q8_0_parts(made) if format == "q8_0" else (made,)
    assert (layout.dequantize(parts, format, 768) == meant(made, format)).all()


@pytest.mark.deep
@pytest.mark.parametrize("format", TYPES)
@pytest.mark.parametrize("tokens", [1, 3, 40, 150])
def test_a_layer_of_any_blocks_agrees_with_the_gguf_package(isa, format, tokens):
    """In float64 from the package's floats; rows and what SwiGLU gives are rounded to bfloat16 by the kernels alone."""
    experts, model, width = 2, 512, 256
    shapes = ((experts, width, model), (experts, width, model), (experts, model, width))
    made = [random_blocks(format, *shape, seed=i) for i, shape in enumerate(shapes)]
    gate, up, down = (meant(m, format).astype(np.float64) for m in made)
    batch = random_batch(tokens, model, experts, 1)
    batch = batch._replace(ids=np.arange(tokens, dtype=np.int32)[:, None] % experts)
    expected = np.zeros((tokens, model))
    for t, (x, (e,), (weight,)) in enumerate(zip(*batch, strict=True)):
        g = gate[e] @ x
        expected[t] = weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x)))
    with Experts(*((m,) for m in made), format, isa=isa, threads=2) as layer:
        out = layer.forward(*batch)
    assert np.linalg.norm(out - expected) < (BOUNDS[format] + BOUNDS["bf16"]) * np.linalg.norm(expected)


@pytest.mark.parametrize("format", ["q4_k", "q6_k"])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_extreme_fields_of_blocks_are_within_the_bound(isa, format, tokens):
    """Every byte of a block all ones or all zeros in turn: codes, scales and minima at their ends, scales of -128 and -1."""
    made = random_blocks(format, 1, 256, 256, seed=4)
    fields = [i for i in range(made.shape[-1]) if i not in {at + j for at in HALVES[format] for j in (0, 1)}]
    for row in range(256):
        made[0, row, 0, fields[row % len(fields)]] = 0xFF if row % 2 else 0
    made[0, 7, 0, fields], made[0, 8, 0, fields] = 0xFF, 0
    if format == "q6_k":
        made[0, 9, 0, 192:208] = 0x80
    parts = [(made,)] * 3
    batch = Batch(*random_batch(tokens, 256, 1, 1)[:1], np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32))
    with Experts(*parts, format, isa=isa) as layer:
        assert distance(layer.forward(*batch), batch, parts, format) < BOUNDS[format]


@pytest.mark.parametrize("format", TYPES)
@pytest.mark.parametrize("scale", [np.inf, np.nan])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_scale_that_is_not_finite_shows_in_the_result(isa, format, scale, tokens):
    made = random_blocks(format, 1, 256, 256)
    down = made.copy()
    down[0, 5, 0, HALVES[format][0] :][:2] = np.float16([scale]).view(np.uint8)
    gate, up, down = ((blocks.q8_0_parts(m) if format == "q8_0" else (m,)) for m in (made, made, down))
    batch = random_batch(tokens, 256, 1, 1)._replace(ids=np.zeros((tokens, 1), np.int32))
    with Experts(gate, up, down, format, isa=isa, threads=2) as layer:
        out = layer.forward(*batch)
    assert not np.isfinite(out[:, 5]).any()
    assert np.isfinite(np.delete(out, 5, axis=1)).all()


@pytest.mark.parametrize("format", ["q4_k", "q6_k"])
def test_packed_blocks_take_no_more_than_the_file(format):
    made = random_blocks(format, 2, 64, 512)
    assert layout.pack_experts([(made,)], format, 512).nbytes == made.nbytes


@pytest.mark.parametrize("format", ["q4_k", "q6_k"])
def test_zeros_and_weights_that_are_not_finite(format):
    w = random_layer(1, 256, 8)[0]
    w[0, 0], w[0, 1, :32] = 0, 0
    near = blocks.values(blocks.quantize(w, format), format)
    assert not near[0, 0].any()
    assert not near[0, 1, :32].any()
    w[0, 3, 3] = np.inf
    with pytest.raises(ValueError, match="finite"):
        blocks.quantize(w, format)
    with pytest.raises(ValueError, match="multiple of 256"):
        blocks.quantize(w[..., :255], format)
