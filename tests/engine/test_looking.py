"""Captures of a forward pass, and the cache of an answer, next to plain numpy on the captured arrays."""

from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from mla_jax import LLM, BadRequest, DoesNotFit, SamplingParams, Unsupported
from mla_jax.engine import looking
from mla_jax.model import rope
from mla_jax.model.mla import FORMS

GOLDEN = Path(__file__).parents[1] / "golden"
GREEDY = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
TOKENS = np.array([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def llm():
    with LLM(GOLDEN / "v3", dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def everything(llm):
    layers = llm.config.num_hidden_layers
    return llm.forward(TOKENS, hidden=range(layers + 1), lens=range(layers + 1), attention=range(layers), router=True, cache=True)


def test_shapes_are_those_of_the_docstring(llm, everything):
    config, (B, T) = llm.config, TOKENS.shape
    L, N, K = config.num_hidden_layers, config.num_attention_heads, config.num_experts_per_tok
    moe = sum(config.is_moe(layer) for layer in range(L))
    assert {name: array.shape for name, array in everything.items()} == {
        "logits": (B, T, config.vocab_size),
        "hidden": (L + 1, B, T, config.hidden_size),
        "lens": (L + 1, B, T, config.vocab_size),
        "attention": (L, B, N, T, T),
        "experts": (moe, B, T, K),
        "expert_weights": (moe, B, T, K),
        "c_kv": (L, B, T, config.kv_lora_rank),
        "k_pe": (L, B, T, config.qk_rope_head_dim),
    }
    assert {array.dtype.name for name, array in everything.items() if name != "experts"} == {"float32"}


def test_logits_are_those_without_a_capture_and_the_lens_of_the_last_layer(llm, everything):
    assert np.array_equal(everything["logits"], everything["lens"][-1])
    assert np.abs(everything["logits"] - llm.logits(TOKENS)).max() < 1e-5


def test_attention_is_the_softmax_of_queries_and_latents(llm, everything):
    """Worked out in numpy from the input of the layer: queries from it, keys from the captured latents."""
    config, layer = llm.config, 1
    block = llm.model.layers[layer]
    x = everything["hidden"][layer]
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * np.asarray(block.attn_norm[...])
    turns = rope.turns(jnp.arange(TOKENS.shape[1])[None].repeat(len(TOKENS), 0), config)
    q_nope, q_pe = (np.asarray(q) for q in block.attn.turned(block.attn.queries(jnp.asarray(normed)), turns))
    k_nope = np.einsum("bsr,npr->bsnp", everything["c_kv"][layer], np.asarray(block.attn.uk[...]))
    scores = np.einsum("btnp,bsnp->bnts", q_nope, k_nope)
    scores += np.einsum("btne,bse->bnts", q_pe, everything["k_pe"][layer])
    scores = np.where(np.tri(TOKENS.shape[1], dtype=bool), scores * rope.softmax_scale(config), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True)
    assert np.abs(everything["attention"][layer] - expected).max() < 1e-5


@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.deep) for form in FORMS])
def test_every_form_shows_the_same(everything, form):
    with LLM(GOLDEN / "v3", dtype="float32", attention=form) as llm:
        found = llm.forward(TOKENS, attention=[1], hidden=[2], cache=True)
    for name, layers in (("attention", [1]), ("hidden", [2]), ("c_kv", slice(None))):
        assert np.abs(found[name] - everything[name][layers]).max() < 1e-4


def test_experts_are_those_that_the_hidden_states_choose(llm, everything):
    config = llm.config
    layer = next(i for i in range(config.num_hidden_layers) if config.is_moe(i))
    assert everything["experts"].max() < config.n_routed_experts
    assert all(len(set(chosen)) == len(chosen) for chosen in everything["experts"][0].reshape(-1, config.num_experts_per_tok))
    weights = everything["expert_weights"][0]
    if config.norm_topk_prob:
        assert np.abs(weights.sum(-1) - config.routed_scaling_factor).max() < 1e-5
    assert layer < config.num_hidden_layers


def test_layers_come_in_the_order_that_was_asked_for(llm, everything):
    found = llm.forward(TOKENS, hidden=[2, 0], attention=[2, 0, 2])
    assert np.abs(found["hidden"] - everything["hidden"][[2, 0]]).max() < 1e-5
    assert np.abs(found["attention"] - everything["attention"][[2, 0, 2]]).max() < 1e-5


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"hidden": [99]}, "hidden names layer 99, expected 0 to"),
        ({"attention": [-1]}, "attention names layer -1"),
        ({"lens": "all"}, "lens is 'all', expected numbers of layers"),
        ({"hidden": None}, "hidden is None"),
        ({"layers": [1]}, "layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(llm, asked, words, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    with pytest.raises(BadRequest, match=words):
        llm.forward(TOKENS, **asked)


def test_more_than_the_device_has_room_for_is_refused_before_it_is_computed(llm, monkeypatch):
    monkeypatch.setattr(looking, "logits_bytes", lambda *_: llm.plan.available)
    with pytest.raises(DoesNotFit, match="do not fit"):
        llm.forward(np.full((1, 500), 3), attention=range(llm.config.num_hidden_layers))


def answered(llm, tokens: int):
    """A stream of which that many tokens are known, at least, and its token ids."""
    stream, ids = llm.stream(TOKENS[0].tolist(), GREEDY), []
    for chunk in stream:
        ids += chunk.token_ids
        if len(ids) >= tokens:
            break
    return stream, TOKENS[0].tolist() + ids


def test_the_cache_of_an_answer_is_what_a_forward_pass_gives(llm):
    stream, ids = answered(llm, 70)  # more than a page
    cached = stream.cache()
    held = cached["c_kv"].shape[1]
    assert held >= len(ids) - 1
    again = [*ids, *(token for chunk in stream for token in chunk.token_ids)]
    expected = llm.forward([again[:held]], cache=True)
    for name in ("c_kv", "k_pe"):
        assert np.abs(cached[name] - expected[name][:, 0]).max() < 1e-4


@pytest.mark.deep
def test_the_cache_of_heads_is_that_of_every_head():
    with LLM(GOLDEN / "v3", dtype="float32", attention="naive") as llm:
        stream, ids = answered(llm, 3)
        found, config = stream.cache(), llm.config
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    assert found["k"].shape[2:] == (config.num_attention_heads, head)
    assert found["v"].shape[1] >= len(ids) - 1


@pytest.mark.deep
def test_an_fp8_cache_is_shown_as_numbers():
    with LLM(None, dtype="float32", kv_cache="fp8") as llm:
        stream, ids = answered(llm, 3)
        found = stream.cache()
        expected = llm.forward([ids[: found["c_kv"].shape[1]]], cache=True)["c_kv"][0, 0]
    assert set(found) == {"c_kv", "k_pe"}
    assert np.abs(found["c_kv"][0][: len(expected)] - expected).max() < np.abs(expected).max() / 16


def test_an_answer_that_is_not_read_or_is_over_holds_nothing(llm):
    stream = llm.stream([3, 4], SamplingParams(max_tokens=2, ignore_eos=True))
    for _ in range(2):
        with pytest.raises(BadRequest, match="ask between its first chunk and its last"):
            stream.cache()
        list(stream)


def test_an_answer_whose_tokens_are_dropped_shows_no_cache():
    with LLM(GOLDEN / "v3", dtype="float32", evict="snapkv", context=256) as llm:
        stream, _ = answered(llm, 3)
        with pytest.raises(Unsupported, match="tokens are dropped"):
            stream.cache()
