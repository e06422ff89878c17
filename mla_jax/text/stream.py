"""Token ids to text while they arrive: complete characters only, and nothing that may still become a stop text."""

import codecs
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mla_jax.base.errors import BadRequest
from mla_jax.text.tokenizer import Tokenizer

_CONTROL = {c: chr(0x2400 + c) for c in range(0x20) if chr(c) not in "\n\t"} | {0x7F: "\u2421"}
_CONTROL |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # of vocabularies that fall back to bytes


def printable_text(text: str) -> str:
    """`text` with its control characters, except newline and tab, as visible signs, so that a terminal obeys none of them."""
    return text.translate(_CONTROL)


class TextStream:
    """`stopped` once a stop text is found: what follows is never shown, nor is it unless it is `kept`. None is looked for in the
    text of the first `least` tokens. `used` is the number of tokens in the text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, least: int = 0, kept: bool = False):
        if not all(stop):
            raise BadRequest("a stop text is empty", "it would stop before the first token")
        self.stop, self.least, self.kept = tuple(stop), least, kept
        self.stopped, self.used = False, 0
        self._decode = token_decoder(tokenizer)
        self._pending = ""

    def push(self, ids: list[int]) -> str:
        """Takes the next tokens and returns the text that is now final."""
        if not self.stop:
            self.used += len(ids)
            return self._decode.push(ids)
        shown = []
        for token in ids:
            if self.stopped:
                break
            self.used += 1
            shown.append(self._safe(self._decode.push([token])))
        return "".join(shown)

    def finish(self) -> str:
        """The text that is still pending, at the end of the tokens."""
        if self.stopped:
            return ""
        shown = self._safe(self._decode.finish())
        rest, self._pending = self._pending, ""
        return shown + rest

    def _safe(self, new: str) -> str:
        """The part of the pending and the new text that can be shown; the rest stays pending."""
        text, stops = self._pending + new, self.stop if self.used > self.least else ()
        found = first_stop(text, stops) if new else None
        if found is not None:
            self.stopped, self._pending = True, ""
            return text[: found.end if self.kept else found.start]
        pending = max((begun_length(text, stop) for stop in stops), default=0)
        self._pending = text[len(text) - pending :]
        return text[: len(text) - pending]


class FoundStop(NamedTuple):
    """Where a stop text stands."""

    start: int
    end: int


def first_stop(text: str, stops: Sequence[str]) -> FoundStop | None:
    """The first stop text in `text`, None if it has none."""
    places = [FoundStop(at, at + len(stop)) for stop in stops if (at := text.find(stop)) >= 0]
    return min(places, default=None)


def begun_length(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def token_decoder(tokenizer: Tokenizer) -> "_Bytes | _Window":
    """A decoder with `push(ids)` and `finish()`, which return the text that is complete."""
    return _Bytes(tokenizer.piece) if tokenizer.byte_level else _Window(tokenizer)


class _Bytes:
    """Byte-level tokens: each adds its bytes, whatever its neighbours."""

    def __init__(self, piece: Callable[[int], bytes]):
        self.piece, self.utf8 = piece, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self.utf8.decode(b"".join(map(self.piece, ids)))

    def finish(self) -> str:
        return self.utf8.decode(b"", True)


class _Window:
    """Any other tokens: the newest are decoded after the few before them, which may decide about a space."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.ids, self.known, self.shown = tokenizer, [], 0, ""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push, ids))

    def _push(self, token: int) -> str:
        if token in self.tokenizer.hidden:
            return ""
        self.ids.append(token)
        if _BYTE_TOKEN.fullmatch(self.tokenizer.model.id_to_token(token) or ""):
            return ""  # a byte: the tokens after it decide which character it is part of
        text = self.tokenizer.decode(self.ids)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def finish(self) -> str:
        return self._advance(self.tokenizer.decode(self.ids))

    def _advance(self, text: str) -> str:
        new = text[len(self.shown) :]
        if new:  # the tokens of it are the context of the next
            self.ids = self.ids[self.known :]
            self.known, self.shown = len(self.ids), self.tokenizer.decode(self.ids)
        return new
