"""Grammars that an answer follows, and the tokens that may come next. llguidance parses, on the host; no JAX here.

A mask is a row of 32-bit words with a bit a token, the lowest bit first: 1 where the token may come. For a draft of K tokens
there are K + 1 masks: of the token in the place of each, and of the one behind them."""

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import UInt32

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.text.tokenizer import Tokenizer

MAX_GRAMMAR = 1 << 18  # characters of a definition
MAX_CHOICES = 1_000
WORD = 32  # tokens of a mask's word
ALLOWED = np.uint32(0xFFFFFFFF)

NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}

GrammarKind = Literal["json_schema", "regex", "lark"]
Masks = UInt32[np.ndarray, "*rows words"]


@dataclass(frozen=True)
class Grammar:
    """A form of answers: `definition` in the language that `kind` names. Raises BadRequest for a definition that is too long."""

    kind: GrammarKind
    definition: str

    def __post_init__(self):
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


class Matcher:
    """One answer and the grammar that it follows."""

    def __init__(self, parser: Any):
        self.parser = parser

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token can come."""
        return self.parser.is_stopped()

    def follow(self, tokens: Sequence[int]):
        """Goes on behind tokens that masks allowed. Raises BadRequest where the grammar has become too large to parse."""
        if not self.parser.consume_tokens(list(tokens)):
            raise BadRequest(
                "the answer's grammar cannot be followed further", _reason(self.parser.get_error())
            )

    def taken(self, draft: Sequence[int]) -> int:
        """The number of tokens of a draft, from its beginning, that the grammar allows. Changes nothing."""
        return self.parser.validate_tokens(list(draft))


class Masked(NamedTuple):
    """Masks to write for one row: of `matcher`'s next token and of those behind each token of `draft`."""

    row: int
    matcher: Matcher
    draft: Sequence[int] = ()


class GrammarTokens:
    """A tokenizer's tokens as grammars see them. Made once for a model: that takes about a second for 130,000 tokens.

    `words`: the length of a mask. Raises BadRequest for a tokenizer whose tokens have no bytes of their own."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]):
        ends = sorted(set(end_ids))
        if not tokenizer.byte_level:
            raise BadRequest(
                "grammars need a byte-level tokenizer", "this one's tokens depend on those beside them"
            )
        if not ends:
            raise BadRequest("grammars need an end token", "the model folder names none")
        self.words = -(-vocab_size // WORD)
        self._library = _library()
        wrapped = self._library.TokenizerWrapper(_Tokens(tokenizer, vocab_size, ends[0]))
        self._tokens = self._library.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=ends)
        self._threads = self._library.LLExecutor()

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of an answer. Raises BadRequest, with the reason, for a grammar that cannot be compiled."""
        parser = self._library.LLMatcher(self._tokens, self._compiled(grammar), log_level=0)
        if parser.is_error():
            raise _refused(grammar, parser.get_error())
        return Matcher(parser)

    def fill(self, masked: Sequence[Masked], masks: UInt32[np.ndarray, "rows places words"]):
        """Writes masks, with all processors but without Python's lock. Rows of others and places behind a draft are not touched.

        Behind a token that the grammar forbids, the masks of a draft allow all: no answer gets that far."""
        rows, places, words = masks.shape
        if words != self.words or any(len(one.draft) >= places or one.row >= rows for one in masked):
            raise ValueError(f"masks of {masks.shape} do not hold those of {len(masked)} rows")
        for one in masked:
            masks[one.row, : len(one.draft) + 1] = ALLOWED
        library = importlib.import_module("llguidance.numpy")
        flat = masks.reshape(rows * places, words).view(np.int32)
        alone = [(one.matcher.parser, one.row * places) for one in masked if not one.draft]
        drafted = [(one.matcher.parser, one.row * places, list(one.draft)) for one in masked if one.draft]
        # Neither takes an empty list, nor the second an empty draft
        if alone:
            library.fill_next_token_bitmask_par(self._threads, alone, flat)
        if drafted:
            library.fill_next_token_bitmask_par_with_draft_tokens(self._threads, drafted, flat)

    def _compiled(self, grammar: Grammar) -> str:
        made = {
            "json_schema": self._library.LLMatcher.grammar_from_json_schema,
            "regex": self._library.LLMatcher.grammar_from_regex,
            "lark": self._library.LLMatcher.grammar_from_lark,
        }[grammar.kind]
        try:
            return made(grammar.definition)
        except ValueError as e:
            raise _refused(grammar, str(e)) from e


class _Tokens:
    """A tokenizer in the form that llguidance takes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int):
        control = {i: name.encode() for name, i in tokenizer.control.items()}
        self.tokens = [control.get(i) or tokenizer.piece(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(control)
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, bos=False)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as e:
        hint = 'install the extra "grammar", as in: pip install -e ".[grammar]"'
        raise BadRequest("grammars need the package llguidance", hint) from e


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


def _refused(grammar: Grammar, found: str) -> BadRequest:
    return BadRequest(f"the {NAMES[grammar.kind]} cannot be compiled", _reason(found))


def _reason(found: str) -> str:
    """The first line of llguidance's words, which the parser's state may follow; behind it the fault of a regular expression."""
    first, *others = found.strip().splitlines() or ["it gave no reason"]
    faults = [line for line in others if line.startswith("error: ")]
    return printable(" ".join([first, *faults]), 300)
