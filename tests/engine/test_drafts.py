"""Drafts in the engine: whatever is guessed, by whom, and however often that changes, a request gets the tokens that it gets
without."""

import dataclasses
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES, tensors, write
from serving import drafting_engine, finish, nothing_compiled, preempt_all_but_one, request

from mla_jax.base.batch import Batch
from mla_jax.base.options import MOST_DRAFTS
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.decode.rows import taken
from mla_jax.decode.sampling import choose
from mla_jax.decode.speculative import NOBODY, Drafter, Lookup, Mtp
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.size import Size
from mla_jax.weights.load import load

WORDS = 96
SMALL = Size(rows=8, pages=12, context=384, chunk=128)
ROOMY = dataclasses.replace(SMALL, pages=64)


@dataclass(frozen=True)
class Random(Drafter):
    """Guesses anything."""

    most: int = MOST_DRAFTS

    def propose(self, given):
        _model, going, _asked, token, counts = given
        guesses = jax.random.randint(jax.random.key(0), (token.size, self.most), 0, WORDS) + going.position[:, None]
        return going.pool, guesses % WORDS, counts


@dataclass(frozen=True)
class Itself(Drafter):
    """The model drafts its own choices, except that every `wrong`-th draft is another token."""

    most: int = MOST_DRAFTS
    wrong: int = 9

    def propose(self, given):
        model, going, asked, token, counts = given

        def guess(i, carry):
            pool, newest, guesses = carry
            one = Batch.behind(going.held + i, going.position + i, (i < counts).astype(jnp.int32), 1, asked.page_table)
            hidden, pool, _ = model(newest[:, None], one, pool)
            place = going.position + 1 + i
            newest, _ = choose(model.unembed(hidden[:, 0]), going.rows.seen, asked.at, place, asked.entry.sampling)
            newest = jnp.where(place % self.wrong == 0, (newest + 1) % WORDS, newest)
            return pool, newest, guesses.at[:, i].set(newest)

        guesses = jnp.zeros((token.size, self.most), jnp.int32)
        pool, _, guesses = jax.lax.fori_loop(0, self.most, guess, (going.pool, token, guesses))
        return pool, guesses, counts


DRAFTERS = {"mtp": Mtp(MOST_DRAFTS), "lookup": Lookup(MOST_DRAFTS), "random": Random(), "itself": Itself()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    return load(write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True)))


@pytest.fixture(scope="module")
def programs_of(model):
    """`programs_of(drafter)`, compiled once."""
    return cache(lambda drafter: Programs(model, drafter=drafter))


def engine_of(programs: Programs, size: Size = SMALL, drafts: int | None = None) -> Engine:
    return drafting_engine(programs, size, drafts)


SAMPLINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
]


def random_request(rng: np.random.Generator, prefixes: list[list[int]]) -> Request:
    """Of every kind of sampling; some begin as others do, some repeat themselves, some end at tokens of their own."""
    prefix = prefixes[rng.integers(len(prefixes))] if rng.random() < 0.6 else []
    own = rng.integers(2, WORDS, rng.integers(1, 60)).tolist()
    if rng.random() < 0.3:
        own = (own[:5] * 12)[: len(own) + 5]
    longest = 90 if rng.random() < 0.4 else 20
    ends = {"stop_token_ids": tuple(rng.integers(2, WORDS, 3).tolist())} if rng.random() < 0.3 else {}
    sampling = SAMPLINGS[rng.integers(len(SAMPLINGS))] | {"seed": int(rng.integers(1000))}
    return request(prefix + own, max_tokens=int(rng.integers(1, longest)), **sampling, **ends)


KINDS = 100


@pytest.fixture(scope="module")
def kinds():
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(2, WORDS, n).tolist() for n in (64, 130, 200)]
    return [random_request(rng, prefixes) for _ in range(KINDS)]


@pytest.fixture(scope="module")
def expected(programs_of, kinds):
    """The tokens of every kind and fork without a drafter, in an engine with room for all."""
    engine = engine_of(programs_of(NOBODY), ROOMY)
    forks = [(kind, fork) for kind in range(KINDS) for fork in range(3)]
    return dict(zip(forks, finish(engine, [engine.submit(kinds[kind].fork(fork)) for kind, fork in forks]), strict=True))


def serve(engine: Engine, kinds: list[Request], count: int, seed: int, change) -> list[tuple[int, int, Job]]:
    """Random requests with priorities, forks and cancels; `change` is called before each step."""
    rng, jobs = np.random.default_rng(seed), []
    engine.limits = dataclasses.replace(engine.limits, steps=12, fewest_steps=4)  # so that less is set aside for those that run
    while len(jobs) < count or engine.busy:
        if len(jobs) < count and len(engine.waiting) < 12:
            kind = int(rng.integers(len(kinds)))
            for fork in range(int(rng.choice([1, 1, 1, 3]))):
                jobs.append((kind, fork, engine.submit(kinds[kind].fork(fork), priority=int(rng.integers(3)))))
        if rng.random() < 0.03 and engine.jobs:
            engine.cancel(list(engine.jobs.values())[int(rng.integers(len(engine.jobs)))])
        change(rng)
        engine.step()
    return jobs


def assert_expected(jobs: list[tuple[int, int, Job]], expected: dict) -> None:
    for kind, fork, job in jobs:
        if job.reason is not FinishReason.CANCELLED:
            assert job.ids == expected[kind, fork], (kind, fork)


@pytest.mark.deep
@pytest.mark.once
@pytest.mark.parametrize("name", DRAFTERS)
def test_random_requests_get_the_tokens_they_get_without_drafts(programs_of, kinds, expected, name):
    """In a pool that holds a few of them; how many are guessed changes from step to step, 0 to 7 or as many as pay."""
    engine = engine_of(programs_of(DRAFTERS[name]), SMALL, MOST_DRAFTS)

    def change(rng: np.random.Generator) -> None:
        engine.drafting.fixed = (None, *range(MOST_DRAFTS + 1))[rng.integers(MOST_DRAFTS + 2)]
        if rng.random() < 0.05:
            preempt_all_but_one(engine)

    jobs, stats = serve(engine, kinds, 125, 1, change), engine.stats
    assert_expected(jobs, expected)
    assert stats.preemptions > 0
    assert stats.hits > 1000
    assert any(job.reason is FinishReason.CANCELLED for *_, job in jobs)
    assert stats.pages_free == SMALL.pages
    assert (stats.stood <= stats.drafted).all()
    assert stats.passes + stats.stood.sum() == stats.generated
    assert stats.drafted[0] > 100
    if name == "itself":
        assert stats.stood[0] > 0.8 * stats.drafted[0]
        assert stats.stood.min() > 0


@pytest.mark.deep
@pytest.mark.once
@pytest.mark.parametrize("drafts", [1, 3, 7, None])
def test_a_number_of_drafts_that_stays_changes_no_token(programs_of, kinds, expected, drafts):
    engine = engine_of(programs_of(DRAFTERS["mtp"]), SMALL, drafts)
    assert_expected(serve(engine, kinds, 30, 2, lambda rng: None), expected)
    assert (engine.stats.drafted[drafts or MOST_DRAFTS :] == 0).all()


# what the layer for multi-token prediction has in its pages


def served(engine: Engine, asked: Request) -> tuple[list[int], dict[str, np.ndarray]]:
    """The tokens of a request, and what all layers have cached of its tokens when it was last in its row."""
    job, found = engine.submit(asked), {}
    while not job.done:
        engine.step()
        found = cached(engine, job) or found
    return job.ids, found


def cached(engine: Engine, job: Job) -> dict[str, np.ndarray]:
    """All layers' cache of a running job's tokens, by layer; the last layer, which drafts, has none of the newest."""
    if job.row is None:
        return {}
    pool, rows = engine.device.state()
    held = int(np.asarray(taken(rows, jnp.asarray([job.row]))[1].held)[0])
    pages, found = np.array(pool["c_kv"]), {}
    layers = engine.programs.model.cached_layers
    for layer in range(layers):
        mine = pages[np.array(job.held.pages) + layer * engine.size.pages]
        found[layer] = mine.reshape(-1, mine.shape[-1])[: held - (layer == layers - 1)]
    return found


def assert_same_entries(one: dict[str, np.ndarray], other: dict[str, np.ndarray], least: int) -> None:
    assert one.keys() == other.keys()
    for layer, mine in one.items():
        both = min(len(mine), len(other[layer]))
        assert both >= least
        np.testing.assert_allclose(mine[:both], other[layer][:both], atol=2e-5, err_msg=f"layer {layer}")


@pytest.fixture(scope="module")
def by_layer(programs_of):
    return programs_of(DRAFTERS["mtp"])


@pytest.mark.deep
@pytest.mark.parametrize("shared", [2 * PAGE, 2 * PAGE - 1, 2 * PAGE + 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_prompt_that_differs_right_behind_a_page_gets_entries_of_its_own(by_layer, shared, drafts):
    """The layer's last entry of a page depends on the token behind it: where that differs, the page is another one."""
    rng = np.random.default_rng(shared)
    same = rng.integers(2, WORDS, shared).tolist()
    first, second = request([*same, 50, 51, 52], max_tokens=20), request([*same, 60, 61, 62], max_tokens=20)
    engine = engine_of(by_layer, SMALL, drafts)
    finish(engine, [engine.submit(first)])
    ids, entries = served(engine, second)
    assert engine.stats.hits == (shared - 1) // PAGE * PAGE
    alone, expected = served(engine_of(by_layer, SMALL, drafts), second)
    assert ids == alone
    assert_same_entries(entries, expected, shared + 3)
    assert all(np.abs(layer).sum(-1).min() > 0 for layer in entries.values())


@pytest.mark.deep
@pytest.mark.parametrize("turns", [PAGE, PAGE + 1, PAGE + 2])
def test_a_conversation_that_goes_on_finds_the_entries_of_what_was_generated(by_layer, turns):
    """The last token was not read, and a page is known only together with the token behind it."""
    prompt = np.random.default_rng(5).integers(2, WORDS, 30).tolist()
    engine = engine_of(by_layer, SMALL, 3)
    said = finish(engine, [engine.submit(request(prompt, max_tokens=turns - 30))])[0]
    again = request([*prompt, *said, 7, 8, 9], max_tokens=10)
    ids, entries = served(engine, again)
    assert engine.stats.hits == (turns - 2) // PAGE * PAGE
    alone, expected = served(engine_of(by_layer, SMALL, 3), again)
    assert ids == alone
    assert_same_entries(entries, expected, turns + 3)


@pytest.mark.deep
def test_a_request_that_was_preempted_has_the_entries_that_it_has_alone(by_layer):
    asked = [request([5 + i] * 70, max_tokens=80, temperature=0.5, seed=i) for i in range(6)]
    engine = engine_of(by_layer, SMALL, 3)
    engine.limits = dataclasses.replace(engine.limits, steps=8, fewest_steps=4)
    jobs, found = [engine.submit(one) for one in asked], [{}] * 6
    while not all(job.done for job in jobs):
        engine.step()
        found = [cached(engine, job) or old for job, old in zip(jobs, found, strict=True)]
    assert engine.stats.preemptions > 0
    for one, job, entries in zip(asked, jobs, found, strict=True):
        ids, expected = served(engine_of(by_layer, SMALL, 3), one)
        assert job.ids == ids
        assert_same_entries(entries, expected, 100)


@pytest.mark.deep
def test_forks_share_pages_and_have_the_entries_that_they_have_alone(by_layer):
    whole = request(np.random.default_rng(6).integers(2, WORDS, PAGE + 10).tolist(), temperature=1.0, max_tokens=30)
    engine = engine_of(by_layer, SMALL, 3)
    jobs, found = [engine.submit(whole.fork(i)) for i in range(3)], [{}] * 3
    while not all(job.done for job in jobs):
        engine.step()
        found = [cached(engine, job) or old for job, old in zip(jobs, found, strict=True)]
    assert engine.stats.hits == 2 * PAGE
    for i, (job, entries) in enumerate(zip(jobs, found, strict=True)):
        ids, expected = served(engine_of(by_layer, SMALL, 3), whole.fork(i))
        assert job.ids == ids
        assert_same_entries(entries, expected, PAGE + 20)
    assert len({tuple(job.ids) for job in jobs}) == 3


# what is compiled


@pytest.mark.deep
@pytest.mark.parametrize("name", ["mtp", "lookup"])
def test_nothing_compiles_once_warm_however_many_are_guessed(programs_of, kinds, name):
    engine = engine_of(programs_of(DRAFTERS[name]), SMALL, MOST_DRAFTS)
    engine.warm_up()
    rng = np.random.default_rng(2)
    with nothing_compiled():
        for drafts in (7, 0, 2, None, 1, None):
            engine.drafting.fixed = drafts
            some = [kinds[i] for i in rng.integers(0, KINDS, rng.integers(1, 9))]
            some.append(request([3, 4, 5], logprobs=3, prompt_logprobs=2, max_tokens=9, logit_bias={5: 1.0}, stop_token_ids=(9,)))
            finish(engine, [engine.submit(one, streams=bool(rng.random() < 0.3)) for one in some])


@pytest.mark.deep
def test_numbers_of_rows_that_never_pay_do_not_draft(by_layer, monkeypatch):
    engine = engine_of(by_layer, SMALL, 2)
    monkeypatch.setattr(engine.drafting, "pays", lambda rows: rows == 1)
    finish(engine, [engine.submit(request([5 + i, 6], max_tokens=9)) for i in range(2)])
    assert engine.stats.drafted.sum() == 0
    finish(engine, [engine.submit(request([5, 6], max_tokens=9))])
    assert engine.stats.drafted.sum() > 0
