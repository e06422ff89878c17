"""The specification against sums in float64; the fallback and the kernel, interpreted, against the specification."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choice, fp8, testing
from pallas_kernels.fp8 import Fp8
from pallas_kernels.quantized_matmul import CHECKS, Unsupported, quantized_matmul, reference

pytestmark = pytest.mark.deep

each_case = pytest.mark.parametrize("case", testing.QUANTIZED_MATMUL, ids=lambda case: case.name)
each_held = pytest.mark.parametrize("held", ["w8", "w8a8"])
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")


def operands(case, held, seed=0, dtype=jnp.bfloat16):
    inputs = testing.quantized_matmul_inputs(case, seed, dtype)
    return fp8.quantize(inputs["x"]) if held == "w8a8" else inputs["x"], fp8.quantize_weight(inputs["w"])


def double(x, w):
    x = fp8.dequantize(x) if isinstance(x, Fp8) else x.astype(jnp.float32)
    return np.asarray(x, np.float64) @ np.asarray(fp8.dequantize(w, fp8.GROUP), np.float64).T


def rowwise(got, wanted):
    """The largest error of a row: rows differ in size by powers of ten."""
    return max(testing.error(a, b) for a, b in zip(got, wanted, strict=True))


@each_case
@each_held
def test_the_reference_is_the_sum_it_says_and_the_fallback_follows(case, held):
    x, w = operands(case, held)
    wanted = reference.quantized_matmul(x, w)
    assert rowwise(wanted, double(x, w)) < 1e-5
    out = quantized_matmul(x, w, impl="xla")
    assert out.dtype == jnp.bfloat16
    assert rowwise(out, wanted) < 6e-3


@settings(max_examples=8)
@given(rows=st.integers(1, 20), depth=st.integers(1, 300), features=st.integers(1, 300), seed=st.integers(0, 9))
def test_the_fallback_holds_for_any_shape(rows, depth, features, seed):
    x, w = operands(testing.QuantizedMatmulCase("any", rows, depth, features), "w8", seed, jnp.float32)
    out = quantized_matmul(x, w, impl="xla")
    assert out.shape == (rows, features)
    assert rowwise(out, double(x, w)) < 1e-5


def test_the_result_comes_in_the_dtype_asked_for():
    x, w = operands(testing.QUANTIZED_MATMUL[0], "w8a8")
    assert quantized_matmul(x, w, impl="xla", out_dtype=jnp.float32).dtype == jnp.float32


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    x, w = operands(testing.QuantizedMatmulCase("", 2, 192, 64), "w8")
    with pytest.raises(Unsupported, match="no impl"):
        quantized_matmul(x, w, impl="cuda")
    with pytest.raises(Unsupported, match="multiples of 128" if choice.too_old() is None else "JAX"):
        quantized_matmul(x, w, impl="mosaic_gpu")
    assert quantized_matmul(x, w).shape == (2, 64)


@hopper
def test_a_hopper_gpu_takes_the_kernel(monkeypatch):
    from types import SimpleNamespace

    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    for held in ("w8", "w8a8"):
        args = operands(testing.QUANTIZED_MATMUL[0], held)
        assert choice.choose("quantized_matmul", None, CHECKS, *args) == "mosaic_gpu"


@hopper
def test_the_gpu_kernel_takes_rows_as_deep_as_the_weights_and_no_other_8_bit_numbers():
    _, w = operands(testing.QUANTIZED_MATMUL[0], "w8")
    x = jnp.zeros((2, 128), jnp.bfloat16)
    assert "not 128 and 256" in CHECKS["mosaic_gpu"](x, w)
    assert "float8_e5m2" in CHECKS["mosaic_gpu"](jnp.zeros((2, 256), jnp.bfloat16), Fp8(w.codes.astype(jnp.float8_e5m2), w.scale))


@hopper
@each_case
@each_held
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case, held):
    row = interpreted("quantized_matmul")[1][f"{case.name}, {held}"]
    assert row["error"] <= 2 * row["fallback"]


@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("quantized_matmul")[0]
