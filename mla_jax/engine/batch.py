"""Requests computed together: prompts read, tokens taken step by step, texts and finish reasons kept a row."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base import roofline
from mla_jax.base.batch import bucket
from mla_jax.base.config import Config
from mla_jax.cache.latent import slots_for
from mla_jax.decode.loop import Programs, State
from mla_jax.decode.sampling import Sampling
from mla_jax.engine.request import Chunk, FinishReason, Logprobs, Output, Request
from mla_jax.engine.stats import Stats, Stopwatch, peak_bytes
from mla_jax.text.stream import TextStream
from mla_jax.text.tokenizer import Tokenizer


class Row:
    """One request's output so far."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request, self.ids, self.text = request, [], ""
        self.logprobs: Logprobs | None = None if request.params.logprobs is None else []
        self.reason: FinishReason | None = None if request.limit else FinishReason.LENGTH
        self.stream = None if tokenizer is None else TextStream(tokenizer, request.params.stop)

    def take(self, ids: list[int], logprobs: Logprobs | None, ended: bool, finite: bool) -> Chunk:
        """Adds what was generated since the last look; `ended` says that the device stopped the row."""
        seen, self.ids = len(self.ids), self.ids + ids
        if ended:
            self.reason = _reason(self.ids, self.request, finite)
        text = "" if self.stream is None else self._show(ids[:-1] if self.at_end_token else ids)
        self.text += text
        if self.logprobs is not None:
            self.logprobs = (self.logprobs + (logprobs or []))[: len(self.ids)]
        return Chunk(text, self.ids[seen:], self.reason, logprobs)

    @property
    def at_end_token(self) -> bool:
        return bool(self.ids) and self.ids[-1] in self.request.all_ends

    def _show(self, ids: list[int]) -> str:
        assert self.stream is not None
        text = self.stream.push(ids)
        if self.stream.stopped:
            self.reason, self.ids = FinishReason.STOP, self.ids[: self.stream.used]
            return text
        return text + self.stream.finish() if self.reason is not None else text


class Written(NamedTuple):
    """What a batch has generated, on the host; the rest of its state stays on the device."""

    tokens: np.ndarray
    count: np.ndarray
    done: np.ndarray
    finite: np.ndarray
    load: np.ndarray | None  # how often each expert of each layer was chosen, prompts included, where the programs count it

    @classmethod
    def of(cls, state: State) -> "Written":
        return cls(*jax.device_get([getattr(state, name) for name in cls._fields]))


class Batch:
    """Prompts that are read and continued together. Shapes are powers of two, so that programs repeat."""

    def __init__(self, programs: Programs, config: Config, tokenizer: Tokenizer | None, requests: list[Request], scores: int):
        """`scores` bounds the bytes that the attention scores of one chunk of the prompts take."""
        self.programs, self.config, self.scores, self.watch = programs, config, scores, Stopwatch(programs.waits)
        self.rows = [Row(request, tokenizer) for request in requests]
        self.state = self._read_prompts(requests)
        self.first, self.compiling = self.watch.look()
        self.decoding = 0.0
        self.news = self._collect()

    @property
    def done(self) -> bool:
        return all(row.reason is not None for row in self.rows)

    def advance(self, steps: int) -> None:
        """Takes up to `steps` more tokens a row; `news` then holds each row's chunk."""
        self.state = self.programs.run(self.state, np.int32(min(steps, 2**30)))
        self.news = self._collect()
        running, compiling = self.watch.look()
        self.decoding, self.compiling = self.decoding + running, self.compiling + compiling

    def outputs(self) -> list[Output]:
        return [self._output(row) for row in self.rows]

    def stats(self, row: Row) -> Stats:
        """Of the row so far; rows of one batch share its times."""
        longest = max(len(r.ids) for r in self.rows)
        return Stats(
            prompt_tokens=len(row.request.prompt),
            generated_tokens=len(row.ids),
            first_token_seconds=self.first,
            decode_seconds=self.decoding,
            compile_seconds=self.compiling,
            seed=row.request.params.seed or 0,
            bandwidth_share=self._bandwidth_share(longest),
            peak_bytes=peak_bytes(),
        )

    def _bandwidth_share(self, steps: int) -> float | None:
        """The share of the device's bandwidth that the least bytes of the steps took; None on a device of unknown bandwidth."""
        device = self.programs.device
        if device.platform == "cpu" or steps < 2 or self.decoding <= 0:
            return None
        held = sum(len(r.request.prompt) + len(r.ids) for r in self.rows) // len(self.rows)
        itemsize = self.state.last.dtype.itemsize
        return (steps - 1) * roofline.decode_bytes(self.config, len(self.rows), held, itemsize) / self.decoding / device.bandwidth

    def _collect(self) -> list[Chunk | None]:
        """Looks at what the device has written; ends rows there that a stop text has ended here."""
        written, news = Written.of(self.state), []
        self.load = written.load
        self.programs.check()
        for i, row in enumerate(self.rows):
            fresh = written.tokens[i, len(row.ids) : written.count[i]].tolist()
            if row.reason is not None:
                news.append(None)
                continue
            news.append(row.take(fresh, self._logprobs(i, row, fresh), bool(written.done[i]), bool(written.finite[i])))
        over = [i for i, row in enumerate(self.rows) if row.reason is not None and not written.done[i]]
        if over:
            done = written.done.copy()
            done[over] = True
            self.state = dataclasses.replace(self.state, done=jnp.asarray(done))
        return news

    def _read_prompts(self, requests: list[Request]) -> State:
        """Prompts read chunk by chunk, first tokens chosen."""
        rows, longest = bucket(len(requests)), max(len(r.prompt) for r in requests)
        slots = slots_for(max(len(r.prompt) + r.limit for r in requests))
        tokens, mask = _padded([r.prompt for r in requests], (rows, slots), fill=0)
        ends, _ = _padded([r.all_ends for r in requests], (rows, bucket(max(len(r.all_ends) for r in requests), 4)), fill=-1)
        limit = np.zeros(rows, np.int32)
        limit[: len(requests)] = [r.limit for r in requests]
        most = int(limit.max())
        alternatives = max(r.params.logprobs or 0 for r in requests)
        state = self.programs.new(slots, bucket(most, 16), alternatives, limit, ends, _sampling(requests, rows))
        parts = self._parts(longest, self.programs.chunk(rows, slots, self.scores))
        chunks = [(part.stop - part.start, bucket(part.stop)) for part in parts]
        self.programs.prepare(state, chunks, decodes=most > 1)
        for part, (_, span) in zip(parts, chunks, strict=True):
            state = self.programs.prefill(state, tokens[:, part], mask[:, part], span=span)
        return jax.block_until_ready(self.programs.begin(state))

    @staticmethod
    def _parts(longest: int, chunk: int) -> list[slice]:
        """Chunks of the longest prompt; the last one is rounded up to a power of two."""
        return [slice(start, start + bucket(min(chunk, longest - start), 16)) for start in range(0, longest, chunk)]

    def _output(self, row: Row) -> Output:
        assert row.reason is not None
        text = None if row.stream is None else row.text
        return Output(text, row.ids, row.request.prompt, row.reason, row.logprobs, self.stats(row))

    def _logprobs(self, i: int, row: Row, fresh: list[int]) -> Logprobs | None:
        """Of row i's newest tokens: each one's own, then the likeliest ones'."""
        if row.logprobs is None:
            return None
        asked, new = row.request.params.logprobs, slice(len(row.ids), len(row.ids) + len(fresh))
        state = self.state
        chosen, ids, top = jax.device_get(
            (state.logprobs[i, new], state.top_ids[i, new, :asked], state.top_logprobs[i, new, :asked])
        )
        likeliest = [zip(a.tolist(), b.tolist(), strict=True) for a, b in zip(ids, top, strict=True)]
        return [
            {token: float(own)} | {other: p for other, p in pairs if other != token}
            for token, own, pairs in zip(fresh, chosen, likeliest, strict=True)
        ]


def _padded(lists: Sequence[Sequence[int]], shape: tuple[int, int], fill: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists of numbers as rows of `shape`, and a mask of where they are."""
    numbers, mask = np.full(shape, fill, np.int32), np.zeros(shape, bool)
    for i, row in enumerate(lists):
        numbers[i, : len(row)] = row
        mask[i, : len(row)] = True
    return numbers, mask


def _reason(ids: list[int], request: Request, finite: bool) -> FinishReason:
    if not finite:
        return FinishReason.ERROR
    if ids and ids[-1] in request.ends:
        return FinishReason.END
    return FinishReason.STOP if ids and ids[-1] in request.params.stop_token_ids else FinishReason.LENGTH


def _sampling(requests: list[Request], rows: int) -> Sampling:
    padded = [r.params for r in requests] + [requests[0].params] * (rows - len(requests))

    def column(name: str, dtype: type) -> jax.Array:
        most = np.iinfo(np.int32).max if dtype is np.int32 else np.inf
        return jnp.asarray(np.array([min(getattr(p, name), most) for p in padded], dtype))  # which JAX alone would compile

    floats = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
    seeds = jnp.asarray(np.array([[(p.seed or 0) >> 32, (p.seed or 0) & 0xFFFFFFFF] for p in padded], np.uint32))
    return Sampling(top_k=column("top_k", np.int32), seed=seeds, **{name: column(name, np.float32) for name in floats})
