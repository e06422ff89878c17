"""Token ids of an answer to its parts while they arrive: nothing is given that is taken back, nothing is lost."""

from collections.abc import Mapping, Sequence
from typing import Any

from mla_jax.base.errors import BadRequest
from mla_jax.text.answers.arguments import CallWriter
from mla_jax.text.answers.blanks import Trimmed
from mla_jax.text.answers.formats import PLAIN_ANSWER, AnswerFormat
from mla_jax.text.answers.grammars import AT_END, CallReading, Tags
from mla_jax.text.answers.parts import (
    Answer,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
    answer_of,
    joined,
)
from mla_jax.text.answers.tags import MarkedText, TagMatch
from mla_jax.text.stream import begun_length, first_stop
from mla_jax.text.tokenizer import Tokenizer, check_text


class AnswerStream:
    """Reads an answer of a format. `stopped` once a stop text is found, or the one call that is wanted has ended.

    `used` is the number of tokens that were read, `reasoning_tokens` of those within reasoning, without its tags.

    A tag that is a control token is found by its id, any other by its text. Reasoning begins with the answer, or never, and
    ends with its tag or with a call. Blanks at the borders of tags are no text. A stop text ends reasoning as well as content,
    and may be the tag that ends reasoning; within calls it is not looked for. An answer that ends within a call leaves the
    call without an end and its arguments cut, without a part of a key or tag."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: AnswerFormat = PLAIN_ANSWER,
        *,
        stop: Sequence[str] = (),
        least: int = 0,
        kept: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        in_reasoning: bool = False,
        one_call: bool = False,
    ):
        """`stop`, `least` and `kept` are as TextStream's, `tools` those of the request; `in_reasoning`: the prompt has opened it.
        Raises BadRequest for a stop text."""
        self.stopped, self.used, self.reasoning_tokens = False, 0, 0
        self._marks = MarkedText(tokenizer, form.tags)
        self._all_stops, self._least, self._kept = _checked(stop, self._marks), least, kept
        self._form, self._writer, self._one_call = form, CallWriter(tools), one_call
        self._buffer = ""
        self._parts: list[Part] = []
        self._reasoning, self._content = Trimmed(after_tag=True), Trimmed()
        self._in_reasoning = in_reasoning and form.think is not None
        self._at_start = True
        self._call: CallReading | None = None
        self._call_tags: Tags = ()

    def push(self, ids: Sequence[int]) -> list[Part]:
        """Takes the next tokens and returns the parts that are now final."""
        for token in ids:
            if self.stopped:
                break
            self.used += 1
            was_in_reasoning = self._in_reasoning
            self._read(self._marks.push(token))
            self.reasoning_tokens += was_in_reasoning and self._in_reasoning
        return self._take()

    def finish(self) -> list[Part]:
        """The parts that are still pending, at the end of the tokens."""
        if self.stopped:
            return []
        self._read(self._marks.finish())
        self._end()
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = joined(self._parts), []
        return parts

    def _read(self, marked: str) -> None:
        self._buffer += marked
        while self._buffer and not self.stopped and self._advance():
            pass

    def _advance(self) -> bool:
        """Reads up to the next tag; False if that has not come."""
        return self._prose() if self._call is None else self._calls()

    # -- reasoning and content

    def _prose(self) -> bool:
        found = self._next_tag()
        if self._find_stop(found):
            return False
        if found.tag is None:
            self._say(self._split(self._held_from(found.start)))
            return False
        self._say(self._split(found.start))
        self._split(found.end - found.start)
        self._enter(found.tag)
        return True

    def _next_tag(self) -> TagMatch:
        """The next tag that means something here: <think> does only at the start of the answer."""
        think, calls = self._form.think, self._form.calls
        if think and self._at_start and (found := self._marks.search(think).at_start(self._buffer)):
            return found
        ends = think[1:] if think and self._in_reasoning else ()
        openings = calls.openings if calls else ()
        return self._marks.search((*ends, *openings)).first(self._buffer)

    def _find_stop(self, found: TagMatch) -> bool:
        """Ends the text at a stop text, if one stands before the tag that was found, or is the tag of reasoning's end."""
        in_think = found.tag is not None and found.tag in (self._form.think or ())
        stop = first_stop(self._buffer[: found.end if in_think else found.start], self._stops)
        if stop is None:
            return False
        self._say(self._buffer[: stop.end if self._kept else stop.start])
        self._flush()
        self.stopped, self._buffer = True, ""
        return True

    @property
    def _stops(self) -> Sequence[str]:
        """The stop texts that are looked for now."""
        return self._all_stops if self.used > self._least else ()

    def _held_from(self, partial: int) -> int:
        """The place from which the buffer may become a tag, whose part is at `partial`, or a stop text."""
        places = [len(self._buffer) - begun_length(self._buffer, stop) for stop in self._stops]
        whole = first_stop(self._buffer, self._stops)  # one that reaches into the part of a tag
        return min([partial, *places, *([] if whole is None else [whole.start])])

    def _split(self, end: int) -> str:
        head, self._buffer = self._buffer[:end], self._buffer[end:]
        return head

    def _enter(self, tag: str) -> None:
        """Goes on behind a tag."""
        self._at_start = False
        self._reasoning.cut()
        self._content.cut()
        begin, end = self._form.think or (None, None)
        if tag in (begin, end):
            self._in_reasoning = tag == begin
            return
        assert self._form.calls is not None
        self._in_reasoning = False
        self._call = self._form.calls.read(self._writer, tag)
        self._call_tags = next(self._call)

    def _say(self, marked: str) -> None:
        text = self._marks.plain(marked)
        self._at_start = self._at_start and not text.strip()
        self._put(Reasoning(text) if self._in_reasoning else Content(text))

    def _put(self, part: Part) -> None:
        """Adds a part, text without blanks that belong to tags."""
        match part:
            case Reasoning(text):
                part = Reasoning(self._reasoning.push(text))
            case Content(text):
                part = Content(self._content.push(text))
            case CallBegin():
                self._content.cut()
        if not isinstance(part, Reasoning | Content) or part.text:
            self._parts.append(part)

    def _flush(self) -> None:
        """Adds the blanks that were held in case that a tag follows."""
        if rest := self._reasoning.finish():
            self._parts.append(Reasoning(rest))
        if rest := self._content.finish():
            self._parts.append(Content(rest))

    # -- calls

    def _calls(self) -> bool:
        found = self._marks.search(self._call_tags).first(self._buffer)
        text = self._split(found.start)
        self._split(found.end - found.start if found.tag else 0)
        if text or found.tag:
            self._send(text, found.tag)
        return found.tag is not None

    def _send(self, text: str, tag: str | None) -> None:
        assert self._call is not None
        try:
            self._call_tags = self._call.send((self._marks.plain(text), tag))
        except StopIteration:
            self._call = None
        for part in self._writer.take():
            self._put(part)
            if self._one_call and isinstance(part, CallEnd):
                self.stopped, self._buffer = True, ""
                return

    def _end(self) -> None:
        """Reads the rest of the buffer, which no longer can become a tag."""
        rest = self._buffer
        if self._call is not None:
            self._buffer = ""
            self._send(rest, AT_END)  # a part of a tag: text that cannot become one was read
        elif not self._find_stop(TagMatch(len(rest), len(rest), None)):
            self._say(rest)
            self._buffer = ""
        self._flush()


def parse_answer(
    ids: Sequence[int],
    tokenizer: Tokenizer,
    form: AnswerFormat = PLAIN_ANSWER,
    *,
    stop: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    in_reasoning: bool = False,
) -> Answer:
    """A whole answer, without its end token; the arguments are those of `AnswerStream`."""
    stream = AnswerStream(tokenizer, form, stop=stop, tools=tools, in_reasoning=in_reasoning)
    return answer_of([*stream.push(ids), *stream.finish()])


def _checked(stop: Sequence[str], marks: MarkedText) -> list[str]:
    """Stop texts, each also with the marks of the control tokens that it spells."""
    for text in stop:
        check_text(text)
    if not all(stop):
        raise BadRequest("a stop text is empty", "it would stop before the first token")
    return list(dict.fromkeys([*stop, *map(marks.marked, stop)]))
