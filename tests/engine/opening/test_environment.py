"""The share of a GPU that JAX takes, which it reads from the environment."""

import os

import pytest

from mla_jax.base.options import MEMORY_FRACTION
from mla_jax.engine.opening.environment import FRACTION, set_memory_fraction

NEW, OLD = FRACTION


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        ({}, None, {NEW: str(MEMORY_FRACTION)}),
        ({}, 0.5, {NEW: "0.5"}),
        ({OLD: "0.3"}, None, {OLD: "0.3"}),  # a user's own stays
        ({NEW: "0.3"}, None, {NEW: "0.3"}),
        ({OLD: "0.3"}, 0.5, {NEW: "0.5"}),  # JAX refuses both
    ],
)
def test_the_fraction_is_the_one_that_is_asked_for_or_the_user_s_or_the_default(before, asked, after, monkeypatch):
    for name in FRACTION:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    set_memory_fraction(asked)
    found = {name: os.environ.pop(name) for name in FRACTION if name in os.environ}
    assert found == after
