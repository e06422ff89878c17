"""Requests that drop tokens: which ones is the policy's business; here, that nothing else changes, and that pages become free."""

import dataclasses
import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
from models import FAMILIES, tensors, write
from serving import answer, evicting_engine, nothing_compiled

from mla_jax import LLM, SamplingParams
from mla_jax.base.batch import Batch
from mla_jax.base.errors import DoesNotFit
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES, SnapKV
from mla_jax.cache.paged import PAGE
from mla_jax.decode.evict_programs import Kept, Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import Found
from mla_jax.decode.speculative import NOBODY, Lookup
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.evicted_pages import Evicted
from mla_jax.engine.policy.evicting import Evicting, Eviction
from mla_jax.model import rope
from mla_jax.model.dispatch import Dispatch, StepPlan
from mla_jax.model.kernels import linear
from mla_jax.model.mla import heads
from mla_jax.model.moe import settle
from mla_jax.model.ops import rms_norm
from mla_jax.model.transformer import Transformer
from mla_jax.weights.load import load

WORDS, LAYERS, HEADS = 96, 2, 4
ROOMY = Size(rows=4, pages=40, context=384, chunk=128)
SNAPKV = Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["ada"], recent=16)
request = partial(serving.request, max_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": LAYERS}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True))


@pytest.fixture(scope="module")
def model_of(folder):
    return functools.cache(lambda attention: load(folder, dispatch=Dispatch(attention)))


@pytest.fixture(scope="module")
def model(model_of):
    return model_of("auto")


@pytest.fixture(scope="module")
def programs_of(model_of):
    return functools.cache(
        lambda evicts, drafter=NOBODY, attention="auto": Programs(model_of(attention), evicts=evicts, drafter=drafter)
    )


def evicting(
    programs: Programs, keep: float, every: int = 16, size: Size = ROOMY, drafts: int | None = None, chunk: int | None = None
) -> Engine:
    return evicting_engine(programs, size, keep, every, drafts, chunk)


class Noting(Evicting):
    """Notes what stays of requests."""

    def __init__(self, *given):
        super().__init__(*given)
        self.noted: list[Kept] = []

    def answered(self, job: Job, answer: Kept, device: Dispatcher) -> bool:
        self.noted.append(jax.device_get(answer))
        return super().answered(job, answer, device)


def noting(programs: Programs, keep: float, every: int = 16, size: Size = ROOMY) -> Engine:
    return Engine(programs, size, policy=Noting(programs, size, Eviction(programs.evicts, keep, every)))


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, WORDS, n).tolist() for n in (200, 90, 130, 1)]
    shares = [*prompts[0][:130], 5, 6, 7]  # begins as the first one does
    return [*map(request, prompts), request(shares, temperature=0.7, seed=3)]


@pytest.fixture(scope="module")
def full(model, asked) -> list[list[int]]:
    return answer(Engine(Programs(model), ROOMY), *asked)


# what a request is told


@pytest.mark.deep
@pytest.mark.parametrize("chunk", [None, 96])
@pytest.mark.parametrize("dispatch", [{}, {"attention": "compressed"}, {"attention": "naive"}], ids=str)
def test_where_all_stay_the_tokens_are_those_of_full_attention(folder, asked, full, dispatch, chunk):
    """Though they are moved to other pages, again and again."""
    model = load(folder, dispatch=Dispatch(**dispatch))
    engine = evicting(Programs(model, evicts=SNAPKV), 1.0, chunk=chunk)
    assert answer(engine, *asked) == full
    assert engine.stats.dropped == 0
    assert engine.stats.hits > 0


@pytest.mark.deep
@pytest.mark.parametrize(
    ("policy", "budget", "keep", "attention"),
    [
        ("snapkv", "ada", 0.25, "auto"),
        ("critical", "pyramid", 0.4, "auto"),
        ("snapkv", "ada", 0.25, "naive"),
        ("snapkv", "ada_pyramid", 40, "naive"),
    ],
)
@pytest.mark.parametrize("chunk", [None, 48, 80])
def test_a_request_gets_the_same_tokens_alone_in_a_batch_and_preempted(
    programs_of, asked, policy, budget, keep, attention, chunk
):
    programs = programs_of(Selection(EVICTION_POLICIES[policy], BUDGET_RULES[budget], recent=16), attention=attention)
    engine = evicting(programs, keep, chunk=chunk)
    together = answer(engine, *asked)
    assert engine.stats.dropped > 500
    assert [answer(evicting(programs, keep, chunk=chunk), one)[0] for one in asked] == together
    small = evicting(programs, keep, size=dataclasses.replace(ROOMY, pages=10), chunk=chunk)
    assert answer(small, *asked * 3, preempt_every=7) == together * 3
    assert small.stats.preemptions >= 8
    assert small.stats.pages_free == 10
    before = engine.stats.hits
    assert answer(engine, *asked) == together  # prompts are known from before, as they were
    known = [min(len(one.prompt) - 1, chunk or ROOMY.context) for one in asked]  # up to the first point
    assert engine.stats.hits - before == sum(tokens // PAGE * PAGE for tokens in known)


@pytest.mark.deep
@pytest.mark.parametrize("attention", ["auto", "naive"])
def test_preempted_rows_read_in_one_line_what_comes_behind_an_eviction(programs_of, attention):
    programs, rng = programs_of(SNAPKV, attention=attention), np.random.default_rng(7)
    asked = [request(rng.integers(2, WORDS, 90).tolist(), max_tokens=90) for _ in range(3)]
    expected = answer(evicting(programs, 0.3, every=24), *asked)
    engine = noting(programs, 0.3, every=24)
    jobs = [engine.submit(one) for one in asked]
    while min(job.pauses for job in jobs) < 2:
        engine.step()
    engine._land_all()
    for job in jobs:
        engine._preempt(job)
    together, mixed_step = 0, engine.device.mixed_step

    def counted(pieces: dict, *given: Any) -> Found:
        nonlocal together
        together += len(pieces) > 1 and sum(isinstance(job.held, Evicted) for job in pieces)
        return mixed_step(pieces, *given)

    engine.device.mixed_step = counted
    while engine.busy:
        engine.step()
    assert [job.ids for job in jobs] == expected
    assert together >= 2


@pytest.mark.deep
@pytest.mark.parametrize("attention", ["auto", "naive"])
def test_drafts_change_no_token(programs_of, asked, attention):
    expected = answer(evicting(programs_of(SNAPKV, attention=attention), 0.3), *asked)
    engine = evicting(programs_of(SNAPKV, Lookup(3), attention), 0.3, drafts=3)
    assert answer(engine, *asked) == expected
    assert engine.stats.drafted[0] > 20


@pytest.mark.deep
@pytest.mark.parametrize("attention", ["auto", "naive"])
def test_a_cancelled_request_leaves_no_page_behind(programs_of, asked, attention):
    engine = evicting(programs_of(SNAPKV, attention=attention), 0.3)
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
    """Whole sequences without a cache; each token sees the tokens of a mask `[T S]`."""

    mask: tuple[tuple[bool, ...], ...] = ()

    def step(self, model: Transformer, batch: Batch, pool: None) -> StepPlan:
        return super().step(model, batch, pool)._replace(shared=jnp.asarray(self.mask)[None, :, None])


def seen(prompt: int, length: int, every: int, stays, chunk: int | None) -> np.ndarray:
    """Each token's mask, if `stays(slots)` of the held tokens are kept after each chunk, after the prompt, and then again."""
    points = {*range(chunk or prompt, prompt, chunk or prompt), *range(prompt, length, every)}
    mask, held = np.zeros((length, length), bool), []
    for token in range(length):
        if token in points:
            held = stays(held, token)
        held.append(token)
        mask[token, held] = True
    return mask


@pytest.mark.deep
@pytest.mark.parametrize(
    ("policy", "budget", "attention"),
    [(policy, *other) for policy in ("streaming", "random") for other in (("uniform", "auto"), ("ada", "naive"))],
)
@pytest.mark.parametrize("chunk", [None, 64])
def test_tokens_are_those_of_a_whole_sequence_where_dropped_ones_are_masked(model, programs_of, policy, budget, attention, chunk):
    """For policies that look at slots alone, and so drop the same in all layers and heads. Positions stay as they were."""
    evicts, keep, every = Selection(EVICTION_POLICIES[policy], BUDGET_RULES[budget], sinks=3, recent=5), 0.2, 12
    prompt = np.random.default_rng(4).integers(2, WORDS, 150).tolist()
    (ids,) = answer(evicting(programs_of(evicts, attention=attention), keep, every, chunk=chunk), request(prompt))

    def stays(held: list[int], tokens: int) -> list[int]:
        count, slots = round(keep * tokens), range(len(held))
        forced = [slot for slot in slots if slot < 3 or slot >= len(held) - 5]
        slot = np.arange(len(held), dtype=np.uint32)
        mixed = (slot ^ slot >> 16) * np.uint32(0x7FEB352D)
        mixed = (mixed ^ mixed >> 15) * np.uint32(0x846CA68B)
        score = slot if policy == "streaming" else mixed >> 8
        others = sorted(set(slots) - set(forced), key=lambda slot: -int(score[slot]))
        return [held[slot] for slot in sorted([*forced, *others[: count - len(forced)]])]

    mask = seen(len(prompt), len(prompt) + len(ids), every, stays, chunk)
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


def whole(model: Transformer, tokens: list[int], masks: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of a sequence without a cache, where each layer and head sees what `masks [L T N S]` says; each layer's input."""
    batch = Batch.dense(1, len(tokens))
    plan, x, pending, inputs = model.dispatch.step(model, batch, None), model.embedded(jnp.asarray([tokens])), None, []
    for block, mask in zip(model.layers, masks, strict=True):
        inputs.append(np.asarray(settle(x, pending)))
        (x, pending, _), _, _ = block(x, pending, batch, None, plan._replace(shared=jnp.asarray(mask)[None]))
    hidden = rms_norm(settle(x, pending), model.norm[...], model.config.rms_norm_eps)
    return np.asarray(model.unembed(hidden)[0]), inputs


def masks_of(noted: list[Kept], prompt: int, length: int, every: int) -> np.ndarray:
    """Each token's mask in each layer and head, by the tokens kept each time. `[L T N S]`"""
    masks = np.zeros((LAYERS, length, HEADS, length), bool)
    for layer, head in np.ndindex(LAYERS, HEADS):
        slots = iter([kept.source[layer, head, 0, : kept.count[layer, head, 0]] for kept in noted])
        masks[layer, :, head] = seen(prompt, length, every, functools.partial(next_of, slots), None)
    return masks


def next_of(slots: Iterator[np.ndarray], held: list[int], tokens: int) -> list[int]:
    return [held[slot] for slot in next(slots)]


@pytest.mark.deep
def test_where_heads_are_cached_each_sees_what_it_has_kept(programs_of):
    programs, every = programs_of(Selection(SnapKV(window=8), BUDGET_RULES["ada"], recent=8), attention="naive"), 12
    prompt = np.random.default_rng(4).integers(2, WORDS, 150).tolist()
    engine = noting(programs, 0.25, every)
    (ids,) = answer(engine, request(prompt))
    masks = masks_of(engine.policy.noted, len(prompt), len(prompt) + len(ids), every)
    assert len(engine.policy.noted) == 4
    assert len(np.unique(masks[:, -1].reshape(LAYERS * HEADS, -1), axis=0)) == LAYERS * HEADS  # no two heads see the same
    logits, _ = whole(programs.model, prompt + ids, masks)
    assert np.argmax(logits[len(prompt) - 1 : -1], -1).tolist() == ids


@pytest.mark.deep
@pytest.mark.parametrize("budget", ["uniform", "ada"])
def test_where_heads_are_cached_each_keeps_what_snapkv_says(programs_of, budget):
    """By attention that is computed without a cache; Ada-KV shares out over the heads of each layer."""
    policy, recent, keep = SnapKV(window=8, kernel=5), 16, 0.25
    programs = programs_of(Selection(policy, BUDGET_RULES[budget], recent=recent), attention="naive")
    prompt = np.random.default_rng(6).integers(2, WORDS, 150).tolist()
    engine, count = noting(programs, keep), round(keep * len(prompt))
    answer(engine, request(prompt, max_tokens=4))
    (kept,) = engine.policy.noted
    _, inputs = whole(programs.model, prompt, np.tri(len(prompt), dtype=bool)[None, :, None].repeat(LAYERS, 0))
    for layer, x in enumerate(inputs):
        scores = snapkv(programs.model, layer, x, policy)
        scores[:, :4] = scores[:, -recent:] = np.inf
        wanted = np.full(HEADS, count)
        if budget == "ada":
            owners = np.argsort(-scores, axis=None, kind="stable")[: count * HEADS] // len(prompt)
            halves = (np.bincount(owners, minlength=HEADS) + count) / 2  # the paper's alpha is one half
            wanted = np.diff(np.floor(np.cumsum(halves) + 0.5), prepend=0).astype(int)
            assert len(set(wanted.tolist())) > 1
        assert kept.count[layer, :, 0].tolist() == wanted.tolist()
        assert kept.count[layer].sum() == count * HEADS
        for head in range(HEADS):
            best = np.argsort(-scores[head], kind="stable")[: wanted[head]]
            assert kept.source[layer, head, 0, : wanted[head]].tolist() == sorted(best.tolist())


def snapkv(model: Transformer, layer: int, x: np.ndarray, policy: SnapKV) -> np.ndarray:
    """The scores `[N S]` of a layer's tokens for its input, by plain arithmetic; 0 in the window."""
    config, block, tokens = model.config, model.layers[layer], x.shape[1]
    normed = rms_norm(jnp.asarray(x), block.attn_norm[...], config.rms_norm_eps)
    turns = rope.turns(Batch.dense(1, tokens).positions, config)
    q = jnp.concatenate(block.attn.turned(block.attn.queries(normed), turns), -1)[0]
    kv = linear(normed, block.attn.kv_a_proj[...])
    k = heads(*block.attn.keys(kv, turns), block.attn.up)["k"][0]
    logits = rope.softmax_scale(config) * np.einsum("tnh,snh->nts", np.asarray(q, float), np.asarray(k, float))
    weights = np.where(np.tri(tokens, dtype=bool), np.exp(logits - logits.max(-1, keepdims=True)), 0)
    mean = (weights / weights.sum(-1, keepdims=True))[:, -policy.window :].mean(1)
    mean[:, -policy.window :] = 0
    padded = np.pad(mean, ((0, 0), (policy.kernel // 2, policy.kernel // 2)))
    return sum(padded[:, i : i + tokens] for i in range(policy.kernel)) * (np.arange(tokens) < tokens - policy.window)


# what it costs


@pytest.mark.deep
@pytest.mark.parametrize("attention", ["auto", "naive"])
def test_pages_become_free_and_layers_and_heads_share_what_there_is(programs_of, attention):
    each = LAYERS * (HEADS if attention == "naive" else 1)
    prompt = np.random.default_rng(1).integers(2, WORDS, 5 * PAGE - 8).tolist()
    engine = evicting(programs_of(SNAPKV, attention=attention), 0.2)
    job, parts = engine.submit(request(prompt, max_tokens=60)), []
    while not job.done:
        engine.step()
        if isinstance(job.held, Evicted):
            parts.append(int(job.held.counts.sum()))
            assert (job.held.dropped > 0).all()
            kept = job.read + job.steps - job.held.dropped
            assert len(kept) == each
            assert kept.sum() <= each * (0.2 * (5 * PAGE + 60) + 17)
    assert max(parts) <= 2.5 * each  # of 5 pages in each layer
    assert engine.stats.pages_free == ROOMY.pages
    assert engine.stats.dropped > 200


@pytest.mark.deep
def test_a_request_that_cannot_fit_with_what_stays_of_it_is_refused(programs_of):
    engine = evicting(programs_of(SNAPKV), 0.5, size=dataclasses.replace(ROOMY, pages=6))
    with pytest.raises(DoesNotFit, match="does not fit the cache"):
        engine.submit(request([5] * 250))
    answer(engine, request([5] * 150))


@pytest.mark.deep
@pytest.mark.parametrize("attention", ["auto", "naive"])
def test_a_prompt_eight_times_as_long_as_the_cache_is_read_and_answered(programs_of, attention):
    """With room for a chunk, and twice for what stays."""
    prompt, size = np.random.default_rng(1).integers(2, WORDS, 4100).tolist(), dataclasses.replace(ROOMY, pages=8, context=4200)
    long = request(prompt, max_tokens=5)
    engine = evicting(programs_of(SNAPKV, attention=attention), 64, size=size, chunk=64)
    with pytest.raises(DoesNotFit):
        evicting(programs_of(SNAPKV, attention=attention), 64, size=size).submit(long)
    (ids,) = answer(engine, long)
    roomy = evicting(programs_of(SNAPKV, attention=attention), 64, size=dataclasses.replace(size, pages=80), chunk=64)
    assert answer(roomy, long, request(prompt[:700])) == [ids, *answer(engine, request(prompt[:700]))]
    assert len(ids) == 5
    assert engine.stats.dropped > 4000


def test_a_long_prompt_takes_programs_as_wide_as_what_it_holds_and_one_of_each(programs_of):
    prompt, size = np.random.default_rng(1).integers(2, WORDS, 700).tolist(), dataclasses.replace(ROOMY, pages=8, context=4200)
    engine = evicting(programs_of(SNAPKV), 64, size=size, chunk=64)
    answer(engine, request(prompt, max_tokens=5))
    narrow, _ = size.widths
    assert narrow < 700 // PAGE
    assert {shape.width for shape in engine.device._started} == {0, narrow}
    assert [len(engine.device.ready(name)) for name in ("observe", "move", "run")] == [1, 1, 1]


def test_a_prompt_that_is_scored_is_read_whole(programs_of, asked):
    size = dataclasses.replace(ROOMY, pages=6)
    engine = evicting(programs_of(SNAPKV), 32, size=size, chunk=64)
    scored = request(asked[1].prompt, prompt_logprobs=0)
    assert answer(engine, scored) == answer(evicting(programs_of(SNAPKV), 32), scored)
    with pytest.raises(DoesNotFit):
        engine.submit(request([5] * 340, prompt_logprobs=0))
    answer(engine, request([5] * 340, max_tokens=2))


@pytest.mark.parametrize("attention", ["auto", "naive"])
def test_nothing_compiles_once_warm(programs_of, asked, attention):
    engine = evicting(programs_of(SNAPKV, attention=attention), 0.3)
    engine.warm_up()
    with nothing_compiled():
        answer(engine, *asked)


# as users ask for it


def test_it_is_an_option_of_a_model(folder, asked):
    llm = LLM(folder, evict="snapkv", evict_budget="uniform", evict_keep=0.5)
    out = llm.generate([one.prompt for one in asked[:3]], SamplingParams(max_tokens=5, temperature=0))
    assert [len(one.token_ids) for one in out] == [5] * 3
    assert llm.stats().dropped > 100
    assert any("snapkv" in line and "50 %" in line and "over layers by" in line for line in llm.explain().splitlines())


@pytest.mark.deep
def test_where_heads_are_cached_it_says_that_they_share(folder, asked):
    llm = LLM(folder, evict="snapkv", attention="naive")
    (out,) = llm.generate([asked[0].prompt], SamplingParams(max_tokens=5, temperature=0))
    assert len(out.token_ids) == 5
    assert llm.stats().dropped > 100
    assert "25 % stay, shared out over layers and their heads by the rule uniform\n" in llm.explain()
