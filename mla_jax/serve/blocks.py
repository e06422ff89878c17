"""An answer's parts as blocks that begin, grow and end: reasoning, a text, a call of a tool."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mla_jax.engine.core.request import FinishReason
from mla_jax.serve.answering import FINISHES
from mla_jax.text.answers import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning

BlockKind = type[Reasoning] | type[Content] | type[CallBegin]


@dataclass
class AnswerBlock:
    """`text` is of reasoning or content, or the arguments of a `call`. A block that a limit cuts is incomplete."""

    kind: BlockKind
    call: CallBegin | None = None
    text: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockBegin(NamedTuple):
    block: AnswerBlock
    index: int


class BlockDelta(NamedTuple):
    block: AnswerBlock
    index: int
    text: str


class BlockEnd(NamedTuple):
    block: AnswerBlock
    index: int


BlockStep = BlockBegin | BlockDelta | BlockEnd


class AnswerBlocks(list[AnswerBlock]):
    """The blocks of an answer so far. Each but the last has ended."""

    def push(self, part: Part) -> Iterator[BlockStep]:
        """The steps that a part makes."""
        match part:
            case CallBegin():
                yield from self._end()
                yield self._begin(AnswerBlock(CallBegin, part))
            case CallArguments(_, text):
                yield self._grow(text)
            case CallEnd():
                yield from self._end()
            case Reasoning(text) | Content(text):
                if not self._goes_on(type(part)):
                    yield from self._end()
                    yield self._begin(AnswerBlock(type(part)))
                yield self._grow(text)

    def finish(self, reason: FinishReason) -> Iterator[BlockStep]:
        """The end of the answer ends the last block. A limit cuts it."""
        yield from self._end("incomplete" if is_cut(reason) else "completed")

    def _goes_on(self, kind: BlockKind) -> bool:
        return bool(self) and self[-1].status == "in_progress" and self[-1].kind is kind

    def _begin(self, block: AnswerBlock) -> BlockStep:
        self.append(block)
        return BlockBegin(block, len(self) - 1)

    def _grow(self, text: str) -> BlockStep:
        self[-1].text += text
        return BlockDelta(self[-1], len(self) - 1, text)

    def _end(self, status: Literal["completed", "incomplete"] = "completed") -> Iterator[BlockStep]:
        if self and self[-1].status == "in_progress":
            self[-1].status = status
            yield BlockEnd(self[-1], len(self) - 1)


def is_cut(reason: FinishReason) -> bool:
    """Whether a limit of tokens or of time has ended an answer."""
    return FINISHES[reason] == "length"


def blocks_of(parts: Iterable[Part], reason: FinishReason) -> AnswerBlocks:
    """The blocks of a whole answer."""
    blocks = AnswerBlocks()
    for part in parts:
        for _ in blocks.push(part):
            pass
    for _ in blocks.finish(reason):
        pass
    return blocks
