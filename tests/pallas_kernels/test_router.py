"""The fallback against the specification, and this against transformers; the kernel, interpreted, against both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choice, testing
from pallas_kernels.router import CHECKS, Rule, Unsupported, gpu, reference, router, xla

each_case = pytest.mark.parametrize("case", testing.ROUTER, ids=lambda case: case.name)
hopper = pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")


@each_case
def test_the_fallback_follows_the_specification(case):
    inputs = testing.router_inputs(case)
    ids, weights = router(**inputs, rule=case.rule, impl="xla")
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    assert testing.router_error((ids, weights), reference.router(**inputs, rule=case.rule), inputs) < 1e-6


@pytest.mark.parametrize("name", ["V3", "Kimi-K2", "V2", "V2-Lite, one token"])
def test_the_specification_routes_as_transformers_does(name):
    torch = pytest.importorskip("torch", reason="torch and transformers come with the parity tests")
    pytest.importorskip("transformers")
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    case = next(case for case in testing.ROUTER if case.name == name)
    rule, experts = case.rule, case.experts
    logits, bias = np.random.default_rng(1).standard_normal((33, experts)), np.random.default_rng(2).standard_normal(experts)
    sizes = {"hidden_size": experts, "n_routed_experts": experts, "routed_scaling_factor": rule.scale}
    chosen = {"num_experts_per_tok": rule.num_experts_per_tok, "n_group": rule.n_group, "topk_group": rule.topk_group}
    if case.has_bias:
        theirs = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, **chosen, norm_topk_prob=rule.norm_topk_prob))
        theirs.e_score_correction_bias = torch.tensor(bias)
    else:
        method = "greedy" if rule.n_group == 1 else "group_limited_greedy"
        theirs = DeepseekV2TopkRouter(DeepseekV2Config(**sizes, **chosen, topk_method=method, norm_topk_prob=False))
    with torch.no_grad():
        theirs.weight.copy_(torch.eye(experts))
        _, weights, ids = theirs(torch.tensor(logits, dtype=torch.float32))
    found = reference.router(logits.astype(np.float32), bias if case.has_bias else None, None, rule=rule)
    order, own = np.argsort(ids.numpy(), axis=1), np.argsort(found[0], axis=1)
    np.testing.assert_array_equal(np.take_along_axis(ids.numpy(), order, 1), np.take_along_axis(found[0], own, 1))
    np.testing.assert_allclose(np.take_along_axis(weights.numpy(), order, 1), np.take_along_axis(found[1], own, 1), rtol=1e-5)


@pytest.mark.deep
@given(x=st.lists(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 3.0]), min_size=7, max_size=7), min_size=1, max_size=3))
def test_the_largest_by_comparing_are_those_by_sorting(x):
    x = np.array(x, np.float32)
    for k in (1, 3, 7):
        np.testing.assert_array_equal(xla.by_comparing(jnp.array(x), k), np.argsort(-x, axis=1, kind="stable")[:, :k])
        np.testing.assert_array_equal(xla.largest(jnp.array(x), k), np.argsort(-x, axis=1, kind="stable")[:, :k])


@pytest.mark.deep
# XLA takes subnormal numbers as zeros
@given(x=st.lists(st.floats(-2, 2, width=32, allow_subnormal=False), min_size=2, max_size=9))
def test_the_best_two_are_the_largest_sum_of_two(x):
    x = np.array([x, x[::-1]], np.float32)
    expected = np.sort(x)[:, -2:].sum(-1)
    np.testing.assert_array_equal(xla.by_adding(jnp.array(x)), expected)
    np.testing.assert_array_equal(xla.best_two(jnp.array(x)), expected)


def test_nan_is_never_an_expert_that_does_not_exist():
    assert (xla.by_comparing(jnp.full((2, 5), jnp.nan), 3) < 5).all()


@settings(max_examples=20, deadline=None)
@given(each=st.integers(1, 4), groups=st.integers(1, 4), has_bias=st.booleans(), seed=st.integers(0, 99), data=st.data())
def test_the_fallback_holds_for_any_groups(each, groups, has_bias, seed, data):
    kept = data.draw(st.integers(1, groups))
    rule = Rule(data.draw(st.integers(1, kept * each)), n_group=groups, topk_group=kept)
    inputs = testing.router_inputs(testing.RouterCase("any", 4, each * groups, rule, has_bias, padding=1), seed)
    wanted = reference.router(**inputs, rule=rule)
    assert testing.router_error(router(**inputs, rule=rule), wanted, inputs) < 1e-6


def test_closed_groups_stay_closed_where_every_open_score_is_negative():
    choice = np.full((1, 16), -0.5, np.float32)
    choice[0, :8] = -0.1  # the two open groups; a closed one masked with 0 would win
    ids, _ = router(jnp.zeros((1, 16)), jnp.asarray(choice[0]) - 9, None, rule=Rule(3, "sigmoid", 4, 2))
    assert (np.asarray(ids) < 8).all()


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    logits = jnp.zeros((2, 40))
    with pytest.raises(Unsupported, match="no impl"):
        router(logits, None, None, rule=Rule(2), impl="cuda")
    with pytest.raises(Unsupported, match="multiples of 32" if choice.too_old() is None else "JAX"):
        router(logits, None, None, rule=Rule(2), impl="mosaic_gpu")


@hopper
def test_a_hopper_gpu_takes_the_kernel(monkeypatch):
    from types import SimpleNamespace

    h200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda *_: [h200])
    for case in testing.ROUTER:
        assert choice.choose("router", None, CHECKS, testing.router_inputs(case)["logits"]) == "mosaic_gpu"


def test_the_kernel_has_the_gradients_of_the_fallback(monkeypatch):
    inputs = testing.router_inputs(testing.ROUTER[2])
    rule, logits = testing.ROUTER[2].rule, inputs["logits"]
    monkeypatch.setattr(choice, "take", lambda *_: "mosaic_gpu")
    monkeypatch.setattr(gpu, "router", lambda *arrays, rule: jax.tree.map(jax.lax.stop_gradient, xla.router(*arrays, rule=rule)))

    def best(logits, function):
        return function(logits, None, None, rule=rule)[1][:, 0].sum()

    found, wanted = (jax.grad(best)(logits, function) for function in (router, xla.router))
    assert np.abs(wanted).max() > 0
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.deep
@pytest.mark.timeout(600)
@hopper
@each_case
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("router")[1][case.name]
    assert row["error"] <= max(2 * row["fallback"], 1e-6)


@pytest.mark.deep
@pytest.mark.timeout(600)
@hopper
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("router")[0]
