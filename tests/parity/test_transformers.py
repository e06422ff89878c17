"""Folders that transformers saved itself, of random sizes, run by both in one go: float32, every form."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from mla_jax import LLM, SamplingParams
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.model.mla import FORMS

pytestmark = pytest.mark.parity
STEPS = 24
FAMILIES = [family for family in models.FAMILIES if family != "pangu_ultra_moe"]  # which transformers saves
DECODED = ("v2_lite", "v3")  # families whose tokens, and all forms, are compared in every run


def random_sizes(family: str, seed: int) -> dict:
    """The family's config with other sizes, ranks, head counts, groups and rotary settings."""
    rng, hf = np.random.default_rng([seed, len(family)]), dict(models.FAMILIES[family])
    heads = int(rng.choice([1, 2, 3, 5, 8]))
    hf |= {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * int(rng.choice([12, 20, 28]))}
    hf |= {"intermediate_size": int(rng.integers(20, 90)), "vocab_size": int(rng.integers(50, 200))}
    hf |= {"kv_lora_rank": int(rng.choice([12, 20, 64])), "qk_rope_head_dim": int(rng.choice([4, 6, 16]))}
    hf |= {"qk_nope_head_dim": int(rng.choice([8, 10, 24])), "v_head_dim": int(rng.choice([6, 16, 20]))}
    hf |= {"rope_theta": float(rng.choice([500.0, 1e4, 1e6])), "num_hidden_layers": int(rng.integers(2, 5))}
    if hf["q_lora_rank"] is not None:
        hf["q_lora_rank"] = int(rng.choice([8, 17, 40]))
    if "n_routed_experts" in hf:
        groups = int(rng.choice([1, 2, 4])) if hf["n_group"] > 1 else 1
        experts = groups * int(rng.choice([2, 3, 5]))
        kept = int(rng.integers(1, groups + 1))
        hf |= {"n_group": groups, "topk_group": kept, "n_routed_experts": experts}
        hf |= {"num_experts_per_tok": int(rng.integers(1, kept * (experts // groups) + 1))}
        hf |= {"n_shared_experts": int(rng.integers(1, 4))}
        hf |= {"moe_intermediate_size": int(rng.integers(5, 30)), "first_k_dense_replace": int(rng.integers(0, 3))}
    if rng.random() < 0.5:
        mscales = float(rng.choice([0.707, 1.0])), float(rng.choice([0.5, 1.0]))
        hf["rope_scaling"] = models.yarn(float(rng.choice([2, 8, 40])), *mscales, original=32)
    if "short_factor" in (hf.get("rope_scaling") or {}):
        hf["rope_scaling"] = models.longrope(rng.uniform(1, 20, hf["qk_rope_head_dim"] // 2).tolist(), original=32)
    if hf["model_type"] == "longcat_flash":
        pairs = int(rng.integers(1, 3))
        hf |= {"num_layers": pairs, "num_hidden_layers": 2 * pairs, "head_dim": hf["qk_rope_head_dim"]}
        hf |= {"n_shared_experts": None, "first_k_dense_replace": 0, "zero_expert_num": int(rng.integers(0, 6))}
    if hf["model_type"] == "mistral4":
        part = hf["qk_rope_head_dim"] / (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])
        hf["rope_scaling"] = {**hf["rope_scaling"], "llama_4_scaling_beta": 0.2, "partial_rotary_factor": part}
    return hf


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(transformers' model, the folder it saved), once a family and seed."""
    oracle, made = pytest.importorskip("parity.oracle", reason="the extra `parity` is missing", exc_type=ModuleNotFoundError), {}

    def get(family: str, seed: int):
        if (family, seed) not in made:
            hf = random_sizes(family, seed)
            source, saved = (tmp_path_factory.mktemp(f"{family}{seed}{kind}") for kind in ("source", "saved"))
            oracle.load(models.write(source, hf, models.tensors(hf, seed))).save_pretrained(saved)
            made[family, seed] = oracle, oracle.load(saved), saved
        return made[family, seed]

    return get


def prompts(hf: dict, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(2, hf["vocab_size"], n).tolist() for n in lengths]


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / theirs.std())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree(both, family, seed):
    """In every form for the first sizes of two families; steps are compared in every form for the second."""
    oracle, theirs, folder = both(family, seed)
    tokens = np.array(prompts(config_of(folder), [37, 37]))
    expected = oracle.logits(theirs, tokens)
    for form in FORMS if seed == 0 and family in DECODED else ("auto",):
        assert relative(LLM(folder, attention=form, dtype="float32").logits(tokens), expected) <= 1e-4, form


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in DECODED else pytest.mark.deep) for family in FAMILIES]
)
def test_greedy_tokens_are_equal_for_ragged_batches_and_single_rows(both, family):
    oracle, theirs, folder = both(family, 0)
    rows = prompts(config_of(folder), [3, 30, 17])
    expected = [oracle.greedy(theirs, row, STEPS) for row in rows]
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    naive, auto = (LLM(folder, attention=form, dtype="float32") for form in ("naive", "auto"))
    for llm in (naive, auto):
        assert [o.token_ids for o in llm.generate(rows, params)] == expected
    assert auto.generate(rows[1], params)[0].token_ids == expected[1]


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_step_by_step_decode_in_every_form_equals_their_full_forward(both, family):
    oracle, theirs, folder = both(family, 1)
    tokens = np.array(prompts(config_of(folder), [20, 20]))
    expected = oracle.logits(theirs, tokens)
    for form in FORMS:
        assert relative(step_by_step(LLM(folder, attention=form, dtype="float32").model, tokens), expected) <= 1e-4, form


def step_by_step(model, tokens: np.ndarray) -> np.ndarray:
    """Logits of a prefix, then of one token at a time."""
    forward = jax.jit(lambda tokens, batch, pool: model(tokens, batch, pool)[:2])
    table, start, found = paged.in_order(2, 32), 0, []
    pool = model.new_pool(table.size)
    for size in (9, *[1] * 11):
        batch = Batch.after(jnp.full(2, start, jnp.int32), jnp.ones((2, size), bool), table)
        hidden, pool = forward(jnp.asarray(tokens[:, start : start + size]), batch, pool)
        found.append(model.unembed(hidden))
        start += size
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("family", DECODED)
def test_what_a_forward_pass_shows_is_what_theirs_returns(both, family):
    """Hidden states between layers, and every head's attention."""
    oracle, theirs, folder = both(family, 0)
    tokens, layers = np.array(prompts(config_of(folder), [21, 21])), config_of(folder)["num_hidden_layers"]
    states, weights = oracle.inside(theirs, tokens)
    with LLM(folder, dtype="float32") as llm:
        found = llm.forward(tokens, hidden=range(layers), attention=range(layers))
    assert relative(found["hidden"], states[:layers]) <= 1e-4
    assert np.abs(found["attention"] - weights).max() <= 1e-5


@pytest.mark.parametrize("family", ["v3", "glm_4_7_flash"])
def test_the_mtp_layer_agrees(both, tmp_path, family):
    oracle, hf = both(family, 0)[0], models.FAMILIES[family]
    theirs = oracle.load(models.write(tmp_path, hf, models.tensors(hf, 5, mtp=True)))
    model, tokens = LLM(tmp_path, dtype="float32").model, np.array(prompts(hf, [25, 25]))
    batch = Batch.dense(2, 24)
    hidden, _, _ = model(jnp.asarray(tokens[:, :-1]), batch)
    drafted, _, _ = model.draft(0, jnp.asarray(tokens[:, 1:]), hidden, batch)
    assert relative(np.asarray(model.unembed(drafted)), oracle.mtp_logits(theirs, tokens)) <= 1e-4


def test_bfloat16_differs_from_float32_by_rounding_alone(both):
    _, _, folder = both("v3", 0)
    tokens = np.array(prompts(config_of(folder), [37]))
    exact, rounded = (LLM(folder, dtype=dtype).logits(tokens) for dtype in ("float32", "bfloat16"))
    assert 0 < np.sqrt(np.mean((exact - rounded) ** 2)) / exact.std() < 0.1
    assert math.isfinite(rounded.sum())
