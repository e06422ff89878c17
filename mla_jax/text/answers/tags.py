"""Tags of a format in the text of an answer, whether they are control tokens or spelled in others.

A tag that is a control token becomes a mark: one half of a surrogate pair, which no decoded text has. So one search finds both
kinds of tags, and a text that merely spells a control token is not found."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mla_jax.text.stream import begun_length, token_decoder
from mla_jax.text.tokenizer import Tokenizer

_FIRST_MARK = 0xD800


class MarkedText:
    """The text of token ids, with marks for those of `tags` that are control tokens of `tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str]):
        found = [tag for tag in dict.fromkeys(tags) if tag in tokenizer.control]
        marks = {tag: chr(_FIRST_MARK + at) for at, tag in enumerate(found)}
        self._mark_of_id = {tokenizer.control[tag]: mark for tag, mark in marks.items()}
        self._tag_of_mark = str.maketrans({mark: tag for tag, mark in marks.items()})
        self._mark_of_tag = marks
        self._decode = token_decoder(tokenizer)
        self._searches: dict[tuple[str, ...], Search] = {}

    def push(self, token: int) -> str:
        """The marked text that is complete with `token`."""
        mark = self._mark_of_id.get(token)
        if mark is None:
            return self._decode.push([token])
        return self._decode.finish() + mark  # no character goes on behind a control token

    def finish(self) -> str:
        return self._decode.finish()

    def marked(self, text: str) -> str:
        """`text` with marks for the control tokens that it spells."""
        for tag, mark in self._mark_of_tag.items():
            text = text.replace(tag, mark)
        return text

    def plain(self, text: str) -> str:
        """Marked text as text: each mark is the text of its control token, also of a special one."""
        return text.translate(self._tag_of_mark)

    def search(self, tags: tuple[str, ...]) -> "Search":
        """The search for `tags`, in marked text."""
        if tags not in self._searches:
            self._searches[tags] = Search({self.marked(tag): tag for tag in tags})
        return self._searches[tags]


@dataclass(frozen=True)
class TagMatch:
    """A place in a text: of the whole `tag`, or, if that is None, of the end of the text, which may begin one."""

    start: int
    end: int
    tag: str | None


class Search:
    """A search for the first of several tags. `spelled`: the tags by their marked text, none of which has another inside."""

    def __init__(self, spelled: dict[str, str]):
        self._spelled = spelled
        longest_first = sorted(spelled, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def first(self, text: str) -> TagMatch:
        """The first tag, or where the text ends with a part of one, or its end."""
        if match := self._pattern.search(text):
            return TagMatch(match.start(), match.end(), self._spelled[match[0]])
        pending = max((begun_length(text, spelled) for spelled in self._spelled), default=0)
        return TagMatch(len(text) - pending, len(text), None)

    def at_start(self, text: str) -> TagMatch | None:
        """The tag, or the part of one, with which `text` begins behind blanks; None if it begins with neither."""
        start = len(text) - len(text.lstrip())
        if match := self._pattern.match(text, start):
            return TagMatch(start, match.end(), self._spelled[match[0]])
        rest = text[start:]
        if rest and any(spelled.startswith(rest) for spelled in self._spelled):
            return TagMatch(start, len(text), None)
        return None
