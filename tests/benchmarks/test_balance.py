"""The benchmark of uneven shards: its pretended programs lose no token, and their times are the cost model's."""

import balance
import numpy as np
import pytest

from mla_jax.engine.core.size import Size

SIZE = Size(rows=1, pages=40, context=2 * balance.LONGEST, chunk=256)
COUNT = 12


def load() -> balance.Load:
    """Half of them at once, so that some wait."""
    found = balance.Load.drawn(0.0, COUNT, 20.0)
    due = np.maximum(found.due - found.due[COUNT // 2], 0)
    return found._replace(prompts=np.minimum(found.prompts, 300), outputs=np.minimum(found.outputs, 10), due=due)


@pytest.fixture(scope="module")
def results():
    asked = load()
    return asked, {name: balance.serve(way, asked, SIZE) for name, way in balance.WAYS.items()}


def test_every_way_reads_and_generates_each_token_once(results):
    asked, found = results
    for name, result in found.items():
        assert (result.read, result.total) == (asked.prompts.sum(), asked.outputs.sum()), name
        assert result.preempted == 0, name


def test_every_request_gets_its_first_token_after_it_came(results):
    _, found = results
    for name, result in found.items():
        assert (result.first > 0).all(), name  # NaN is not


def test_devices_are_never_busy_for_longer_than_the_time_that_passes_and_lose_less_than_they_are_busy(results):
    _, found = results
    for name, result in found.items():
        clock = result.end
        assert 0 < sum(clock.seconds.values()) <= clock.free * (1 + 1e-9), name
        assert all(0 <= clock.lost[kind] < clock.seconds[kind] for kind in clock.seconds), name
        assert all(clock.uneven[kind] >= clock.seconds[kind] * (1 - 1e-9) for kind in clock.seconds), name


def test_one_shard_with_all_rows_is_even(results):
    clock = results[1]["even"].end
    assert {kind: clock.uneven[kind] for kind in clock.seconds} == pytest.approx(dict(clock.seconds))
    assert clock.lost["reading"] == 0


def test_work_that_moves_is_not_lost(results):
    assert results[1]["decode work moves"].end.lost["decode"] == 0


def test_pages_that_run_out_preempt_and_still_no_token_is_lost():
    asked = load()._replace(prompts=np.full(COUNT, 900), outputs=np.full(COUNT, 160))
    few = Size(rows=2, pages=33, context=2 * balance.LONGEST, chunk=256)
    result = balance.serve(balance.WAYS["as it is"], asked, few)
    assert result.preempted > 0
    assert result.total == asked.outputs.sum()
    assert result.read > asked.prompts.sum()  # what they had generated, too


def test_the_engine_as_it_is_decides_for_itself(monkeypatch):
    def refuse(*_):
        raise AssertionError("another way was taken")

    monkeypatch.setattr(balance, "agreed", refuse)
    balance.serve(balance.WAYS["as it is"], load(), SIZE)


def test_the_engine_as_it_is_lets_prompts_of_few_shards_wait():
    waits, at_once = (balance.serve(balance.WAYS[way], load(), SIZE) for way in ("as it is", "reads at once"))
    assert waits.total == at_once.total
    assert waits.end.seconds != at_once.end.seconds


def test_a_step_takes_what_the_cost_model_says_of_equal_rows():
    assert balance.step_seconds(32, 32 * 4096) == balance.COST.decode(32, 4096).seconds
    prompts = sum([balance.piece(0, 256)] * 4, balance.Reading())  # whose tokens attend to 128 on average
    assert balance.reading_seconds(1024, prompts) == pytest.approx(balance.COST.prompts(256).seconds)


def test_a_long_prompt_takes_longer_than_short_ones_of_as_many_tokens():
    short = sum([balance.piece(0, 128)] * 8, balance.Reading())
    assert balance.reading_seconds(1024, balance.piece(16_000, 1024)) > 1.5 * balance.reading_seconds(1024, short)


def test_lengths_have_the_means_that_are_told_of_sharegpt():
    drawn = balance.Load.drawn(0.0, 100_000, None)
    assert drawn.prompts.mean() == pytest.approx(228, rel=0.02)
    assert drawn.outputs.mean() == pytest.approx(202, rel=0.02)
