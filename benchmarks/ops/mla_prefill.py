"""mla_prefill on a Hopper GPU, compared with FlashInfer, cuDNN and the floor."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ops import timing

from pallas_kernels import testing, tuning
from pallas_kernels.mla_prefill import mla_prefill, reference


class Shape(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    width: int  # of queries and keys
    value: int
    prompts: int = 1  # of equal length, packed in a row; one alone may have a cached prefix

    def ranges(self) -> tuple[jax.Array, jax.Array]:
        """The first key and the stop of each query: of its prompt up to itself."""
        token, each = jnp.arange(self.queries), self.queries // self.prompts
        bounds = token // each * each, self.keys - self.queries + token + 1
        return tuple(jnp.broadcast_to(bound, (self.batch, self.queries)) for bound in bounds)

    def flops(self) -> float:
        """Of the pairs of a query and a key that it attends to."""
        each, before = self.queries // self.prompts, self.keys - self.queries
        pairs = self.prompts * (each * before + each * (each + 1) / 2)
        return 2 * self.batch * self.heads * pairs * (self.width + self.value)

    def nbytes(self) -> int:
        """Of queries, keys, values and outputs, each read or written once."""
        return 2 * self.batch * self.heads * (self.queries + self.keys) * (self.width + self.value)


SHAPES = [
    Shape(1, 128, 4096, 4096, 192, 128),
    Shape(1, 128, 8192, 8192, 192, 128),
    Shape(1, 128, 2048, 16384, 192, 128),
    Shape(8, 16, 4096, 4096, 192, 128),
    Shape(1, 16, 4096, 4096, 192, 128, prompts=16),
    Shape(1, 64, 4096, 4096, 256, 256),
]


def check() -> Iterator[str]:
    """One line per named case that the kernel supports; its error may be twice the fallback's."""
    return (_check(case) for case in testing.MLA_PREFILL if (case.width, case.value) in tuning.MLA_PREFILL)


def _check(case: testing.MlaPrefillCase) -> str:
    inputs, options = testing.mla_prefill_inputs(case), {"scale": case.scale}
    wanted, lse = jax.jit(functools.partial(reference.mla_prefill, **options))(**inputs)
    own, _ = jax.jit(functools.partial(mla_prefill, **options, impl="xla"))(**inputs)
    out, got_lse = jax.jit(functools.partial(mla_prefill, **options, impl="mosaic_gpu"))(**inputs)
    off = testing.error(out, wanted)
    own_off = testing.error(own, wanted)
    lse_off = testing.lse_error(got_lse, lse)
    good = off <= 2 * own_off and lse_off < 1e-3
    return f"{'ok  ' if good else 'FAIL'} mla_prefill, {case.name}: {off:.5f}, fallback {own_off:.5f}, lse {lse_off:.1e}"


def work(shape: Shape) -> timing.Work:
    """The error is of the last queries of two heads."""
    B, N, T, S, H, V, _ = shape
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, dims, jnp.bfloat16)
        for key, dims in zip(keys, ((B, T, N, H), (B, S, N, H), (B, S, N, V)), strict=True)
    )
    first, stop = shape.ranges()
    scale, last, some = H**-0.5, slice(-128, None), slice(0, 2)  # queries, heads
    bounds = first[:1, last], stop[:1, last]
    wanted, _ = reference.mla_prefill(q[:1, last, some], k[:1, :, some], v[:1, :, some], *bounds, scale=scale)
    return timing.Work(
        lambda first, q, k, v, stop: mla_prefill(q, k, v, first, stop, scale=scale)[0],
        [(first, q, k, v, stop)],
        lambda out: testing.error(out[:1, last, some], wanted),
        most=16,
    )


def _row(shape: Shape, peers: dict[tuple, dict]) -> dict:
    B, N, T, S, H, V, prompts = shape
    us, error = work(shape).measure()
    row = {
        "op": "mla_prefill",
        "batch": B,
        "heads": N,
        "queries": T,
        "held": S,
        "prompts": prompts,
        "widths": f"{H}/{V}",
    }
    row |= {"us": us, "floor": max(shape.flops() / timing.BF16, shape.nbytes() / timing.HBM) * 1e6}
    known = peers.get(("mla_prefill", B, N, S), {}) if S == T and H == 192 and prompts == 1 else {}
    return row | {"TFLOP/s": shape.flops() / us / 1e6, "error": error} | known


def rows(peers: dict[tuple, dict] | None = None) -> Iterator[dict]:
    """`peers`: microseconds by ("mla_prefill", batch, heads, tokens), then by name."""
    return (_row(shape, peers or {}) for shape in SHAPES)
