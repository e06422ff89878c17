"""The gain of each form of MLA, at DeepSeek-V3's size: one decode step over 4,096 held tokens, float32 on a CPU."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base import roofline
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.model import mla
from mla_jax.model.block_attention import StepCache
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.mla import FORMS
from mla_jax.model.rope import softmax_scale

HELD = 4096
V3 = Config.preset("v3")


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step_inputs(config: Config, held: int):
    """Shapes of `(q, latent, up, mask)` for one query token of one row."""
    n, r, e = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    up = (struct(n, config.qk_nope_head_dim, r), struct(n, config.v_head_dim, r))
    q = (struct(1, 1, n, config.qk_nope_head_dim), struct(1, 1, n, e))
    return q, (struct(1, held, r), struct(1, held, e)), up, jax.ShapeDtypeStruct((1, 1, 1, held), jnp.bool_)


def attended(form: str, q, cached: dict, up, mask, scale: float) -> jax.Array:
    form = FORMS[form]
    return form.attends(q, StepCache(cached, None, mask, form.reads), up, scale)


@pytest.fixture(scope="module")
def compiled():
    """Each form's attention as a compiled program, and the shapes of its cache."""
    q, latent, up, mask = step_inputs(V3, HELD)
    programs = {}
    for name, form in FORMS.items():
        held = jax.eval_shape(form.remembers, *latent, up)
        attend = jax.jit(attended, static_argnums=(0, 5))
        programs[name] = attend.lower(name, q, held, up, mask, softmax_scale(V3)).compile(), held
    return programs


def test_the_forms_agree(compiled):
    rng = np.random.default_rng(0)
    fill = lambda shape: jnp.asarray(rng.standard_normal(shape.shape, np.float32))  # noqa: E731
    q, latent, up, _ = jax.tree.map(fill, step_inputs(V3, HELD))
    up = jax.tree.map(lambda w: w * V3.kv_lora_rank**-0.5, up)
    mask = jnp.arange(HELD)[None, None, None] < HELD - 7
    results = {}
    for name, (program, _) in compiled.items():
        results[name] = np.asarray(program(q, FORMS[name].remembers(*latent, up), up, mask))
    for name, result in results.items():
        assert np.abs(result - results["naive"]).max() <= 1e-5 * np.abs(results["naive"]).max(), name


def test_compressing_holds_71_times_fewer_bytes(compiled):
    held = {name: sum(prod(a.shape) * a.dtype.itemsize for a in shapes.values()) for name, (_, shapes) in compiled.items()}
    assert held["naive"] / held["compressed"] == pytest.approx(81920 / 1152)
    assert held["compressed"] == held["absorbed"] == held["move_elided"]


def test_absorbing_takes_100_times_fewer_flops(compiled):
    flops = {name: program.cost_analysis()["flops"] for name, (program, _) in compiled.items()}
    assert flops["compressed"] / flops["absorbed"] >= 100
    assert flops["compressed"] / flops["move_elided"] >= 100


def test_eliding_moves_takes_10_times_less_temporary_memory(compiled):
    temporary = {name: program.memory_analysis().temp_size_in_bytes for name, (program, _) in compiled.items()}
    assert temporary["absorbed"] / temporary["move_elided"] >= 10
    assert temporary["compressed"] / temporary["move_elided"] >= 10


@pytest.mark.parametrize("form", FORMS)
def test_the_cost_model_counts_the_flops_that_xla_counts(compiled, form):
    counted = compiled[form][0].cost_analysis()["flops"]
    q_and_out = 2 * prod(step_inputs(V3, 0)[2][0].shape) * 2  # naive attends to heads that were expanded when they were new
    modelled = roofline.attention_cost(V3, form, 1, 1, HELD, 4).flops - (q_and_out if form == "naive" else 0)
    assert modelled == pytest.approx(counted, rel=0.05)


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_a_query_with_nothing_to_attend_to_gets_zeros(form):
    config = Config.preset("tiny")
    q, latent, up, _ = jax.tree.map(lambda s: jnp.ones(s.shape), step_inputs(config, 8))
    out = attended(form, q, FORMS[form].remembers(*latent, up), up, jnp.zeros((1, 1, 1, 8), bool), 1.0)
    assert not np.asarray(out).any()


def test_the_four_forms_are_short_enough_to_be_read_side_by_side():
    import inspect

    forms = (mla.naive, mla.compressed, mla.absorbed, mla.move_elided)
    assert sum(len(inspect.getsource(f).splitlines()) for f in forms) <= 60


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_nothing_wherever_it_is_without_a_cache_and_behind_a_rows_tokens_with_one(form):
    config = Config.preset("tiny")
    model = Transformer(config, nnx.Rngs(0), dispatch=Dispatch(form))
    tokens = jax.random.randint(jax.random.key(1), (1, 9), 0, config.vocab_size)
    call = jax.jit(lambda tokens, batch, pool: model(tokens, batch, pool)[0])
    plain = call(tokens, Batch.dense(1, 9), None)
    table, empty = paged.in_order(1, 64), jnp.zeros(1, jnp.int32)
    anywhere, in_front = jnp.array([0, 1, 3, 4, 5, 7, 8, 9, 11]), jnp.arange(9)  # where the nine stand among twelve
    for at, pool in ((anywhere, None), (in_front, None), (in_front, model.new_pool(1))):
        padded = jnp.full((1, 12), 5).at[:, at].set(tokens)
        positions = jnp.full((1, 12), 3, jnp.int32).at[:, at].set(jnp.arange(9))
        mask = jnp.zeros((1, 12), bool).at[:, at].set(True)
        batch = Batch(positions, mask) if pool is None else Batch(positions, mask, empty + 9, table, jnp.arange(12)[None])
        hidden = call(padded, batch, pool)
        np.testing.assert_allclose(hidden[:, at], plain, atol=2e-5)
