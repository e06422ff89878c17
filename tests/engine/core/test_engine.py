"""The engine: whatever runs beside a request, it gets the tokens that it gets alone."""

import dataclasses

import jax
import numpy as np
import pytest
from models import FAMILIES, tensors, write
from serving import finish, nothing_compiled, preempt_all_but_one, request

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.decode.programs import Program
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.size import Size
from mla_jax.weights.load import load

CONTEXT = 384
SMALL = Size(rows=8, pages=12, context=CONTEXT, chunk=128)
ROOMY = dataclasses.replace(SMALL, rows=4, pages=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module")
def programs(model) -> Programs:
    return Programs(model)


def engine_of(programs: Programs, size: Size = SMALL) -> Engine:
    return Engine(programs, size)


def alone(programs: Programs, asked: Request) -> list[int]:
    """Nothing shared, in a pool of its own."""
    engine = engine_of(programs, ROOMY)
    return finish(engine, [engine.submit(asked)])[0]


PENALTIES: list[dict[str, float]] = [
    {},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"presence_penalty": -2.0, "frequency_penalty": 0.5},
    {"presence_penalty": 1.5},
]


def random_request(rng: np.random.Generator, prefixes: list[list[int]]) -> Request:
    """Some begin as others do; some are sampled or penalised."""
    prefix = prefixes[rng.integers(len(prefixes))] if rng.random() < 0.6 else []
    own = rng.integers(2, 96, rng.integers(1, 60)).tolist()
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": int(rng.integers(1000))} if rng.random() < 0.4 else {}
    penalised = PENALTIES[rng.integers(len(PENALTIES))]
    longest = 90 if rng.random() < 0.6 else 20
    return request(prefix + own, max_tokens=int(rng.integers(1, longest)), **sampled, **penalised)


@pytest.mark.deep
@pytest.mark.once
def test_600_requests_get_the_tokens_they_get_alone(programs):
    """Of random lengths and priorities, in a pool that holds a few, with cancels, preemptions, shared prefixes and forks."""
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(2, 96, n).tolist() for n in (64, 130, 200)]
    engine, expected, jobs, cancelled = engine_of(programs), {}, [], []
    engine.limits = dataclasses.replace(engine.limits, steps=4, fewest_steps=2)  # so that less is set aside for those that run
    kinds = [random_request(rng, prefixes) for _ in range(60)]
    while len(jobs) < 600 or engine.busy:
        if len(jobs) < 600 and len(engine.waiting) < 12:
            kind = int(rng.integers(len(kinds)))
            for fork in range(int(rng.choice([1, 1, 1, 3]))):
                jobs.append((kind, fork, engine.submit(kinds[kind].fork(fork), priority=int(rng.integers(3)))))
        if rng.random() < 0.03 and engine.jobs:
            job = list(engine.jobs.values())[int(rng.integers(len(engine.jobs)))]
            engine.cancel(job)
            cancelled.append(job)
        engine.step()
        assert_pages(engine)
        if rng.random() < 0.04:
            preempt_all_but_one(engine)
    assert engine.stats.preemptions > 100
    assert engine.stats.hits > 1000
    assert len(cancelled) > 20
    for kind, fork, job in jobs:
        if job.reason is FinishReason.CANCELLED:
            continue
        key = kind, fork if kinds[kind].params.temperature else 0
        if key not in expected:
            expected[key] = alone(programs, kinds[kind].fork(fork))
        assert job.ids == expected[key], (kind, fork)
    assert engine.stats.pages_free == SMALL.pages


@pytest.mark.deep
@pytest.mark.parametrize("penalties", PENALTIES[1:], ids=lambda given: "-".join(given))
def test_output_that_an_earlier_row_has_read_counts_for_the_penalties(programs, penalties):
    """A preempted request finds its own output in the prefix index."""
    asked = request([5, 6, 7] * 10, max_tokens=120, **penalties)
    engine = engine_of(programs, ROOMY)
    other, job = engine.submit(request([8] * 20, max_tokens=4)), engine.submit(asked)
    while len(job.ids) < PAGE:
        engine.step()
    assert other.done
    engine._land_all()
    engine._preempt(job)
    assert finish(engine, [job])[0] == alone(programs, asked)


def assert_pages(engine: Engine) -> None:
    """Every page is free or held, and as often as the jobs say."""
    held = [page for job in engine.running for page in job.held.pages]
    assert engine.stats.pages_free == SMALL.pages - len(set(held))
    assert len(engine.running) + len(engine.shards[0].free_rows) == SMALL.rows


def test_tokens_are_those_of_whole_sequences_without_a_cache(programs):
    """Across borders of pages and blocks, read in several pieces."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 63, 64, 65, 150, 250)]
    engine = engine_of(programs, ROOMY)
    answers = finish(engine, [engine.submit(request(prompt, max_tokens=20)) for prompt in prompts])
    for prompt, ids in zip(prompts, answers, strict=True):
        logits = programs.logits(np.array([prompt + ids], np.int32))[0]
        assert np.argmax(logits[len(prompt) - 1 : -1], -1).tolist() == ids


@pytest.mark.deep
def test_a_job_knows_the_tokens_that_others_had_read_when_it_first_started(programs):
    engine, prompt = engine_of(programs, ROOMY), [5, 6, 7] * 50
    jobs = [engine.submit(request(prompt, max_tokens=n)) for n in (2, 40)]
    finish(engine, jobs)
    later = engine.submit(request(prompt, max_tokens=90))
    while len(later.ids) < 8:
        engine.step()
    engine._land_all()
    engine._preempt(later)
    finish(engine, [later])
    assert (jobs[0].cached, later.cached) == (0, len(prompt) // PAGE * PAGE)


@pytest.mark.deep
def test_a_request_without_a_row_shortens_the_dispatch_in_which_a_row_is_freed(programs):
    steps = []
    for waiting in (0, 1):
        engine = engine_of(programs, dataclasses.replace(ROOMY, rows=2))
        jobs = [engine.submit(request([5, 6], max_tokens=n)) for n in (13, 60, *[9] * waiting)]
        while any(job.starts == 0 or job.unread for job in jobs[:2]):
            engine.step()
        steps.append(engine._plans(engine.limits)[0].steps)
        finish(engine, jobs)
    assert steps[0] == 32
    assert 8 <= steps[1] <= 13


@pytest.mark.deep
def test_nothing_compiles_once_warm(programs):
    engine = engine_of(programs, dataclasses.replace(SMALL, rows=4, pages=30, context=300))
    engine.warm_up()
    rng = np.random.default_rng(2)
    with nothing_compiled():
        for _ in range(6):
            some = [random_request(rng, [[5] * 70]) for _ in range(int(rng.integers(1, 9)))]
            some.append(request([3, 4, 5], logprobs=3, prompt_logprobs=2, max_tokens=3, logit_bias={5: 1.0}, stop_token_ids=(9,)))
            finish(engine, [engine.submit(one, streams=bool(rng.random() < 0.3)) for one in some])
    assert engine.stats.compiled == programs.compiled


@pytest.mark.deep
def test_the_next_dispatch_is_sent_before_the_last_ones_tokens_are_read(programs, monkeypatch):
    engine, order = engine_of(programs, ROOMY), []
    call, land = Program.__call__, Engine._land

    def sent(program: Program, *args):
        if program is programs.run:
            order.append("sent")
        return call(program, *args)

    monkeypatch.setattr(Program, "__call__", sent)
    monkeypatch.setattr(Engine, "_land", lambda *args: order.append("read") or land(*args))
    finish(engine, [engine.submit(request([5, 6], max_tokens=120))])
    assert order[:6] == ["sent", "sent", "read", "sent", "read", "sent"]


def test_a_shared_prefix_is_computed_once(programs):
    engine, prefix = engine_of(programs, ROOMY), list(range(2, 92)) + list(range(2, 60))
    asked = [request([*prefix, 10 + i], max_tokens=3) for i in range(6)]
    answers = finish(engine, [engine.submit(one) for one in asked])
    assert engine.stats.hits == 5 * (len(prefix) // PAGE) * PAGE
    assert engine.stats.read == 6 * (len(prefix) + 1) - engine.stats.hits
    assert answers == [alone(programs, one) for one in asked]


def test_a_conversation_that_goes_on_finds_its_own_tokens(programs):
    engine, prompt = engine_of(programs, ROOMY), [7] * 40
    first = finish(engine, [engine.submit(request(prompt, max_tokens=60))])[0]
    finish(engine, [engine.submit(request(prompt + first + [8, 9], max_tokens=2))])
    assert engine.stats.hits == PAGE


def test_what_a_pool_held_before_does_not_matter(programs, model):
    """Not even NaN: pages are read no further than they are filled."""
    engine, asked = engine_of(programs, ROOMY), request([5, 6, 7], max_tokens=70)
    pool, rows = engine.device.state()
    engine.device.keep(jax.tree.map(lambda array: array + np.nan, pool), rows)
    assert finish(engine, [engine.submit(asked)])[0] == alone(programs, asked)


def test_a_job_may_be_cancelled_at_any_time(programs):
    engine = engine_of(programs, ROOMY)
    for steps in range(5):
        jobs = [engine.submit(request([5 + i] * 30, max_tokens=100)) for i in range(6)]
        for _ in range(steps):
            engine.step()
        for job in jobs:
            engine.cancel(job)
        assert {job.reason for job in jobs} == {FinishReason.CANCELLED}
        assert not engine.waiting
        assert not engine.running
        assert engine.stats.as_numbers()["rows"] == 4
        assert engine.shards[0].pages.free == ROOMY.pages


def test_a_lower_priority_comes_first(programs):
    engine = engine_of(programs, ROOMY)
    *late, soon = (engine.submit(request([5, 6], max_tokens=40), priority=priority) for priority in (1,) * 5 + (0,))
    finish(engine, [soon])
    assert [bool(job.ids) for job in late] == [True, True, True, False, False]


def test_a_request_that_can_never_fit_the_pool_is_refused(programs):
    engine = engine_of(programs, dataclasses.replace(SMALL, pages=2))
    with pytest.raises(DoesNotFit, match="a request of 160 tokens does not fit the cache"):
        engine.submit(request([5] * 100, max_tokens=60))
    engine.submit(request([5] * 100, max_tokens=28))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder)


@pytest.mark.deep
def test_log_probabilities_of_the_prompt_are_those_of_the_logits(llm):
    rng = np.random.default_rng(3)
    for length, tokens in [(1, 2), (2, 0), (64, 1), (65, 0), (150, 3)]:
        prompt = rng.integers(2, 96, length).tolist()
        output = llm.generate([prompt], SamplingParams(max_tokens=tokens, prompt_logprobs=2, ignore_eos=True))[0]
        assert len(output.token_ids) == tokens
        assert len(output.prompt_logprobs) == length
        assert output.prompt_logprobs[0] is None
        expected = np.asarray(jax.nn.log_softmax(llm.logits([prompt])[0]))
        for at, found in enumerate(output.prompt_logprobs[1:]):
            assert next(iter(found)) == prompt[at + 1]
            assert set(found) == {prompt[at + 1], *np.argsort(-expected[at])[:2].tolist()}
            np.testing.assert_allclose(list(found.values()), expected[at][list(found)], atol=1e-4)


@pytest.mark.deep
def test_a_bias_makes_a_token_certain_or_impossible(llm):
    free = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids
    asked = SamplingParams(max_tokens=5, ignore_eos=True, logit_bias={50: 100})
    assert llm.generate([5, 6, 7], asked)[0].token_ids == [50] * 5
    barred = dataclasses.replace(asked, logit_bias=dict.fromkeys(free, -100.0))
    assert not set(llm.generate([5, 6, 7], barred)[0].token_ids) & set(free)
    with pytest.raises(BadRequest, match="logit_bias names token id 96"):
        llm.generate([5], SamplingParams(logit_bias={96: 1.0}))


@pytest.mark.deep
def test_no_end_token_comes_before_the_least_number_of_tokens(llm):
    free = llm.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    asked = SamplingParams(max_tokens=12, min_tokens=5, stop_token_ids=(free[0],), ignore_eos=True)
    barred = SamplingParams(max_tokens=5, logit_bias={free[0]: -100.0}, ignore_eos=True)
    expected = llm.generate([5, 6, 7], barred)[0].token_ids
    for found in llm.generate([[5, 6, 7], [8], [5, 6, 7]], [asked, barred, asked])[::2]:
        assert found.token_ids[:5] == expected
        assert free[0] not in found.token_ids[:-1]
    with pytest.raises(BadRequest, match="min_tokens is 13\n  an answer to this prompt has at most 12 tokens"):
        llm.generate([5], dataclasses.replace(asked, min_tokens=13))


@pytest.mark.deep
def test_a_frequency_penalty_grows_with_each_use(llm):
    asked = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={50: 20.0, 51: 20.0})
    plain = llm.generate([5, 6, 7], asked)[0].token_ids
    mixed = llm.generate([5, 6, 7], dataclasses.replace(asked, frequency_penalty=0.5))[0].token_ids
    assert len(set(plain[:20])) < len(set(mixed[:20])) + 1
    assert abs(mixed[:20].count(50) - mixed[:20].count(51)) <= 4


@pytest.mark.deep
def test_forks_differ_by_their_seeds_alone(llm):
    asked = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=3, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7], [8]], asked)
    assert [output.prompt_token_ids for output in outputs] == [[5, 6, 7]] * 3 + [[8]] * 3
    assert [output.stats.seed for output in outputs] == [7, 8, 9] * 2
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    single = llm.generate([5, 6, 7], dataclasses.replace(asked, n=1, seed=8))[0]
    assert single.token_ids == outputs[1].token_ids


def test_streams_take_turns(llm):
    prompts = [[5, 6, 7], [20], [33, 34, 35]]
    asked = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(prompts, asked)]
    streams, found = [llm.stream(prompt, asked) for prompt in prompts], [[], [], []]
    for _ in range(40):
        for ids, stream in zip(found, streams, strict=True):
            ids += [token for chunk in [next(stream, None)] if chunk for token in chunk.token_ids]
    assert found == expected


@pytest.mark.deep
def test_weights_that_change_make_cached_prefixes_unknown(llm):
    prompt = list(range(2, 80))
    asked = SamplingParams(max_tokens=4, ignore_eos=True)
    before = llm.generate(prompt, asked)[0].token_ids
    kept = llm.model.embed[...]
    try:
        llm.model.embed.set_value(kept[::-1])
        hits = llm.stats().hits
        llm.generate(prompt, asked)
        assert llm.stats().hits == hits
    finally:
        llm.model.embed.set_value(kept)
    assert llm.generate(prompt, asked)[0].token_ids == before


@pytest.mark.deep
def test_results_are_taken_in_while_another_prompt_is_read(programs):
    """A request whose last tokens are on their way does not wait until a long prompt has been read."""
    engine = engine_of(programs)
    engine.limits = dataclasses.replace(engine.limits, lines=(16,))
    short = engine.submit(request([5, 6], max_tokens=3))
    for _ in range(3):
        engine.step()
    long = engine.submit(request([7] * 300, max_tokens=1))
    for _ in range(3):
        engine.step()
    assert short.done
    assert long.unread > 100


@pytest.mark.deep
def test_prompts_are_read_beside_one_whose_log_probabilities_are_asked_for(programs):
    engine = engine_of(programs)
    scored = engine.submit(request([7] * 300, max_tokens=1, prompt_logprobs=0))
    plain = engine.submit(request([5, 6], max_tokens=1))
    for _ in range(4):
        engine.step()
    assert plain.done
    assert scored.unread
    assert finish(engine, [scored])[0] == alone(programs, request([7] * 300, max_tokens=1))
    assert len(scored.prompt_logprobs) == 300


def test_more_ends_than_a_row_holds_are_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.inputs, "text", llm.inputs.text._replace(end_ids=tuple(range(40))))
    llm.generate([50], SamplingParams(max_tokens=1, stop_token_ids=tuple(range(40, 90))))
    with pytest.raises(BadRequest, match="more than 96 token ids end an answer"):
        llm.generate([50], SamplingParams(max_tokens=1, stop_token_ids=tuple(range(64))))
