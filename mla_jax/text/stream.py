"""Token ids to text while they arrive: whole characters only, nothing that may still become a stop text."""

import codecs
import re
from collections.abc import Callable, Sequence

from mla_jax.base.errors import BadRequest
from mla_jax.text.tokenizer import Tokenizer

_CONTROL = {c: chr(0x2400 + c) for c in range(0x20) if chr(c) not in "\n\t"} | {0x7F: "\u2421"}
_CONTROL |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # of vocabularies that fall back to bytes


def printable_text(text: str) -> str:
    """`text` with its control characters, but for newline and tab, as visible signs: a terminal obeys none of it."""
    return text.translate(_CONTROL)


class TextStream:
    """`stopped` once a stop text was found; it and what follows is never shown. `used` tokens went into the text so far."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        if not all(stop):
            raise BadRequest("a stop text is empty", "it would stop before the first token")
        self.stop, self.stopped, self.used = tuple(stop), False, 0
        self._decode = _Bytes(tokenizer.piece) if tokenizer.byte_level else _Window(tokenizer)
        self._held = ""

    def push(self, ids: list[int]) -> str:
        """Takes the next tokens and gives the text that is now final."""
        shown = []
        for token in ids:
            if self.stopped:
                break
            self.used += 1
            shown.append(self._safe(self._decode.push(token)))
        return "".join(shown)

    def finish(self) -> str:
        """What was held back, at the end of the tokens."""
        if self.stopped:
            return ""
        shown = self._safe(self._decode.finish())
        rest, self._held = self._held, ""
        return shown + rest

    def _safe(self, new: str) -> str:
        """The part of the held and the new text that can be shown; the rest is held."""
        text = self._held + new
        found = [at for at in map(text.find, self.stop) if at >= 0] if new else []
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_begun(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _begun(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class _Bytes:
    """Byte-level tokens: each adds its bytes, whatever stands around it."""

    def __init__(self, piece: Callable[[int], bytes]):
        self.piece, self.utf8 = piece, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.utf8.decode(self.piece(token))

    def finish(self) -> str:
        return self.utf8.decode(b"", True)


class _Window:
    """Any other tokens: the newest decoded behind the few before them, as what stands in front may decide about a space."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.ids, self.known, self.shown = tokenizer, [], 0, ""

    def push(self, token: int) -> str:
        if token in self.tokenizer.hidden:
            return ""
        self.ids.append(token)
        if _BYTE_TOKEN.fullmatch(self.tokenizer.model.id_to_token(token) or ""):
            return ""  # decides with its neighbours what they mean
        text = self.tokenizer.decode(self.ids)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def finish(self) -> str:
        return self._advance(self.tokenizer.decode(self.ids))

    def _advance(self, text: str) -> str:
        new = text[len(self.shown) :]
        if new:  # the tokens behind it are the context of the next
            self.ids = self.ids[self.known :]
            self.known, self.shown = len(self.ids), self.tokenizer.decode(self.ids)
        return new
