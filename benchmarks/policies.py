"""Ways to score tokens, tried densely: the demo model reads each text once with full attention, and its end again with a mask.

    python benchmarks/policies.py --out policies.json
    python benchmarks/policies.py --policy snapkv output --budget uniform ada --form heads
    python benchmarks/policies.py --small            (does the script work?)

`longcontext.py` measures what the engine does; this script has neither pages nor engine, so that an idea is ten lines: a function
of TRIALS, which scores the tokens of one layer. `--policy` takes these and the library's. What is measured is the same: held-out
files, of whose prompt a share is kept and whose next 256 tokens are taught (`kl` to full attention in nats, `agree` of the
likeliest token), and needles (`needles`, the share whose answer's tokens are all the likeliest).

`kvzip` reads the text twice and keeps what the second reading looks at (arXiv 2505.23416); `probe` is a linear map from a token's
latent to the logarithm of that score, fitted on other files (KVzap's idea, arXiv 2601.07891, on latents). Needles are asked for
before tokens are dropped (inside), after it (outside), or after it with tokens scored by another such question (generic)."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report
from dense import CHUNK, Read, follow, keeps, log_probabilities, padded, read
from jax import Array
from longcontext import NEEDLES, TAUGHT, asking, comparisons, held_out, writer_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo import corpus
from mla_jax import LLM, Transformer
from mla_jax.cache import evict
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES, Seen, SnapKV
from mla_jax.model import rope

TAIL = 32  # tokens, the most of a question and its answer
POOLED = SnapKV()


class View(NamedTuple):
    """One layer, as a trial sees it."""

    weights: Array  # [W N S] of the newest queries
    k: Array  # [S N H]
    v: Array  # [S N V]
    latent: Array  # [S R+E]
    out: Array  # [N V D]
    held: Array  # tokens


Trial = Callable[[View], Array]  # scores [M S] of heads or, M = 1, of all


def output_norms(view: View) -> Array:
    """`[S N]`: the L2 norm of each head's value times W_o."""
    return jnp.linalg.norm(jnp.einsum("snv,nvd->snd", view.v, view.out), axis=-1)


def summed_outputs(view: View, values: Array) -> Array:
    """`[1 S]`: the norm of the sum of all heads' weighed values, which is what a layer loses with a latent."""
    weighed = view.weights.mean(0).T[..., None] * values
    return jnp.linalg.norm(jnp.einsum("snv,nvd->sd", weighed, view.out), axis=-1)[None]


def output(view: View) -> Array:
    return summed_outputs(view, view.v)


def output_shift(view: View) -> Array:
    """As `output`, and what the other tokens' larger weights change."""
    mean = jnp.einsum("ns,snv->nv", view.weights.mean(0), view.v)
    return summed_outputs(view, view.v - mean)


def output_share(view: View) -> Array:
    """As `output`, as a share of the layer's sum: layers are alike."""
    found = output(view)
    return found / found.sum()


def worth(view: View) -> Array:
    """The sum over heads of a weight times the norm of the head's output."""
    return (view.weights.mean(0) * output_norms(view).T).sum(0, keepdims=True)


def weighed_heads(view: View) -> Array:
    """Each head counts by the mean norm of its output."""
    mean = jnp.einsum("ns,sn->n", view.weights.mean(0), output_norms(view))
    return jnp.einsum("ns,n->s", view.weights.mean(0), mean / mean.sum())[None]


def root_mean_square(view: View) -> Array:
    """Weights of queries and heads by their squares: a few that look for a token count more."""
    return jnp.sqrt(jnp.square(view.weights).mean((0, 1)))[None]


def largest_query(view: View) -> Array:
    return view.weights.max(0).mean(0, keepdims=True)


TRIALS: dict[str, Trial] = {
    "output": output,
    "output shift": output_shift,
    "output share": output_share,
    "worth": worth,
    "weighed heads": weighed_heads,
    "root mean square": root_mean_square,
    "largest query": largest_query,
}
FITTED = ("kvzip", "probe", "probe x snapkv")


class Scored(NamedTuple):
    scores: Array  # [L 1 M S]
    first: float | None  # as of a policy


@functools.partial(jax.jit, static_argnames=("name", "heads"))
def scored(
    text: Read, out: Array, q: Array, end: Array, held: Array, scale: float, name: str, heads: bool
) -> Array:
    """`[L 1 M S]`: of the `held` tokens of a text by the queries `[L W N H]`, the last of which is of token `end` - 1."""
    size, window = text.k.shape[1], q.shape[1]
    slot = jnp.arange(size)
    at = end - window + jnp.arange(window)
    sees = (slot <= at[:, None, None]) & (slot < held)
    policy = EVICTION_POLICIES.get(name)

    def of_layer(number: int) -> Array:
        logits = jnp.einsum("tnh,snh->tns", q[number], text.k[number]) * scale
        weights = jnp.where(sees, jax.nn.softmax(jnp.where(sees, logits, -jnp.inf), axis=-1), 0)
        view = View(weights, text.k[number], text.v[number], text.latent[number], out[number], held)
        if policy is None:
            found = POOLED.finished(TRIALS[name](view)[None], held[None, None])
        else:
            found = of_policy(policy, view, slot, heads)
            found = found if heads else evict.shared(found, policy.stages)
        return found

    return jnp.stack([of_layer(number) for number in range(len(text.k))])


def of_policy(policy: evict.EvictionPolicy, view: View, slot: Array, heads: bool) -> Array:
    keys = view.k if heads else view.latent[:, None]
    held = (slot < view.held)[:, None, None]
    directions = jnp.where(held, keys / jnp.linalg.norm(keys, axis=-1, keepdims=True), 0)
    values = jnp.einsum("snv,nvd->snd", view.v, view.out) if policy.needs_worth else None
    seen = Seen(
        weights=view.weights[None, -max(policy.window, 1) :],
        keys=keys[None],
        anchor=directions.sum(0)[None] / view.held,
        worth=None if values is None else jnp.abs(values).sum(-1)[None],
        slot=slot,
        held=view.held[None, None],
    )
    return policy.finished(policy.of_block(seen), view.held[None, None])


class Case(NamedTuple):
    """A text, of whose first `held` tokens some are dropped, and what then follows."""

    task: str
    tokens: np.ndarray  # [S]
    end: int  # tokens behind which the scoring queries end
    held: int
    asked: np.ndarray  # tokens in whose queries tokens are scored, if these do not stay
    tail: np.ndarray  # [T]: tokens that follow
    judged: int  # the last ones of them, which are an answer


@dataclasses.dataclass
class Bench:
    model: Transformer
    cases: list[Case]
    size: int  # of a text

    def __post_init__(self) -> None:
        self.out = jnp.stack(
            [
                jnp.moveaxis(
                    block.attn.o_proj[...].reshape(block.attn.o_proj.shape[0], *block.attn.uv.shape[:2]),
                    0,
                    -1,
                )
                for block in self.model.layers
            ]
        )
        self.scale = float(rope.softmax_scale(self.model.config))
        self.probe: np.ndarray | None = None
        self.rereads: dict[int, Array] = {}  # of the present text, by the tokens that are scored

    def fit(self, texts: Sequence[np.ndarray]) -> None:
        """The linear map of each layer `[L R+E+1]`, by least squares."""
        grams: Any = 0
        for tokens in texts:
            text = read(self.model, padded(tokens, self.size))
            target = jnp.log(self.reread(text, tokens).mean(1) + 1e-6)
            latent = text.latent[:, : len(tokens)]
            latent = jnp.concatenate([latent, jnp.ones((*latent.shape[:2], 1))], -1)
            gram = (
                jnp.einsum("lsi,lsj->lij", latent, latent),
                jnp.einsum("lsi,ls->li", latent, target[:, : len(tokens)]),
            )
            print("fitted to one more file", flush=True)
            grams = gram if grams == 0 else jax.tree.map(jnp.add, grams, gram)
        self.probe = np.stack(
            [np.linalg.lstsq(a, b, rcond=1e-6)[0] for a, b in zip(*map(np.asarray, grams), strict=True)]
        )

    def reread(self, text: Read, tokens: np.ndarray) -> Array:
        """KVzip's score `[L N S]`: the largest weight that a token gets when the text is read once more behind itself."""
        everything, most = jnp.ones((len(text.k), 1, self.size), bool), []
        for piece in np.array_split(tokens, -(-len(tokens) // 1024)):
            count, start = jnp.int32(len(piece)), jnp.int32(len(tokens))
            found = follow(self.model, text, padded(piece, 1024), count, start, everything)
            most.append(found.most)
        return functools.reduce(jnp.maximum, most)

    def scores(self, name: str, case: Case, text: Read, heads: bool) -> Scored:
        held = jnp.int32(case.held)
        if name in FITTED:
            return Scored(self.fitted(name, case, text, heads), None)
        queries, end = text.q, case.end
        if case.asked.size:
            everything = jnp.ones((len(text.k), 1, self.size), bool)
            count = jnp.int32(len(case.asked))
            queries = follow(self.model, text, jnp.asarray(case.asked), count, held, everything).q
            end = len(case.asked)
        policy = EVICTION_POLICIES.get(name)
        window = max(policy.window if policy else POOLED.window, 1)
        at = jax.lax.dynamic_slice_in_dim(queries, end - window, window, axis=1)
        last = jnp.int32(case.end + len(case.asked))
        found = scored(text, self.out, at, last, held, self.scale, name, heads)
        return Scored(found, None if policy is None else policy.first)

    def fitted(self, name: str, case: Case, text: Read, heads: bool) -> Array:
        if name == "kvzip":
            if case.held not in self.rereads:
                self.rereads[case.held] = self.reread(text, case.tokens[: case.held])
            most = self.rereads[case.held]
            found = most if heads else most.mean(1, keepdims=True)
        else:
            assert self.probe is not None
            found = jnp.exp(jnp.einsum("lsi,li->ls", text.latent, self.probe[:, :-1]) + self.probe[:, -1:])[
                :, None
            ]
        pooled = POOLED.finished(found, jnp.int32(case.held)[None, None])[:, None]
        if "snapkv" in name:
            pooled = pooled * self.scores("snapkv", case, text, heads=False).scores
        return pooled

    def found(self, case: Case, text: Read, keeps: Array) -> np.ndarray:
        """The log-probabilities of what follows each token of the tail."""
        tail = padded(case.tail, TAIL if case.judged else TAUGHT)
        count, held = jnp.int32(len(case.tail)), jnp.int32(case.held)
        hidden = follow(self.model, text, tail, count, held, keeps).hidden
        return np.asarray(log_probabilities(self.model, hidden))[: len(case.tail)]

    def rows(
        self, names: Sequence[str], budgets: Sequence[str], shares: Sequence[float], forms: Sequence[str]
    ) -> Iterator[dict]:
        found: dict[tuple, dict[str, list]] = {}
        before: np.ndarray | None = None
        for done, case in enumerate(self.cases):
            if case.tokens is not before:
                before, text = case.tokens, read(self.model, padded(case.tokens, self.size))
                self.rereads.clear()
            everything = jnp.ones((len(text.k), 1, self.size), bool)
            full = self.found(case, text, everything)
            note(found, ("", "none", "", 1.0), case, full, full)
            for form, name in itertools.product(forms, names):
                if form == "heads" and name not in EVICTION_POLICIES and name != "kvzip":
                    continue
                scores, first = self.scores(name, case, text, form == "heads")
                for budget, share in itertools.product(budgets, shares):
                    kept = keeps(scores, jnp.int32(case.held), jnp.float32(share), budget, first)
                    note(found, (form, name, budget, share), case, full, self.found(case, text, kept))
            print(f"{done + 1} of {len(self.cases)}: {case.task}", flush=True)
        for (form, policy, budget, share), cases in found.items():
            about = {"form": form, "policy": policy, "budget": budget, "kept": share}
            yield about | {name: float(np.mean(each)) for name, each in cases.items()} | {"cases": cases}


def note(
    found: dict[tuple, dict[str, list]], key: tuple, case: Case, full: np.ndarray, mine: np.ndarray
) -> None:
    """Adds the figures of one case to those of one way."""
    cases = found.setdefault(key, {})
    if case.judged:
        answer, said = case.tail[1:][-case.judged :], mine[:-1].argmax(-1)[-case.judged :]
        cases.setdefault(case.task, []).append(float((said == answer).all()))
        return
    cases.setdefault("kl", []).append(float((np.exp(full) * (full - mine)).sum(-1).mean()))
    cases.setdefault("agree", []).append(float((full.argmax(-1) == mine.argmax(-1)).mean()))


def cases_of(llm: LLM, files: int, prompts: int, length: int) -> Iterator[Case]:
    nothing = np.zeros(0, np.int32)
    for tokens in held_out(llm, files, length + TAUGHT):
        yield Case("file", tokens[:length], length, length, nothing, tokens[length:], 0)
    writer = writer_of(llm)
    for task, seed in itertools.product(NEEDLES, range(prompts)):
        prompt, answer = writer.prompt(np.random.default_rng(seed), task, length, length + 128)
        other, _ = writer.prompt(np.random.default_rng(seed + 1000), task, length, length + 128)
        question, generic = asking(prompt, writer), asking(other, writer)
        whole, context = np.array(prompt, np.int32), len(prompt) - question
        tail = np.array([*prompt[-1:], *answer], np.int32)
        later = np.array([*prompt[context:], *answer], np.int32)
        asked = np.array(other[-max(generic, POOLED.window) :], np.int32)
        yield Case("inside", whole, len(whole), len(whole) - 1, nothing, tail, len(answer))
        yield Case("outside", whole, context, context, nothing, later, len(answer))
        yield Case("generic", whole, context, context, asked, later, len(answer))


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    names = [*dict.fromkeys([*EVICTION_POLICIES, *TRIALS, *FITTED])]
    parser.add_argument(
        "--policy", nargs="+", choices=names, default=["snapkv", "critical", *TRIALS, *FITTED]
    )
    parser.add_argument("--budget", nargs="+", choices=BUDGET_RULES, default=["uniform", "ada"])
    parser.add_argument("--form", nargs="+", choices=("latents", "heads"), default=["latents"])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=12, help="of each task and place of the question")
    parser.add_argument("--length", type=int, default=4000, help="tokens of a text")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    files, prompts, length = (
        (2, 1, 600) if options.small else (options.files, options.prompts, options.length)
    )
    llm = LLM(
        None, dtype="float32", draft="off", context=length + 2 * TAUGHT, cache_tokens=length + 2 * TAUGHT
    )
    size = -(-(length + TAUGHT) // CHUNK) * CHUNK
    bench = Bench(llm.model, [*cases_of(llm, files, prompts, length)], size)
    if any("probe" in name for name in options.policy):
        bench.fit([*training(llm, files, length)])
    rows = [*bench.rows(options.policy, options.budget, options.keep, options.form)]
    beside = [*comparisons([row | {"length": length, "question": ""} for row in rows])]
    cases = [row.pop("cases") for row in rows]
    report.show(beside, None)
    report.show(
        rows, options.out, benchmark="policies", model="demo", length=length, comparisons=beside, cases=cases
    )


def training(llm: LLM, count: int, length: int) -> Iterator[np.ndarray]:
    """The first tokens of files that are not held out."""
    judged = {*corpus.judged(corpus.sources())}
    texts = (
        file.text for file in corpus.sources() if file.text not in judged and len(file.text) > 5 * length
    )
    tokens = (np.array(llm.tokenizer.encode(text)[:length], np.int32) for text in texts)
    return itertools.islice((ids for ids in tokens if len(ids) == length), count)


if __name__ == "__main__":
    main()
