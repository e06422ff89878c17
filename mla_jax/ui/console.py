"""Output of a run: text to stdout, notes and statistics to stderr; or one JSON object per event to stdout."""

import dataclasses
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import jax

from mla_jax.base.options import SamplingParams
from mla_jax.engine.core.request import Chunk, Logprobs
from mla_jax.engine.core.stats import Stats
from mla_jax.engine.llm import LLM
from mla_jax.text.stream import printable_text
from mla_jax.text.tokenizer import Tokenizer
from mla_jax.ui.interrupt import noticed_interrupts

COMPILED = "/jax/core/compile/backend_compile_duration"  # the last event of a program
COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, compiling; each is reported when it ends
SAVE, RESTORE, ERASE = "\x1b7", "\x1b8", "\x1b[K"


class Console:
    """`as_json` prints events for programs, `quiet` prints nothing but the text."""

    def __init__(self, as_json: bool, quiet: bool):
        self.as_json, self.quiet = as_json, quiet
        self.terminal = sys.stdout.isatty()
        self.status = Status(enabled=not quiet and not as_json and _controllable(sys.stderr))

    def chunk(self, chunk: Chunk, has_text: bool) -> None:
        """New text; token ids if the model has no tokenizer. On a terminal, control characters are made visible."""
        if self.as_json:
            asked = {"logprobs": chunk.logprobs, "prompt_logprobs": chunk.prompt_logprobs}
            asked = {name: value for name, value in asked.items() if value is not None}
            return self.event(
                "token", text=chunk.text if has_text else None, token_ids=chunk.token_ids, **asked
            )
        text = chunk.text if has_text else "".join(f"{token} " for token in chunk.token_ids)
        return self._write(printable_text(text) if self.terminal else text)

    def done(self, stats: Stats | None, reason: str) -> None:
        """The end of an answer, with its figures; without any if it ended before the first token."""
        if self.as_json:
            return self.event("done", finish_reason=reason, **(_figures(stats) if stats else {}))
        self._write("\n")
        return self.note(f"\n {summary(stats, reason)}" if stats else f"\n stop: {reason}")

    def logprobs(self, logprobs: Logprobs, tokenizer: Tokenizer | None, name: str = "logprobs") -> None:
        """The log-probability of each token and of its alternatives, a line per token; nothing if there are none."""
        if logprobs and not self.as_json:
            self.note(f"\n {name}:", *(_logprob_line(candidates, tokenizer) for candidates in logprobs))

    def note(self, *lines: str) -> None:
        """Something for the reader, not part of the answer."""
        if lines and not self.quiet:
            with self.status.hidden():
                print(*lines, sep="\n", file=sys.stderr, flush=True)
            self.status.column = 0

    def error(self, error: object) -> None:
        with self.status.hidden():
            print(f"error: {error}", file=sys.stderr, flush=True)

    def loading(self, done: int, total: int) -> None:
        """How far the weights are, if they take long."""
        if done == total:
            self.status.clear()
        elif total >= 2**30:
            self.status.show(f"loading {done / 2**30:.1f} of {total / 2**30:.1f} GiB")

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Shows "compiling" while JAX does, from the first trace of a program until it is compiled."""

        def hear(event: str, *_, **__):
            if event == COMPILED:
                self.status.clear()
            elif event.startswith(COMPILE_EVENTS):
                self.status.show("compiling ...")

        if not self.status.enabled:
            yield
            return
        jax.monitoring.register_event_duration_secs_listener(hear)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(hear)
            self.status.clear()

    def say(self, lines: Iterable[str]) -> None:
        """An answer that is no model's: a plan, a diagnosis."""
        for line in lines:
            self._write(line + "\n")

    def event(self, name: str, **fields) -> None:
        self._write(json.dumps({"event": name, **fields}, ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        with self.status.hidden():
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        if self.terminal:
            self.status.moved(data)


class Status:
    """A few words at the cursor of a terminal that disappear again. JAX compiles in threads, so a lock guards them."""

    def __init__(self, enabled: bool):
        self.enabled, self.words, self.column, self.lock = enabled, "", 0, threading.Lock()

    def show(self, words: str) -> None:
        """Shows `words` instead of those before; not where they would wrap, for then the cursor is not found again."""
        with self.lock:
            fits = self.column + len(words) < shutil.get_terminal_size().columns
            if self.enabled and fits and words != self.words:
                self._print((RESTORE + ERASE if self.words else SAVE) + words)
                self.words = words

    def clear(self) -> None:
        with self.hidden():
            pass

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Removes the words, and keeps other threads from showing new ones meanwhile."""
        with self.lock:
            if self.words:
                self._print(RESTORE + ERASE)
                self.words = ""
            yield

    def moved(self, data: bytes) -> None:
        """Notes the text in front of the cursor. A character has at least as many bytes as columns."""
        line = data.rpartition(b"\n")[2]
        self.column = len(line) if b"\n" in data else self.column + len(line)

    @staticmethod
    def _print(text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)


def answer(llm: LLM, prompt: str | list[int], sampling: SamplingParams, console: Console) -> tuple[str, str]:
    """Prints one answer while it comes, and its figures. Returns its text, and its finish reason or "interrupted" by Ctrl-C."""
    pieces: list[str] = []
    prompt_logprobs: Logprobs = []
    logprobs: Logprobs = []
    reason = "interrupted"
    try:
        with console.compiling(), noticed_interrupts() as interrupted:
            for chunk in llm.stream(prompt, sampling):
                console.chunk(chunk, llm.tokenizer is not None)
                pieces.append(chunk.text)
                prompt_logprobs += [p for p in chunk.prompt_logprobs or [] if p is not None]
                logprobs += chunk.logprobs or []
                reason = chunk.finish_reason or reason
                if interrupted():
                    break
    except KeyboardInterrupt:
        reason = "interrupted"
    console.logprobs(prompt_logprobs, llm.tokenizer, "prompt logprobs")
    console.logprobs(logprobs, llm.tokenizer)
    console.done(llm.last_stats, reason)
    if reason == "error":
        console.error("the model's logits were not finite, the text ends before them")
    return "".join(pieces), reason


def answers(llm: LLM, prompt: str | list[int], sampling: SamplingParams, console: Console) -> str:
    """Prints `n` answers one after the other, with seeds that follow each other. Returns the first finish reason that is bad."""
    reason = ""
    for i in range(sampling.n):
        seed = None if sampling.seed is None else (sampling.seed + i) % 2**64
        _, reason = answer(llm, prompt, dataclasses.replace(sampling, n=1, seed=seed), console)
        if reason in ("error", "interrupted"):
            break
    return reason


REASONS = {
    "end": "end of text",
    "length": "length",
    "stop": "stop text or token",
    "error": "logits not finite",
}


def summary(stats: Stats, reason: str) -> str:
    """The figures of an answer in one line. A figure that is unknown, or too small to mean anything, is left out."""
    share = stats.bandwidth_share or 0.0
    parts = [
        f"stop: {REASONS.get(reason, reason)}",
        f"{stats.prompt_tokens}+{stats.generated_tokens} tokens",
        f"first {stats.first_token_seconds:.2f} s",
        f"{stats.tokens_per_second:.1f} tok/s"
        + (f" ({100 * share:.0f}% of bandwidth)" if share >= 0.01 else ""),
        *([f"peak {_size(stats.peak_bytes)}"] if stats.peak_bytes else []),
        f"compile {stats.compile_seconds:.1f} s",
        f"seed {stats.seed}",
    ]
    return " · ".join(parts)


STATISTICS = (
    "seed first_token_seconds decode_seconds compile_seconds tokens_per_second bandwidth_share peak_bytes"
)


def _figures(stats: Stats) -> dict[str, dict]:
    """The figures of an answer as fields of an event."""
    return {
        "usage": {"prompt_tokens": stats.prompt_tokens, "generated_tokens": stats.generated_tokens},
        "stats": {name: getattr(stats, name) for name in STATISTICS.split()},
    }


def _logprob_line(candidates: dict[int, float], tokenizer: Tokenizer | None) -> str:
    """`-0.105 " def"   -2.5 " class"`: the chosen token first, then the alternatives."""
    shown = [f"{logprob:8.3f} {_token_text(token, tokenizer)}" for token, logprob in candidates.items()]
    return "".join(f"{entry:<24}" for entry in shown).rstrip()


def _token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A token as quoted text; its id if it has no text of its own."""
    text = "" if tokenizer is None else printable_text(tokenizer.decode([token]))
    return json.dumps(text, ensure_ascii=False) if text else str(token)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _controllable(stream) -> bool:
    """Whether `stream` is a terminal that moves its cursor when told to."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
