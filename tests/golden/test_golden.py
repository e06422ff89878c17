"""Every family against what transformers computed for the same folder (see make.py)."""

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

HERE = Path(__file__).parent
FOLDERS = sorted(p.name for p in HERE.iterdir() if (p / "golden.npz").exists())


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / theirs.std())


def test_there_is_a_folder_of_every_family():
    assert {*FOLDERS} == {*models.FAMILIES, "v3_mtp"}


def opened(folder: str, form: str) -> tuple[LLM, dict[str, np.ndarray]]:
    return LLM(HERE / folder, attention=form, dtype="float32"), np.load(HERE / folder / "golden.npz")


@pytest.mark.deep
@pytest.mark.parametrize("form", [pytest.param(form, marks=pytest.mark.once) for form in FORMS])
@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_in_every_form_equal_those_of_transformers(folder, form):
    llm, golden = opened(folder, form)
    assert relative(llm.logits(golden["tokens"]), golden["logits"]) < 1e-4


# Steps know nothing of families: for forms that are not chosen by themselves one is enough, and those that change queries or
# latents around a kernel.
OTHERS = [
    pytest.param(folder, form, marks=(pytest.mark.once, pytest.mark.deep))
    for folder, form in (("v3", "naive"), ("v3", "fused"), ("mistral4", "fused"))
]
GREEDY = [
    *(pytest.param(folder, "auto", marks=() if folder == "v3" else pytest.mark.deep) for folder in FOLDERS),
    *OTHERS,
]


@pytest.mark.parametrize(("folder", "form"), GREEDY)
def test_logits_and_greedy_tokens_equal_those_of_transformers(folder, form):
    llm, golden = opened(folder, form)
    assert relative(llm.logits(golden["tokens"]), golden["logits"]) < 1e-4
    params = SamplingParams(max_tokens=golden["greedy"].shape[1], temperature=0.0, ignore_eos=True)
    outputs = llm.generate(golden["tokens"].tolist(), params)
    assert [o.token_ids for o in outputs] == golden["greedy"].tolist()


MTP = [folder for folder in FOLDERS if "mtp_logits" in np.load(HERE / folder / "golden.npz").files]


@pytest.mark.deep
@pytest.mark.parametrize("folder", MTP)
def test_the_mtp_layer_gives_the_logits_of_transformers(folder):
    golden = np.load(HERE / folder / "golden.npz")
    model, tokens = LLM(HERE / folder, dtype="float32").model, jnp.asarray(golden["tokens"], jnp.int32)
    batch = Batch.dense(tokens.shape[0], tokens.shape[1] - 1)

    @jax.jit
    def mtp_logits(tokens):
        hidden, _, _ = model(tokens[:, :-1], batch)
        drafted, _, _ = model.draft(0, tokens[:, 1:], hidden, batch)
        return model.unembed(drafted)

    assert relative(np.asarray(mtp_logits(tokens)), golden["mtp_logits"]) < 1e-4


@pytest.mark.deep
@pytest.mark.parametrize("folder", MTP)
def test_the_mtp_layer_gives_the_same_step_by_step_over_its_own_cache(folder):
    golden = np.load(HERE / folder / "golden.npz")
    model, tokens = LLM(HERE / folder, dtype="float32").model, jnp.asarray(golden["tokens"], jnp.int32)
    rows, length = tokens.shape
    whole = Batch.dense(rows, length - 1)
    hidden = jax.jit(lambda tokens: model(tokens, whole)[0])(tokens[:, :-1])
    table, logits = paged.in_order(rows, length), []
    pool = model.new_pool(table.size)

    @jax.jit
    def step(tokens, hidden, batch, pool):
        drafted, pool, _ = model.draft(0, tokens, hidden, batch, pool)
        return model.unembed(drafted), pool

    half = length // 2
    for part in (slice(0, half), slice(half, half + 1), slice(half + 1, length - 1)):
        held = jnp.full(rows, part.start, jnp.int32)
        found, pool = step(tokens[:, 1:][:, part], hidden[:, part], Batch.after(held, whole.mask[:, part], table), pool)
        logits.append(found)
    assert relative(np.concatenate(logits, axis=1), golden["mtp_logits"]) < 1e-4
    mine = model.layer_of(pool, len(model.layers))  # the model's layers have other pages
    for name, array in pool.items():
        first = mine.first_of_index if name == paged.INDEX_K else mine.first
        assert not array[:first].any(), name
        assert array[first:].any(), name
