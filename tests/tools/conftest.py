"""Training compiles large programs and runs each for a few steps of a tiny model: most of the time is LLVM's."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def optimized_little():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # other tests compile for themselves
