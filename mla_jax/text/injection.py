"""Which control tokens of a rendered conversation its template wrote, and which came from a message.

The conversation is rendered again with its contents disguised: each character that control tokens are made of is replaced by a
stand-in that no text has. Every control token of this second text is then the template's. If it undisguises to the text of the
plain rendering, the template did the same with both, and the origin of each character is known.

Templates that look for their own texts in answers, as in `content.split('</think>')`, treat the two differently. For them other
disguises leave those texts in answers as they are, between marks: first all of them, each between marks of its own. Where a
template tells from a mark that there is text between two of them, texts that follow each other are between marks together: one of
them in each answer, then two, and so on, so that no more are left than the template looks for.

Such a template may cut a text out of an answer and write it anew in the same place, between the same marks. So the answers are
rendered once more, with each text twice and a seam between: a copy still has its seam, a text that was written anew has none."""

import re
from collections.abc import Callable, Iterator
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
        self._choose_stand_ins(source)
        self._compile_patterns(source)
        self.ways = self._ways()

    def _choose_stand_ins(self, source: str) -> None:
        control = self.tokenizer.control
        alphabet = sorted({c for text in control for c in text if not c.isspace()})
        texts = (source, *(m["content"] + m["role"] for m in self.messages), *control)
        self.mark, self.seam, *stand_ins = _unused(2 + len(alphabet), *texts)
        self.disguise = str.maketrans(dict(zip(alphabet, stand_ins, strict=True)))
        self.undisguise = {ord(to): chr(of) for of, to in self.disguise.items()} | {ord(self.mark): None}

    def _compile_patterns(self, source: str) -> None:
        """Of the texts that the template names: one, one with the white space behind it, several, and several between marks."""
        texts = sorted((text for text in self.tokenizer.control if text in source), key=len, reverse=True)
        named = "|".join(map(re.escape, texts)) or "(?!)"
        single = rf"(?:{named})\s*+"
        kept = rf"(?:{single})+"
        self.named, self.single, self.kept = re.compile(named), re.compile(single), re.compile(kept)
        self.in_message = re.compile(rf"({self.mark}\s*+{kept}{self.mark})")

    def _ways(self) -> list[tuple[re.Pattern[str], int]]:
        """How each disguise marks texts of an answer, and how many."""
        answers = [m["content"] for m in self.messages if m["role"] == "assistant"]
        most = max((len(self.named.findall(answer)) for answer in answers), default=0)
        if not most:
            return [(self.kept, 0)]
        numbers = sorted({*range(min(most, MOST_KEPT) + 1), most})
        return [(self.single, most), *((self.kept, number) for number in numbers)]

    def variants(self) -> list[list[Message]]:
        """The disguised conversations, in the order in which they are believed."""
        return [self._conversation(*way) for way in self.ways]

    def _conversation(self, marks: re.Pattern[str], most: int, doubled: bool = False) -> list[Message]:
        def disguised(message: Message) -> str:
            is_marked = most and message["role"] == "assistant"
            if not is_marked:
                return message["content"].translate(self.disguise)
            return self._marked(message["content"], marks, most, doubled)

        return [{**message, "content": disguised(message)} for message in self.messages]

    def pieces(
        self, plain: str, variants: list[str], render: Callable[[list[Message]], str | None]
    ) -> Iterator[tuple[str, bool]]:
        """The rendered text in pieces: texts, and control tokens of the template (True). `render` is the template; None where it
        fails."""
        chosen = next((i for i, v in enumerate(variants) if v.translate(self.undisguise) == plain), None)
        if chosen is None:
            raise BadRequest(
                "the chat template treats the text of a message as a command",
                "what is the message's and what the template's cannot be told apart; take template words out of the message",
            )
        parts = self.in_message.split(variants[chosen])
        unclear = parts[1::2]
        doubled = render(self._conversation(*self.ways[chosen], doubled=True)) if unclear else None
        copied = self._copied(unclear, doubled)
        waiting = ""
        for at, part in enumerate(parts):
            end = 0
            in_message = at % 2 == 1 and copied[at // 2]
            for found in () if in_message else self.tokenizer.control_pattern.finditer(part):
                yield (waiting + part[end : found.start()]).translate(self.undisguise), False
                yield found[0], True
                waiting, end = "", found.end()
            waiting += part[end:]
        yield waiting.translate(self.undisguise), False

    def _copied(self, unclear: list[str], doubled: str | None) -> list[bool]:
        """Whether each of these texts between marks is a message's. All are where the doubled ones tell nothing."""
        found = [] if doubled is None else self.in_message.findall(self._halved(doubled))
        if found != unclear:
            return [True] * len(unclear)
        twice = rf"{self.mark}\s*+{self.kept.pattern}(?:{self.seam}\s*+{self.kept.pattern})?{self.mark}"
        return [self.seam in text for text in re.findall(twice, doubled or "")]

    def _halved(self, doubled: str) -> str:
        """Without the second one of two equal texts with a seam between."""
        return re.sub(rf"({self.kept.pattern}){self.seam}\1", r"\1", doubled)

    def _marked(self, content: str, marks: re.Pattern[str], most: int, doubled: bool) -> str:
        """`content` disguised except for the first `most` of the template's own texts, which are put between marks as `marks`
        finds them, or `doubled`.

        A mark is put beyond the blanks next to such a text, so that a template that splits there and strips still does."""
        core = content.strip()
        start, end, parts = content.find(core), 0, []
        for found in marks.finditer(core, 0, self._start_of(core, most)):
            before = core[end : found.start()]
            blanks = before[len(before.rstrip()) :]
            text = f"{found[0]}{self.seam}{found[0]}" if doubled else found[0]
            parts += [before.rstrip().translate(self.disguise), self.mark, blanks, text, self.mark]
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
