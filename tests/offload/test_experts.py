"""Experts on the CPU in the model: equal sums as on the device, within the rounding of bfloat16 rows, and deferred sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from offloaded import CONFIG, close, least_last, logits_of, model_of, offload

from cpu_experts import Closed, Experts, layout
from mla_jax import Transformer
from mla_jax.base import qtensor
from mla_jax.base.batch import Batch
from mla_jax.base.roofline import CHUNK, CHUNK_ON_A_CPU, DEVICES, STREAMED
from mla_jax.model import moe
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.moe import ExpertPlan, MoE, settle
from mla_jax.model.ops import rms_norm
from mla_jax.offload import streaming
from mla_jax.offload.experts import HostExperts
from mla_jax.offload.pack import pack_experts
from mla_jax.offload.streaming import KERNEL_FORMATS

DEEP = pytest.mark.deep

pytestmark = pytest.mark.usefixtures("host_library")

CALLS = "cpu_experts_submit", "cpu_experts_collect"


@pytest.mark.parametrize("tokens", [2, 40])
def test_a_layer_on_the_host_is_that_of_the_device_and_masked_tokens_cost_nothing(tokens):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((2, tokens, CONFIG.hidden_size)), jnp.float32)
    mask = jnp.ones((2, tokens), bool).at[1, tokens // 2 :].set(False)
    on_device, on_host = (model_of(host=host).layers[2].mlp for host in (False, True))
    assert isinstance(on_host.experts, HostExperts)
    expected, load, _ = on_device(x, mask, ExpertPlan(moe.dense))
    y, same_load = jax.jit(lambda x: on_host(x, mask, ExpertPlan(moe.dense))[:2])(x)
    np.testing.assert_array_equal(load, same_load)
    close(y, expected)
    close(y[~mask], on_host.shared(x)[~mask])


def test_a_model_with_its_experts_on_the_host_gives_the_logits_of_one_without():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)), jnp.int32)
    close(*(logits_of(model_of(host=host), tokens) for host in (True, False)))


@pytest.mark.deep
def test_only_layers_that_were_moved_are_on_the_host():
    model = model_of(host=False)
    offload(model.layers[2].mlp)
    assert [*model.on_host()] == [2]
    assert [*model_of().on_host()] == [1, 2, 3]
    assert [*model_of(host=False).on_host()] == []


def by_hand(model: Transformer, tokens: jax.Array, defer: int) -> jax.Array:
    """The hidden states with a token's `defer` least weighted experts added a layer later, by `dense` sums on the device."""
    batch, x, left = Batch.dense(*tokens.shape), model.embedded(tokens), 0.0
    plan = model.dispatch.step(model, batch, None)
    for block in model.layers:
        x = x + block.attn(rms_norm(x, block.attn_norm[...], block.eps), None, plan.form, plan.shared, plan.turns)[0]
        y = rms_norm(x, block.mlp_norm[...], block.eps)
        if not isinstance(block.mlp, MoE):
            x = x + block.mlp(y)
            continue
        ids, weights = least_last(*block.mlp.router(y[0]))
        stacks = tuple(w[...] for w in (block.mlp.experts.gate, block.mlp.experts.up, block.mlp.experts.down))
        now = ids.shape[1] - defer
        x, left = (
            x + block.mlp.shared(y) + moe.dense(y[0], ids[:, :now], weights[:, :now], stacks) + left,
            moe.dense(y[0], ids[:, now:], weights[:, now:], stacks) if defer else 0.0,
        )
    return rms_norm(x + left, model.norm[...], model.config.rms_norm_eps)


@pytest.mark.deep
@pytest.mark.parametrize("defer", [0, 1, 2])
def test_the_lowest_scored_experts_are_added_a_layer_later(defer):
    tokens = jnp.asarray([[5, 6, 7, 8]])
    expected = by_hand(model_of(host=False), tokens, defer)
    model = model_of(defer)
    found = jax.jit(lambda tokens: model(tokens, Batch.dense(*tokens.shape))[0])(tokens)
    close(found, expected)
    if defer:  # and that is another sum
        with pytest.raises(AssertionError):
            close(found, by_hand(model_of(host=False), tokens, 0))


def test_what_is_needed_now_is_asked_for_first_and_the_host_is_waited_for_last():
    """By the data, for nothing else orders kernels that a graph may run side by side."""
    layer, x = model_of().layers[1].mlp, jnp.ones((1, 1, CONFIG.hidden_size))

    def step(x: jax.Array) -> jax.Array:
        def concurrent(x: jax.Array) -> jax.Array:
            return jnp.tan(x)

        ids, weights = layer.router(x[0])
        now, aside, later = layer.experts(x[0], ids, weights, ExpertPlan(moe.dense, defer=2), concurrent)
        return settle((now + aside)[None], later)

    found = [eqn for eqn in jax.make_jaxpr(step)(x).eqns if eqn.primitive.name in ("tan", *CALLS)]
    assert [eqn.primitive.name for eqn in found] == [CALLS[0], CALLS[0], "tan", CALLS[1], CALLS[1]]
    first, second, aside, now, later = found
    assert [eqn.invars[1].aval.shape[1] for eqn in (first, second)] == [CONFIG.num_experts_per_tok - 2, 2]
    assert second.invars[0] is first.outvars[1]
    assert aside.invars[0] is second.outvars[1]
    assert (now.invars[0], now.invars[4:]) == (first.outvars[0], aside.outvars)
    assert later.invars[0] is second.outvars[0]
    assert len(later.invars) == 5


def test_many_new_tokens_defer_nothing():
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, 12)), jnp.int32)
    found, exact = (logits_of(model_of(defer), tokens) for defer in (2, 0))
    np.testing.assert_array_equal(found, exact)


@pytest.mark.deep
def test_a_layer_never_defers_all_of_a_token():
    layer, x = model_of().layers[1].mlp, jnp.ones((1, 1, CONFIG.hidden_size))
    y, _, pending = layer(x, jnp.ones((1, 1), bool), ExpertPlan(moe.dense, defer=99))
    whole, *_ = layer(x, jnp.ones((1, 1), bool), ExpertPlan(moe.dense))
    assert pending.ticket.topk_ids.shape == (1, CONFIG.num_experts_per_tok - 1)
    close(settle(y, pending), whole)


@pytest.mark.deep
def test_an_mtp_layer_leaves_nothing_for_later():
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    model = Transformer(config, nnx.Rngs(0), mtp=True, dispatch=Dispatch(defer=2))
    exact = Transformer(config, nnx.Rngs(0), mtp=True)
    tokens, hidden = jnp.asarray([[5, 6]]), jnp.ones((1, 2, config.hidden_size))
    for each in (model, exact):
        offload(each.mtp[0].block.mlp)
    found, expected = (each.draft(0, tokens, hidden, Batch.dense(1, 2))[0] for each in (model, exact))
    np.testing.assert_array_equal(found, expected)


# streamed to the device


def streamed(layer: MoE, backend: str, x: jax.Array, mask: jax.Array) -> jax.Array:
    y, _, pending = jax.jit(lambda x: layer(x, mask, ExpertPlan(moe.dense, 2, moe.BACKENDS[backend])))(x)
    assert pending is None
    return y


@pytest.mark.deep
@pytest.mark.parametrize("backend", moe.BACKENDS)
@pytest.mark.parametrize("held", [1 << 30, 3, 1], ids=["in one go", "in groups that overlap", "one by one"])
def test_experts_streamed_to_the_device_give_what_those_do_that_lie_there(backend, held, monkeypatch):
    layer, on_device = model_of().layers[2].mlp, model_of(host=False).layers[2].mlp
    one = 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size * 4
    monkeypatch.setattr(streaming, "GROUP", held * one)
    assert streaming.groups_of(CONFIG.n_routed_experts, one) == {1 << 30: (1, 8), 3: (3, 3), 1: (8, 1)}[held]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 20, CONFIG.hidden_size)), jnp.float32)
    mask = jnp.ones((2, 20), bool).at[1, 10:].set(False)
    found = streamed(layer, backend, x, mask)
    expected = jax.jit(lambda x: on_device(x, mask, ExpertPlan(moe.BACKENDS[backend]))[0])(x)
    if held > CONFIG.n_routed_experts:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    close(found, jax.jit(lambda x: layer(x, mask, ExpertPlan(moe.dense))[0])(x))


@pytest.mark.deep
@pytest.mark.parametrize(
    "precision", [name if name in ("int8", "q4_k") else pytest.param(name, marks=DEEP) for name in KERNEL_FORMATS]
)
def test_experts_of_every_format_are_streamed_as_the_tensors_they_were(precision, monkeypatch):
    """To the bit, in groups too: k-quants have inputs in multiples of 256."""
    rng, dtype = np.random.default_rng(0), jnp.dtype("float32")
    shapes = [(4, 256, 512), (4, 256, 512), (4, 512, 256)]
    floats = [rng.standard_normal(shape, np.float32) / 16 for shape in shapes]
    with Experts(*floats, precision) as layer:
        kept = streaming.stacks(layer, 0, 4, dtype)
        assert {w.format for w in kept} == {KERNEL_FORMATS[precision]}
        assert [qtensor.validated(w).shape for w in kept] == shapes
        for whole, part in zip(kept, streaming.stacks(layer, jnp.int32(1), 2, dtype), strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:3], b), whole.parts, part.parts)
        parts = [layout.quantize(w, precision) for w in floats]
        values = [layout.dequantize(p, precision, s[-1]) for p, s in zip(parts, shapes, strict=True)]
        for w, expected in zip(kept, values, strict=True):
            np.testing.assert_array_equal(qtensor.dequantize(w), expected)
        with pack_experts(*kept) as again:
            assert (again.precision, again.down_precision) == (precision, precision)
            for a, b in zip(again._packed, layer._packed, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.deep
def test_rows_that_gguf_does_not_have_are_streamed_as_numbers():
    floats = [np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate([(2, 20, 40)] * 2 + [(2, 40, 20)])]
    with Experts(*floats, "q8_0") as layer:
        for w, given in zip(streaming.stacks(layer, 0, 2, jnp.dtype("float32")), floats, strict=True):
            expected = layout.dequantize(layout.quantize(given, "q8_0"), "q8_0", given.shape[-1])
            np.testing.assert_array_equal(w, expected)


@pytest.mark.deep
def test_a_model_streams_its_experts_for_prompts_and_not_for_few_tokens():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)), jnp.int32)
    model, exact = model_of(defer=2), model_of(host=False)
    model.dispatch = dataclasses.replace(model.dispatch, stream=20)
    np.testing.assert_allclose(logits_of(model, tokens), logits_of(exact, tokens), rtol=1e-4, atol=1e-5)
    hows = [model.dispatch.step(model, Batch.dense(2, new), None).experts for new in (12, 10, 9, 1)]
    assert [how.streamed for how in hows] == [moe.dense, moe.dense, None, None]
    assert [how.defer for how in hows] == [0, 0, 0, 2]


def test_a_closed_layer_cannot_be_streamed():
    layer, x = model_of().layers[2].mlp, jnp.ones((1, 10, CONFIG.hidden_size))
    streamed(layer, "loop", x, jnp.ones((1, 10), bool))
    layer.experts.layer.close()
    with pytest.raises(Closed):
        streamed(layer, "loop", x, jnp.ones((1, 10), bool))


def test_prompts_are_read_by_larger_chunks_where_experts_are_streamed():
    model = model_of()

    def chunk(stream: int, kind: str) -> int:
        return dataclasses.replace(model.dispatch, stream=stream, device=DEVICES[kind]).chunk(model)

    assert [chunk(0, kind) for kind in ("cpu", "NVIDIA H200")] == [CHUNK_ON_A_CPU, CHUNK[0]]
    assert chunk(100, "cpu") == chunk(100, "NVIDIA H200") == STREAMED > CHUNK[0]
