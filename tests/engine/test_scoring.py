"""Log-probabilities of prompts are those of the logits of whole sequences, whatever runs beside them and however few tokens
follow."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from models import FAMILIES, tensors, write
from serving import drafting_engine, evicting_engine, finish, request

from mla_jax import LLM, SamplingParams
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES as RETRIEVAL
from mla_jax.cache.retrieve import Retrieval
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import Lookup
from mla_jax.engine.core.engine import SCORED, Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.retrieving import Retrieving
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import load

CONTEXT, WORDS = 384, 96
SIZE = Size(rows=4, pages=14, context=CONTEXT, chunk=128)
LENGTHS = [1, 2, SCORED - 1, SCORED, SCORED + 1, 100, 2 * SCORED, 2 * SCORED + 1, 240, 300]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf))


@pytest.fixture(scope="module")
def programs(folder) -> Programs:
    return Programs(load(folder))


@pytest.fixture(scope="module")
def engine_of(folder, programs):
    """A new engine by its kind, over programs that are made once."""

    @cache
    def programs_of(kind: str) -> Programs:
        if kind == "retrieving":
            return Programs(load(folder, dispatch=Dispatch(retrieval=Retrieval(RETRIEVAL["quest"], 4 * 64, dense=1))))
        evicts = Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["ada"], recent=16) if kind == "evicting" else None
        drafting = {"drafter": Lookup()} if kind == "drafting" else {}
        return programs if kind == "plain" else Programs(programs.model, evicts=evicts, **drafting)

    def engine(kind: str) -> Engine:
        found = programs_of(kind)
        if kind == "evicting":
            return evicting_engine(found, SIZE, 0.5)
        policy = Retrieving(found, SIZE) if kind == "retrieving" else None
        return drafting_engine(found, SIZE, 2 if kind == "drafting" else None, policy=policy)

    return engine


def expected(programs: Programs, prompts: list[list[int]]) -> list[np.ndarray]:
    """Log-probabilities of the tokens but the first, from sequences padded to one length."""
    padded = [np.pad(np.array(prompt, np.int32), (0, CONTEXT - len(prompt))) for prompt in prompts]
    found = [jax.nn.log_softmax(programs.logits(row[None])[0]) for row in padded]
    return [np.asarray(one)[np.arange(len(prompt) - 1), prompt[1:]] for one, prompt in zip(found, prompts, strict=True)]


def assert_scored(job: Job, scores: np.ndarray) -> None:
    prompt, found = job.request.prompt, job.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    assert [next(iter(one)) for one in found[1:]] == prompt[1:]
    np.testing.assert_allclose([next(iter(one.values())) for one in found[1:]], scores, atol=2e-5)


@pytest.mark.deep
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_prompt_of_any_length_has_an_entry_for_each_token(programs, engine_of, tokens):
    rng, engine = np.random.default_rng(tokens), engine_of("plain")
    prompts = [rng.integers(2, WORDS, n).tolist() for n in LENGTHS]
    for prompt, scores in zip(prompts, expected(programs, prompts), strict=True):
        job = engine.submit(request(prompt, max_tokens=tokens, prompt_logprobs=1))
        assert len(finish(engine, [job])[0]) == tokens
        assert_scored(job, scores)


@pytest.mark.parametrize("kind", ["plain", "drafting", "evicting", "retrieving"])
@pytest.mark.deep
def test_prompts_are_scored_beside_others_with_which_they_begin(programs, engine_of, kind):
    """Some twice, some cancelled, others not scored, in a pool for few of them."""
    rng, engine = np.random.default_rng(7), engine_of(kind)
    first = rng.integers(2, WORDS, 200).tolist()
    prompts = [first[: int(n)] + rng.integers(2, WORDS, 1 + int(n) % 90).tolist() for n in rng.integers(0, 200, 8)]
    limits = (0, 1, 5, 40)
    asked = [request(prompt, max_tokens=limits[i % 4], prompt_logprobs=1) for i, prompt in enumerate(prompts)] * 2
    jobs = [engine.submit(one) for one in asked]
    beside = [engine.submit(request(prompt, max_tokens=30), priority=-1) for prompt in prompts]
    for job in jobs[::5]:
        engine.step()
        engine.cancel(job)
    finish(engine, jobs + beside, preempt_every=5)
    for job, scores in zip(jobs, expected(programs, prompts) * 2, strict=True):
        if job not in jobs[::5]:
            assert_scored(job, scores)
            assert len(job.ids) == job.request.limit


@pytest.mark.deep
def test_a_stream_of_no_tokens_tells_all_that_was_scored(folder):
    llm, prompt = LLM(folder), list(range(2, 92)) * 2
    asked = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    (output,) = llm.generate([prompt], asked)
    assert len(output.prompt_logprobs) == len(prompt)
    chunks = list(llm.stream(prompt, dataclasses.replace(asked)))
    assert chunks[0].prompt_logprobs == output.prompt_logprobs
