"""What this machine reaches, its CPU with experts and its GPU or TPU: measured once, in seconds, and kept in the user's cache."""

import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax.base import roofline
from mla_jax.base.errors import Unsupported
from mla_jax.base.files import DEVICE_RATES, HOST_RATES, cache_folder, write_json
from mla_jax.base.limits import cores, free_memory, last_cache
from mla_jax.base.roofline import Device
from mla_jax.offload.cost import HostRates
from mla_jax.offload.library import instructions

MODEL, WIDTH, EXPERTS = 2048, 1536, 24  # about V2-Lite's layers
CHOSEN = 12  # experts per call
MANY = 256  # tokens that choose the same experts: bound by arithmetic
TINY = 256  # width of experts so small that a call's own time is all that counts
CALLS = 8  # in a program, one after the other
WORKING_SET = 4, 2 << 30  # times the last caches' size, at most so many bytes: weights are read from memory
REPEATS = 7
ENOUGH = 1.0  # seconds, after which slow cores repeat no more
FASTEST = 1e18  # bytes or FLOPs per second that no CPU reaches


def host(precision: str = "bf16", down: str | None = None, cache: Path | None = None) -> HostRates:
    """The CPU's rates for experts of a number format of `cpu_experts`, with another for down if given.

    Measured unless they are in the file `cache`. Raises Unsupported where experts cannot be computed on the CPU."""
    refuse_without_library(jax.devices()[0].platform)
    path, key = cache or _cached(HOST_RATES), _key(_formats(precision, down))
    known = _read(path, HostRates._fields)
    if not _possible(known.get(key)):
        known[key] = measure_host(precision, down)._asdict()
        _keep(path, known)
    return HostRates(**known[key])


def refuse_without_library(platform: str) -> None:
    """Raises Unsupported where programs of JAX's `platform` cannot call experts on the CPU."""
    from cpu_experts import ffi

    refused = "experts cannot be computed on the CPU here"
    try:
        instructions()
    except Unsupported as e:
        raise Unsupported(refused, str(e)) from e
    if reason := ffi.why_not("cuda" if platform == "gpu" else platform):
        raise Unsupported(refused, reason)


def measure_host(precision: str, down: str | None = None) -> HostRates:
    """Rates of a layer about as wide as V2-Lite's, whose experts are chosen in rotation, so that they come from memory."""
    times, most = WORKING_SET
    with repeated(TINY, TINY, EXPERTS, precision, down) as tiny:
        call = call_seconds(tiny)
    with repeated(MODEL, WIDTH, EXPERTS, precision, down, min(times * last_cache(), most)) as layer:
        rotation = itertools.cycle(range(layer.experts))
        read = forward_seconds(layer, 1, rotation)
        computed = forward_seconds(layer, MANY, rotation)
        copied = fetch_seconds(layer, EXPERTS)
        expert = layer.nbytes / layer.experts
    flops = 2 * MANY * CHOSEN * 3 * MODEL * WIDTH
    name = f"{cores()} cores with {instructions()}, {_formats(precision, down)}"
    return HostRates(name, CHOSEN * expert / read, flops / computed, call, EXPERTS * expert / copied)


def repeated(model: int, width: int, experts: int, precision: str, down: str | None = None, working_set: int = 0) -> Any:
    """A layer of copies of one random expert: `experts`, or as many as `working_set` bytes, at most a quarter of free memory."""
    from cpu_experts import Experts, layout

    rng, precisions = np.random.default_rng(0), (precision, down or precision)
    floats = (rng.standard_normal(shape, np.float32) * np.float32(0.02) for shape in ((width, model), (model, width)))
    up, down_ = map(layout.quantize, floats, precisions)
    size = sum(part.nbytes for part in (*up, *up, *down_))
    experts = max(experts, min(working_set, free_memory() // 4) // size)
    up, down_ = (tuple(np.broadcast_to(part, (experts, *part.shape)) for part in parts) for parts in (up, down_))
    return Experts(up, up, down_, precision, down_precision=down)


def forward_seconds(layer: Any, tokens: int, rotation: Iterator[int]) -> float:
    """Seconds of a call of `tokens` that all choose the next CHOSEN experts of the `rotation`.

    The median: the shortest may have found its weights in a cache."""
    rng = np.random.default_rng(tokens)
    x, weights = rng.standard_normal((tokens, layer.model), np.float32), np.full((tokens, CHOSEN), 1 / CHOSEN, np.float32)

    def call() -> None:
        chosen = np.array([next(rotation) for _ in range(CHOSEN)], np.int32)
        layer.forward(x, np.tile(chosen, (tokens, 1)), weights)

    return statistics.median(seconds_of(call, ENOUGH))


def call_seconds(layer: Any) -> float:
    """Seconds per call of a `layer` of tiny experts from a program of the default device, there and back."""
    from cpu_experts import ffi

    ids, weights = jnp.arange(CHOSEN, dtype=jnp.int32)[None], jnp.full((1, CHOSEN), 1 / CHOSEN)

    def chain(x: jax.Array, calls: int) -> jax.Array:
        for _ in range(calls):
            ticket = ffi.submit(layer, x, ids, weights)
            x = ticket.x + ffi.collect(ticket)
        return x

    x, program = jnp.ones((1, layer.model)), jax.jit(chain, static_argnums=1)
    few, many = (statistics.median(seconds_of(lambda n=n: program(x, n).block_until_ready())) for n in (1, 1 + CALLS))
    return max((many - few) / CALLS, 0.0)


def fetch_seconds(layer: Any, count: int) -> float:
    """Seconds that `count` packed experts take from the host's memory to the device's."""
    from cpu_experts import ffi

    fetch = jax.jit(lambda first: ffi.fetch(layer, first, count))
    return statistics.median(seconds_of(lambda: jax.block_until_ready(fetch(0))))


def seconds_of(call: Callable[[], Any], enough: float = math.inf) -> Sequence[float]:
    """The times of up to REPEATS calls after a first one that is not timed, until they take `enough` seconds together."""
    call()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) <= enough:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _possible(found: dict[str, Any] | None) -> bool:
    """Whether rates from a file can be a CPU's."""
    if found is None or not isinstance(found["name"], str):
        return False
    figures = {field: value for field, value in found.items() if field != "name"}
    if any(type(value) not in (int, float) or not 0 <= value < FASTEST for value in figures.values()):  # NaN is neither
        return False
    return all(figures[field] > 0 for field in ("bandwidth", "flops", "link"))


def _formats(precision: str, down: str | None) -> str:
    return precision if down in (None, precision) else f"{precision} and {down}"


def _key(precision: str) -> str:
    """What the rates depend on, with the files of both libraries: a build may change any rate."""
    from cpu_experts.library import load, load_ffi

    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    files = (os.stat(library._name) for library in (load(), load_ffi()))
    built = " ".join(f"{file.st_size}@{file.st_mtime_ns}" for file in files)
    return f"{model}, {cores()} cores, {instructions()}, built {built}, {precision}, {jax.devices()[0].device_kind}"


def _cached(name: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / name


def _read(path: Path | None, fields: tuple[str, ...]) -> dict[str, dict]:
    """The cached figures; none if the file cannot be read or is not ours."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
        return {key: value for key, value in found.items() if value.keys() == set(fields)}
    except (OSError, ValueError, AttributeError):
        return {}


def _keep(path: Path | None, known: dict[str, dict]) -> None:
    """For the next start; where nothing can be written, that measures again."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known, indent=1)


# The device

READ = 1 << 30  # bytes, many times what a cache on the chip holds
LEAST = 128 << 20  # bytes that say enough of memory
SHARE = 32  # the part of the free memory that is taken for it
SIDE = 8192  # of square matrices
READS, PRODUCTS = 16, 8  # in one program, so that its start does not count
SANE = (0.1, 1.5)  # times the table's figures: a part of a device (MIG) reaches less, none much more
FIGURES = ("flops", "bandwidth")


def device(target: Any = None, cache: Path | None = None) -> Device:
    """The figures of JAX's first device, or of `target`: measured if they are not in the `cache`, by the table if that fails.

    A CPU's figures are always the table's: what is chosen there is the same on every machine, and its experts are measured by
    `host`. So are the seconds `between`: small kernels alone do not show what layers lose in addition to their bytes' time."""
    target = target or jax.devices()[0]
    table = roofline.device(target.device_kind, target.platform)
    if target.platform == "cpu":
        return table
    path, key = cache or _cached(DEVICE_RATES), f"{target.device_kind}, JAX {jax.__version__}"
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
    """The shortest of some runs, for other work may use the device."""
    return min(seconds_of(lambda: jax.block_until_ready(run())))


def _sane(found: Any, table: Device) -> bool:
    if found is None or not all(isinstance(found[name], int | float) for name in FIGURES):
        return False
    least, most = ([share * getattr(table, name) for name in FIGURES] for share in SANE)
    return all(low <= found[name] <= high for low, name, high in zip(least, FIGURES, most, strict=True))
