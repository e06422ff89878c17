"""The cost of a call: seconds of the processor, and bytes of memory beyond the process's before. On Linux only."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
LONG = 10  # seconds of the processor: what grows with the square of a header takes far longer, a busy machine far less


class Cost(NamedTuple):
    seconds: float
    memory: int


def cost_of(act: Callable[[], object]) -> Cost:
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark of memory is the present one
    held, start = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE, time.process_time()
    act()
    seconds = time.process_time() - start
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return Cost(seconds, int(peak.split()[1]) * 1024 - held)
