"""rms_norm on a Hopper GPU, compared with XLA: one row, whose kernels take longer to start than to read it."""

import functools
from collections.abc import Iterator

import numpy as np
from ops import timing

from pallas_kernels import choice, testing
from pallas_kernels.rms_norm import CHECKS, reference, rms_norm

EPS = 1e-6


def check() -> list[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    return [_check(case) for case in testing.RMS_NORM]


def _check(case: testing.RmsNormCase) -> str:
    inputs = testing.rms_norm_inputs(case)
    title = f"rms_norm, {case.name}"
    if reason := choice.why_not("mosaic_gpu", CHECKS, inputs["x"], inputs["weight"]):
        return f"ok   {title}: refused, {reason}"
    wanted = np.stack(reference.rms_norm(**inputs, eps=EPS))
    off, own = (
        testing.error(np.stack(rms_norm(**inputs, eps=EPS, impl=impl)), wanted)
        for impl in ("mosaic_gpu", "xla")
    )
    return f"{'ok  ' if off <= 2 * own else 'FAIL'} {title}: {off:.5f}, fallback {own:.5f}"


def _row(width: int) -> dict:
    inputs = testing.rms_norm_inputs(testing.RmsNormCase("", 1, width))
    wanted = reference.rms_norm(**inputs, eps=EPS)[0]

    def timed(impl: str) -> timing.Work:
        call = functools.partial(rms_norm, eps=EPS, impl=impl)
        rows = [(inputs["x"], inputs["weight"], inputs["y"])]
        return timing.Work(call, rows, lambda out: testing.error(out, wanted))

    (us, error), beside = timed("mosaic_gpu").measure(), timed("xla").program().microseconds()
    return {"op": "rms_norm", "width": width, "us": us, "XLA": beside, "error": error}


def rows(peers: dict | None = None) -> Iterator[dict]:
    """V2-Lite's and V3's widths; there are no `peers` of this op."""
    yield from map(_row, (2048, 7168))
