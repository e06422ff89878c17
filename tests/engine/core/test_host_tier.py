"""Pages evicted from the prefix index go to the host and come back: equal bytes and tokens, and only new ones are prefilled."""

import dataclasses
import hashlib
import random
import threading
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from models import FAMILIES, tensors, write
from serving import answer, drafting_engine, evicting_engine, request

from mla_jax import LLM, SamplingParams
from mla_jax.base.axes import parse_mesh
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.paged import COPIED, NOWHERE, PAGE
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import NOBODY, Drafter, Mtp
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.host_tier import HostTier
from mla_jax.engine.core.pages import Held, Pages
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.core.stats import EngineStats
from mla_jax.mesh.devices import Devices
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import load

WORDS, LAYERS = 96, 2
LARGE = Size(rows=4, pages=64, context=384, chunk=128)
SMALL = dataclasses.replace(LARGE, pages=6, hosted=32)  # too few pages for two chats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return of_rank(tmp_path_factory.mktemp("v3"), 32)


@pytest.fixture(scope="module")
def programs_of(folder, tmp_path_factory):
    """Programs by dtype of the weights and of the cache, for a model whose latents may be in FP8 where they are."""

    @cache
    def programs(dtype: str = "float32", kv_cache: str = "auto", drafter: Drafter = NOBODY) -> Programs:
        path = folder if kv_cache == "auto" else of_rank(tmp_path_factory.mktemp("v3"), 128)
        return Programs(load(path, dtype=dtype, dispatch=Dispatch(kv_cache=kv_cache)), drafter=drafter)

    return programs


def of_rank(path, rank: int):
    hf = {**FAMILIES["v3"], "num_hidden_layers": LAYERS, "kv_lora_rank": rank}
    return write(path, hf, tensors(hf, mtp=True))


def engine_of(programs: Programs, size: Size, drafts: int | None = None) -> Engine:
    return drafting_engine(programs, size, drafts)


def chats(engine: Engine, turns: int, count: int = 2) -> tuple[list[list[int]], list[int]]:
    """The texts of chats that take turns, and the tokens that were read in each turn."""
    rng, read = np.random.default_rng(0), []
    texts = [rng.integers(2, WORDS, 150).tolist() for _ in range(count)]
    for _ in range(turns):
        for text in texts:
            text += rng.integers(2, WORDS, 20).tolist()
            before = engine.stats.read
            text += answer(engine, request(list(text), max_tokens=20))[0]
            read.append(engine.stats.read - before)
    return texts, read


# bytes


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "kv_cache"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "fp8")])
def test_pages_make_the_round_trip_bit_for_bit(programs_of, dtype, kv_cache):
    programs, count = programs_of(dtype, kv_cache), 3 * COPIED
    pool, tier = random_pool(programs, count), HostTier(programs, 40, EngineStats(1, count))
    pages = list(range(COPIED + 3))
    before, digests = [checksum(programs, pool, page) for page in pages], [bytes([page]) for page in pages]
    for digest, page in zip(digests, pages, strict=True):
        tier.forget(digest, page)
    pool = tier.settle(pool)
    assert [checksum(programs, pool, page) for page in pages] == before
    pool = jax.tree.map(jnp.zeros_like, pool)
    targets = [count - 1 - page for page in pages]
    for digest, page in zip(digests, targets, strict=True):
        tier.ask(digest, page)
    pool = tier.settle(pool)
    assert [checksum(programs, pool, page) for page in targets] == before
    empty = checksum(programs, jax.tree.map(jnp.zeros_like, pool), 0)
    assert all(checksum(programs, pool, page) == empty for page in range(count) if page not in targets)
    assert (tier.stats.pages_out, tier.stats.pages_in, tier.stats.pages_hosted) == (len(pages),) * 3
    assert tier.stats.bytes_out == tier.stats.bytes_in == len(pages) * sum(a.nbytes for a in pool.values()) // count


def random_pool(programs: Programs, pages: int) -> dict:
    """Any bytes, NaN among them."""
    rng, pool = np.random.default_rng(0), programs.model.new_pool(pages)
    raw = {name: rng.integers(0, 256, array.nbytes, np.uint8) for name, array in pool.items()}
    return {name: jnp.asarray(raw[name].view(array.dtype).reshape(array.shape)) for name, array in pool.items()}


def checksum(programs: Programs, pool: dict, page: int) -> str:
    """Of one page in all layers."""
    found, layers = hashlib.sha256(), programs.model.cached_layers
    for name in sorted(pool):
        array = np.asarray(pool[name])
        found.update(array.reshape(layers, -1, *array.shape[1:])[:, page].tobytes())
    return found.hexdigest()


def test_neither_program_copies_the_pool(programs_of):
    programs, places = programs_of(), np.full(COPIED, NOWHERE, np.int32)
    pool = programs.model.new_pool(512)
    size, contents = sum(array.nbytes for array in pool.values()), programs._contents(COPIED)
    for lowered in (programs.copy_out.lower(pool, places), programs.copy_in.lower(pool, contents, places)):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size // 8


def test_random_steps_leave_every_page_what_its_request_has_written(programs_of):
    """Pages, tier and programs together: a request's pages hold its beginning, whatever was evicted meanwhile."""
    programs, choose, stats = programs_of(), random.Random(0), EngineStats(1, 12)
    pool, tier = programs.model.new_pool(12), HostTier(programs, 9, stats)
    pages, running = Pages(12, PAGE, tier=tier), []
    for _ in range(400):
        if running and choose.random() < 0.5:
            pages.release(running.pop(choose.randrange(len(running))))
            continue
        kinds = [choose.randrange(2) for _ in range(choose.randint(1, 5))]
        text = [kind for kind in kinds for _ in range(PAGE)] + [5]
        if len(text) // PAGE + 1 > pages.free or pages.match(text).blocked:
            continue
        held = pages.admit(text)
        pool = tier.settle(pool)
        assert_holds(programs, pool, held, text, held.shared)
        pool = written(programs, pool, held, text)
        pages.wrote(held, text)
        running.append(held)
    assert stats.pages_in > 50
    assert stats.pages_hosted == 9


def written(programs: Programs, pool: dict, held: Held, text: list[int]) -> dict:
    """Each page that the request reads is filled with a number of its beginning."""
    for at in range(held.shared, len(text) // PAGE):
        rows = held.pages[at] + np.arange(programs.model.cached_layers) * 12
        pool = {name: array.at[rows].set(number(text, at)) for name, array in pool.items()}
    return pool


def assert_holds(programs: Programs, pool: dict, held: Held, text: list[int], pages: int) -> None:
    for at in range(pages):
        rows = held.pages[at] + np.arange(programs.model.cached_layers) * 12
        assert all((np.asarray(array)[rows] == number(text, at)).all() for array in pool.values())


def number(text: list[int], at: int) -> float:
    return float(1 + int("1" + "".join(map(str, text[: at * PAGE + 1 : PAGE])), 2))


def test_what_is_asked_for_is_not_pushed_out_by_what_is_forgotten_meanwhile(programs_of):
    """A tier of two pages: both come back into pages that held others, and of these it takes none; of one it takes one."""
    programs = programs_of()
    pool, tier = random_pool(programs, 8), HostTier(programs, 2, EngineStats(1, 8))
    before = [checksum(programs, pool, page) for page in range(8)]
    tier.forget(b"first", 0)
    tier.forget(b"second", 1)
    pool = tier.settle(pool)
    for digest, page in ((b"first", 3), (b"second", 2)):
        tier.forget(b"other" + digest, page)
        tier.ask(digest, page)
    pool = tier.settle(pool)
    assert [checksum(programs, pool, page) for page in (3, 2)] == before[:2]
    assert (b"first" in tier, b"second" in tier, tier.stats.pages_out) == (True, True, 2)
    tier.forget(b"third", 4)
    tier.ask(b"second", 4)
    pool = tier.settle(pool)
    assert checksum(programs, pool, 4) == before[1]
    tier.ask(b"third", 5)
    pool = tier.settle(pool)
    assert checksum(programs, pool, 5) == before[4]
    assert (b"first" in tier, b"second" in tier, b"third" in tier) == (False, True, True)


def test_what_goes_wrong_on_the_way_is_raised_where_it_is_waited_for(programs_of, monkeypatch):
    programs = programs_of()
    pool, tier = random_pool(programs, 8), HostTier(programs, 4, EngineStats(1, 8))

    def fails(slots, contents):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(tier.store, "write", fails)
    tier.forget(b"first", 0)
    pool = tier.settle(pool)
    tier.ask(b"first", 1)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tier.settle(pool)


# requests


@pytest.mark.deep
@pytest.mark.parametrize(
    ("dtype", "kv_cache", "drafter"),
    [("float32", "auto", NOBODY), ("bfloat16", "auto", NOBODY), ("float32", "fp8", NOBODY), ("float32", "auto", Mtp(2))],
    ids=["float32", "bfloat16", "fp8", "mtp"],
)
def test_two_chats_that_take_turns_read_only_what_is_new(programs_of, dtype, kv_cache, drafter):
    programs, drafts = programs_of(dtype, kv_cache, drafter), drafter.most or None
    expected, new = chats(engine_of(programs, LARGE, drafts), turns=4)
    engine = engine_of(programs, SMALL, drafts)
    found, read = chats(engine, turns=4)
    assert found == expected
    assert read == new
    assert max(read[2:]) < 20 + 20 + PAGE + 1
    assert engine.stats.pages_in > 8
    without = engine_of(programs, dataclasses.replace(SMALL, hosted=0), drafts)
    assert chats(without, turns=4)[0] == expected
    assert without.stats.read > 1.5 * sum(read)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("mesh", "attention"),
    [("data=2", "auto"), ("tensor=2", "naive"), ("data=2,context=2", "auto"), ("data=2,tensor=2,context=2", "auto")],
)
def test_on_a_mesh_chats_read_only_what_is_new(folder, mesh, attention):
    model = load(folder, dispatch=Dispatch(attention))
    expected, new = chats(Engine(Programs(model), LARGE), turns=4)
    engine = Engine(Programs(sharded.spread(model, Devices.of(parse_mesh(mesh)))), SMALL)
    found, read = chats(engine, turns=4)
    assert found == expected
    assert sum(read) < 1.1 * sum(new)
    assert engine.stats.pages_in > 8


@pytest.mark.deep
def test_a_preempted_request_comes_back_with_the_same_tokens(programs_of):
    rng = np.random.default_rng(1)
    asked = request(rng.integers(2, WORDS, 150).tolist(), max_tokens=100, temperature=0.8, seed=3)
    other = request(rng.integers(2, WORDS, 350).tolist())
    expected = answer(engine_of(programs_of(), LARGE), asked)
    engine = engine_of(programs_of(), SMALL)
    job = engine.submit(asked)
    while len(job.ids) < 60:
        engine.step()
    engine._land_all()
    engine._preempt(job)
    assert not job.done
    high = engine.submit(other, priority=-1)  # takes all pages
    while not high.done:
        engine.step()
    assert (engine.stats.pages_in, engine.stats.hits) == (0, 0)
    read, known = engine.stats.read, len(job.tokens)
    while not job.done:
        engine.step()
    assert [job.ids] == expected
    assert engine.stats.read - read == known - known // PAGE * PAGE
    assert engine.stats.pages_in == known // PAGE


@pytest.mark.deep
def test_random_requests_get_the_tokens_they_get_without_a_tier(programs_of):
    """In a pool that holds a few, with cancels, preemptions and beginnings in common; the tier is too small for all of these."""
    rng, plain, expected = np.random.default_rng(5), engine_of(programs_of(), LARGE), {}
    prefixes = [rng.integers(2, WORDS, n).tolist() for n in (130, 200, 260)]
    kinds = [random_request(rng, prefixes) for _ in range(40)]
    engine, jobs = engine_of(programs_of(), dataclasses.replace(SMALL, hosted=7)), []
    engine.limits = dataclasses.replace(engine.limits, steps=8, fewest_steps=4)  # so that less is set aside for those that run
    while len(jobs) < 300 or engine.busy:
        if len(jobs) < 300 and len(engine.waiting) < 6:
            kind = int(rng.integers(len(kinds)))
            jobs.append((kind, engine.submit(kinds[kind], priority=int(rng.integers(3)))))
        if rng.random() < 0.03 and engine.jobs:
            engine.cancel(list(engine.jobs.values())[int(rng.integers(len(engine.jobs)))])
        engine.step()
        assert engine.stats.pages_free == SMALL.pages - len({page for job in engine.running for page in job.held.pages})
    assert engine.stats.preemptions > 10
    assert engine.stats.pages_in > 50
    for kind, job in jobs:
        if job.reason is FinishReason.CANCELLED:
            continue
        if kind not in expected:
            expected[kind] = answer(plain, kinds[kind])[0]
        assert job.ids == expected[kind], kind


def random_request(rng: np.random.Generator, prefixes: list[list[int]]) -> Request:
    prefix, own = prefixes[rng.integers(len(prefixes))], rng.integers(2, WORDS, rng.integers(1, 60)).tolist()
    sampled = {"temperature": 0.8, "seed": int(rng.integers(1000))} if rng.random() < 0.4 else {}
    return request(prefix + own, max_tokens=int(rng.integers(1, 60)), **sampled)


@pytest.mark.deep
def test_in_a_tier_that_is_full_the_oldest_make_place(programs_of):
    expected, _ = chats(engine_of(programs_of(), LARGE), turns=3, count=3)
    engine = engine_of(programs_of(), dataclasses.replace(SMALL, hosted=3))
    assert chats(engine, turns=3, count=3)[0] == expected
    assert engine.stats.pages_hosted == 3
    assert engine.stats.pages_out > 10


@pytest.mark.deep
def test_forks_bring_their_beginning_once(programs_of):
    rng = np.random.default_rng(2)
    asked = request(rng.integers(2, WORDS, 140).tolist(), max_tokens=12, temperature=0.9, seed=5)
    forks = [asked.fork(i) for i in range(3)]
    expected = [answer(engine_of(programs_of(), LARGE), fork)[0] for fork in forks]
    engine = engine_of(programs_of(), SMALL)
    answer(engine, asked)
    answer(engine, request(rng.integers(2, WORDS, 350).tolist()))  # takes all pages
    assert answer(engine, *forks) == expected
    assert engine.stats.pages_in == 2
    assert engine.stats.hits == 3 * 2 * PAGE


@pytest.mark.deep
def test_jobs_may_be_cancelled_while_pages_are_on_their_way(programs_of):
    """In either direction: a copy to the host is complete once it is needed, and a copied-in page serves the next request."""
    rng = np.random.default_rng(3)
    asked, other = (request(rng.integers(2, WORDS, n).tolist(), max_tokens=30) for n in (200, 350))
    expected = answer(engine_of(programs_of(), LARGE), asked)
    engine, gate = engine_of(programs_of(), SMALL), threading.Event()
    assert answer(engine, asked) == expected
    engine.device.tier._writer.submit(gate.wait)
    job = engine.submit(other)
    engine.step()
    assert engine.stats.pages_out == 3
    assert not engine.device.tier._writes[0].done.done()
    engine.cancel(job)
    again = engine.submit(asked)
    threading.Timer(0.2, gate.set).start()
    engine.step()  # waits for them
    assert engine.stats.pages_in == 3
    engine.cancel(again)
    assert answer(engine, asked) == expected
    assert engine.stats.pages_in == 3
    assert engine.stats.pages_free == SMALL.pages


@pytest.mark.deep
def test_requests_that_drop_tokens_find_their_prompts(folder):
    """Only whole pages go to the tier; what stays of a request's tokens is nobody else's."""
    programs = Programs(load(folder), evicts=Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["ada"], recent=16))
    small = dataclasses.replace(SMALL, pages=10)

    def engine(size: Size) -> Engine:
        return evicting_engine(programs, size, 0.5)

    expected, new = chats(engine(LARGE), turns=3, count=3)
    with_tier = engine(small)
    found, read = chats(with_tier, turns=3, count=3)
    assert (found, read) == (expected, new)
    assert with_tier.stats.pages_in > 10
    assert with_tier.stats.dropped > 500


@pytest.mark.deep
def test_nothing_compiles_once_warm_and_without_a_tier_nothing_more_is_compiled(folder):
    programs = Programs(load(folder))
    size = dataclasses.replace(SMALL, rows=1, chunk=16)
    engine_of(programs, dataclasses.replace(size, hosted=0)).warm_up()
    without = programs.compiled
    assert programs.copy_out.count == programs.copy_in.count == 0
    engine = engine_of(programs, size)
    engine.warm_up()
    assert programs.compiled == without + 2
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(listen := lambda event, *_, **__: compiled.append(event))
    try:
        chats(engine, turns=4)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.stats.pages_in > 0
    assert [event for event in compiled if event.endswith("backend_compile_duration")] == []


# a model


@pytest.mark.deep
def test_a_model_takes_the_tier_as_an_option_and_empties_it_when_its_weights_change(folder):
    llm = LLM(folder, context=384, cache_tokens=384, host_cache=0.001)
    page = sum(one.size * one.dtype.itemsize for one in llm._programs.page.values())
    pages = int(0.001 * 2**30) // page
    assert f"cache: {pages * PAGE:,} tokens that it has no room for stay in 1.0 MiB of the host's memory" in llm.explain()
    rng = np.random.default_rng(4)
    prompts, asked = [rng.integers(2, WORDS, 300).tolist() for _ in range(2)], SamplingParams(max_tokens=4, ignore_eos=True)
    before = [llm.generate(prompt, asked)[0].token_ids for prompt in prompts]
    assert [llm.generate(prompt, asked)[0].token_ids for prompt in prompts] == before
    stats = llm.stats()
    assert stats.hits == 2 * 4 * PAGE  # all full pages of both
    assert stats.pages_hosted == stats.pages_out > 4
    assert stats.pages_in > 4
    assert (stats.bytes_in, stats.bytes_out) == (stats.pages_in * page, stats.pages_out * page)
    kept = llm.model.embed[...]
    llm.model.embed.set_value(kept[::-1])
    hits = stats.hits
    assert llm.generate(prompts[0], asked)[0].token_ids != before[0]
    assert (stats.hits, stats.pages_hosted) == (hits, 0)
    llm.model.embed.set_value(kept)
    assert llm.generate(prompts[0], asked)[0].token_ids == before[0]


def test_a_tier_that_the_host_has_no_room_for_is_refused_at_once(folder):
    with pytest.raises(DoesNotFit, match=r"pages of 100,000\.00 GiB do not fit the host's memory") as refused:
        LLM(folder, host_cache=100_000)
    assert "GiB free; give less as --host-cache" in refused.value.args[-1]


def test_a_tier_of_less_than_a_page_is_refused(folder):
    with pytest.raises(BadRequest, match=r"host_cache is 1e-06 GiB, but a page takes 0\.0 MiB"):
        LLM(folder, host_cache=1e-6)
