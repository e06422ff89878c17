"""Experts with replicas on the device: equal sums, whoever computes them, and deferred sums."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from offloaded import CONFIG, close, least_last, logits_of, model_of

from cpu_experts import Experts
from mla_jax import Transformer
from mla_jax.base import qtensor
from mla_jax.base.batch import Batch
from mla_jax.base.roofline import DEVICES
from mla_jax.model import moe
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.moe import ExpertPlan, MoE, settle
from mla_jax.model.ops import plain, rms_norm
from mla_jax.offload import streaming
from mla_jax.offload.experts import HostExperts
from mla_jax.offload.pack import pack_experts
from mla_jax.offload.replicated import ReplicatedExperts, replica_bytes, replica_shapes, replicate, split
from mla_jax.offload.streaming import KERNEL_FORMATS, Packing

X, K = CONFIG.n_routed_experts, CONFIG.num_experts_per_tok
SETS = [(3,), (6, 1, 4), tuple(range(X))]


@functools.cache
def exact() -> Transformer:
    """All experts on the device; tests leave it as it is."""
    return model_of(host=False)


@functools.cache
def on_host(number: int) -> Experts:
    experts = exact().layers[number].mlp.experts
    return pack_experts(experts.gate[...], experts.up[...], experts.down[...])


def replicated_layer(ids: tuple[int, ...], number: int = 2) -> MoE:
    layer, packed = nnx.clone(exact().layers[number].mlp), on_host(number)
    layer.experts = HostExperts(packed, replicated=replicate(packed, ids, jnp.dtype("float32"), jax.devices()[0]))
    return layer


def replicated_model(ids: tuple[int, ...], defer: int = 0) -> Transformer:
    model = nnx.clone(exact())
    model.dispatch = dataclasses.replace(model.dispatch, defer=defer)
    for number in (1, 2, 3):
        model.layers[number].mlp = replicated_layer(ids, number)
    return model


def random_x(tokens: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(tokens).standard_normal((2, tokens, CONFIG.hidden_size)), jnp.float32)


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("backend", moe.BACKENDS)
@pytest.mark.parametrize("ids", SETS, ids=str)
def test_a_layer_is_that_of_the_device_whatever_lies_on_both_and_masked_tokens_cost_nothing(ids, backend):
    x, mask = random_x(9), jnp.ones((2, 9), bool).at[1, 4:].set(False)
    mixed = replicated_layer(ids)
    expected, load, _ = exact().layers[2].mlp(x, mask, ExpertPlan(moe.dense))
    y, same_load, pending = jax.jit(lambda x: mixed(x, mask, ExpertPlan(moe.dense, replicated=moe.BACKENDS[backend])))(x)
    np.testing.assert_array_equal(load, same_load)
    assert pending is None
    close(y, expected)
    np.testing.assert_allclose(y[~mask], mixed.shared(x)[~mask], rtol=1e-5, atol=1e-5)
    if len(ids) == X:  # then nothing is rounded for the host
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_the_host_is_not_asked_for_what_the_device_has():
    """Its copies may be anything then."""
    layer, x = replicated_layer((6, 1, 4)), random_x(9)
    mask, how = jnp.ones((2, 9), bool), ExpertPlan(moe.dense)
    expected = layer(x, mask, how)[0]
    gate, up, down = (np.array(w) for w in streaming.stacks(layer.experts.layer, 0, X, jnp.dtype("float32")))
    down[[6, 1, 4]] = 1e9
    layer.experts = HostExperts(Experts(gate, up, down), replicated=layer.experts.replicated)
    np.testing.assert_array_equal(layer(x, mask, how)[0], expected)


@pytest.mark.usefixtures("host_library")
def test_a_model_gives_the_logits_of_one_with_all_experts_on_the_device():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)), jnp.int32)
    model = replicated_model((0, 5))
    assert model.replicated == 6
    close(logits_of(model, tokens), logits_of(exact(), tokens))
    assert Dispatch().step(model, Batch.dense(1, 1), None).experts.replicated is moe.loop
    assert Dispatch(device=DEVICES["NVIDIA H200"]).backend_name(model, 1, "replicated") == "dense"  # 3 choices, of 2 experts


# later


@pytest.mark.parametrize("defer", range(K))
def test_of_what_the_host_computes_the_last_are_left_for_later(defer):
    ids = jnp.asarray([*itertools.permutations(range(4), K), (X,) * K], jnp.int32)
    for held in map(set, ([], [1], [0, 2], [0, 1, 2, 3])):
        now, later = (np.asarray(a) for a in split(ids, jnp.isin(ids, jnp.asarray([*held, -1])), defer, X))
        for chosen, mine, rest in zip(ids.tolist(), now.tolist(), later.tolist(), strict=True):
            theirs = [i for i in chosen if i not in held and i < X]
            cut = max(len(theirs) - defer, 0)
            assert [i for i in mine if i < X] == theirs[:cut]
            assert [i for i in rest if i < X] == theirs[cut:]


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("defer", [1, 2])
def test_deferred_experts_of_the_host_are_added_a_layer_later(defer):
    """By `dense` sums on the device, layer by layer."""
    tokens, held = jnp.asarray([[5, 6, 7, 8]]), (0, 2, 5)
    batch = Batch.dense(1, 4)
    x, left, plan = exact().embedded(tokens), 0.0, exact().dispatch.step(exact(), batch, None)
    for block in exact().layers:
        x = x + block.attn(rms_norm(x, block.attn_norm[...], block.eps), None, plan.form, plan.shared, plan.turns)[0]
        y = rms_norm(x, block.mlp_norm[...], block.eps)
        if not isinstance(block.mlp, MoE):
            x = x + block.mlp(y)
            continue
        ids, weights = least_last(*block.mlp.router(y[0]))
        stacks = tuple(w[...] for w in (block.mlp.experts.gate, block.mlp.experts.up, block.mlp.experts.down))
        _, later = split(ids, jnp.isin(ids, jnp.asarray(held)), defer, X)
        rest = moe.dense(y[0], later, weights, stacks)
        now = moe.dense(y[0], ids, weights, stacks) - rest
        x, left = x + block.mlp.shared(y) + now + left, rest
    expected = rms_norm(x + left, exact().norm[...], CONFIG.rms_norm_eps)
    model = replicated_model(held, defer)
    found = jax.jit(lambda tokens: model(tokens, batch)[0])(tokens)
    close(found, expected)


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_a_token_whose_experts_all_lie_on_the_device_leaves_nothing_for_later():
    layer, x = replicated_layer(tuple(range(X))), random_x(1)
    y, _, pending = layer(x, jnp.ones((2, 1), bool), ExpertPlan(moe.dense, defer=2))
    np.testing.assert_array_equal(settle(y, pending), y)


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_streamed_prompts_still_copy_all_experts():
    layer = replicated_layer((0, 5))
    x, mask = random_x(20), jnp.ones((2, 20), bool)
    found, _, pending = jax.jit(lambda x: layer(x, mask, ExpertPlan(moe.dense, 2, moe.loop)))(x)
    assert pending is None
    expected = exact().layers[2].mlp(x, mask, ExpertPlan(moe.loop))[0]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


# replicas


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("precision", ["bf16", *KERNEL_FORMATS])
def test_replicas_are_to_the_bit_what_the_host_has_in_every_format(precision):
    rng, dtype = np.random.default_rng(0), jnp.dtype("float32")
    floats = [rng.standard_normal(s, np.float32) / 16 for s in [(4, 256, 512)] * 2 + [(4, 512, 256)]]
    with Experts(*floats, precision) as layer:
        replicas = replicate(layer, (2, 0), dtype, jax.devices()[0])
        shapes = replica_shapes(Packing.of(layer), (2, 0), dtype)
        like = [w.get_value() for w in (shapes.gate, shapes.up, shapes.down)]
        taken = sum(leaf.nbytes for leaf in jax.tree.leaves((replicas.gate, replicas.up, replicas.down)))
        assert taken == 2 * replica_bytes(Packing.of(layer), dtype)
        whole = streaming.stacks(layer, 0, 4, dtype)
        for found, shape, expected in zip((replicas.gate[...], replicas.up[...], replicas.down[...]), like, whole, strict=True):
            kept = [(a.shape, a.dtype) for a in jax.tree.leaves(found)]
            assert kept == [(a.shape, a.dtype) for a in jax.tree.leaves(shape)]
            assert isinstance(found, qtensor.QTensor) == (precision == "fp8_block")
            found, expected = (np.asarray(plain(w, dtype)) for w in (found, expected))
            np.testing.assert_array_equal(found.view(np.uint32), expected[[2, 0]].view(np.uint32))


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_rows_that_gguf_does_not_have_are_copied_as_numbers():
    floats = [np.random.default_rng(i).standard_normal(s, np.float32) for i, s in enumerate([(2, 20, 40)] * 2 + [(2, 40, 20)])]
    with Experts(*floats, "q8_0") as layer:
        replicas = replicate(layer, (1,), jnp.dtype("float32"), jax.devices()[0])
        for found, expected in zip(
            (replicas.gate, replicas.up, replicas.down), streaming.stacks(layer, 1, 1, jnp.dtype("float32")), strict=True
        ):
            np.testing.assert_array_equal(found[...], expected)


def test_ids_that_are_not_there_have_no_place():
    replicas = ReplicatedExperts((3, 1), [jnp.zeros((2, 4, 4))] * 3, 5)
    np.testing.assert_array_equal(replicas.place[...], [2, 1, 2, 0, 2, 2])
    np.testing.assert_array_equal(replicas.has(jnp.asarray([[0, 1, 3, 5]])), [[False, True, True, False]])
