"""The fallback against the specification; the kernel, interpreted, against both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice, testing
from pallas_kernels.rms_norm import CHECKS, Unsupported, gpu, reference, rms_norm, xla

each_case = pytest.mark.parametrize("case", testing.RMS_NORM, ids=lambda case: case.name)
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")


@each_case
@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-6), (jnp.bfloat16, 5e-3)], ids=["float32", "bfloat16"])
def test_the_fallback_follows_the_specification(case, dtype, most):
    inputs = testing.rms_norm_inputs(case, dtype=dtype)
    for got, wanted in zip(rms_norm(**inputs, eps=1e-6), reference.rms_norm(**inputs, eps=1e-6), strict=True):
        assert got.dtype == dtype
        assert testing.error(got, wanted) < most


def test_the_specification_is_what_torch_says():
    torch = pytest.importorskip("torch", reason="torch comes with the parity tests")
    inputs = testing.rms_norm_inputs(testing.RmsNormCase("", 3, 64, 0.1), dtype=jnp.float32)
    x, y, weight = (torch.tensor(inputs[name].tolist()) for name in ("x", "y", "weight"))
    wanted = torch.nn.functional.rms_norm(x + y, (64,), weight, eps=1e-2)
    np.testing.assert_allclose(reference.rms_norm(**inputs, eps=1e-2)[1], wanted.numpy(), rtol=1e-5)


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    inputs = testing.rms_norm_inputs(testing.RmsNormCase("", 2, 128))
    with pytest.raises(Unsupported, match="no impl"):
        rms_norm(**inputs, eps=1e-6, impl="cuda")
    with pytest.raises(Unsupported, match="one row" if choice.too_old() is None else "JAX"):
        rms_norm(**inputs, eps=1e-6, impl="mosaic_gpu")


@hopper
def test_a_hopper_gpu_takes_the_kernel(monkeypatch):
    from types import SimpleNamespace

    h200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    inputs = [testing.rms_norm_inputs(case) for case in testing.RMS_NORM]
    monkeypatch.setattr(jax, "devices", lambda *_: [h200])
    for arrays in inputs:
        assert choice.choose("rms_norm", None, CHECKS, arrays["x"], arrays["weight"]) == "mosaic_gpu"


def test_the_kernel_has_the_gradients_of_the_fallback(monkeypatch):
    inputs = testing.rms_norm_inputs(testing.RMS_NORM[2], dtype=jnp.float32)
    monkeypatch.setattr(choice, "take", lambda *_: "mosaic_gpu")
    stopped = functools.partial(jax.tree.map, jax.lax.stop_gradient)
    monkeypatch.setattr(gpu, "rms_norm", lambda *arrays, eps: stopped(xla.rms_norm(*arrays, eps=eps)))

    def total(inputs, function):
        return sum((out**3).sum() for out in function(**inputs, eps=1e-6))

    found, wanted = (jax.grad(total)(inputs, function) for function in (rms_norm, xla.rms_norm))
    for name in inputs:
        assert np.abs(wanted[name]).max() > 0
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)


@pytest.mark.deep
@hopper
@each_case
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("rms_norm")[1][case.name]
    assert all(error <= 2 * own for error, own in zip(row["errors"], row["fallback"], strict=True))


@pytest.mark.deep
@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("rms_norm")[0]
