"""The state of a batch: chunks and runs of any length leave the same, and rows that have ended hold still."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES, tensors, write

from mla_jax.cache.latent import EMPTY
from mla_jax.decode.loop import Programs, State
from mla_jax.decode.sampling import OUTPUT, PROMPT, Sampling
from mla_jax.weights.load import load

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20], [33, 34, 35, 36, 37], [40, 41, 42]]
ROWS, SLOTS, CAPACITY = len(PROMPTS), 64, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    return load(write(tmp_path_factory.mktemp("v3"), hf, tensors(hf)))


@pytest.fixture(scope="module")
def programs(model) -> Programs:
    return Programs(model)


def begun(
    programs: Programs, temperatures: tuple = (0.0, 1.0, 0.0, 0.7), limits: tuple = (32, 9, 12, 20), ends: int = -1
) -> State:
    """The prompts read in one chunk, nothing chosen yet."""
    return read(programs, new(programs, temperatures, limits, ends), PROMPTS, 16)


def new(programs: Programs, temperatures: tuple = (0.0,) * ROWS, limits: tuple = (32,) * ROWS, ends: int = -1) -> State:
    ones = jnp.ones(ROWS)
    seeds = jnp.asarray([[0, i] for i in range(ROWS)], jnp.uint32)
    sampling = Sampling(jnp.asarray(temperatures), jnp.zeros(ROWS, jnp.int32), ones, 0 * ones, 0 * ones, ones, seeds)
    return programs.new(SLOTS, CAPACITY, 2, jnp.asarray(limits, jnp.int32), jnp.full((ROWS, 1), ends, jnp.int32), sampling)


def read(programs: Programs, state: State, parts: list[list[int | None]], width: int) -> State:
    """One chunk; None stands for padding."""
    padded = [[*part, *[None] * (width - len(part))] for part in parts]
    mask = np.array([[token is not None for token in row] for row in padded])
    return programs.prefill(state, np.array([[token or 0 for token in row] for row in padded], np.int32), mask)


def told(state: State) -> dict[str, np.ndarray]:
    """What must not depend on how the work was cut up."""
    names = ("tokens", "count", "position", "seen", "done", "finite", "logprobs", "top_logprobs", "top_ids")
    return {name: np.asarray(getattr(state, name)) for name in names}


def assert_same(one: State, other: State):
    for name, value in told(one).items():
        np.testing.assert_allclose(value, told(other)[name], atol=1e-5, err_msg=name)
    for mine, theirs in zip(one.cache, other.cache, strict=True):
        assert np.array_equal(mine["positions"], theirs["positions"])
        np.testing.assert_allclose(mine["c_kv"], theirs["c_kv"], atol=1e-5)


@pytest.mark.parametrize("cuts", [[1] * 31, [5, 13, 13], [2**30, 1]])
def test_one_run_equals_many_short_ones(programs, cuts):
    whole = programs.run(programs.begin(begun(programs)), jnp.int32(31))
    state = programs.begin(begun(programs))
    for steps in cuts:
        state = programs.run(state, jnp.int32(steps))
    assert_same(state, whole)
    assert state.count.tolist() == [32, 9, 12, 20]
    assert state.done.all()


@pytest.mark.parametrize("width", [3, 4, 7])
def test_prompts_read_in_chunks_equal_prompts_read_whole(programs, width):
    state = new(programs)
    for start in range(0, 10, width):
        state = read(programs, state, [prompt[start : start + width] for prompt in PROMPTS], width)
    whole = read(programs, new(programs), PROMPTS, 16)
    np.testing.assert_allclose(state.last, whole.last, atol=1e-5)
    assert_same(programs.begin(state), programs.begin(whole))


def test_padding_may_stand_anywhere_in_a_chunk(programs):
    scattered = [[None, *prompt[:1], None, None, *prompt[1:]] for prompt in PROMPTS]
    state, whole = read(programs, new(programs), scattered, 16), read(programs, new(programs), PROMPTS, 16)
    np.testing.assert_allclose(state.last, whole.last, atol=1e-5)
    assert_same(programs.begin(state), programs.begin(whole))


def test_the_cache_holds_every_token_but_the_newest_at_its_position(programs):
    state = programs.run(programs.begin(begun(programs)), jnp.int32(2**30))
    for layer in state.cache:
        for i, prompt in enumerate(PROMPTS):
            held = len(prompt) + int(state.count[i]) - 1
            assert layer["positions"][i].tolist() == [*range(held), *[EMPTY] * (SLOTS - held)]
    assert state.position.tolist() == [len(p) + int(n) - 1 for p, n in zip(PROMPTS, state.count, strict=True)]


def test_rows_that_have_ended_hold_still(programs):
    early = programs.run(programs.begin(begun(programs)), jnp.int32(12))
    before = {**told(early), "c_kv": np.asarray(early.cache[0]["c_kv"])}
    late = programs.run(early, jnp.int32(2**30))
    after = {**told(late), "c_kv": np.asarray(late.cache[0]["c_kv"])}
    ended = before["done"]
    assert ended.tolist() == [False, True, True, False]
    for name, value in before.items():
        assert np.array_equal(value[ended], after[name][ended]), name


def test_a_row_that_may_generate_nothing_records_nothing(programs):
    state = programs.run(programs.begin(begun(programs, limits=(0, 3, 0, 3))), jnp.int32(2**30))
    assert state.count.tolist() == [0, 3, 0, 3]
    assert not state.tokens[np.array([0, 2])].any()
    assert state.finite.all()


def test_an_end_token_is_recorded_and_ends_its_row_alone(programs):
    free = programs.run(programs.begin(begun(programs)), jnp.int32(2**30))
    end = int(free.tokens[0, 4])
    state = programs.run(programs.begin(begun(programs, ends=end)), jnp.int32(2**30))
    for i in range(ROWS):
        expected = free.tokens[i, : free.count[i]].tolist()
        expected = expected[: expected.index(end) + 1] if end in expected else expected
        assert state.tokens[i, : state.count[i]].tolist() == expected


def test_seen_tells_prompt_and_output_apart(programs):
    state = programs.run(programs.begin(begun(programs)), jnp.int32(2**30))
    for i, prompt in enumerate(PROMPTS):
        output = set(state.tokens[i, : state.count[i]].tolist())
        expected = [PROMPT * (w in prompt) + OUTPUT * (w in output) for w in range(state.seen.shape[1])]
        assert state.seen[i].tolist() == expected


def test_every_token_is_the_choice_of_the_whole_sequence_before_it(programs):
    state = programs.run(programs.begin(begun(programs, temperatures=(0.0,) * ROWS)), jnp.int32(2**30))
    for i, prompt in enumerate(PROMPTS):
        ids = state.tokens[i, : state.count[i]].tolist()
        sequence = jnp.zeros((1, 42), jnp.int32).at[0, : len(prompt + ids)].set(jnp.asarray(prompt + ids))
        logits = programs.logits(sequence)[0, len(prompt) - 1 :][: len(ids)]
        assert jnp.argmax(logits, -1).tolist() == ids
        np.testing.assert_allclose(
            state.logprobs[i, : len(ids)], jax.nn.log_softmax(logits)[jnp.arange(len(ids)), jnp.asarray(ids)], atol=1e-4
        )


def test_hidden_states_of_nan_end_their_row_alone(programs):
    whole = programs.run(programs.begin(begun(programs)), jnp.int32(2**30))
    state = begun(programs)
    state = dataclasses.replace(state, last=state.last.at[1].set(jnp.nan))
    state = programs.run(programs.begin(state), jnp.int32(2**30))
    assert state.finite.tolist() == [True, False, True, True]
    assert state.count.tolist() == [32, 0, 12, 20]
    others = np.array([0, 2, 3])
    assert np.array_equal(state.tokens[others], whole.tokens[others])


def test_a_span_that_covers_the_prompt_changes_nothing(programs):
    tokens = np.array([[*p, *[0] * (16 - len(p))] for p in PROMPTS], np.int32)
    mask = np.arange(16) < np.array([[len(p)] for p in PROMPTS])
    near, far = (programs.prefill(new(programs), tokens, mask, span=span) for span in (16, None))
    np.testing.assert_allclose(near.last, far.last, atol=1e-5)
