"""The fallback against the specification; the kernel, interpreted, against both."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choice, testing
from pallas_kernels.moe_decode import CHECKS, Unsupported, moe_decode, reference

pytestmark = pytest.mark.deep

each_case = pytest.mark.parametrize("case", testing.MOE_DECODE, ids=lambda case: case.name)
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")


@each_case
@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-6), (jnp.bfloat16, 5e-3)], ids=["float32", "bfloat16"])
def test_the_fallback_follows_the_specification(case, dtype, most):
    inputs = testing.moe_decode_inputs(case, dtype=dtype)
    got = moe_decode(**inputs, impl="xla")
    assert got.dtype == dtype
    assert testing.error(got, reference.moe_decode(**inputs)) < most


@settings(max_examples=20, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    model=st.integers(1, 9),
    width=st.integers(1, 9),
)
def test_the_fallback_takes_any_sizes(ids, model, width):
    case = testing.MoeDecodeCase("any", tuple(map(tuple, ids)), 5, model, width)
    inputs = testing.moe_decode_inputs(case, dtype=jnp.float32)
    assert testing.error(moe_decode(**inputs, impl="xla"), reference.moe_decode(**inputs)) < 1e-5


def test_the_specification_is_what_torch_says():
    torch = pytest.importorskip("torch", reason="torch comes with the parity tests")
    case = testing.MoeDecodeCase("", ((1, 0), (2, 1)), 3, 8, 6)
    inputs = testing.moe_decode_inputs(case, dtype=jnp.float32)
    x, share, gate, up, down = (torch.tensor(inputs[name].tolist()) for name in ("x", "topk_weights", "gate", "up", "down"))
    for t, ids in enumerate(case.ids):
        wanted = sum(
            w * (down[e] @ (torch.nn.functional.silu(gate[e] @ x[t]) * (up[e] @ x[t])))
            for e, w in zip(ids, share[t], strict=True)
        )
        assert testing.error(reference.moe_decode(**inputs)[t], wanted) < 1e-6


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    inputs = testing.moe_decode_inputs(testing.MoeDecodeCase("", ((0,),), 1, 24, 8))
    with pytest.raises(Unsupported, match="no impl"):
        moe_decode(**inputs, impl="cuda")
    with pytest.raises(Unsupported, match="multiples of 64" if choice.too_old() is None else "JAX"):
        moe_decode(**inputs, impl="mosaic_gpu")


@hopper
def test_a_hopper_gpu_takes_the_kernel(monkeypatch):
    from types import SimpleNamespace

    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    inputs = [testing.moe_decode_inputs(case) for case in testing.MOE_DECODE]
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    for arrays in inputs:
        names = ("x", "topk_ids", "gate", "up", "down")
        assert choice.choose("moe_decode", None, CHECKS, *(arrays[name] for name in names)) == "mosaic_gpu"


@hopper
def test_the_depth_is_cut_so_that_the_busiest_has_little_more_than_its_share():
    from pallas_kernels.moe_decode.gpu import parts_of

    for tokens, model, steps in ((1, 2048, 66), (8, 2048, 66), (1, 7168, 128), (4, 7168, 128)):
        pieces = tokens * model // 64
        parts = parts_of(pieces, steps, 132)
        assert 1 <= parts <= steps
        assert -(-pieces * parts // 132) * -(-steps // parts) <= 1.13 * pieces * steps / 132


@pytest.mark.timeout(600)
@hopper
@each_case
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("moe_decode")[1][case.name]
    assert row["error"] <= 2 * row["fallback"]


@pytest.mark.timeout(600)
@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("moe_decode")[0]
