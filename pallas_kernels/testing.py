"""Named cases of every op, their inputs and error measures: one list for tests and benchmarks."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8
from pallas_kernels.router import Rule


class MlaDecodeCase(NamedTuple):
    name: str
    seq_lens: tuple[int, ...]
    heads: int
    tokens: int = 1
    rank: int = 512
    rope: int = 64
    page: int = 64
    spare: int = 3  # unused pages
    packed: bool = False  # the latent in E4M3
    poisoned: bool = False  # the key of one cached token of the longest row is NaN
    # Scale of a packed latent's numbers, which are at most 60,000; queries are scaled by its inverse
    size: float = 1.0

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
    MlaDecodeCase("E4M3, ragged, one empty", (1, 0, 130, 64, 700, 63), 16, packed=True),
    MlaDecodeCase("E4M3, 32 queries, pages of 16", (200, 3), 8, tokens=4, page=16, packed=True),
    MlaDecodeCase(
        "E4M3, the demo model, pages of 256", (70, 300), 8, rank=256, rope=32, page=256, packed=True
    ),
    MlaDecodeCase("E4M3, smallest rank", (129, 20), 20, rank=128, page=32, packed=True),
    MlaDecodeCase(
        "E4M3, eight heads, two tokens, smallest rank, largest numbers",
        (129, 20),
        8,
        2,
        128,
        page=32,
        packed=True,
        size=2.0**13,
    ),
    MlaDecodeCase("E4M3, small numbers", (150, 40), 16, rank=256, page=16, packed=True, size=2.0**-10),
    MlaDecodeCase("NaN in what is held", (70, 0, 400), 16, poisoned=True),
    MlaDecodeCase("64 heads, NaN in what is held", (257, 64), 64, poisoned=True),
    MlaDecodeCase("E4M3, NaN in what is held", (70, 0, 200), 16, packed=True, poisoned=True),
]


def mla_decode_inputs(
    case: MlaDecodeCase, seed: int = 0, dtype=jnp.bfloat16
) -> dict[str, jax.Array | fp8.Fp8]:
    """Random inputs, with NaN in unused slots and pages in random order."""
    rng = np.random.default_rng(seed)
    B = len(case.seq_lens)
    most = max(1, *(-(-n // case.page) for n in case.seq_lens))
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

    def keys():
        longest = int(lens.argmax())
        page, slot = divmod(lens[longest] // 2, case.page)
        return (
            cache(case.rope).at[table[longest, page], slot].set(jnp.nan)
            if case.poisoned
            else cache(case.rope)
        )

    def latent():
        if not case.packed:
            return cache(case.rank)
        groups = pages, case.page, case.rank // fp8.GROUP
        values = np.clip(normal(*groups, fp8.GROUP) * np.exp2(normal(*groups, 1)) * case.size, -6e4, 6e4)
        packed = fp8.quantize_cache(jnp.asarray(values).reshape(pages, case.page, case.rank))
        return fp8.Fp8(*(jnp.where(held, x, jnp.nan).astype(x.dtype) for x in packed))

    return {
        "q_c": jnp.asarray(normal(B, case.tokens, case.heads, case.rank) / case.size, dtype),
        "q_pe": jnp.asarray(normal(B, case.tokens, case.heads, case.rope), dtype),
        "c_kv": latent(),
        "k_pe": keys(),
        "page_table": jnp.asarray(table),
        "seq_lens": jnp.asarray(lens),
    }


Ranges = tuple[tuple[tuple[int, int], ...], ...]  # rows of queries' (first, stop)


def ragged(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], causal: bool = True) -> Ranges:
    """A prompt a row, whose queries are the last of its keys and attend up to themselves, or to all of it."""

    def row(asked, held):
        return tuple((0, max(held - asked + t + 1, 0) if causal else held) for t in range(asked))

    return tuple(itertools.starmap(row, zip(q_lens, kv_lens, strict=True)))


def packed(lens: tuple[int, ...]) -> Ranges:
    """Prompts one after the other in one row, whose queries attend to their prompt up to themselves."""
    starts = itertools.accumulate(lens, initial=0)
    return (tuple((start, start + t + 1) for start, n in zip(starts, lens, strict=False) for t in range(n)),)


def packed_prefixes(lens: tuple[int, ...], prefixes: tuple[int, ...], page: int = 64) -> Ranges:
    """The same queries before keys of prefixes of their prompts, each from a page's start: every query attends to its prefix."""
    starts = itertools.accumulate((-(-n // page) * page for n in prefixes), initial=0)
    return (
        tuple(
            (start, start + held)
            for start, held, n in zip(starts, prefixes, lens, strict=False)
            for _ in range(n)
        ),
    )


def scattered(queries: int, keys: int, rows: int = 1, seed: int = 0) -> Ranges:
    """Random ranges, some of them empty."""
    rng = np.random.default_rng(seed)
    return tuple(
        tuple((int(a), int(b)) for a, b in rng.integers(0, keys + 1, (queries, 2))) for _ in range(rows)
    )


class MlaPrefillCase(NamedTuple):
    name: str
    ranges: Ranges  # rows may be shorter than others
    heads: int = 2
    width: int = 192  # of queries and keys
    value: int = 128
    spare: int = 5  # tokens of padding after the longest row
    poisoned: bool = False  # a key that about half of the first row's queries attend to is NaN

    @property
    def scale(self) -> float:
        return self.width**-0.5

    @property
    def held(self) -> tuple[int, ...]:
        """The largest stop of each row."""
        return tuple(max((stop for first, stop in row if first < stop), default=0) for row in self.ranges)


LENS = 3, 70, 1, 130, 64, 200
MLA_PREFILL = [
    MlaPrefillCase("one row", ragged((128,), (128,)), spare=0),
    MlaPrefillCase("ragged, one row empty", ragged((1, 0, 130, 64), (1, 0, 130, 64)), heads=4),
    MlaPrefillCase("behind a cached prefix", ragged((5, 64, 1), (300, 65, 260))),
    MlaPrefillCase("several blocks of queries and of keys", ragged((300, 40), (700, 513))),
    MlaPrefillCase("two blocks share tiles", ragged((400, 130, 257), (700, 130, 300))),
    MlaPrefillCase("a piece of a prefix, all of it seen", ragged((70, 3, 0), (256, 1, 9), causal=False)),
    MlaPrefillCase("queries without a key", ragged((20, 9, 2), (7, 0, 2))),
    MlaPrefillCase("queries without a key, nothing causal", ragged((20, 9), (7, 0), causal=False)),
    MlaPrefillCase("20 heads", ragged((33, 2), (34, 50)), heads=20),
    MlaPrefillCase("many short rows", ragged((3, 1, 2, 3, 1, 4, 2, 1), (5, 9, 2, 3, 1, 6, 7, 2)), heads=4),
    MlaPrefillCase("heads of 256", ragged((140,), (150,)), width=256, value=256),
    MlaPrefillCase("the demo model", ragged((90, 150), (90, 200)), heads=8, width=64, value=32),
    MlaPrefillCase("NaN in what is held", ragged((70, 20), (200, 20)), poisoned=True),
    MlaPrefillCase("prompts packed in a row", packed(LENS), spare=40),
    MlaPrefillCase(
        "packed before prefixes of their own", packed_prefixes(LENS, (130, 0, 64, 500, 7, 260)), spare=40
    ),
    MlaPrefillCase("packed, heads of 256", packed(LENS), width=256, value=256),
    MlaPrefillCase("packed, NaN in what one of them holds", packed((150, 200, 33)), poisoned=True),
    MlaPrefillCase("packed, tiles that not all of a cluster need", packed((150, 60)), heads=4),
    MlaPrefillCase("packed behind a long one", packed((400, 90))),
    MlaPrefillCase("a range per query", scattered(300, 500, rows=2)),
    MlaPrefillCase("a window that moves", (tuple((max(t - 200, 0), t + 1) for t in range(500)),), spare=0),
]


def mla_prefill_inputs(case: MlaPrefillCase, seed: int = 0, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    """Random inputs, with NaN in queries that attend to nothing and past every row's largest stop."""
    rng = np.random.default_rng(seed)
    bounds = np.zeros((2, len(case.ranges), max(map(len, case.ranges)) + case.spare), np.int32)
    for b, row in enumerate(case.ranges):
        bounds[:, b, : len(row)] = np.array(row, np.int32).reshape(-1, 2).T
    first, stop = bounds

    def normal(some, width):
        x = rng.standard_normal((*some.shape, case.heads, width), np.float32)
        return jnp.asarray(np.where(some[..., None, None], x, np.nan), dtype)

    held = np.arange(max(case.held) + case.spare) < np.array(case.held)[:, None]
    k = normal(held, case.width)
    return {
        "q": normal(first < stop, case.width),
        "k": k.at[0, int(np.median(stop[0][first[0] < stop[0]]))].set(jnp.nan) if case.poisoned else k,
        "v": normal(held, case.value),
        "first": jnp.asarray(first),
        "stop": jnp.asarray(stop),
    }


def error(got, wanted) -> float:
    """The relative error over all values; infinite if `got` is infinite somewhere, or has NaN at other places than `wanted`."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    some = ~np.isnan(wanted)
    if (np.isnan(got) == some).any() or not np.isfinite(got[some]).all():
        return np.inf
    return float(np.linalg.norm(got[some] - wanted[some]) / max(np.linalg.norm(wanted[some]), 1e-30))


def lse_error(got, wanted) -> float:
    """The largest difference; infinite if `got` has NaN or minus infinity at other places than `wanted`, or another infinity."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    empty, nan = np.isneginf(wanted), np.isnan(wanted)
    some = ~(empty | nan)
    if (np.isneginf(got) != empty).any() or (np.isnan(got) != nan).any() or not np.isfinite(got[some]).all():
        return np.inf
    return float(np.abs(got[some] - wanted[some]).max(initial=0))


class RaggedDotCase(NamedTuple):
    name: str
    group_sizes: tuple[int, ...]
    depth: int
    features: int
    spare: int = 5  # rows of no group

    @property
    def rows(self) -> int:
        return sum(self.group_sizes)


RAGGED_DOT = [
    RaggedDotCase("one row", (1,), 64, 256, spare=0),
    RaggedDotCase("ragged, some groups empty", (3, 0, 9, 1, 0), 192, 256),
    RaggedDotCase("one group has everything", (0, 0, 70, 0), 128, 136),
    RaggedDotCase("a row each", (1,) * 12, 128, 576),
    RaggedDotCase("groups across the edges of tiles", (130, 5, 260, 7), 64, 264),
    RaggedDotCase("few groups have rows", (0,) * 30 + (2, 1) + (0,) * 8 + (4,), 128, 384),
    RaggedDotCase("many groups", (0,) * 400 + (2, 1) + (0,) * 95 + (3,), 128, 72),
    RaggedDotCase("nothing", (0, 0, 0), 64, 128),
    RaggedDotCase("narrower than a block", (20, 12), 320, 96),
    RaggedDotCase("tiles of all sizes", (41, 0, 67, 98, 79, 124, 131, 139, 85, 91, 3, 452), 128, 72),
]
# pairs of an op and its kind of operands (bfloat16, E4M3 weights, both E4M3) that together cover every part of the kernel
RAGGED_DOT_KINDS = [
    ("ragged_dot", "bf16"),
    ("ragged_swiglu", "bf16"),
    ("ragged_swiglu", "w8"),
    ("ragged_dot", "w8a8"),
]


def ragged_dot_inputs(case: RaggedDotCase, seed: int = 0, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    """Random inputs, with NaN in the rows of no group."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((case.rows + case.spare, case.depth), np.float32)
    x[case.rows :] = np.nan
    shape = len(case.group_sizes), case.features, case.depth
    gate, up = (rng.standard_normal(shape, np.float32) * case.depth**-0.5 for _ in range(2))
    arrays = {"x": x, "gate": gate, "up": up}
    return {name: jnp.asarray(a, dtype) for name, a in arrays.items()} | {
        "group_sizes": jnp.array(case.group_sizes, jnp.int32)
    }


class QuantizedMatmulCase(NamedTuple):
    name: str
    rows: int
    depth: int
    features: int


QUANTIZED_MATMUL = [
    QuantizedMatmulCase("one row", 1, 256, 256),
    QuantizedMatmulCase("the last block of scales is short", 5, 640, 576),
    QuantizedMatmulCase("two tiles", 130, 256, 136),
    QuantizedMatmulCase("a step", 64, 128, 512),
    QuantizedMatmulCase("rows of all sizes", 20, 384, 200),
]


def quantized_matmul_inputs(
    case: QuantizedMatmulCase, seed: int = 0, dtype=jnp.bfloat16
) -> dict[str, jax.Array]:
    """Random inputs before quantisation; rows differ in size by powers of ten."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** rng.integers(-3, 4, (case.rows, 1))
    x = rng.standard_normal((case.rows, case.depth), np.float32) * size
    w = rng.standard_normal((case.features, case.depth), np.float32) * case.depth**-0.5
    return {"x": jnp.asarray(x, dtype), "w": jnp.asarray(w, dtype)}


class RopeAppendCase(NamedTuple):
    name: str
    # Per row, a letter per token: n for a new one, - for padding, > for one that has no room
    tokens: tuple[str, ...]
    heads: int
    width: int = 192  # of a query
    rank: int = 512
    rope: int = 64
    pages: int = 5
    page: int = 64
    interleave: bool = True


ROPE_APPEND = [
    RopeAppendCase("one row", ("n",), 16),
    RopeAppendCase("a row is done, one has no room", ("n", "-", ">", "n"), 16),
    RopeAppendCase("nothing is new", ("-", ">"), 4),
    RopeAppendCase("tokens between padding, some without room", ("-nn-n>", "n----n"), 20),
    RopeAppendCase("eight tokens, pages of 16", ("nnnnnnnn", "nnnnn---"), 8, page=16),
    RopeAppendCase("pages of one token, all of them new", ("nn", "nn"), 6, pages=4, page=1),
    RopeAppendCase("halves are pairs, odd pages", ("nn", "-n"), 5, page=7, interleave=False),
    RopeAppendCase("heads of 256", ("n",), 3, width=256),
    RopeAppendCase("rotary width 32, smallest rank", ("n", "n"), 8, width=128, rank=128, rope=32),
    RopeAppendCase("rank 256, halves of 32", ("n", "n"), 8, width=128, rank=256, rope=32, interleave=False),
]


def rope_append_inputs(case: RopeAppendCase, seed: int = 0, dtype=jnp.bfloat16) -> dict:
    """Random inputs, tokens all over the pool, with NaN in padding and in about half of the other slots."""
    from pallas_kernels.rope_append import Latents, Tokens

    rng = np.random.default_rng(seed)
    letters = np.array([list(row) for row in case.tokens])
    slots = case.pages * case.page
    limit = np.iinfo(np.int32)
    some = letters == "n"
    at = np.where(
        letters == "-",
        rng.choice([-1, -slots, limit.min], letters.shape),
        rng.choice([slots, limit.max], letters.shape),
    )
    at[some] = rng.permutation(slots)[: some.sum()]
    held = rng.random((case.pages, case.page)) < 0.5

    def normal(*shape, where=None):
        x = rng.standard_normal(shape, np.float32)
        return jnp.asarray(x if where is None else np.where(where[..., None], x, np.nan), dtype)

    def pool(width):
        return normal(case.pages, case.page, width, where=held)

    angles = rng.uniform(0, 7, (*some.shape, case.rope // 2)).astype(np.float32)
    return {
        "q": normal(*some.shape, case.heads, case.width),
        "kv": normal(*some.shape, case.rank + case.rope, where=some),
        "weight": normal(case.rank),
        "tokens": Tokens(jnp.asarray(at, jnp.int32), jnp.cos(angles), jnp.sin(angles)),
        "cache": Latents(pool(case.rank), pool(case.rope)),
        "eps": 1e-6,
        "interleave": case.interleave,
    }


def rope_append_errors(got, wanted, inputs: dict) -> dict[str, float]:
    """Errors of the queries and of the written slots; `others` is 0 if no bit of another slot has changed, else infinite."""
    (q, cache), (q_wanted, cache_wanted) = got, wanted
    errors, others = {"q": error(q, q_wanted)}, 0.0
    for name, *arrays in zip(("c_kv", "k_pe"), cache, cache_wanted, inputs["cache"], strict=True):
        new, new_wanted, old = (np.asarray(x).reshape(-1, x.shape[-1]) for x in arrays)
        at = np.asarray(inputs["tokens"].slot).reshape(-1)
        at = at[(at >= 0) & (at < len(old))]
        errors[name] = error(new[at], new_wanted[at])
        if np.delete(new, at, axis=0).tobytes() != np.delete(old, at, axis=0).tobytes():
            others = np.inf
    return errors | {"others": others}


class MoeDecodeCase(NamedTuple):
    name: str
    ids: tuple[tuple[int, ...], ...]  # per token; `experts` means none
    experts: int
    model: int
    width: int


MOE_DECODE = [
    MoeDecodeCase("one token, one expert", ((2,),), 4, 64, 64),
    MoeDecodeCase("experts for none", ((3, 1, 5), (5, 5, 5), (0, 5, 4)), 5, 192, 128),
    MoeDecodeCase("all choose the same", ((1, 0), (1, 0), (1, 0), (1, 0)), 2, 128, 320),
    MoeDecodeCase("eight tokens", tuple((t, (3 * t + 1) % 8) for t in range(8)), 8, 256, 192),
    MoeDecodeCase("more pieces than multiprocessors", ((5, 2, 0, 7, 1, 6),), 8, 512, 704),
]


def moe_decode_inputs(case: MoeDecodeCase, seed: int = 0, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    """Random inputs, with NaN in tokens without experts and in the weights of absent experts."""
    rng = np.random.default_rng(seed)
    ids = np.array(case.ids, np.int32)
    some = ids < case.experts

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def weights(*shape):
        return jnp.asarray(normal(case.experts, *shape) * shape[1] ** -0.5, dtype)

    x = np.where(some.any(1, keepdims=True), normal(len(ids), case.model), np.nan)
    share = np.where(some, rng.uniform(0.1, 2, ids.shape), np.nan).astype(np.float32)
    up, down = (case.width, case.model), (case.model, case.width)
    return {
        "x": jnp.asarray(x, dtype),
        "topk_ids": jnp.asarray(ids),
        "topk_weights": jnp.asarray(share),
        "gate": weights(*up),
        "up": weights(*up),
        "down": weights(*down),
    }


class RouterCase(NamedTuple):
    name: str
    tokens: int
    experts: int
    rule: Rule
    has_bias: bool = False
    padding: int = 0  # tokens that choose nothing
    equal: bool = False  # all scores


V3_RULE = Rule(8, "sigmoid", 8, 4, norm_topk_prob=True, scale=2.5)
ROUTER = [
    RouterCase("V2-Lite, one token", 1, 64, Rule(6)),
    RouterCase("V2-Lite, some tokens are padding", 256, 64, Rule(6), padding=17),
    RouterCase("V2", 8, 160, Rule(6, n_group=8, topk_group=3, scale=16.0)),
    RouterCase("V3, one token", 1, 256, V3_RULE, has_bias=True),
    RouterCase("V3", 64, 256, V3_RULE, has_bias=True, padding=3),
    RouterCase("V3, all scores are equal", 2, 256, V3_RULE, has_bias=True, equal=True),
    RouterCase("Kimi-K2", 8, 384, V3_RULE._replace(n_group=1, topk_group=1), has_bias=True),
    RouterCase("normalised, all scores are equal", 3, 128, Rule(4, norm_topk_prob=True), equal=True),
    RouterCase("sigmoid without a bias", 2, 96, Rule(3, "sigmoid", 3, 1)),
    RouterCase("groups of one expert", 2, 32, Rule(2, n_group=32, topk_group=5), has_bias=True),
    RouterCase("every token is padding", 2, 64, Rule(1), padding=2),
]


def router_inputs(case: RouterCase, seed: int = 0) -> dict:
    """Random logits and biases in steps of a quarter, so that many are equal; NaN in tokens that choose nothing."""
    rng = np.random.default_rng(seed)
    some = np.ones(case.tokens, bool)
    some[rng.permutation(case.tokens)[: case.padding]] = False

    def steps(*shape):
        return (
            0.25 if case.equal else np.round(4 * rng.standard_normal(shape)) / 4 + 0.0
        )  # sorting tells -0 from 0

    logits = np.where(some[:, None], steps(case.tokens, case.experts), np.nan)
    logits = np.broadcast_to(logits, (case.tokens, case.experts))
    bias = np.broadcast_to(steps(case.experts), (case.experts,))
    return {
        "logits": jnp.asarray(logits, jnp.float32),
        "bias": jnp.asarray(bias, jnp.float32) if case.has_bias else None,
        "some": jnp.asarray(some) if case.padding else None,
    }


def router_error(got, wanted, inputs: dict) -> float:
    """The relative error of the weights; infinite if an id differs."""
    some = np.ones(len(wanted[0]), bool) if inputs["some"] is None else np.asarray(inputs["some"])
    same = np.array_equal(got[0], wanted[0])
    return error(got[1][some], wanted[1][some]) if same else np.inf


class HeadsDecodeCase(NamedTuple):
    name: str
    lens: tuple[tuple[int, ...], ...]  # of each head (or of all), of each row
    heads: int
    key: int = 192
    value: int = 128
    page: int = 64


HEADS_DECODE = [
    HeadsDecodeCase("heads share pages", ((70, 1, 200),), 2),
    HeadsDecodeCase("each head has its own", ((70, 64), (0, 300), (1, 63), (128, 129)), 4),
    HeadsDecodeCase("nothing is held", ((0, 0), (0, 0)), 2, 64, 64),
    HeadsDecodeCase("small heads, many tokens", ((1000,), (5,), (517,)), 3, 64, 64),
    HeadsDecodeCase("wide heads", ((90, 65),), 1, 256, 256),
]


def heads_decode_inputs(case: HeadsDecodeCase, seed: int = 0, dtype=jnp.bfloat16) -> dict:
    """Random inputs, with NaN in slots and table entries that are not read."""
    rng = np.random.default_rng(seed)
    lens = np.array(case.lens, np.int32)
    own, rows = len(lens) > 1, lens.shape[1]
    width = max(-(-int(lens.max()) // case.page), 1) + 1
    count = width * lens.size + 3  # parts, or pages
    pages = -(-count // case.heads) if own else count
    table = rng.permutation(pages * case.heads if own else pages)[: lens.size * width]
    table = table.reshape(*lens.shape, width).astype(np.int32)
    used = np.zeros((pages, case.page, case.heads), bool)
    for (head, row), held in np.ndenumerate(lens):
        slots = np.arange(held)
        entry = table[head, row, slots // case.page]
        page, lane = np.divmod(entry, case.heads) if own else (entry, slice(None))
        used[page, slots % case.page, lane] = True
        table[head, row, -(-held // case.page) :] = rng.choice([-5, 1 << 30])

    def cache(numbers):
        values = rng.standard_normal((*used.shape, numbers), np.float32)
        return jnp.asarray(np.where(used[..., None], values, np.nan), dtype)

    return {
        "q": jnp.asarray(rng.standard_normal((rows, case.heads, case.key), np.float32), dtype),
        "k": cache(case.key),
        "v": cache(case.value),
        "page_table": jnp.asarray(table),
        "seq_lens": jnp.asarray(lens),
    }


class MlaSparseCase(NamedTuple):
    name: str
    counts: tuple[tuple[int, ...], ...]  # of each query of each row
    heads: int
    most: int = 128  # slots of a query
    rank: int = 512
    rope: int = 64
    page: int = 64
    packed: bool = False  # the latent in E4M3
    poisoned: bool = False  # the key of a token that only the first query attends to is NaN

    @property
    def scale(self) -> float:
        return (128 + self.rope) ** -0.5


MLA_SPARSE = [
    MlaSparseCase("one query, one tile", ((64,),), 16, most=64),
    MlaSparseCase("ragged, one attends to nothing", ((1,), (0,), (130,), (200,), (63,)), 16, most=200),
    MlaSparseCase("128 heads", ((300,), (65,)), 128, most=320),
    MlaSparseCase("64 heads, drafts", ((257, 256, 64), (1, 2, 3)), 64, most=260),
    MlaSparseCase("20 heads, a prompt", (tuple(range(1, 9)),), 20, most=8),
    MlaSparseCase("pages of 16", ((33,), (190,)), 72, most=192, page=16),
    MlaSparseCase("smallest rank", ((129, 70),), 32, most=160, rank=128),
    MlaSparseCase("NaN in what is chosen", ((70,), (0,), (200,)), 16, most=200, poisoned=True),
    MlaSparseCase("E4M3", ((1,), (0,), (130,), (200,)), 16, most=200, packed=True),
    MlaSparseCase("E4M3, 128 heads, smallest rank", ((129, 70),), 128, most=160, rank=256, packed=True),
    MlaSparseCase("E4M3, NaN in what is chosen", ((70,), (130,)), 64, packed=True, poisoned=True, most=130),
]


def mla_sparse_inputs(
    case: MlaSparseCase, seed: int = 0, dtype=jnp.bfloat16
) -> dict[str, jax.Array | fp8.Fp8]:
    """Random inputs, with NaN in slots that nobody chose, and anything in slots past a count."""
    rng = np.random.default_rng(seed)
    counts = np.array(case.counts, np.int32)
    pages = -(-2 * case.most // case.page) + 1
    total = pages * case.page
    slots = np.stack([rng.permutation(total)[: case.most] for _ in counts.flat]).astype(np.int32)
    slots = slots.reshape(*counts.shape, case.most)
    valid = np.arange(case.most) < counts[..., None]
    held = np.zeros(total, bool)
    held[slots[valid]] = True
    some = held.reshape(pages, case.page, 1)
    shape = *counts.shape, case.heads

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def pool(width):
        return jnp.asarray(np.where(some, normal(pages, case.page, width), np.nan), dtype)

    def keys():
        if not case.poisoned:
            return pool(case.rope)
        own = np.setdiff1d(slots[0, 0, : counts[0, 0]], slots[1:][valid[1:]])
        return pool(case.rope).at[np.unravel_index(own[-1], (pages, case.page))].set(jnp.nan)

    def latent():
        if not case.packed:
            return pool(case.rank)
        groups = pages, case.page, case.rank // fp8.GROUP
        values = normal(*groups, fp8.GROUP) * np.exp2(normal(*groups, 1))
        packed = fp8.quantize_cache(jnp.asarray(values.reshape(pages, case.page, case.rank)))
        return fp8.Fp8(*(jnp.where(some, x, jnp.nan).astype(x.dtype) for x in packed))

    return {
        "q_c": jnp.asarray(normal(*shape, case.rank), dtype),
        "q_pe": jnp.asarray(normal(*shape, case.rope), dtype),
        "c_kv": latent(),
        "k_pe": keys(),
        "slots": jnp.asarray(np.where(valid, slots, rng.choice([-7, 1 << 30, 0], slots.shape)), jnp.int32),
        "counts": jnp.asarray(counts),
    }
