"""Every sampling parameter has a range; all faults are reported at once, in words."""

import math

import jaxtyping
import pytest

from mla_jax.base.errors import BadRequest
from mla_jax.base.options import SamplingParams


@pytest.fixture(autouse=True)
def no_checks_of_type(monkeypatch):
    """Users run without the checks of the tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


IN_RANGE = {
    "temperature": [0, 0.0, 1e-9, 1, 1000],
    "top_k": [0, 1, 10**12],
    "top_p": [0, 0.5, 1],
    "min_p": [0, 1],
    "presence_penalty": [-100, 0, 2.5, 100],
    "repetition_penalty": [1e-3, 1, 1000],
    "max_tokens": [0, 1, 10**9],
    "seed": [0, 2**64 - 1],
    "logprobs": [0, 20],
    "stop": [(), "end", ("a", "b"), ["a"], ("x",) * 64],
    "stop_token_ids": [(), (0, 2**31 - 1), [3], 3],
}
NO_NUMBERS = ["1", (1,), True, math.nan, math.inf, -math.inf]
OUT_OF_RANGE = {
    "temperature": [-1e-9, 1000.1, *NO_NUMBERS],
    "top_k": [-1, 1.0, *NO_NUMBERS],
    "top_p": [-0.1, 1.1, 2, *NO_NUMBERS],
    "min_p": [-0.1, 1.1, *NO_NUMBERS],
    "presence_penalty": [-101, 101, *NO_NUMBERS],
    "repetition_penalty": [0, -1, 1001, *NO_NUMBERS],
    "max_tokens": [-1, 1.5, *NO_NUMBERS],
    "seed": [-1, 2**64, 0.5, *NO_NUMBERS],
    "logprobs": [-1, 21, *NO_NUMBERS],
    "stop": [("",), "", (1,), None, 7, ("a",) * 65],
    "stop_token_ids": [(-1,), (2**31,), ("a",), (True,), 1.5, None, tuple(range(65))],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IN_RANGE.items() for value in values])
def test_what_is_in_range_is_taken(name, value):
    params = SamplingParams(**{name: value})
    if not name.startswith("stop"):
        assert getattr(params, name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{name: value})
    assert any(line.startswith(f"{name} ") for line in refused.value.args[1:])


def test_all_faults_are_reported_at_once():
    with pytest.raises(BadRequest) as refused:
        SamplingParams(temperature=-1, top_p=2, stop="", max_tokens=-3)
    assert len(refused.value.args) == 5


def test_stops_are_kept_as_tuples_however_given():
    params = SamplingParams(stop="end", stop_token_ids=[4, 5])
    assert (params.stop, params.stop_token_ids) == (("end",), (4, 5))
    assert SamplingParams(stop=["a", "b"], stop_token_ids=9) == SamplingParams(stop=("a", "b"), stop_token_ids=(9,))


def test_only_what_is_not_given_takes_the_default():
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=0, max_tokens=7, seed=3)
    mixed = SamplingParams(temperature=0, seed=0).or_default(defaults)
    assert (mixed.temperature, mixed.top_p, mixed.max_tokens, mixed.seed) == (0, 0.95, 7, 0)
