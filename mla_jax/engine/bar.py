"""A progress bar for many prompts."""

import shutil
import sys
import warnings

from mla_jax.decode.programs import Waits
from mla_jax.engine.core.stats import EngineStats

with warnings.catch_warnings(action="ignore"):  # of a notebook that has no widgets
    from tqdm.auto import tqdm

MANY = 16  # prompts


class Bar:
    """Counts finished prompts on stderr, with tokens per second and the number of running requests, or that it compiles."""

    def __init__(
        self,
        total: int | None,
        stats: EngineStats,
        waits: Waits,
        shown: bool | None = None,
        done: int = 0,
    ):
        """Of `total` prompts, None if nobody knows, `done` are from an earlier run. `waits` are those for the compiler.

        `shown` None is where stderr is a terminal and there are many prompts."""
        shown = sys.stderr.isatty() and (total is None or total >= MANY) if shown is None else shown
        self._stats, self._waits, self._before = stats, waits, stats.generated
        columns, lines = shutil.get_terminal_size()
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=" prompts",
            file=sys.stderr,
            disable=not shown,
            ncols=columns or 80,  # on a terminal that does not know its size nothing would be shown
            nrows=lines or 24,
            smoothing=0,
        )

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    @property
    def shown(self) -> bool:
        return not self._bar.disable

    def update(self, done: int) -> None:
        """`done` prompts of this run are finished."""
        if not self.shown:
            return
        self._bar.set_postfix_str(self._doing(), refresh=False)
        self._bar.update(self._bar.initial + done - self._bar.n)
        self._bar.refresh()

    def _doing(self) -> str:
        if waited := self._waits.seconds:
            return f"compiling, {waited:.0f} s"
        seconds = self._bar.format_dict["elapsed"]
        rate = (self._stats.generated - self._before) / seconds if seconds else 0.0
        return f"{rate:,.0f} tokens/s, {self._stats.running} running"

    def say(self, text: str) -> None:
        """Prints lines above the bar."""
        self._bar.write(text, file=sys.stderr)
