"""mla_decode on a Hopper GPU, compared with FlashInfer and the floor."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ops import timing

from pallas_kernels import fp8, testing
from pallas_kernels.mla_decode import mla_decode, reference, schedule

# batch, heads, cached tokens -> target in microseconds on an H200
BARS = {
    (1, 16, 4096): 12, (1, 128, 4096): 14, (1, 16, 16384): 18, (1, 128, 16384): 22,
    (64, 16, 4096): 76, (64, 128, 4096): 110, (64, 16, 16384): 280, (64, 128, 16384): 440,
    (128, 16, 4096): 142, (128, 128, 4096): 221, (128, 16, 16384): 550, (128, 128, 16384): 885,
}  # fmt: skip
RANK, ROPE, PAGE, SCALE = 512, 64, 64, 192**-0.5


def check() -> Iterator[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    return map(_check, testing.MLA_DECODE)


def _check(case: testing.MlaDecodeCase) -> str:
    inputs = testing.mla_decode_inputs(case) | {"scale": case.scale}
    wanted, lse = jax.jit(reference.mla_decode)(**inputs)
    own, _ = jax.jit(functools.partial(mla_decode, impl="xla"))(**inputs)
    scale = inputs.pop("scale")
    out, got_lse = jax.jit(functools.partial(mla_decode, scale=scale, impl="mosaic_gpu"))(**inputs)
    off = testing.error(out, wanted)
    own_off = testing.error(own, wanted)
    lse_off = testing.lse_error(got_lse, lse)
    good = off <= 2 * own_off and lse_off < 1e-3
    return f"{'ok  ' if good else 'FAIL'} mla_decode, {case.name}: {off:.5f}, fallback {own_off:.5f}, lse {lse_off:.1e}"


class Shape:
    """A batch of equal lengths, over rotating caches in one pool that exceed the L2."""

    def __init__(self, batch: int, heads: int, held: int, packed: bool = False):
        self.batch, self.heads, self.held = batch, heads, held
        per_row = -(-held // PAGE)
        pages = batch * per_row
        self.bytes = pages * PAGE * (RANK + RANK // 32 + 2 * ROPE if packed else 2 * (RANK + ROPE))
        sets = timing.sets_of(self.bytes)
        apart = timing.sets_of(self.bytes, 1 << 20) // sets  # small caches are spread over the pool
        keys = jax.random.split(jax.random.key(0), 4)
        normal = jax.jit(
            lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=(1, 2, 3, 4)
        )
        total = pages * (1 + (sets - 1) * apart)
        c_kv, self.k_pe = normal(keys[0], total, PAGE, RANK), normal(keys[1], total, PAGE, ROPE)
        self.c_kv = jax.jit(fp8.quantize_cache)(c_kv) if packed else c_kv
        self.q_c, self.q_pe = normal(keys[2], batch, 1, heads, RANK), normal(keys[3], batch, 1, heads, ROPE)
        order = np.random.default_rng(0).permutation(pages).reshape(batch, per_row)
        self.tables = [jnp.asarray(order + i * apart * pages, jnp.int32) for i in range(sets)]
        self.seq_lens = jnp.full((batch,), held, jnp.int32)
        self.plan = jax.jit(functools.partial(schedule, heads=heads))(self.seq_lens)

    def work(self) -> timing.Work:
        """The kernel without the step's schedule; the error of two rows is relative to the specification."""

        def call(q_c, q_pe, table, c_kv, k_pe, seq_lens, plan):
            return mla_decode(q_c, q_pe, c_kv, k_pe, table, seq_lens, scale=SCALE, schedule=plan)[0]

        rest = self.c_kv, self.k_pe, self.seq_lens, self.plan
        two = self.q_c[:2], self.q_pe[:2], self.c_kv, self.k_pe, self.tables[0][:2], self.seq_lens[:2]
        wanted, _ = jax.jit(functools.partial(reference.mla_decode, scale=SCALE))(*two)
        args_sets = [(self.q_c, self.q_pe, table, *rest) for table in self.tables]
        return timing.Work(call, args_sets, lambda out: testing.error(out[:2], wanted))


def rows(peers: dict[tuple, dict] | None = None) -> Iterator[dict]:
    """`peers`: microseconds by ("mla_decode", batch, heads, cached tokens), then by name."""
    return (
        _row(at, packed, peers or {})
        for packed in (False, True)
        for at in BARS
        if not (packed and at[1] > 32)
    )


def _row(at: tuple[int, int, int], packed: bool, peers: dict[tuple, dict]) -> dict:
    shape = Shape(*at, packed)
    us, error = shape.work().measure()
    flops = 2 * shape.batch * shape.heads * shape.held * (2 * RANK + ROPE)
    floor = max(shape.bytes / timing.HBM, flops / timing.BF16) * 1e6
    row = {
        "op": "mla_decode fp8 cache" if packed else "mla_decode",
        "batch": at[0],
        "heads": at[1],
        "held": at[2],
        "us": us,
    }
    row |= {"bar": None if packed else BARS[at], "floor": floor}
    return (
        row
        | {"TB/s": shape.bytes / us / 1e6, "TFLOP/s": flops / us / 1e6, "error": error}
        | peers.get(("mla_decode", *at), {})
    )
