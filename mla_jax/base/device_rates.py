"""Measured rates of this machine's GPU or TPU. Measuring takes seconds, once; the rates stay in the user's cache."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mla_jax.base import roofline
from mla_jax.base.files import DEVICE_RATES, cache_folder, write_json
from mla_jax.base.roofline import Device

REPEATS = 7
READ = 1 << 30  # bytes, many times what a cache on the chip holds
MIN_READ = 128 << 20  # bytes that say enough of memory
SHARE = 32  # the part of the free memory that is taken for it
SIDE = 8192  # of square matrices
READS, PRODUCTS = 16, 8  # in one program, so that its start does not count
SANE = (
    0.1,
    1.5,
)  # times the table's figures, if it has the device: a part of one (MIG) reaches less, none much more
FIGURES = ("flops", "bandwidth")


class RatesFile:
    """Measured figures in a file of the user's cache, or in `path`: a table by subject, every entry with the same `fields`."""

    def __init__(self, name: str, fields: Sequence[str], path: Path | None = None):
        folder = cache_folder()
        self.path = path or (None if folder is None else folder / name)
        self.fields = set(fields)

    def read(self) -> dict[str, dict]:
        """The stored figures; nothing if the file cannot be read or has other fields."""
        if self.path is None:
            return {}
        try:
            found = json.loads(self.path.read_text())
            return {key: value for key, value in found.items() if value.keys() == self.fields}
        except (OSError, ValueError, AttributeError):
            return {}

    def add(self, key: str, figures: dict[str, Any]) -> None:
        """For the next start; where nothing can be written, that measures again."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {**self.read(), key: figures}, indent=1)


def measured_device(target: Any = None, cache: Path | None = None) -> Device:
    """The figures of JAX's first device, or of `target`: measured if they are not in the `cache`, by the table if that fails.

    A CPU's figures are always the table's, so that choices on CPUs are the same on every machine; its experts are measured by
    `mla_jax.offload.calibrate`. The seconds `between` are the table's as well: small kernels alone do not show the time that
    layers lose in addition to their bytes' time."""
    target = target or jax.local_devices()[0]
    table = roofline.device(target.device_kind, target.platform)
    if target.platform == "cpu":
        return table
    kept = RatesFile(DEVICE_RATES, FIGURES, cache)
    key = f"{target.device_kind}, JAX {jax.__version__}"
    found = kept.read().get(key)
    if _sane(found, table):
        return table._replace(measured=True, **found)
    try:
        found = measure_device(target)
    except RuntimeError:  # of JAX: no memory, or a device that does not answer
        return table
    if not _sane(found, table):
        return table
    kept.add(key, found)
    return table._replace(measured=True, **found)


def measure_device(target: Any) -> dict[str, float] | None:
    """FLOP/s of products of large bf16 matrices and bytes/s of sums over float32 rows; None with too little memory free."""
    count = min(READ, _free(target) // SHARE) // (4 * SIDE)
    if 4 * SIDE * count < MIN_READ:
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


def _sane(found: Any, table: Device) -> TypeGuard[dict[str, float]]:
    if found is None or not all(isinstance(found[name], int | float) for name in FIGURES):
        return False
    if not table.known:
        return all(0 < found[name] < math.inf for name in FIGURES)
    least, most = ([share * getattr(table, name) for name in FIGURES] for share in SANE)
    return all(low <= found[name] <= high for low, name, high in zip(least, FIGURES, most, strict=True))


def seconds_of(call: Callable[[], Any], enough: float = math.inf) -> Sequence[float]:
    """The times of up to REPEATS calls after a first one that is not timed, until they take `enough` seconds together."""
    call()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) <= enough:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times
