"""One engine that another one follows: in one process, over a socket pair."""

import dataclasses
import json
import threading

import numpy as np
import pytest
from linked import links

from mla_jax.base.errors import BadRequest, ProcessLost
from mla_jax.base.grammar import Grammar
from mla_jax.base.options import Options, SamplingParams
from mla_jax.engine import processes as led
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.interface import EngineInterface
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.processes import LedEngine, follow
from mla_jax.hosts.distributed import Processes


@pytest.fixture
def linked():
    with links() as made:
        yield made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"processes": 2}, "coordinator is not given"),
        ({"coordinator": "a:1", "process_id": 0}, "processes is not given"),
        ({"coordinator": "a:1", "processes": 2, "process_id": 2}, "process_id is 2"),
        ({"coordinator": "a:1", "processes": 0, "process_id": 0}, "processes is 0"),
    ],
)
def test_half_of_what_several_processes_need_is_refused(given, words):
    with pytest.raises(BadRequest, match=words):
        Options.of(**given)


class FakeJob(Job):
    done = False


class FakeEngine(Engine):
    """Records its calls."""

    rows, stats, drafting, busy = 8, None, None, False

    def __init__(self):
        self.asked, self.count, self.while_it_steps = [], 0, lambda: None

    def job_of(self, request, *, priority=0, streams=False):
        if len(request.prompt) > 100:
            raise BadRequest("too long")
        return FakeJob(request, priority, streams)

    def queue(self, jobs):
        for job in jobs:
            self.count += 1
            job.id = self.count
            self.asked.append(("queue", job.id, job.request, job.priority, job.streams))

    def cancel(self, job, reason=FinishReason.CANCELLED):
        self.asked.append(("cancel", job.id, reason))
        job.done = True

    def taken_times(self):
        return [(2, 100, 0, 0.1 + 0.2)]

    def step(self, times):
        self.while_it_steps()
        self.asked.append(("step", times))

    def reset(self):
        self.asked.append(("reset",))

    def take_load(self):
        self.asked.append(("take_load",))
        return np.array([3])

    def logits(self, tokens):
        self.asked.append(("logits", tokens.dtype.name, tokens.tolist()))
        return tokens * 2.0


PARAMS = SamplingParams(
    temperature=0.7, top_k=3, top_p=0.9, seed=2**63, stop=("a", "\u2603"), stop_token_ids=(4,), logit_bias={5: -1.5}, logprobs=2
)


def test_a_request_is_the_same_at_the_other_end():
    request = Request([1, 2, 3], dataclasses.replace(PARAMS, grammar=Grammar.regex("[a-z]+")), (1, 7))
    assert led._from_json(json.loads(json.dumps(led._as_json(request)))) == request


@pytest.fixture
def engines(linked):
    """An engine that leads, one that follows it, and what its follower ends with."""
    links, ends = linked(2)
    own, other, found = FakeEngine(), FakeEngine(), []

    def run() -> None:
        try:
            follow(other, Processes(1, 2, links[1]))
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    leads = LedEngine(own, Processes(0, 2, links[0]))
    leads.end = lambda: (links[0].close(), thread.join(10))
    leads.other, leads.found, leads.ends = other, found, ends
    yield leads
    links[0].close()
    thread.join(10)


def test_the_other_engine_is_asked_the_same_in_the_same_order(engines):
    request = Request([1, 2, 3], PARAMS, (1,))
    job, late = engines.job_of(request, streams=True), engines.job_of(request)
    engines.queue([job, late])
    engines.queue([engines.job_of(Request([4], SamplingParams(), ()), priority=3)])
    engines.step()
    with pytest.raises(BadRequest):
        engines.job_of(Request([1] * 200, SamplingParams(), ()))
    assert engines.take_load().tolist() == [3]
    assert engines.logits(np.array([[1, 2]], np.int32)).tolist() == [[2, 4]]
    engines.cancel(job)
    engines.cancel(job)  # which is done
    engines.cancel(late, FinishReason.TIMEOUT)
    engines.reset()
    engines.end()
    assert engines.found == []
    assert engines.other.asked == engines._engine.asked
    names = ["queue", "queue", "queue", "step", "take_load", "logits", "cancel", "cancel", "reset"]
    assert [one[0] for one in engines.other.asked] == names
    assert engines.found == []


def test_an_engine_that_breaks_ends_all_with_its_words(engines):
    def breaks() -> None:
        raise RuntimeError("no such page")

    engines.other.while_it_steps = breaks
    engines.step()
    assert "has ended: RuntimeError: no such page" in str(engines.ends[0].soon())
    assert str(engines.found[0]) == "no such page"


def test_an_engine_that_has_failed_is_not_asked_again(engines):
    def breaks() -> None:
        raise RuntimeError("no such page")

    engines._engine.while_it_steps = breaks
    with pytest.raises(RuntimeError, match="no such page"):
        engines.step()
    assert "process 0 of 2, on " in str(engines.ends[1].soon())
    with pytest.raises(ProcessLost, match="this process has failed"):
        engines.step()


def test_llm_may_ask_an_engine_that_leads_as_any_other(engines):
    assert isinstance(engines, EngineInterface)
    assert isinstance(engines._engine, EngineInterface)
