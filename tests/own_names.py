"""Forms and expert backends that a test registers, and that go with it."""

from collections.abc import Iterator
from contextlib import contextmanager

from mla_jax.base.options import OWN_ATTENTION, OWN_EXPERTS
from mla_jax.model.mla import FORMS
from mla_jax.model.moe import BACKENDS


@contextmanager
def own_names_go() -> Iterator[None]:
    """Afterwards the library's own names are left."""
    try:
        yield
    finally:
        for names, table in ((OWN_ATTENTION, FORMS), (OWN_EXPERTS, BACKENDS)):
            for name in names:
                del table[name]
            names.clear()
