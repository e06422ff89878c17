"""mla_sparse on a Hopper GPU, compared with XLA, with mla_decode over as many tokens, and with the floor."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ops import mla_decode as dense
from ops import timing

from pallas_kernels import choice, fp8, testing
from pallas_kernels.mla_sparse import CHECKS, mla_sparse, reference

CHOSEN = 2048  # tokens of a query, as DeepSeek-V3.2 chooses
# rows, queries of each, heads: steps, a step with three drafts, a piece of a prompt
SHAPES = [*itertools.product((1, 128), (1,), (16, 64, 128)), (32, 4, 128), (1, 2048, 128)]
HELD = 32_768  # tokens of a row
POOL = 262_144  # tokens of all rows, at least: more than the L2 holds
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
    """Queries that choose tokens of their row at random; each rotation chooses others."""

    def __init__(self, batch: int, tokens: int, heads: int, packed: bool = False):
        self.bytes = batch * tokens * CHOSEN * (RANK + RANK // 32 + 2 * ROPE if packed else 2 * (RANK + ROPE))
        pool = max(POOL, batch * HELD)
        keys = jax.random.split(jax.random.key(0), 4)

        @functools.partial(jax.jit, static_argnums=range(1, 5))
        def normal(key, *shape):
            return jax.random.normal(key, shape, jnp.bfloat16)

        def both(keys, *shape):
            return [normal(key, *shape, width) for key, width in zip(keys, (RANK, ROPE), strict=True)]

        c_kv, self.k_pe = (x[0] for x in both(keys[:2], 1, pool // PAGE, PAGE))
        self.c_kv = jax.jit(fp8.quantize_cache)(c_kv) if packed else c_kv
        self.q_c, self.q_pe = both(keys[2:], batch, tokens, heads)
        rng = np.random.default_rng(0)
        rows = rng.permutation(pool).reshape(batch, -1)

        def chosen():
            return jnp.asarray(
                [[rng.choice(row, CHOSEN, replace=False) for _ in range(tokens)] for row in rows], jnp.int32
            )

        self.slots = [chosen() for _ in range(timing.sets_of(self.bytes, most=128))]
        self.counts = jnp.full((batch, tokens), CHOSEN, jnp.int32)

    def work(self, impl: str, most: int = 128) -> timing.Work:
        """With up to `most` of the rotations. The error of two queries is relative to the specification."""

        def call(q_c, q_pe, slots, c_kv, k_pe, counts):
            return mla_sparse(q_c, q_pe, c_kv, k_pe, slots, counts, scale=SCALE, impl=impl)[0]

        rest = self.c_kv, self.k_pe, self.counts
        args_sets = [(self.q_c, self.q_pe, slots, *rest) for slots in self.slots[:most]]
        return timing.Work(
            call, args_sets, lambda out: testing.error(out[0, :2], self._wanted()), min(most, 64)
        )

    def _wanted(self) -> np.ndarray:
        """The specification's output of two queries, from a pool of what they have chosen."""
        slots = self.slots[0][:1, :2]
        pool = jax.tree.map(
            lambda x: x.reshape(-1, x.shape[-1])[slots.reshape(-1)][:, None], (self.c_kv, self.k_pe)
        )
        some = jnp.arange(slots.size).reshape(slots.shape)
        return reference.mla_sparse(
            self.q_c[:1, :2], self.q_pe[:1, :2], *pool, some, self.counts[:1, :2], scale=SCALE
        )[0][0]


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
    if tokens == 1 and not packed:
        row["XLA"] = shape.work("xla", most=4).program().microseconds()
    if tokens == 1 and not (packed and heads > 32):
        row["dense"] = dense.Shape(batch, heads, CHOSEN, packed).work().program().microseconds()
    return row
