"""Requests of token ids, and an engine that serves them to the end."""

import contextlib
from collections.abc import Iterator

import jax

from mla_jax import SamplingParams
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.evicting import Evicting, Eviction
from mla_jax.model.parts import cost_of
from mla_jax.text.grammar import Grammars

STEPS = 100_000  # more than any engine of the tests takes


def drafting_engine(
    programs: Programs,
    size: Size,
    drafts: int | None = None,
    policy: CachePolicy | None = None,
    grammars: Grammars | None = None,
) -> Engine:
    """With `drafts` drafted tokens in every pass; None: as many as pay."""
    drafting = Drafting(cost_of(programs.model), programs.drafter, drafts)
    return Engine(programs, size, policy=policy, drafting=drafting, grammars=grammars)


def evicting_engine(
    programs: Programs,
    size: Size,
    keep: float,
    every: int = 16,
    drafts: int | None = None,
    chunk: int | None = None,
    grammars: Grammars | None = None,
) -> Engine:
    policy = Evicting(programs, size, Eviction(programs.evicts, keep, every, chunk))
    return drafting_engine(programs, size, drafts, policy, grammars)


def request(prompt: list[int], **params) -> Request:
    """Greedy, of eight tokens, unless `params` say otherwise."""
    given = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_tokens": 8, "seed": 0} | params
    return Request(prompt, SamplingParams(**given), ())


def answer(engine: Engine, *asked: Request, streams: bool = False, preempt_every: int = 0) -> list[list[int]]:
    """The tokens of these requests. Those that stream come in short dispatches. After every `preempt_every` steps all rows but
    the first are preempted."""
    return finish(engine, [engine.submit(one, streams=streams) for one in asked], preempt_every)


def finish(engine: Engine, jobs: list[Job], preempt_every: int = 0) -> list[list[int]]:
    """The tokens of these jobs, preempted as in `answer`."""
    for step in range(1, STEPS):
        if all(job.done for job in jobs):
            return [job.ids for job in jobs]
        engine.step()
        if preempt_every and step % preempt_every == 0:
            preempt_all_but_one(engine)
    raise AssertionError("the engine does not come to an end")


def preempt_all_but_one(engine: Engine) -> None:
    """As the engine does where pages are short: what rows have chosen so far is not lost."""
    engine._land_all()
    for job in engine.running[1:]:
        engine._preempt(job)
    engine._note()


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fails if a program is compiled within."""
    compiled: list[str] = []

    def listen(event: str, *_, **__) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event in compiled if event.endswith("backend_compile_duration")] == []
