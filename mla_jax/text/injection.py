"""Which control tokens of a rendered conversation its template wrote, and which came from a client.

The conversation is rendered again with its texts disguised: each character that control tokens are made of is replaced by a
stand-in that no text has. Every control token of this second text is then the template's. If it undisguises to the text of the
plain rendering, the template did the same with both, and the origin of each character is known.

Names, and keys and values of a tool's schema, may be words that a template looks for. If it treats disguised ones differently,
they are rendered once more, with such words as they are: those of which no part is a part of a control token, and which have no
sign that control tokens have. Contents and reasoning are disguised always.

Templates that look for their own texts in answers, as in `content.split('</think>')`, treat the two differently. For them other
disguises leave those texts in answers as they are, between marks: first all of them, each between marks of its own. Where a
template tells from a mark that there is text between two of them, texts that follow each other are between marks together: one of
them in each answer, then two, and so on, so that no more are left than the template looks for.

Such a template may cut a text out of an answer and write it anew in the same place, between the same marks. So the answers are
rendered once more, with each text twice and a seam between: a copy still has its seam, a text that was written anew has none.

A last answer that the model continues has one more character behind it. The rendered text is cut there."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from mla_jax.base.errors import BadRequest
from mla_jax.text.messages import ChatMessage
from mla_jax.text.tokenizer import Tokenizer
from mla_jax.text.words import Words, token_parts

MOST_KEPT = 8  # disguises of a conversation, in addition to the first and the last
FIRST_STAND_IN, LAST_STAND_IN = 0xF0000, 0x10FFFD  # for private use

# All that a client gives a template, by variable: `messages`, `tools`, and variables of its own
TemplateInput = dict[str, Any]


class Way(NamedTuple):
    """A disguise: `marks` finds texts of an answer that are left as they are, `most` is how many; `words` disguises words."""

    marks: re.Pattern[str]
    most: int
    words: Words


class Disguise:
    """The disguises of a conversation, for the template `source`. `plain` is the conversation without one.

    `continues`: the model continues the last message."""

    def __init__(
        self, tokenizer: Tokenizer, source: str, conversation: TemplateInput, continues: bool = False
    ):
        self.tokenizer, self.continues = tokenizer, continues
        self._choose_stand_ins(source, conversation)
        self._compile_patterns(source)
        self.plain = self._ended(conversation) if continues else conversation
        self.ways = self._ways()

    def _choose_stand_ins(self, source: str, conversation: TemplateInput) -> None:
        control = self.tokenizer.control
        alphabet = sorted({c for text in control for c in text if not c.isspace()})
        texts = (source, *_texts(conversation), *control)
        self.mark, self.seam, self.end, *stand_ins = _unused(3 + len(alphabet), *texts)
        self.disguise = str.maketrans(dict(zip(alphabet, stand_ins, strict=True)))
        self.undisguise = {ord(to): chr(of) for of, to in self.disguise.items()} | {ord(self.mark): None}

    def _ended(self, conversation: TemplateInput) -> TemplateInput:
        """With the end of the last message marked."""
        *others, last = conversation["messages"]
        return {**conversation, "messages": [*others, {**last, "content": last["content"] + self.end}]}

    def cut(self, rendered: str) -> str | None:
        """The rendered text up to the end of a message that is continued, None if it has no such end; all of it otherwise."""
        if not self.continues:
            return rendered
        found, end, _ = rendered.rpartition(self.end)
        return found if end else None

    def _compile_patterns(self, source: str) -> None:
        """Of the texts that the template names: one, one with the white space behind it, several, and several between marks."""
        texts = sorted((text for text in self.tokenizer.control if text in source), key=len, reverse=True)
        named = "|".join(map(re.escape, texts)) or "(?!)"
        single = rf"(?:{named})\s*+"
        kept = rf"(?:{single})+"
        self.named, self.single, self.kept = re.compile(named), re.compile(single), re.compile(kept)
        self.in_message = re.compile(rf"({self.mark}\s*+{kept}{self.mark})")

    def _ways(self) -> list[Way]:
        """The disguises in the order in which they are believed."""
        marked = self._marks()
        return [Way(*marks, words) for words in self._words() for marks in marked]

    def _words(self) -> list[Words]:
        """How words are disguised: all of them and, if there are any, those alone that are not harmless."""
        given = dict(self.plain)
        messages = given.pop("messages")
        if not any(given.values()) and all(message.keys() == {"role", "content"} for message in messages):
            return [Words(self.disguise)]
        return [Words(self.disguise), Words(self.disguise, token_parts((*self.tokenizer.control,)))]

    def _marks(self) -> list[tuple[re.Pattern[str], int]]:
        """How a disguise marks texts of an answer, and how many."""
        answers = [m["content"] or "" for m in self.plain["messages"] if m["role"] == "assistant"]
        most = max((len(self.named.findall(answer)) for answer in answers), default=0)
        if not most:
            return [(self.kept, 0)]
        numbers = sorted({*range(min(most, MOST_KEPT) + 1), most})
        return [(self.single, most), *((self.kept, number) for number in numbers)]

    def variants(self) -> list[TemplateInput]:
        """The disguised conversations, in the order in which they are believed."""
        return [self._conversation(way) for way in self.ways]

    def _conversation(self, way: Way, doubled: bool = False) -> TemplateInput:
        given = dict(self.plain)
        messages, tools = given.pop("messages"), given.pop("tools", None)
        return {
            "messages": [self._message(message, way, doubled) for message in messages],
            "tools": tools and [way.words.of_tool(tool) for tool in tools],
            **{name: way.words.disguised(value) for name, value in given.items()},
        }

    def _message(self, message: ChatMessage, way: Way, doubled: bool) -> ChatMessage:
        found = way.words.of_message(message)
        if "reasoning_content" in message:
            found["reasoning_content"] = message["reasoning_content"].translate(self.disguise)
        if content := message["content"]:
            is_marked = way.most and message["role"] == "assistant"
            found["content"] = (
                self._marked(content, way, doubled) if is_marked else content.translate(self.disguise)
            )
        return found

    def pieces(
        self, plain: str, variants: list[str | None], render: Callable[[TemplateInput], str | None]
    ) -> Iterator[tuple[str, bool]]:
        """The rendered text in pieces: texts, and control tokens of the template (True). `render` is the template; None where it
        fails. All are cut."""
        chosen, variant = self._chosen(plain, variants)
        if variant is None:
            raise BadRequest(
                "the chat template treats the text of a message as a command",
                "what is the message's and what the template's cannot be told apart; take template words out of the message",
            )
        parts = self.in_message.split(variant)
        unclear = parts[1::2]
        doubled = render(self._conversation(self.ways[chosen], doubled=True)) if unclear else None
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

    def _chosen(self, plain: str, variants: list[str | None]) -> tuple[int, str | None]:
        """The first variant that undisguises to the plain text, and its number; None if there is no such variant."""
        for at, variant in enumerate(variants):
            if variant is not None and variant.translate(self.undisguise) == plain:
                return at, variant
        return -1, None

    def _marked(self, content: str, way: Way, doubled: bool) -> str:
        """`content` disguised except for the first few of the template's own texts, which are put between marks, or `doubled`.

        A mark is put beyond the blanks next to such a text, so that a template that splits there and strips still does."""
        core = content.strip()
        start, end, parts = content.find(core), 0, []
        for found in way.marks.finditer(core, 0, self._start_of(core, way.most)):
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


def _texts(value: Any) -> Iterator[str]:
    """All texts of a JSON value, and all keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        yield from value
        for one in value.values():
            yield from _texts(one)


def _unused(count: int, *texts: str) -> list[str]:
    """Characters for private use that none of `texts` has."""
    used = set().union(*texts)
    free = (chr(c) for c in range(FIRST_STAND_IN, LAST_STAND_IN) if chr(c) not in used)
    if len(found := [*islice(free, count)]) < count:
        raise BadRequest(
            "the conversation has nearly every character for private use", "at least a few must be free"
        )
    return found
