"""Measured rates of this machine's CPU with experts. Measuring takes seconds, once; the rates stay in the user's cache."""

import itertools
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base.device_rates import RatesFile, seconds_of
from mla_jax.base.errors import Unsupported
from mla_jax.base.files import HOST_RATES
from mla_jax.base.limits import cores, free_memory, last_cache
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.host_cost import HostRates
from mla_jax.offload.library import instructions

MODEL, WIDTH, N_EXPERTS = 2048, 1536, 24  # about V2-Lite's layers
TOPK = 12  # experts per call
MANY_TOKENS = 256  # tokens that choose the same experts: bound by arithmetic
TINY = 256  # width of experts so small that a call's own time is all that counts
CALLS = 8  # in a program, one after the other
WORKING_SET = 4, 2 << 30  # times the last caches' size, and bytes at most: weights are read from memory
ENOUGH = 1.0  # seconds, after which slow cores repeat no more
FASTEST = 1e18  # bytes or FLOPs per second that no CPU reaches


def host(precision: str = "bf16", down: str | None = None, cache: Path | None = None) -> HostRates:
    """The CPU's rates for experts of a number format of `cpu_experts`, with another for down if given.

    Measured unless they are in the file `cache`. Raises Unsupported where experts cannot be computed on the CPU."""
    refuse_without_library(Devices.default().platform)
    kept, key = RatesFile(HOST_RATES, HostRates._fields, cache), _key(_formats(precision, down))
    found = kept.read().get(key)
    if not _possible(found):
        found = measure_host(precision, down)._asdict()
        kept.add(key, found)
    return HostRates(**found)


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
    with repeated(TINY, TINY, N_EXPERTS, precision, down) as tiny:
        call = call_seconds(tiny)
    with repeated(MODEL, WIDTH, N_EXPERTS, precision, down, min(times * last_cache(), most)) as layer:
        rotation = itertools.cycle(range(layer.experts))
        read = forward_seconds(layer, 1, rotation)
        computed = forward_seconds(layer, MANY_TOKENS, rotation)
        copied = fetch_seconds(layer, N_EXPERTS)
        expert = layer.nbytes / layer.experts
    flops = 2 * MANY_TOKENS * TOPK * 3 * MODEL * WIDTH
    name = f"{cores()} cores with {instructions()}, {_formats(precision, down)}"
    return HostRates(name, TOPK * expert / read, flops / computed, call, N_EXPERTS * expert / copied)


def repeated(
    model: int, width: int, experts: int, precision: str, down: str | None = None, working_set: int = 0
) -> Any:
    """A layer of copies of one random expert: `experts`, or as many as `working_set` bytes, at most a quarter of free memory."""
    from cpu_experts import Experts, layout

    rng, precisions = np.random.default_rng(0), (precision, down or precision)
    floats = (
        rng.standard_normal(shape, np.float32) * np.float32(0.02)
        for shape in ((width, model), (model, width))
    )
    up, down_ = map(layout.quantize, floats, precisions)
    size = sum(part.nbytes for part in (*up, *up, *down_))
    experts = max(experts, min(working_set, free_memory() // 4) // size)
    up, down_ = (
        tuple(np.broadcast_to(part, (experts, *part.shape)) for part in parts) for parts in (up, down_)
    )
    return Experts(up, up, down_, precision, down_precision=down)


def forward_seconds(layer: Any, tokens: int, rotation: Iterator[int]) -> float:
    """Seconds of a call of `tokens` that all choose the next TOPK experts of the `rotation`.

    The median: the shortest may have found its weights in a cache."""
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, layer.model), np.float32)
    weights = np.full((tokens, TOPK), 1 / TOPK, np.float32)

    def call() -> None:
        chosen = np.array([next(rotation) for _ in range(TOPK)], np.int32)
        layer.forward(x, np.tile(chosen, (tokens, 1)), weights)

    return statistics.median(seconds_of(call, ENOUGH))


def call_seconds(layer: Any) -> float:
    """Seconds per call of one of a `layer`'s tiny experts from a program of the default device, there and back."""
    from cpu_experts import ffi

    ids = jnp.zeros((1, 1), jnp.int32)
    weights = jnp.ones((1, 1))

    def chain(x: jax.Array, calls: int) -> jax.Array:
        for _ in range(calls):
            ticket = ffi.submit(layer, x, ids, weights)
            x = ticket.x + ffi.collect(ticket)
        return x

    x, program = jnp.ones((1, layer.model)), jax.jit(chain, static_argnums=1)
    few, many = (
        statistics.median(seconds_of(lambda n=n: program(x, n).block_until_ready())) for n in (1, 1 + CALLS)
    )
    return max((many - few) / CALLS, 1e-9)


def fetch_seconds(layer: Any, count: int) -> float:
    """Seconds that `count` packed experts take from the host's memory to the device's."""
    from cpu_experts import ffi

    fetch = jax.jit(lambda first: ffi.fetch(layer, first, count))
    return statistics.median(seconds_of(lambda: jax.block_until_ready(fetch(0))))


def _possible(found: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether rates from a file can be a CPU's."""
    figures = [] if found is None else [value for field, value in found.items() if field != "name"]
    # NaN is neither above 0 nor below FASTEST
    return bool(figures) and all(isinstance(value, float) and 0 < value < FASTEST for value in figures)


def _formats(precision: str, down: str | None) -> str:
    return precision if down in (None, precision) else f"{precision} and {down}"


def _key(precision: str) -> str:
    """The conditions of a measurement, including the files of both libraries: a build may change any rate."""
    from cpu_experts.library import load, load_ffi

    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    files = (os.stat(library._name) for library in (load(), load_ffi()))
    built = " ".join(f"{file.st_size}@{file.st_mtime_ns}" for file in files)
    return f"{model}, {cores()} cores, {instructions()}, built {built}, {precision}, {Devices.default().first.device_kind}"
