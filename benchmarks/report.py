"""Helpers of all benchmarks: the device, timing, a table and a JSON file."""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from mla_jax.base import roofline

# cpu_experts.py of this folder would hide the package of that name: search this folder last
if sys.path[0] == str(Path(__file__).parent):
    sys.path.append(sys.path.pop(0))


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="write the rows as JSON to this file")
    return parser


def device() -> roofline.Device:
    first = jax.devices()[0]
    return roofline.device(first.device_kind, first.platform)


def best_seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """The best wall time of `run` until its result is ready, in seconds, after one warm-up run."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def show(rows: list[dict], out: Path | None, **about) -> None:
    """Prints `rows` as a Markdown table, and writes them to `out` with the machine, the date and `about`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |\n|" + "--:|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    if out is not None:
        machine = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
        out.write_text(json.dumps({**machine, **about, "rows": rows}, indent=1) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
