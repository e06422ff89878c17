"""The cache policy by which requests drop tokens.

What stays in each layer, or in each head that is cached, is found on the device, then moved to pages of the row's own. Its old
pages are free, or stay in the prefix index as they were.

A row pauses at its points: where its prompt is read, and then every few hundred tokens. Where prompts are read in chunks, the end
of each chunk is a point too; so a row never holds more than what it keeps and a chunk."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np

from mla_jax.base.batch import Tables
from mla_jax.base.options import EVERY, EvictOptions
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.paged import COPIED, PAGE
from mla_jax.decode.evict_programs import Kept, Selection
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.decode.packing import here, part_here
from mla_jax.engine.core.cache_policy import CachePolicy, Free
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.job import Job, Shard
from mla_jax.engine.core.pages import Held, Tier
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.scheduler import Running, Waiting
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.contexts import AT_A_TIME, Contexts
from mla_jax.engine.policy.evicted_pages import Evicted, EvictedPages


@dataclasses.dataclass(frozen=True)
class Eviction:
    """How many of a request's tokens stay, and when it drops some."""

    evicts: Selection
    keep: float  # the share that stays in each layer and head, on average; above 1 the number
    every: int = EVERY
    chunk: int | None = None  # tokens of a prompt between two points; None: the whole prompt

    @classmethod
    def of(cls, options: EvictOptions) -> "Eviction | None":
        """As asked for; None if nothing is dropped."""
        if options.evict == "off":
            return None
        policy, budget = options.evict, options.evict_budget
        policy = EVICTION_POLICIES[policy] if isinstance(policy, str) else policy
        budget = BUDGET_RULES[budget] if isinstance(budget, str) else budget
        selection = Selection(policy, budget, options.evict_sinks, options.evict_recent)
        chunk = options.evict_chunk
        return cls(selection, options.evict_keep, min(EVERY, chunk or EVERY), chunk)

    def point(self, request: Request, number: int) -> int:
        """Tokens that a request has at the point of this number, behind the context that it begins with. A prompt of which the
        scores are asked for is read whole."""
        begin, prompt, chunk = request.begin, len(request.prompt), self.chunk
        if request.params.prompt_logprobs is not None:
            chunk = None
        last = prompt - (request.asking or 0) - 1  # what asks is there as a whole, or not at all
        inside = 0 if chunk is None else (last - begin) // chunk  # points before the prompt's end
        if chunk is not None and number < inside:
            return begin + chunk * (number + 1)
        # A context has dropped tokens already: what is behind it is read whole, and others share its pages meanwhile
        first = prompt if request.context is None else prompt + self.every
        return first + (number - inside) * self.every

    def count(self, tokens: int) -> int:
        """The number of these tokens that stay."""
        return max(1, round(self.keep * tokens)) if self.keep <= 1 else min(int(self.keep), tokens)

    def pages(self, tokens: int, more: int = 0) -> int:
        """Pages for what stays of these tokens, and `more` behind them: those that are not full add up to one more at most."""
        return -(-(self.count(tokens) + more) // PAGE) + 1

    def stretch(self, request: Request) -> int | None:
        """Tokens between two points at most, where that bounds what a request holds; else None: it holds all at some time."""
        if self.chunk is None or request.context is not None or request.params.prompt_logprobs is not None:
            return None
        return max(self.chunk + (request.asking or 0), self.every)

    def resident(self, tokens: int) -> int:
        """Tokens that a request of `tokens` needs room for. As it drops some, those that stay are there twice."""
        if self.chunk is None:
            return tokens + PAGE * self.pages(tokens)
        at_a_point = 2 * PAGE * self.pages(tokens, max(self.chunk, self.every))
        return min(at_a_point, tokens + PAGE * self.pages(tokens))


class Evicting(CachePolicy):
    """A row drops tokens at its points, and waits meanwhile; others go on."""

    needs_text = True

    def __init__(self, programs: Programs, size: Size, eviction: Eviction):
        super().__init__(programs, size)
        self.eviction = eviction
        self.layers, self.lanes = programs.model.config.num_hidden_layers, programs.model.lanes
        self.parts = self.layers * self.lanes
        self.contexts = Contexts(programs)

    def new_pages(self, tier: Tier | None) -> EvictedPages:
        ahead = self.programs.drafter.ahead
        return EvictedPages(self.size.pages, PAGE, self.layers, self.lanes, ahead=ahead, tier=tier)

    def capacity(self, request: Request) -> int:
        room, eviction = super().capacity(request), self.eviction
        if request.params.prompt_logprobs is not None:
            eviction = dataclasses.replace(eviction, chunk=None)
        if request.asking is not None:
            room -= AT_A_TIME + request.asking
        if request.context is not None:
            return self._capacity_behind(request.context)
        return bisect.bisect_right(range(self.size.context + 1), room, key=eviction.resident) - 1

    def _capacity_behind(self, context: CompressedContext) -> int:
        """The same of a request that begins with a context: also for what stays at its next point, and what is copied."""
        begin, counts = len(context.tokens), context.counts.ravel()

        def needed(tokens: int) -> int:
            of_parts = -(-counts // PAGE) + -(-(counts + tokens - begin) // PAGE) - counts // PAGE
            return int(of_parts.sum()) + self.parts * (COPIED + self.eviction.pages(tokens))

        fitting = bisect.bisect_right(
            range(begin, self.size.context + 1), self.parts * self.size.pages, key=needed
        )
        return begin + fitting - 1

    def prefilled(self, job: Job) -> list[int]:
        """Tokens up to the first point. Later ones attend to kept ones alone, so they are read anew after a preemption."""
        return job.tokens[: self.eviction.point(job.request, 0)]

    def admit(self, job: Job, shard: Shard, device: Dispatcher) -> Held:
        context, pages = job.request.context, cast(EvictedPages, shard.pages)
        if context is None:
            return super().admit(job, shard, device)
        root = pages.roots.get(context) or self.contexts.planted(context, pages, device)
        return self.contexts.grown(root, len(self.prefilled(job)) - root.tokens, pages, device)

    def waiting(self, job: Job, shard: Shard) -> Waiting:
        waiting = super().waiting(job, shard)
        extra = self.parts * self._pages_at(job, 0, len(job.tokens))
        if job.request.asking is not None:
            extra += self.parts * COPIED
        if job.request.context is not None:
            return self._behind(
                job.request.context, shard, dataclasses.replace(waiting, extra=extra, until=0)
            )
        return dataclasses.replace(waiting, taken=self.parts * waiting.taken, extra=extra, until=0)

    def _behind(self, context: CompressedContext, shard: Shard, waiting: Waiting) -> Waiting:
        """The same of a job that begins with a context, which takes parts of its own if no other job holds it."""
        pages, counts = cast(EvictedPages, shard.pages), context.counts.ravel()
        needed = int(pages.parts_behind(counts, waiting.tokens - len(context.tokens)).sum())
        if context not in pages.roots:
            needed += int((-(-counts // PAGE)).sum()) + self.parts * COPIED
        every = self.parts * -(-waiting.tokens // PAGE)
        return dataclasses.replace(waiting, shared=len(context.tokens) // PAGE, taken=every - needed)

    def running(self, job: Job) -> Running:
        """Of a row that has dropped tokens, all parts count as the fullest."""
        row, point = super().running(job), self._next(job)
        until = max(0, point - (job.known if job.unread else row.held))
        unread = min(row.unread, max(point - job.read, 0))
        pages, held = row.pages, row.held
        if isinstance(job.held, Evicted):
            pages = self.size.width + 1
            held = pages * PAGE - job.held.room(PAGE, row.held)
        return dataclasses.replace(row, unread=unread, until=until, pages=self.parts * pages, held=held)

    def free(self, shard: Shard) -> Free:
        """In parts. Those for what stays of requests that are about to drop tokens are set aside."""
        aside = self.parts * sum(self._pages_at(job, job.pauses, job.known) for job in shard.running)
        pages = cast(EvictedPages, shard.pages)
        running = max(pages.free_parts - aside, 0)
        return Free(running, min(running, self.parts * pages.free))

    def pauses_at(self, job: Job) -> int:
        return self._next(job)

    def _next(self, job: Job) -> int:
        """Tokens that a job has at its next point."""
        return self.eviction.point(job.request, job.pauses)

    def _pages_at(self, job: Job, number: int, known: int) -> int:
        """Pages that a job takes at a point: for what stays, and for the `known` tokens up to the next point; none if it ends
        before."""
        point, following = (self.eviction.point(job.request, number + i) for i in range(2))
        if point >= len(job.request.prompt) + job.request.limit:
            return 0
        return self.eviction.pages(point, max(0, min(known, following) - point))

    def programs_between(self, widths: Sequence[int]) -> list[ProgramShape]:
        return [ProgramShape(name, width, rows=1) for name in ("observe", "move") for width in widths]

    def programs_of(self, request: Request) -> list[ProgramShape]:
        before, again = self.most_pages(request), -(-(self.eviction.stretch(request) or 0) // PAGE)
        return self.programs_between(
            [self.size.width_for(min(before + again, super().most_pages(request)) + 1)]
        )

    def most_pages(self, request: Request) -> int:
        """On average over layers and heads: a budget may give one of them more."""
        whole, stretch = super().most_pages(request), self.eviction.stretch(request)
        if stretch is None:
            return whole
        return min(whole, self.eviction.pages(len(request.prompt) + request.limit, stretch))

    def _width(self, job: Job, device: Dispatcher) -> int:
        """Of the page tables by which a job drops tokens: those that are read before the next point need room, too."""
        following = self.eviction.point(job.request, job.pauses + 1)
        again = max(0, min(job.known, following) - job.held_tokens)
        width = self.size.width_for(self.pages_of(job) + -(-again // PAGE) + 1)
        return device.taken(ProgramShape("observe", width, rows=1)).width

    def ask(self, job: Job, device: Dispatcher) -> Kept:
        """Which of a job's tokens stay."""
        alone, asking = device.alone(job), self._asking(job)
        count, ignored = (
            device.same(np.array([number], np.int32))
            for number in (self.eviction.count(job.held_tokens - asking), asking)
        )
        pool, rows = device.state()
        sent = device.rows_of(alone, 1), device.tables(alone, 1, self._width(job, device)), count, ignored
        pool, rows, kept = self.programs.observe(pool, rows, *sent)
        device.keep(pool, rows)
        part_here(kept.told).copy_to_host_async()
        return kept

    def _asking(self, job: Job) -> int:
        """The number of a job's newest tokens that are there to ask for those before, and do not stay."""
        at_end = job.held_tokens == len(job.request.prompt)
        return (job.request.asking or 0) if at_end else 0

    def answered(self, job: Job, answer: Kept, device: Dispatcher) -> bool:
        """Moves what stays to pages of its own, or if that is all that is wanted, to the host."""
        assert job.held is not None
        assert job.shard is not None
        pages, held = cast(EvictedPages, job.shard.pages), job.held_tokens
        if job.request.asking is not None and held == len(job.request.prompt):
            job.compressed = self.contexts.taken(job, answer, held - job.request.asking, device)
            job.finish(FinishReason.LENGTH)
            return True
        counts = here(answer.told)[job.shard.number, :, :, 0].ravel().tolist()
        again = max(0, min(job.known, self._next(job)) - held)  # tokens that are read before the next point
        new = pages.evict(job.held, counts, held, again)
        if new is None:
            return False
        alone, width = (
            device.alone(job),
            answer.source.shape[-1] // PAGE,
        )  # as wide as those that it was asked with
        before, old = job.held, device.tables(alone, 1, width)
        job.held = new
        pool, rows = device.state()
        pool, _ = self.programs.move(pool, answer, old, device.tables(alone, 1, width))
        device.keep(pool, rows)
        pages.release(before)
        device.stats.dropped += int(new.dropped.mean())
        return True

    def pages_of(self, job: Job) -> int:
        return int(job.held.counts.max()) if isinstance(job.held, Evicted) else super().pages_of(job)

    def pages_with(self, job: Job, tokens: int) -> int:
        return self.pages_of(job) if isinstance(job.held, Evicted) else super().pages_with(job, tokens)

    def table(self, jobs: Sequence[Job], count: int, width: int) -> Tables:
        """The parts of each layer and head, and how many tokens of a row it has dropped."""
        each = self.layers, self.lanes
        tables = Tables(np.zeros((*each, count, width), np.int32), np.zeros((*each, count), np.int32))
        for i, job in enumerate(jobs):
            assert job.held is not None
            assert job.shard is not None
            tables.pages[:, :, i] = cast(EvictedPages, job.shard.pages).table(job.held, width)
            if isinstance(job.held, Evicted):
                tables.dropped[:, :, i] = job.held.dropped.reshape(each)
        return tables
