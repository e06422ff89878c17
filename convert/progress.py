"""Progress on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

EVERY = 10  # seconds between lines


class Bar:
    """Called with the bytes done, the total, and a description of the position."""

    def __init__(self, title: str):
        self.title, self.total, self.bar = title, 0, None
        self.printed = time.monotonic()
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(title, total=None)
            self.bar.start()

    def __call__(self, done: int, total: int, where: str) -> None:
        self.total = total
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, description=f"{self.title} {where}")
        elif time.monotonic() - self.printed > EVERY:
            self.printed = time.monotonic()
            print(
                f"{self.title} {where}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", file=sys.stderr, flush=True
            )

    def close(self, seconds: float) -> None:
        if self.bar is not None:
            self.bar.stop()
        rate = self.total / 1e9 / max(seconds, 1e-3)
        print(
            f"{self.title}: {self.total / 1e9:.2f} GB in {seconds:.1f} s, {rate:.2f} GB/s",
            file=sys.stderr,
            flush=True,
        )
