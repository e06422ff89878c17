"""Named cases of every op, their inputs, and how far an answer may be off: one list for tests and benchmarks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class MlaDecodeCase(NamedTuple):
    name: str
    seq_lens: tuple[int, ...]
    heads: int
    tokens: int = 1
    rank: int = 512
    rope: int = 64
    page: int = 64
    spare: int = 3  # pages that no row uses

    @property
    def scale(self) -> float:
        return (128 + self.rope) ** -0.5


MLA_DECODE = [
    MlaDecodeCase("one row, one page", (64,), 16),
    MlaDecodeCase("ragged, one empty", (1, 0, 130, 64, 700, 63), 16),
    MlaDecodeCase("128 heads share tiles", (300, 65, 1), 128),
    MlaDecodeCase("64 heads", (257, 64), 64),
    MlaDecodeCase("20 heads", (100, 3), 20),
    MlaDecodeCase("20 heads, four tokens", (200, 3), 20, tokens=4),
    MlaDecodeCase("two tokens across a tile's edge", (65, 1, 2, 320), 16, tokens=2),
    MlaDecodeCase("eight tokens, eight heads", (9, 70, 5), 8, tokens=8),
    MlaDecodeCase("pages of 16", (33, 190), 16, page=16),
    MlaDecodeCase("pages of 256", (500, 256), 16, page=256),
    MlaDecodeCase("the demo model", (70, 200), 8, rank=256, rope=32),
    MlaDecodeCase("smallest rank", (129,), 32, rank=128, rope=64),
]


def mla_decode_inputs(case: MlaDecodeCase, seed: int = 0, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    """Random, with NaN wherever nothing is held and pages in no order."""
    rng = np.random.default_rng(seed)
    B, most = len(case.seq_lens), max(1, *(-(-n // case.page) for n in case.seq_lens))
    pages = B * most + case.spare
    table = rng.permutation(pages)[: B * most].reshape(B, most).astype(np.int32)
    held = np.zeros((pages, case.page, 1), bool)
    for row, n in zip(table, case.seq_lens, strict=True):
        for k, page in enumerate(row):
            held[page, : max(0, min(case.page, n - k * case.page))] = True
    lens = np.array(case.seq_lens, np.int32)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def cache(width):
        return jnp.asarray(np.where(held, normal(pages, case.page, width), np.nan), dtype)

    return {
        "q_c": jnp.asarray(normal(B, case.tokens, case.heads, case.rank), dtype),
        "q_pe": jnp.asarray(normal(B, case.tokens, case.heads, case.rope), dtype),
        "c_kv": cache(case.rank),
        "k_pe": cache(case.rope),
        "page_table": jnp.asarray(table),
        "seq_lens": jnp.asarray(lens),
    }


def error(got, wanted) -> float:
    """Of all values together, relative; infinite where one is not a number."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    if not np.isfinite(got).all():
        return np.inf
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))
