"""The help is made of the option dataclasses, so it cannot leave one out."""

import dataclasses
from typing import Any

import pytest

from mla_jax import generate
from mla_jax.base.errors import BadRequest
from mla_jax.generate import COMMAND_GROUPS, main
from mla_jax.serve import __main__ as serve
from mla_jax.ui.help import FIRST_GROUPS, asked_groups, help_text

COMMANDS = {"generate": generate.ABOUT, "serve": serve.ABOUT_SERVE}
GROUPS = [(name, group) for name, about in COMMANDS.items() for group in about.groups]


@pytest.mark.parametrize(("command", "group"), GROUPS)
def test_every_flag_has_a_line_with_a_word_of_explanation(command, group):
    about = COMMANDS[command]
    for text in (help_text(about, list(about.groups)), help_text(about, [group])):
        for field in (x for x in dataclasses.fields(about.groups[group]) if x.type is not Any):
            (line,) = [x for x in text.splitlines() if x.startswith(f"  --{field.name.replace('_', '-')} ")]
            assert len(line[30:].split()) >= 3


@pytest.mark.parametrize("about", COMMANDS.values(), ids=COMMANDS)
def test_the_help_is_under_60_lines_and_no_line_is_too_wide(about):
    short, whole = help_text(about).splitlines(), help_text(about, list(about.groups)).splitlines()
    assert len(short) < 60
    assert max(map(len, [*short, *whole])) <= 110


@pytest.mark.parametrize(("command", "group"), GROUPS)
def test_the_short_help_has_the_flags_of_a_group_or_how_to_ask_for_them(command, group):
    text = help_text(COMMANDS[command])
    assert (f"\n{group}: " in text) == (group in FIRST_GROUPS)
    assert (f"\n--help {group} " in text) == (group not in FIRST_GROUPS)


@pytest.mark.parametrize("about", COMMANDS.values(), ids=COMMANDS)
def test_the_help_ends_with_three_examples(about):
    assert len(help_text(about).split("examples:\n")[1].splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        (["--help"], []),
        (["AB", "--model", "x", "-h"], []),
        (["--help", "mesh", "experts"], ["mesh", "experts"]),
        (["-h", "drafts", "--model", "x"], ["drafts"]),
        (["--help", "all"], list(COMMAND_GROUPS)),
    ],
)
def test_groups_are_asked_for_by_their_names(arguments, groups):
    assert asked_groups(arguments, COMMAND_GROUPS) == groups


def test_a_group_that_is_misspelt_gets_a_suggestion(capsys):
    with pytest.raises(BadRequest, match="did you mean eviction"):
        asked_groups(["--help", "evction"], COMMAND_GROUPS)
    assert main(["--help", "evction"]) == 2
    assert capsys.readouterr().err.splitlines() == ["error: --help evction: there is no such group", "  did you mean eviction?"]


def test_a_group_has_its_own_flags_alone(capsys):
    assert main(["--help", "mesh"]) == 0
    shown = capsys.readouterr().out
    assert "--mesh " in shown
    assert "--temperature" not in shown
