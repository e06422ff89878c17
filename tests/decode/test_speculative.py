"""Drafts change how fast tokens come, never which: every drafter and every number of drafts beside plain decoding."""

import dataclasses
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES, tensors, write

from mla_jax.base.options import MAX_ENDS, MOST_DRAFTS
from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import STEPS, Chosen
from mla_jax.decode.rows import ADMITTED, default_entries, taken
from mla_jax.decode.speculative import NOBODY, Drafter, Lookup, Mtp
from mla_jax.weights.load import load

PROMPTS = [[5, 6, 7, 8, 9, 10, 5, 6, 7, 8], [20], [33, 34, 33, 34, 33], [40, 41, 42]]
LIMITS = (60, 33, 45, 20)
ROWS, PAGES, HEIGHT, CONTEXT = len(PROMPTS), 2, 6, 128
AT = np.array([4, 1, 0, 3], np.int32)
WORDS = 96


@dataclass(frozen=True)
class Told(Drafter):
    """Drafts the true continuation, except that every `wrong`-th draft is another token."""

    truth: tuple[tuple[int, ...], ...] = ()  # of each row of the table, by position
    wrong: int = 0

    def propose(self, given):
        _model, going, asked, _token, counts = given
        place = going.position[:, None] + 1 + jnp.arange(self.most)
        guesses = jnp.asarray(self.truth)[asked.at[:, None], jnp.minimum(place, CONTEXT - 1)]
        if self.wrong:
            guesses = jnp.where(place % self.wrong == 0, (guesses + 1) % WORDS, guesses)
        return going.pool, guesses, counts


@dataclass(frozen=True)
class Random(Drafter):
    """Guesses anything."""

    def propose(self, given):
        _model, going, _asked, token, counts = given
        guesses = jax.random.randint(jax.random.key(0), (token.size, self.most), 0, WORDS) + going.position[:, None]
        return going.pool, guesses % WORDS, counts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return load(write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True)))


class Served:
    """Rows with their prompts read; `told` is what must not depend on drafts."""

    def __init__(self, programs: Programs, temperature: float = 0.0, ends: int = -1, **sampling):
        self.programs = programs
        self.table = np.random.default_rng(0).permutation(ROWS * PAGES).reshape(ROWS, PAGES).astype(np.int32)
        self.pool, self.rows = programs.new(HEIGHT, ROWS * PAGES, CONTEXT)
        entry, texts = default_entries(ADMITTED), np.zeros((ADMITTED, CONTEXT), np.int32)
        for text, prompt in zip(texts, PROMPTS, strict=False):
            text[: len(prompt)] = prompt
        given = {name: np.full(ADMITTED, value, getattr(entry.sampling, name).dtype) for name, value in sampling.items()}
        given["temperature"] = np.full(ADMITTED, temperature, np.float32)
        given["seed"] = np.stack([np.zeros(ADMITTED), np.arange(ADMITTED)], 1).astype(np.uint32)
        given["ends"] = np.full((ADMITTED, MAX_ENDS), ends, np.int32)
        entry = dataclasses.replace(
            entry,
            prompt=np.array([*map(len, PROMPTS), *[0] * (ADMITTED - ROWS)], np.int32),
            limit=np.array([*LIMITS, *[0] * (ADMITTED - ROWS)], np.int32),
            logprobs=np.ones(ADMITTED, bool),
            sampling=dataclasses.replace(entry.sampling, **given),
        )
        at = np.array([*AT, *[HEIGHT] * (ADMITTED - ROWS)], np.int32)
        self.rows = programs.admit(self.rows, at, entry, texts)
        line = np.array([token for prompt in PROMPTS for token in prompt] + [0] * 5, np.int32)
        counts = np.array([len(prompt) for prompt in PROMPTS], np.int32)
        self.pool, self.rows, _ = programs.prefill(self.pool, self.rows, AT, line, counts, self.table, None)
        self.ids, self.logprobs = [[] for _ in PROMPTS], [[] for _ in PROMPTS]
        self.drafted, self.stood, self.passes = np.zeros(MOST_DRAFTS, int), np.zeros(MOST_DRAFTS, int), 0

    def run(self, steps: int, drafts: int | None = None) -> Chosen:
        """One dispatch; `drafts` None: plain decoding."""
        args = self.pool, self.rows, AT, self.table, np.int32(steps)
        if drafts is None:
            self.pool, self.rows, found = self.programs.run(*args)
        else:
            self.pool, self.rows, found = self.programs.run_with_drafts(*args, np.int32(drafts))
        chosen, likely = found.tokens(), found.logprobs()
        for i, count in enumerate(chosen.count.tolist()):
            self.ids[i] += chosen.tokens[i, :count].tolist()
            self.logprobs[i] += likely.logprobs[i, :count].tolist()
        self.drafted += chosen.drafted.sum(0)
        self.stood += chosen.stood.sum(0)
        return chosen

    def finish(self, steps: int = STEPS, drafts: int | None = None) -> "Served":
        while not self.run(steps, drafts).done.all():
            pass
        return self

    def told(self) -> dict[str, np.ndarray]:
        _, is_open, last = taken(self.rows, jnp.asarray(AT))
        told = {name: np.asarray(value) for name, value in vars(is_open).items()}
        return told | {"last": np.asarray(last), "seen": np.asarray(self.rows.seen)[AT], "text": np.asarray(self.rows.text)[AT]}


def assert_same(one: Served, other: Served):
    assert one.ids == other.ids
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    for name, value in one.told().items():
        np.testing.assert_allclose(value, other.told()[name], atol=2e-5, err_msg=name)


DEEP = pytest.mark.deep
SAMPLINGS = {
    "greedy": {},
    "cold": {"temperature": 0.3},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "top-k and top-p": {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
}


def truth(served: Served) -> tuple[tuple[int, ...], ...]:
    """The continuation of each row of the table."""
    found = np.zeros((HEIGHT, CONTEXT), int)
    for at, prompt, ids in zip(AT, PROMPTS, served.ids, strict=True):
        found[at, : len(prompt + ids)] = prompt + ids
    return tuple(map(tuple, found.tolist()))


@pytest.fixture(scope="module")
def programs_of(model):
    """`programs_of(drafter)`, compiled once."""
    return cache(lambda drafter: Programs(model, drafter=drafter))


@pytest.mark.deep
@pytest.mark.parametrize("sampling", ["greedy", *(pytest.param(name, marks=DEEP) for name in SAMPLINGS if name != "greedy")])
def test_tokens_log_probabilities_and_rows_are_those_of_plain_decoding(programs_of, sampling):
    plain = Served(programs_of(NOBODY), **SAMPLINGS[sampling]).finish()
    known = truth(plain)
    told = [Told(7, known), Told(3, known, wrong=4)] if sampling in ("greedy", "penalties") else []
    for drafter in (Mtp(3), Lookup(3), Random(3), *told):
        drafted = Served(programs_of(drafter), **SAMPLINGS[sampling]).finish(drafts=drafter.most)
        assert_same(drafted, plain)


@pytest.mark.deep
@pytest.mark.parametrize("drafts", [0, 1, 2, 5, 7])
def test_every_number_of_drafts_and_every_cut_gives_the_same(model, drafts):
    plain = Served(Programs(model), temperature=1.0).finish()
    programs = Programs(model, drafter=Told(7, truth(plain), wrong=5))
    for steps in (1, 6, STEPS):
        served = Served(programs, temperature=1.0).finish(steps, drafts)
        assert_same(served, plain)
        assert (served.drafted[drafts:] == 0).all()


@pytest.mark.deep
def test_runs_with_and_without_drafts_may_take_turns(model):
    plain = Served(Programs(model), temperature=0.8).finish()
    for drafter in (Mtp(2), Told(5, truth(plain))):
        served = Served(Programs(model, drafter=drafter), temperature=0.8)
        for turn in range(20):
            served.run(4, drafts=2 if turn % 2 else None)
        assert_same(served, plain)


@pytest.mark.deep
def test_a_drafter_that_is_always_right_takes_as_few_passes_as_there_is_room_for(model):
    plain = Served(Programs(model)).finish()
    served = Served(Programs(model, drafter=Told(3, truth(plain))))
    chosen = served.run(STEPS, 3)
    assert chosen.count.tolist() == [32, 32, 32, 20]
    passes = chosen.count - chosen.stood.sum(1)
    assert passes.tolist() == [8, 8, 8, 6]  # a last token is never a draft: it would be read for nothing
    np.testing.assert_array_equal(chosen.stood, chosen.drafted)


def test_a_row_ends_at_an_end_token_among_its_drafts(model):
    free = Served(Programs(model)).finish()
    end = free.ids[0][4]
    plain = Served(Programs(model), ends=end).finish()
    served = Served(Programs(model, drafter=Told(7, truth(free))), ends=end).finish(drafts=7)
    assert_same(served, plain)
    assert served.ids[0] == free.ids[0][: free.ids[0].index(end) + 1]


@DEEP
def test_the_layers_cache_holds_what_the_models_own_states_give_whatever_was_guessed(model):
    """Of every token but the newest: as after reading the whole text at once."""
    plain = Served(Programs(model, drafter=Mtp(3)), temperature=1.0).finish()
    for drafts, steps in ((3, STEPS), (1, 5)):
        drafted = Served(Programs(model, drafter=Mtp(3)), temperature=1.0).finish(steps, drafts)
        np.testing.assert_allclose(entries(drafted), entries(plain), atol=2e-5)
    mixed = Served(Programs(model, drafter=Mtp(3)), temperature=1.0)
    for turn in range(20):
        mixed.run(5, None if turn % 2 else turn % 4)
    np.testing.assert_allclose(entries(mixed), entries(plain), atol=2e-5)
    assert np.abs(entries(plain)).sum(-1).min() > 0


def entries(served: Served) -> np.ndarray:
    """The MTP layer's cache entries for the tokens of each row except the newest."""
    first, found = 2 * ROWS * PAGES, []
    for i, held in enumerate(served.told()["held"].tolist()):
        pages = np.asarray(served.pool["c_kv"])[served.table[i] + first]
        found.append(pages.reshape(-1, pages.shape[-1])[: held - 1])
    return np.concatenate(found)
