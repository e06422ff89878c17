"""Which control tokens of a rendered conversation its template wrote, and which stood in a message.

The conversation is rendered again with its contents disguised: every character that control tokens are made of becomes a stand-in
that no text holds, so every control token of that text is the template's. If it undisguises to the text of the plain rendering,
the template did the same with both, and each character's origin is known. Templates that look for text of their own in answers,
as in `content.split('</think>')`, do not; for them further disguises leave those texts in answers undisguised, in marks: first
one of them in each answer, then two, and so on, so that no more are left than the template asks for."""

import re
from collections.abc import Iterator

from mla_jax.base.errors import BadRequest
from mla_jax.text.tokenizer import Tokenizer

MOST_KEPT = 8  # disguises of a conversation, besides the first and the last
FIRST_STAND_IN, LAST_STAND_IN = 0xF0000, 0x10FFFD  # for private use


class Disguise:
    """The disguises of `messages`, for the template `source`."""

    def __init__(self, tokenizer: Tokenizer, source: str, messages: list[dict[str, str]]):
        self.tokenizer, self.messages = tokenizer, messages
        used = set(source).union(*(m["content"] + m["role"] for m in messages), *tokenizer.control)
        free = (chr(c) for c in range(FIRST_STAND_IN, LAST_STAND_IN) if chr(c) not in used)
        alphabet = sorted({c for text in tokenizer.control for c in text if not c.isspace()})
        self.mark = next(free)
        self.disguise = str.maketrans(dict(zip(alphabet, free, strict=False)))
        self.undisguise = {ord(to): chr(of) for of, to in self.disguise.items()} | {ord(self.mark): None}
        named = sorted((text for text in tokenizer.control if text in source), key=len, reverse=True)
        self.named = re.compile("|".join(map(re.escape, named)) or "(?!)")
        self.kept = re.compile(rf"(?:(?:{self.named.pattern})\s*+)+")
        self.in_message = rf"{self.mark}\s*+{self.kept.pattern}{self.mark}"

    def variants(self) -> list[list[dict[str, str]]]:
        """The disguised conversations, the safest first."""
        whole = [{**m, "content": m["content"].translate(self.disguise)} for m in self.messages]
        answers = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        most = max((len(self.named.findall(self.messages[i]["content"])) for i in answers), default=0)
        found = [whole]
        for kept in sorted({*range(1, min(most, MOST_KEPT) + 1), most} - {0}):
            marked = {i: {**self.messages[i], "content": self._marked(self.messages[i]["content"], kept)} for i in answers}
            found.append([marked.get(i, m) for i, m in enumerate(whole)])
        return found

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
        """`content` disguised but for the first `most` of the template's own texts, which stand between marks.

        A mark stands beyond the blanks beside such a text, so that a template that splits there and strips still does."""
        core = content.strip()
        start, end, parts = content.find(core), 0, []
        rest = next((text.start() for i, text in enumerate(self.named.finditer(core)) if i == most), len(core))
        for found in self.kept.finditer(core, 0, rest):
            before = core[end : found.start()]
            blanks = before[len(before.rstrip()) :]
            parts += [before.rstrip().translate(self.disguise), self.mark, blanks, found[0], self.mark]
            end = found.end()
        parts.append(core[end:].translate(self.disguise))
        return content[:start] + "".join(parts) + content[start + len(core) :]
