"""Requests with grammars beside requests without: tokens/s of both, V2-Lite's shape, random weights, one GPU.

    python benchmarks/grammars.py --out grammars.json
    python benchmarks/grammars.py --small            (a tiny model, on a CPU: does the script work?)

The grammar is a regular expression of letters, or JSON of a schema; the vocabulary has as many tokens as the model's, of one to
five characters. Plain requests have OUTPUT tokens each. Those with grammars are longer, so that they run until the plain ones are
done; their tokens are counted then."""

import functools
import threading
import time

import numpy as np
import report
from loads import FULL, SMALL, random_llm, settled

from mla_jax import LLM, Grammar, SamplingParams
from mla_jax.engine.reader import Reader

PROMPT, OUTPUT = 64, 256
GRAMMARS = {
    "regex": Grammar.regex("[a-z]{20000}"),
    "schema": Grammar.json_schema(
        {
            "type": "array",
            "minItems": 5000,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        }
    ),
}
CASES = (
    (8, 0, "regex"),
    (8, 1, "regex"),
    (8, 8, "regex"),
    (64, 0, "regex"),
    (64, 8, "schema"),
    (64, 64, "schema"),
)
ALONE = ((1, "regex"), (8, "schema"), (64, "schema"))
SMALL_CASES, SMALL_ALONE = ((2, 0, "regex"), (2, 1, "schema")), ((2, "schema"),)


class GrammarBench:
    def __init__(self, llm: LLM, output: int):
        self.llm, self.output, self.rng = llm, output, np.random.default_rng(0)

    def submit(self, count: int, params: SamplingParams, done: threading.Semaphore) -> list[Reader]:
        words = self.llm.config.vocab_size
        prompts = [self.rng.integers(300, words, PROMPT).tolist() for _ in range(count)]

        def wake(reader: Reader) -> None:
            if reader.job.done:
                done.release()

        return self.llm.submit([self.llm.inputs.request(prompt, params) for prompt in prompts], wake)

    def guided(self, count: int, name: str, limit: int, done: threading.Semaphore) -> list[Reader]:
        params = SamplingParams(temperature=0.0, max_tokens=limit, grammar=GRAMMARS[name], seed=0)
        return self.submit(count, params, done)

    def beside(self, plain: int, guided: int, name: str) -> dict:
        """A row of the table: plain requests, while others with a grammar run."""
        done, nobody = threading.Semaphore(0), threading.Semaphore(0)
        others = self.guided(guided, name, 8 * self.output, nobody)
        while not all(reader.job.ids for reader in others):
            time.sleep(0.01)
        before, start = sum(len(reader.job.ids) for reader in others), time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=self.output, ignore_eos=True, seed=0)
        self.submit(plain, params, done)
        for _ in range(plain):
            done.acquire()
        seconds = time.perf_counter() - start
        found = sum(len(reader.job.ids) for reader in others) - before
        self.llm.cancel(others)
        return row(plain, guided, name, plain * self.output / seconds, found / seconds)

    def alone(self, guided: int, name: str) -> dict:
        done, start = threading.Semaphore(0), time.perf_counter()
        readers = self.guided(guided, name, self.output, done)
        for _ in readers:
            done.acquire()
        seconds = time.perf_counter() - start
        return row(0, guided, name, 0.0, sum(len(reader.job.ids) for reader in readers) / seconds)


def row(plain: int, guided: int, name: str, rate: float, guided_rate: float) -> dict:
    kind = name if guided else "none"
    found = {"plain": plain, "guided": guided, "grammar": kind, "plain tokens/s": round(rate)}
    return found | {"guided tokens/s": round(guided_rate)}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--plain", type=int, nargs="+", help="the rows with as many plain requests")
    options = parser.parse_args()
    scale, output = (SMALL, 16) if options.small else (FULL, OUTPUT)
    cases, alone = (SMALL_CASES, SMALL_ALONE) if options.small else (CASES, ALONE)
    if options.plain:
        cases = tuple(case for case in cases if case[0] in options.plain)
        alone = alone if 0 in options.plain else ()
    rows: list[dict] = []
    with random_llm(scale, **({"context": 256} if options.small else {})) as llm:
        bench = GrammarBench(llm, output)
        for measure, settings in ((bench.beside, cases), (bench.alone, alone)):
            for case in settings:
                rows.append(settled(llm, functools.partial(measure, *case)))
                print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="grammars", small=options.small)


if __name__ == "__main__":
    main()
