"""What reading less of a long cache costs in quality: recall tasks on the demo model, by policy and budget.

Either tokens are dropped, by policy, budget over layers and share that is kept; or decode steps read some pages, by policy and
tokens.

    python benchmarks/longcontext.py --out longcontext_demo.json
    python benchmarks/longcontext.py --policy snapkv --budget uniform ada --keep 0.1 0.2
    python benchmarks/longcontext.py --policy --retrieve quest infllm --tokens 256 512
    python benchmarks/longcontext.py --small           (does the script work?)

Each prompt is Python source with a fact about `--distance` tokens before the question: a number in a comment ("passkey"), one of
many assignments ("variable"), or a line of words ("copy"). The prompts come from seeds and are the same for all rows. Tokens are
dropped once a prompt is read, the question included; the answer is right if all its tokens are. The first 4 and the newest 64
tokens always stay, and they count as kept. Where pages are chosen, the prompt is read with full attention, and so the first token
of the answer is that of the full cache; `budget` has the tokens that a step reads in each layer but the first two.

The last two columns are a 95 % interval of `all` (Wilson's) for the number of prompts."""

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo import corpus, tasks
from mla_jax import LLM, SamplingParams
from mla_jax.cache.evict import POLICIES, RULES
from mla_jax.cache.paged import PAGE
from mla_jax.cache.retrieve import POLICIES as RETRIEVERS
from mla_jax.decode.evicting import Evict
from mla_jax.decode.loop import Programs
from mla_jax.engine.engine import Engine
from mla_jax.engine.eviction import EvictingEngine, Eviction
from mla_jax.engine.retrieving import RetrievingEngine
from mla_jax.engine.size import Size

TASKS = ("passkey", "variable", "copy")
LONGEST = 4096  # tokens of a prompt and its answer
ROWS = 8
PAIRS = [("snapkv", rule) for rule in RULES] + [
    *((policy, "ada") for policy in ("critical", "tova", "h2o", "keydiff")),
    *((policy, "uniform") for policy in ("streaming", "random")),
]


class Question(NamedTuple):
    task: str
    prompt: list[int]
    answer: list[int]


class Ways(NamedTuple):
    """To read less."""

    pairs: Sequence[tuple[str, str]]  # policies that drop tokens, and how layers share
    keeps: Sequence[float]  # shares of the tokens that are kept
    retrieve: Sequence[str]  # policies that choose pages
    tokens: Sequence[int]  # that a decode step then reads


def questions(llm: LLM, count: int, distance: int) -> list[Question]:
    """`count` of each task."""
    text = "\n".join(file.text for file in corpus.sources() if file.path in ("ast.py", "chunk.py"))
    writer = tasks.Writer(llm.tokenizer.model, np.asarray(llm.tokenizer.encode(text, bos=False)))
    drawn = itertools.product(TASKS, range(count))
    return [Question(task, *writer.prompt(np.random.default_rng(seed), task, distance, LONGEST)) for task, seed in drawn]


def quality(engine: Engine, llm: LLM, asked: Sequence[Question]) -> dict:
    """The share of right answers, by task and of all, with its interval."""
    params = [SamplingParams(temperature=0, max_tokens=len(question.answer), ignore_eos=True) for question in asked]
    jobs = [engine.submit(request) for request in llm.inputs.requests([question.prompt for question in asked], params)]
    while not all(job.done for job in jobs):
        engine.step()
    right = [job.ids == question.answer for job, question in zip(jobs, asked, strict=True)]
    by_task = {task: float(np.mean([ok for ok, one in zip(right, asked, strict=True) if one.task == task])) for task in TASKS}
    low, high = wilson(sum(right), len(right))
    return by_task | {"all": sum(right) / len(right), "low": low, "high": high}


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, share = 1.96, right / count
    middle, width = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - width) / (1 + z * z / count), (middle + width) / (1 + z * z / count)


def measured(ways: Ways, count: int, distance: int) -> Iterator[dict]:
    llm = LLM(draft="off", context=LONGEST)
    asked = questions(llm, count, distance)
    tokens = sum(len(question.prompt) for question in asked)
    size = Size(ROWS, 2 * tokens // PAGE + ROWS * (LONGEST // PAGE), LONGEST, llm.model.dispatch.chunk(llm.model))
    full = Engine(Programs(llm.model), llm.config, llm.tokenizer, size)
    yield {"policy": "none", "budget": "", "kept": 1.0, **quality(full, llm, asked)}
    for policy, budget in ways.pairs:
        evicts = Evict(POLICIES[policy], budget)
        programs = Programs(llm.model, evicts=evicts)
        engine = EvictingEngine(programs, llm.config, llm.tokenizer, size, None, Eviction(evicts, 1.0))
        for keep in ways.keeps:
            engine.eviction = dataclasses.replace(engine.eviction, keep=keep)  # the prompts stay in its prefix index
            yield {"policy": policy, "budget": budget, "kept": keep, **quality(engine, llm, asked)}
    for policy, tokens in itertools.product(ways.retrieve, ways.tokens):
        other = LLM(retrieve=policy, retrieve_tokens=tokens, context=LONGEST)
        engine = RetrievingEngine(Programs(other.model), other.config, other.tokenizer, size)
        yield {"policy": policy, "budget": tokens, "kept": 1.0, **quality(engine, other, asked)}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--budget", nargs="+", choices=RULES, default=list(RULES), help="how layers share")
    parser.add_argument(
        "--keep", type=float, nargs="+", default=[0.1, 0.2, 0.35, 0.5], help="the share of the tokens that is kept"
    )
    parser.add_argument("--retrieve", nargs="*", choices=RETRIEVERS, default=list(RETRIEVERS), help="who chooses pages")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024], help="that a decode step then reads")
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--distance", type=int, default=1000, help="tokens between a fact and its question")
    parser.add_argument("--small", action="store_true", help="one policy of each kind, few and short prompts")
    options = parser.parse_args()
    pairs = [(policy, budget) for policy, budget in PAIRS if policy in options.policy and budget in options.budget]
    ways = Ways(pairs, options.keep, options.retrieve, options.tokens)
    small = Ways(PAIRS[:1], [0.5], ["quest"], [256])
    found = measured(small, 1, 200) if options.small else measured(ways, options.prompts, options.distance)
    rows = []
    with contextlib.suppress(KeyboardInterrupt):  # the table has what was found
        for row in found:
            rows.append(row)
            print(row, flush=True)
    about = {"model": "demo", "prompts": options.prompts, "distance": options.distance}
    report.show(rows, options.out, benchmark="longcontext", small=options.small, **about)


if __name__ == "__main__":
    main()
