"""Who guesses, and how many guesses a pass takes: worked out by hand from shares and seconds."""

import functools
import math
import re
from collections import Counter

import numpy as np
import pytest
from costs import released_cost

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.options import MOST_DRAFTS, DraftOptions
from mla_jax.base.roofline import DEVICES, Device
from mla_jax.decode.speculative import NOBODY, Drafter, Lookup, Mtp
from mla_jax.engine.core.drafting import AGAIN, ASSUMED_HELD, PLAIN, Drafting, Shares, drafter_of
from mla_jax.mesh.cost import MeshCost

pytestmark = pytest.mark.once  # plain Python

TWELVE = Config.preset("v2_lite", num_hidden_layers=12, num_nextn_predict_layers=1)
# Each layer takes a millisecond and all else nothing: a pass takes 12 ms, each guess of the layer for them 2 ms more.
EASY = Device("a millisecond a layer", "gpu", 1e30, 1e30, between=1e-3)
LITE = Config.preset("v2_lite", num_nextn_predict_layers=1)
MANY = 1_000_000  # guesses, so many that what was hoped does not matter
GREEDY, SAMPLED = [True], [False]
SOON = 8


@functools.cache
def cost(device: Device, config: Config = TWELVE) -> MeshCost:
    return released_cost(config, device=device, mtp=True)


def easy(drafter: Drafter | None = None, fixed: int | None = None) -> Drafting:
    return Drafting(cost(EASY), drafter or Mtp(), fixed)


def timed(drafter: Drafter | None = None, rows: int = 1) -> Drafting:
    """A drafting policy that has measured a pass without drafts: the predicted time."""
    drafting = easy(drafter)
    drafting.note_time(rows, ASSUMED_HELD, 0, 12e-3)
    return drafting


def places(*counts: float) -> np.ndarray:
    """Of one row."""
    return np.array([[*counts, *[0] * (MOST_DRAFTS - len(counts))]], np.int64)


@pytest.fixture
def soon(monkeypatch):
    """Tries of other numbers of guesses come sooner than they do, so that tests need fewer dispatches."""
    monkeypatch.setattr("mla_jax.engine.core.drafting.AGAIN", SOON)


def tell(drafting: Drafting, kind: list[bool], *shares: float) -> None:
    """So that guesses stand with these shares: each place is asked for as often as the one before it stood."""
    stood = [MANY * math.prod(shares[: n + 1]) for n in range(len(shares))]
    drafting.note(kind, places(MANY, *stood[:-1]), places(*stood))


def milliseconds(drafting: Drafting, rows: int = 1) -> list[float]:
    return [1e3 * drafting.seconds(rows, ASSUMED_HELD, drafts) for drafts in range(1 + drafting.drafter.most)]


NO_LAYER = 'draft "mtp" is not available for this model\n  it has no layer for that; draft may be "lookup"'
NOBODY_GUESSES = 'draft_tokens is 2, but this model has no layer that guesses\n  draft may be "lookup"'
IS_OFF = 'draft_tokens is 2, but draft is off\n  draft may be "auto", "mtp" or "lookup"'


@pytest.mark.parametrize(
    ("draft", "tokens", "with_layer", "without"),
    [  # on a GPU
        ("auto", None, Mtp(3), NOBODY),
        ("auto", 0, NOBODY, NOBODY),
        ("auto", 2, Mtp(2), (Unsupported, NOBODY_GUESSES)),
        ("off", None, NOBODY, NOBODY),
        ("off", 0, NOBODY, NOBODY),
        ("off", 2, (BadRequest, IS_OFF), (BadRequest, IS_OFF)),
        ("mtp", None, Mtp(3), (Unsupported, NO_LAYER)),
        ("mtp", 0, NOBODY, (Unsupported, NO_LAYER)),
        ("mtp", 2, Mtp(2), (Unsupported, NO_LAYER)),
        ("lookup", None, Lookup(3), Lookup(3)),
        ("lookup", 0, NOBODY, NOBODY),
        ("lookup", 2, Lookup(2), Lookup(2)),
    ],
)
@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_options_the_model_and_the_platform_say_who_guesses(draft, tokens, with_layer, without, platform):
    for has_mtp, expected in ((True, with_layer), (False, without)):
        if platform == "cpu" and (draft, tokens) == ("auto", None):
            expected = NOBODY  # the one difference: nobody has asked for drafts
        options = DraftOptions(draft, tokens)
        if isinstance(expected, tuple):
            error, words = expected
            with pytest.raises(error, match=f"^{re.escape(words)}$"):
                drafter_of(options, has_mtp, platform)
        else:
            assert drafter_of(options, has_mtp, platform) == expected


def test_shares_follow_a_text_that_changes():
    shares = Shares(0.8)
    for _ in range(300):
        shares.note(places(4)[0], places(0)[0])
    assert shares.of_places[0] < 0.01
    for _ in range(35):  # after which half of what was known has faded: 0.98 ** 35 is 0.49
        shares.note(places(4)[0], places(4)[0])
    assert shares.of_places[0] == pytest.approx(0.5, abs=0.02)
    for _ in range(300):
        shares.note(places(4)[0], places(4)[0])
    assert shares.of_places[0] > 0.99


@pytest.mark.parametrize(
    ("shares", "times", "best"),
    [
        # by the prediction of 12, 14, 16 and 18 ms, in tokens a second:
        ((0.8, 0.8, 0.8), None, 3),  # 83, 129, 153, 164
        ((0.5, 0.9, 0.9), None, 3),  # 83, 107, 122, 131
        ((0.5, 0.5, 0.5), None, 2),  # 83, 107, 109, 104
        ((0.9, 0.1, 0.1), None, 1),  # 83, 136, 124, 111
        ((0.1, 0.9, 0.9), None, 0),  # 83, 79, 75, 71
        # by what was measured:
        ((0.8, 0.8, 0.8), (12, 20, 20, 30), 2),  # 83, 90, 122, 98
        ((0.8, 0.8, 0.8), (12, 14, 25, 30), 1),  # 83, 129, 98, 98
        ((0.8, 0.8, 0.8), (12, 24, 31, 36), 0),  # 83, 75, 79, 82
        ((0.1, 0.9, 0.9), (24, 20, 18, 16), 3),  # 42, 55, 66, 80
    ],
)
def test_as_many_guesses_are_taken_as_give_most_tokens_a_second(shares, times, best):
    drafting = timed() if times is None else easy()
    for drafts, time in enumerate(times or ()):
        drafting.note_time(1, ASSUMED_HELD, drafts, 1e-3 * time)
    tell(drafting, GREEDY, *shares)
    tokens = [1 + sum(math.prod(shares[:n]) for n in range(1, drafts + 1)) for drafts in range(4)]
    rates = [count / time for count, time in zip(tokens, times or (12, 14, 16, 18), strict=True)]
    assert rates.index(max(rates)) == best
    assert drafting.count(GREEDY, ASSUMED_HELD) == best


def test_a_fixed_number_is_always_taken():
    drafting = easy(fixed=2)
    tell(drafting, GREEDY, 0.01, 0.01, 0.01)
    assert {drafting.count(GREEDY, ASSUMED_HELD) for _ in range(2 * AGAIN)} == {2}
    assert drafting.pays(4096)


def test_dispatches_go_without_guesses_until_one_was_timed():
    drafting = easy()
    assert drafting.count(GREEDY, ASSUMED_HELD) == 0
    drafting.note_time(1, ASSUMED_HELD, 0, 12e-3)
    assert drafting.count(GREEDY, ASSUMED_HELD) == 3
    assert drafting.count([True] * 3, ASSUMED_HELD) == 0  # what four rows take is not known
    drafting.note_time(4, ASSUMED_HELD, 0, 12e-3)
    assert drafting.count([True] * 3, ASSUMED_HELD) == 3


def test_where_no_dispatch_can_be_timed_guesses_begin_after_a_few_without():
    drafting = easy()
    assert [drafting.count(GREEDY, ASSUMED_HELD) for _ in range(PLAIN + 3)] == [0] * PLAIN + [3] * 3
    drafting.note_time(1, ASSUMED_HELD, 3, 18e-3)  # that is not what was waited for
    assert drafting.count(GREEDY, ASSUMED_HELD) == 3
    assert [drafting.count([True] * 2, ASSUMED_HELD) for _ in range(PLAIN + 3)] == [0] * PLAIN + [3] * 3


def test_rows_that_are_greedy_and_rows_that_sample_have_shares_of_their_own_and_a_mixed_batch_their_mean():
    drafting = timed()
    for rows in (2, 4):
        drafting.note_time(rows, ASSUMED_HELD, 0, 12e-3)
    tell(drafting, GREEDY, 1, 1, 1)
    drafting.note(SAMPLED, places(MANY, MANY, MANY), places(0))
    assert drafting.count(GREEDY, ASSUMED_HELD) == 3  # 1/12, 2/14, 3/16, 4/18: 83, 143, 188, 222 tokens a second
    assert drafting.count(SAMPLED, ASSUMED_HELD) == 0
    assert drafting.count(GREEDY + SAMPLED, ASSUMED_HELD) == 2  # half of them: 83, 107, 109, 104
    assert drafting.count(GREEDY + 3 * SAMPLED, ASSUMED_HELD) == 1  # a quarter: 83, 89, 82, 74
    assert drafting.count(3 * SAMPLED, ASSUMED_HELD) == 0


def dispatches_until(drafting: Drafting, best: int, late: int, times: float, at: int) -> int:
    """Dispatches until the best number is taken again, twice in a row, after one that took `times` times the predicted time: the
    `at`-th with `late` drafts."""
    taken, since, before = Counter(), None, None
    for dispatch in range(100 * SOON):
        drafts = drafting.count(GREEDY, ASSUMED_HELD)
        if since is not None and drafts == before == best:
            return dispatch - since
        taken[drafts] += 1
        is_late = since is None and drafts == late and taken[late] == at
        drafting.note_time(1, ASSUMED_HELD, drafts, (times if is_late else 1.0) * 1e-3 * (12 + 2 * drafts))
        since, before = (dispatch, None) if is_late else (since, drafts)
    raise AssertionError("it never came back")


@pytest.mark.parametrize(
    ("share", "best", "late", "times", "at", "tries"),
    [
        # One guess of which 80 % stand pays while it takes up to 1.54 times what is predicted: 1.8 / 14 against 1 / 12.
        (0.8, 1, 1, 100.0, 1, 3),  # its first time, cut to 2.0: then 1.8, 1.64, 1.51
        (0.8, 1, 1, 10.0, 9, 6),  # a later one, 0.8 + 0.2 * 10 = 2.8: then 2.44, 2.15, 1.92, 1.74, 1.59, 1.47
        # One that never stands pays where plain passes take more than 14 / 12 = 1.17 times what is predicted.
        (0.0, 0, 0, 100.0, 1, 0),  # the first time of all: a guess is taken to be as late, so nothing changes
        (0.0, 0, 0, 6.0, 9, 9),  # 2.0 while a guess is on time; 1 + 0.8 ** 9 is 1.13
    ],
)
def test_a_host_that_was_late_once_spoils_a_number_of_guesses_only_until_it_was_tried_some_more_times(
    share, best, late, times, at, tries, soon
):
    drafting = easy(Mtp(1))
    tell(drafting, GREEDY, share)
    most = 2 * SOON * tries + 2  # one guess and none are tried in turn
    assert dispatches_until(drafting, best, late, times, at) <= most


def test_rows_whose_passes_are_bound_by_memory_may_draft_and_those_bound_by_arithmetic_never_do():
    memory, arithmetic = Device("", "gpu", 1e24, 1e12, 0.0), Device("", "gpu", 1e12, math.inf, 0.0)
    for drafter in (Mtp(), Lookup()):
        assert Drafting(cost(memory), drafter).pays(1)
        assert not Drafting(cost(arithmetic), drafter).pays(1)  # 1 + 0.95 + 0.9 + 0.86 = 3.7 tokens, four times the work
        assert Drafting(cost(arithmetic), drafter, fixed=1).pays(1)


def test_a_cpu_drafts_for_few_rows_and_not_for_many():
    drafting = Drafting(cost(DEVICES["cpu"], LITE), Lookup())
    pays = [drafting.pays(2**n) for n in range(11)]
    assert pays == sorted(pays, reverse=True)
    assert (pays[0], pays[-1]) == (True, False)


def test_only_a_drafter_that_runs_a_layer_takes_time_of_its_own():
    assert milliseconds(easy(Mtp(3))) == pytest.approx([12, 14, 16, 18])
    assert milliseconds(easy(Lookup(3))) == pytest.approx([12, 12, 12, 12])


def test_the_explanation_names_who_guesses_and_what_passes_take():
    assert easy(Mtp(3)).explain(1) == (
        "drafts: by the model's layer for multi-token prediction, as many as pay, up to 3; "
        "1 row, 1,024 tokens held: a pass with 0 to 3 guesses is predicted to take 12, 14, 16, 18 ms"
    )
    drafting = easy(Lookup(2))
    drafting.note_time(8, ASSUMED_HELD, 0, 15.06e-3)
    assert drafting.explain(8) == (
        "drafts: by looking up what followed before, as many as pay, up to 2; "
        "8 rows, 1,024 tokens held: a pass with 0 to 2 guesses is predicted to take 15.1, 15.1, 15.1 ms"
    )
    assert easy(Lookup(2), fixed=2).explain(8) == "drafts: 2 guesses a pass by looking up what followed before"
