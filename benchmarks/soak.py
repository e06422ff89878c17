"""The server as a process, with the demo model, and many clients that do all that clients do, for a long time.

    python benchmarks/soak.py --minutes 30 --clients 64 --out soak.json
    python benchmarks/soak.py --small

Each client sends one request after the other. Requests and their answers by the library are in soak_requests.py; WAYS are the
ways to ask. Every complete answer is compared with the library's: token ids, text, calls and log-probabilities. The server has
few rows and pages, so requests wait, are preempted, and are refused in floods. While it runs, the process's memory, threads
and descriptors and the engine's gauges are noted; next to the JSON file they are drawn as a PNG."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import report
from soak_requests import (
    COMPLETIONS,
    Answer,
    Case,
    answer_of,
    answers_of_stream,
    cases,
    folder_with_tools,
    refusals,
)

from mla_jax import LLM

ROOT = Path(__file__).parents[1]
SETTINGS = {"context": 1024, "max_rows": 16, "cache_tokens": 4096}
WAYS = {  # and how often each is chosen
    "whole": 30,
    "stream": 40,
    "slow reader": 5,
    "dropped stream": 10,
    "dropped": 5,
    "half a body": 1,
    "malformed": 6,
    "too long": 2,
    "flood": 1,
}
PATIENCE = 600  # seconds that a client waits
BUSY = "429"
KEPT = 20  # of what was wrong
NOTES = 120
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1)
JSON = {"Content-Type": "application/json"}
# Figures of the server without requests; the last three have to be the same at the start and at the end
STAYING = (
    "memory, MiB",
    "threads",
    "descriptors",
    "requests that run",
    "requests that wait",
    "share of the pages that requests hold",
)
FLOOD = {"prompt": "x", "max_tokens": 2, "temperature": 0}


class Server:
    """The server's process. Its log is a file."""

    def __init__(self, model: Path, waiting: int, log: Path):
        flags = {**SETTINGS, "max_waiting": waiting, "max_body": 1, "port": 0, "model": model}
        line = [sys.executable, "-m", "mla_jax.serve"]
        for name, value in flags.items():
            line += [f"--{name.replace('_', '-')}", str(value)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(line, stderr=file, cwd=ROOT, env=environment)
        self.url = self._address()

    def _address(self) -> str:
        """Where it listens, once it is ready."""
        while not (found := re.search(r"listening on (\S+)[\s\S]* ready", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        return found[1]

    def note(self) -> dict[str, float]:
        """The process and the engine as they are now."""
        own = Path(f"/proc/{self.process.pid}")
        threads = re.search(r"Threads:\s*(\d+)", (own / "status").read_text())
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        figures = dict(re.findall(r"^(\S+?)\{.*\} (\S+)$", text, re.M))
        assert threads is not None
        return {
            "memory, MiB": int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20,
            "threads": int(threads[1]),
            "descriptors": len(list((own / "fd").iterdir())),
            "requests that run": float(figures["vllm:num_requests_running"]),
            "requests that wait": float(figures["vllm:num_requests_waiting"]),
            "share of the pages that requests hold": float(figures["vllm:kv_cache_usage_perc"]),
            "programs": float(figures["mla_jax:programs"]),
            "preemptions": float(figures["vllm:num_preemptions_total"]),
        }

    def idle(self) -> dict[str, float]:
        """A note, once no request is left, and a second later."""
        for _ in range(PATIENCE):
            note = self.note()
            if note["requests that run"] + note["requests that wait"] == 0:
                break
            time.sleep(1)
        time.sleep(1)
        return self.note()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


class Broken(Exception):
    """A stream that has an error, or no end."""


class Soak:
    """Clients of a server until a time is over, and what came of it."""

    def __init__(self, url: str, found: list[Case], flood: int):
        self.url, self.cases, self.flood = url, found, flood
        self.refusals = refusals(SETTINGS["context"])
        self.asked: defaultdict[str, Counter[str]] = defaultdict(Counter)  # how each way ended
        self.compared = Counter[str]()  # answers of each form
        self.wrong: list[dict[str, Any]] = []
        self.unexpected: list[str] = []
        self.first: list[float] = []  # seconds until a stream's first token,
        self.gaps: list[float] = []  # and between its tokens

    async def run(self, clients: int, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(number) for number in range(clients)))

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=LIMITS) as http:
            while time.monotonic() < self.end:
                (way,) = rng.choices([*WAYS], [*WAYS.values()])
                try:
                    ended = await self._ask(way, http, rng)
                except (httpx.HTTPError, OSError, Broken) as error:
                    ended = "failed"
                    self.unexpected.append(f"{way}: {error!r}")
                self.asked[way][ended] += 1
                await asyncio.sleep(rng.random() * (ended == BUSY))

    async def _ask(self, way: str, http: httpx.AsyncClient, rng: random.Random) -> str:
        """How the request ended: its status, or another word."""
        case = rng.choice(self.cases)
        match way:
            case "whole":
                return await self._whole(http, case)
            case "stream":
                return await self._stream(http, case, 0.0)
            case "slow reader":
                return await self._stream(http, case, rng.uniform(0.05, 0.3))
            case "dropped stream":
                return await self._drop_stream(http, case, rng.randrange(6))
            case "dropped":
                return await self._drop(http, case, rng.random())
            case "half a body":
                return await self._half_a_body(case)
            case "flood":
                return await self._flood(http)
        one = rng.choice(self.refusals[way])
        return self._status(await http.post(one.path, content=one.body, headers=JSON), one.status)

    async def _whole(self, http: httpx.AsyncClient, case: Case) -> str:
        response = await http.post(case.path, json=case.body)
        if response.status_code == 200:
            self._compare("whole", case, [answer_of(choice) for choice in response.json()["choices"]])
        return self._status(response, 200, int(BUSY))

    async def _stream(self, http: httpx.AsyncClient, case: Case, pause: float) -> str:
        began, pieces = time.perf_counter(), []
        async with http.stream("POST", case.path, json={**case.body, "stream": True}) as response:
            if response.status_code == 200:
                async for event in _events(response):
                    pieces.append((time.perf_counter() - began, event["choices"][0]))
                    await asyncio.sleep(pause)
            else:
                await response.aread()
        if pieces:
            self._compare("stream", case, answers_of_stream([choice for _, choice in pieces]))
        if pieces and not pause:
            self._time(pieces)
        return self._status(response, 200, int(BUSY))

    async def _drop_stream(self, http: httpx.AsyncClient, case: Case, events: int) -> str:
        """Goes away after some events."""
        async with http.stream("POST", case.path, json={**case.body, "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                return self._status(response, int(BUSY))
            async with contextlib.aclosing(_events(response)) as source:
                for _ in range(events):
                    if await anext(source, None) is None:
                        return "had ended"
        return "went away"

    async def _drop(self, http: httpx.AsyncClient, case: Case, seconds: float) -> str:
        """Goes away after some seconds, wherever the answer is then."""
        try:
            async with asyncio.timeout(seconds):
                return self._status(await http.post(case.path, json=case.body), 200, int(BUSY))
        except TimeoutError:
            return "went away"

    async def _half_a_body(self, case: Case) -> str:
        """Goes away within its own request."""
        body = json.dumps(case.body).encode()
        address = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        head = f"POST {case.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[: len(body) // 2])
        await writer.drain()
        writer.close()
        return "went away"

    async def _flood(self, http: httpx.AsyncClient) -> str:
        """More requests at once than may wait."""
        sent = (http.post(COMPLETIONS, json=FLOOD) for _ in range(self.flood))
        statuses = [self._status(one, 200, int(BUSY)) for one in await asyncio.gather(*sent)]
        self.asked["within floods"].update(statuses)
        return "done"

    def _status(self, response: httpx.Response, *expected: int) -> str:
        """The status; one that is not expected is kept, and so is a 429 that does not say when to come again."""
        status = response.status_code
        tells = status != int(BUSY) or "retry-after" in response.headers
        if status not in expected or not tells:
            self.unexpected.append(f"{response.request.url.path} {status} {response.text[:200]}")
        return str(status)

    def _compare(self, way: str, case: Case, found: list[Answer]) -> None:
        self.compared[case.kind] += 1
        if len(found) != len(case.answers) or not all(map(Answer.equals, case.answers, found)):
            self.wrong.append(
                {"way": way, "kind": case.kind, "body": case.body, "expected": case.answers, "found": found}
            )

    def _time(self, pieces: list[tuple[float, dict[str, Any]]]) -> None:
        """Seconds until the first token, and between tokens: those of a piece share the time before it."""
        last: dict[int, float] = {}
        for seconds, choice in pieces:
            if ids := choice.get("token_ids"):
                if choice["index"] in last:
                    self.gaps += [(seconds - last[choice["index"]]) / len(ids)] * len(ids)
                last[choice["index"]] = seconds
        self.first.append(next(seconds for seconds, choice in pieces if choice.get("token_ids")))


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream. Raises Broken for one with an error, and where the end is missing."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Broken(event["error"])
            yield event
    raise Broken("the stream has no end")


async def soak(
    server: Server, found: list[Case], clients: int, seconds: float, flood: int
) -> tuple[Soak, list[dict]]:
    """Runs the clients, and notes the server meanwhile. First each request is asked once, so that programs are compiled."""
    asked = Soak(server.url, found, flood)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
        for case in found:
            asked.asked["first"][await asked._whole(http, case)] += 1
    began, notes = time.monotonic(), [{"minutes": 0.0, **server.idle()}]

    def minutes() -> float:
        return round((time.monotonic() - began) / 60, 3)

    running = asyncio.ensure_future(asked.run(clients, seconds))
    while not running.done():
        await asyncio.wait([running], timeout=max(0.2, seconds / NOTES))
        note = await asyncio.to_thread(server.note)
        notes.append({"minutes": minutes(), **note})
    await running
    notes.append({"minutes": minutes(), **await asyncio.to_thread(server.idle)})
    return asked, notes


def rows(asked: Soak, notes: list[dict[str, float]], tracebacks: int) -> list[dict[str, Any]]:
    first, last, middle = notes[0], notes[-1], notes[len(notes) // 2]
    ways = [
        counts for way, counts in asked.asked.items() if way != "flood"
    ]  # its requests are counted one by one
    statuses = Counter(status for counts in ways for status in counts.elements())
    return [
        {"what": "minutes", "number": last["minutes"]},
        {"what": "requests", "number": statuses.total()},
        *({"what": f"ended: {status}", "number": number} for status, number in sorted(statuses.items())),
        {"what": "answers that were compared", "number": asked.compared.total()},
        {"what": "answers that differ from the library's", "number": len(asked.wrong)},
        {"what": "statuses and ends that were not expected", "number": len(asked.unexpected)},
        {"what": "tracebacks in the log", "number": tracebacks},
        {"what": "preemptions", "number": last["preemptions"]},
        *({"what": f"{name}, at the start", "number": first[name]} for name in STAYING),
        *({"what": f"{name}, half way", "number": middle[name]} for name in STAYING[:3]),
        *({"what": f"{name}, at the end", "number": last[name]} for name in STAYING),
        *(
            {"what": f"seconds {name}, p{share}", "number": float(np.percentile(values, share))}
            for name, values in (("to the first token", asked.first), ("between tokens", asked.gaps))
            for share in (50, 99)
            if values
        ),
    ]


def draw(notes: list[dict[str, float]], file: Path) -> None:
    import matplotlib.pyplot as plt

    names = [name for name in notes[0] if name != "minutes"]
    figure, axes = plt.subplots(
        len(names), 1, figsize=(7, 1.2 * len(names)), sharex=True, layout="constrained"
    )
    for axis, name in zip(axes, names, strict=True):
        axis.plot([note["minutes"] for note in notes], [note[name] for note in notes], linewidth=1)
        axis.set_title(name, loc="left", fontsize=9)
        axis.set_ylim(0, 1.1 * max(note[name] for note in notes) or 1)
    axes[-1].set_xlabel("minutes")
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="few clients, for some seconds")
    options = parser.parse_args()
    clients, seconds, each = (6, 5.0, 1) if options.small else (options.clients, 60 * options.minutes, 3)
    waiting = clients * 5 // 4
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder_with_tools(Path(temporary))
        with LLM(folder, context=SETTINGS["context"]) as llm:
            found = cases(llm, each)
        server = Server(folder, waiting, Path(temporary) / "log")
        try:
            asked, notes = asyncio.run(soak(server, found, clients, seconds, SETTINGS["max_rows"] + waiting))
            assert server.end() == 0, "the server ended with an error"
        finally:
            server.process.kill()
        log = server.log.read_text()
    about = {
        "ways": {way: dict(counts) for way, counts in asked.asked.items()},
        "compared": dict(asked.compared),
        "wrong": asked.wrong[:KEPT],
        "unexpected": asked.unexpected[:KEPT],
        "settings": {**SETTINGS, "max_waiting": waiting, "clients": clients},
        "notes": notes,
    }
    report.show(
        rows(asked, notes, log.count("Traceback")),
        options.out,
        benchmark="soak",
        small=options.small,
        **about,
    )
    if options.out is not None and not options.small:
        draw(notes, options.out.with_suffix(".png"))
    assert not asked.wrong, asked.wrong[:3]
    assert not asked.unexpected, asked.unexpected[:10]
    assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
    assert all(notes[0][name] == notes[-1][name] for name in STAYING[3:]), (notes[0], notes[-1])


if __name__ == "__main__":
    main()
