"""How long it takes until a process ends that has lost the other, on two GPUs: the demo model on `data=2`, a process on each GPU.

    python benchmarks/lost.py --out lost.json
    python benchmarks/lost.py --cpu             (two processes on a CPU: does the script work?)

In the middle of endless answers one process gets a signal: KILL, or STOP (it hangs, as one whose GPU hangs). The other has to end
within 30 seconds with exit code 5 and one error. All pairs run at the same time."""

import argparse
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import report

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
LIMIT = 30  # seconds
READY = "answers"
SMALL = {"mesh": "data=2", "context": 512, "batch": 8, "memory_fraction": 0.08}  # room for all pairs


def answer(coordinator: str, number: int) -> None:
    """The main function of each process of a pair."""
    from mla_jax import LLM, SamplingParams

    llm = LLM(**SMALL, coordinator=coordinator, processes=2, process_id=number)
    print("loaded", flush=True)
    if number:
        llm.follow()
        return
    endless = SamplingParams(max_tokens=300, ignore_eos=True)
    prompts = [f"def f{i}(" for i in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=2))
    print(READY, flush=True)
    while True:
        llm.generate(prompts, endless)


class Pair(NamedTuple):
    """Two processes, and the file of what each says."""

    processes: list[subprocess.Popen]
    said: list[Path]

    @classmethod
    def start(cls, folder: Path, on_cpu: bool) -> "Pair":
        with socket.create_server(("127.0.0.1", 0)) as server:
            coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        said = [folder / f"{coordinator[-5:]}.{number}" for number in range(2)]
        started = []
        for number, path in enumerate(said):
            own = {"JAX_PLATFORMS": "cpu"} if on_cpu else {"CUDA_VISIBLE_DEVICES": str(number)}
            environment = {**os.environ, **own, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            line = [sys.executable, __file__, "--as", str(number), "--coordinator", coordinator]
            with open(path, "w") as file:
                started.append(subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=environment))
        return cls(started, said)

    def await_answers(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while READY not in self.said[0].read_text().splitlines():
            if time.monotonic() > until or any(process.poll() is not None for process in self.processes):
                raise SystemExit(
                    "a pair does not answer: " + "\n".join(path.read_text() for path in self.said)
                )
            time.sleep(0.1)

    def lose(self, number: int, how: signal.Signals) -> dict:
        """One process gets the signal; what becomes of the other."""
        other, start = self.processes[1 - number], time.monotonic()
        os.kill(self.processes[number].pid, how)
        try:
            code = other.wait(2 * LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - start
        errors = [line for line in self.said[1 - number].read_text().splitlines() if "error: " in line]
        found = {"lost": f"process {number}", "by": how.name, "seconds": seconds, "exit code": code}
        return found | {
            "in time": seconds < LIMIT and code == 5 and len(errors) == 1,
            "error": " / ".join(errors),
        }


def main() -> None:
    parser = report.arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="on a CPU")
    parser.add_argument("--start", type=float, default=300, help="seconds until all pairs answer, at most")
    parser.add_argument("--as", type=int, dest="number", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.number is not None:
        answer(options.coordinator, options.number)
        return
    cases = [(number, how) for number in range(2) for how in SIGNALS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(cases)) as pool:
        pairs = [Pair.start(Path(folder), options.cpu) for _ in cases]
        try:
            for pair in pairs:
                pair.await_answers(options.start)
            rows = list(pool.map(lambda pair, case: pair.lose(*case), pairs, cases))
        finally:
            for process in itertools.chain.from_iterable(pair.processes for pair in pairs):
                process.kill()
    report.show(rows, options.out)


if __name__ == "__main__":
    main()
