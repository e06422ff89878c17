"""Tokens a second of prompts and of generation, in the way a user goes, in the form of llama-bench."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.options import SamplingParams
from mla_jax.engine.llm import LLM

LOWEST = 10  # token ids from here on are drawn: those below are often control tokens


@dataclass(frozen=True)
class Load:
    """`rows` requests at once, each of `prompt` tokens, that generate `output` tokens."""

    rows: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        """In llama-bench's words: pp512, tg128, or pp512+tg128; with several rows x8."""
        parts = [f"pp{self.prompt}"] * (self.prompt > 1) + [f"tg{self.output}"] * (self.output > 1)
        return "+".join(parts) + (f" x{self.rows}" if self.rows > 1 else "")

    @property
    def tokens(self) -> int:
        """That the rate counts: of prompts, of outputs, or of both."""
        prompt = self.prompt if self.prompt > 1 else 0
        output = self.output if self.output > 1 else 0
        return self.rows * (prompt + output)


@dataclass(frozen=True)
class Rate:
    """Tokens a second: the mean over repeats, and their standard deviation."""

    load: Load
    mean: float
    deviation: float


def loads(
    prompts: Sequence[int], outputs: Sequence[int], both: Sequence[str], rows: Sequence[int]
) -> list[Load]:
    """Prompts alone, outputs behind one token, and pairs such as "512,128", each for all numbers of rows.

    Raises BadRequest for what is no pair."""
    asked = [*((n, 1) for n in prompts), *((1, n) for n in outputs), *map(_pair, both)]
    return [Load(count, prompt, output) for prompt, output in asked for count in rows]


def _pair(text: str) -> tuple[int, int]:
    prompt, _, output = text.partition(",")
    if not (prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)):
        raise BadRequest(f"a load is {shown(text)}", "expected tokens of prompt and output, such as 512,128")
    return int(prompt), int(output)


def bench(llm: LLM, asked: Sequence[Load], repeats: int) -> Iterator[Rate]:
    """The rates, one after the other. Each load runs once before, which compiles what it needs. No two prompts begin alike."""
    rng = np.random.default_rng(0)
    for load in asked:
        _seconds(llm, load, rng)
        rates = [load.tokens / _seconds(llm, load, rng) for _ in range(repeats)]
        yield Rate(load, statistics.mean(rates), statistics.stdev(rates) if repeats > 1 else 0.0)


def _seconds(llm: LLM, load: Load, rng: np.random.Generator) -> float:
    shape = load.rows, load.prompt
    prompts = rng.integers(min(LOWEST, llm.config.vocab_size - 1), llm.config.vocab_size, shape).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True, seed=0)
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start
