"""Requests that drop tokens: which ones is the policy's business; here, that nothing else changes, and that pages become free."""

import dataclasses
from functools import cache, partial

import deep
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
from models import FAMILIES, tensors, write
from serving import answer

from mla_jax import LLM, SamplingParams
from mla_jax.base.batch import Batch
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.cache.evict import POLICIES
from mla_jax.cache.paged import PAGE
from mla_jax.decode.evicting import Evict
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import NOBODY, Lookup
from mla_jax.engine.engine import Engine
from mla_jax.engine.eviction import EvictingEngine, Eviction
from mla_jax.engine.layered import Layered
from mla_jax.engine.request import FinishReason, Request
from mla_jax.engine.size import Size
from mla_jax.model.dispatch import Dispatch, StepPlan
from mla_jax.model.transformer import Transformer
from mla_jax.weights.load import load

WORDS, LAYERS = 96, 2
ROOMY = Size(rows=4, pages=40, context=384, chunk=128)
SNAPKV = Evict(POLICIES["snapkv"], "ada", recent=16)
request = partial(serving.request, max_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": LAYERS}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True))


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module")
def programs_of(model):
    return cache(lambda evicts, drafter=NOBODY: Programs(model, evicts=evicts, drafter=drafter))


def evicting(programs: Programs, keep: float, every: int = 16, size: Size = ROOMY, drafts: int | None = None) -> EvictingEngine:
    return EvictingEngine(programs, programs.model.config, None, size, drafts, Eviction(programs.evicts, keep, every))


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, WORDS, n).tolist() for n in (200, 90, 130, 1)]
    shares = [*prompts[0][:130], 5, 6, 7]  # begins as the first one does
    return [*map(request, prompts), request(shares, temperature=0.7, seed=3)]


@pytest.fixture(scope="module")
def full(model, asked) -> list[list[int]]:
    return answer(Engine(Programs(model), model.config, None, ROOMY), *asked)


# what a request is told


@pytest.mark.deep(*deep.GENERATING)
@pytest.mark.parametrize("dispatch", [{}, {"attention": "compressed"}, {"attention": "naive"}], ids=str)
def test_where_all_stay_the_tokens_are_those_of_full_attention(folder, asked, full, dispatch):
    """Though they are moved to other pages, again and again."""
    model = load(folder, dispatch=Dispatch(**dispatch))
    engine = evicting(Programs(model, evicts=SNAPKV), 1.0)
    assert answer(engine, *asked) == full
    assert engine.stats.dropped == 0
    assert engine.stats.hits > 0


@pytest.mark.deep(*deep.GENERATING)
@pytest.mark.parametrize(("policy", "budget", "keep"), [("snapkv", "ada", 0.25), ("critical", "pyramid", 0.4)])
def test_a_request_gets_the_same_tokens_alone_in_a_batch_and_preempted(programs_of, asked, policy, budget, keep):
    programs = programs_of(Evict(POLICIES[policy], budget, recent=16))
    engine = evicting(programs, keep)
    together = answer(engine, *asked)
    assert engine.stats.dropped > 500
    assert [answer(evicting(programs, keep), one)[0] for one in asked] == together
    small = evicting(programs, keep, size=dataclasses.replace(ROOMY, pages=10))
    assert answer(small, *asked * 3, preempt_every=7) == together * 3
    assert small.stats.preemptions > 10
    assert small.stats.pages_free == 10
    assert answer(engine, *asked) == together  # prompts are known from before, as they were
    assert engine.stats.hits > 300


@pytest.mark.deep(*deep.GENERATING)
def test_drafts_change_no_token(programs_of, asked):
    expected = answer(evicting(programs_of(SNAPKV), 0.3), *asked)
    engine = evicting(programs_of(SNAPKV, Lookup(3)), 0.3, drafts=3)
    assert answer(engine, *asked) == expected
    assert engine.stats.drafted[0] > 20


def test_a_cancelled_request_leaves_no_page_behind(programs_of, asked):
    engine = evicting(programs_of(SNAPKV), 0.3)
    jobs = [engine.submit(one) for one in asked]
    for step in range(12):
        engine.step()
        if step % 3 == 2:
            engine.cancel(jobs[step // 3])
    answer(engine)
    while engine.busy:
        engine.step()
    assert engine.stats.pages_free == ROOMY.pages
    assert {job.reason for job in jobs[:4]} == {FinishReason.CANCELLED}


# what it attends to


@dataclasses.dataclass(frozen=True)
class Masked(Dispatch):
    """Whole sequences without a cache; each token sees what a mask `[T S]` says."""

    mask: tuple[tuple[bool, ...], ...] = ()

    def step(self, model: Transformer, batch: Batch, pool: None) -> StepPlan:
        return super().step(model, batch, pool)._replace(shared=jnp.asarray(self.mask)[None, :, None])


def seen(prompt: int, length: int, every: int, stays) -> np.ndarray:
    """What each token sees, if at the end of the prompt and then again `stays(slots)` of what is held."""
    mask, held, point = np.zeros((length, length), bool), list(range(prompt)), prompt
    mask[:prompt, :prompt] = np.tri(prompt, dtype=bool)
    for token in range(prompt, length):
        if token == point:
            held, point = stays(held, token), point + every
        held.append(token)
        mask[token, held] = True
    return mask


@pytest.mark.deep(*deep.GENERATING)
@pytest.mark.parametrize("policy", ["streaming", "random"])
def test_tokens_are_those_of_a_whole_sequence_in_which_the_dropped_ones_are_masked(model, programs_of, policy):
    """For policies that look at slots alone, and so drop the same in all layers. Positions stay as they were."""
    evicts, keep, every = Evict(POLICIES[policy], "uniform", sinks=3, recent=5), 0.2, 12
    prompt = np.random.default_rng(4).integers(2, WORDS, 150).tolist()
    (ids,) = answer(evicting(programs_of(evicts), keep, every), request(prompt))

    def stays(held: list[int], tokens: int) -> list[int]:
        count, slots = round(keep * tokens), range(len(held))
        forced = [slot for slot in slots if slot < 3 or slot >= len(held) - 5]
        slot = np.arange(len(held), dtype=np.uint32)
        mixed = (slot ^ slot >> 16) * np.uint32(0x7FEB352D)
        mixed = (mixed ^ mixed >> 15) * np.uint32(0x846CA68B)
        score = slot if policy == "streaming" else mixed >> 8
        others = sorted(set(slots) - set(forced), key=lambda slot: -int(score[slot]))
        return [held[slot] for slot in sorted([*forced, *others[: count - len(forced)]])]

    mask = seen(len(prompt), len(prompt) + len(ids), every, stays)
    assert mask[-1].sum() < 60
    whole = nnx_with(model, Masked(mask=tuple(map(tuple, mask.tolist()))))
    logits = np.asarray(whole.unembed(whole(jnp.asarray([prompt + ids]), Batch.dense(1, len(prompt) + len(ids)))[0])[0])
    assert np.argmax(logits[len(prompt) - 1 : -1], -1).tolist() == ids


def nnx_with(model: Transformer, dispatch: Dispatch) -> Transformer:
    """The same weights, with another dispatch."""
    from flax import nnx

    other = nnx.merge(*nnx.split(model))
    other.dispatch = dispatch
    return other


# what it costs


def test_pages_become_free_and_layers_share_what_there_is(programs_of):
    prompt = np.random.default_rng(1).integers(2, WORDS, 5 * PAGE - 8).tolist()
    engine = evicting(programs_of(SNAPKV), 0.2)
    job, fewest, parts = engine.submit(request(prompt, max_tokens=60)), ROOMY.pages, []
    while not job.done:
        engine.step()
        if isinstance(job.held, Layered):
            parts.append(sum(map(len, job.held.parts)))
            assert (job.held.dropped > 0).all()
            kept = job.read + job.steps - job.held.dropped
            assert kept.sum() <= LAYERS * (0.2 * (5 * PAGE + 60) + 17)
            fewest = min(fewest, engine._pages.unused)
    assert max(parts) <= 2 * LAYERS + 1  # of 5 pages in each layer
    assert engine.stats.pages_free == ROOMY.pages
    assert engine.stats.dropped > 200


def test_a_request_that_cannot_fit_with_what_stays_of_it_is_refused(programs_of):
    engine = evicting(programs_of(SNAPKV), 0.5, size=dataclasses.replace(ROOMY, pages=6))
    with pytest.raises(DoesNotFit, match="does not fit the cache"):
        engine.submit(request([5] * 250))
    answer(engine, request([5] * 150))


def test_nothing_compiles_once_warm(programs_of, asked):
    engine = evicting(programs_of(SNAPKV), 0.3)
    engine.warm_up()
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(listen := lambda event, *_, **__: compiled.append(event))
    try:
        answer(engine, *asked)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event in compiled if event.endswith("backend_compile_duration")] == []


# as users ask for it


def test_it_is_an_option_of_a_model(folder, asked):
    llm = LLM(folder, evict="snapkv", evict_budget="uniform", evict_keep=0.5)
    out = llm.generate([one.prompt for one in asked[:3]], SamplingParams(max_tokens=5, temperature=0))
    assert [len(one.token_ids) for one in out] == [5] * 3
    assert llm.stats().dropped > 100
    assert any("snapkv" in line and "50 %" in line for line in llm.explain().splitlines())


@pytest.mark.parametrize(
    "wrong", [{"evict": "h20"}, {"evict_budget": "adaptive"}, {"evict_keep": 0}, {"evict_keep": 1.5}], ids=str
)
def test_what_is_not_there_is_refused_by_name(folder, wrong):
    with pytest.raises(BadRequest, match=f"{next(iter(wrong))} is "):
        LLM(folder, **{"evict": "snapkv", **wrong})


def test_the_models_own_layer_cannot_guess_for_rows_that_drop_tokens(folder):
    with pytest.raises(BadRequest, match='draft is "mtp", but evict is on'):
        LLM(folder, evict="snapkv", draft="mtp")
