"""The search for better sizes, with programs whose times are known."""

import contextlib
import copy
import importlib
import math
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from ops import timing

from pallas_kernels import tuning

DECODE, FEW, MOE = ("MLA_DECODE", 512), ("MLA_DECODE_FEW", 512), ("MOE_DECODE",)
GOOD = 0.002


@pytest.fixture
def tune(kernels):
    return importlib.import_module("tune")


class Fake:
    """A program that takes `times(entry)`, in turn, and is off by `off(entry)`."""

    def __init__(self, entry, times, off):
        self.entry, self.times, self.off = entry, iter(times(entry)), off

    def microseconds(self):
        return next(self.times)

    def out(self):
        return self.off(self.entry)


def work():
    return timing.Work(call=None, args_sets=[], error=lambda out: out)


def build(tune, address, times, off=lambda entry: GOOD):
    """The table's entry decides, as with a kernel."""
    return lambda work: Fake(tune.present(address), times, off)


def constant(table: dict, rest: float):
    """`table`: microseconds by a word of the entry's text."""
    return lambda entry: [next((us for word, us in table.items() if word in str(entry)), rest)] * 9


def test_the_fastest_over_all_rows_is_taken(tune):
    per_row = iter([{"(88, 168)": 50, "(80, 176)": 90}, {"(88, 168)": 120, "(80, 176)": 90}])

    def works():
        for times in per_row:
            yield "a row", SimpleNamespace(times=times, error=lambda out: out)

    def built(work):
        return Fake(tune.present(DECODE), constant(work.times, 100), lambda entry: GOOD)

    rows, entry, gain = tune.search(DECODE, works(), 3, built)
    assert entry == {"registers": (88, 168)}
    assert gain == pytest.approx(math.sqrt(100 / 50 * 100 / 120))
    assert len(rows) == 2 * len(tune.entries(DECODE))
    assert tune.verdict(DECODE, entry, gain) == 'MLA_DECODE/512: 29.1 % faster with\n    512: {"registers": (88, 168)},'


@pytest.mark.parametrize(("us", "taken"), [(99.5, False), (98.5, True)])
def test_the_present_entry_stays_unless_it_is_beaten_by_more_than_one_percent(tune, us, taken):
    built = build(tune, MOE, constant({"(6, 12)": us}, 100))
    _, entry, gain = tune.search(MOE, [("a row", work())], 3, built)
    assert (entry != tuning.MOE_DECODE) == taken
    assert tune.verdict(MOE, entry, gain) == (
        'MOE_DECODE: 1.5 % faster with\nMOE_DECODE = {"depth": 128, "slots": (6, 12)}' if taken else "MOE_DECODE: stays"
    )


def test_times_are_medians_of_rounds_in_which_all_take_turns(tune):
    order = []

    def times(entry):
        for us in (10, 500, 30):
            order.append(str(entry))
            yield us

    trials = tune.compare(DECODE, tune.entries(DECODE)[:2], work(), 3, build(tune, DECODE, times))
    assert [trial.us for trial in trials] == [30, 30]
    assert order == [str(trial.entry) for trial in trials] * 3


@pytest.mark.parametrize("off", [0.0041, 0.3, math.inf, math.nan])
def test_a_candidate_that_computes_something_else_is_refused_however_fast(tune, off):
    fast, wrong = constant({"(88, 168)": 1}, 100), lambda entry: off if "(88, 168)" in str(entry) else GOOD
    rows, entry, _ = tune.search(DECODE, [("a row", work())], 3, build(tune, DECODE, fast, wrong))
    assert entry == tuning.MLA_DECODE[512]
    assert [row["candidate"] for row in rows if "its error is" in row.get("refused", "")] == ['{"registers": (88, 168)}']


def test_candidates_that_fail_are_refused_with_the_reason_and_not_tried_on_other_rows(tune, capsys):
    def failing(work):
        entry = tune.present(FEW)
        if entry["width"] == 64:
            raise ValueError("too much\nshared memory")
        times = constant({"(6, 5, 5, 5)": 50}, 100)
        return Fake(entry, times if entry["registers"] != (232, 40) else lambda entry: iter(()), lambda entry: GOOD)

    rows, entry, _ = tune.search(FEW, [("one", work()), ("two", work())], 2, failing)
    assert entry["slots"] == (6, 5, 5, 5)
    refused = [row for row in rows if "refused" in row]
    assert [row["refused"] for row in refused if "64" in row["candidate"]] == ["ValueError: too much shared memory"]
    assert [row["refused"].split(":")[0] for row in refused if "232" in row["candidate"]] == ["StopIteration"]
    assert {row["row"] for row in refused} == {"one"}
    assert "too much shared memory" in capsys.readouterr().out


@pytest.mark.parametrize("off", [GOOD, 0.3])
def test_without_the_present_entry_there_is_nothing_to_compare(tune, off):
    def failing(work):
        if off == GOOD and tune.present(DECODE) == tuning.MLA_DECODE[256]:
            raise ValueError("none")
        return Fake(None, constant({}, 1), lambda entry: off)

    with pytest.raises(RuntimeError, match="the present entry is refused"):
        tune.search(DECODE, [("a row", work())], 1, failing)


@pytest.mark.parametrize("address", [DECODE, ("RAGGED_DOT", "bf16", 144), MOE])
def test_a_table_is_as_it_was_whatever_happens_while_another_entry_stands_in_it(tune, address):
    before = copy.deepcopy(getattr(tuning, address[0]))
    for entry in tune.entries(address):
        with contextlib.suppress(KeyboardInterrupt), tune.standing(address, entry):
            assert tune.present(address) == entry
            raise KeyboardInterrupt
    assert getattr(tuning, address[0]) == before
    assert list(getattr(tuning, address[0])) == list(before)


def test_what_was_traced_before_is_not_taken_for_another_entry(tune):
    @jax.jit
    def traced(x):
        return x + tuning.MLA_DECODE[512]["registers"][0]

    present, other, *_ = tune.entries(DECODE)
    assert traced(jnp.int32(0)) == present["registers"][0]
    with tune.standing(DECODE, other):
        assert traced(jnp.int32(0)) == other["registers"][0]
    assert traced(jnp.int32(0)) == present["registers"][0]


def test_every_candidate_has_the_keys_of_the_entry_that_it_would_replace_and_cannot_wait_for_ever(tune):
    for address in tune.CANDIDATES:
        now, *others = tune.entries(address)
        assert others
        for entry in others:
            assert type(entry) is type(now)
            if isinstance(now, dict):
                assert list(entry) == list(now)
                assert all(type(entry[key]) is type(now[key]) for key in now)
                assert all(len(entry[key]) == len(now[key]) for key in now if isinstance(now[key], tuple))
            else:  # slots, depth, fewer tokens than the width
                assert len(entry) >= 2
                assert list(entry[2:]) == sorted(entry[2:])
                assert max(entry[2:], default=0) < address[2]


def test_registers_are_no_more_than_a_launch_has_and_rings_hold_a_whole_tile(tune):
    for address in tune.CANDIDATES:
        for entry in (entry for entry in tune.entries(address) if "registers" in entry):
            some = entry["registers"]
            assert all(count % 8 == 0 for count in some)
            if address[0] == "MLA_DECODE":
                assert 2 * sum(some) <= 512
                assert some[0] <= 128 <= some[1]
            else:
                assert sum(some) + (some[0] if len(some) == 2 else 0) <= 504
                assert some[-1] <= 168 <= some[0]
            if address[0] == "MLA_DECODE_FEW":
                assert min(entry["slots"]) >= address[1] // entry["width"]


def test_every_entry_has_rows(tune, monkeypatch):
    named = SimpleNamespace(work=lambda *_: "work")
    monkeypatch.setattr(tune.mla_decode, "Shape", lambda *_: named)
    for module in (tune.mla_prefill, tune.moe_decode, tune.ragged_dot):
        monkeypatch.setattr(module, "work", named.work)
    monkeypatch.setattr(tune.moe_decode, "weights", lambda shape: [])
    monkeypatch.setattr(tune.ragged_dot, "random_inputs", lambda shape: {})
    monkeypatch.setattr(tune.ragged_dot, "held", lambda inputs, how: {})
    for address in tune.CANDIDATES:
        rows = list(tune.WORKS[address[0]](*address[1:]))
        assert rows, address
        assert len(dict(rows)) == len(rows)


def test_the_script_goes_on_where_an_entry_fails_and_says_what_was_found(tune, monkeypatch, capsys, tmp_path):
    def search(address, works, rounds):
        if address == MOE:
            raise RuntimeError("no such thing")
        return [{"entry": tune.label(address), "us": 1.0}], tune.entries(address)[1], 1.02

    monkeypatch.setattr(tune, "search", search)
    monkeypatch.setattr(tune.choice, "why_not", lambda *_: None)
    out = tmp_path / "tuned.json"
    monkeypatch.setattr(sys, "argv", ["tune.py", "MOE_DECODE", "RAGGED_DOT/bf16/32", "MLA_PREFILL", "--out", str(out)])
    tune.main()
    printed = capsys.readouterr().out
    assert "MOE_DECODE: RuntimeError: no such thing" in printed
    assert "RAGGED_DOT/bf16/32: 2.0 % faster with\n    32: (4, 64)," in printed
    assert f"(256, 256): {tune.text(tune.entries(('MLA_PREFILL', (256, 256)))[1])}," in printed
    assert '"verdicts"' in out.read_text()


@pytest.mark.parametrize("name", ["MLA_DECODE_MOST", "MLA_DEC"])
def test_a_name_without_candidates_is_an_error(tune, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune.py", name])
    with pytest.raises(SystemExit):
        tune.main()
    assert f"no entry {name}" in capsys.readouterr().err
