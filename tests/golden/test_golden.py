"""Every family against what transformers computed for the same folder (see make.py)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import LLM, SamplingParams
from mla_jax.base.batch import Batch
from mla_jax.model.mla import FORMS

HERE = Path(__file__).parent
FOLDERS = sorted(p.name for p in HERE.iterdir() if (p / "golden.npz").exists())


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / theirs.std())


def test_there_is_a_folder_of_every_family():
    assert len(FOLDERS) == 8


@pytest.mark.parametrize("form", [*FORMS, "auto"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_equal_those_of_transformers(folder, form):
    golden = np.load(HERE / folder / "golden.npz")
    logits = LLM(HERE / folder, attention=form, dtype="float32").logits(golden["tokens"])
    assert relative(logits, golden["logits"]) < 1e-4


@pytest.mark.parametrize("form", ["auto", *(pytest.param(form, marks=pytest.mark.once) for form in ("naive", "fused"))])
@pytest.mark.parametrize("folder", FOLDERS)
def test_greedy_tokens_equal_those_of_transformers(folder, form):
    golden = np.load(HERE / folder / "golden.npz")
    params = SamplingParams(max_tokens=golden["greedy"].shape[1], temperature=0.0, ignore_eos=True)
    outputs = LLM(HERE / folder, attention=form, dtype="float32").generate(golden["tokens"].tolist(), params)
    assert [o.token_ids for o in outputs] == golden["greedy"].tolist()


def test_the_mtp_layer_gives_the_logits_of_transformers():
    golden = np.load(HERE / "v3_mtp" / "golden.npz")
    model, tokens = LLM(HERE / "v3_mtp").model, jnp.asarray(golden["tokens"], jnp.int32)
    batch = Batch.dense(tokens.shape[0], tokens.shape[1] - 1)
    hidden, _, _ = model(tokens[:, :-1], batch)
    drafted, _, _ = model.draft(0, tokens[:, 1:], hidden, batch)
    assert relative(np.asarray(model.unembed(drafted)), golden["mtp_logits"]) < 1e-4


def test_the_mtp_layer_gives_the_same_step_by_step_over_its_own_cache():
    golden = np.load(HERE / "v3_mtp" / "golden.npz")
    model, tokens = LLM(HERE / "v3_mtp").model, jnp.asarray(golden["tokens"], jnp.int32)
    whole = Batch.dense(tokens.shape[0], tokens.shape[1] - 1)
    hidden, _, _ = model(tokens[:, :-1], whole)
    (layer,), logits = model.new_cache(tokens.shape[0], 32, layers=1), []
    for part in (slice(0, 9), slice(9, 10), slice(10, 19)):
        batch = Batch(whole.positions[:, part], whole.mask[:, part])
        drafted, layer, _ = model.draft(0, tokens[:, 1:][:, part], hidden[:, part], batch, layer)
        logits.append(model.unembed(drafted))
    assert relative(np.concatenate(logits, axis=1), golden["mtp_logits"]) < 1e-4
