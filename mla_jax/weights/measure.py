"""What this machine reaches, its CPU with experts and its GPU or TPU: measured once, in seconds, and kept in the user's cache."""

import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax.base import roofline
from mla_jax.base.files import DEVICE_RATES, HOST_RATES, cache_folder, write_json
from mla_jax.base.roofline import SOME, Device, Host
from mla_jax.weights.limits import cores, free_memory, last_cache

MODEL, WIDTH, EXPERTS, CHOSEN = 2048, 1536, 24, 6
CACHES, LARGEST = 4, 2 << 30  # times the last caches' size experts that take turns exceed, to come from memory; but so many bytes
FEW, MORE = 2, 12  # experts of a token: what a call takes beside their bytes is in both alike
MANY = 256  # tokens that choose the same MORE, as SOME do: what arithmetic adds to the bytes' time, and what not, is a line
ENOUGH = 1.0  # seconds, after which slow cores repeat no more
PAUSE = 2e-4  # seconds between two calls, after which the library's threads sleep; a layer of a device takes about half of it
REPEATS = 7
PASSES = 2  # over all that is measured, of whose times the shorter counts: others may use the CPU during one
MOST = 1e18  # bytes or FLOPs a second
WAY = 2  # of measuring: what another one found is not taken


def host(precision: str = "bf16", down: str | None = None, cache: Path | None = None) -> Host:
    """The CPU's rates for experts in a number format of `cpu_experts`, `down` in its own (None: the same).

    Measured if they are not in the `cache`."""
    path = cache or _kept(HOST_RATES)
    key, known = _key(_both(precision, down)), _read(path, Host._fields)
    if not _possible(known.get(key)):
        known[key] = measure(precision, down)._asdict()
        _keep(path, known)
    return Host(**known[key])


def measure(precision: str, down_precision: str | None = None) -> Host:
    """Medians of a layer about as wide as V2-Lite's, whose experts take turns so that their weights come from memory."""
    from cpu_experts import isa

    beyond = min(CACHES * last_cache(), LARGEST)
    with repeated(MODEL, WIDTH, EXPERTS, precision, down_precision, beyond) as layer:
        turns = itertools.cycle(range(layer.experts))
        times = zip(*(_times(layer, turns) for _ in range(PASSES)), strict=True)
        nothing, few, more, late, some, many, way, fetch, fetches = map(min, times)
        expert = layer.nbytes / layer.experts
    few, more, some, many = (max(seconds - nothing, 0.0) for seconds in (few, more, some, many))
    call, each = _line(FEW, few, MORE, more)
    rest, token = _line(SOME - 1, some, MANY - 1, many)  # beside the first, which `each` has
    exposed = max(rest - call, 0.0) / (MORE * each)
    latency = call + max(late - nothing, few) - few + way
    flops, link = 6 * MORE * MODEL * WIDTH / token, expert / _line(CHOSEN, fetch, EXPERTS, fetches)[1]
    name = f"{cores()} cores with {isa()}, {_both(precision, down_precision)}"
    return Host(name, expert / each, flops, call, latency, link, exposed)


def repeated(model: int, width: int, experts: int, precision: str, down_precision: str | None = None, beyond: int = 0) -> Any:
    """A layer of one random expert, `experts` times, or as often as takes so many bytes but a quarter of free memory at most."""
    from cpu_experts import Experts, layout

    rng, precisions = np.random.default_rng(0), (precision, down_precision or precision)
    floats = (rng.standard_normal(shape, np.float32) * np.float32(0.02) for shape in ((width, model), (model, width)))
    up, down = map(layout.quantize, floats, precisions)
    size = sum(part.nbytes for part in (*up, *up, *down))
    if beyond:
        experts = max(experts, min(beyond, free_memory() // 4) // size)
    up, down = (tuple(np.broadcast_to(part, (experts, *part.shape)) for part in parts) for parts in (up, down))
    return Experts(up, up, down, precision, down_precision=down_precision)


def _times(layer: Any, turns: Iterator[int]) -> tuple[float, ...]:
    """Of calls of nothing but Python, which a program's call does without, of FEW and of MORE experts, of FEW after a pause, of
    SOME and of MANY tokens; of a program's call on its way, and of CHOSEN and of EXPERTS experts over the link."""
    few, more, late = (_seconds(layer, turns, 1, chosen, pause) for chosen, pause in ((FEW, 0), (MORE, 0), (FEW, PAUSE)))
    some, many = (_seconds(layer, turns, tokens, MORE) for tokens in (SOME, MANY))
    fetched = (_link_seconds(layer, count) for count in (CHOSEN, EXPERTS))
    return _seconds(layer, turns, 1, 0), few, more, late, some, many, _way_seconds(layer), *fetched


def _line(few: int, first: float, more: int, then: float) -> tuple[float, float]:
    """Seconds of none, and of each, by the times of a `few` and of `more`; where noise allows no such line none take none."""
    each = (then - first) / (more - few)
    return (first - few * each, each) if 0 < few * each <= first else (0.0, max(first, then) / more)


def _possible(found: dict[str, Any] | None) -> bool:
    """Whether rates of a file can be any CPU's; a call may have been too short to be measured."""
    if found is None or not isinstance(found["name"], str):
        return False
    figures = {field: value for field, value in found.items() if field != "name"}
    if any(type(value) not in (int, float) or not 0 <= value < MOST for value in figures.values()):  # NaN is neither
        return False
    return all(figures[field] > 0 for field in ("bandwidth", "flops", "link"))


def _both(precision: str, down: str | None) -> str:
    return precision if down in (None, precision) else f"{precision} and {down}"


def _seconds(layer: Any, turns: Iterator[int], tokens: int, chosen: int, pause: float = 0.0) -> float:
    """Of a call by the host's own clock, so long after the last one; each takes the next experts by `turns`, or none.

    Not the shortest, which may have found its weights in a large cache."""
    rng, width, times = np.random.default_rng(tokens), max(chosen, 1), []
    x, weights = rng.standard_normal((tokens, MODEL), np.float32), np.full((tokens, width), 1 / width, np.float32)
    for _ in range(1 + REPEATS):
        if sum(times[1:]) > ENOUGH:
            break
        ids = np.tile(np.array([next(turns) for _ in range(chosen)] or [layer.experts], np.int32), (tokens, 1))
        _wait(pause)
        start = time.perf_counter()
        layer.forward(x, ids, weights)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _wait(seconds: float) -> None:
    """Busily, as the thread does that answers a device."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _way_seconds(layer: Any, calls: int = 8) -> float:
    """What a call takes in a program of the default device on its way there and back; one of no experts, that is."""
    from cpu_experts import ffi

    nobody, weights = jnp.full((1, CHOSEN), layer.experts, jnp.int32), jnp.zeros((1, CHOSEN))

    def chain(x: jax.Array, count: int) -> jax.Array:
        for _ in range(count):
            ticket = ffi.submit(layer, x, nobody, weights)
            x = ticket.x + ffi.collect(ticket)
        return x

    x, jitted = jnp.ones((1, MODEL)), jax.jit(chain, static_argnums=1)
    few, many = (_median(lambda n=n: jitted(x, n).block_until_ready()) for n in (1, 1 + calls))
    return max((many - few) / calls, 0.0)


def _link_seconds(layer: Any, count: int) -> float:
    """Of so many packed experts from the host's memory to the device's."""
    from cpu_experts import ffi

    some = jax.jit(lambda first: ffi.fetch(layer, first, count))
    return _median(lambda: jax.block_until_ready(some(0)))


def _median(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _key(precision: str) -> str:
    """What the figures depend on, the files of both libraries among it: a build may change any rate."""
    from cpu_experts import isa
    from cpu_experts.library import load, load_ffi

    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    files = (os.stat(library._name) for library in (load(), load_ffi()))
    built = " ".join(f"{file.st_size}@{file.st_mtime_ns}" for file in files)
    return f"way {WAY}: {model}, {cores()} cores, {isa()}, built {built}, {precision}, {jax.devices()[0].device_kind}"


def _kept(name: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / name


def _read(path: Path | None, fields: tuple[str, ...]) -> dict[str, dict]:
    """What is kept; nothing if it cannot be read or is not ours."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
        return {key: value for key, value in found.items() if value.keys() == set(fields)}
    except (OSError, ValueError, AttributeError):
        return {}


def _keep(path: Path | None, known: dict[str, dict]) -> None:
    """For the next start; where there is no place to keep anything it is measured again."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known, indent=1)


# The device

READ = 1 << 30  # bytes, many times what a cache on the chip holds
LEAST = 128 << 20  # of them, fewer of which say little of memory
SHARE = 32  # the part of the free memory that is taken for it
SIDE = 8192  # of square matrices
READS, PRODUCTS = 16, 8  # in one program, beside which its start is nothing
SANE = (0.1, 1.5)  # of the table's figures: a part of a device (MIG) has less, none has much more
FIGURES = ("flops", "bandwidth")


def device(target: Any = None, cache: Path | None = None) -> Device:
    """The figures of JAX's first device, or of `target`: measured if they are not in the `cache`, by the table if that fails.

    A CPU's are always the table's: what is chosen there is the same on every machine, and its experts are measured by `host`. So
    are `between`'s seconds: a chain of small kernels has the gaps between a layer's, but not what these lose beside their bytes,
    which is a third of it on an H200."""
    target = target or jax.devices()[0]
    table = roofline.device(target.device_kind, target.platform)
    if target.platform == "cpu":
        return table
    path, key = cache or _kept(DEVICE_RATES), f"{target.device_kind}, JAX {jax.__version__}"
    known = _read(path, FIGURES)
    if not _sane(known.get(key), table):
        try:
            found = measure_device(target)
        except RuntimeError:  # of JAX: no memory, or a device that does not answer
            found = None
        if found is None or not _sane(found, table):
            return table
        known[key] = found
        _keep(path, known)
    return table._replace(measured=True, **known[key])


def measure_device(target: Any) -> dict[str, float] | None:
    """FLOP/s of products of large bf16 matrices and bytes/s of sums over float32 rows; None with too little memory free."""
    count = min(READ, _free(target) // SHARE) // (4 * SIDE)
    if 4 * SIDE * count < LEAST:
        return None
    with jax.default_device(target):
        rows = jax.jit(lambda: jax.lax.broadcasted_iota(jnp.float32, (count, SIDE), 1))()
        read = _best(partial(jax.jit(_sums), rows))
        del rows
        x, w = (jax.random.normal(jax.random.key(i), (SIDE, SIDE), jnp.bfloat16) for i in range(2))
        multiplied = _best(partial(jax.jit(_products), x, w / math.sqrt(SIDE)))
    return {"flops": PRODUCTS * 2 * SIDE**3 / multiplied, "bandwidth": READS * count * 4 * SIDE / read}


def _free(target: Any) -> int:
    stats = target.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def _sums(rows: Float[Array, "n m"]) -> Float[Array, ""]:
    """Reads all rows some times; each time needs what the last one found."""
    return jax.lax.fori_loop(0, READS, lambda _, least: jnp.abs(rows - least).sum(1).min(), jnp.float32(0))


def _products(x: Float[Array, "n n"], w: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Random numbers, for zeros take less power and so less time; they keep their size."""
    for _ in range(PRODUCTS):
        x = x @ w
    return x


def _best(run: Callable[[], Any]) -> float:
    """The shortest of some runs, for others may use the device, too."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _sane(found: Any, table: Device) -> bool:
    if found is None or not all(isinstance(found[name], int | float) for name in FIGURES):
        return False
    least, most = ([share * getattr(table, name) for name in FIGURES] for share in SANE)
    return all(low <= found[name] <= high for low, name, high in zip(least, FIGURES, most, strict=True))
