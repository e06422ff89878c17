"""mla_sparse on a Hopper GPU, compared with XLA, with mla_decode over as many tokens, and with the floor."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ops import mla_decode as dense
from ops import timing

from pallas_kernels import choice, fp8, testing
from pallas_kernels.mla_sparse import CHECKS, mla_sparse, reference

CHOSEN = 2048  # tokens of a query, as DeepSeek-V3.2 chooses
# rows, queries of each, heads: steps, steps with three drafts, a piece of a prompt
SHAPES = [
    *((batch, 1, heads) for batch in (1, 16, 128) for heads in (16, 64, 128)),
    *((32, 4, heads) for heads in (16, 128)),
    (1, 2048, 128),
]
HELD = 32_768  # tokens of the pool that all rows choose from: more than the L2 holds
RANK, ROPE, PAGE, SCALE = dense.RANK, dense.ROPE, dense.PAGE, dense.SCALE


def check() -> Iterator[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    return map(_check, testing.MLA_SPARSE)


def _check(case: testing.MlaSparseCase) -> str:
    inputs = testing.mla_sparse_inputs(case)
    title = f"mla_sparse, {case.name}"
    arrays = (inputs[name] for name in ("q_c", "q_pe", "c_kv", "k_pe", "slots"))
    if reason := choice.why_not("mosaic_gpu", CHECKS, *arrays):
        return f"ok   {title}: refused, {reason}"
    wanted, lse = reference.mla_sparse(**inputs, scale=case.scale)

    def computed(impl: str) -> tuple:
        return jax.jit(functools.partial(mla_sparse, scale=case.scale, impl=impl))(**inputs)

    (out, got_lse), (own, _) = computed("mosaic_gpu"), computed("xla")
    off, own_off = testing.error(out, wanted), testing.error(own, wanted)
    lse_off = testing.lse_error(got_lse, lse)
    good = off <= 2 * own_off and lse_off < 1e-3
    return f"{'ok  ' if good else 'FAIL'} {title}: {off:.5f}, fallback {own_off:.5f}, lse {lse_off:.1e}"


class Shape:
    """Queries that choose tokens at random all over a pool: each rotation chooses others."""

    def __init__(self, batch: int, tokens: int, heads: int, packed: bool = False):
        queries = batch * tokens
        token = RANK + RANK // 32 + 2 * ROPE if packed else 2 * (RANK + ROPE)
        self.bytes = queries * CHOSEN * token
        sets = timing.sets_of(self.bytes, most=128)
        # Rows of a step have tokens of their own; the queries of a prompt choose from the same
        pool = max(HELD, batch * CHOSEN * sets)
        keys = jax.random.split(jax.random.key(0), 4)

        @functools.partial(jax.jit, static_argnums=range(1, 5))
        def normal(key, *shape):
            return jax.random.normal(key, shape, jnp.bfloat16)

        c_kv, self.k_pe = (
            normal(key, 1, pool // PAGE, PAGE, n)[0] for key, n in zip(keys, (RANK, ROPE), strict=False)
        )
        self.c_kv = jax.jit(fp8.quantize_cache)(c_kv) if packed else c_kv
        self.q_c, self.q_pe = (
            normal(key, batch, tokens, heads, n) for key, n in zip(keys[2:], (RANK, ROPE), strict=True)
        )
        rng = np.random.default_rng(0)
        self.slots = [jnp.asarray(_chosen(rng, batch, tokens, pool), jnp.int32) for _ in range(sets)]
        self.counts = jnp.full((batch, tokens), CHOSEN, jnp.int32)

    def work(self, impl: str) -> timing.Work:
        """The error of two queries is relative to the specification."""

        def call(q_c, q_pe, slots, c_kv, k_pe, counts):
            return mla_sparse(q_c, q_pe, c_kv, k_pe, slots, counts, scale=SCALE, impl=impl)[0]

        two = (x[:2, :2] for x in (self.q_c, self.q_pe))
        wanted, _ = reference.mla_sparse(
            *two, self.c_kv, self.k_pe, self.slots[0][:2, :2], self.counts[:2, :2], scale=SCALE
        )
        rest = self.c_kv, self.k_pe, self.counts
        args_sets = [(self.q_c, self.q_pe, slots, *rest) for slots in self.slots]
        return timing.Work(call, args_sets, lambda out: testing.error(out[:2, :2], wanted))


def _chosen(rng: np.random.Generator, batch: int, tokens: int, pool: int) -> np.ndarray:
    """`[batch tokens CHOSEN]`: rows share no token, queries of a row may."""
    per_row = pool // batch
    rows = rng.permutation(pool)[: batch * per_row].reshape(batch, per_row)
    return np.stack([[rng.permutation(row)[:CHOSEN] for _ in range(tokens)] for row in rows])


def rows(peers: dict | None = None) -> Iterator[dict]:
    """There are no `peers` of this op."""
    for packed in (False, True):
        yield from (_row(shape, packed) for shape in SHAPES)


def _row(at: tuple[int, int, int], packed: bool) -> dict:
    batch, tokens, heads = at
    shape = Shape(*at, packed)
    us, error = shape.work("mosaic_gpu").measure()
    flops = 2 * batch * tokens * heads * CHOSEN * (2 * RANK + ROPE)
    op = "mla_sparse fp8 cache" if packed else "mla_sparse"
    row = {"op": op, "batch": batch, "tokens": tokens, "heads": heads, "us": us}
    row["floor"] = max(shape.bytes / timing.HBM, flops / timing.BF16) * 1e6
    row |= {"TB/s": shape.bytes / us / 1e6, "TFLOP/s": flops / us / 1e6, "error": error}
    if tokens == 1:
        row["XLA"] = shape.work("xla").program().microseconds()
        if not packed or heads <= 32:
            row["dense"] = dense.Shape(batch, heads, CHOSEN, packed).work().program().microseconds()
    return row
