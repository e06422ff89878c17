"""Requests that run go on while programs for others are compiled."""

import dataclasses
import threading
import time
from concurrent.futures import Future

import pytest
from models import FAMILIES, tensors, write
from serving import answer, finish, request

from mla_jax import LLM, SamplingParams
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.size import Size
from mla_jax.engine.opening.opened import Opened
from mla_jax.weights.load import Checkpoint, load

SIZE = Size(rows=8, pages=120, context=5000, chunk=1024)
LONG = request([7, 8, 9], max_tokens=150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2, "max_position_embeddings": 8192}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


class Gated:
    """Programs whose compilation, but of the first request's, does not end before it is let to."""

    def __init__(self, model, monkeypatch):
        self.programs, self.gate, self.waits = Programs(model), threading.Event(), False
        start = self.programs.start

        def gated(*given) -> Future:
            future = start(*given)
            return self.behind(future) if self.waits else future

        monkeypatch.setattr(self.programs, "start", gated)
        self.engine = Engine(self.programs, SIZE, compiles_ahead=True)

    def behind(self, future: Future) -> Future:
        found: Future = Future()

        def wait() -> None:
            self.gate.wait(60)
            found.set_result(future.result())

        threading.Thread(target=wait).start()
        return found


@pytest.fixture
def gated(model, monkeypatch):
    found = Gated(model, monkeypatch)
    yield found
    found.gate.set()


@pytest.mark.parametrize(
    "asked",
    [
        [request([5, 6], max_tokens=9), request([4], max_tokens=9), request([3], max_tokens=9)],  # more rows
        pytest.param([request([5 + i % 50 for i in range(400)], max_tokens=4)], marks=pytest.mark.deep),  # a longer line
        pytest.param([request([5 + i % 50 for i in range(20)], max_tokens=4500)], marks=pytest.mark.deep),  # wider page tables
    ],
)
def test_a_request_that_runs_goes_on_while_programs_for_others_are_compiled(gated, asked):
    engine = gated.engine
    assert SIZE.widths[0] < SIZE.width
    first = engine.submit(LONG, streams=True)
    while not first.ids:
        engine.step()
    gated.waits = True
    others = [engine.submit(one) for one in asked]
    before = len(first.ids)
    for _ in range(6):
        engine.step()
    assert len(first.ids) > before + 8
    assert engine.programs.waits.seconds == 0
    gated.gate.set()
    for job in others:
        if job.request.limit > 1000:  # of which the beginning is enough
            while len(job.ids) < 60:
                engine.step()
            engine.cancel(job)
    finish(engine, [first, *others])
    expected = [answer(Engine(gated.programs, SIZE), one)[0][:60] for one in (LONG, *asked)]
    assert [job.ids[:60] for job in (first, *others)] == expected


@pytest.mark.deep
def test_what_fails_to_compile_is_an_error_of_who_waits_for_it_and_is_tried_again(model, monkeypatch):
    programs = Programs(model)
    start, broken = programs.start, []

    def failing(pool, rows, shape) -> Future:
        if shape.name != "run" or broken:
            return start(pool, rows, shape)
        broken.append(shape)
        failed: Future = Future()
        failed.set_exception(RuntimeError("no memory for the tuner"))
        return failed

    monkeypatch.setattr(programs, "start", failing)
    engine = Engine(programs, SIZE, compiles_ahead=True)
    engine.submit(LONG)
    with pytest.raises(RuntimeError, match="no memory for the tuner"):
        engine.step()
    engine.reset()
    assert answer(engine, LONG) == answer(Engine(Programs(model), SIZE), LONG)


@pytest.mark.deep
@pytest.mark.parametrize(
    "asked",
    [
        [request([5 + i], max_tokens=9) for i in range(5)],
        pytest.param(
            [request([5 + i % 50 for i in range(700)], max_tokens=900), request([9] * 40, max_tokens=900)], marks=pytest.mark.deep
        ),  # wide ones
        pytest.param([request([5, 6], max_tokens=9, prompt_logprobs=1)], marks=pytest.mark.deep),
    ],
)
def test_no_step_waits_for_the_compiler_while_somebody_runs(model, asked):
    engine = Engine(Programs(model), SIZE, compiles_ahead=True)
    first = engine.submit(request([7, 8, 9], max_tokens=4000), streams=True)
    while not first.ids:
        engine.step()
    waits = len(engine.programs.waits.spans)
    jobs = [engine.submit(one) for one in asked]
    while not all(job.ids for job in jobs):
        engine.step()
        time.sleep(0.1 if engine.device.compiles else 0)
    assert not first.done
    assert len(engine.programs.waits.spans) == waits
    engine.cancel(first)
    finish(engine, jobs)
    assert [job.ids for job in jobs] == [answer(Engine(Programs(model), SIZE), one)[0] for one in asked]


@pytest.mark.deep
def test_rows_grow_while_there_is_load(model):
    """Programs for one request are there; those that read prompts take 8 rows."""
    engine = Engine(Programs(model), dataclasses.replace(SIZE, rows=32), compiles_ahead=True)
    first = engine.submit(LONG, streams=True)
    while not first.ids:
        engine.step()
    jobs, most, deadline = [first], 0, time.monotonic() + 300
    while most < 24 and time.monotonic() < deadline:
        jobs = [job for job in jobs if not job.done]
        jobs += [engine.submit(request([5 + len(jobs)], max_tokens=100)) for _ in range(24 - len(jobs))]
        engine.step()
        most = max(most, len(engine.running))
    assert most == 24


@pytest.mark.deep
def test_who_waits_for_what_cannot_be_compiled_gets_the_error_when_nobody_runs_any_more(model, monkeypatch):
    programs = Programs(model)
    start = programs.start

    def failing(pool, rows, shape) -> Future:
        if shape.width < SIZE.width:
            return start(pool, rows, shape)
        failed: Future = Future()
        failed.set_exception(RuntimeError("no memory for the tuner"))
        return failed

    engine = Engine(programs, SIZE, compiles_ahead=True)
    first = engine.submit(LONG)
    while not first.ids:
        engine.step()
    monkeypatch.setattr(programs, "start", failing)
    wide, narrow = engine.submit(request([5, 6], max_tokens=4500)), engine.submit(request([7], max_tokens=5))
    while not first.done:
        engine.step()
    assert len(first.ids) == 150
    with pytest.raises(RuntimeError, match="no memory for the tuner"):
        finish(engine, [wide, narrow])
    assert wide.ids == narrow.ids == []


@pytest.mark.deep
def test_programs_that_are_compiled_before_there_are_weights_serve_a_first_short_request(folder, model):
    programs = Programs(Checkpoint(folder).model())
    engine = Engine(programs, SIZE, compiles_ahead=True)
    engine.compile_early()
    begun = programs.compiled
    programs.take(model)
    assert answer(engine, LONG) == answer(Engine(Programs(model), SIZE), LONG)
    assert programs.compiled == begun + 1  # `new`


@pytest.mark.deep
def test_a_line_that_is_being_compiled_reads_a_shorter_prompt_but_no_longer_one(folder, model):
    engine = Engine(Programs(model), SIZE, compiles_ahead=True)
    engine.compile_early()
    middle = SIZE.lines()[1]
    answer(engine, request([7] * (middle // 2), max_tokens=2))
    assert lines(engine) == {middle}
    answer(engine, request([9] * SIZE.chunk, max_tokens=2))
    assert lines(engine) == {middle, SIZE.lines()[0]}


def lines(engine) -> set[int]:
    """Of the programs that read prompts."""
    return {shape.line for shape in engine.device.begun("mixed_step", rows=1, width=1)}


@pytest.mark.deep
def test_an_llm_that_compiles_while_it_loads_answers_as_one_that_loads_first(folder, monkeypatch):
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)

    def answered() -> list[int]:
        with LLM(folder) as llm:
            return llm.generate([5, 6, 7], params)[0].token_ids

    expected = answered()
    monkeypatch.setattr(Opened, "compiles_early", property(lambda self: True))
    assert answered() == expected
