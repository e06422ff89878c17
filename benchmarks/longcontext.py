"""The loss of quality from reading less of a long cache: recall and code on the demo model, by policy, budget, form and distance.

Either tokens are dropped, by policy, budget and share that is kept; or decode steps read some pages, by policy and tokens.

    python benchmarks/longcontext.py --out longcontext_demo.json
    python benchmarks/longcontext.py --policy snapkv --budget uniform ada --keep 0.1 0.2 --form latents heads
    python benchmarks/longcontext.py --policy --retrieve quest infllm --tokens 256 512
    python benchmarks/longcontext.py --small           (does the script work?)

Each prompt is Python source with a fact `--distance` tokens before the question: a number in a comment ("passkey", one needle),
one of many assignments ("variable"), one of many pairs of words and numbers, without source ("pairs"), or a line of words
("copy"). The prompts come from seeds and are the same for all rows. Tokens are dropped once a prompt is read, the question
included; the answer is right if all its tokens are. The first 4 and the newest 64 tokens always stay, and they count as kept.

Form "latents" drops a token of a layer for all heads; form "heads" caches every head's keys and values, and each head drops its
own. Where pages are chosen, the prompt is read with full attention, and so the first token of the answer is the same as with the
full cache; `budget` has the tokens that a step reads in each layer but the first two.

`needles` is the share of right answers to passkey, variable and pairs, `all` that of all tasks; `low` and `high` are the 95 %
interval of `all` (Wilson's). `code`
is the loss, in nats a token, of the next tokens of held-out files of the standard library, of which the first `--distance` tokens
are the prompt; its decode steps drop nothing more. Where pages are chosen it is not measured: many tokens at once choose none."""

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import report
from flax import nnx
from jax import Array

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo import corpus, tasks
from mla_jax import LLM, SamplingParams, Transformer
from mla_jax.base.batch import Batch, Table
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.paged import PAGE, Pool
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES as RETRIEVERS
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import likely
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.evicting import Evicting, Eviction
from mla_jax.engine.policy.retrieving import Retrieving

TASKS = ("passkey", "variable", "pairs", "copy")
NEEDLES = TASKS[:3]
ANSWER = 64  # tokens of a question and its answer, at most
CODE = 256  # tokens of a file after the prompt
ROWS = 16
FORMS = {"latents": "auto", "heads": "naive"}  # what is cached, as the option `attention` has it
PAIRS = [
    (policy, rule)
    for policy in EVICTION_POLICIES
    for rule in BUDGET_RULES
    if policy not in ("streaming", "random") or rule == "uniform"
]


class Question(NamedTuple):
    task: str
    prompt: list[int]
    answer: list[int]


class Ways(NamedTuple):
    """To read less."""

    pairs: Sequence[tuple[str, str]]  # policies that drop tokens, and how layers or heads share
    keeps: Sequence[float]  # shares of the tokens that are kept
    retrieve: Sequence[str]  # policies that choose pages
    tokens: Sequence[int]  # that a decode step then reads


class Asked(NamedTuple):
    """The same questions for all rows of one form and distance."""

    llm: LLM
    questions: Sequence[Question]
    files: np.ndarray  # [files distance + CODE]: their first tokens
    size: Size
    about: dict[str, Any]

    @classmethod
    def of(cls, form: str, count: int, distance: int) -> "Asked":
        """`count` questions of each task."""
        context = min(8192, -(-(distance + CODE) // PAGE) * PAGE)
        llm = LLM(draft="off", context=context, attention=FORMS[form])
        questions, files = drawn(llm, count, distance, context), held_out(llm, 2 * count, context)
        tokens = sum(len(question.prompt) for question in questions) + files.size
        pages = 2 * tokens // PAGE + ROWS * (context // PAGE)
        size = Size(ROWS, pages, context, llm.model.dispatch.chunk(llm.model))
        return cls(llm, questions, files, size, {"form": form, "distance": distance})

    def quality(self, engine: Engine) -> dict:
        """The share of right answers: see `summed_up`."""
        params = [
            SamplingParams(temperature=0, max_tokens=len(one.answer), ignore_eos=True)
            for one in self.questions
        ]
        requests = self.llm.inputs.requests([one.prompt for one in self.questions], params)
        jobs = [engine.submit(request) for request in requests]
        while not all(job.done for job in jobs):
            engine.step()
        right: dict[str, list[bool]] = {task: [] for task in TASKS}
        for job, one in zip(jobs, self.questions, strict=True):
            right[one.task].append(job.ids == one.answer)
        return summed_up({task: sum(oks) for task, oks in right.items()}, len(self.questions) // len(TASKS))

    def code(self, engine: Engine) -> dict:
        """The mean loss of files' next tokens, and its standard error over files."""
        losses = [
            loss(engine, self.llm.inputs.request(tokens[:-CODE].tolist(), FOLLOWING), tokens)
            for tokens in self.files
        ]
        return {
            "code": float(np.mean(losses)),
            "code error": float(np.std(losses, ddof=1) / math.sqrt(len(losses))),
        }


FOLLOWING = SamplingParams(temperature=0, max_tokens=CODE, ignore_eos=True)


def loss(engine: Engine, request: Request, tokens: np.ndarray) -> float:
    """Of the last CODE of a file's tokens, except the first, once the prompt is read and the engine has dropped some of it."""
    job = engine.submit(request)
    evicts = isinstance(engine.policy, Evicting)
    while job.row is None or job.unread or (evicts and not job.pauses):
        engine.step()
    engine._land_all()
    assert job.shard.pages.extend(job.held, len(tokens))
    pool, rows = engine.device.state()
    held = np.array([len(request.prompt)], np.int32)  # a token that was chosen since is written over
    table = engine.policy.table([job], 1, engine.size.width)
    pool, found = likelihood(engine.programs.model, pool, tokens[None, -CODE:], held, table)
    engine.device.keep(pool, rows)
    engine.cancel(job)
    return -float(found)


@functools.partial(nnx.jit, donate_argnums=1)
def likelihood(
    model: Transformer, pool: Pool, tokens: Array, held: Array, table: Table
) -> tuple[Pool, Array]:
    """The mean log-probability of the tokens `[1 T]` but the first, behind those that a row has `held`."""
    count = tokens.shape[1] - 1
    batch = Batch.behind(held, held, jnp.full(1, count, jnp.int32), count, table)
    hidden, pool, _ = model(tokens[:, :-1], batch, pool)
    return pool, likely(model.unembed(hidden), tokens[:, 1:]).logprobs.mean()


def held_out(llm: LLM, count: int, length: int) -> np.ndarray:
    """The first `length` tokens of the first files that are long enough."""
    texts = corpus.judged(corpus.sources())
    tokens = (llm.tokenizer.encode(text)[:length] for text in texts if len(text) > 3 * length)
    return np.array(list(itertools.islice((ids for ids in tokens if len(ids) == length), count)), np.int32)


def drawn(llm: LLM, count: int, distance: int, longest: int) -> list[Question]:
    text = "\n".join(file.text for file in corpus.sources() if file.path in ("ast.py", "chunk.py"))
    writer = tasks.Writer(llm.tokenizer.model, np.asarray(llm.tokenizer.encode(text, bos=False)))
    seeds = itertools.product(TASKS, range(count))
    return [
        Question(task, *writer.prompt(np.random.default_rng(seed), task, distance, longest))
        for task, seed in seeds
    ]


def summed_up(right: Mapping[str, int], each: int) -> dict:
    """The shares of right answers by task, of the needles, and of all, with the interval of the last; `each` task has as many."""
    needles, every = sum(right[task] for task in NEEDLES), sum(right.values())
    low, high = wilson(every, each * len(right))
    shares = {task: count / each for task, count in right.items()}
    return shares | {
        "needles": needles / (each * len(NEEDLES)),
        "all": every / (each * len(right)),
        "low": low,
        "high": high,
    }


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, share = 1.96, right / count
    middle = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - width) / (1 + z * z / count), (middle + width) / (1 + z * z / count)


def measured(ways: Ways, asked: Asked) -> Iterator[dict]:
    """Rows of one form and distance."""
    llm = asked.llm
    full = Engine(Programs(llm.model), asked.size)
    yield asked.about | {"policy": "none", "budget": "", "kept": 1.0} | asked.quality(full) | asked.code(full)
    del full
    for policy, budget in ways.pairs:
        evicts = Selection(EVICTION_POLICIES[policy], BUDGET_RULES[budget])
        programs = Programs(llm.model, evicts=evicts)
        evicting = Evicting(programs, asked.size, Eviction(evicts, 1.0))
        engine = Engine(programs, asked.size, policy=evicting)
        for keep in ways.keeps:
            # The same engine for each share: the prompts stay in its prefix index
            evicting.eviction = dataclasses.replace(evicting.eviction, keep=keep)
            row = asked.about | {"policy": policy, "budget": budget, "kept": keep}
            yield row | asked.quality(engine) | asked.code(engine)
    if asked.about["form"] == "heads":
        return
    for policy, tokens in itertools.product(ways.retrieve, ways.tokens):
        other = LLM(retrieve=policy, retrieve_tokens=tokens, context=asked.size.context)
        programs = Programs(other.model)
        engine = Engine(programs, asked.size, policy=Retrieving(programs, asked.size))
        yield asked.about | {"policy": policy, "budget": tokens, "kept": 1.0} | asked.quality(engine)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="*", choices=EVICTION_POLICIES, default=list(EVICTION_POLICIES))
    parser.add_argument(
        "--budget",
        nargs="+",
        choices=BUDGET_RULES,
        default=list(BUDGET_RULES),
        help="how layers or heads share",
    )
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS), help="what is cached")
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[0.05, 0.1, 0.2, 0.35, 0.5],
        help="the share of the tokens that is kept",
    )
    parser.add_argument(
        "--retrieve", nargs="*", choices=RETRIEVERS, default=list(RETRIEVERS), help="who chooses pages"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 512, 1024], help="that a decode step then reads"
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument(
        "--distance", type=int, nargs="+", default=[1000], help="tokens between a fact and its question"
    )
    parser.add_argument("--small", action="store_true", help="one policy of each kind, few and short prompts")
    options = parser.parse_args()
    pairs = [
        (policy, budget) for policy, budget in PAIRS if policy in options.policy and budget in options.budget
    ]
    ways = Ways(pairs, options.keep, options.retrieve, options.tokens)
    places, prompts = itertools.product(options.form, options.distance), options.prompts
    if options.small:
        ways, places, prompts = Ways([("snapkv", "uniform")], [0.5], ["quest"], [256]), [("latents", 200)], 1
    rows = []
    with contextlib.suppress(KeyboardInterrupt):  # the table has what was found
        for form, distance in places:
            for row in measured(ways, Asked.of(form, prompts, distance)):
                rows.append(row)
                print(row, flush=True)
    report.show(
        rows, options.out, benchmark="longcontext", small=options.small, model="demo", prompts=prompts
    )


if __name__ == "__main__":
    main()
