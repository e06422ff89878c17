"""Expert backends against the dense reference, routers against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.config import Config
from mla_jax.model import moe, transformer
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.moe import BACKENDS, MoE, Router
from pallas_kernels import choice

OTHERS = sorted(BACKENDS.keys() - {"dense"})
JITTED = {name: jax.jit(backend) for name, backend in BACKENDS.items()}
X, D, F = 5, 12, 7


def experts_of(seed: int, experts: int = X) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = [(experts, F, D), (experts, F, D), (experts, D, F)]
    return tuple(jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, jnp.float32) for shape in shapes)


def reference(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, experts: tuple) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    gate, up, down = (np.asarray(w, np.float64) for w in experts)
    out = np.zeros(x.shape)
    for n, k in np.ndindex(ids.shape):
        if (e := ids[n, k]) < len(gate):
            g = gate[e] @ x[n]
            out[n] += weights[n, k] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[n])))
    return out


@st.composite
def routings(draw):
    """Tokens with distinct experts each, or none (the id X), from few shapes so that programs repeat."""
    tokens, chosen = draw(st.sampled_from([(1, 1), (1, 3), (6, 2), (40, 3)]))
    pool = draw(st.sampled_from([(0,), (4,), tuple(range(X))]))  # all to one expert, or spread
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.full((tokens, chosen), X)
    for row in ids:
        some = rng.permutation(pool)[:chosen]
        row[: len(some)] = some
        rng.shuffle(row)
    ids[rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = X
    return ids, rng.standard_normal((tokens, D)).astype(np.float32), rng.random((tokens, chosen)).astype(np.float32)


@pytest.mark.deep
@settings(max_examples=60)
@given(routings())
def test_every_backend_computes_the_chosen_experts_and_nothing_for_the_id_of_no_expert(routing):
    ids, x, weights = routing
    experts = experts_of(0)
    expected = reference(x, ids, weights, experts)
    for name, backend in JITTED.items():
        np.testing.assert_allclose(backend(x, jnp.asarray(ids), weights, experts), expected, atol=2e-5, err_msg=name)


@pytest.mark.deep
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("tokens", [31, 32, 33, 65])
def test_tiles_that_do_not_come_out_even_equal_dense(name, tokens):
    rng = np.random.default_rng(tokens)
    experts, x = experts_of(1), rng.standard_normal((tokens, D)).astype(np.float32)
    ids, weights = rng.integers(0, X + 1, (tokens, 1)), rng.random((tokens, 1)).astype(np.float32)
    expected = JITTED["dense"](x, jnp.asarray(ids), weights, experts)
    np.testing.assert_allclose(JITTED[name](x, jnp.asarray(ids), weights, experts), expected, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("tokens", "poisoned"), [(4, 2), (40, 39)])
def test_nan_in_one_token_reaches_no_other_token(name, tokens, poisoned):
    rng = np.random.default_rng(3)
    experts, x = experts_of(2), rng.standard_normal((tokens, D)).astype(np.float32)
    ids, weights = (
        jnp.asarray(rng.permuted(np.tile(np.arange(X), (tokens, 1)), axis=1)[:, :2]),
        np.full((tokens, 2), 0.5, np.float32),
    )
    clean = np.asarray(JITTED[name](x, ids, weights, experts))
    x[poisoned] = np.nan
    y = np.asarray(JITTED[name](x, ids, weights, experts))
    others = np.arange(tokens) != poisoned
    assert np.isnan(y[poisoned]).all()
    assert np.array_equal(y[others], clean[others])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_nan_weight_stays_with_its_token(name):
    experts, x, ids = experts_of(4), np.ones((3, D), np.float32), jnp.asarray([[0], [0], [1]])
    y = np.asarray(JITTED[name](x, ids, np.array([[1.0], [np.nan], [1.0]], np.float32), experts))
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[[0, 2]], reference(x, np.asarray(ids), np.ones((3, 1)), experts)[[0, 2]], atol=1e-5)


@pytest.mark.deep
def test_a_layer_gives_masked_tokens_no_expert_and_counts_the_others():
    layer = MoE(config_of("v3"), nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 4, D)), jnp.float32)
    mask = jnp.asarray([[True, True, False, True], [False] * 4])
    y, load, _ = layer(x, mask, moe.ExpertPlan(moe.loop))
    whole, *_ = layer(x, jnp.ones((2, 4), bool), moe.ExpertPlan(moe.dense))
    assert load.sum() == 3 * layer.router.config.num_experts_per_tok
    np.testing.assert_allclose(y[mask], whole[mask], atol=1e-5)
    np.testing.assert_allclose(y[~mask], layer.shared(x)[~mask], atol=1e-6)


def test_experts_without_weights_give_back_what_they_get_and_are_no_load():
    config = Config.from_hf({**SIZES, **EXPERTS, **ROUTING["v3"], "n_group": 1, "topk_group": 1, "zero_expert_num": 16})
    layer, x = MoE(config, nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (1, 5, D))
    layer.router.bias.set_value(jnp.where(jnp.arange(32) < 16, 0.0, 10.0))  # so that no others are chosen
    y, load, pending = layer(x, jnp.ones((1, 5), bool), moe.ExpertPlan(moe.dense))
    assert pending is None
    assert load.tolist() == [0] * 16
    np.testing.assert_allclose(y, layer.shared(x) + config.routed_scaling_factor * x, rtol=1e-5, atol=1e-6)


# the routers

ROUTING = {
    "v2 greedy": {"model_type": "deepseek_v2", "topk_method": "greedy", "scoring_func": "softmax", "routed_scaling_factor": 3.0},
    "v2 greedy normalised": {
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        "routed_scaling_factor": 3.0,
    },
    "v2 one expert": {
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "norm_topk_prob": True,
        "num_experts_per_tok": 1,
        "routed_scaling_factor": 3.0,
    },
    "v2": {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "v3": {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "v3 unnormalised": {
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    },
    "kimi k2": {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    "mistral 4": {"model_type": "mistral4", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    "v3 without a bias": {"model_type": "deepseek_v3", "topk_method": "none", "n_group": 4, "topk_group": 2},
}
SIZES = {
    "hidden_size": D,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 8,
    "kv_lora_rank": 4,
}
EXPERTS = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": F,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}


def config_of(name: str) -> Config:
    return Config.from_hf({**SIZES, **EXPERTS, **ROUTING[name]})


def routed(c: Config, x: np.ndarray, gate: np.ndarray, bias: np.ndarray) -> list[dict[int, float]]:
    """{expert: weight} a token, from the papers' definitions, in float64."""
    found = []
    for logits in x.astype(np.float64) @ gate.astype(np.float64).T:
        v3 = c.topk_method in ("noaux_tc", "none")
        scores = 1 / (1 + np.exp(-logits)) if c.scoring_func == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        choice = scores + bias if c.topk_method == "noaux_tc" else scores
        allowed = range(len(scores))
        if c.topk_method != "greedy":
            members = np.split(np.arange(len(scores)), c.n_group)
            rating = [sum(sorted(choice[group])[-2:]) if v3 else max(choice[group]) for group in members]
            allowed = [e for g in np.argsort(rating)[-c.topk_group :] for e in members[g]]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: c.num_experts_per_tok]
        total = sum(scores[e] for e in chosen)
        divided = c.norm_topk_prob and (v3 or c.num_experts_per_tok > 1)
        scale = (1 / total if divided else 1.0) * (c.routed_scaling_factor if v3 or not divided else 1.0)
        found.append({int(e): scores[e] * scale for e in chosen})
    return found


@pytest.mark.parametrize("name", ROUTING)
def test_a_router_chooses_and_weighs_as_its_model_was_published(name):
    c, rng = config_of(name), np.random.default_rng(7)
    router = Router(c, nnx.Rngs(0))
    gate, bias = rng.standard_normal((16, D)).astype(np.float32), rng.standard_normal(16).astype(np.float32) / 2
    router.weight.set_value(jnp.asarray(gate))
    if c.topk_method == "noaux_tc":
        router.bias.set_value(jnp.asarray(bias))
    x = rng.standard_normal((300, D)).astype(np.float32)
    ids, weights = (np.asarray(a) for a in router(jnp.asarray(x)))
    for row_ids, row_weights, expected in zip(ids.tolist(), weights, routed(c, x, gate, bias), strict=True):
        assert set(row_ids) == expected.keys()
        np.testing.assert_allclose(row_weights, [expected[e] for e in row_ids], rtol=1e-5)


@pytest.mark.parametrize("name", ROUTING)
def test_equal_scores_choose_the_lowest_experts_every_time(name):
    router = Router(config_of(name), nnx.Rngs(0))
    router.weight.set_value(jnp.zeros((16, D)))
    if hasattr(router, "bias"):
        router.bias.set_value(jnp.zeros(16))
    ids, _ = router(jnp.ones((5, D)))
    assert ids.tolist() == [list(range(router.config.num_experts_per_tok))] * 5


@pytest.mark.parametrize("name", ROUTING)
def test_a_token_of_nan_is_routed_to_experts_that_exist_and_leaves_the_others_alone(name):
    router, x = Router(config_of(name), nnx.Rngs(0)), np.random.default_rng(8).standard_normal((3, D)).astype(np.float32)
    clean_ids, clean_weights = router(jnp.asarray(x))
    x[1] = np.nan
    ids, weights = router(jnp.asarray(x))
    assert ((ids >= 0) & (ids < 16)).all()
    others = np.array([0, 2])
    assert np.array_equal(ids[others], clean_ids[others])
    assert np.array_equal(weights[others], clean_weights[others])


@pytest.mark.parametrize(
    ("platform", "pairs", "expected"),
    [("cpu", 1, "loop"), ("gpu", 8, "gather"), ("gpu", 4096, "dense"), ("tpu", 8, "gather"), ("tpu", 4096, "ragged")],
)
def test_the_backend_follows_platform_and_number_of_tokens(platform, pairs, expected):
    assert moe.pick_backend(platform, pairs, 256) == expected


def test_a_kernel_unpacks_experts_of_few_tokens_too():
    assert moe.pick_backend("gpu", 6, 64, kernel=True) == "gather"
    assert moe.pick_backend("gpu", 6, 64, unpacked=1 << 20, kernel=True) == "ragged"


@pytest.mark.parametrize("refused", [None, "hidden_size", "moe_intermediate_size"])
def test_experts_have_a_kernel_only_if_it_takes_both_of_their_products(monkeypatch, refused):
    config = Config.preset("tiny")
    depth = refused and getattr(config, refused)
    monkeypatch.setattr(choice, "kernels_here", lambda: True)
    monkeypatch.setattr(choice, "choose", lambda _op, _impl, _checks, x, *_: "xla" if x.shape[-1] == depth else "mosaic_gpu")
    kernel = Dispatch().expert_kernel(transformer.Transformer(config, nnx.Rngs(0)), 4)
    assert kernel == ("xla" if refused else "mosaic_gpu")
