"""The fallback against the specification; the kernel, interpreted, against both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choice, testing
from pallas_kernels.heads_decode import CHECKS, Unsupported, heads_decode, reference

each_case = pytest.mark.parametrize("case", testing.HEADS_DECODE, ids=lambda case: case.name)
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")


def off(got, wanted) -> float:
    """The larger error of output and LSE, where both attend to the same."""
    found, nothing = [np.asarray(x, np.float64) for x in got], np.isneginf(wanted[1])
    assert (np.isneginf(found[1]) == nothing).all()
    return max(np.abs(found[0] - wanted[0]).max(), np.abs(np.where(nothing, 0, found[1] - wanted[1])).max())


@each_case
@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
def test_the_fallback_follows_the_specification(case, dtype, most):
    inputs = testing.heads_decode_inputs(case, dtype=dtype)
    got = heads_decode(**inputs, scale=0.1, impl="xla")
    assert got[0].dtype == dtype
    assert off(got, reference.heads_decode(**inputs, scale=0.1)) < most


@settings(max_examples=15, deadline=None)
@given(lens=st.lists(st.lists(st.integers(0, 70), min_size=2, max_size=2), min_size=1, max_size=3), seed=st.integers(0, 9))
def test_the_fallback_holds_for_any_lengths(lens, seed):
    case = testing.HeadsDecodeCase("any", tuple(map(tuple, lens)), max(len(lens), 1), 16, 8, 16)
    inputs = testing.heads_decode_inputs(case, seed, jnp.float32)
    assert off(heads_decode(**inputs, scale=0.3), reference.heads_decode(**inputs, scale=0.3)) < 1e-5


def test_the_specification_is_what_torch_says():
    torch = pytest.importorskip("torch", reason="torch comes with the parity tests")
    inputs = testing.heads_decode_inputs(testing.HeadsDecodeCase("", ((40,),), 2, 16, 16, 64), dtype=jnp.float32)
    page = int(inputs["page_table"][0, 0, 0])
    q, k, v = (torch.tensor(np.asarray(x).tolist()) for x in (inputs["q"], inputs["k"][page, :40], inputs["v"][page, :40]))
    by_head = (x.swapaxes(0, 1)[None] for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*by_head, scale=0.2)[0, :, 0]
    assert np.abs(reference.heads_decode(**inputs, scale=0.2)[0][0] - wanted.numpy()).max() < 1e-5


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    inputs = testing.heads_decode_inputs(testing.HeadsDecodeCase("", ((4,),), 1, 48, 48))
    with pytest.raises(Unsupported, match="no impl"):
        heads_decode(**inputs, scale=1.0, impl="cuda")
    with pytest.raises(Unsupported, match="multiples of 64" if choice.too_old() is None else "JAX"):
        heads_decode(**inputs, scale=1.0, impl="mosaic_gpu")


@hopper
def test_a_hopper_gpu_takes_the_kernel(monkeypatch):
    from types import SimpleNamespace

    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    for case in testing.HEADS_DECODE:
        inputs = testing.heads_decode_inputs(case)
        arrays = inputs["q"], inputs["k"], inputs["v"], inputs["page_table"]
        assert choice.choose("heads_decode", None, CHECKS, *arrays) == "mosaic_gpu"


@pytest.mark.deep
@pytest.mark.timeout(600)
@hopper
@each_case
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("heads_decode")[1][case.name]
    assert row["error"] <= max(2 * row["fallback"], 1e-6)
    assert row["lse"] < 1e-3


@pytest.mark.deep
@pytest.mark.timeout(600)
@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("heads_decode")[0]
