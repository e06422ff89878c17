"""The programs over rows and pool: chunks and runs of any length leave the same, and rows that have ended hold still."""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES, tensors, write

from mla_jax.base.options import MAX_ENDS
from mla_jax.decode.loop import Line, Programs
from mla_jax.decode.outputs import STEPS, Chosen, largest_tokens
from mla_jax.decode.rows import ADMITTED, Rows, default_entries, taken
from mla_jax.decode.sampling import OUTPUT, PROMPT
from mla_jax.weights.load import load

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20], [33, 34, 35, 36, 37], [40, 41, 42]]
ROWS, PAGES = len(PROMPTS), 2
HEIGHT = 6  # of the table
LIMITS = (30, 9, 12, 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    return load(write(tmp_path_factory.mktemp("v3"), hf, tensors(hf)))


@pytest.fixture(scope="module")
def programs(model) -> Programs:
    return Programs(model)


@dataclass
class Served:
    """Rows that are read and continued; the table's rows are in another order than the batch's."""

    programs: Programs
    temperatures: tuple = (0.0, 1.0, 0.0, 0.7)
    limits: tuple = LIMITS
    ends: int = -1
    at: np.ndarray = field(default_factory=lambda: np.array([4, 1, 0, 3], np.int32))
    ids: list[list[int]] = field(default_factory=lambda: [[] for _ in PROMPTS])
    logprobs: list[list[float]] = field(default_factory=lambda: [[] for _ in PROMPTS])

    def __post_init__(self):
        self.table = np.random.default_rng(0).permutation(ROWS * PAGES).reshape(ROWS, PAGES).astype(np.int32)
        self.pool, self.rows = self.programs.new(HEIGHT, ROWS * PAGES)
        entry = default_entries(ADMITTED)

        def column(values: tuple, dtype: type) -> np.ndarray:
            return np.array([*values, *[0] * (ADMITTED - ROWS)], dtype)

        sampling = dataclasses.replace(
            entry.sampling,
            temperature=column(self.temperatures, np.float32),
            seed=np.stack([np.zeros(ADMITTED), np.arange(ADMITTED)], 1).astype(np.uint32),
            ends=np.full((ADMITTED, MAX_ENDS), self.ends, np.int32),
        )
        entry = dataclasses.replace(
            entry,
            prompt=column(tuple(map(len, PROMPTS)), np.int32),
            limit=column(self.limits, np.int32),
            logprobs=np.ones(ADMITTED, bool),
            sampling=sampling,
        )
        at = np.array([*self.at, *[HEIGHT] * (ADMITTED - ROWS)], np.int32)
        self.rows = self.programs.admit(self.rows, at, entry)

    def read(self, parts: list[list[int]], width: int) -> "Served":
        line = [token for part in parts for token in part]
        tokens = np.array([*line, *[0] * (width - len(line))], np.int32)
        counts = np.array([len(part) for part in parts], np.int32)
        self.pool, self.rows, _ = self.programs.prefill(self.pool, self.rows, self.at, tokens, counts, self.table, None)
        return self

    def run(self, steps: int) -> Chosen:
        self.pool, self.rows, found = self.programs.run(self.pool, self.rows, self.at, self.table, np.int32(steps))
        chosen, likely = found.tokens(), found.logprobs()
        for i, count in enumerate(chosen.count.tolist()):
            self.ids[i] += chosen.tokens[i, :count].tolist()
            self.logprobs[i] += likely.logprobs[i, :count].tolist()
        return chosen

    def some(self, which: list[int]) -> np.ndarray:
        """Rows of the table, of these requests; the others are none."""
        return np.array([row if i in which else HEIGHT for i, row in enumerate(self.at)], np.int32)

    def both(self, parts: dict[int, list[int]], width: int, decode: list[int]) -> None:
        """One pass: reads parts of some prompts, and takes a step of other requests."""
        line = [token for part in parts.values() for token in part]
        tokens = np.array([*line, *[0] * (width - len(line))], np.int32)
        counts = np.array([len(parts.get(i, [])) for i in range(ROWS)], np.int32)
        given = Line(self.some([*parts]), tokens, counts, self.table), self.some(decode), self.table
        self.pool, self.rows, found = self.programs.mixed_step(self.pool, self.rows, *given)
        chosen, likely = found.tokens(), found.logprobs()
        for i in decode:
            self.ids[i] += chosen.tokens[i, : chosen.count[i]].tolist()
            self.logprobs[i] += likely.logprobs[i, : chosen.count[i]].tolist()

    def told(self) -> dict[str, np.ndarray]:
        """The state that must not depend on the sizes of steps."""
        _, is_open, last = taken(self.rows, jnp.asarray(self.at))
        told = {name: np.asarray(value) for name, value in vars(is_open).items()}
        return told | {"last": np.asarray(last), "seen": np.asarray(self.rows.seen)[self.at]}


def begun(programs: Programs, **other) -> Served:
    return Served(programs, **other).read(PROMPTS, 24)


def assert_same(one: Served, other: Served):
    assert one.ids == other.ids
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for name, value in one.told().items():
        np.testing.assert_allclose(value, other.told()[name], atol=1e-5, err_msg=name)
    for name, array in one.pool.items():
        np.testing.assert_allclose(array, other.pool[name], atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("cuts", [[1] * 30, [5, 13, 12], [2**30, 1]])
def test_one_run_equals_many_short_ones(programs, cuts):
    whole, short = begun(programs), begun(programs)
    whole.run(30)
    for steps in cuts:
        chosen = short.run(steps)
    assert_same(short, whole)
    assert [len(ids) for ids in whole.ids] == list(LIMITS)
    assert chosen.done.all()


def test_one_pass_for_both_leaves_what_a_line_and_a_step_leave(programs):
    together, whole = Served(programs), begun(programs)
    together.both({0: PROMPTS[0], 1: PROMPTS[1]}, 16, decode=[])
    together.both({2: PROMPTS[2][:2], 3: PROMPTS[3]}, 16, decode=[0, 1])
    together.both({2: PROMPTS[2][2:4]}, 3, decode=[0, 1, 3])
    together.both({2: PROMPTS[2][4:]}, 3, decode=[1, 3])
    assert [len(ids) for ids in together.ids] == [2, 3, 0, 2]
    together.run(30), whole.run(30)
    assert_same(together, whole)
    assert [len(ids) for ids in whole.ids] == list(LIMITS)


@pytest.mark.deep
def test_in_one_pass_a_row_whose_logits_are_no_numbers_ends_alone(programs):
    good, bad = begun(programs), begun(programs)
    last = bad.rows.last.at[bad.at[0]].set(jnp.nan)
    bad.rows = dataclasses.replace(bad.rows, last=last)
    for served in (good, bad):
        served.both({}, 16, decode=[0, 1, 2, 3])
    assert (good.ids[1:], bad.ids[0]) == (bad.ids[1:], [])
    assert bad.told()["finite"].tolist() == [False, True, True, True]


def test_a_run_takes_as_many_steps_as_its_answer_has_room_for(programs):
    served = begun(programs, limits=(60, 60, 60, 60))
    assert served.run(2**30).count.tolist() == [STEPS] * ROWS
    assert served.run(2**30).count.tolist() == [60 - STEPS] * ROWS


@pytest.mark.deep
@pytest.mark.parametrize("width", [3, 4, 7])
def test_prompts_read_in_chunks_equal_prompts_read_whole(programs, width):
    chunked, whole = Served(programs), begun(programs)
    for start in range(0, 10, width):
        chunked.read([prompt[start : start + width] for prompt in PROMPTS], width)
    chunked.run(5), whole.run(5)
    assert_same(chunked, whole)


@pytest.mark.deep
def test_rows_may_be_run_apart(programs):
    together, apart = begun(programs), begun(programs)
    together.run(20)
    tables, rows = apart.table, apart.at
    for i in range(ROWS):
        apart.at, apart.table = np.array([rows[i], HEIGHT], np.int32), np.stack([tables[i], 0 * tables[i]])
        apart.pool, apart.rows, found = programs.run(apart.pool, apart.rows, apart.at, apart.table, np.int32(20))
        chosen = found.tokens()
        assert chosen.count[1] == 0
        assert chosen.tokens[0, : chosen.count[0]].tolist() == together.ids[i]


def test_the_cache_holds_every_token_but_the_last(programs):
    served = begun(programs)
    served.run(30)
    held = [len(prompt) + len(ids) - 1 for prompt, ids in zip(PROMPTS, served.ids, strict=True)]
    assert served.told()["held"].tolist() == held
    assert served.told()["position"].tolist() == held
    for i, count in enumerate(held):
        for layer in range(2):
            pages = np.asarray(served.pool["c_kv"])[served.table[i] + layer * ROWS * PAGES]
            written = np.abs(pages).sum(-1).reshape(-1) > 0
            assert written.tolist() == [True] * count + [False] * (len(written) - count)


def test_rows_that_have_ended_hold_still(programs):
    served = begun(programs)
    chosen = served.run(12)
    before = served.told()
    ended = np.asarray(chosen.done)
    assert ended.tolist() == [False, True, True, False]
    served.run(2**30)
    for name, value in served.told().items():
        assert np.array_equal(value[ended], before[name][ended]), name


def test_a_row_that_may_generate_nothing_records_nothing(programs):
    served = begun(programs, limits=(0, 3, 0, 3))
    chosen = served.run(2**30)
    assert chosen.count.tolist() == [0, 3, 0, 3]
    assert chosen.finite.all()


def test_an_end_token_is_recorded_and_ends_its_row_alone(programs):
    free = begun(programs)
    free.run(2**30)
    end = free.ids[0][4]
    served = begun(programs, ends=end)
    served.run(2**30)
    for ids, found in zip(free.ids, served.ids, strict=True):
        assert found == (ids[: ids.index(end) + 1] if end in ids else ids)


def test_seen_tells_prompt_and_output_apart_and_counts_the_output(programs):
    served = begun(programs)
    served.run(2**30)
    for prompt, ids, seen in zip(PROMPTS, served.ids, served.told()["seen"], strict=True):
        assert [bool(n & PROMPT) for n in seen] == [w in prompt for w in range(len(seen))]
        assert [n & OUTPUT for n in seen] == [ids.count(w) for w in range(len(seen))]


def test_what_was_generated_before_a_row_was_preempted_counts_as_output_again(programs):
    served = begun(programs)
    served.run(8)
    again = Served(programs)
    again.read([prompt + ids for prompt, ids in zip(PROMPTS, served.ids, strict=True)], 32)
    assert np.array_equal(again.told()["seen"], served.told()["seen"])


@pytest.mark.deep
def test_every_token_is_the_choice_of_the_whole_sequence_before_it(programs):
    served = begun(programs, temperatures=(0.0,) * ROWS)
    served.run(2**30)
    for prompt, ids, logprobs in zip(PROMPTS, served.ids, served.logprobs, strict=True):
        sequence = jnp.zeros((1, 42), jnp.int32).at[0, : len(prompt + ids)].set(jnp.asarray(prompt + ids))
        logits = programs.logits(sequence)[0, len(prompt) - 1 :][: len(ids)]
        assert jnp.argmax(logits, -1).tolist() == ids
        expected = jax.nn.log_softmax(logits)[jnp.arange(len(ids)), jnp.asarray(ids)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_hidden_states_of_nan_end_their_row_alone(programs):
    whole, served = begun(programs), begun(programs)
    whole.run(2**30)
    served.rows = dataclasses.replace(served.rows, last=served.rows.last.at[served.at[1]].set(jnp.nan))
    chosen = served.run(2**30)
    assert chosen.finite.tolist() == [True, False, True, True]
    assert served.ids == [whole.ids[0], [], *whole.ids[2:]]


def test_a_row_that_is_admitted_again_knows_nothing_of_the_one_before(programs):
    served = begun(programs)
    served.run(6)
    fresh = Served(programs)
    everyone = np.arange(ADMITTED, dtype=np.int32)
    rows: Rows = programs.admit(served.rows, everyone, default_entries(ADMITTED))
    _, is_open, _ = taken(rows, jnp.asarray(everyone))
    assert not np.asarray(rows.seen).any()
    assert not np.asarray(is_open.count).any()
    assert np.asarray(is_open.done).all()  # nothing may be generated
    assert fresh.told()["count"].tolist() == [0] * ROWS


@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 1, 1000)])
def test_the_largest_are_those_of_top_k(shape):
    numbers = np.random.default_rng(0).integers(-20, 20, shape).astype(np.float32)  # with ties
    numbers[..., 5:-5:2] = -np.inf
    np.testing.assert_array_equal(largest_tokens(jnp.asarray(numbers), 20), jax.lax.top_k(numbers, 20)[1])
