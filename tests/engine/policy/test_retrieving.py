"""Requests that read some of their pages while they decode: the same tokens however they are served, as the definition says."""

import dataclasses
from functools import cache, partial

import jax
import numpy as np
import pytest
import retrieved
import serving
from models import FAMILIES, tensors, write
from serving import answer, drafting_engine, nothing_compiled

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest
from mla_jax.cache.paged import PAGE
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, Retrieval
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import Lookup, Mtp
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.retrieving import Retrieving
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import load

WORDS, FEWEST = 96, 4 * PAGE
ROOMY = Size(rows=4, pages=48, context=512, chunk=256)
request = partial(serving.request, max_tokens=24)


@pytest.fixture(scope="module")
def programs_of(retrieving_folder):
    @cache
    def programs(policy: str = "quest", tokens: int = FEWEST, **dispatch) -> Programs:
        asked = Retrieval(RETRIEVAL_POLICIES[policy], tokens, dense=1)
        return Programs(load(retrieving_folder, dispatch=Dispatch(retrieval=asked, **dispatch)))

    return programs


def retrieving(programs: Programs, size: Size = ROOMY) -> Engine:
    return Engine(programs, size, policy=Retrieving(programs, size))


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, WORDS, n).tolist() for n in (470, 400, 90)]
    shares = [*prompts[0][:330], 5, 6, 7]  # begins as the first one does
    return [*map(request, prompts), request(shares, temperature=0.7, seed=3, max_tokens=40)]


# what a request is told


@pytest.mark.deep
def test_with_a_window_all_before_it_is_as_far_as_its_edge(programs_of, asked, retrieving_folder):
    """As in the whole sequence, by its definition; InfLLM's representatives are chosen without positions."""
    window, most = 70, 6
    dispatch = windowed(window, most * PAGE)
    programs = Programs(load(retrieving_folder, dispatch=dispatch))
    (ids,) = answer(retrieving(programs), asked[0])
    model, prompt = programs.model, asked[0].prompt
    assert dispatch.retrieval is not None
    recent = dispatch.retrieval.recent
    for edge, same in ((window, True), (window + 40, False)):
        given = {"dense": 1, "recent": recent, "window": edge}
        hidden = retrieved.hidden_states(model, prompt + ids, len(prompt), "infllm", most, PAGE, **given)
        logits = np.asarray(model.unembed(jax.numpy.asarray(hidden[len(prompt) - 1 : -1])))
        assert (np.argmax(logits, -1).tolist() == ids) == same
    together = answer(retrieving(programs), *asked)
    assert together[0] == ids
    small = retrieving(programs, dataclasses.replace(ROOMY, pages=24))
    assert answer(small, *asked, streams=True, preempt_every=4) == together


@pytest.mark.deep
def test_a_window_that_holds_everything_changes_nothing(programs_of, asked, retrieving_folder):
    programs = Programs(load(retrieving_folder, dispatch=windowed(512, 10 * PAGE)))
    assert answer(retrieving(programs), *asked) == answer(retrieving(programs_of("infllm", 10 * PAGE)), *asked)


def test_with_a_window_a_text_may_be_longer_than_the_model_allows(tmp_path):
    hf = {**FAMILIES["v3"], "num_nextn_predict_layers": 0, "max_position_embeddings": 128}
    folder, prompt = write(tmp_path, hf, tensors(hf)), np.random.default_rng(0).integers(2, WORDS, 300).tolist()
    settings = {"context": 400, "retrieve": "infllm", "retrieve_tokens": 384}
    with LLM(folder, **settings, retrieve_window=100) as llm:
        assert "more than 100 back are all as far" in llm.explain()
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
        assert len(output.token_ids) == 4
    for given, name in (({}, "context is 400"), ({"retrieve_window": 129, "retrieve_tokens": 512}, "retrieve_window is 129")):
        with pytest.raises(BadRequest, match=name):
            LLM(folder, **settings | given)


def windowed(window: int, tokens: int) -> Dispatch:
    return Dispatch(retrieval=Retrieval(RETRIEVAL_POLICIES["infllm"], tokens, dense=1).with_window(window, PAGE))


@pytest.mark.deep
@pytest.mark.parametrize("policy", RETRIEVAL_POLICIES)
def test_tokens_are_those_of_a_whole_sequence_in_which_each_token_sees_what_it_chooses(programs_of, asked, policy):
    programs = programs_of(policy)
    (ids,) = answer(retrieving(programs), asked[0])
    model, prompt = programs.model, asked[0].prompt
    for most, same in ((4, True), (8, False)):
        hidden = retrieved.hidden_states(model, prompt + ids, len(prompt), policy, most, PAGE, dense=1)
        logits = np.asarray(model.unembed(jax.numpy.asarray(hidden[len(prompt) - 1 : -1])))
        assert (np.argmax(logits, -1).tolist() == ids) == same


@pytest.mark.deep
@pytest.mark.parametrize("policy", RETRIEVAL_POLICIES)
def test_a_request_gets_the_same_tokens_alone_in_a_batch_and_preempted(programs_of, asked, policy):
    programs = programs_of(policy)
    engine = retrieving(programs)
    together = answer(engine, *asked)
    assert [answer(retrieving(programs), one)[0] for one in asked] == together
    small = retrieving(programs, dataclasses.replace(ROOMY, pages=24))
    assert answer(small, *asked * 2, streams=True, preempt_every=4) == together * 2
    assert small.stats.preemptions > 5
    assert small.stats.generated > 1.1 * sum(map(len, together * 2)), "nobody had told anything that came again"
    assert small.stats.pages_free == 24
    assert answer(engine, *asked) == together  # prompts are known from before, as they were
    assert engine.stats.hits > 300


@pytest.mark.deep
@pytest.mark.parametrize(
    "dispatch",
    [{"attention": form} for form in ("compressed", "absorbed", "move_elided", "fused")] + [{"kv_cache": "fp8"}],
    ids=str,
)
def test_where_all_pages_are_read_the_tokens_are_those_of_full_attention(retrieving_folder, programs_of, asked, dispatch):
    full = load(retrieving_folder, dispatch=Dispatch(**dispatch))
    expected = answer(Engine(Programs(full), ROOMY), *asked)
    for policy in RETRIEVAL_POLICIES if dispatch.get("kv_cache") else ["quest"]:
        assert answer(retrieving(programs_of(policy, 8 * PAGE, **dispatch)), *asked) == expected


@pytest.mark.deep
def test_a_preempted_request_takes_the_tokens_it_has_told_whatever_is_drawn(programs_of, asked):
    """They are drawn at a high temperature, then come again with another seed."""
    engine = retrieving(programs_of())
    job = engine.submit(request(asked[1].prompt, temperature=2.0, seed=1, logprobs=1), streams=True)
    while len(job.ids) < 9:
        engine.step()
    engine._land_all()
    told = list(job.ids)
    engine._preempt(job)
    job.request = dataclasses.replace(job.request, params=dataclasses.replace(job.request.params, seed=2))
    while not job.done:
        engine.step()
    assert job.ids[: len(told)] == told
    assert len(job.ids) == 24
    assert [next(iter(scores)) for scores in job.logprobs] == job.ids


@pytest.mark.deep
def test_the_index_learns_of_prompts_alone(programs_of, asked):
    """A conversation goes on: its first answer is read again."""
    engine, prompt = retrieving(programs_of()), asked[2].prompt[:60]
    (ids,) = answer(engine, request(prompt, max_tokens=3 * PAGE))
    assert engine.stats.hits == 0
    longer = request(prompt + ids + [5, 6, 7])
    alone = answer(retrieving(programs_of()), longer)
    assert answer(engine, longer) == alone
    assert engine.stats.hits == 0
    answer(engine, longer)
    assert engine.stats.hits == 3 * PAGE


@pytest.mark.deep
def test_nothing_compiles_once_warm(programs_of, asked):
    engine = retrieving(programs_of())
    engine.warm_up()
    with nothing_compiled():
        answer(engine, *asked, streams=True, preempt_every=7)


@pytest.mark.deep
@pytest.mark.parametrize("drafter", [Lookup(3), Mtp(2)], ids=lambda drafter: drafter.name)
def test_drafts_give_the_tokens_of_plain_decoding(tmp_path_factory, drafter):
    """Each draft reads the pages that it would read as a token of its own; a row that is preempted replays its tokens."""
    hf = {**FAMILIES["v3"], "kv_lora_rank": 128}
    folder = write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True))
    model = load(folder, dispatch=Dispatch(retrieval=Retrieval(RETRIEVAL_POLICIES["quest"], FEWEST, dense=1)))
    rng = np.random.default_rng(3)
    repeated = rng.integers(2, WORDS, 40).tolist()
    prompts = [repeated * 11, rng.integers(2, WORDS, 400).tolist(), rng.integers(2, WORDS, 90).tolist()]
    asked = [request(prompt, max_tokens=70, temperature=0.5 * i, seed=i) for i, prompt in enumerate(prompts)]
    expected = answer(retrieving(Programs(model)), *asked)
    programs = Programs(model, drafter=drafter)
    size = dataclasses.replace(ROOMY, pages=30)
    engine = drafting_engine(programs, size, drafter.most, policy=Retrieving(programs, size))
    assert answer(engine, *asked) == expected
    assert answer(engine, *asked, preempt_every=2) == expected
    assert engine.stats.preemptions > 1
    assert engine.stats.stood.sum() > 5


# as users ask for it


@pytest.mark.deep
def test_it_is_an_option_of_a_model_and_counted_in_its_memory(retrieving_folder, asked):
    llm, plain = LLM(retrieving_folder, retrieve="quest", retrieve_tokens=300), LLM(retrieving_folder)
    out = llm.generate([one.prompt for one in asked[:2]], SamplingParams(max_tokens=5, temperature=0))
    assert [len(one.token_ids) for one in out] == [5, 5]
    assert any("quest chooses 256 tokens" in line and "first 2 layers" in line for line in llm.explain().splitlines())
    noted = llm.plan.cache - plain.plan.cache
    assert noted == 3 * (llm.plan.context // PAGE) * 2 * (128 + 8) * 4  # layers, pages, lowest and highest, numbers, float32
