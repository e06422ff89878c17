"""A form of attention and an expert backend that the library does not have: refused where they do not fit, else as its own.

The form is the one of docs/your_own_form.md. It is held against `move_elided`, which shares no cached array of heads with it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from own_names import own_names_go

from mla_jax import LLM, BadRequest, Options, SamplingParams, Unsupported
from mla_jax.base import roofline
from mla_jax.base.batch import Batch
from mla_jax.base.roofline import attention_cost
from mla_jax.engine.opening.opened import open_model
from mla_jax.model import mla, moe
from mla_jax.model.mla import Form, register_form
from mla_jax.model.moe import register_backend
from mla_jax.model.parts import page_bytes, parts_of, token_bytes

GUIDE = Path(__file__).parents[2] / "docs" / "your_own_form.md"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG = np.random.default_rng(0).integers(3, 50, 330).tolist()


@pytest.fixture(autouse=True)
def key_absorbed():
    """The form that caches each head's plain key."""
    with own_names_go():
        exec(re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)[0], {"__name__": "guide"})
        yield


def opened(folder, **settings):
    return open_model(Options.of(**settings).replace(model=folder))


def test_a_name_that_nobody_has_registered_is_refused_with_all_that_are_known(retrieving_folder):
    with pytest.raises(BadRequest, match=r"attention is 'key_absorb', expected one of auto, naive, .*, fused, key_absorbed"):
        opened(retrieving_folder, attention="key_absorb")
    register_backend("mine", moe.dense)
    with pytest.raises(BadRequest, match=r"experts is 'min', expected one of auto, host, .*, ragged, mine"):
        opened(retrieving_folder, experts="min")


@pytest.mark.parametrize("name", ["naive", "auto", "fused", "kernel_latents", "two words", ""])
def test_names_that_are_taken_or_are_none_cannot_be_registered(name):
    before = dict(mla.FORMS)
    with pytest.raises(BadRequest, match=r"is taken by the library|cannot be a name"):
        register_form(name, mla.FORMS["naive"])
    assert before == mla.FORMS


def test_what_is_no_form_or_no_function_cannot_be_registered(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    with pytest.raises(BadRequest, match="expected Form"):
        register_form("mine", mla.naive)
    with pytest.raises(BadRequest, match="expected a function"):
        register_backend("mine", "dense")


def test_a_form_may_be_registered_again():
    register_form("key_absorbed", mla.FORMS["naive"])
    assert mla.FORMS["key_absorbed"] is mla.FORMS["naive"]


@pytest.mark.parametrize(
    ("remembers", "attends", "words"),
    [
        (lambda c_kv, k_pe, up, x: c_kv, mla.move_elided, r"remembers \(1, 3, 128\)\n  expected arrays \[B S \.\.\]"),
        (lambda c_kv, k_pe, up, x: {"c": c_kv.sum(1)}, lambda *_: None, r"remembers \{'c': \(1, 128\)\}\n  expected"),
        (lambda c_kv, k_pe, up, x: {"asked": c_kv}, lambda *_: None, "remembers an array named asked"),
        (
            mla.latents,
            lambda q, held, up, scale: q[0][..., :1],
            r"attends to \(1, 3, 4, 1\)\n  expected \[B T N V\], here \(1, 3, 4, 16\)",
        ),
    ],
)
def test_other_shapes_than_the_cache_and_the_layer_take_are_refused_before_weights_are_loaded(
    retrieving_folder, remembers, attends, words
):
    register_form("mine", Form(remembers, attends))
    with pytest.raises(BadRequest, match=f"the form mine {words}"):
        opened(retrieving_folder, attention="mine")


def test_settings_that_need_latents_are_refused_where_there_are_none(retrieving_folder):
    register_form("mine", Form(lambda *given: mla.heads(*given), mla.naive))
    for setting in ({"evict": "snapkv"}, {"retrieve": "quest"}):
        with pytest.raises(Unsupported, match=r"does not work with the form mine\n  it scores c_kv and k_pe, .* remembers k, v"):
            opened(retrieving_folder, attention="mine", **setting)
    with pytest.raises(Unsupported, match="the form key_absorbed caches other arrays than latents"):
        opened(retrieving_folder, attention="key_absorbed", kv_cache="fp8")


def test_the_plan_counts_the_bytes_that_the_form_remembers(retrieving_folder):
    found = opened(retrieving_folder, attention="key_absorbed")
    config, model = found.config, found.shapes()
    numbers = config.num_attention_heads * config.qk_nope_head_dim + config.qk_rope_head_dim + config.kv_lora_rank
    assert token_bytes(model) == parts_of(model).latent == 4 * numbers
    assert page_bytes(model) == 64 * config.num_hidden_layers * 4 * numbers
    lines = found.explain()
    assert f"key_absorbed caches {4 * numbers:,} bytes of a token in each layer" in "\n".join(lines)
    assert sum("key_absorbed, as asked: key_absorbed " in line for line in lines) == 3  # a line for each phase


def test_a_form_that_the_cost_model_does_not_know_reads_what_it_remembers(retrieving_folder):
    config = opened(retrieving_folder).config
    known = attention_cost(config, "move_elided", 3, 2, 100, 4)
    own = attention_cost(config, "key_absorbed", 3, 2, 100, 4, held=1000)
    assert own.flops == known.flops
    assert own.bytes - known.bytes == 3 * 100 * (1000 - roofline.held_bytes(config, "move_elided", 4))


def captured(folder, attention, mesh=None):
    with LLM(folder, dtype="float32", attention=attention, mesh=mesh) as llm:
        return llm.forward(np.array([LONG[:70]]), attention=[1], hidden=[2], cache=True)


def test_a_forward_pass_is_that_of_the_librarys_forms(retrieving_folder):
    own, moved = (captured(retrieving_folder, form) for form in ("key_absorbed", "move_elided"))
    for name, array in moved.items():
        assert np.abs(own[name] - array).max() < 1e-4, name


def answered(folder, **settings) -> list[list[int]]:
    """The tokens of prompts, some of which share a beginning and so pages; in turns, then together."""
    with LLM(folder, **{"dtype": "float32", "context": 512, **settings}) as llm:
        prompts = [LONG, [*LONG[:200], 7, 8], LONG[100:180], [5], LONG]
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
        together = [output.token_ids for output in llm.generate(prompts, GREEDY)]
        assert alone == together
    return together


@pytest.mark.deep
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float32", "cache_tokens": 512, "host_cache": 0.01},
        {"draft": "lookup"},
        {"evict": "snapkv", "evict_keep": 0.5},
        {"evict": "critical", "evict_budget": "ada", "evict_keep": 0.5, "evict_chunk": 128},
        {"retrieve": "quest", "retrieve_tokens": 256},
        {"mesh": "data=2,tensor=2"},
        {"mesh": "tensor=2", "cache_tokens": 512, "host_cache": 0.01},
        {"mesh": "tensor=2", "evict": "keydiff", "evict_keep": 0.5},
        {"mesh": "context=2"},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()) or "alone",
)
def test_its_tokens_are_those_of_the_librarys_forms(retrieving_folder, settings):
    own, moved = (answered(retrieving_folder, attention=form, **settings) for form in ("key_absorbed", "move_elided"))
    assert own == moved


@pytest.mark.deep
def test_the_cache_of_an_answer_has_the_keys_of_all_heads(retrieving_folder):
    with LLM(retrieving_folder, dtype="float32", attention="key_absorbed", context=256) as llm:
        stream = llm.stream(LONG[:70], GREEDY)
        next(stream)
        found, (uk, _) = stream.cache(), llm.model.layers[1].attn.up
        stream.close()
    assert set(found) == {"c_kv", "k_pe", "k_nope"}
    expected = np.einsum("tr,npr->tnp", found["c_kv"][1], np.asarray(uk))
    assert np.abs(found["k_nope"][1] - expected).max() < 1e-4


@pytest.mark.deep
@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_a_form_that_remembers_latents_has_all_that_the_librarys_have(retrieving_folder, kv_cache):
    register_form("mine", Form(mla.latents, lambda *given: mla.move_elided(*given)))
    own, moved = (answered(retrieving_folder, attention=form, kv_cache=kv_cache) for form in ("mine", "move_elided"))
    assert own == moved


@pytest.mark.deep
def test_gradients_are_those_of_the_form_and_the_backend(retrieving_folder):
    """Twice the values are no form of MLA; but the model computes by them, so its gradients do."""
    register_form("twice", Form(mla.latents, lambda *given: 2 * mla.move_elided(*given)))
    register_backend("thrice", lambda *given: 3 * moe.dense(*given))
    tokens, batch = jnp.asarray([LONG[:8]]), Batch.dense(1, 8)
    with LLM(retrieving_folder, dtype="float32", attention="twice", experts="thrice") as llm:
        logits, model = llm.logits(np.asarray(tokens)), llm.trainable()
    graph, weights = nnx.split(model)

    def of(weights):
        model = nnx.merge(graph, weights)
        return model.unembed(model(tokens, batch)[0])

    assert np.abs(of(weights) - logits).max() < 1e-4
    slopes = jax.grad(lambda weights: jnp.square(of(weights)).mean())(weights)
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(slopes))


@pytest.mark.deep
@pytest.mark.parametrize("mesh", [None, "data=2,tensor=2"])
def test_a_backend_gets_the_experts_of_its_device(retrieving_folder, mesh):
    seen = []

    def mine(x, topk_ids, topk_weights, experts):
        seen.append(experts[0].shape[0])
        return moe.dense(x, topk_ids, topk_weights, experts)

    register_backend("mine", mine)
    own, dense = (answered(retrieving_folder, experts=backend, mesh=mesh) for backend in ("mine", "dense"))
    assert own == dense
    config = opened(retrieving_folder).config
    assert set(seen) == {config.n_routed_experts // (4 if mesh else 1)}
