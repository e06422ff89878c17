"""Tokens/s through the server beside `LLM.generate`, V2-Lite's shape, random weights, one GPU.

    python benchmarks/over_http.py --out over_http.json
    python benchmarks/over_http.py --small           (a tiny model, on a CPU: does the script work?)

All requests start at once: prompts of PROMPT token ids, OUTPUT tokens, greedy. The server is the one of `mla_jax.serve`, in this
process; its clients are in PROCESSES others. They read whole answers, or streams."""

import contextlib
import functools
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report
import uvicorn
from loads import FULL, SMALL, random_llm, settled

from mla_jax import LLM, SamplingParams
from mla_jax.serve.app import ServedModel, make_app
from mla_jax.serve.options import ServeOptions
from mla_jax.serve.server import SWITCH_SECONDS

PROMPT, OUTPUT, PROCESSES = 256, 256, 4
CLIENTS = (1, 64, 256)
REPEATS = 2
CLIENT = Path(__file__).with_name("http_client.py")
WAYS = ("generate", "whole", "stream")


class Found(NamedTuple):
    seconds: float  # from the first request to the end of the last answer
    events: int  # of the streams
    first: float  # seconds to the first byte of an answer's body, in the middle


def generated(llm: LLM, prompts: list[list[int]], output: int) -> Found:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=0)
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return Found(time.perf_counter() - start, 0, 0.0)


@contextlib.contextmanager
def served(llm: LLM) -> Iterator[str]:
    """The address of a server of the model."""
    model = ServedModel(["model"], ServeOptions())
    model.take(llm)
    model.is_ready = True
    config = uvicorn.Config(make_app(model), port=0, lifespan="off", access_log=False, log_level="warning")
    server = uvicorn.Server(config)
    sys.setswitchinterval(SWITCH_SECONDS)  # as the server does
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"http://{host}:{port}"
    server.should_exit = True
    thread.join()


def over_http(url: str, prompts: list[list[int]], output: int, way: str) -> Found:
    """The clients of all processes together."""
    command = [sys.executable, str(CLIENT), url, way, str(output)]
    shares = [prompts[n::PROCESSES] for n in range(min(PROCESSES, len(prompts)))]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in shares
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process, share in zip(running, shares, strict=True):
        print(json.dumps(share), file=process.stdin, flush=True)
    found = [json.loads(process.communicate()[0]) for process in running]
    seconds = max(each["end"] for each in found) - min(each["start"] for each in found)
    first = float(np.median([one for each in found for one in each["first"]]))
    return Found(seconds, sum(each["events"] for each in found), first)


class HttpBench:
    """The same requests by each way."""

    def __init__(self, llm: LLM, url: str, tokens: int, output: int):
        self.llm, self.url, self.tokens, self.output = llm, url, tokens, output
        self.rng = np.random.default_rng(0)

    def row(self, count: int, way: str) -> dict:
        """The best of some runs."""
        best = min(self.found(count, way) for _ in range(REPEATS))
        return {
            "clients": count,
            "way": way,
            "output tokens/s": round(count * self.output / best.seconds),
            "first byte, ms": 1e3 * best.first,
            "events": best.events,
        }

    def found(self, count: int, way: str) -> Found:
        words = self.llm.config.vocab_size
        prompts = self.rng.integers(10, words - 10, (count, self.tokens)).tolist()
        if way == "generate":
            return generated(self.llm, prompts, self.output)
        return over_http(self.url, prompts, self.output, way)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--clients", type=int, nargs="+", help="how many requests at once")
    options = parser.parse_args()
    scale, counts = (SMALL, (1, 4)) if options.small else (FULL, CLIENTS)
    counts = options.clients or counts
    tokens, output = (16, 8) if options.small else (PROMPT, OUTPUT)
    rows: list[dict] = []
    with random_llm(scale, **({"context": 256} if options.small else {})) as llm, served(llm) as url:
        bench = HttpBench(llm, url, tokens, output)
        for count, way in itertools.product(counts, WAYS):
            rows.append(settled(llm, functools.partial(bench.row, count, way)))
            print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="over_http", small=options.small)


if __name__ == "__main__":
    main()
