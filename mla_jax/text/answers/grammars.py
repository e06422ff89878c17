# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Grammars of tool calls. Each reads the text behind the tag that opens calls and writes their parts.

A grammar is a generator. It yields the tags that it waits for, and is sent more text and the tag behind that text: None if it
has not come yet, AT_END if the answer ends. The text before AT_END is the part of a tag, or empty. Text where the grammar has
no place for it is given back as content."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from mla_jax.text.answers.arguments import CallWriter, Pairs, valid_name
from mla_jax.text.answers.blanks import BLANKS, Trimmed

AT_END = ""
MOST_HEADER = (
    512  # characters before the arguments; text beyond is no header, and is not held back for longer
)

Tags = tuple[str, ...]
CallReading = Generator[Tags, tuple[str, str | None], str | None]
CallHeader = tuple[str, str | None]  # name and id


@dataclass(frozen=True)
class JsonCalls:
    """Calls with JSON text as arguments, within a section.

    In a call stands a text before each of `separators`, in which `header` finds name and id, then the arguments up to one of
    `ends`, of which the last is the tag that ends a call."""

    section: tuple[str, str]
    begin: str
    separators: Tags
    ends: Tags
    header: Callable[[list[str]], CallHeader | None]

    @property
    def openings(self) -> Tags:
        return (self.section[0], self.begin)

    @property
    def tags(self) -> Tags:
        return (*self.section, self.begin, *self.separators, self.ends[-1])

    def read(self, writer: CallWriter, opening: str) -> CallReading:
        return (yield from _section(writer, opening, (self.begin, self.section[1]), self._call))

    def _call(self, writer: CallWriter) -> CallReading:
        after = (self.begin, self.section[1])  # a call whose end is missing ends here, too
        written, texts, tag = self.begin, [], None
        for separator in self.separators:
            text, tag = yield from _until((separator, self.ends[-1], *after), MOST_HEADER)
            texts.append(text)
            written += text
            if tag != separator:
                break
            written += separator
        header = self.header(texts) if tag == self.separators[-1] else None
        if header is None:
            return _given_back(writer, written, tag, self.ends[-1])
        writer.begin(*header)
        tag = yield from _passed_through(writer, (*self.ends, *after))
        return None if tag in self.ends else tag


def function_header(texts: list[str]) -> CallHeader | None:
    """V3: the word function, then the name and a newline."""
    name = valid_name(texts[-1])
    return (name, None) if name and texts[0].strip() == "function" else None


def name_header(texts: list[str]) -> CallHeader | None:
    name = valid_name(texts[-1])
    return (name, None) if name else None


def id_header(texts: list[str]) -> CallHeader | None:
    """Kimi: the id, which is functions.NAME:IDX."""
    written = texts[-1].strip()
    name, colon, number = written.rpartition(":")
    if not (colon and number.isdecimal()):
        return name_header([written.removeprefix("functions.")])
    name = valid_name(name.removeprefix("functions."))
    return (name, written) if name else None


@dataclass(frozen=True)
class GlmCalls:
    """GLM: a name, then keys and values in tags. GLM-4.5 writes newlines between them, GLM-4.7 and later do not."""

    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")

    @property
    def openings(self) -> Tags:
        return self.call[:1]

    @property
    def tags(self) -> Tags:
        return (*self.call, *self.key, *self.value)

    def read(self, writer: CallWriter, opening: str) -> CallReading:
        tag: str | None = opening
        while tag == self.call[0]:
            tag = yield from self._call(writer)
        return tag

    def _call(self, writer: CallWriter) -> CallReading:
        begin, end = self.call
        within = (self.key[0], end, begin)  # a call whose end is missing ends where the next begins
        text, tag = yield from _until(within, MOST_HEADER)
        name = valid_name(text)
        if name is None or tag not in within:
            return _given_back(writer, begin + text, tag, *within[:2])
        writer.begin(name)
        pairs = writer.pairs(name)
        while tag not in (end, begin, AT_END):
            if tag == self.key[0]:
                tag = yield from self._pair(writer, pairs)
            else:
                tag = yield from _misplaced(writer, within)
        if tag != AT_END:
            pairs.end()
        return tag

    def _pair(self, writer: CallWriter, pairs: Pairs) -> CallReading:
        begin, end = self.key
        key, tag = yield from _until((end, self.value[0], self.call[1]))
        written = begin + key
        gap = ""
        if tag == end:
            gap, tag = yield from _until((self.value[0], begin, *self.call))
            written += end + gap
        if tag == self.value[0]:
            writer.text(gap)
            pairs.begin(key.strip())
            return (yield from _value(pairs, self.value[1]))
        if tag != AT_END:
            writer.text(written)  # a key without a value
        return tag


# The ends of a key, and whether a string is behind each; None: the tag does not say
_KEY_ENDS = {'" string="true">': True, '" string="false">': False, '">': None}


@dataclass(frozen=True)
class DsmlCalls:
    """DeepSeek-V3.2 and V4: names and keys as attributes of tags, and whether a value is a string."""

    sections: tuple[tuple[str, str], ...] = (
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),  # V4
    )
    call: tuple[str, str] = ('<｜DSML｜invoke name="', "</｜DSML｜invoke>")
    parameter: tuple[str, str] = ('<｜DSML｜parameter name="', "</｜DSML｜parameter>")

    @property
    def openings(self) -> Tags:
        return (*(begin for begin, _ in self.sections), self.call[0])

    @property
    def tags(self) -> Tags:
        return ("｜DSML｜",)  # the part of each tag that is a control token where the tokenizer has it

    @property
    def _after(self) -> Tags:
        return (self.call[0], *(end for _, end in self.sections))

    def read(self, writer: CallWriter, opening: str) -> CallReading:
        return (yield from _section(writer, opening, self._after, self._call))

    def _call(self, writer: CallWriter) -> CallReading:
        begin, end = self.call
        text, tag = yield from _until(('">', end, *self._after), MOST_HEADER)
        name = valid_name(text)
        if name is None or tag != '">':
            return _given_back(writer, begin + text, tag, end, '">')
        writer.begin(name)
        pairs = writer.pairs(name)
        within = (self.parameter[0], end, *self._after)
        while tag not in (*within[1:], AT_END):
            if tag == self.parameter[0]:
                tag = yield from self._pair(pairs)
            else:
                tag = yield from _misplaced(writer, within)
        if tag != AT_END:
            pairs.end()
        return None if tag == end else tag

    def _pair(self, pairs: Pairs) -> CallReading:
        key, tag = yield from _until(tuple(_KEY_ENDS))
        if tag not in _KEY_ENDS:
            return tag
        pairs.begin(key, _KEY_ENDS[tag])
        return (yield from _value(pairs, self.parameter[1]))


CallGrammar = JsonCalls | GlmCalls | DsmlCalls


def _section(
    writer: CallWriter, opening: str, tags: Tags, read_call: Callable[[CallWriter], CallReading]
) -> CallReading:
    """Reads calls, each behind the first of `tags`, up to one of the others; `opening` may be the first call's."""
    begin, *ends = tags
    tag: str | None = opening
    while tag not in (*ends, AT_END):
        if tag == begin:
            tag = yield from read_call(writer)
        else:
            tag = yield from _misplaced(writer, tags)
    return tag


def _until(
    tags: Tags, most: int | None = None
) -> Generator[Tags, tuple[str, str | None], tuple[str, str | None]]:
    """The text up to one of `tags`, and that tag; None for the tag if the text gets longer than `most`."""
    text = ""
    while True:
        more, tag = yield tags
        text += more
        if tag is not None or (most is not None and len(text) > most):
            return text, tag


def _misplaced(writer: CallWriter, tags: Tags) -> CallReading:
    """Gives back the text up to one of `tags`, and returns that tag."""
    while True:
        text, tag = yield tags
        if tag == AT_END:
            return tag
        writer.text(text)
        if tag is not None:
            return tag


def _passed_through(writer: CallWriter, tags: Tags) -> CallReading:
    """Writes the text up to one of `tags` as arguments, without the blanks around it; none at all is an empty object."""
    text = Trimmed(leading=BLANKS, after_tag=True)
    while True:
        more, tag = yield tags
        if tag == AT_END:
            return tag
        writer.arguments(text.push(more))
        if tag is not None:
            break
    writer.arguments("{}" if text.empty else "")
    writer.end()
    return tag


def _value(pairs: Pairs, end: str) -> CallReading:
    """Reads a value up to `end`. No other tag ends it: a value may be text about tags."""
    while True:
        more, tag = yield (end,)
        if tag == AT_END:
            pairs.cut()
            return tag
        pairs.push(more)
        if tag == end:
            pairs.close()
            return None


def _given_back(writer: CallWriter, written: str, tag: str | None, *own: str) -> str | None:
    """Gives back a call without a valid header, with its `tag` if that is one of its `own`; returns the tag to go on with."""
    ended = tag in own
    writer.text(written + (tag or "" if ended else ""))
    return None if ended else tag
