"""The fallback against the specification; the kernel, interpreted, against both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choice, testing
from pallas_kernels.mla_decode import reference as dense
from pallas_kernels.mla_sparse import CHECKS, Unsupported, mla_sparse, reference, xla

each_case = pytest.mark.parametrize("case", testing.MLA_SPARSE, ids=lambda case: case.name)
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")


def fallback(case, inputs):
    return jax.jit(functools.partial(mla_sparse, scale=case.scale, impl="xla"))(**inputs)


@each_case
@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-3)], ids=["float32", "bfloat16"])
def test_the_fallback_follows_the_specification(case, dtype, most):
    inputs = testing.mla_sparse_inputs(case, dtype=dtype)
    out, lse = fallback(case, inputs)
    wanted = reference.mla_sparse(**inputs, scale=case.scale)
    assert out.dtype == dtype
    assert testing.error(out, wanted[0]) < most
    assert testing.lse_error(lse, wanted[1]) < 1e-5


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=2), min_size=1, max_size=3),
    page=st.sampled_from([1, 7, 16]),
    seed=st.integers(0, 9),
)
def test_the_fallback_holds_for_any_counts(counts, page, seed):
    case = testing.MlaSparseCase("any", tuple(map(tuple, counts)), 3, 40, rank=32, rope=8, page=page)
    inputs = testing.mla_sparse_inputs(case, seed, jnp.float32)
    out, lse = mla_sparse(**inputs, scale=0.3)
    wanted = reference.mla_sparse(**inputs, scale=0.3)
    assert testing.error(out, wanted[0]) < 1e-5
    assert testing.lse_error(lse, wanted[1]) < 1e-5


def test_a_long_prompt_is_computed_in_blocks_of_queries():
    case = testing.MlaSparseCase("", (tuple(range(xla.QUERIES + 9)), (5,) * (xla.QUERIES + 9)), 2, 80, rank=16, rope=8)
    inputs = testing.mla_sparse_inputs(case, dtype=jnp.float32)
    out, lse = fallback(case, inputs)
    wanted = reference.mla_sparse(**inputs, scale=case.scale)
    assert testing.error(out, wanted[0]) < 1e-5
    assert testing.lse_error(lse, wanted[1]) < 1e-5


def test_choosing_every_token_is_attention_over_all_of_them():
    case = testing.MlaDecodeCase("", (100, 37), 4, rank=32, rope=8, page=16)
    inputs = testing.mla_decode_inputs(case, dtype=jnp.float32)
    wanted = dense.mla_decode(**inputs, scale=case.scale)
    table, lens = inputs.pop("page_table"), inputs.pop("seq_lens")
    slots = (table[:, :, None] * case.page + jnp.arange(case.page)).reshape(len(lens), 1, -1)
    out, lse = mla_sparse(**inputs, slots=slots, counts=lens[:, None], scale=case.scale)
    assert testing.error(out, wanted[0]) < 1e-5
    assert testing.lse_error(lse, wanted[1]) < 1e-5


def test_the_specification_is_what_torch_says():
    torch = pytest.importorskip("torch", reason="torch comes with the parity tests")
    inputs = testing.mla_sparse_inputs(testing.MlaSparseCase("", ((40,),), 2, 40, rank=32, rope=8), dtype=jnp.float32)
    chosen = np.asarray(inputs["slots"][0, 0])
    c, pe = (np.asarray(inputs[name]).reshape(-1, width)[chosen] for name, width in (("c_kv", 32), ("k_pe", 8)))
    q, k, v = np.concatenate([inputs["q_c"], inputs["q_pe"]], axis=-1), np.concatenate([c, pe], axis=-1), c
    q, k, v = torch.tensor(q[0].tolist()).swapaxes(0, 1), torch.tensor(k.tolist())[None], torch.tensor(v.tolist())[None]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k.expand(2, -1, -1), v.expand(2, -1, -1), scale=0.2)
    assert np.abs(reference.mla_sparse(**inputs, scale=0.2)[0][0, 0] - wanted[:, 0].numpy()).max() < 1e-5


@pytest.mark.parametrize(("rows", "tokens", "most"), [(2, 1, 0), (2, 0, 3), (0, 1, 3)])
def test_no_slot_gives_zeros_and_an_lse_of_minus_infinity_and_no_query_nothing(rows, tokens, most):
    shapes = {"q_c": (rows, tokens, 3, 128), "q_pe": (rows, tokens, 3, 64), "c_kv": (4, 64, 128), "k_pe": (4, 64, 64)}
    inputs = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    slots, counts = jnp.zeros((rows, tokens, most), jnp.int32), jnp.zeros((rows, tokens), jnp.int32)
    out, lse = mla_sparse(**inputs, slots=slots, counts=counts, scale=1.0)
    assert out.shape == shapes["q_c"]
    assert out.dtype == jnp.bfloat16
    assert (out == 0).all()
    assert lse.shape == shapes["q_c"][:-1]
    assert np.isneginf(lse).all()


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    inputs = testing.mla_sparse_inputs(testing.MlaSparseCase("", ((4,),), 3, 8, rank=192))
    with pytest.raises(Unsupported, match="no impl"):
        mla_sparse(**inputs, scale=1.0, impl="cuda")
    with pytest.raises(Unsupported, match="not 192" if choice.too_old() is None else "JAX"):
        mla_sparse(**inputs, scale=1.0, impl="mosaic_gpu")
    assert mla_sparse(**inputs, scale=1.0)[0].shape == (1, 1, 3, 192)


@hopper
@each_case
def test_a_hopper_gpu_takes_the_kernel(monkeypatch, case):
    from types import SimpleNamespace

    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    inputs = jax.eval_shape(lambda: testing.mla_sparse_inputs(case))
    arrays = [inputs[name] for name in ("q_c", "q_pe", "c_kv", "k_pe", "slots")]
    assert choice.choose("mla_sparse", None, CHECKS, *arrays) == "mosaic_gpu"


@pytest.mark.deep
@pytest.mark.timeout(600)
@hopper
@each_case
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("mla_sparse")[1][case.name]
    assert row["error"] <= 2 * row["fallback"]
    assert row["lse"] < 1e-3


@pytest.mark.deep
@pytest.mark.timeout(600)
@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("mla_sparse")[0]
