"""The results of the timed programs."""

import jax.numpy as jnp
from ops import timing


def test_a_program_gives_what_the_first_of_its_inputs_gives_though_it_goes_on_to_others():
    program = timing.Program(lambda n, x: x * n, [(jnp.int32(n), jnp.ones(3)) for n in (2, 5)], most=4)
    assert program.calls == 4
    assert program.out().tolist() == [2, 2, 2]


def test_a_call_may_wait_for_the_one_before_with_several_arrays():
    firsts = [(jnp.int32(n), jnp.ones(3, jnp.bfloat16)) for n in (2, 5)]
    work = timing.Work(lambda both, y: both[0] * both[1] + y, [(both, jnp.ones(3)) for both in firsts], lambda out: out.max())
    assert work.error(work.program().out()) == 3
