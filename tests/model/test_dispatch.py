"""The forms and kernels of a step by device, asked of the functions that run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base.options import ATTENTION
from mla_jax.base.roofline import DEVICES, pick_form
from mla_jax.model import kernels, mla
from mla_jax.model.dispatch import Dispatch
from pallas_kernels import choice

CONFIG = Config.preset("v2_lite", num_hidden_layers=1)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return nnx.eval_shape(lambda: Transformer(CONFIG, nnx.Rngs(0), dispatch=Dispatch(device=DEVICES["NVIDIA H200"])))


def with_kernels(monkeypatch, *taking: str):
    """As on a device whose kernels take these ops."""
    monkeypatch.setattr(choice, "kernels_here", lambda: True)
    monkeypatch.setattr(choice, "choose", lambda op, *_: "mosaic_gpu" if op in taking else "xla")


def test_without_kernels_auto_takes_a_form_of_xla(model):
    assert {model.dispatch.form_name(model, 1, new, 4096) for new in (1, 8, 512)} <= {"move_elided", "compressed"}


def test_few_new_tokens_take_the_kernel_over_latents(model, monkeypatch):
    with_kernels(monkeypatch, "mla_decode")
    assert [model.dispatch.form_name(model, 2, new, 64) for new in (1, 8)] == ["kernel_latents"] * 2
    assert model.dispatch.form_name(model, 2, 512, 512) == "compressed"  # whose kernel is another


def test_many_new_tokens_take_the_kernel_over_heads(model, monkeypatch):
    with_kernels(monkeypatch, "mla_prefill")
    assert model.dispatch.form_name(model, 2, 512, 512) == "kernel_heads"
    assert model.dispatch.form_name(model, 2, 1, 64) == "move_elided"


def test_where_heads_are_cached_one_new_token_takes_their_kernel(monkeypatch):
    with_kernels(monkeypatch, "heads_decode")
    model = Transformer(CONFIG, nnx.Rngs(0), dispatch=Dispatch("naive"))
    assert [model.dispatch.form_name(model, 2, new, 64) for new in (1, 2, 512)] == ["kernel_naive", "naive", "naive"]


@pytest.mark.parametrize(("new", "op"), [(2, "mla_decode"), (64, "mla_prefill")])
def test_the_answer_is_of_the_arrays_that_the_kernel_gets(model, monkeypatch, new, op):
    seen = []
    monkeypatch.setattr(choice, "kernels_here", lambda: True)
    monkeypatch.setattr(choice, "choose", lambda name, _impl, _checks, *arrays: seen.append((name, arrays)) or "xla")
    form = "kernel_latents" if new == 2 else "kernel_heads"
    assert model.dispatch.attention_kernel(model, form, 3, new, 64) == "xla"
    _, (queries, *_) = next(call for call in reversed(seen) if call[0] == op)
    assert queries.shape[:3] == (3, new, CONFIG.num_attention_heads)


def test_fused_takes_the_kernels_rows_whatever_computes_them(model):
    dispatch = Dispatch("fused")
    assert [dispatch.form_name(model, 1, new, 64) for new in (1, 64)] == ["kernel_latents", "kernel_heads"]


def test_every_form_that_may_be_asked_for_has_a_row():
    assert set(ATTENTION) - {"auto", "fused"} == mla.FORMS.keys()


def test_asking_leaves_no_trace(monkeypatch):
    with_kernels(monkeypatch, "mla_prefill")

    def attend(q: jax.Array) -> jax.Array:
        return kernels.mla_prefill(q, q, q, jnp.full((1, 4), 0), jnp.full((1, 4), 4), 1.0)[0]

    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 2, 8)), jnp.float32)
    assert kernels.who_computes(attend, q) == {"mla_prefill": "mosaic_gpu"}
    monkeypatch.setattr(choice, "choose", lambda *_: "xla")
    assert attend(q).shape == q.shape  # computed, and by the fallback
    assert kernels.who_computes(attend, q) == {"mla_prefill": "xla"}


def test_a_dispatch_is_a_value():
    assert Dispatch() == Dispatch()
    assert hash(Dispatch("naive")) == hash(Dispatch("naive")) != hash(Dispatch())


@pytest.mark.deep
def test_what_a_pool_has_besides_latents_passes_through_rope_append():
    rank, rope = 128, 32
    pool = {"c_kv": jnp.zeros((1, 4, rank)), "k_pe": jnp.zeros((1, 4, rope)), "index_k": jnp.ones((1, 4, 3))}
    half = jnp.ones((1, 2, rope // 2))
    tokens = (jnp.array([[1, 3]], jnp.int32), half, half)
    q, kv = jnp.ones((1, 2, 1, 128)), jnp.ones((1, 2, rank + rope))
    _, after = kernels.rope_append(q, kv, jnp.ones(rank), pool, tokens, eps=1e-6, interleave=True)
    assert after.keys() == pool.keys()
    np.testing.assert_array_equal(after["index_k"], pool["index_k"])
    assert after["c_kv"].any(-1).tolist() == [[False, True, False, True]]


def test_a_kernel_is_weighed_by_its_own_cost_not_by_scores_that_only_xla_writes(model, monkeypatch):
    """On a device with little bandwidth XLA's form over heads loses to the one over latents, and the kernel beats both."""
    slow = DEVICES["NVIDIA H100"]._replace(bandwidth=1e11)
    dispatch, config = Dispatch(device=slow), model.config
    assert pick_form(config, slow, 1, 2048, 16_384) == "move_elided"
    assert dispatch.form_name(model, 1, 2048, 16_384) == "move_elided"
    with_kernels(monkeypatch, "mla_prefill")
    assert dispatch.form_name(model, 1, 2048, 16_384) == "kernel_heads"


@pytest.mark.parametrize("flops", [1e12, 1e14, 1e16])
def test_few_new_tokens_take_their_kernel_whether_arithmetic_or_memory_bounds_them(model, monkeypatch, flops):
    with_kernels(monkeypatch, "mla_decode")
    dispatch = Dispatch(device=DEVICES["NVIDIA H100"]._replace(flops=flops))
    assert dispatch.form_name(model, 64, 1, 4096) == "kernel_latents"


@pytest.mark.parametrize("attention", ["auto", "fused"])
def test_any_prompts_share_a_line_where_the_kernel_over_heads_reads_them(model, monkeypatch, attention):
    on = Dispatch(attention, device=DEVICES["NVIDIA H200"])
    assert on.reach(model) == 2048  # nothing is there yet that could
    with_kernels(monkeypatch, "mla_decode")
    assert on.reach(model) == 2048  # that is another kernel
    with_kernels(monkeypatch, "mla_prefill")
    assert on.reach(model) >= model.config.max_position_embeddings * 64


@pytest.mark.parametrize("attention", mla.FORMS)
def test_prompts_that_a_form_of_xla_reads_share_a_line_up_to_its_scores_though_a_kernel_were_there(model, monkeypatch, attention):
    with_kernels(monkeypatch, "mla_decode", "mla_prefill")
    assert Dispatch(attention, device=DEVICES["NVIDIA H200"]).reach(model) == 2048


@pytest.mark.parametrize("attention", ATTENTION)
def test_on_a_cpu_prompts_share_a_line_up_to_its_scores(model, attention):
    assert Dispatch(attention, device=DEVICES["cpu"]).reach(model) == 2048
