"""Models that choose the tokens they attend to: transformers' tokens, however requests are served."""

import dataclasses
from functools import cache
from pathlib import Path

import models
import numpy as np
import pytest
import serving
import sharded
from serving import answer, drafting_engine, nothing_compiled

from mla_jax import LLM, SamplingParams
from mla_jax.base.axes import parse_mesh
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import NOBODY, Lookup, Mtp
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.size import Size
from mla_jax.mesh.devices import Devices
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import load

GOLDEN = Path(__file__).parents[1] / "golden"
WORDS = 96
SIZE = Size(rows=4, pages=40, context=384, chunk=64)  # prompts of 200 tokens are read in chunks
FAMILIES = ["v32", "glm_5"]


@cache
def model_of(family: str, **dispatch):
    return load(GOLDEN / family, dispatch=Dispatch(**dispatch))


@cache
def programs_of(family: str, drafter=NOBODY, **dispatch) -> Programs:
    return Programs(model_of(family, **dispatch), drafter=drafter)


def golden(family: str) -> tuple[list[Request], list[list[int]]]:
    """Requests of many times the tokens that each attends to, and transformers' greedy tokens."""
    found = np.load(GOLDEN / family / "golden.npz")
    asked = [serving.request(prompt, max_tokens=found["greedy"].shape[1]) for prompt in found["tokens"].tolist()]
    return asked, found["greedy"].tolist()


def requests(family: str) -> list[Request]:
    """Golden ones, one that begins as the first does, short ones that attend to everything, and sampled ones."""
    rng, (asked, _) = np.random.default_rng(5), golden(family)
    shares = serving.request([*asked[0].prompt[:150], 5, 6, 7], max_tokens=30, temperature=0.8, seed=3)
    short = [serving.request(rng.integers(2, WORDS, n).tolist(), max_tokens=30) for n in (1, 20, 70)]
    return [*asked, shares, *short]


@cache
def expected(family: str, **dispatch) -> list[list[int]]:
    """The tokens of each request alone."""
    programs = programs_of(family, **dispatch)
    return [answer(Engine(programs, SIZE), one)[0] for one in requests(family)]


def test_a_prompt_in_chunks_gets_the_tokens_of_transformers():
    asked, greedy = golden("glm_5")
    engine = Engine(programs_of("glm_5"), SIZE)
    assert answer(engine, *asked) == greedy
    assert engine.stats.read == 2 * 200


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_gets_the_same_tokens_alone_in_a_batch_from_a_shared_prefix_and_preempted(family):
    alone, (asked, greedy) = expected(family), golden(family)
    assert alone[: len(asked)] == greedy
    engine = Engine(programs_of(family), SIZE)
    assert answer(engine, *requests(family)) == alone
    before = engine.stats.hits
    assert answer(engine, *requests(family)) == alone, "their prefixes are cached"
    assert engine.stats.hits - before > 3 * 2 * PAGE
    small = Engine(programs_of(family), dataclasses.replace(SIZE, pages=10))
    assert answer(small, *requests(family) * 2, streams=True, preempt_every=5) == alone * 2
    assert small.stats.preemptions > 5


@pytest.mark.deep
@pytest.mark.parametrize("drafter", [Mtp(3), Lookup(3)], ids=lambda drafter: type(drafter).__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_give_the_tokens_of_plain_decoding(family, drafter):
    """Each draft chooses by itself, and keys of rejected ones are overwritten."""
    engine = drafting_engine(programs_of(family, drafter), SIZE, drafter.most)
    assert answer(engine, *requests(family)) == expected(family)
    assert answer(engine, *requests(family), preempt_every=4) == expected(family)
    assert 0 < engine.stats.stood.sum() < engine.stats.drafted.sum()


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "tensor=4", "data=4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mesh_gives_the_tokens_of_one_device(family, mesh):
    model = sharded.spread(model_of(family), Devices.of(parse_mesh(mesh)))
    engine = Engine(Programs(model), SIZE)
    assert answer(engine, *requests(family)) == expected(family)


@pytest.mark.deep
@pytest.mark.parametrize("attention", ["naive", "compressed", "absorbed", "fused"])
def test_every_form_gives_the_tokens_of_transformers(attention):
    asked, greedy = golden("glm_5")
    assert answer(Engine(programs_of("glm_5", attention=attention), SIZE), *asked) == greedy


def written_in_fp8(folder: Path, width: int) -> Path:
    """A GLM-5 whose latents can be in E4M3, with keys of this width."""
    hf = {**models.FAMILIES["glm_5"], "kv_lora_rank": 128, "index_head_dim": width}
    return models.write(folder, hf, models.tensors(hf))


@pytest.mark.deep
def test_latents_in_fp8_are_chosen_among_alike(tmp_path):
    """In two forms, alone and in a batch; keys of 16 numbers are not rounded."""
    folder, asked = written_in_fp8(tmp_path, 16), requests("glm_5")
    found = []
    for attention in ("move_elided", "compressed"):
        model = load(folder, dispatch=Dispatch(attention, kv_cache="fp8"))
        assert {name: array.dtype.name for name, array in model.new_pool(1).items()} == {
            "c_kv": "uint8", "c_kv_scale": "float32", "index_k": "float32", "k_pe": "float32"
        }  # fmt: skip
        programs = Programs(model)
        found.append(answer(Engine(programs, SIZE), *asked))
        assert [answer(Engine(programs, SIZE), one)[0] for one in asked] == found[-1]
    assert found[0] == found[1]


@pytest.mark.deep
def test_keys_in_fp8_give_the_same_tokens_in_a_batch_from_a_shared_prefix_preempted_and_from_the_host(tmp_path):
    folder, asked = written_in_fp8(tmp_path, 128), requests("glm_5")
    model = load(folder, dispatch=Dispatch(kv_cache="fp8"))
    assert {name: array.dtype.name for name, array in model.new_pool(1).items() if "index" in name} == {
        "index_k": "uint8", "index_k_scale": "float32"
    }  # fmt: skip
    programs = Programs(model)
    whole = Engine(programs, dataclasses.replace(SIZE, chunk=256))  # no prompt is read in chunks
    alone = [answer(whole, one)[0] for one in asked]
    engine = Engine(programs, SIZE)
    assert answer(engine, *asked) == answer(engine, *asked) == alone
    assert engine.stats.hits > 3 * 2 * PAGE
    small = Engine(programs, dataclasses.replace(SIZE, pages=10))
    assert answer(small, *asked * 2, streams=True, preempt_every=5) == alone * 2
    llm = LLM(folder, dtype="float32", kv_cache="fp8", cache_tokens=6 * PAGE, host_cache=0.05)
    assert "their keys take 396 bytes a token in E4M3, after a Hadamard transform" in llm.explain()
    for one, ids in [*zip(asked[:2], alone, strict=False)] * 2:
        params = SamplingParams(max_tokens=len(ids), temperature=0.0, ignore_eos=True)
        assert llm.generate([one.prompt], params)[0].token_ids == ids
    assert llm.stats().bytes_in > 0


@pytest.mark.deep
def test_nothing_compiles_once_warm():
    engine = Engine(programs_of("glm_5"), SIZE)
    engine.warm_up()
    with nothing_compiled():
        answer(engine, *requests("glm_5"), streams=True, preempt_every=7)


@pytest.mark.deep
def test_pages_that_come_back_from_the_host_bring_their_keys():
    asked, greedy = golden("glm_5")
    llm = LLM(GOLDEN / "glm_5", dtype="float32", cache_tokens=6 * PAGE, host_cache=0.05)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        for one, ids in zip(asked, greedy, strict=True):
            assert llm.generate([one.prompt], params)[0].token_ids == ids
    assert llm.stats().bytes_in > 0
