"""RULER's generated tasks (arXiv 2404.06654) in the demo model's own words: which it can do, and what eviction costs there.

    python benchmarks/ruler.py --out ruler_demo.json
    python benchmarks/ruler.py --small               (does the script work?)

The model knows Python source and questions about one number in it, so a task keeps RULER's shape and takes these words. A text
has about `--thousands` of tokens. The score is RULER's: the share of the expected words that the answer has. Prompts come from
seeds and are the same for all rows; eviction happens once a prompt is read, with its question. The second table compares with the
full cache, task by task: the mean difference, and its 95 % interval by the bootstrap over prompts."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
from longcontext import writer_of
from paired import Difference

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo.tasks import Writer, number, word
from mla_jax import LLM, Evict, SamplingParams

VALUES, HOPS, FREQUENT, OFTEN, SELDOM = 4, 4, 3, 12, 2
WAYS = tuple(itertools.product(("uniform", "ada"), (0.05, 0.1, 0.2)))  # budgets and shares that are kept
SMALL = (("uniform", 0.1),)
SETTINGS: dict[str, Any] = {"draft": "off", "dtype": "float32"}


class Asked(NamedTuple):
    """Lines that stand anywhere in a text of filling, a question, and the words that its answer should have."""

    lines: list[str]
    question: str
    words: list[str]
    is_filled: bool = True  # with source between the lines


def single(rng: np.random.Generator, thousands: int) -> Asked:
    """One number in source."""
    key = number(rng)
    return Asked([f"\n# The pass key is {key}. Remember it.\n"], "What is the pass key?", [key])


def many_keys(rng: np.random.Generator, thousands: int) -> Asked:
    """One of many assignments in source."""
    names, values = names_of(rng, 12), [number(rng) for _ in range(12)]
    return Asked(
        [assigned(*one) for one in zip(names, values, strict=True)], f"print({names[3]})", values[3:4]
    )


def only_keys(rng: np.random.Generator, thousands: int) -> Asked:
    """One of many pairs, with nothing between them."""
    count = 60 * thousands
    names, values = names_of(rng, count), [number(rng) for _ in range(count)]
    lines = [f"{name}: {value}\n" for name, value in zip(names, values, strict=True)]
    return Asked(lines, f"{names[3]}?", values[3:4], is_filled=False)


def many_values(rng: np.random.Generator, thousands: int) -> Asked:
    """One name that is assigned four times."""
    (name,), values = names_of(rng, 1), [number(rng) for _ in range(VALUES)]
    return Asked([assigned(name, value) for value in values], f"print({name})", values)


def many_queries(rng: np.random.Generator, thousands: int) -> Asked:
    """Four names in one question."""
    names, values = names_of(rng, VALUES), [number(rng) for _ in range(VALUES)]
    lines = [assigned(*one) for one in zip(names, values, strict=True)]
    return Asked(lines, f"print({', '.join(names)})", values)


def variable_tracking(rng: np.random.Generator, thousands: int) -> Asked:
    """A number that is passed on from name to name."""
    names, value = names_of(rng, HOPS + 1), number(rng)
    lines = [assigned(one, other) for one, other in zip(names, [value, *names], strict=False)]
    return Asked(lines, f"print({names[-1]})", [value])


def one_hop(rng: np.random.Generator, thousands: int) -> Asked:
    """The same with one name between."""
    names, value = names_of(rng, 2), number(rng)
    return Asked([assigned(names[0], value), assigned(names[1], names[0])], f"print({names[1]})", [value])


def common_words(rng: np.random.Generator, thousands: int) -> Asked:
    """The words that come most often in a list."""
    common, others = ([word(rng) for _ in range(count)] for count in (FREQUENT, 40))
    lines = [
        f"{each}\n" for each in rng.permutation([*common * OFTEN * thousands, *others * SELDOM * thousands])
    ]
    return Asked(lines, f"The {FREQUENT} most common words?", common, is_filled=False)


def frequent_words(rng: np.random.Generator, thousands: int) -> Asked:
    """The same where frequencies fall as a zeta distribution has it."""
    ranked = [word(rng) for _ in range(30)]
    drawn = [ranked[min(rank, 30) - 1] for rank in rng.zipf(2.0, 130 * thousands)]
    return Asked(
        [f"{each}\n" for each in drawn], f"The {FREQUENT} most frequent words?", ranked[:FREQUENT], False
    )


# RULER's name of each task
TASKS: dict[str, Callable[[np.random.Generator, int], Asked]] = {
    "niah_single": single,
    "niah_multikey_1": many_keys,
    "niah_multikey_2": only_keys,
    "niah_multivalue": many_values,
    "niah_multiquery": many_queries,
    "vt, one hop": one_hop,
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}


def names_of(rng: np.random.Generator, count: int) -> list[str]:
    return [f"{word(rng)}_{word(rng)}" for _ in range(count)]


def assigned(name: str, value: str) -> str:
    return f"\n{name} = {value}\n"


class Prompt(NamedTuple):
    tokens: list[int]
    words: list[str]


def prompt_of(writer: Writer, task: str, seed: int, thousands: int) -> Prompt:
    rng = np.random.default_rng(seed)
    asked = TASKS[task](rng, thousands)
    lines = [writer.encode(line) for line in asked.lines]
    room = max(1000 * thousands - sum(map(len, lines)), 0) if asked.is_filled else 0
    ends = np.sort(rng.integers(0, room + 1, len(lines)))
    gaps = np.diff([0, *ends, room])
    text = writer.filling(rng, int(gaps[0]))
    for line, gap in zip(lines, gaps[1:], strict=True):
        text += [*line, *writer.filling(rng, int(gap))]
    question = writer.encode("\n" + asked.question)
    return Prompt([writer.bos, writer.user, *text, *question, writer.assistant], asked.words)


def scores(llm: LLM, prompts: list[Prompt]) -> np.ndarray:
    """The share of each prompt's words that its answer has."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    answers = llm.generate([prompt.tokens for prompt in prompts], params, progress=False)
    pairs = zip(prompts, answers, strict=True)
    return np.array([np.mean([word in answer.text for word in prompt.words]) for prompt, answer in pairs])


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--thousands", type=int, default=4, help="of tokens of a text")
    parser.add_argument("--prompts", type=int, default=16, help="of each task")
    parser.add_argument("--small", action="store_true", help="short texts, two prompts a task")
    options = parser.parse_args()
    thousands, count = (1, 2) if options.small else (options.thousands, options.prompts)
    context = {"context": 1500 * thousands}
    ways: dict[str, Any] = {"full": "off"} | {
        f"{budget}, {keep:.0%}": Evict("snapkv", budget=budget, keep=keep, recent=16)
        for budget, keep in (SMALL if options.small else WAYS)
    }
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, evict in ways.items():
        with LLM(None, **SETTINGS, **context, evict=evict) as llm:
            writer = writer_of(llm)
            found[name] = {
                task: scores(llm, [prompt_of(writer, task, seed, thousands) for seed in range(count)])
                for task in TASKS
            }
        print(name, {task: float(right.mean()) for task, right in found[name].items()}, flush=True)
    rows = [
        {"cache": name} | {task: float(right.mean()) for task, right in by_task.items()}
        for name, by_task in found.items()
    ]
    able = [task for task, right in found["full"].items() if right.mean() >= 0.5]
    beside = [
        {"cache": name} | {task: str(Difference.of(by_task[task], found["full"][task])) for task in able}
        for name, by_task in found.items()
        if name != "full"
    ]
    report.show(beside, None)
    cases = {
        name: {task: right.tolist() for task, right in by_task.items()} for name, by_task in found.items()
    }
    report.show(
        rows,
        options.out,
        benchmark="ruler",
        model="demo",
        thousands=thousands,
        comparisons=beside,
        cases=cases,
    )


if __name__ == "__main__":
    main()
