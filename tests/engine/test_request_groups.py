"""Any number of requests: only a window of them is in the engine, and outputs come in the order given."""

import contextlib
import random

import jaxtyping
import pytest

from mla_jax import LLM, SamplingParams
from mla_jax.engine.request_groups import TAKEN, WAITING, Served

ROWS = 4
SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


class FakeReader:
    def __init__(self, request, wake):
        self.request, self.wake, self.done = request, wake, False

    def read(self):
        pass


class FakeEngine:
    """Ends jobs in any order, except the very first, which ends last."""

    def __init__(self):
        self.jobs, self.most = [], 0

    def submit(self, requests, wake):
        new = [FakeReader(request, wake) for request in requests]
        self.jobs += new
        self.most = max(self.most, len(self.jobs))
        return new

    def step(self, rng: random.Random, keep: object):
        for job in [job for job in self.jobs if job.request != keep and rng.random() < 0.5]:
            job.done = True
            job.wake(job)
            self.jobs.remove(job)


def test_a_hundred_thousand_requests_come_back_in_order_and_few_are_held_at_once(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # no engine, no requests
    engine, rng, taken = FakeEngine(), random.Random(0), 0

    def groups():
        nonlocal taken
        for taken in range(100_000):
            yield [taken] * (taken % 3)

    served, given, ahead = Served(engine.submit, ROWS, groups()), 0, 0
    while served.fill():
        keep = 1 if given <= 1 and taken < TAKEN * ROWS - 1 else None  # the first waits until nothing more is taken
        engine.step(rng, keep)
        served.wait(0.0)
        assert served.done >= given
        for jobs in served.take():
            assert [job.request for job in jobs] == [given] * (given % 3)
            given += 1
        ahead = max(ahead, taken + 1 - given)
    assert given == 100_000
    assert engine.most <= WAITING * ROWS + 1
    assert 0.9 * TAKEN * ROWS < ahead <= TAKEN * ROWS


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(cache_tokens=4096)


def idle(llm: LLM) -> bool:
    engine = llm.engine
    llm._worker.join()
    return not engine.jobs and not engine.running and engine.shards[0].pages.free == engine.size.pages


@pytest.mark.deep
def test_groups_come_back_as_generate_answers_them_an_empty_one_empty(llm):
    requests = [llm.inputs.request([20 + i, 7], SHORT) for i in range(6)]
    expected = [output.token_ids for output in llm.generate([request.prompt for request in requests], SHORT)]
    groups = [requests[:2], [], requests[2:3], requests[3:]]
    found = [[output.token_ids for output in outputs] for outputs in llm.serve(iter(groups))]
    assert found == [expected[:2], [], expected[2:3], expected[3:]]


@pytest.mark.deep
def test_serving_that_is_dropped_half_way_gives_all_pages_back(llm):
    requests = ([llm.inputs.request([20 + i, 7], SHORT)] for i in range(500))
    with contextlib.closing(llm.serve(requests)) as served:
        next(served)
        assert llm.engine.busy
    assert idle(llm)


@pytest.mark.deep
def test_an_error_of_who_asks_gives_all_pages_back_and_leaves_the_engine_usable(llm):
    def asking():
        yield [llm.inputs.request([20, 7], SHORT)]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(llm.serve(asking()))
    assert idle(llm)
    assert len(llm.generate([[20, 7]], SHORT)[0].token_ids) == 3


def test_a_request_that_can_never_fit_leaves_none_of_the_others_behind(llm, monkeypatch):
    job_of, seen = llm.engine.job_of, []

    def some(request, **options):
        if seen:
            raise RuntimeError("does not fit")
        seen.append(request)
        return job_of(request, **options)

    monkeypatch.setattr(llm.engine, "job_of", some)
    with pytest.raises(RuntimeError, match="does not fit"):
        llm.generate([[20, 7], [21, 7]], SHORT)
    assert idle(llm)


@pytest.mark.deep
def test_a_bar_counts_what_is_done_and_says_how_fast_and_what_runs(llm, capsys):
    bar = llm.bar(40, shown=True, done=10)
    with bar:
        for outputs in llm.serve(([llm.inputs.request([20 + i, 7], SHORT)] for i in range(30)), bar):
            assert len(outputs) == 1
        bar.say("a line")
    shown = capsys.readouterr().err
    assert "40/40" in shown
    assert "tokens/s" in shown
    assert " running" in shown
    assert "a line\n" in shown


@pytest.mark.deep
def test_few_prompts_or_no_terminal_show_no_bar(llm, capsys, monkeypatch):
    llm.generate([[20, 7]] * 20, SHORT)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate([[20, 7]], SHORT)
    assert capsys.readouterr().err == ""
    llm.generate([[20, 7]] * 20, SHORT)
    assert "20/20" in capsys.readouterr().err


def test_a_stream_is_one_answer(llm):
    with pytest.raises(Exception, match=r"n is 2, but a stream is one answer"):
        llm.stream([20, 7], SamplingParams(n=2))
