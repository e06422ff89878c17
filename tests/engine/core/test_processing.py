"""Requests with functions that change their logits: their tokens are those that numpy chooses, whatever runs beside them."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import serving
import sharded
from models import FAMILIES, tensors, write
from serving import answer, drafting_engine, evicting_engine, request

from mla_jax import LogitsProcessor
from mla_jax.base.axes import parse_mesh
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import NOBODY, Lookup, Mtp
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.size import Size
from mla_jax.mesh.devices import Devices
from mla_jax.weights.load import load

SIZE = Size(rows=8, pages=24, context=384, chunk=128)
DRAFTERS = {"nobody": NOBODY, "mtp": Mtp(3), "lookup": Lookup(3)}
PROMPTS = [[5, 6, 7], list(range(3, 93)), [9] * 40, [20, 21]]
EVERY = 3  # tokens of which the last is even


def no_token_again(logits, tokens, state):
    """Each token comes once in an answer."""
    place = jnp.arange(tokens.ids.size)
    known = (place >= tokens.prompt) & (place < tokens.count)
    seen = jnp.zeros(logits.shape, bool).at[jnp.where(known, tokens.ids, logits.size)].set(True, mode="drop")
    return jnp.where(seen, -jnp.inf, logits), state


def even_at_times(logits, tokens, state):
    """Every third token is even; the state counts."""
    odd = jnp.arange(logits.size) % 2 == 1
    return jnp.where(odd & (state["count"] % EVERY == EVERY - 1), -jnp.inf, logits), {"count": state["count"] + 1}


def _fails_without_a_word(logits, tokens, state):
    raise AssertionError


COUNTS = LogitsProcessor(even_at_times, {"count": 0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf, mtp=True))


@pytest.fixture(scope="module")
def programs_of(folder):
    model = load(folder)
    return functools.cache(lambda name: Programs(model, drafter=DRAFTERS[name]))


@pytest.fixture(scope="module")
def requests():
    """With either function, and without."""
    settings = itertools.cycle([{"logits": no_token_again}, {"logits": COUNTS}, {}])
    return [request(prompt, max_tokens=30, **one) for prompt, one in zip(PROMPTS * 2, settings, strict=False)]


@pytest.fixture(scope="module")
def expected(programs_of, requests):
    """Greedy tokens by numpy, from the logits of the whole sequence each time."""

    def tokens(asked) -> list[int]:
        ids: list[int] = []
        while len(ids) < asked.limit:
            logits = programs_of("nobody").logits_of(np.array([asked.prompt + ids], np.int32))[0, -1].copy()
            processor = asked.params.logits
            if processor is COUNTS and len(ids) % EVERY == EVERY - 1:
                logits[1::2] = -np.inf
            elif processor is not None and processor is not COUNTS:
                logits[ids] = -np.inf
            ids.append(int(logits.argmax()))
        return ids

    return [tokens(one) for one in requests[:4]]


def alone(programs, requests):
    return [answer(drafting_engine(programs, SIZE), one)[0] for one in requests]


@pytest.mark.deep
def test_tokens_are_those_that_numpy_chooses(programs_of, requests, expected):
    found = alone(programs_of("nobody"), requests[:4])
    assert found == expected
    assert len(set(found[0])) == len(found[0])
    assert all(token % 2 == 0 for token in found[1][EVERY - 1 :: EVERY])


@pytest.mark.deep
@pytest.mark.parametrize("drafter", [pytest.param(name, marks=pytest.mark.once) for name in DRAFTERS])
def test_batches_drafts_and_preemption_change_nothing(programs_of, requests, drafter):
    wanted = alone(programs_of("nobody"), requests)
    engine = drafting_engine(programs_of(drafter), SIZE, 3 if drafter != "nobody" else None)
    assert answer(engine, *requests) == wanted
    assert answer(engine, *requests, streams=True) == wanted
    assert answer(engine, *requests, preempt_every=3) == wanted


def test_rows_with_and_without_a_function_decode_together(programs_of):
    asked = [request([5, 6], max_tokens=4, logits=no_token_again), request([7, 8], max_tokens=4)]
    engine = drafting_engine(programs_of("nobody"), SIZE)
    first, second = answer(engine, *asked)
    assert len(set(first)) == 4
    assert second == answer(drafting_engine(programs_of("nobody"), SIZE), asked[1])[0]


def test_states_of_other_shapes_may_share_a_function_and_a_batch(programs_of):
    def shifted(logits, tokens, state):
        return logits + jnp.sum(state), state

    processors = [LogitsProcessor(shifted, 1.0), LogitsProcessor(shifted, np.ones(2))]
    asked = [request([5, 6], max_tokens=4, logits=one) for one in processors]
    plain = answer(drafting_engine(programs_of("nobody"), SIZE), request([5, 6], max_tokens=4))[0]
    assert answer(drafting_engine(programs_of("nobody"), SIZE), *asked) == [plain, plain]


def test_a_function_is_compiled_once(programs_of):
    engine, asked = drafting_engine(programs_of("nobody"), SIZE), request([5, 6], max_tokens=4, logits=no_token_again)
    answer(engine, asked)
    with serving.nothing_compiled():
        answer(engine, asked)


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=2", "tensor=2"])
def test_a_mesh_gives_the_tokens_of_one_device(folder, programs_of, requests, mesh):
    devices = Devices.of(parse_mesh(mesh))
    engine = Engine(Programs(sharded.spread(load(folder), devices)), SIZE)
    assert answer(engine, *requests) == alone(programs_of("nobody"), requests)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda logits, tokens, state: logits, "does not return"),
        (lambda logits, tokens, state: (logits[:3], state), "does not return"),
        (lambda logits, tokens, state: (logits, 1 / 0), "ZeroDivisionError"),
        (lambda logits, tokens, state: (logits, float(logits[0])), "cannot be traced"),
        (LogitsProcessor(lambda logits, tokens, state: (logits, state), "text"), "expected numbers"),
        (lambda logits, tokens, state: (logits + tokens.ids[:64].sum(), tokens.ids), "does not return"),
        (lambda logits, tokens, state: (logits + jnp.zeros(64) @ tokens.ids, state), "cannot be traced"),
        (_fails_without_a_word, "AssertionError"),
        (5, "expected a function"),
    ],
)
def test_a_function_of_another_kind_is_refused_before_it_runs(programs_of, function, words):
    engine = drafting_engine(programs_of("nobody"), SIZE)
    with pytest.raises(BadRequest, match=words):
        engine.submit(request([5], logits=function))
    assert not engine.busy


def test_a_function_for_rows_that_drop_tokens_is_refused(programs_of):
    selection = Selection(EVICTION_POLICIES["snapkv"], BUDGET_RULES["uniform"])
    programs = Programs(programs_of("nobody").model, evicts=selection)
    with pytest.raises(Unsupported, match="evict"):
        evicting_engine(programs, SIZE, 0.5).submit(request([5], logits=no_token_again))
