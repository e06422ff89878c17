"""An untrusted tokenizer, which works in a process of its own with limits of time, memory and output.

Python cannot interrupt the tokenizers library, and the library ends the process if there is no memory left. Here it ends its own
process, and the next text starts a new one."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mla_jax.base.errors import BadFile, BadRequest, MlaJaxError, printable

MEMORY = 4 << 30  # bytes of addresses
MAX_OUTPUT = 128 << 20  # bytes of one answer
START_SECONDS = 60  # to load the file, on a machine that is busy
SECONDS = 10  # for any text, and one more for every BYTES_A_SECOND of it
BYTES_A_SECOND = 100_000
GUARD_VARIABLES = ("LD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment


class Guard:
    """The tokenizer.json `content` of the file `name`, which sees the added tokens `controls` as text."""

    def __init__(self, content: str, name: str, controls: list[str]):
        """Raises BadFile if it cannot be loaded within the limits."""
        found = importlib.util.find_spec("tokenizers")
        assert found is not None
        assert found.origin is not None
        path = [str(Path(found.origin).parent.parent)]
        limits = {"memory": MEMORY, "output": MAX_OUTPUT}
        start = {"path": path, "tokenizer": content, "controls": controls, "limits": limits}
        self.name, self._start = name, json.dumps(start).encode() + b"\n"
        self._lock, self._process, self._owner = threading.Lock(), None, 0
        with self._lock:
            self.begins: list[int] = self._open()["begins"]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; raises BadRequest if that fails or goes beyond the limits."""
        error = BadRequest("the tokenizer cannot encode the text")
        return self._ask({"encode": text}, len(text), error)["ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; raises BadFile if that fails or goes beyond the limits."""
        return self._ask({"decode": ids}, len(ids), BadFile(f"{self.name} cannot decode its tokens"))["text"]

    def _ask(self, request: dict, size: int, error: MlaJaxError) -> dict:
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # a fork shares the pipes with its parent
                self._open()
            return self._exchange(
                json.dumps(request).encode() + b"\n", SECONDS + size / BYTES_A_SECOND, error
            )

    def _open(self) -> dict:
        try:
            self._process, self._owner = _started(), os.getpid()
        except OSError as e:
            raise BadFile(
                f"the process that works with {self.name} cannot be started", printable(str(e), 300)
            ) from e
        weakref.finalize(self, _end, self._process, self._owner)
        try:
            return self._exchange(
                self._start, START_SECONDS, BadFile(f"{self.name} is refused by the tokenizers library")
            )
        except MlaJaxError:
            self._close()
            raise

    def _exchange(self, line: bytes, seconds: float, error: MlaJaxError) -> dict:
        assert self._process is not None
        try:
            with _clock(self._process, seconds) as expired:
                answer = _answer(self._process, line)
        except BaseException:  # Ctrl-C between a question and its answer
            self._close()
            raise
        if expired or not answer.endswith(b"\n"):
            self._close()
            limit = f"{seconds:.0f} seconds" if expired else f"{MEMORY >> 30} GiB of memory, or it fails"
            raise type(error)(*error.args, f"it takes more than {limit}")
        found = json.loads(answer)
        if "cause" in found:
            raise type(error)(*error.args, printable(found["cause"], 300))
        return found

    def _close(self):
        if self._process is not None:
            _end(self._process, self._owner)
        self._process = None


def _started() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("untrusted.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the library prints its panics
        env={name: os.environ[name] for name in GUARD_VARIABLES if name in os.environ},
        start_new_session=True,  # Ctrl-C is for us alone
    )


def _answer(process: subprocess.Popen, line: bytes) -> bytes:
    """The line that answers `line`, or its beginning if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline(MAX_OUTPUT + 1)
    return b""


@contextmanager
def _clock(process: subprocess.Popen, seconds: float) -> Iterator[list]:
    """Kills `process` after some time; the list it yields is then not empty."""
    expired = []
    timer = threading.Timer(seconds, lambda: (expired.append(True), process.kill()))
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


def _end(process: subprocess.Popen, owner: int):
    if owner != os.getpid():  # in a fork, whose parent goes on
        return
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(OSError):  # what was not written yet
            pipe.close()
