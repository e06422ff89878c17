"""Decoding with drafts, next to plain decoding: V2-Lite's shape with one MTP layer, random weights, 4k cached tokens.

    python benchmarks/drafts.py --out drafts.json
    python benchmarks/drafts.py --batch 1 --acceptance 0.85 --format Q4_K
    python benchmarks/drafts.py --demo --out drafts_demo.json    (the demo model: what really stands, on held-out prompts)
    python benchmarks/drafts.py --small                          (a tiny model, on a CPU: does the script work?)

Random weights guess nothing right, so a coin says which guesses stand: each does with probability p, if all before it do.
Guesses are made, read and compared as real ones are, so the time is right. The tokens mean nothing.

A dispatch is 32 tokens a row, and is sent before the tokens of the one before are read. Columns:

- `ms a pass` counts the passes of the slowest row of each dispatch, for which the others wait.
- `of plain` is tokens/s divided by plain decoding's.
- `predicted ms` is the time of a pass by the engine's cost model.
- `allowed` is what that model expects of `of plain`: 1 + p + .. + p^k tokens a pass, at these times.
- `chosen k` is the number of guesses that the model takes for this p.

A pass reads each expert that its tokens chose once, for all of them. A lone row's pass with k guesses reads up to 1 + k times the
experts of a plain one. The tokens of a large batch touch nearly all experts in a plain pass already. The same holds for experts
on the CPU; they are not measured here."""

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import report
from decode import DISPATCHES, HELD, Sequences, admitted, entry, randomized, sequences
from jaxtyping import Array, Bool, Int
from random_models import random_model

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo import corpus
from mla_jax import LLM, Config, SamplingParams
from mla_jax.cache.paged import PAGE
from mla_jax.decode import speculative
from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import STEPS, Chosen, Found
from mla_jax.decode.packing import of_shards
from mla_jax.decode.rows import ADMITTED, Entry, default_entries
from mla_jax.decode.speculative import Draft, Mtp, Proposal
from mla_jax.engine.core.drafting import Drafting
from mla_jax.model.parts import cost_of

LITE = Config.preset("v2_lite", num_nextn_predict_layers=1)
TINY = Config.preset("tiny", num_hidden_layers=2, num_nextn_predict_layers=1)
TIMED = DISPATCHES - 2  # dispatches, after one that is not
HEADS, TOKENS = 50, 96  # held-out functions that the demo model continues, and tokens of each


@dataclasses.dataclass(frozen=True)
class Forced(Mtp):
    """As the model's layer, but a guess is odd if it is to stand: by a coin for each row and position.

    The probability is in the first half of a row's seed, which a greedy row does not need."""

    def propose(self, given: Draft) -> Proposal:
        pool, guesses, counts = super().propose(given)
        going, asked = given.going, given.asked
        place = going.position[:, None] + 1 + jnp.arange(self.most)
        stands = scrambled(asked.at[:, None], place) < jnp.asarray(asked.entry.sampling.seed)[:, :1]
        return pool, guesses // 2 * 2 + stands, counts


def scrambled(row: Int[Array, "B 1"], place: Int[Array, "B K"]) -> Array:
    """32 bits for each row and place, by multiplying and shifting."""
    bits = row.astype(jnp.uint32) * np.uint32(0x9E3779B1) ^ place.astype(jnp.uint32) * np.uint32(0x85EBCA77)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    return bits ^ (bits >> 15)


def is_odd(guess: Int[Array, " B"], drawn: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Replaces `speculative.stands`."""
    return guess % 2 == 1


class Measured(NamedTuple):
    """Some dispatches, sent ahead of one another."""

    seconds: float
    tokens: int
    row_passes: int  # of all rows
    passes: int  # of the loop

    @classmethod
    def of(cls, seconds: float, found: Sequence[Chosen], rows: int) -> "Measured":
        assert all(chosen.count.sum() == rows * STEPS for chosen in found), "a row has ended"
        passes = [chosen.count - chosen.stood.sum(1) for chosen in found]
        tokens = sum(int(chosen.count.sum()) for chosen in found)
        return cls(
            seconds, tokens, sum(int(each.sum()) for each in passes), sum(int(each.max()) for each in passes)
        )

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def columns(self) -> dict:
        each = self.tokens / self.row_passes, 1e3 * self.seconds / self.passes
        return {"tokens/s": round(self.rate), "tokens a pass": each[0], "ms a pass": each[1]}


class Bench:
    """A model with random weights, and the programs that are compared."""

    def __init__(self, config: Config, format: str):
        self.model, drafter = random_model(config, format, mtp=True), Forced()
        self.plain, self.forced = Programs(self.model), Programs(self.model, drafter=drafter)
        self.drafting = Drafting(cost_of(self.model), drafter)

    def compile(self, batches: Sequence[int]) -> None:
        """Every program that is timed, all at the same time: one of each kind a batch serves every number of guesses."""
        started = []
        for count in batches:
            pages = -(-HELD // PAGE)
            pool, rows = self.plain.new(count, count * pages)
            numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((count,), (count, pages), (), ())]
            started.append(self.forced.run_with_drafts.start(pool, rows, *numbers))
            started.append(self.plain.run.start(pool, rows, *numbers[:3]))
            started.append(
                self.plain.admit.start(
                    rows, *(numbers[0].update(shape=(ADMITTED,)),), default_entries(ADMITTED)
                )
            )
        for future in started:
            future.result()

    def measure(self, found: Sequences, drafts: int = 0, acceptance: float = 0.0) -> Measured:
        """Rows of `found`, admitted anew; without drafts, plain decoding."""
        return measured_rows(found, self.forced if drafts else self.plain, drafts, acceptance)

    def expected(self, rows: int, drafts: int, acceptance: float) -> float:
        """Times as fast as plain, by the cost model."""
        tokens = float(np.power(acceptance, np.arange(drafts + 1)).sum())
        return tokens * self.drafting.seconds(rows, HELD, 0) / self.drafting.seconds(rows, HELD, drafts)

    def chosen(self, rows: int, acceptance: float) -> int:
        """The guesses a pass that the cost model takes."""
        most = self.drafting.drafter.most
        return max(range(most + 1), key=lambda drafts: self.expected(rows, drafts, acceptance))


def measured_rows(found: Sequences, programs: Programs, drafts: int, acceptance: float) -> Measured:
    """Measures these programs on the rows of `found`, admitted anew."""
    restart(found, acceptance)
    shards = programs.spread.shards
    numbers = [of_shards([np.int32(number)] * shards) for number in (STEPS, drafts)]

    def send() -> Found:
        given = found.pool, found.rows, found.at, found.page_table
        sent = programs.run_with_drafts(*given, *numbers) if drafts else programs.run(*given, numbers[0])
        found.pool, found.rows, chosen = sent
        return chosen

    return timed(send, found.count)


def restart(found: Sequences, acceptance: float) -> None:
    """Admits the rows again, over the tokens that are in their pages; each guess stands with this probability."""
    programs = found.programs
    each = found.at.shape[-1]
    held = found.tables.shape[-1] * PAGE - DISPATCHES * STEPS
    rows = admitted(
        programs, found.rows, each, lambda first: with_acceptance(entry(first, held, 0.0, 1.0), acceptance)
    )
    found.rows = dataclasses.replace(rows, last=randomized(programs.spread, rows.last))


def with_acceptance(given: Entry, acceptance: float) -> Entry:
    seed = np.full((ADMITTED, 2), int(acceptance * (2**32 - 1)), np.uint32)
    return dataclasses.replace(given, sampling=dataclasses.replace(given.sampling, seed=seed))


def timed(send: Callable[[], Found], rows: int) -> Measured:
    jax.block_until_ready(send())
    start = time.perf_counter()
    sent = [send() for _ in range(TIMED)]
    jax.block_until_ready(sent[-1])
    return Measured.of(time.perf_counter() - start, [found.tokens() for found in sent], rows)


def measured(
    config: Config, batches: Sequence[int], acceptances: Sequence[float], format: str
) -> Iterator[dict]:
    """A row for plain decoding, then one for each acceptance and number of guesses, for each batch."""
    with mock.patch.object(speculative, "stands", is_odd):  # until all programs are traced
        bench, start = Bench(config, format), time.perf_counter()
        bench.compile(batches)
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    for batch in batches:
        found = sequences(bench.plain, batch)
        plain = bench.measure(found)
        predicted = {
            drafts: 1e3 * bench.drafting.seconds(batch, HELD, drafts) for drafts in range(Forced().most + 1)
        }
        yield {"batch": batch, "acceptance": None, "k": 0} | plain.columns() | {"predicted ms": predicted[0]}
        for acceptance, drafts in itertools.product(acceptances, range(1, Forced().most + 1)):
            drafted = bench.measure(found, drafts, acceptance)
            ratios = {
                "of plain": drafted.rate / plain.rate,
                "allowed": bench.expected(batch, drafts, acceptance),
            }
            row = {"batch": batch, "acceptance": acceptance, "k": drafts} | drafted.columns() | ratios
            yield row | {"predicted ms": predicted[drafts], "chosen k": bench.chosen(batch, acceptance)}


def demo(count: int = HEADS, tokens: int = TOKENS) -> Iterator[dict]:
    """Real acceptance: the demo model continues held-out function heads, one at a time, with each drafter in turn."""
    heads = corpus.held_out_heads(corpus.sources(), count)
    most = Forced().most
    llms = {
        draft: LLM(draft=draft, draft_tokens=None if draft == "off" else most)
        for draft in ("off", "mtp", "lookup")
    }
    for temperature in (0.0, 1.0):
        given = SamplingParams(
            temperature=temperature, top_k=0, top_p=1.0, seed=1, max_tokens=tokens, ignore_eos=True
        )
        runs = {draft: Continued(llm, given) for draft, llm in llms.items()}
        for run in runs.values():
            run.llm.generate(heads[0], given)  # compiles
            run.before = dataclasses.replace(run.llm.stats())
        for head, run in itertools.product(heads, runs.values()):
            run.take(head)
        for draft, run in runs.items():
            ratio = runs["off"].seconds / run.seconds
            row = {
                "draft": draft,
                "temperature": temperature,
                "tokens/s": round(count * tokens / run.seconds),
                "of plain": ratio,
            }
            yield row | run.shares(most) | {"as plain": sum(map(list.__eq__, run.ids, runs["off"].ids))}


class Continued:
    """Prompts that one model has continued, and what came of its guesses since `before`."""

    def __init__(self, llm: LLM, given: SamplingParams):
        self.llm, self.given, self.before = llm, given, llm.stats()
        self.seconds, self.ids = 0.0, []

    def take(self, prompt: str) -> None:
        start = time.perf_counter()
        (output,) = self.llm.generate(prompt, self.given)
        self.seconds += time.perf_counter() - start
        self.ids.append(output.token_ids)

    def shares(self, most: int) -> dict:
        """Of the guesses in each place, how many stood; None where there were none."""
        after, before = self.llm.stats(), self.before
        drafted = after.drafted - before.drafted
        stood = after.stood - before.stood
        passes = after.passes - before.passes
        places = {f"place {i + 1}": float(stood[i] / drafted[i]) if drafted[i] else None for i in range(most)}
        return places | {"tokens a pass": float(1 + stood.sum() / passes)}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="rows")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[0.5, 0.7, 0.85, 0.95], help="of each guess"
    )
    parser.add_argument("--format", default="bf16", help="of the weights, as random_models.py makes them")
    parser.add_argument("--demo", action="store_true", help="the demo model with real guesses instead")
    parser.add_argument("--small", action="store_true", help="a tiny model and few rows")
    options = parser.parse_args()
    small = TINY, [1, 2], [0.5, 0.95]
    found = measured(*(small if options.small else (LITE, options.batch, options.acceptance)), options.format)
    if options.demo:
        found = demo(2, 16) if options.small else demo()
    rows = []
    with contextlib.suppress(KeyboardInterrupt):  # the table has what was found
        for row in found:
            rows.append(row)
            print(row, flush=True)
    about = (
        {"model": "demo"}
        if options.demo
        else {"model": "V2-Lite shape, random weights", "format": options.format, "held": HELD}
    )
    report.show(rows, options.out, benchmark="drafts", small=options.small, **about)


if __name__ == "__main__":
    main()
