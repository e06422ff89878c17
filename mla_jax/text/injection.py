"""Which control tokens of a rendered conversation its template wrote, and which came from a message.

The conversation is rendered again with its contents disguised: each character that control tokens are made of is replaced by a
stand-in that no text has. Every control token of this second text is then the template's. If it undisguises to the text of the
plain rendering, the template did the same with both, and the origin of each character is known.

Templates that look for their own texts in answers, as in `content.split('</think>')`, treat the two differently. For them further
disguises leave those texts in answers as they are, between marks: first one of them in each answer, then two, and so on, so that
no more are left than the template looks for."""

import re
from collections.abc import Iterator
from itertools import islice

from mla_jax.base.errors import BadRequest
from mla_jax.text.tokenizer import Tokenizer

MOST_KEPT = 8  # disguises of a conversation, in addition to the first and the last
FIRST_STAND_IN, LAST_STAND_IN = 0xF0000, 0x10FFFD  # for private use

Message = dict[str, str]


class Disguise:
    """The disguises of `messages`, for the template `source`."""

    def __init__(self, tokenizer: Tokenizer, source: str, messages: list[Message]):
        self.tokenizer, self.messages = tokenizer, messages
        alphabet = sorted({c for text in tokenizer.control for c in text if not c.isspace()})
        texts = (source, *(m["content"] + m["role"] for m in messages), *tokenizer.control)
        self.mark, *stand_ins = _unused(1 + len(alphabet), *texts)
        self.disguise = str.maketrans(dict(zip(alphabet, stand_ins, strict=True)))
        self.undisguise = {ord(to): chr(of) for of, to in self.disguise.items()} | {ord(self.mark): None}
        named = sorted((text for text in tokenizer.control if text in source), key=len, reverse=True)
        self.named = re.compile("|".join(map(re.escape, named)) or "(?!)")
        self.kept = re.compile(rf"(?:(?:{self.named.pattern})\s*+)+")
        self.in_message = rf"{self.mark}\s*+{self.kept.pattern}{self.mark}"

    def variants(self) -> list[list[Message]]:
        """The disguised conversations, the safest first."""
        answers = [m["content"] for m in self.messages if m["role"] == "assistant"]
        most = max((len(self.named.findall(answer)) for answer in answers), default=0)
        numbers = sorted({*range(1, min(most, MOST_KEPT) + 1), most} - {0})
        return [[self._disguised(m, kept) for m in self.messages] for kept in (0, *numbers)]

    def _disguised(self, message: Message, kept: int) -> Message:
        content = message["content"]
        marked = kept and message["role"] == "assistant"
        return {
            **message,
            "content": self._marked(content, kept) if marked else content.translate(self.disguise),
        }

    def pieces(self, plain: str, variants: list[str]) -> Iterator[tuple[str, bool]]:
        """The rendered text in pieces: texts, and control tokens of the template (True)."""
        text = next((v for v in variants if v.translate(self.undisguise) == plain), None)
        if text is None:
            raise BadRequest(
                "the chat template treats the text of a message as a command",
                "what is the message's and what the template's cannot be told apart; take template words out of the message",
            )
        waiting = ""
        for at, part in enumerate(re.split(f"({self.in_message})", text)):
            end = 0
            for found in self.tokenizer.control_pattern.finditer(part) if at % 2 == 0 else ():
                yield (waiting + part[end : found.start()]).translate(self.undisguise), False
                yield found[0], True
                waiting, end = "", found.end()
            waiting += part[end:]
        yield waiting.translate(self.undisguise), False

    def _marked(self, content: str, most: int) -> str:
        """`content` disguised except for the first `most` of the template's own texts, which are put between marks.

        A mark is put beyond the blanks next to such a text, so that a template that splits there and strips still does."""
        core = content.strip()
        start, end, parts = content.find(core), 0, []
        for found in self.kept.finditer(core, 0, self._start_of(core, most)):
            before = core[end : found.start()]
            blanks = before[len(before.rstrip()) :]
            parts += [before.rstrip().translate(self.disguise), self.mark, blanks, found[0], self.mark]
            end = found.end()
        parts.append(core[end:].translate(self.disguise))
        return content[:start] + "".join(parts) + content[start + len(core) :]

    def _start_of(self, text: str, number: int) -> int:
        """Where the template's own text of that number begins, counted from 0; else the end."""
        found = next(islice(self.named.finditer(text), number, None), None)
        return len(text) if found is None else found.start()


def _unused(count: int, *texts: str) -> list[str]:
    """Characters for private use that none of `texts` has."""
    used = set().union(*texts)
    free = (chr(c) for c in range(FIRST_STAND_IN, LAST_STAND_IN) if chr(c) not in used)
    if len(found := [*islice(free, count)]) < count:
        raise BadRequest(
            "the conversation has nearly every character for private use", "at least a few must be free"
        )
    return found
