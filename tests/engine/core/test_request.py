"""A request's finish reason, and the speed of its answer."""

from types import SimpleNamespace

import jax
import pytest

from mla_jax.base.options import SamplingParams
from mla_jax.engine.core import stats
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.stats import Stats


def test_a_request_ends_at_the_models_tokens_and_the_users():
    request = Request([5, 6], SamplingParams(max_tokens=4, stop_token_ids=(9,)), (1, 2))
    assert request.all_ends == (1, 2, 9)
    assert request.limit == 4


@pytest.mark.parametrize(
    ("tokens", "seconds", "rate"),
    [(11, 2.0, 5.0), (1, 2.0, 0.0), (0, 0.0, 0.0), (5, 0.0, 0.0)],
    ids=["the first came before", "one token", "none", "no time"],
)
def test_the_rate_is_of_the_tokens_after_the_first(tokens, seconds, rate):
    stats = Stats(3, tokens, first_token_seconds=1.0, decode_seconds=seconds, compile_seconds=0.0, seed=0)
    assert stats.tokens_per_second == rate


@pytest.mark.parametrize(("told", "peak"), [({"peak_bytes_in_use": 5}, 5), ({"peak_bytes_in_use": 0}, None), (None, None)])
def test_a_peak_that_the_device_does_not_tell_is_unknown_not_zero(monkeypatch, told, peak):
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: told)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert stats.peak_bytes() == peak
