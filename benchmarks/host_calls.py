"""The time that a call of the experts on the CPU adds to a layer on a GPU: cpu_experts.ffi, compared with pure_callback.

    python -m cpu_experts.build && python benchmarks/host_calls.py --out host_calls.json

A program of 20 layers with a 7168x7168 matvec each runs without experts and with them: in a loop inside the program, and step
by step. The experts are as small as possible, so that the round trip is measured; `own` is the experts' time on the host
without the round trip. `graphs` selects what XLA captures into CUDA graphs: its default, loops too, or nothing; each runs in a
process of its own, with a watchdog. Lines with ok and FAIL report checks; the exit status is 1 if one failed."""

import argparse
import ctypes
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
# The root comes before this folder, which has a cpu_experts.py too
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]

LAYERS, STEPS = 20, 25
MODEL, WIDTH, EXPERTS, CHOSEN = 7168, 16, 4, 2
BAR = 20.0  # us per layer in addition to the experts' own time
GRAPHS = {
    "default": "",
    "loops": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
    "none": "--xla_gpu_enable_command_buffer=",
}


class Checks:
    """Prints lines with ok and FAIL, and counts failures."""

    def __init__(self):
        self.failed = 0

    def __call__(self, holds: bool, what: str) -> None:
        self.failed += not holds
        print(f"{'ok' if holds else 'FAIL'}: {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the rows as JSON to this file")
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument(
        "--size", type=int, default=MODEL, help="width of the matvec and of the experts' rows"
    )
    parser.add_argument(
        "--seconds", type=float, default=88, help="time limit for all; then stacks are printed and it exits"
    )
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # for the process that measures
    args = parser.parse_args()
    return measure(args) if args.rows else drive(args)


def drive(args: argparse.Namespace) -> int:
    """One process for each of `graphs`."""
    end, rows, status = time.monotonic() + args.seconds, [], 0
    for graphs in args.graphs:
        with tempfile.TemporaryDirectory() as folder:
            file, left = Path(folder) / "rows.json", max(5.0, end - time.monotonic())
            flags = f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS[graphs]}".strip()
            command = [
                sys.executable,
                __file__,
                "--graphs",
                graphs,
                "--size",
                str(args.size),
                "--seconds",
                f"{left:.0f}",
            ]
            print(f"graphs: {graphs}", flush=True)
            try:
                process = subprocess.run(
                    [*command, "--rows", str(file)], env=os.environ | {"XLA_FLAGS": flags}, timeout=left + 5
                )
                status |= process.returncode
            except subprocess.TimeoutExpired:
                print(f"FAIL: {graphs}: killed")
                status = 1
            rows += json.loads(file.read_text()) if file.exists() else []
    if rows:
        import report

        report.show(rows, args.out, layers=LAYERS, size=args.size)
    return int(status != 0)


def measure(args: argparse.Namespace) -> int:
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    import jax

    from cpu_experts import ffi

    platform, check = jax.default_backend(), Checks()
    ways = {"gpu": "cuda"}
    if reason := ffi.why_not(ways.get(platform, platform)):
        print(f"FAIL: {reason}")
        return 1
    with small_experts(args.size) as layer:
        answers(layer, check, platform)
        rows = timed(layer, args.graphs[0], check)
    args.rows.write_text(json.dumps(rows))
    faulthandler.cancel_dump_traceback_later()
    return int(check.failed > 0)


def small_experts(model: int):
    from cpu_experts import Experts

    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, WIDTH, model), (EXPERTS, WIDTH, model), (EXPERTS, model, WIDTH))
    return Experts(
        *(rng.standard_normal(s, np.float32) / np.float32(s[-1] ** 0.5) for s in shapes), threads=1
    )


def batch(model: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in bfloat16; some ids mean no expert, except in the first row."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    ids = rng.integers(0, EXPERTS + 1, (tokens, CHOSEN)).astype(np.int32)
    ids[0] = range(CHOSEN)
    return (
        rng.standard_normal((tokens, model)).astype(ml_dtypes.bfloat16),
        ids,
        rng.random((tokens, CHOSEN), np.float32),
    )


# Correctness


def answers(layer, check: Checks, platform: str) -> None:
    """Checks that the results are bit-equal to the numpy interface, for few rows and many; then checks errors."""
    import jax

    from cpu_experts import ffi

    for tokens, dtype in ((1, "bfloat16"), (3, "float32"), (64, "float32"), (300, "bfloat16")):
        given = batch(layer.model, tokens)
        out = np.asarray(jax.jit(partial(ffi.forward, layer, dtype=dtype))(*given))
        check(equal(layer, out, *given), f"{tokens} rows, answer in {dtype}")
    x, ids, weights = given = batch(layer.model, 2)
    out = np.asarray(ffi.forward(layer, x, np.full_like(ids, EXPERTS), weights), np.float32)
    check(not out.any(), "rows without experts are zero")
    longer = batch(layer.model, 3)[0]
    out = np.asarray(jax.jit(lambda x, *pairs: ffi.forward(layer, x[1:], *pairs))(longer, ids, weights))
    check(equal(layer, out, longer[1:], ids, weights), "a slice of rows")
    several(layer, check, given)
    if platform == "gpu":
        failures(layer, check, given)


def equal(layer, out: np.ndarray, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> bool:
    """Whether `out` is bit-equal to the numpy interface's result."""
    return bool((out == layer.forward(x, ids, weights, np.empty_like(out))).all())


def several(layer, check: Checks, given) -> None:
    import jax
    import jax.numpy as jnp

    from cpu_experts import ffi

    def backwards(x, *pairs):
        tickets = [ffi.submit(layer, x * (i + 1), *pairs) for i in range(4)]
        return [ffi.collect(ticket) for ticket in reversed(tickets)]

    x, ids, weights = given
    outs = [np.asarray(out) for out in jax.jit(backwards)(x, ids, weights)]
    inputs = [np.asarray(jnp.asarray(x) * (i + 1)) for i in reversed(range(4))]
    same = [equal(layer, out, scaled, ids, weights) for out, scaled in zip(outs, inputs, strict=True)]
    check(all(same), "four calls under way at once, the last one collected first")


def failures(layer, check: Checks, given) -> None:
    import jax

    from cpu_experts import ffi

    def outcome(ids: np.ndarray, **options) -> tuple[bool, str]:
        """Whether the answer was NaN or an error, and the message."""
        try:
            out = jax.jit(partial(ffi.forward, layer, **options))(given[0], ids, given[2])
            nothing = bool(np.isnan(np.asarray(out, np.float32)).all())
            time.sleep(0.05)
            ffi.check()
        except Exception as error:
            return True, str(error)
        return nothing, ""

    bad = given[1].copy()
    bad[1, 0] = EXPERTS + 1
    nothing, words = outcome(bad)
    check(nothing and "topk_ids[1, 0]" in words, f"an id that is not an expert is reported: {words!r}")
    for _ in range(20):
        nothing, words = outcome(given[1], patience=0)
        if words:
            break
    check(nothing and "in vain" in words, f"a wait with patience 0 ends and is reported: {words!r}")
    nothing, words = outcome(given[1])
    check(not nothing and not words, f"the next call is correct {words!r}")


# Time


def own_microseconds(layer) -> float:
    """The experts' own time for one row in microseconds, for calls back to back."""
    from cpu_experts.library import ForwardCall

    x, ids, weights = batch(layer.model, 1)
    out = np.empty(x.shape, x.dtype)
    call = ForwardCall(
        ctypes.sizeof(ForwardCall), 1, CHOSEN, 1, 1, *(a.ctypes.data for a in (x, ids, weights, out))
    )
    forward, handle, times = layer._library.cpu_experts_forward, layer._handle, []
    for _ in range(300):
        start = time.perf_counter()
        forward(handle, call)
        times.append(time.perf_counter() - start)
    return statistics.median(times[100:]) * 1e6


def timed(layer, graphs: str, check: Checks) -> list[dict]:
    """Rows of microseconds per layer; checks that all ways of calling agree."""
    from cpu_experts import ffi

    own, rows, took, outs = own_microseconds(layer), [], {}, {}
    for name, (one, base) in ways_of_calling(layer).items():
        row = {"graphs": graphs, "way": name}
        modes = ("loop",) if "two" in name or "second" in name else ("loop", "steps")
        steps = 3 if name == "pure_callback" else STEPS
        for mode, (seconds, out) in run(one, layer.model, steps, modes).items():
            took[name, mode], outs[name, mode] = seconds * 1e6, out
            row[f"{mode}, us a layer"] = took[name, mode]
            if base:
                row[f"{mode}, added"] = took[name, mode] - took[base, mode]
        if base:
            row["own"] = own
        rows.append(row)
        print(" | ".join(shown(row)), flush=True)
    for mode in ("loop", "steps"):
        compare(mode, took, outs, own, check)
    ffi.check()
    return rows


def shown(row: dict) -> list[str]:
    return [
        f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    ]


def compare(mode: str, took: dict, outs: dict, own: float, check: Checks) -> None:
    """Checks the results of ffi against pure_callback, and its added time against BAR."""
    near = np.allclose(outs["ffi", mode], outs["pure_callback", mode], rtol=0.02, atol=0.02)
    check(near and bool(np.isfinite(outs["ffi", mode]).all()), f"{mode}: ffi and pure_callback agree")
    over = took["ffi", mode] - took["no experts", mode] - own
    check(
        over <= BAR,
        f"{mode}: {over:.1f} us per layer in addition to the experts' own {own:.1f}, limit {BAR:.0f}",
    )


def ways_of_calling(layer) -> dict[str, tuple[Callable, str | None]]:
    """A layer as a function of x, by name, and the name of the one without experts to compare it with."""
    import jax
    import jax.numpy as jnp

    from cpu_experts import ffi

    model = layer.model
    w = jax.random.normal(jax.random.key(0), (model, model), jnp.bfloat16) * (model**-0.5)
    _, ids, weights = (jnp.asarray(a) for a in batch(model, 1))

    def matvec(x):
        y = (x.astype(jnp.bfloat16) @ w).astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y) + 1e-6)).astype(jnp.bfloat16)

    def host(x, ids, weights):
        return layer.forward(
            *(np.ascontiguousarray(a) for a in (x, ids, weights)), np.empty(x.shape, x.dtype)
        )

    def without(x):
        y = matvec(x)
        return y + y

    def two_matvecs(x):
        y = matvec(x)
        return y + matvec(y)

    def by_ffi(x):
        ticket = ffi.submit(layer, matvec(x), ids, weights)
        return ticket.x + ffi.collect(ticket)

    def by_callback(x):
        y = matvec(x)
        return y + jax.pure_callback(host, jax.ShapeDtypeStruct(y.shape, y.dtype), y, ids, weights)

    def overlapped(x):
        ticket = ffi.submit(layer, matvec(x), ids, weights)
        other = matvec(ticket.x)
        return other + ffi.collect(ticket, after=other)

    return {
        "no experts": (without, None),
        "ffi": (by_ffi, "no experts"),
        "pure_callback": (by_callback, "no experts"),
        "no experts, two matvecs": (two_matvecs, None),
        "ffi beside the second": (overlapped, "no experts, two matvecs"),
    }


def run(one: Callable, model: int, steps: int, modes: tuple[str, ...]) -> dict[str, tuple[float, np.ndarray]]:
    """Seconds per layer, and the result of one step; "loop" runs steps inside a program, "steps" calls a program per step."""
    import jax
    import jax.numpy as jnp

    def step(x):
        for _ in range(LAYERS):
            x = x * 0.5 + one(x).astype(jnp.float32)
        return x

    x = jnp.cos(jnp.arange(model, dtype=jnp.float32))[None]
    alone = jax.jit(step)
    looped = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: step(x), x))

    def by_steps() -> jax.Array:
        y = x
        for _ in range(steps):
            y = alone(y)
        return y

    found, programs = {}, {"loop": lambda: looped(x, steps), "steps": by_steps}
    for mode in modes:
        program = programs[mode]
        once = np.asarray(looped(x, 1) if mode == "loop" else alone(x))
        program().block_until_ready()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            program().block_until_ready()
            times.append(time.perf_counter() - start)
        found[mode] = statistics.median(times) / steps / LAYERS, once
    return found


if __name__ == "__main__":
    sys.exit(main())
