"""Parts of an answer, in the order in which they arrive, and the whole answer that they make."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of the tool `name`. `index` counts the calls of the answer; `id` is None where the model writes none."""

    index: int
    name: str
    id: str | None


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call; a call that the end of the answer cuts has none."""

    index: int


Part = Reasoning | Content | CallBegin | CallArguments | CallEnd


@dataclass
class ToolCall:
    """A call of a tool. `arguments` is JSON text, cut short where the call is not `complete`."""

    name: str
    id: str | None
    arguments: str = ""
    complete: bool = False


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def answer_of(parts: Iterable[Part]) -> Answer:
    """The answer that `parts` make."""
    reasoning, content, calls = [], [], []
    for part in parts:
        match part:
            case Reasoning():
                reasoning.append(part.text)
            case Content():
                content.append(part.text)
            case CallBegin():
                calls.append((part, []))
            case CallArguments() | CallEnd():
                calls[part.index][1].append(part)
    return Answer("".join(reasoning), "".join(content), [_call(begin, rest) for begin, rest in calls])


def _call(begin: CallBegin, rest: list[CallArguments | CallEnd]) -> ToolCall:
    arguments = "".join(part.text for part in rest if isinstance(part, CallArguments))
    return ToolCall(begin.name, begin.id, arguments, any(isinstance(part, CallEnd) for part in rest))


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts, where pieces of one text are one part. Calls do not interleave, so that neighbours are of one call."""
    result: list[Part] = []
    for part in parts:
        if result and (longer := _joined(result[-1], part)):
            result[-1] = longer
        else:
            result.append(part)
    return result


def _joined(first: Part, second: Part) -> Part | None:
    """One part for two pieces of one text, else None."""
    match first, second:
        case (Reasoning(), Reasoning()) | (Content(), Content()) | (CallArguments(), CallArguments()):
            return replace(first, text=first.text + second.text)
    return None
