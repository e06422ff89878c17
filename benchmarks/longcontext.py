"""The loss of quality from reading less of a long cache: recall and code on the demo model, by policy, budget, form and length.

Either tokens are dropped, by policy, budget and share that is kept; or decode steps read some pages, by policy and tokens.

    python benchmarks/longcontext.py --out longcontext_demo.json
    python benchmarks/longcontext.py --policy snapkv --budget uniform ada --keep 0.1 0.2 --form latents heads
    python benchmarks/longcontext.py --policy --retrieve quest infllm --tokens 256 512
    python benchmarks/longcontext.py --chunk 512                           (dropped while a prompt is read)
    python benchmarks/longcontext.py --map --policy snapkv --keep 0.1      (needles by length and depth)
    python benchmarks/longcontext.py --small                               (does the script work?)

Each prompt is Python source with a fact: a number in a comment ("passkey", one needle), one of many assignments ("variable"), one
of many pairs of words and numbers, without source ("pairs"), or a line of words ("copy"). The question is about the first fact,
`--length` tokens back; with `--map` about one at ten depths of prompts of ten lengths. Prompts come from seeds and are the same
for all rows. An answer is right if all its tokens are.

Tokens are dropped once a prompt is read: with its question ("inside" the text that scores tokens), or before it is read
("outside", as for a context that is compressed once). The first 4 and the newest `--recent` tokens always stay and count as kept.

Form "latents" drops a token of a layer for all heads; form "heads" caches every head's keys and values, and each head drops its
own. Where pages are chosen, the prompt is read with full attention, and so the first token of the answer is the same as with the
full cache; `budget` has the tokens that a step reads in each layer but the first two.

`needles` is the share of right answers to passkey, variable and pairs, `all` that of all tasks. The rest is of held-out files of
the standard library, whose first `--length` tokens are the prompt, and the next 256 are taught: `kl` is the divergence of the
next token's distribution from the full cache's, in nats, `agree` the share of tokens that both think likeliest, `loss` the mean
loss. Where pages are chosen they are not measured: many tokens at once choose none.

The second table compares with the full cache and with uniform budgets, case by case: the mean difference and its 95 % interval by
the bootstrap over prompts and over files. The results hold every case."""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx
from jax import Array
from paired import Difference

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo import corpus, tasks
from mla_jax import LLM, SamplingParams, Transformer
from mla_jax.base.batch import Batch, Table
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.paged import PAGE, Pool
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES as RETRIEVERS
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.evicting import Evicting, Eviction
from mla_jax.engine.policy.retrieving import Retrieving

TASKS = ("passkey", "variable", "pairs", "copy")
NEEDLES = TASKS[:3]
TAUGHT = 256  # tokens of a file after the prompt
LONGEST = 8192
ROWS = 16
FORMS = {"latents": "auto", "heads": "naive"}  # what is cached, as the option `attention` has it
BY_QUESTION = [name for name in EVICTION_POLICIES if name != "kvzip"]  # which reads the text twice instead
PLACES = ("inside", "outside")
PAIRS = [
    (policy, rule)
    for policy in EVICTION_POLICIES
    for rule in BUDGET_RULES
    if policy not in ("streaming", "random") or rule == "uniform"
]
LENGTHS, DEPTHS = np.linspace(1000, LONGEST - TAUGHT, 10).astype(int), np.linspace(0, 1, 10)  # of the map


class Question(NamedTuple):
    task: str
    length: int  # tokens of the text
    depth: float  # of the fact: 0 is the beginning
    prompt: list[int]
    asking: int  # tokens of the question, the prompt's last ones
    answer: list[int]


class Found(NamedTuple):
    """The cases of one row, each in the same order in all rows."""

    right: np.ndarray  # bool, of each question
    kl: np.ndarray  # of each file, as the others
    agree: np.ndarray
    loss: np.ndarray


class Ways(NamedTuple):
    """To read less."""

    pairs: Sequence[tuple[str, str]]  # policies that drop tokens, and how layers or heads share
    keeps: Sequence[float]  # shares of the tokens that are kept
    places: Sequence[str]  # of the question
    retrieve: Sequence[str]  # policies that choose pages
    tokens: Sequence[int]  # that a decode step then reads
    recent: int  # newest tokens that always stay
    chunk: int | None = None  # tokens of a prompt after which some are dropped; None: all of them


@dataclasses.dataclass(frozen=True)
class BeforeQuestion(Eviction):
    """Tokens are dropped when all but the question has been read, and then no more."""

    asking: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)  # by a prompt's tokens

    def point(self, request: Request, number: int) -> int:
        return LONGEST if number else len(request.prompt) - self.asking[tuple(request.prompt)]


class Asked(NamedTuple):
    """The same questions and files for all rows of one form and length."""

    llm: LLM
    questions: Sequence[Question]
    files: np.ndarray  # [files length + TAUGHT]: their first tokens
    size: Size
    about: dict[str, Any]

    @classmethod
    def of(cls, form: str, questions: int, length: int | None) -> "Asked":
        """`questions` of each task; without a length those of the map."""
        longest = LONGEST if length is None else length + TAUGHT
        context = -(-longest // PAGE) * PAGE
        # with a small cache of its own: the engines here have theirs
        llm = LLM(draft="off", context=context, cache_tokens=context, attention=FORMS[form])
        asked = mapped(llm, questions) if length is None else drawn(llm, questions, length, context)
        files = held_out(llm, 0 if length is None else 2 * questions, context)
        tokens = sum(len(question.prompt) for question in asked) + files.size
        pages = 2 * tokens // PAGE + ROWS * (context // PAGE)
        size = Size(ROWS, pages, context, llm.model.dispatch.chunk(llm.model))
        return cls(llm, asked, files, size, {"form": form, "length": length or "1,000 to 8,000"})

    def found(self, engine: Engine, full: Sequence[Array] | None) -> tuple[Found, list[Array]]:
        """The cases by this engine, and the files' distributions; `full` are those of the full cache, if this is another."""
        right = self._right(engine)
        if full is None:
            full = [self._taught(engine, tokens) for tokens in self.files]
            found = full
        elif isinstance(engine.policy, Retrieving):
            return Found(right, *(np.full(len(self.files), np.nan) for _ in range(3))), []
        else:
            found = [self._taught(engine, tokens) for tokens in self.files]
        pairs = zip(self.files, full, found, strict=True)
        figures = np.array([compared(tokens[1 - TAUGHT :], *both) for tokens, *both in pairs]).reshape(-1, 3)
        return Found(right, *figures.T), found

    def _right(self, engine: Engine) -> np.ndarray:
        params = [
            SamplingParams(temperature=0, max_tokens=len(one.answer), ignore_eos=True)
            for one in self.questions
        ]
        requests = self.llm.inputs.requests([one.prompt for one in self.questions], params)
        jobs = [engine.submit(request) for request in requests]
        while not all(job.done for job in jobs):
            engine.step()
        return np.array([job.ids == one.answer for job, one in zip(jobs, self.questions, strict=True)])

    def _taught(self, engine: Engine, tokens: np.ndarray) -> Array:
        """The log-probabilities `[TAUGHT-1 V]` of a file's last tokens but the first, once the prompt is read and the engine has
        dropped some of it."""
        request = self.llm.inputs.request(tokens[:-TAUGHT].tolist(), FOLLOWING)
        job = engine.submit(request)
        points = 0
        if isinstance(engine.policy, Evicting):
            chunk = engine.policy.eviction.chunk
            points = 1 + (0 if chunk is None else (len(request.prompt) - 1) // chunk)
        while job.row is None or job.unread or job.pauses < points:
            engine.step()
        engine._land_all()
        assert job.shard.pages.extend(job.held, len(tokens))
        pool, rows = engine.device.state()
        held = np.array([len(request.prompt)], np.int32)  # a token that was chosen since is written over
        table = engine.policy.table([job], 1, engine.size.width)
        pool, found = distribution(engine.programs.model, pool, tokens[None, -TAUGHT:-1], held, table)
        engine.device.keep(pool, rows)
        engine.cancel(job)
        return found

    def row(self, found: Found, **way: Any) -> dict[str, Any]:
        """The figures of one way, with its cases."""
        of_task = {
            task: found.right[[one.task == task for one in self.questions]]
            for task in TASKS
            if any(one.task == task for one in self.questions)
        }
        needles = np.concatenate([right for task, right in of_task.items() if task in NEEDLES])
        shares = {task: float(right.mean()) for task, right in of_task.items()}
        means = {
            name: float(cases.mean())
            for name, cases in found._asdict().items()
            if name != "right" and cases.size
        }
        cases = {name: cases.astype(float).round(6).tolist() for name, cases in found._asdict().items()}
        return (
            self.about
            | way
            | shares
            | {"needles": float(needles.mean()), "all": float(found.right.mean())}
            | means
            | {"cases": cases}
        )


FOLLOWING = SamplingParams(temperature=0, max_tokens=TAUGHT, ignore_eos=True)


@functools.partial(nnx.jit, donate_argnums=1)
def distribution(
    model: Transformer, pool: Pool, tokens: Array, held: Array, table: Table
) -> tuple[Pool, Array]:
    """The log-probabilities of what follows each of the tokens `[1 T]`, behind those that a row has `held`."""
    count = tokens.shape[1]
    batch = Batch.behind(held, held, jnp.full(1, count, jnp.int32), count, table)
    hidden, pool, _ = model(tokens, batch, pool)
    return pool, jax.nn.log_softmax(model.unembed(hidden)[0].astype(jnp.float32))


@jax.jit
def compared(tokens: Array, full: Array, found: Array) -> Array:
    """The mean divergence from `full`, the share of equal choices, and the mean loss of the tokens that came."""
    kl = (jnp.exp(full) * (full - found)).sum(-1).mean()
    agree = (full.argmax(-1) == found.argmax(-1)).mean()
    loss = -jnp.take_along_axis(found, tokens[:, None], -1).mean()
    return jnp.stack([kl, agree, loss])


def held_out(llm: LLM, count: int, length: int) -> np.ndarray:
    """The first `length` tokens of the first files that are long enough."""
    texts = corpus.judged(corpus.sources())
    tokens = (llm.tokenizer.encode(text)[:length] for text in texts if len(text) > 3 * length)
    found = itertools.islice((ids for ids in tokens if len(ids) == length), count)
    return np.array([*found], np.int32).reshape(-1, length)


def writer_of(llm: LLM) -> tasks.Writer:
    text = "\n".join(file.text for file in corpus.sources() if file.path in ("ast.py", "chunk.py"))
    return tasks.Writer(llm.tokenizer.model, np.asarray(llm.tokenizer.encode(text, bos=False)))


def drawn(llm: LLM, count: int, length: int, longest: int) -> list[Question]:
    """`count` questions of each task about a fact `length` tokens back."""
    writer, found = writer_of(llm), []
    for task, seed in itertools.product(TASKS, range(count)):
        prompt, answer = writer.prompt(np.random.default_rng(seed), task, length, longest)
        found.append(Question(task, length, 0.0, prompt, asking(prompt, writer), answer))
    return found


def mapped(llm: LLM, count: int) -> list[Question]:
    """`count` needles at each depth of each length of the map."""
    writer, found = writer_of(llm), []
    for length, depth, seed in itertools.product(LENGTHS.tolist(), DEPTHS.tolist(), range(count)):
        rng = np.random.default_rng([seed, length, round(9 * depth)])
        before = writer.filling(rng, round((length - 200) * depth))
        prompt, answer = writer.prompt(rng, "passkey", length - len(before), LONGEST - len(before))
        prompt = [*prompt[:2], *before, *prompt[2:]]
        found.append(Question("passkey", length, depth, prompt, asking(prompt, writer), answer))
    return found


def asking(prompt: list[int], writer: tasks.Writer) -> int:
    """The number of a prompt's last tokens, from the line of its question on."""
    lines = [i for i, token in enumerate(prompt) if "\n" in writer.tokenizer.decode([token])]
    return len(prompt) - lines[-1]


def measured(ways: Ways, asked: Asked) -> Iterator[dict]:
    """Rows of one form and length."""
    llm = asked.llm
    found, full = asked.found(Engine(Programs(llm.model), asked.size), None)
    yield asked.row(found, question="", policy="none", budget="", kept=1.0)
    lengths = {tuple(one.prompt): one.asking for one in asked.questions}
    lengths |= {tuple(tokens[:-TAUGHT].tolist()): 0 for tokens in asked.files}
    for (policy, budget), place in itertools.product(ways.pairs, ways.places):
        evicts = Selection(EVICTION_POLICIES[policy], BUDGET_RULES[budget], recent=ways.recent)
        programs = Programs(llm.model, evicts=evicts)
        eviction = (
            BeforeQuestion(evicts, 1.0, asking=lengths)
            if place == "outside"
            else Eviction(evicts, 1.0, chunk=ways.chunk)
        )
        evicting = Evicting(programs, asked.size, eviction)
        engine = Engine(programs, asked.size, policy=evicting)
        for keep in ways.keeps:
            # The same engine for each share: the prompts stay in its prefix index
            evicting.eviction = dataclasses.replace(eviction, keep=keep)
            found, _ = asked.found(engine, full)
            yield asked.row(found, question=place, policy=policy, budget=budget, kept=keep)
    if asked.about["form"] == "heads":
        return
    for policy, tokens in itertools.product(ways.retrieve, ways.tokens):
        context = asked.size.context
        other = LLM(retrieve=policy, retrieve_tokens=tokens, context=context, cache_tokens=context)
        programs = Programs(other.model)
        engine = Engine(programs, asked.size, policy=Retrieving(programs, asked.size))
        found, _ = asked.found(engine, full)
        yield asked.row(found, question="inside", policy=policy, budget=tokens, kept=1.0)


def comparisons(rows: Sequence[dict]) -> Iterator[dict]:
    """Each way beside the full cache, and beside the same policy with uniform budgets."""
    named = {
        tuple(row[name] for name in ("form", "length", "question", "policy", "budget", "kept")): row
        for row in rows
    }
    for (form, length, question, policy, budget, kept), row in named.items():
        full = (form, length, "", "none", "", 1.0)
        uniform = (form, length, question, policy, "uniform", kept)
        for name, key in (("full", full), ("uniform", uniform)):
            if key in named and named[key] is not row:
                about = {
                    "form": form,
                    "length": length,
                    "question": question,
                    "policy": policy,
                    "budget": budget,
                    "kept": kept,
                }
                yield about | {"beside": name} | differences(row["cases"], named[key]["cases"])


def differences(mine: dict[str, list], other: dict[str, list]) -> dict[str, str]:
    found = {}
    for name, cases in mine.items():
        pair = np.array(cases), np.array(other[name])
        if pair[0].size > 1 and not np.isnan(pair).any():
            found[name] = str(Difference.of(*pair))
    return found


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--policy", nargs="*", choices=EVICTION_POLICIES, default=BY_QUESTION)
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
        "--question",
        nargs="+",
        choices=PLACES,
        default=["inside"],
        help="whether it is read before tokens are dropped",
    )
    parser.add_argument("--recent", type=int, default=16, help="newest tokens that always stay")
    parser.add_argument(
        "--retrieve", nargs="*", choices=RETRIEVERS, default=list(RETRIEVERS), help="who chooses pages"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 512, 1024], help="that a decode step then reads"
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument(
        "--length", type=int, nargs="+", default=[1000], help="tokens between a fact and its question"
    )
    parser.add_argument("--chunk", type=int, help="tokens of a prompt after which some are dropped")
    parser.add_argument(
        "--map", action="store_true", help="needles at ten depths of ten lengths, in place of --length"
    )
    parser.add_argument("--small", action="store_true", help="one policy of each kind, few and short prompts")
    options = parser.parse_args()
    pairs = [
        (policy, budget) for policy, budget in PAIRS if policy in options.policy and budget in options.budget
    ]
    ways = Ways(
        pairs, options.keep, options.question, options.retrieve, options.tokens, options.recent, options.chunk
    )
    lengths, prompts = [None] if options.map else options.length, options.prompts
    settings = [*itertools.product(options.form, lengths)]
    if options.small:
        ways, prompts = (
            Ways([("snapkv", "uniform")], [0.5], PLACES, ["quest"], [256], 16),
            2,
        )
        settings = [("latents", 200)]
    rows = []
    with contextlib.suppress(KeyboardInterrupt):  # the tables have what was found
        for form, length in settings:
            for row in measured(ways, Asked.of(form, prompts, length)):
                rows.append(row)
                print({name: value for name, value in row.items() if name != "cases"}, flush=True)
    beside, cases = [*comparisons(rows)], [row.pop("cases") for row in rows]
    report.show(beside, None)
    about = {
        "small": options.small,
        "model": "demo",
        "prompts": prompts,
        "recent": ways.recent,
        "chunk": ways.chunk,
    }
    report.show(rows, options.out, benchmark="longcontext", **about, comparisons=beside, cases=cases)


if __name__ == "__main__":
    main()
