"""The scheduler: requests to admit, prompts to prefill, rows to decode and for how many steps, requests to preempt.

One pure function over integers, without a clock: two hosts that see the same requests decide the same. Who comes first is
(priority, arrival), always. Reading a prompt chooses no token; a decode step chooses one, and writes it into the row's pages.
While prompts are read, each pass is also a step of the rows that decode."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Limits:
    rows: int  # on the device
    page_size: int
    lines: tuple[int, ...]  # tokens that each of the programs for prompts reads
    pieces: int = 64  # of prompts in one line
    streamed_line: int = 1 << 30  # tokens of a line at most, while a row decodes for somebody who reads along
    reach: int = 1 << 30  # tokens, held and new, of all pieces in one line, unless it holds only one
    steps: int = 32  # of one decode dispatch, at most
    streamed_steps: int = 8  # the same while somebody streams
    waited_steps: int = 1  # the same while a row waits for its mask, which it gets after the dispatch before
    # A row that is about to end shortens a dispatch for those that wait, but not to fewer steps than this
    fewest_steps: int = 8
    dispatch: int = 256  # what a line costs in addition to its tokens, in tokens: the weights it reads
    # What a token that is still to be read weighs when a shard is chosen, in tokens that are held
    reading: int = 16
    # Parts of a page that can be had singly; pages that are needed, free or had are counted in these
    parts: int = 1


@dataclass(frozen=True)
class Waiting:
    id: int
    priority: int  # the lowest comes first
    arrival: int  # a serial number; a preempted request keeps it
    tokens: int  # to read in all, at least one
    shared: int  # pages whose tokens need not be read: the index has them, or the host does
    taken: int  # parts of these that somebody holds: the others still count as free, or are new
    left: int  # tokens it may generate
    streams: bool = False
    blocked: bool = False  # another request is about to write a page that it needs
    until: int = 1 << 30  # tokens that it may choose, once it has read all, before it must wait
    extra: int = 0  # parts that it needs in addition to those of its tokens, for a while


@dataclass(frozen=True)
class Running:
    id: int
    priority: int
    arrival: int
    unread: int  # tokens of its prompt that no dispatch has read yet
    held: int  # tokens in its pages once all dispatches are done
    pages: int  # in parts, as all that follows
    own: int  # pages that it alone holds: what preempting it frees
    left: int  # tokens it may generate beyond those dispatched; with none left it only waits for its results
    streams: bool = False
    until: int = 1 << 30  # tokens that it may choose before it must wait
    waits: bool = False  # for the dispatch before, with all tokens that it may choose now

    @property
    def decodes(self) -> bool:
        return not self.unread and self.left > 0 and self.until > 0

    @property
    def ends(self) -> bool:
        return not self.unread and self.left <= 0


class Plan(NamedTuple):
    """To be done in this order; where there is a line, it and one step of the rows that decode are one pass. Empty if nobody runs
    and nobody who waits can start, or until rows that end are released."""

    preempt: tuple[int, ...]
    admit: tuple[int, ...]
    read: tuple[tuple[int, int], ...]  # (id, tokens) of one line
    line: int | None  # tokens of its program
    decode: tuple[int, ...]
    steps: int


def plan(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    free: int,
    limits: Limits,
    whole: int | None = None,
    queued: bool = False,
) -> Plan:
    """The next dispatches; `free` pages can be had now, by forgetting idle ones if need be. Only `whole` pages, if that is given,
    are for those who start. `queued`: others wait besides these, for a row."""
    rows, gone = _preempt(sorted(running, key=_turn), free, limits)
    for_new = free if whole is None else min(free, whole)
    admitted = [] if gone else _admit(sorted(waiting, key=_turn), rows, for_new, limits)
    started = [_started(request, limits) for request in admitted]
    free += sum(row.own for row in gone) - sum(row.own for row in started)
    rows = sorted([*rows, *started], key=_turn)
    line, read = _read(rows, limits)
    if line is not None:
        limits = replace(limits, steps=1, streamed_steps=1)
    hurry = queued or bool(gone) or len(admitted) < len(waiting)
    decode, steps = _decode(rows, free, hurry, limits)
    return Plan(_ids(gone), _ids(admitted), tuple(read), line, _ids(decode), steps)


def next_line(running: Sequence[Running], limits: Limits) -> int | None:
    """The line in which prompts are read next; None: in none."""
    return _read(sorted(running, key=_turn), limits)[0]


def assigned(
    waiting: Sequence[Sequence[Waiting]],
    running: Sequence[Sequence[Running]],
    free: Sequence[int],
    limits: Limits,
) -> list[list[Waiting]]:
    """The shard of each request that waits, for as many as there are rows: where it fits, and then where there is least to do.

    `waiting` has each request as it would wait in each shard: one that knows its prompt has less to read. Tokens that are held
    cost time in each step, those to be read cost more, but once. `free` are the pages of each shard."""
    room, free = [limits.rows - len(rows) for rows in running], list(free)
    work = [sum(row.held + limits.reading * row.unread for row in rows) for rows in running]
    found: list[list[Waiting]] = [[] for _ in running]
    for request in waiting:
        open_shards = [n for n in range(len(room)) if room[n]]
        if not open_shards:
            break
        best = min(
            open_shards,
            key=lambda n: (_lacks(request[n], limits) > free[n], work[n] + _work(request[n], limits), n),
        )
        found[best].append(request[best])
        work[best] += _work(request[best], limits)
        if not request[best].blocked:  # as many may wait for one that is about to write what they need
            room[best] -= 1
            free[best] -= _lacks(request[best], limits)
    return found


def _work(request: Waiting, limits: Limits) -> int:
    known = request.shared * limits.page_size
    return known + limits.reading * (request.tokens - known)


def agreed(plans: Sequence[Plan]) -> list[Plan]:
    """With equal programs for all shards, which work in step: the longest line, and the fewest steps; one step with a line."""
    line = max((plan.line or 0 for plan in plans), default=0)
    steps = min((plan.steps for plan in plans if plan.decode), default=0)
    steps = min(steps, 1) if line else steps
    return [plan._replace(line=line or None, steps=steps) for plan in plans]


def _turn(request: Waiting | Running) -> tuple[int, int]:
    return request.priority, request.arrival


def _ids(requests: Sequence[Waiting | Running]) -> tuple[int, ...]:
    return tuple(request.id for request in requests)


def _need(row: Running, steps: int, limits: Limits) -> int:
    """Pages that a row lacks for these decode steps; the last token it may generate is not written."""
    return max(0, _pages(row.held + min(steps, row.left - 1), limits) - row.pages) if row.decodes else 0


def _needs(rows: Sequence[Running], steps: int, limits: Limits) -> int:
    return sum(_need(row, steps, limits) for row in rows)


def _pages(tokens: int, limits: Limits) -> int:
    return -(-tokens // limits.page_size) * limits.parts


def _preempt(rows: list[Running], free: int, limits: Limits) -> tuple[list[Running], list[Running]]:
    """The rows that stay, and those, last ones first, whose pages the others need for one step.

    Where a row ends, its pages come without preempting anybody."""
    stay, gone = list(rows), []
    while len(stay) > 1 and not any(row.ends for row in rows) and _needs(stay, 1, limits) > free:
        gone.append(stay.pop())
        free += gone[-1].own
    return stay, gone


def _admit(waiting: list[Waiting], rows: list[Running], free: int, limits: Limits) -> list[Waiting]:
    """Who starts: the first that does not fit lets nobody pass, so that large requests get their turn.

    Pages for what the running rows decode next, their prompts once read, and for each first token, are reserved."""
    decoding = [_after_reading(row, row.unread) for row in rows]
    free -= _needs(decoding, _steps(decoding, True, limits), limits)
    admitted: list[Waiting] = []
    for request in waiting:
        if request.blocked:
            continue
        need = _lacks(request, limits)
        if len(rows) + len(admitted) == limits.rows or need > free:
            break
        admitted.append(request)
        free -= need
    return admitted


def _lacks(request: Waiting, limits: Limits) -> int:
    """Pages that a request needs to start, and for its first token."""
    return _pages(request.tokens + (request.left > 1), limits) - request.taken + request.extra


def _started(request: Waiting, limits: Limits) -> Running:
    held, pages = request.shared * limits.page_size, _pages(request.tokens, limits)
    return Running(
        id=request.id,
        priority=request.priority,
        arrival=request.arrival,
        unread=request.tokens - held,
        held=held,
        pages=pages,
        own=pages - request.taken,
        left=request.left,
        streams=request.streams,
        until=request.until,
    )


def _read(rows: list[Running], limits: Limits) -> tuple[int | None, list[tuple[int, int]]]:
    """The next line's length and its pieces: the first requests, in the cheapest line for the tokens that fit the longest one."""
    pending = [row for row in rows if row.unread]
    if not pending:
        return None, []
    lines = _lines(rows, limits)
    tokens = sum(tokens for _, tokens in _pieces(pending, max(lines), limits))
    _, line = _cheapest(tokens, lines, limits.dispatch)
    return line, _pieces(pending, line, limits)


def _lines(rows: list[Running], limits: Limits) -> tuple[int, ...]:
    """Those that may be read: who reads along waits for a short one at most, unless more wait for their first token."""
    read_along = sum(row.decodes and row.streams for row in rows)
    if read_along < sum(row.unread > 0 for row in rows):
        return limits.lines
    short = tuple(line for line in limits.lines if line <= limits.streamed_line)
    return short or (min(limits.lines),)


@functools.lru_cache(maxsize=4096)
def _cheapest(tokens: int, lines: tuple[int, ...], dispatch: int) -> tuple[int, int]:
    """The least cost of lines that hold these tokens, padding and dispatches counted, and the longest of these lines."""
    found = [
        (line + dispatch + (_cheapest(tokens - line, lines, dispatch)[0] if line < tokens else 0), line)
        for line in lines
    ]
    return min(found, key=lambda each: (each[0], -each[1]))


def _pieces(pending: list[Running], line: int, limits: Limits) -> list[tuple[int, int]]:
    """As many tokens as a line has room for, of the first rows first."""
    pieces, reach = [], limits.reach
    for row in pending[: limits.pieces]:
        tokens = min(row.unread, line)
        reach -= row.held + tokens
        if not tokens or (pieces and reach < 0):
            break
        pieces.append((row.id, tokens))
        line -= tokens
    return pieces


def _after_reading(row: Running, tokens: int) -> Running:
    if not tokens:
        return row
    return replace(row, unread=row.unread - tokens, held=row.held + tokens)


def _decode(rows: list[Running], free: int, hurry: bool, limits: Limits) -> tuple[list[Running], int]:
    """The rows that there is room for, first ones first, and as many steps as all of them have room for."""
    chosen, room = [], free
    for row in rows:
        if row.decodes and _need(row, 1, limits) <= room:
            chosen.append(row)
            room -= _need(row, 1, limits)
    steps = min([_steps(chosen, hurry, limits), *(row.until for row in chosen)])
    if any(row.waits for row in rows):
        steps = min(steps, limits.waited_steps)
    while steps > 1 and _needs(chosen, steps, limits) > free:
        steps -= 1
    return chosen, steps


def _steps(rows: Sequence[Running], hurry: bool, limits: Limits) -> int:
    """Steps of one dispatch if pages are no matter; in a hurry a row that ends is soon replaced."""
    rows = [row for row in rows if row.decodes]
    if not rows:
        return 0
    left = [row.left for row in rows]
    most = limits.streamed_steps if any(row.streams for row in rows) else limits.steps
    return min(most, max(left), max(limits.fewest_steps, min(left)) if hurry else most)
