"""The help is made of the option dataclasses, so it cannot leave one out."""

import dataclasses

import pytest

from mla_jax.generate import GROUPS, USAGE
from mla_jax.ui.help import help_text

TEXT = help_text(USAGE, GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_every_flag_has_a_line_with_a_word_of_explanation(group):
    for field in dataclasses.fields(GROUPS[group]):
        (line,) = [x for x in TEXT.splitlines() if x.startswith(f"  --{field.name.replace('_', '-')} ")]
        assert len(line[30:].split()) >= 3


def test_the_help_is_under_80_lines_and_no_line_is_too_wide():
    assert len(TEXT.splitlines()) < 80
    assert max(map(len, TEXT.splitlines())) <= 110


def test_the_help_ends_with_three_examples():
    assert len(TEXT.split("examples:\n")[1].splitlines()) == 3
