"""Processes on a terminal of their own."""

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
IN_FOREGROUND = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C on this terminal becomes a signal
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """`python -m mla_jax.generate` with stdin, stdout and stderr on a terminal."""

    def __init__(self, *arguments: object, **environment: str):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-c", IN_FOREGROUND, "-m", "mla_jax.generate", *map(str, arguments)]
        settings = {**os.environ, "TERM": "xterm", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **environment}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=settings, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, words: str, seconds: float = 300) -> str:
        """The output up to `words`, which then counts as read."""
        end = time.monotonic() + seconds
        while words not in self.text:
            ready, _, _ = select.select([self.master], [], [], max(end - time.monotonic(), 0))
            assert ready, f"{words!r} did not come after: {self.text[-500:]}"
            self.text += os.read(self.master, 1 << 16).decode(errors="replace")
            if "\x1b[6n" in self.text:  # where is the cursor?
                self.type("\x1b[1;1R")
                self.text = self.text.replace("\x1b[6n", "")
        before, _, self.text = self.text.partition(words)
        return before

    def to_the_end(self) -> str:
        """The output until the process ends."""
        with contextlib.suppress(OSError):  # the other side of the terminal is closed
            self.wait_for("\0 never \0")
        return self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
