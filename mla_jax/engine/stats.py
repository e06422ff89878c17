"""Times of a request, with compiling told apart from running."""

import resource
import time
from dataclasses import dataclass

from mla_jax.base.devices import Devices
from mla_jax.decode.programs import Waits


@dataclass(frozen=True)
class Stats:
    """Seconds and tokens of one request; requests of one batch share its times."""

    prompt_tokens: int
    generated_tokens: int
    first_token_seconds: float  # without compiling
    decode_seconds: float  # after the first token, without compiling
    compile_seconds: float  # spent waiting for programs to be traced, compiled, or read from where they are stored
    seed: int
    bandwidth_share: float | None = None  # of the device's, by the least bytes a step must read; None where it is not known
    peak_bytes: int | None = None  # of device memory; of the process on a CPU

    @property
    def tokens_per_second(self) -> float:
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 and self.generated_tokens > 1 else 0.0


def peak_bytes() -> int | None:
    """The most memory used so far: the device's, or on a CPU the process's. None where the device does not say."""
    devices = Devices.default()
    if devices.platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return devices.peak_bytes()


class Stopwatch:
    """Wall time since the last look, and how much of it was waiting for programs to be compiled."""

    def __init__(self, waits: Waits):
        self.waits, self.at = waits, time.perf_counter()

    def look(self) -> tuple[float, float]:
        """(running, compiling) seconds since the last look."""
        before, self.at = self.at, time.perf_counter()
        compiling = sum(end - max(start, before) for start, end in self.waits.spans if end > before)
        return max(self.at - before - compiling, 0.0), compiling
