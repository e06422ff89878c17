"""Requests whose pages are on the host, and some on the device: which pages they ask for, and which tokens follow from that."""

import dataclasses
from functools import cache, partial

import deep
import jax
import numpy as np
import pytest
import retrieved
import serving
from serving import answer, nothing_compiled

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.cache.paged import PAGE
from mla_jax.cache.retrieve import POLICIES, Retrieval
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.paging import PagingEngine
from mla_jax.engine.policy.resident import Resident
from mla_jax.engine.policy.retrieving import RetrievingEngine
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import load

WORDS, RESIDENT = 96, 5
ROOMY = Size(rows=4, pages=64, context=768, chunk=256, hosted=64)
request = partial(serving.request, max_tokens=24)


@pytest.fixture(scope="module")
def programs_of(retrieving_folder):
    @cache
    def programs(policy: str = "quest", tokens: int = (RESIDENT + 1) * PAGE, resident: int = RESIDENT, **dispatch) -> Programs:
        asked = Retrieval(POLICIES[policy], tokens, dense=1, resident=resident * PAGE)
        return Programs(load(retrieving_folder, dispatch=Dispatch(retrieval=asked, **dispatch)))

    return programs


def paging(programs: Programs, size: Size = ROOMY) -> PagingEngine:
    return PagingEngine(programs, programs.model.config, None, size)


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, WORDS, n).tolist() for n in (470, 448, 90)]
    shares = [*prompts[0][:390], 5, 6, 7]  # begins as the first one does
    return [
        request(prompts[0], max_tokens=150),
        request(prompts[1], max_tokens=90),
        request(prompts[2]),
        request(shares, temperature=0.7, seed=3, max_tokens=80),
    ]


# what a request is told


@pytest.mark.deep(*deep.GENERATING)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_a_whole_sequence_that_sees_the_pages_it_chose(programs_of, asked, policy):
    engine, at = paging(programs_of(policy)), {}
    job = engine.submit(asked[0])
    while not job.done:
        engine.step()
        if isinstance(job.held, Resident) and not job.is_paused:
            at.setdefault(job.pauses, list(job.held.numbers))
    model, prompt, tokens = programs_of(policy).model, len(asked[0].prompt), asked[0].prompt + job.ids
    pages_at = retrieved.resident_pages(model, tokens, prompt, policy, RESIDENT, PAGE)
    assert [pages[:RESIDENT] for pages in at.values()] == list(pages_at.values())
    assert len({tuple(pages) for pages in pages_at.values()}) > 1
    mask = retrieved.seen(len(tokens), pages_at, PAGE)
    hidden, _ = retrieved.forward(model, tokens, lambda *_: mask)
    logits = np.asarray(model.unembed(jax.numpy.asarray(hidden[prompt - 1 : -1])))
    assert np.argmax(logits, -1).tolist() == job.ids
    assert mask[-1].sum() < len(tokens) - 3 * PAGE


@pytest.mark.deep(*deep.GENERATING)
@pytest.mark.parametrize("dispatch", [{}, {"attention": "fused"}, {"kv_cache": "fp8"}], ids=str)
def test_where_all_pages_stay_the_tokens_are_those_of_retrieval_on_the_device(programs_of, asked, dispatch):
    """Of which a step reads some."""
    programs = programs_of("quest", 4 * PAGE, 12, **dispatch)
    expected = answer(RetrievingEngine(programs, programs.model.config, None, ROOMY), *asked)
    engine = paging(programs)
    assert answer(engine, *asked) == expected
    assert engine.stats.pages_out > 15


@pytest.mark.deep(*deep.GENERATING)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_gets_the_same_tokens_alone_in_a_batch_and_preempted(programs_of, asked, policy):
    programs = programs_of(policy, 4 * PAGE)
    engine = paging(programs)
    together = answer(engine, *asked)
    assert engine.stats.pages_in > 10
    assert [answer(paging(programs), one)[0] for one in asked] == together
    small = paging(programs, dataclasses.replace(ROOMY, pages=20, hosted=24))
    assert answer(small, *asked * 2, streams=True, preempt_every=9) == together * 2
    assert small.stats.preemptions > 3
    assert small.stats.pages_free == 20
    assert small._tier.store.room == 24, "a page that nobody needs is held"
    assert answer(engine, *asked) == together  # prompts are known from before, as they were
    assert engine.stats.hits > 300


@pytest.mark.deep(*deep.GENERATING)
def test_more_rows_run_than_the_device_holds_whole(programs_of, asked):
    """Three of 10 pages each, in a pool of 20."""
    engine, together = paging(programs_of(), dataclasses.replace(ROOMY, pages=20)), 0
    jobs = [engine.submit(request([7, *asked[0].prompt[at:]], max_tokens=170)) for at in range(3)]
    while not all(job.done for job in jobs):
        engine.step()
        together = max(together, sum(job.read + job.steps for job in engine.running if not job.unread))
    assert together > 1.3 * 20 * PAGE
    assert engine.stats.preemptions == 0


@pytest.mark.deep(*deep.GENERATING)
def test_a_cancelled_request_leaves_no_page_behind(programs_of, asked):
    engine = paging(programs_of())
    jobs = [engine.submit(one) for one in asked]
    for step in range(40):
        engine.step()
        if step % 10 == 9:
            engine.cancel(jobs[step // 10])
    while engine.busy:
        engine.step()
    assert engine.stats.pages_free == ROOMY.pages
    assert engine._tier.store.room == ROOMY.hosted


@pytest.mark.deep(*deep.GENERATING)
def test_what_only_one_request_had_goes_with_it(programs_of, asked):
    """Of its answer no other can know; its prompt may begin another's."""
    engine = paging(programs_of())
    answer(engine, asked[0])
    assert engine.stats.pages_out >= (470 + 150 - 1) // PAGE
    assert len(engine._tier.store) == 470 // PAGE


@pytest.mark.deep(*deep.GENERATING)
def test_nothing_compiles_once_warm(programs_of, asked):
    engine = paging(programs_of())
    engine.warm_up()
    with nothing_compiled():
        answer(engine, *asked)


def test_what_cannot_fit_is_refused(programs_of):
    engine = paging(programs_of(), dataclasses.replace(ROOMY, pages=12, hosted=8))
    for prompt, limit in ((7 * PAGE, 5), (5 * PAGE, 4 * PAGE)):  # the device, the host
        with pytest.raises(DoesNotFit, match="does not fit the cache"):
            engine.submit(request([5] * prompt, max_tokens=limit))


# as users ask for it


@pytest.mark.deep(*deep.GENERATING)
def test_it_is_an_option_of_a_model_and_counted_in_its_memory(retrieving_folder, asked):
    llm = LLM(retrieving_folder, retrieve="quest", retrieve_tokens=256, resident_tokens=320, host_cache=0.01)
    plain = LLM(retrieving_folder, retrieve="quest", retrieve_tokens=256, host_cache=0.01)
    out = llm.generate([one.prompt[:400] for one in asked[:2]], SamplingParams(max_tokens=70, temperature=0))
    assert [len(one.token_ids) for one in out] == [70, 70]
    assert llm.stats().pages_out >= 12
    assert any("320 tokens of each request stay on the device" in line for line in llm.explain().splitlines())
    summed = llm.plan.temporaries - plain.plan.temporaries
    assert summed == llm.plan.hosted // PAGE * 3 * 2 * (128 + 8) * 4  # pages, layers, lowest and highest, numbers, float32


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"resident_tokens": 512, "host_cache": 1}, "resident_tokens is 512, but retrieve is off"),
        ({"retrieve": "quest", "resident_tokens": 512}, "resident_tokens is 512, but host_cache is 0"),
        ({"retrieve": "quest", "resident_tokens": 255, "host_cache": 1}, "resident_tokens is 255"),
    ],
    ids=str,
)
def test_what_excludes_it_is_refused(retrieving_folder, options, found):
    with pytest.raises(BadRequest, match=found):
        LLM(retrieving_folder, **options)
