"""Values within a body, checked. `where` is the place of one, such as input[2]; each raises BadField."""

from collections.abc import Collection, Mapping
from typing import Any

from mla_jax.base.errors import shown
from mla_jax.serve.errors import BadField


def required_text(where: str, given: Any, key: str) -> str:
    """The text of a key that must be there."""
    value = given.get(key) if isinstance(given, Mapping) else None
    if not isinstance(value, str):
        raise BadField(f"{where}.{key}", f"is {shown(value)}", "expected a text")
    return value


def known_word(where: str, found: Any, known: Collection[str], hint: str | None = None) -> str:
    """A word, which has to be one of `known`; `hint` stands instead of these in the error."""
    if not isinstance(found, str) or found not in known:
        expected = hint or f"expected {' or '.join(known)}"
        raise BadField(where, f"is {shown(found)}, which is not supported", expected)
    return found
