"""Helpers of all benchmarks: the device, timing, kernels in a trace, a table and a JSON file."""

import argparse
import datetime
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


class Traced(NamedTuple):
    """The wall time of something, and that of each kernel by its name, of one device on average; in seconds."""

    wall: float
    kernels: Counter[str]


def traced(run: Callable[[], object]) -> Traced:
    """Runs it once, under JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            wall = time.perf_counter() - start
        (file,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    streams = {
        (e["pid"], e.get("tid"))
        for e in events
        if e.get("ph") == "M" and "Stream" in str(e.get("args", {}).get("name"))
    }
    spent: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            spent[event["name"]] += event["dur"] / 1e6
    devices = len({process for process, _ in streams}) or 1
    return Traced(wall, Counter({name: seconds / devices for name, seconds in spent.items()}))


def show(rows: list[dict], out: Path | None, **about) -> None:
    """Prints `rows` as a Markdown table, and writes them to `out` with the machine, the date and `about`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |\n|" + "--:|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    if out is not None:
        machine = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
        }
        out.write_text(json.dumps({**machine, **about, "rows": rows}, indent=1) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
