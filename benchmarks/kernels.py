"""Times the kernels beside their peers on a Hopper GPU, and checks them there: `python benchmarks/kernels.py [--check]`.

A time is wall time per call of many calls back to back inside one program, over caches that rotate beyond the L2, each
query being the answer before; the schedule, made once per step, is apart."""

import argparse
import functools
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=2")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import testing
from pallas_kernels.mla_decode import mla_decode, reference, schedule, xla

BEYOND_L2 = 256 << 20
# batch, heads, held -> microseconds aimed at on an H200
BARS = {
    (1, 16, 4096): 12, (1, 128, 4096): 14, (1, 16, 16384): 18, (1, 128, 16384): 22,
    (64, 16, 4096): 76, (64, 128, 4096): 110, (64, 16, 16384): 280, (64, 128, 16384): 440,
    (128, 16, 4096): 142, (128, 128, 4096): 221, (128, 16, 16384): 550, (128, 128, 16384): 885,
}  # fmt: skip


def check() -> list[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    lines = []
    for case in testing.MLA_DECODE:
        inputs = testing.mla_decode_inputs(case)
        wanted, lse = reference.mla_decode(**inputs, scale=case.scale)
        own, _ = xla.mla_decode(**inputs, scale=case.scale)
        out, got_lse = jax.jit(functools.partial(mla_decode, scale=case.scale, impl="mosaic_gpu"))(**inputs)
        off, own_off = testing.error(out, wanted), testing.error(own, wanted)
        same = np.isinf(lse) == np.isinf(got_lse)
        lse_off = np.abs(np.where(np.isinf(lse), 0, lse) - np.where(np.isinf(got_lse), 0, got_lse)).max()
        good = off <= 2 * own_off and same.all() and lse_off < 1e-3
        lines.append(f"{'ok  ' if good else 'FAIL'} {case.name}: {off:.5f}, fallback {own_off:.5f}, lse {lse_off:.1e}")
    return lines


class Shape:
    """A batch of equal lengths over `sets` caches in one pool."""

    def __init__(self, batch, heads, held, page=64, rank=512, rope=64):
        self.batch, self.heads, self.held, self.rank, self.rope = batch, heads, held, rank, rope
        per_row = -(-held // page)
        pages = batch * per_row
        self.bytes = pages * page * (rank + rope) * 2
        self.sets = min(max(1, -(-BEYOND_L2 // self.bytes)), 16)
        apart = max(1, -(-BEYOND_L2 // self.bytes)) // self.sets
        total = pages * (1 + (self.sets - 1) * apart)
        keys = jax.random.split(jax.random.key(0), 4)

        @functools.partial(jax.jit, static_argnums=1)
        def normal(key, shape):
            return jax.random.normal(key, shape, jnp.bfloat16)

        self.c_kv, self.k_pe = normal(keys[0], (total, page, rank)), normal(keys[1], (total, page, rope))
        self.q_c, self.q_pe = normal(keys[2], (batch, 1, heads, rank)), normal(keys[3], (batch, 1, heads, rope))
        order = np.random.default_rng(0).permutation(pages).reshape(batch, per_row)
        self.tables = jnp.asarray([order + i * apart * pages for i in range(self.sets)], jnp.int32)
        self.seq_lens = jnp.full((batch,), held, jnp.int32)

    def error(self, impl, rows=2):
        out, _ = impl(self.q_c, self.q_pe, self.c_kv, self.k_pe, self.tables[0], self.seq_lens)
        some = slice(0, rows)
        args = (self.q_c[some], self.q_pe[some], self.c_kv, self.k_pe, self.tables[0][some], self.seq_lens[some])
        return testing.error(out[some], reference.mla_decode(*args, scale=self.scale)[0])

    scale = 192**-0.5


def measure(shape: Shape, impl=None, seconds=0.25) -> float:
    """Microseconds per call."""
    calls = max(shape.sets, min(64, int(4e-3 / max(shape.bytes / 4e12, 1e-5))))
    plan = jax.jit(functools.partial(schedule, heads=shape.heads))(shape.seq_lens)

    call = jax.jit(functools.partial(mla_decode, scale=shape.scale, impl=impl))  # so that all calls are lowered once

    @jax.jit
    def many(q_c, q_pe, c_kv, k_pe, tables, seq_lens, plan):
        for i in range(calls):
            q_c, _ = call(q_c, q_pe, c_kv, k_pe, tables[i % shape.sets], seq_lens, schedule=plan)
        return q_c

    args = (shape.q_c, shape.q_pe, shape.c_kv, shape.k_pe, [*shape.tables], shape.seq_lens, plan)
    many(*args).block_until_ready()
    many(*args).block_until_ready()
    start = time.perf_counter()
    many(*args).block_until_ready()
    once = time.perf_counter() - start
    times = []
    for _ in range(5):
        repeats = max(2, int(seconds / 5 / once))
        start = time.perf_counter()
        for _ in range(repeats):
            last = many(*args)
        last.block_until_ready()
        times.append((time.perf_counter() - start) / repeats / calls * 1e6)
    return statistics.median(times)


def kernels(shape: Shape) -> dict[str, float]:
    """Microseconds of each kernel of one call with a cold L2, as the GPU's profiler has it."""
    from jax.experimental.mosaic.gpu import profiler

    plan = jax.jit(functools.partial(schedule, heads=shape.heads))(shape.seq_lens)
    call = jax.jit(functools.partial(mla_decode, scale=shape.scale))
    args = (shape.q_c, shape.q_pe, shape.c_kv, shape.k_pe, shape.tables[0], shape.seq_lens)
    call(*args, schedule=plan)[0].block_until_ready()
    junk = jnp.zeros((64 << 20,), jnp.float32)
    jax.block_until_ready(junk + 1)
    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    extension._cupti_init()
    try:
        for _ in range(3):
            jax.block_until_ready(junk + 1)
            call(*args, schedule=plan)[0].block_until_ready()
    finally:
        records = extension._cupti_get_timings(True)
    return {name[:28]: round(ms * 1e3, 1) for name, ms in records[-2:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="check every named case first")
    parser.add_argument(
        "--peer", help="a file of JSON lines with batch, heads_q, seqlen_k, us and peer, measured in the same run"
    )
    parser.add_argument("--shapes", help="only these, as 64x16x4096,...")
    parser.add_argument("--profile", action="store_true", help="time the kernels of a call apart")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    if options.check:
        print(*check(), sep="\n", flush=True)
    peers: dict[tuple, float] = {}
    for line in Path(options.peer).read_text().splitlines() if options.peer else ():
        record = json.loads(line)
        if "us" in record:
            at = record["batch"], record["heads_q"], record["seqlen_k"]
            peers[at] = min(record["us"], peers.get(at, np.inf))
    shapes = [tuple(map(int, x.split("x"))) for x in options.shapes.split(",")] if options.shapes else list(BARS)
    rows = []
    for at in shapes:
        shape = Shape(*at)
        us = measure(shape)
        off = shape.error(jax.jit(functools.partial(mla_decode, scale=shape.scale)))
        flops = 2 * shape.batch * shape.heads * shape.held * (2 * shape.rank + shape.rope)
        row = {"shape": at, "us": round(us, 1), "bar": BARS.get(at), "peer": peers.get(at), "error": round(off, 5)}
        row |= {"tb_s": round(shape.bytes / us / 1e6, 2), "tflop_s": round(flops / us / 1e6)}
        if options.profile:
            try:
                row["kernels"] = kernels(shape)
            except Exception as fault:
                row["kernels"] = repr(fault)[:200]
        print(row, flush=True)
        rows.append(row)
    print("batch heads   held      us   bar    peer  /bar /peer  TB/s TFLOP/s")
    for row in rows:
        bar, peer = row["bar"] or np.nan, row["peer"] or np.nan
        print(
            "{:5} {:5} {:6}".format(*row["shape"]),
            f"{row['us']:7.1f} {bar:5} {peer:7.1f} {row['us'] / bar:5.2f} {row['us'] / peer:5.2f}",
            f"{row['tb_s']:5} {row['tflop_s']:7}",
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
