"""A JSONL file of prompts, answered line by line into another one. A second run goes on where the first was stopped.

Answers are written in the order of the prompts. Each begins with the prompt's id and a digest of all that decides the answer: by
these an earlier run's answers are recognised without further records, and never mistaken for answers to something else."""

import codecs
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

from mla_jax.base.errors import BadRequest, MlaJaxError, printable, shown
from mla_jax.base.files import explained, json_value, sampled
from mla_jax.base.names import nearest
from mla_jax.base.options import SamplingParams
from mla_jax.base.request_fields import as_whole, read_fields
from mla_jax.engine.bar import Bar
from mla_jax.engine.core.request import FinishReason, Output, Request
from mla_jax.engine.inputs import InputProcessor
from mla_jax.engine.llm import LLM
from mla_jax.engine.opening.opened import Opened
from mla_jax.engine.text import files_of
from mla_jax.ui.console import Console
from mla_jax.ui.interrupt import noticed_interrupts

MAX_LINE = 64 << 20  # bytes
MAX_ID = 1000  # characters
MAX_BEGINNING = 8 * MAX_ID  # bytes of an answer's id and digest
SKIPPED = 1 << 20  # bytes that are read at a time of a line that is skipped
# Threads that make requests of lines: for each conversation a process renders a template
TEXT_THREADS = min(8, os.cpu_count() or 1)
ENVELOPE = ("custom_id", "method", "url", "body")  # of a line for OpenAI's batches
URLS = ("/v1/chat/completions", "/v1/completions")
ALL_DONE, NOT_FINITE, BAD_LINES, CUT_SHORT = 0, 1, 2, 130
Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Line:
    """A line of the prompts: its requests, or the reason why it is refused."""

    number: int
    beginning: bytes  # of its answer: the id and the digest
    asked: dict[str, Any] = field(default_factory=dict)
    requests: tuple[Request, ...] = ()
    error: MlaJaxError | None = None

    @classmethod
    def of(cls, number: int, data: bytes, settings: bytes) -> "Line":
        """Reads the JSON of a line; `settings` are those that all lines share."""
        digest = hashlib.sha256(settings + data).hexdigest()[:16]
        asked, error, key, name = {}, None, "id", number
        try:
            asked = _asked(data)
            key = "custom_id" if "custom_id" in asked else "id"
            name = _id(asked.pop(key, None), number)
            asked = _body(asked)
        except BadRequest as e:
            error = e
        beginning = json.dumps({key: name, "digest": digest}, ensure_ascii=False).encode()[:-1]
        return cls(number, beginning, asked, error=error)

    def checked(self, inputs: InputProcessor, sampling: SamplingParams) -> "Line":
        """The same with its requests, or with the reason why they cannot be served."""
        if self.error is not None:
            return self
        try:
            fields = read_fields(self.asked, sampling)
            prompt = fields.prompt
            if fields.messages is not None:
                prompt = inputs.encode_chat(fields.messages, **fields.chat)
            request = inputs.request(prompt, fields.params)
            return dataclasses.replace(self, requests=tuple(request.fork(i) for i in range(fields.params.n)))
        except MlaJaxError as error:
            return dataclasses.replace(self, error=error)

    def answer(self, outputs: Sequence[Output]) -> bytes:
        """The line that answers this one."""
        found = {"error": _said(self.error)} if self.error is not None else _figures(outputs)
        return self.beginning + b", " + json.dumps(found, ensure_ascii=False).encode()[1:] + b"\n"


def answer_file(
    opened: Opened, prompts: str, out: str | os.PathLike | None, sampling: SamplingParams, console: Console
) -> int:
    """Answers the lines of `prompts` into `out`, or to stdout, that are not answered yet. Returns the exit code."""
    with _input(prompts) as file, Answers(None if out is None else str(out)) as answers:
        lines = answers.skip(batch_lines(file, _settings(opened, sampling)), prompts)
        first = next(lines, None)
        if first is None:
            console.note(f"nothing to do: {_lines(answers.count)} answered")
            return BAD_LINES if answers.refused else ALL_DONE
        llm = LLM(opened, progress=console.loading)
        console.note(*(f"note: {note}" for note in llm.notes))
        total = None if prompts == "-" else _count(prompts)
        bar = llm.bar(total, False if console.quiet else None, answers.count)
        return Run(llm, sampling, answers, console, bar).answer(itertools.chain([first], lines))


class Run:
    """One run over the lines that are left."""

    def __init__(self, llm: LLM, sampling: SamplingParams, answers: "Answers", console: Console, bar: Bar):
        self.llm = llm
        self.sampling = sampling
        self.answers = answers
        self.console = console
        self.bar = bar
        self.served: deque[Line] = deque()  # whose answers are awaited
        self.read = self.generated = self.not_finite = 0
        self.start = time.perf_counter()

    def answer(self, lines: Iterator[Line]) -> int:
        """Answers them all, or as many as come before Ctrl-C."""
        threads = ThreadPoolExecutor(TEXT_THREADS)
        try:
            with (
                self.bar,
                noticed_interrupts() as interrupted,
                contextlib.closing(self._outputs(lines, threads)) as found,
            ):
                for outputs in found:
                    if interrupted():
                        raise KeyboardInterrupt
                    self._write(self.served.popleft(), outputs)
        except KeyboardInterrupt:
            self._say("interrupted: ")
            return CUT_SHORT
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        self._say("")
        return BAD_LINES if self.answers.refused else NOT_FINITE if self.not_finite else ALL_DONE

    def _outputs(self, lines: Iterator[Line], threads: ThreadPoolExecutor):
        checked = ahead(lambda line: line.checked(self.llm.inputs, self.sampling), lines, threads)
        return self.llm.serve(self._taken(checked), self.bar)

    def _taken(self, lines: Iterable[Line]) -> Iterator[tuple[Request, ...]]:
        for line in lines:
            self.served.append(line)
            if line.error is not None:
                self.bar.say(f"error: line {line.number:,}: {line.error}")
            yield line.requests

    def _write(self, line: Line, outputs: Sequence[Output]) -> None:
        self.answers.write(line.answer(outputs), refused=line.error is not None)
        self.read += len(outputs[0].prompt_token_ids) if outputs else 0
        self.generated += sum(len(output.token_ids) for output in outputs)
        self.not_finite += any(output.finish_reason == FinishReason.ERROR for output in outputs)

    def _say(self, how: str) -> None:
        """Tells how it ended, the figures, and how to go on."""
        refused = f", {self.answers.refused:,} of them with an error" if self.answers.refused else ""
        seconds = time.perf_counter() - self.start
        self.console.note(
            f" {how}{_lines(self.answers.count)} answered{refused} · {self.read:,}+{self.generated:,} tokens · {seconds:.1f} s",
            *([" the same command goes on behind them"] if how and self.answers.path else []),
        )


class Answers:
    """Where answers go: a file that one process at a time appends to, or stdout."""

    def __init__(self, path: str | None):
        """Opens the file, which stays as it is; raises BadRequest if it cannot be."""
        self.path, self.count, self.refused = path, 0, 0
        with explained(str(path), "written"):
            self._file = sys.stdout.buffer if path is None else open(path, "a+b")  # noqa: SIM115 closed by __exit__
        if path is not None:
            self._lock()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_) -> None:
        if self.path is not None:
            self._file.close()

    def skip(self, lines: Iterator[Line], prompts: str) -> Iterator[Line]:
        """The lines that have no answer yet; a last answer that was cut short is removed.

        Raises BadRequest, and changes nothing, if the file holds anything but the answers to the first lines."""
        if self.path is None:
            return lines
        self._file.seek(0)
        end = 0
        while found := self._file.readline(MAX_BEGINNING):
            line = next(lines, None)
            if line is None or not _begins(found, line.beginning, self.count > 0):
                raise self._foreign(line, prompts)
            if not found.endswith(b"\n") and not _skip_line(self._file):
                self._file.truncate(end)
                return itertools.chain([line], lines)
            end = self._file.tell()
            self.count += 1
            self.refused += found.startswith(line.beginning + b', "error"')
        return lines

    def write(self, answer: bytes, refused: bool) -> None:
        """Adds a line, which survives the end of this process from now on."""
        # The reader of a pipe may go away: that is no fault of a file
        with contextlib.nullcontext() if self.path is None else explained(self.path, "written"):
            self._file.write(answer)
            self._file.flush()
        self.count += 1
        self.refused += refused

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BadRequest(f"{printable(str(self.path))} is being written by another process") from None
        except OSError:
            pass  # a file system without locks

    def _foreign(self, line: Line | None, prompts: str) -> BadRequest:
        where = printable(str(self.path))
        number = f"{self.count + 1:,}"
        if line is None:
            found = f"it has more lines than the {self.count:,} of {printable(prompts)}"
        else:
            asked = f"line {line.number:,} of {printable(prompts)} by this model with these settings"
            found = f"its line {number} answers something else than {asked}"
        return BadRequest(
            f"{where} is not from an earlier run of this command",
            found,
            "give another --out, or remove that file",
        )


def batch_lines(file: BinaryIO, settings: bytes = b"") -> Iterator[Line]:
    """The lines of a file, read."""
    return (Line.of(number, data, settings) for number, data in numbered(file))


def numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank with their numbers, from 1; of one that is too long, a little more than the limit."""
    for number in itertools.count(1):
        data = file.readline(MAX_LINE + 1)
        if not data:
            return
        if len(data) > MAX_LINE and not data.endswith(b"\n"):
            _skip_line(file)
        data = (data.removeprefix(codecs.BOM_UTF8) if number == 1 else data).strip()
        if data:
            yield number, data


def ahead(make: Callable[[Item], Made], items: Iterable[Item], threads: ThreadPoolExecutor) -> Iterator[Made]:
    """`make` of each item, in order; threads work at the next few meanwhile."""
    waiting: deque[Future[Made]] = deque()
    for item in items:
        waiting.append(threads.submit(make, item))
        if len(waiting) > 2 * TEXT_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _asked(data: bytes) -> dict[str, Any]:
    """The object in a line; a text alone is a prompt. Raises BadRequest."""
    if len(data) > MAX_LINE:
        raise BadRequest("the line is too long", f"the limit is {MAX_LINE:,} bytes")
    value = json_value(data, "the line", BadRequest)
    asked = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(asked, dict):
        raise BadRequest(
            f"the line is {shown(value)}", 'expected an object with "prompt" or "messages", or a text'
        )
    return asked


def _body(asked: dict[str, Any]) -> dict[str, Any]:
    """A line's request, which OpenAI's batches have in an envelope; raises BadRequest."""
    if "body" not in asked:
        return asked
    unknown = next((key for key in asked if key not in ENVELOPE), None)
    if unknown is not None:
        raise BadRequest(f"unknown key {printable(unknown)} beside body", nearest(unknown, ENVELOPE))
    method, url, body = asked.get("method") or "POST", asked.get("url") or URLS[0], asked["body"]
    if method != "POST" or url not in URLS:
        found = f"the line asks for {shown(method)} {shown(url)}"
        raise BadRequest(found, f"expected POST {' or '.join(URLS)}")
    if not isinstance(body, dict):
        raise BadRequest(f"the body is {shown(body)}", "expected an object")
    return body


def _id(value: Any, number: int) -> str | int:
    """A line's own id, or its number."""
    if value is None:
        return number
    value = as_whole(value)
    if (isinstance(value, str) and len(value) <= MAX_ID) or type(value) is int:
        return value
    raise BadRequest(
        f"the id is {shown(value)}", f"expected a whole number, or a text of at most {MAX_ID:,} characters"
    )


def _figures(outputs: Sequence[Output]) -> dict[str, Any]:
    """The fields of an answer; several, for `n`, are in a list."""
    prompt = len(outputs[0].prompt_token_ids)
    generated = sum(len(output.token_ids) for output in outputs)
    scores = outputs[0].prompt_logprobs
    texts = [_text(output) for output in outputs]
    return {
        **(texts[0] if len(texts) == 1 else {"answers": texts}),
        "usage": {"prompt_tokens": prompt, "generated_tokens": generated},
        **({} if scores is None else {"prompt_logprobs": scores}),
    }


def _text(output: Output) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.stats.seed,
        **({} if output.logprobs is None else {"logprobs": output.logprobs}),
    }


def _settings(opened: Opened, sampling: SamplingParams) -> bytes:
    """A digest of all that decides the answers besides the lines: the model's files, options, sampling parameters."""
    source, text = opened.checkpoint.source, opened.text
    model = [opened.config, sampled(source.files), sorted(files_of(source).items())]
    settings = [text.defaults, text.end_ids, opened.options.altering(), vars(sampling)]
    return hashlib.sha256(repr([*model, *settings]).encode()).digest()


@contextlib.contextmanager
def _input(path: str) -> Iterator[BinaryIO]:
    with explained(path, "read"):
        file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115 closed below
    try:
        yield file
    finally:
        if path != "-":
            file.close()


def _count(path: str) -> int | None:
    """The lines of a file that are not blank; None if it can be read only once."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return sum(1 for _ in numbered(file))


def _skip_line(file: BinaryIO) -> bool:
    """Reads on to the end of a line; whether it has one."""
    return any(piece.endswith(b"\n") for piece in iter(lambda: file.readline(SKIPPED), b""))


def _begins(found: bytes, beginning: bytes, behind_others: bool) -> bool:
    """Whether a line has this beginning. One that was cut before its end must be behind others: alone it may be anything."""
    return found.startswith(beginning) or (behind_others and beginning.startswith(found))


def _said(error: MlaJaxError | None) -> str:
    finding, *details = getattr(error, "args", ("",))
    return f"{finding}: {'; '.join(details)}" if details else finding


def _lines(count: int) -> str:
    return f"{count:,} line{'' if count == 1 else 's'}"
