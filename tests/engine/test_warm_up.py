"""Once an engine is warm, no request of any kind adds a program.

Programs are counted: one that is read from a store compiles nothing, and is waited for all the same."""

import dataclasses

import jax
import numpy as np
import pytest
from models import FAMILIES, tensors, write
from serving import drafting_engine, evicting_engine, finish, request

from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES as RETRIEVAL
from mla_jax.cache.retrieve import Retrieval
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import Lookup, Mtp
from mla_jax.engine.core.engine import SCORED, Engine
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.retrieving import Retrieving
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import load

WORDS, CONTEXT = 96, 320
SIZE = Size(rows=2, pages=8, context=CONTEXT, chunk=8 * SCORED, hosted=6)
assert SCORED in SIZE.lines()  # a line of as many tokens is only read, another is scored


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True))


def plain(folder) -> Engine:
    return _engine(Programs(load(folder)))


def looking_up(folder) -> Engine:
    return _engine(Programs(load(folder), drafter=Lookup(3)), 3)


def with_mtp(folder) -> Engine:
    return _engine(Programs(load(folder), drafter=Mtp(3)), 3)


def evicting(folder) -> Engine:
    programs = Programs(load(folder), evicts=Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["ada"], recent=16))
    size = dataclasses.replace(SIZE, pages=14)
    return evicting_engine(programs, size, 0.5)


def retrieving(folder) -> Engine:
    model = load(folder, dispatch=Dispatch(retrieval=Retrieval(RETRIEVAL["quest"], 4 * 64, dense=1)))
    programs = Programs(model)
    return Engine(programs, SIZE, policy=Retrieving(programs, SIZE))


def _engine(programs: Programs, drafts: int | None = None) -> Engine:
    return drafting_engine(programs, SIZE, drafts)


def requests() -> list[Request]:
    """Prompts of 1 to 64 tokens and long ones, of which some begin as others do, sampled, penalised, scored, or ended early."""
    rng = np.random.default_rng(0)
    first = rng.integers(2, WORDS, 250).tolist()
    short = [request(rng.integers(2, WORDS, n).tolist(), max_tokens=1 + n % 12) for n in range(1, SCORED + 1, 3)]
    long = [request([*first[:n], 5, 6, n % 90], max_tokens=50, temperature=0.7, top_k=9, top_p=0.8) for n in (70, 135, 250, 250)]
    scored = [request(first[:n], max_tokens=n % 3, logprobs=3, prompt_logprobs=2) for n in (2, 20, SCORED, 200)]
    changed = {"logit_bias": {5: 1.0}, "stop_token_ids": (9,), "repetition_penalty": 1.2, "presence_penalty": -1.0}
    return [*short, *long, *scored, request(first[:30], max_tokens=90, **changed), *long]


@pytest.mark.deep
@pytest.mark.parametrize("kind", [plain, looking_up, with_mtp, evicting, retrieving])
def test_no_request_of_any_kind_adds_a_program_to_a_warm_engine(folder, kind):
    engine = kind(folder)
    engine.warm_up()
    programs, compiled = engine.programs.compiled, []
    jax.monitoring.register_event_duration_secs_listener(listen := lambda event, *_, **__: compiled.append(event))
    try:
        jobs = [engine.submit(one, streams=i % 4 == 0) for i, one in enumerate(requests())]
        for one in requests()[-8:]:  # alone: fewer rows, and a line for each prompt
            finish(engine, [engine.submit(one)])
        finish(engine, jobs, preempt_every=9)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.programs.compiled == programs
    assert not [event for event in compiled if event.endswith("backend_compile_duration")]
    assert engine.stats.hits > 0
