"""Rules of a Lark grammar, in llguidance's dialect, with the tags of a model: a control token is written as its id."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from mla_jax.text.grammar import BLANKS
from mla_jax.text.tokenizer import Tokenizer

MAYBE_LINE = r'"\n"?'  # models of one format differ in such newlines
ANY_TEXT = r"(?s:.*)"


class LarkRules:
    """Named rules. What the methods return is to stand in another rule.

    `tags` are the texts that are control tokens where the tokenizer has them."""

    def __init__(self, tokenizer: Tokenizer, tags: Iterable[str]):
        self._ids = {tag: tokenizer.control[tag] for tag in tags if tag in tokenizer.control}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: dict[str, str] = {}

    def __str__(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def add(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        self._rules[name + options] = body
        return name

    def tag(self, text: str) -> str:
        """Text as the model writes it: control tokens, and the text around them."""
        return " ".join(self._pieces(text))

    def up_to(self, name: str, tag: str, text: str = ANY_TEXT) -> str:
        """A rule for text that matches a pattern, and the `tag` behind it.

        Text cannot go on over a control token, so the part of the tag before it ends the pattern. A tag without one needs a lazy
        rule, which ends at the first."""
        found = self._pattern.search(tag)
        if found is None:
            return self.add(name, f"/{text}{_escaped(tag)}/", "[lazy]")
        before, rest = tag[: found.start()], tag[found.start() :]
        return self.add(name, f"/{text}{_escaped(before)}/ {self.tag(rest)}")

    def _pieces(self, text: str) -> Iterator[str]:
        at = 0
        for found in self._pattern.finditer(text):
            yield quoted(text[at : found.start()])
            yield f"<[{self._ids[found[0]]}]>"
            at = found.end()
        yield quoted(text[at:])


def quoted(text: str) -> str:
    """Text alone, in which nothing is a control token."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def json_item(schema: object) -> str:
    """JSON that a schema describes, with as many blanks as where it is the whole answer."""
    given = {"x-guidance": BLANKS, **schema} if isinstance(schema, Mapping) else schema
    return f"%json {json.dumps(given, ensure_ascii=False)}"


def slashed(pattern: str) -> str:
    """A pattern as an item, whose own slashes do not end it."""
    inner = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return f"/(?:{inner})/"


def _escaped(text: str) -> str:
    """Text in a pattern of Rust's regex crate, which gives a meaning to other signs behind a backslash."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", text)
