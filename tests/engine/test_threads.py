"""An LLM that many threads and event loops use at once: each request gets the tokens that it gets alone."""

import asyncio
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest, DoesNotFit, Overloaded
from mla_jax.engine.async_llm import AsyncLLM
from mla_jax.engine.core.engine import Engine

THREADS = 8
ROOM = {"context": 256, "cache_tokens": 640, "dtype": "float32", "draft": "off"}  # for few of the requests at a time


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    path = write(tmp_path_factory.mktemp("v3"), hf, tensors(hf))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    return LLM(path, **ROOM)


def cases(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and parameters of all kinds, by a seed."""
    rng, found = random.Random(0), []
    for i in range(count):
        prompt = [rng.randrange(2, 60) for _ in range(rng.randrange(1, 90))]
        found.append((prompt, SamplingParams(max_tokens=rng.randrange(1, 24), ignore_eos=True, seed=i, **KINDS[i % len(KINDS)])))
    return found


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5},
    {"temperature": 0.0, "stop": "a1"},
    {"temperature": 0.0, "n": 2},
]


def left(llm: LLM) -> tuple[int, int]:
    """Requests that run or wait once the engine's thread has done all it was told."""
    llm._worker.join()
    return llm.stats().running, llm.stats().waiting


def plain(outputs) -> list:
    return [(output.token_ids, output.text, str(output.finish_reason)) for output in outputs]


@pytest.fixture(scope="module")
def alone(llm) -> list:
    return [plain(llm.generate([prompt], params)) for prompt, params in cases(48)]


@pytest.mark.deep
def test_threads_that_generate_at_once_get_what_each_gets_alone(llm, alone):
    def ask(case):
        return plain(llm.generate([case[0]], case[1]))

    with ThreadPoolExecutor(THREADS) as threads:
        assert list(threads.map(ask, cases(48))) == alone
    assert left(llm) == (0, 0)


@pytest.mark.deep
def test_streams_that_threads_drop_and_errors_of_callers_disturb_nobody(llm, alone):
    def ask(number):
        (prompt, params), turn = cases(48)[number], number % 4
        if turn == 1:
            stream = llm.stream(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
            next(stream)
            return stream.close()
        if turn == 2:
            with pytest.raises(BadRequest):
                llm.generate([[10**9]])
            return None
        return plain(llm.generate([prompt], params)) == alone[number]

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(ask, range(48)))
    assert found == [None if number % 4 in (1, 2) else True for number in range(48)]
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].token_ids
    assert left(llm) == (0, 0)


def test_event_loops_and_threads_share_one_engine(llm, alone):
    async def answers(numbers):
        found = AsyncLLM(llm)
        each = [found.generate([cases(48)[number][0]], cases(48)[number][1]) for number in numbers]
        return [plain(outputs) for outputs in await asyncio.gather(*each)]

    parts = [range(start, 48, 4) for start in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda numbers: asyncio.run(answers(numbers)), parts))
    for numbers, mine in zip(parts, found, strict=True):
        assert mine == [alone[number] for number in numbers]


@pytest.mark.deep
def test_a_task_that_is_cancelled_cancels_its_request(llm):
    async def dropped():
        found = AsyncLLM(llm)
        task = asyncio.create_task(found.generate([[7] * 30], SamplingParams(max_tokens=200, ignore_eos=True)))
        while not llm.stats().running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(dropped())
    assert left(llm) == (0, 0)


@pytest.mark.deep
def test_an_asynchronous_stream_adds_up_to_what_generate_gives(llm):
    async def chunks():
        return [chunk async for chunk in AsyncLLM(llm).stream([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))]

    found = asyncio.run(chunks())
    expected = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert "".join(chunk.text for chunk in found) == expected.text
    assert found[-1].finish_reason == expected.finish_reason


def test_after_an_error_of_the_device_all_that_wait_get_it_and_the_next_request_starts_anew(llm, monkeypatch):
    params, begun = SamplingParams(max_tokens=100, ignore_eos=True), threading.Barrier(3)
    expected = llm.generate([[9, 8]], params)[0].token_ids
    step = Engine._step

    def failing(self):
        if len(self.jobs) == 2:
            raise RuntimeError("the device is gone")
        step(self)

    def ask(prompt):
        begun.wait()
        with pytest.raises(RuntimeError, match="the device is gone"):
            llm.generate([prompt], params)

    monkeypatch.setattr(Engine, "_step", failing)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, [9, 8]), threads.submit(ask, [3, 4])]
        begun.wait()
        for one in asked:
            one.result(timeout=60)
    monkeypatch.undo()
    assert llm.generate([[9, 8]], params)[0].token_ids == expected


@pytest.mark.filterwarnings("ignore")  # that JAX has threads of its own: the child does nothing with it
def test_a_forked_process_is_refused(llm):
    llm.generate([[5]], SamplingParams(max_tokens=1))
    pid = os.fork()
    if not pid:  # only os functions here: other threads' locks may be held
        try:
            llm._worker.call(lambda: None)
        except BadRequest as e:
            os._exit(7 if "forked" in str(e) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_closed_llm_takes_no_more_and_its_thread_ends(tmp_path):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    with LLM(write(tmp_path, hf, tensors(hf)), **ROOM) as closed:
        closed.generate([[5]], SamplingParams(max_tokens=1))
    with pytest.raises(BadRequest, match="this LLM is closed"):
        closed.generate([[5]], SamplingParams(max_tokens=1))
    closed.close()


@pytest.fixture
def slowly(monkeypatch):
    """Steps of engines take a while."""
    step = Engine._step
    monkeypatch.setattr(Engine, "_step", lambda self: (time.sleep(0.03), step(self)))


def test_an_answer_whose_time_is_up_ends_with_the_tokens_it_has(llm, slowly):
    whole = llm.generate([[5, 6]], SamplingParams(max_tokens=200, ignore_eos=True))[0]
    params = SamplingParams(max_tokens=200, ignore_eos=True, timeout=0.15)
    (late,) = llm.generate([[5, 6]], params)
    assert (whole.finish_reason, late.finish_reason) == ("length", "timeout")
    assert whole.token_ids[: len(late.token_ids)] == late.token_ids
    assert whole.text.startswith(late.text)
    assert len(late.token_ids) < 200
    chunks = list(llm.stream([5, 6], params))
    assert chunks[-1].finish_reason == "timeout"
    assert left(llm) == (0, 0)


@pytest.mark.deep
def test_more_requests_than_may_wait_are_refused_and_told_for_how_long(tmp_path, slowly):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    with LLM(write(tmp_path, hf, tensors(hf)), **ROOM, max_rows=1, max_waiting=2) as small:
        streams = [small.stream([5, 6], params) for _ in range(3)]
        first = [threading.Thread(target=next, args=(stream,)) for stream in streams]
        for thread in first:
            thread.start()
        while (small.stats().running, small.stats().waiting) != (1, 2):
            time.sleep(0.01)
        with pytest.raises(Overloaded, match="2 requests wait already") as raised:
            small.generate([[7]], params)
        assert raised.value.seconds >= 1
        for thread in first:
            thread.join(30)
        for stream in streams:
            stream.close()
        assert left(small) == (0, 0)
        assert len(small.generate([[5 + i] for i in range(9)], SamplingParams(max_tokens=2))) == 9  # which wait in turn


@pytest.mark.deep
def test_who_asks_while_an_llm_is_closed_is_told_and_nobody_waits_for_ever(tmp_path, slowly):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    closing = LLM(write(tmp_path, hf, tensors(hf)), **ROOM)

    def ask(number: int) -> str:
        try:
            (output,) = closing.generate([[5 + number]], SamplingParams(max_tokens=100, ignore_eos=True))
            return str(output.finish_reason)
        except BadRequest as e:
            return str(e)

    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(ask, number) for number in range(40)]
        while not closing.stats().running:
            time.sleep(0.01)
        closing.close()
        found = {one.result(timeout=30) for one in asked}
    assert found <= {"cancelled", "this LLM is closed", "length"}
    assert "this LLM is closed" in found


def test_a_request_that_can_never_fit_is_refused_at_once_whoever_else_runs(llm):
    other = llm.stream([5] * 20, SamplingParams(max_tokens=60, ignore_eos=True))
    next(other)
    with pytest.raises((BadRequest, DoesNotFit)):
        llm.generate([[5] * 300], SamplingParams(max_tokens=10))
    assert sum(len(chunk.token_ids) for chunk in other) > 0
