"""What a run prints: text to stdout, notes and statistics to stderr; or one JSON object an event to stdout."""

import json
import sys
from collections.abc import Iterable

from mla_jax.engine.request import Chunk
from mla_jax.engine.stats import Stats
from mla_jax.text.stream import printable_text


class Console:
    """`as_json` prints events for programs, `quiet` leaves out everything but the text."""

    def __init__(self, as_json: bool, quiet: bool):
        self.as_json, self.quiet, self.line = as_json, quiet, ""
        self.terminal = sys.stdout.isatty()

    def chunk(self, chunk: Chunk, has_text: bool) -> None:
        """New text; token ids where the model has no tokenizer. On a terminal, control characters are made visible."""
        if self.as_json:
            logprobs = {} if chunk.logprobs is None else {"logprobs": chunk.logprobs}
            return self.event("token", text=chunk.text if has_text else None, token_ids=chunk.token_ids, **logprobs)
        text = chunk.text if has_text else "".join(f"{token} " for token in chunk.token_ids)
        return self._write(printable_text(text) if self.terminal else text)

    def done(self, stats: Stats, reason: str) -> None:
        """The end of an answer, with its figures."""
        usage = {"prompt_tokens": stats.prompt_tokens, "generated_tokens": stats.generated_tokens}
        if self.as_json:
            figures = {
                "seed": stats.seed,
                "first_token_seconds": stats.first_token_seconds,
                "decode_seconds": stats.decode_seconds,
            }
            figures |= {"compile_seconds": stats.compile_seconds, "tokens_per_second": stats.tokens_per_second}
            figures |= {"bandwidth_share": stats.bandwidth_share, "peak_bytes": stats.peak_bytes}
            return self.event("done", finish_reason=reason, usage=usage, stats=figures)
        self._write("\n")
        return self.note(f"\n {summary(stats, reason)}")

    def note(self, *lines: str) -> None:
        """Something for the reader, not part of the answer."""
        if not self.quiet:
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    def loading(self, done: int, total: int) -> None:
        """How far the weights are, if they take long: one line of a terminal, gone in the end."""
        line = "\r\x1b[K" if done == total else f"\rloading {done / 2**30:.1f} of {total / 2**30:.1f} GiB"
        if line != self.line and total >= 2**30 and sys.stderr.isatty() and not self.quiet:
            self.line = line
            print(line, end="", file=sys.stderr, flush=True)

    def say(self, lines: Iterable[str]) -> None:
        """An answer that is no model's: a plan, a diagnosis."""
        for line in lines:
            self._write(line + "\n")

    def event(self, name: str, **fields) -> None:
        self._write(json.dumps({"event": name, **fields}, ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()


REASONS = {"end": "end of text", "length": "length", "stop": "stop text or token", "error": "logits not finite"}


def summary(stats: Stats, reason: str) -> str:
    """The figures of an answer in one line."""
    share = f" ({100 * stats.bandwidth_share:.0f}% of bandwidth)" if stats.bandwidth_share is not None else ""
    parts = [
        f"stop: {REASONS.get(reason, reason)}",
        f"{stats.prompt_tokens}+{stats.generated_tokens} tokens",
        f"first {stats.first_token_seconds:.2f} s",
        f"{stats.tokens_per_second:.1f} tok/s{share}",
        f"peak {(stats.peak_bytes or 0) / 2**30:.1f} GiB",
        f"compile {stats.compile_seconds:.1f} s",
        f"seed {stats.seed}",
    ]
    return " · ".join(parts)
