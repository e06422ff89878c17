"""Which tokens may come next in an answer that follows a grammar. llguidance parses, on the host; no JAX here.

A mask is a row of 32-bit words with a bit a token, the lowest bit first: 1 where the token may come. For a draft of K tokens
there are K + 1 masks: of the token in the place of each, and of the one behind them."""

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

from mla_jax.base.errors import BadRequest, printable
from mla_jax.base.grammar import Grammar, mask_words
from mla_jax.text.tokenizer import Tokenizer

ALLOWED = np.uint32(0xFFFFFFFF)  # a word of a mask that allows all tokens
# Between two parts of JSON, so that no answer consists of blanks alone
BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
KNOWN = 128  # grammars that are kept compiled
NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}

Masks = UInt32[np.ndarray, "*rows words"]


class Matcher:
    """One answer and the grammar that it follows."""

    def __init__(self, parser: Any):
        self.parser = parser

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token can come."""
        return self.parser.is_stopped()

    def follow(self, tokens: Sequence[int]):
        """Goes on behind tokens that masks allowed; there is nothing behind a complete answer.

        Raises BadRequest where the grammar has become too large to parse."""
        if not self.complete and not self.parser.consume_tokens(list(tokens)):
            raise BadRequest(
                "the answer's grammar cannot be followed further", _reason(self.parser.get_error())
            )

    def taken(self, draft: Sequence[int]) -> int:
        """The number of tokens of a draft, from its beginning, that the grammar allows. Changes nothing."""
        return self.parser.validate_tokens(list(draft)) if draft else 0

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        return self.parser.compute_ff_tokens()


class Masked(NamedTuple):
    """Masks to write for one row: of `matcher`'s next token and of those behind each token of `draft`."""

    row: int
    matcher: Matcher
    draft: Sequence[int] = ()


class Grammars:
    """The grammars of one model's answers. Its tokens are looked through when the first one is asked for: that takes about a
    second for 130,000 tokens.

    `words`: the length of a mask."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Iterable[int]):
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, sorted(set(end_ids))
        self.words = mask_words(vocab_size)
        self._begun = functools.lru_cache(KNOWN)(self._new)

    @functools.cached_property
    def _library(self) -> Any:
        return _import_library()

    @functools.cached_property
    def _threads(self) -> Any:
        return self._library.LLExecutor()

    @functools.cached_property
    def _tokens(self) -> Any:
        """Raises BadRequest for a tokenizer whose tokens have no bytes of their own."""
        tokenizer, ends = self._tokenizer, self._ends
        if tokenizer is None:
            raise BadRequest("grammars need a tokenizer, which this model folder lacks")
        if not tokenizer.byte_level:
            raise BadRequest(
                "grammars need a byte-level tokenizer", "this one's tokens depend on their neighbours"
            )
        if not ends:
            raise BadRequest("grammars need an end token", "the model folder names none")
        wrapped = self._library.TokenizerWrapper(_Tokens(tokenizer, self._vocab_size, ends[0]))
        return self._library.LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=ends)

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of an answer. Raises BadRequest, with the reason, for a grammar that cannot be compiled, and where the
        model's tokens allow no grammars."""
        return Matcher(self._begun(grammar).deep_copy())

    def _new(self, grammar: Grammar) -> Any:
        parser = self._library.LLMatcher(self._tokens, self._compiled(grammar), log_level=0)
        if parser.is_error():
            raise _refused(grammar, parser.get_error())
        return parser

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
            "json_schema": functools.partial(
                self._library.LLMatcher.grammar_from_json_schema, defaults=BLANKS
            ),
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


def _import_library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as e:
        hint = 'install the extra "grammar", as in: pip install -e ".[grammar]"'
        raise BadRequest("grammars need the package llguidance", hint) from e


def _refused(grammar: Grammar, found: str) -> BadRequest:
    return BadRequest(f"the {NAMES[grammar.kind]} cannot be compiled", _reason(found))


def _reason(found: str) -> str:
    """The first line of llguidance's words, which the parser's state may follow; behind it the fault of a regular expression."""
    first, *others = found.strip().splitlines() or ["it gave no reason"]
    faults = [line for line in others if line.startswith("error: ")]
    return printable(" ".join([first, *faults]), 300)
