"""Programs for a dispatch: the lines that requests do with meanwhile."""

import dataclasses
from unittest.mock import create_autospec

import pytest

from mla_jax.decode.loop import ProgramShape
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.program_choice import ProgramChoice
from mla_jax.engine.core.scheduler import Limits

LIMITS = Limits(rows=8, page_size=64, lines=(16, 64, 256))


def lines_meanwhile(begun: tuple[int, ...], needed: int | None, limits: Limits = LIMITS) -> tuple[int, ...]:
    """Lines that are left when a line of `needed` tokens is, and programs of the `begun` ones are there or soon will be."""
    programs = [ProgramShape("mixed_step", 1, 1, line) for line in begun]
    device = create_autospec(Dispatcher, instance=True)
    device.size, device.begun.return_value = None, programs
    choice = ProgramChoice(device, create_autospec(Drafting, instance=True), create_autospec(CachePolicy, instance=True))
    wanted = [] if needed is None else [ProgramShape("mixed_step", 1, 1, needed)]
    return choice.sooner(limits, [*wanted, ProgramShape("run", 1, 1)]).lines


@pytest.mark.parametrize(
    ("begun", "needed", "left"),
    [
        ((), None, (16, 64, 256)),  # nobody reads
        ((), 64, (16, 64, 256)),
        ((64,), 64, (16, 64, 256)),  # it is there itself
        ((16,), 64, (16, 64, 256)),  # a shorter one would read a prompt in more steps, so the needed one is compiled
        ((256,), 64, (256,)),
        ((64, 256), 16, (64, 256)),
    ],
)
def test_a_longer_line_that_is_there_reads_a_short_prompt(begun, needed, left):
    assert lines_meanwhile(begun, needed) == left


def test_programs_of_lines_that_the_limits_do_not_have_leave_them_as_they_are():
    few = dataclasses.replace(LIMITS, lines=(16,))
    assert lines_meanwhile((64, 256), 16, few) == (16,)
