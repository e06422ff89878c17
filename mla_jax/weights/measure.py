"""What this machine's CPU reaches with experts: measured once, in seconds, and kept in the user's cache."""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base.roofline import Host

MODEL, WIDTH, EXPERTS, CHOSEN = 2048, 1536, 24, 6
MANY = 256  # tokens: enough that arithmetic bounds a layer
REPEATS = 7


def host(precision: str = "bf16", cache: Path | None = None) -> Host:
    """The CPU's rates for experts in one number format of `cpu_experts`, measured if they are not in the `cache`."""
    path = cache or Path.home() / ".cache" / "mla_jax" / "host.json"
    key, known = _key(precision), _read(path)
    if key not in known:
        known[key] = measure(precision)._asdict()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(path)
    return Host(**known[key])


def measure(precision: str) -> Host:
    """Medians of a layer about as wide as V2-Lite's, whose experts take turns so that their weights come from memory."""
    from cpu_experts import Experts, isa

    rng = np.random.default_rng(0)
    up, down = (rng.standard_normal(shape, np.float32) * np.float32(0.02) for shape in ((WIDTH, MODEL), (MODEL, WIDTH)))
    up, down = (np.broadcast_to(w, (EXPERTS, *w.shape)) for w in (up, down))
    with Experts(up, up, down, precision) as layer:
        few, many = _seconds(layer, 1), _seconds(layer, MANY)
        call, link = _call_seconds(layer), _link(layer)
        read, flops = CHOSEN * layer.nbytes / EXPERTS, 6 * MANY * CHOSEN * MODEL * WIDTH
    return Host(f"{os.cpu_count()} cores with {isa()}, {precision}", read / few, flops / many, call, link)


def _seconds(layer: Any, tokens: int) -> float:
    """Of a call, by the host's own clock; each takes the experts after those of the last."""
    rng = np.random.default_rng(tokens)
    x, weights = rng.standard_normal((tokens, MODEL), np.float32), np.full((tokens, CHOSEN), 1 / CHOSEN, np.float32)
    turn = [(np.arange(tokens * CHOSEN, dtype=np.int32).reshape(tokens, CHOSEN) + i * CHOSEN) % EXPERTS for i in range(EXPERTS)]
    calls = iter(turn * 2)
    return _median(lambda: layer.forward(x, next(calls), weights))


def _call_seconds(layer: Any, calls: int = 8) -> float:
    """What a call takes in a program of the default device beyond the experts' own time; of no experts, that is."""
    from cpu_experts import ffi

    nobody, weights = jnp.full((1, CHOSEN), EXPERTS, jnp.int32), jnp.zeros((1, CHOSEN))

    def chain(x: jax.Array, count: int) -> jax.Array:
        for _ in range(count):
            x = x + ffi.forward(layer, x, nobody, weights)
        return x

    x, jitted = jnp.ones((1, MODEL)), jax.jit(chain, static_argnums=1)
    few, many = (_median(lambda n=n: jitted(x, n).block_until_ready()) for n in (1, 1 + calls))
    return max((many - few) / calls, 0.0)


def _link(layer: Any) -> float:
    """Bytes/s of packed experts from the host's memory to the device's."""
    from cpu_experts import ffi

    some = jax.jit(lambda first: ffi.fetch(layer, first, CHOSEN))
    return CHOSEN * layer.nbytes / EXPERTS / _median(lambda: jax.block_until_ready(some(0)))


def _median(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _key(precision: str) -> str:
    """What the figures depend on."""
    from cpu_experts import isa
    from cpu_experts.library import ABI, FFI_ABI

    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, {isa()}, abi {ABI}.{FFI_ABI}, {precision}, {jax.devices()[0].device_kind}"


def _read(path: Path) -> dict[str, dict]:
    """What is kept; nothing if it cannot be read or is not ours."""
    try:
        found = json.loads(path.read_text())
        return {key: value for key, value in found.items() if value.keys() == set(Host._fields)}
    except (OSError, ValueError, AttributeError):
        return {}
