"""Requests with grammars: their tokens are the likeliest of those that the grammar allows, whatever runs beside them, and nobody
waits for their masks."""

import dataclasses
import functools

import numpy as np
import pytest
import serving
import sharded
from characters import CHARACTERS, END, WORDS, characters_tokenizer
from models import FAMILIES, tensors, write
from serving import answer, drafting_engine, evicting_engine, finish, nothing_compiled

from mla_jax.base.axes import parse_mesh
from mla_jax.base.errors import BadRequest
from mla_jax.base.grammar import Grammar
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.paged import PAGE
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import NOBODY, Lookup, Mtp
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.size import Size
from mla_jax.mesh.devices import Devices
from mla_jax.text.grammar import Grammars
from mla_jax.weights.load import load

SIZE = Size(rows=8, pages=24, context=384, chunk=128)
DRAFTERS = {"nobody": NOBODY, "mtp": Mtp(3), "lookup": Lookup(3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    return load(write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True)))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(characters_tokenizer(), len(WORDS), [END])


@pytest.fixture(scope="module")
def programs_of(model):
    return functools.cache(lambda name: Programs(model, drafter=DRAFTERS[name]))


def engine_of(programs: Programs, grammars: Grammars, size: Size = SIZE) -> Engine:
    fixed = 3 if programs.drafter.most else None
    return drafting_engine(programs, size, fixed, grammars=grammars)


def choices(seed: int) -> list[str]:
    """Texts of which many begin alike; the rest of each is forced from some place on."""
    rng = np.random.default_rng(seed)
    letters = rng.choice(CHARACTERS[33:59], 4, replace=False)

    def text(length: int) -> str:
        return "".join(rng.choice(letters, length))

    return sorted({text(rng.integers(1, 4)) + text(rng.integers(0, 30)) for _ in range(40)})


def request(seed: int, **params) -> Request:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, 96, rng.integers(1, 150)).tolist()
    given = {"max_tokens": 60, "seed": seed, "grammar": Grammar.choice(choices(seed))} | params
    return dataclasses.replace(serving.request(prompt, **given), ends=(END,))


def plain_request(seed: int, **params) -> Request:
    return request(seed, grammar=None, **params)


def following(texts: list[str], begun: str) -> list[int]:
    """The tokens that may come behind the beginning of one of some texts."""
    behind = [text[len(begun) :] for text in texts if text.startswith(begun)]
    return [WORDS.index(rest[0]) if rest else END for rest in behind]


def expected_tokens(programs: Programs, asked: Request, texts: list[str]) -> list[int]:
    """The likeliest of the tokens that may come, from the logits of whole sequences without a cache."""
    ids, begun = [], ""
    while END not in ids:
        logits = programs.logits(np.array([asked.prompt + ids], np.int32))[0, -1]
        may_come = following(texts, begun)
        ids.append(max(may_come, key=lambda token: logits[token]))
        begun += WORDS[ids[-1]] if ids[-1] != END else ""
    return ids


@pytest.mark.deep
def test_tokens_are_the_likeliest_that_the_grammar_allows(programs_of, grammars):
    programs = programs_of("nobody")
    asked = [request(seed) for seed in range(3)]
    found = answer(engine_of(programs, grammars), *asked)
    for seed, (one, ids) in enumerate(zip(asked, found, strict=True)):
        assert ids == expected_tokens(programs, one, choices(seed))


def mixed_requests() -> list[Request]:
    """With grammars and without, greedy, sampled and penalised; one asks for log-probabilities."""
    sampled = {"temperature": 1.0, "top_k": 5, "top_p": 0.9}
    penalised = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    return [
        *(request(seed) for seed in range(4)),
        *(request(seed, **sampled) for seed in range(4, 7)),
        request(7, **penalised, **sampled),
        request(8, logprobs=3),
        *(plain_request(seed, max_tokens=40) for seed in range(9, 12)),
        *(plain_request(seed, max_tokens=40, **sampled) for seed in range(12, 14)),
    ]


@pytest.fixture(scope="module")
def alone(programs_of, grammars) -> list[list[int]]:
    """The tokens of mixed_requests, each alone, without drafts."""
    return [answer(engine_of(programs_of("nobody"), grammars), one)[0] for one in mixed_requests()]


@pytest.mark.deep
@pytest.mark.parametrize("drafter", [*DRAFTERS])
@pytest.mark.parametrize("preempt_every", [0, 3])
@pytest.mark.parametrize("streams", [False, True])
def test_tokens_are_those_of_a_request_alone(programs_of, grammars, alone, drafter, preempt_every, streams):
    engine = engine_of(programs_of(drafter), grammars)
    found = answer(engine, *mixed_requests(), streams=streams, preempt_every=preempt_every)
    assert found == alone
    assert engine.shards[0].pages.free == SIZE.pages
    assert preempt_every == 0 or engine.stats.preemptions > 5


@pytest.mark.deep
def test_tokens_are_the_same_where_pages_are_short(programs_of, grammars, alone):
    engine = engine_of(programs_of("mtp"), grammars, dataclasses.replace(SIZE, pages=10))
    assert answer(engine, *mixed_requests()) == alone


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "tensor=2,context=2"])
def test_tokens_on_a_mesh_are_those_of_one_device(model, grammars, alone, mesh):
    spread = sharded.spread(model, Devices.of(parse_mesh(mesh)))
    engine = engine_of(Programs(spread, drafter=DRAFTERS["mtp"]), grammars)
    assert answer(engine, *mixed_requests()) == alone


@pytest.mark.deep
@pytest.mark.parametrize("drafter", ["nobody", "mtp"])
def test_tokens_beside_others_are_those_alone_where_rows_drop_tokens(model, grammars, drafter):
    selection = Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["ada"], recent=16)
    programs = Programs(model, drafter=DRAFTERS[drafter], evicts=selection)
    asked = [*(request(seed) for seed in range(3)), plain_request(9, max_tokens=40)]

    def served(*some: Request, preempt_every: int = 0) -> list[list[int]]:
        drafts = 3 if programs.drafter.most else None
        engine = evicting_engine(programs, SIZE, 0.5, drafts=drafts, grammars=grammars)
        return answer(engine, *some, preempt_every=preempt_every)

    one_by_one = [served(one)[0] for one in asked]
    assert served(*asked) == one_by_one
    assert served(*asked, preempt_every=4) == one_by_one
    for seed in range(3):
        assert "".join(WORDS[token] for token in one_by_one[seed][:-1]) in choices(seed)


@pytest.mark.deep
@pytest.mark.parametrize("drafter", ["mtp", "lookup"])
def test_forced_tokens_come_several_a_pass(programs_of, grammars, drafter):
    text = "".join(CHARACTERS[:60])
    engine = engine_of(programs_of(drafter), grammars)
    (ids,) = answer(engine, request(0, grammar=Grammar.choice([text]), max_tokens=100))
    assert ids == [*map(WORDS.index, text), END]
    assert engine.stats.passes < 25  # of up to four tokens each
    assert engine.stats.stood.sum() > 40


@pytest.mark.deep
def test_others_go_on_while_a_row_waits_for_its_mask(programs_of, grammars):
    engine = engine_of(programs_of("nobody"), grammars)
    guided = engine.submit(request(0, grammar=Grammar.regex("[a-z]{40}")))
    plain = engine.submit(plain_request(1, max_tokens=200))
    while not guided.done:
        engine.step()
    assert guided.ids[-1] == END
    assert len(plain.ids) > 1.8 * len(guided.ids)  # in the pass with it, and in the one after
    assert plain.ids == answer(engine_of(programs_of("nobody"), grammars), plain_request(1, max_tokens=200))[0][: len(plain.ids)]


@pytest.mark.deep
def test_prompts_are_read_while_rows_have_grammars(programs_of, grammars):
    engine = engine_of(programs_of("nobody"), grammars)
    guided = engine.submit(request(0, grammar=Grammar.regex("[a-z]{100}"), max_tokens=120))
    while not guided.ids:
        engine.step()
    late = engine.submit(plain_request(1, max_tokens=4))
    while not late.done:
        engine.step()
    assert not guided.done


def test_an_answer_of_the_longest_length_ends_there(programs_of, grammars):
    engine = engine_of(programs_of("nobody"), grammars)
    job = engine.submit(request(0, grammar=Grammar.regex("[a-z]{40}"), max_tokens=7))
    (ids,) = finish(engine, [job])
    assert len(ids) == 7
    assert job.reason is FinishReason.LENGTH


def test_a_grammar_that_fails_ends_its_request_alone(programs_of, grammars, monkeypatch):
    engine = engine_of(programs_of("nobody"), grammars)
    failing, other = engine.submit(request(0)), engine.submit(request(1))

    def fail(tokens):
        raise BadRequest("too large")

    monkeypatch.setattr(failing.matcher, "follow", fail)
    finish(engine, [failing, other])
    assert failing.reason is FinishReason.ERROR
    assert str(failing.error) == "too large"
    assert other.reason is FinishReason.END
    assert engine.stats.pages_free == SIZE.pages


def test_an_engine_without_grammars_says_so(programs_of):
    with pytest.raises(BadRequest, match="has no grammars"):
        Engine(programs_of("nobody"), SIZE).submit(request(0))


@pytest.mark.deep
def test_after_warm_up_with_grammars_nothing_is_compiled(model, grammars):
    size = Size(rows=2, pages=6, context=2 * PAGE, chunk=64)
    engine = drafting_engine(Programs(model, drafter=DRAFTERS["mtp"]), size, 3, grammars=grammars)
    engine.warm_up(grammars=True)
    with nothing_compiled():
        answer(engine, *(request(seed, max_tokens=20) for seed in (11, 21)))
