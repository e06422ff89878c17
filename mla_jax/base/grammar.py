"""The form that an answer is to have, as a request names it. No JAX here; `mla_jax.text.grammar` parses it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.base.names import nearest

MAX_GRAMMAR = 1 << 18  # characters of a definition
MAX_CHOICES = 1_000
WORD = 32  # tokens of a mask's word
GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """A form of answers: `definition` in the language that `kind` names. Raises BadRequest for a definition that is too long."""

    kind: GrammarKind
    definition: str

    def __post_init__(self):
        if self.kind not in get_args(GrammarKind) or not isinstance(self.definition, str):
            raise BadRequest(
                f"a grammar of the kind {shown(self.kind)} is {shown(self.definition)}",
                f"expected text of one of the kinds {', '.join(get_args(GrammarKind))}",
            )
        if len(self.definition) > MAX_GRAMMAR:
            raise BadRequest(
                f"a grammar has {len(self.definition):,} characters", f"the limit is {MAX_GRAMMAR:,}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Grammar":
        """JSON that a schema describes: an object, or its JSON text. true and {} describe any value."""
        found = _parsed(schema) if isinstance(schema, str) else schema
        if not isinstance(found, Mapping | bool):
            raise BadRequest("a JSON schema is an object", f"found {shown(found)}")
        return cls("json_schema", _written(found))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """The whole answer matches a pattern of Rust's regex crate, without anchors and look-around."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, rules: str) -> "Grammar":
        """A context-free grammar in Lark's form, whose first rule is `start`."""
        return cls("lark", rules)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """One of some texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise BadRequest("choices are a list of texts", f"found {shown(texts)}")
        if len(texts) > MAX_CHOICES:
            raise BadRequest(f"there are {len(texts):,} choices", f"the limit is {MAX_CHOICES:,}")
        return cls("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    @classmethod
    def of(cls, given: Any) -> "Grammar":
        """A Grammar as it is, or one from an object with one key, such as {"regex": "[0-9]+"}, as files and clients write it.

        The keys are the names of the methods above; json_object has the value true."""
        if isinstance(given, Grammar):
            return given
        if not isinstance(given, Mapping) or len(given) != 1:
            expected = f"expected a Grammar, or an object with one of the keys {', '.join(GRAMMAR_KEYS)}"
            raise BadRequest(f"a grammar is {shown(given)}", expected)
        ((form, value),) = given.items()
        if form not in GRAMMAR_KEYS:
            raise BadRequest(f"a grammar has the key {shown(form)}", nearest(str(form), GRAMMAR_KEYS))
        kinds, expected = GRAMMAR_KEYS[form]
        if not isinstance(value, kinds) or (form == "json_object" and not value):
            raise BadRequest(f"{form} is {shown(value)}", f"expected {expected}")
        return cls.json_object() if form == "json_object" else getattr(cls, form)(value)


# Keys of an object that names a grammar, and the values that they have
GRAMMAR_KEYS: dict[Any, tuple[Any, str]] = {
    "json_schema": ((Mapping, bool, str), "a JSON schema: an object, or its JSON text"),
    "json_object": (bool, "true, or no grammar"),
    "regex": (str, "text"),
    "lark": (str, "text"),
    "choice": ((list, tuple), "a list of texts"),
}


def mask_words(vocab_size: int) -> int:
    """The length of a mask: a row of 32-bit words with a bit a token, the lowest bit first; 1 where the token may come."""
    return -(-vocab_size // WORD)


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as e:
        raise BadRequest("a JSON schema is not JSON", printable(str(e), 200)) from e


def _written(schema: Mapping[str, Any] | bool) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise BadRequest("a JSON schema cannot be written as JSON", printable(str(e), 200)) from e
