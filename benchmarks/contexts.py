"""Long contexts as a user meets them: V2-Lite's shape, random bf16 weights, through `LLM`, one GPU.

    python benchmarks/contexts.py --out contexts.json
    python benchmarks/contexts.py --ways evict --tokens 524288
    python benchmarks/contexts.py --small            (a tiny model, on a CPU: does the script work?)

Ways: `full` attention; `evict`, which drops tokens chunk by chunk while a prompt is read, with an eighth of the longest prompt as
cache; `compress`, a context that is read once, and questions about it. Each way runs in a process of its own, once so that
programs are compiled, and is then timed. The peak is the allocator's, of the whole process. Rows are printed and written as they
are measured."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import report
from loads import FULL, SMALL, random_llm

from mla_jax import LLM, Evict, SamplingParams
from mla_jax.engine.core.stats import peak_bytes

WAYS = ("full", "evict", "compress")
TOKENS, SMALL_TOKENS = (131_072, 524_288), (1024, 4096)
OUTPUT, QUESTIONS, QUESTION = 128, 100, 32  # tokens of an answer; questions, and the tokens of each
SHARE = 8  # times the cache is the longest prompt of `evict`
Row = dict[str, Any]


def measured(way: str, tokens: list[int], small: bool) -> Iterator[Row]:
    """The rows of one way, in this process."""
    longest = max(tokens)
    keep, chunk = (64, 128) if small else (4096, 8192)
    evict = Evict("snapkv", keep=keep, chunk=None if way == "compress" else chunk)
    settings: dict[str, Any] = {"context": longest + 2 * OUTPUT, "draft": "off"}
    settings |= {} if way == "full" else {"evict": evict}
    settings |= {"cache_tokens": longest // SHARE} if way == "evict" else {}
    scale = SMALL if small else FULL
    with random_llm(scale, config={"max_position_embeddings": 2 * longest}, **settings) as llm:
        found = asked(llm, tokens) if way == "compress" else read(llm, tokens, way == "evict")
        for row in found:
            yield {
                "way": way,
                **row,
                "cache, tokens": llm.plan.tokens,
                "peak, GiB": (peak_bytes() or 0) / 2**30,
            }


def prompt(tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 90, tokens).tolist()


def first_and_last(llm: LLM, tokens: list[int], output: int, **given: Any) -> tuple[float, float]:
    """Seconds to the first token, and from it to the last."""
    start = time.perf_counter()
    stream = llm.stream(tokens, SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True), **given)
    next(stream)
    first = time.perf_counter()
    list(stream)
    return first - start, time.perf_counter() - first


def read(llm: LLM, tokens: list[int], evicts: bool) -> Iterator[Row]:
    """The first row is of the prompt that compiles the programs. Rows that drop tokens have the same for longer ones."""
    count = min(tokens) // SHARE if evicts else min(tokens)
    first, _ = first_and_last(llm, prompt(count, 0), OUTPUT)
    yield {"tokens": count, "first token with compiling, s": first}
    for count in tokens:
        first, rest = first_and_last(llm, prompt(count, count), OUTPUT)
        yield {
            "tokens": count,
            "first token, s": first,
            "prompt, tokens/s": round(count / first),
            "output, tokens/s": (OUTPUT - 1) / rest,
        }


def asked(llm: LLM, tokens: list[int]) -> Iterator[Row]:
    """The first answer includes the reading of the context."""
    count = min(tokens)
    llm.generate(
        [prompt(QUESTION, 1)],
        SamplingParams(max_tokens=2),
        context=llm.compress(prompt(count, 0)),
        progress=False,
    )
    start = time.perf_counter()
    context = llm.compress(prompt(count, 2))
    reading = time.perf_counter() - start
    waits = [first_and_last(llm, prompt(QUESTION, 100 + i), 2, context=context)[0] for i in range(QUESTIONS)]
    first, later = reading + waits[0], float(np.mean(waits[1:]))
    yield {
        "tokens": count,
        "first token, s": first,
        "later first tokens, s": later,
        "later / first": later / first,
    }


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--tokens", nargs="+", type=int, help="of the prompts")
    parser.add_argument("--small", action="store_true", help="a tiny model and short prompts")
    parser.add_argument("--way", choices=WAYS, help="measure this way, in this process")
    options = parser.parse_args()
    tokens = options.tokens or [*(SMALL_TOKENS if options.small else TOKENS)]
    if options.way:
        for row in measured(options.way, tokens, options.small):
            print(json.dumps(row), flush=True)
        return
    rows: list[Row] = []
    for way in options.ways:
        for row in in_a_process(way, tokens, options.small):
            rows.append(row)
            print(row, flush=True)
            if options.out is not None:
                # Without the machine: until the end, the device is the measuring process's
                options.out.write_text(json.dumps({"benchmark": "contexts", "rows": rows}, indent=1) + "\n")
    report.show(rows, options.out, benchmark="contexts", small=options.small)


def in_a_process(way: str, tokens: list[int], small: bool) -> Iterator[Row]:
    """The rows of one way, each as soon as it is measured."""
    command = [sys.executable, __file__, "--way", way, "--tokens", *map(str, tokens)]
    command += ["--small"] if small else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or []:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise SystemExit(f"{way} ended with {process.returncode}")


if __name__ == "__main__":
    main()
