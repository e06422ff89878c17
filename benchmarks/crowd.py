"""One LLM that 32 threads and four event loops use at once: each answer is what the request gets alone, and nothing stays behind.

    python benchmarks/crowd.py --requests 20000 --out crowd.json
    python benchmarks/crowd.py --cache-tokens 448             (a tenth is preempted)
    python benchmarks/crowd.py --model demo
    python benchmarks/crowd.py --small

The model is the demo's tokenizer with a tiny random network that drafts, in float32. Prompts are pieces of Python's own library;
requests are of the kinds in KINDS and WAYS. The pool is so small that many are preempted. Every SAMPLED requests it notes the
process's memory, threads and descriptors, JAX's arrays, and the pool's pages; next to the JSON file it draws them as a PNG."""

import argparse
import asyncio
import gc
import inspect
import itertools
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import report
from flax import nnx

from mla_jax import LLM, Config, SamplingParams, Transformer
from mla_jax.base.errors import BadRequest
from mla_jax.engine.async_llm import AsyncLLM
from mla_jax.engine.core.request import Output
from mla_jax.weights.hub import DEMO
from mla_jax.weights.save import save

SETTINGS = {"dtype": "float32", "draft": "mtp", "context": 256, "cache_tokens": 768, "max_rows": 32}
THREADS, LOOPS, TASKS = 32, 4, 4  # of each loop
CASES = 400  # different requests
SAMPLED = 100  # requests between two notes
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.5},
    {"temperature": 0.0, "stop": "\n\n"},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "n": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
)
# What a caller does; the last three end early
WAYS = ("generate", "generate", "generate", "stream", "stream", "drops", "raises", "refused")
ASYNC_WAYS = ("generate", "generate", "stream", "drops")
Answer = list[tuple[list[int], str | None, str]]


class Case(NamedTuple):
    prompt: str
    params: SamplingParams


def model_of(name: str, folder: Path) -> Path | None:
    """A folder for LLM."""
    if name == "demo":
        return None
    words = Config.from_hf(DEMO).vocab_size
    save(
        Transformer(Config.preset("tiny", vocab_size=words), nnx.Rngs(0), mtp=True),
        folder / "tiny",
        dtype="float32",
    )
    for file in DEMO.glob("*token*.json"):
        shutil.copy(file, folder / "tiny")
    return folder / "tiny"


class Callers(Exception):
    """Raised by a caller in the middle of its stream."""


def cases(count: int) -> list[Case]:
    """Pieces of 1 to 200 characters, some of which begin alike."""
    source, rng = inspect.getsource(argparse), random.Random(0)
    found = []
    for number in range(count):
        start, length = 1000 * rng.randrange(40), rng.randrange(1, 200)
        params = SamplingParams(max_tokens=rng.randrange(1, 80), seed=number, **KINDS[number % len(KINDS)])
        found.append(Case(source[start : start + length], params))
    return found


def plain(outputs: list[Output]) -> Answer:
    return [(output.token_ids, output.text, str(output.finish_reason)) for output in outputs]


class Crowd:
    """Callers of one LLM, which take the next of `requests` each, until there are none."""

    def __init__(self, llm: LLM, requests: int, count: int):
        self.llm, self.requests, self.cases = llm, requests, cases(count)
        self.alone = [plain(llm.generate(one.prompt, one.params)) for one in self.cases]
        self.next, self.asked = itertools.count(), Counter[str]()
        self.wrong: list[int] = []
        self.notes: list[dict[str, float]] = []
        self.lock = threading.Lock()

    def run(self) -> float:
        """Seconds until all are done."""
        start = time.perf_counter()
        with ThreadPoolExecutor(THREADS + LOOPS) as threads:
            asked = [threads.submit(self.call) for _ in range(THREADS)]
            asked += [threads.submit(asyncio.run, self.call_from_loop()) for _ in range(LOOPS)]
            for one in asked:
                one.result()
        self.llm._worker.join()
        self.note(self.requests)
        return time.perf_counter() - start

    def numbers(self) -> Iterator[int]:
        for number in self.next:
            if number >= self.requests:
                return
            if number % SAMPLED == 0:
                self.note(number)
            yield number

    def call(self) -> None:
        """One thread's requests."""
        for number in self.numbers():
            case = self.cases[number % len(self.cases)]
            way = random.Random(number).choice(WAYS)
            self.count(way, number, getattr(self, f"_{way}")(case))

    def _generate(self, case: Case) -> Answer:
        return plain(self.llm.generate(case.prompt, case.params))

    def _stream(self, case: Case) -> Answer:
        if case.params.n > 1:
            return self._generate(case)
        return joined([(one.token_ids, one.text, one.finish_reason) for one in self.llm.stream(*case)])

    def _drops(self, case: Case) -> None:
        if case.params.n == 1:
            stream = self.llm.stream(*case)
            next(stream)
            stream.close()

    def _raises(self, case: Case) -> None:
        if case.params.n == 1:
            try:
                for _ in self.llm.stream(*case):
                    raise Callers
            except Callers:
                return

    def _refused(self, case: Case) -> None:
        try:
            self.llm.generate([[10**9]], case.params)
        except BadRequest:
            return
        raise AssertionError("a token id that no model has was taken")

    async def call_from_loop(self) -> None:
        """The requests of one event loop."""
        llm, numbers = AsyncLLM(self.llm), self.numbers()
        await asyncio.gather(*(self._task(llm, numbers) for _ in range(TASKS)))

    async def _task(self, llm: AsyncLLM, numbers: Iterator[int]) -> None:
        for number in numbers:
            case = self.cases[number % len(self.cases)]
            way = random.Random(number).choice(ASYNC_WAYS)
            answer = None
            if way == "generate" or case.params.n > 1:
                answer = plain(await llm.generate(case.prompt, case.params))
            elif way == "stream":
                answer = joined(
                    [(one.token_ids, one.text, one.finish_reason) async for one in llm.stream(*case)]
                )
            else:
                await cancelled(llm, case, after=random.Random(number).random() / 10)
            self.count(f"{way} in a loop", number, answer)

    def count(self, way: str, number: int, answer: Answer | None) -> None:
        """Notes a request that is done, and whether its answer is right, if it has one."""
        with self.lock:
            self.asked[way] += 1
            if answer is not None and answer != self.alone[number % len(self.cases)]:
                self.wrong.append(number)

    def note(self, number: int) -> None:
        gc.collect()
        stats = self.llm.stats()
        self.notes.append(
            {
                "requests": number,
                "memory, MiB": resident_bytes() / 2**20,
                "threads": threading.active_count(),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "arrays of JAX": len(jax.live_arrays()),
                "pages that requests hold": stats.pages - stats.pages_free,
            }
        )


async def cancelled(llm: AsyncLLM, case: Case, after: float) -> None:
    """A task that is cancelled after some seconds, unless it is done."""
    task = asyncio.ensure_future(llm.generate(case.prompt, case.params))
    await asyncio.wait([task], timeout=after)
    task.cancel()
    await asyncio.wait([task])


def joined(pieces: list[tuple[list[int], str, str | None]]) -> Answer:
    """The answer that the pieces of a stream add up to."""
    ids = [token for piece, _, _ in pieces for token in piece]
    return [(ids, "".join(text for _, text, _ in pieces), str(pieces[-1][2]))]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def draw(notes: list[dict[str, float]], file: Path) -> None:
    import matplotlib.pyplot as plt

    names = [name for name in notes[0] if name != "requests"]
    figure, axes = plt.subplots(
        len(names), 1, figsize=(7, 1.5 * len(names)), sharex=True, layout="constrained"
    )
    for axis, name in zip(axes, names, strict=True):
        axis.plot([note["requests"] for note in notes], [note[name] for note in notes])
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("requests")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--cache-tokens", type=int, default=SETTINGS["cache_tokens"])
    parser.add_argument("--model", default="tiny", choices=("tiny", "demo"))
    parser.add_argument("--small", action="store_true", help="few requests")
    options = parser.parse_args()
    settings = SETTINGS | {"cache_tokens": options.cache_tokens}
    requests, count = (60, 24) if options.small else (options.requests, CASES)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(model_of(options.model, Path(folder)), **settings) as llm,
    ):
        crowd = Crowd(llm, requests, count)
        before = llm.stats().preemptions
        seconds = crowd.run()
        stats = llm.stats()
        rows = [
            {"what": "requests", "number": requests},
            {"what": "requests a second", "number": requests / seconds},
            {"what": "answers that differ from the one alone", "number": len(crowd.wrong)},
            {"what": "preemptions", "number": stats.preemptions - before},
            {"what": "left, running or waiting", "number": stats.running + stats.waiting},
            *({"what": way, "number": number} for way, number in sorted(crowd.asked.items())),
        ]
    report.show(rows, options.out, benchmark="crowd", notes=crowd.notes, small=options.small)
    if options.out is not None and not options.small:
        draw(crowd.notes, options.out.with_suffix(".png"))
    assert not crowd.wrong, f"requests {crowd.wrong[:20]} differ"


if __name__ == "__main__":
    main()
