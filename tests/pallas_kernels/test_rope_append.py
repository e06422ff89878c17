"""The fallback against the specification; the kernel, interpreted, against both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choice, testing
from pallas_kernels.rope_append import CHECKS, Latents, Unsupported, reference, rope_append

pytestmark = pytest.mark.deep

each_case = pytest.mark.parametrize("case", testing.ROPE_APPEND, ids=lambda case: case.name)
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")


@each_case
@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)], ids=["float32", "bfloat16"])
def test_the_fallback_follows_the_specification(case, dtype, most):
    inputs = testing.rope_append_inputs(case, dtype=dtype)
    got = rope_append(**inputs, impl="xla")
    assert got[0].dtype == got[1].c_kv.dtype == dtype
    assert max(testing.rope_append_errors(got, reference.rope_append(**inputs), inputs).values()) < most


def test_the_specification_turns_as_torch_multiplies_complex_numbers():
    torch = pytest.importorskip("torch", reason="torch comes with the parity tests")
    x, angles = np.random.default_rng(0).standard_normal(64), np.linspace(0, 3, 32)
    turns = np.exp(1j * angles)
    wanted = torch.view_as_real(torch.view_as_complex(torch.tensor(x).reshape(-1, 2)) * torch.tensor(turns)).reshape(-1)
    np.testing.assert_allclose(reference.turned(x, turns, interleave=True), wanted.numpy(), rtol=1e-12)


@settings(max_examples=15)
@given(
    tokens=st.lists(st.text("n->", min_size=3, max_size=3), min_size=1, max_size=3).map(tuple),
    pages=st.tuples(st.integers(3, 5), st.integers(3, 4)),
    interleave=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_fallback_holds_for_any_padding(tokens, pages, interleave, seed):
    case = testing.RopeAppendCase("any", tokens, 2, 48, 16, 8, *pages, interleave=interleave)
    inputs = testing.rope_append_inputs(case, seed, jnp.float32)
    errors = testing.rope_append_errors(rope_append(**inputs, impl="xla"), reference.rope_append(**inputs), inputs)
    assert max(errors.values()) < 1e-6


def test_the_fallback_finds_slots_of_a_pool_of_more_than_2_31_numbers():
    case = testing.RopeAppendCase("large", ("nn-", ">nn"), 2, rope=2)
    inputs = testing.rope_append_inputs(case, dtype=jnp.float32) | {"weight": jnp.full(512, 20.0)}
    pages, fixed = (1 << 31) // (64 * 512) + 2, {name: inputs.pop(name) for name in ("eps", "interleave")}
    slots = np.array([[0, 64 * pages - 1, -64 * pages], [64 * pages, (1 << 31) // 512 - 1, (1 << 31) // 512]], np.int32)
    inputs |= {
        "tokens": inputs["tokens"]._replace(slot=slots),
        "cache": Latents(*(jnp.zeros((pages, 64, w), jnp.int8) for w in (512, 2))),
    }
    step = jax.jit(functools.partial(rope_append, impl="xla", **fixed), donate_argnames="cache")
    got = np.asarray(step(**inputs)[1].c_kv).reshape(-1, 512)
    assert np.flatnonzero(got.any(1)).tolist() == sorted(slots[[0, 0, 1, 1], [0, 1, 1, 2]])


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    inputs = testing.rope_append_inputs(testing.RopeAppendCase("", ("n",), 2, width=64))
    with pytest.raises(Unsupported, match="no impl"):
        rope_append(**inputs, impl="cuda")
    with pytest.raises(Unsupported, match="heads of 128" if choice.too_old() is None else "JAX"):
        rope_append(**inputs, impl="mosaic_gpu")


@hopper
def test_a_hopper_gpu_takes_the_kernel(monkeypatch):
    from types import SimpleNamespace

    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    inputs = [testing.rope_append_inputs(case) for case in testing.ROPE_APPEND]
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    for arrays in inputs:
        assert choice.choose("rope_append", None, CHECKS, *(arrays[name] for name in ("q", "kv", "cache"))) == "mosaic_gpu"


@hopper
@each_case
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("rope_append")[1][case.name]
    assert all(row["errors"][name] <= 2 * row["fallback"][name] for name in row["errors"])


@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("rope_append")[0]
