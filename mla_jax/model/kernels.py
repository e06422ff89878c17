"""The one door to `pallas_kernels`: matmuls, attention and experts by the best implementation here, and which one that is.

Imports are lazy: where no kernel can run, none is loaded."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base import qtensor
from mla_jax.base.axes import TENSOR
from mla_jax.base.qtensor import REORDERED, QTensor
from mla_jax.mesh import across
from mla_jax.model.ops import Weight, plain, take


def linear(x: Float[Array, "*B I"], w: Weight, out: str | None = None) -> Float[Array, "*B O"]:
    """Contracts the last axes of `x` and `w [O I]`; in dtype `out` if given."""

    def matmul(x: Array, w: Weight) -> Array:
        return jax.lax.dot_general(
            x, plain(w, x.dtype), (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=out
        )

    def products(x: Array, w: Weight) -> Array:
        y = (x.reshape(-1).astype(jnp.float32) * plain(w, jnp.dtype("float32"))).sum(-1)
        return y.reshape(*x.shape[:-1], -1).astype(out or x.dtype)

    if isinstance(w, QTensor) and _by_kernel(x, w):
        return _quantized_matmul(x, w, out)
    # one row of packed weights: XLA fuses the unpacking with sums of products, where a GPU's matmul wants it written out first
    # (benchmarks/packed.py; H200, 8,192 x 4,096: FP8 24 us against 83, Q4_K 47 against 82); at 4 rows sums lose, on a CPU always
    one_row = isinstance(w, QTensor) and x.size == x.shape[-1]
    return jax.lax.platform_dependent(x, w, cuda=products, default=matmul) if one_row else matmul(x, w)


def contracted(x: Float[Array, "*B I"], w: Weight, inner: int) -> Float[Array, "*B O"]:
    """`linear` over `inner` numbers in all, of which a device of a mesh may have a part: of `x`, of `w [O I]`, or of both."""
    have, wanted = x.shape[-1], w.shape[-1]
    if have < wanted:
        x = across.gathered(x, TENSOR, along=-1)
    if have > wanted:
        x = across.part(x, wanted, TENSOR, along=-1)
    y = linear(x, w)
    return across.total(y, TENSOR) if wanted < inner else y


def _by_kernel(x: jax.Array, w: QTensor) -> bool:
    """Whether a kernel multiplies: it takes reordered weights, and is faster than XLA for any number of rows up to a chunk."""
    if len(w.shape) != 2 or not w.reordered:
        return False
    rows = jax.ShapeDtypeStruct((x.size // x.shape[-1], x.shape[-1]), x.dtype)
    return implementation("quantized_matmul", rows, operand(w, x.dtype)) != "xla"


def _quantized_matmul(x: Float[Array, "*B I"], w: QTensor, out: str | None) -> Float[Array, "*B O"]:
    from pallas_kernels import quantized_matmul as kernel

    rows = x.reshape(-1, x.shape[-1])
    product = kernel.quantized_matmul(rows, operand(w, x.dtype), out_dtype=jnp.dtype(out or x.dtype))
    return product.reshape(*x.shape[:-1], -1)


def takes_reordered(format: str, shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether a kernel of this device multiplies packed weights `[F D]` or `[X F D]` by rows in `dtype`, once reordered."""
    from pallas_kernels.packed import why_not

    if not kernels_here() or why_not(format, shape):
        return False
    op = "quantized_matmul" if len(shape) == 2 else "ragged_dot"
    row = jax.ShapeDtypeStruct((1, shape[-1]), dtype)
    return implementation(op, row, operand(qtensor.abstract(format + REORDERED, shape), dtype)) != "xla"


def swiglu(x: Float[Array, "*B D"], gate: Weight, up: Weight, down: Weight) -> Float[Array, "*B D"]:
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def implementation(op: str, *arrays: Any) -> str:
    """Who computes an op of pallas_kernels on arrays like these: "mosaic_gpu", "mosaic_tpu" or "xla"."""
    from pallas_kernels import choice

    return choice.choose(op, None, import_module(f"pallas_kernels.{op}").CHECKS, *arrays)


def kernels_here() -> bool:
    """Whether there are kernels for this machine's device at all."""
    from pallas_kernels import choice

    return choice.kernels_here()


def as_if_on(kind: str, platform: str, capability: str) -> AbstractContextManager[None]:
    """Inside, kernels answer for a device that is not here."""
    from pallas_kernels import choice

    return choice.as_if_on(choice.Kind(kind, platform, capability))


def without_kernels() -> AbstractContextManager[None]:
    """Programs that are traced inside are XLA's alone, and may be for another platform than this machine's."""
    from pallas_kernels import choice

    return choice.forbidden()


def load_runtime() -> None:
    """Loads what compiled programs call that were stored by an earlier process, if there are kernels here."""
    from pallas_kernels import choice

    choice.load_runtime()


def who_computes(function: Callable, *args: Any) -> dict[str, str]:
    """Who computes each op of pallas_kernels in `function(*args)`; arguments may be shapes, and nothing is computed."""
    from pallas_kernels import choice

    with choice.recorded() as found:
        # A new function: JAX must not answer from an earlier trace
        jax.eval_shape(lambda *args: function(*args), *args)
    return found


def schedule(seq_lens: Int[Array, " B"], heads: int, tokens: int) -> Any:
    """How a kernel shares a step's work out; for `mla_decode`, once a step for all layers."""
    from pallas_kernels import mla_decode

    return mla_decode.schedule(seq_lens, heads=heads, tokens=tokens)


def mla_decode(
    q_c: Float[Array, "B T N R"],
    q_pe: Float[Array, "B T N E"],
    c_kv: Any,
    k_pe: Float[Array, "G Z E"],
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, " B"],
    scale: float,
    *,
    parts: int = 1,
    schedule: Any = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """Attention over pages of latents `[G Z R]`, a row's last T of `seq_lens` tokens being the queries, and its LSE.

    `parts` as `parts_of_heads` says, `schedule` is of one of these. Where no kernel takes latents in E4M3, but one takes numbers,
    they become numbers first; the fallback converts as it reads."""
    from pallas_kernels import mla_decode as kernel
    from pallas_kernels.fp8 import Fp8, dequantize

    queries = list(zip(*(jnp.split(q, parts, axis=2) for q in (q_c, q_pe)), strict=True))
    if isinstance(c_kv, Fp8):
        numbers = jax.ShapeDtypeStruct(c_kv.codes.shape, k_pe.dtype)
        as_is, wide = (
            implementation("mla_decode", *queries[0], c, k_pe, page_table) for c in (c_kv, numbers)
        )
        c_kv = dequantize(c_kv).astype(k_pe.dtype) if as_is == "xla" and wide != "xla" else c_kv

    def attend(q_c: Array, q_pe: Array) -> tuple[Array, Array]:
        return kernel.mla_decode(
            q_c, q_pe, c_kv, k_pe, page_table, seq_lens, scale=scale, schedule=schedule, impl=impl
        )

    out, lse = zip(*(attend(*one) for one in queries), strict=True)
    return jnp.concatenate(out, axis=2), jnp.concatenate(lse, axis=2)


def mla_sparse(
    q_c: Float[Array, "B T N R"],
    q_pe: Float[Array, "B T N E"],
    c_kv: Any,
    k_pe: Float[Array, "G Z E"],
    slots: Int[Array, "B T K"],
    counts: Int[Array, "B T"],
    scale: float,
) -> Float[Array, "B T N R"]:
    """Attention of each query to the first `counts` of its own slots in a pool of latents `[G Z R]`."""
    from pallas_kernels import mla_sparse as kernel

    return kernel.mla_sparse(q_c, q_pe, c_kv, k_pe, slots, counts, scale=scale)[0]


def parts_of_heads(queries: tuple[int, int, int], c_kv: Any, k_pe: Array, page_table: Array) -> int:
    """Into how many parts of equally many heads `queries` (rows, tokens, heads) must be cut for the kernel over latents in E4M3
    to take each; 1 where it takes all at once, or none."""
    from pallas_kernels.fp8 import Fp8

    rows, tokens, heads = queries
    if not isinstance(c_kv, Fp8):
        return 1
    for parts in (parts for parts in range(1, heads + 1) if heads % parts == 0):
        some = [
            jax.ShapeDtypeStruct((rows, tokens, heads // parts, x.shape[-1]), k_pe.dtype)
            for x in (c_kv.codes, k_pe)
        ]
        if implementation("mla_decode", *some, c_kv, k_pe, page_table) != "xla":
            return parts
    return 1


def rope_append(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B T L"],
    weight: Float[Array, " R"],
    pool: dict[str, Array],
    tokens: tuple[Array, ...],
    *,
    eps: float,
    interleave: bool,
    impl: str | None = None,
) -> tuple[Float[Array, "B T N E"], dict[str, Array]]:
    """The queries' rotary parts, turned, and the pool of latents with the tokens of `kv` in it; it passes other names through.

    `tokens` are their slots in the pool, cosines and sines: a kernel's `Tokens`."""
    from pallas_kernels import rope_append as kernel

    names = kernel.Latents._fields
    pages = kernel.Latents(*(pool[name] for name in names))
    q_pe, pages = kernel.rope_append(
        q, kv, weight, kernel.Tokens(*tokens), pages, eps=eps, interleave=interleave, impl=impl
    )
    return q_pe, pool | dict(zip(names, pages, strict=True))


def mla_prefill(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
    first: Int[Array, "B T"],
    stop: Int[Array, "B T"],
    scale: float,
    *,
    impl: str | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention over heads and its LSE. Each query attends to the keys from its `first` on, up to before its `stop`."""
    from pallas_kernels import mla_prefill as kernel

    return kernel.mla_prefill(q, k, v, first, stop, scale=scale, impl=impl)


def heads_decode(
    q: Float[Array, "B N H"],
    k: Float[Array, "G Z N H"],
    v: Float[Array, "G Z N V"],
    page_table: Int[Array, "#N B P"],
    seq_lens: Int[Array, "#N B"],
    scale: float,
) -> tuple[Float[Array, "B N V"], Float[Array, "B N"]]:
    """Attention over pages of heads, and its LSE; where the table has an axis of N, each head has parts of pages of its own."""
    from pallas_kernels import heads_decode as kernel

    return kernel.heads_decode(q, k, v, page_table, seq_lens, scale=scale)


def merge(
    out_a: Float[Array, "B T N V"],
    lse_a: Float[Array, "B T N"],
    out_b: Float[Array, "B T N V"],
    lse_b: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention over two sets of keys, from the answers of `mla_prefill` for each."""
    from pallas_kernels import mla_prefill as kernel

    return kernel.merge(out_a, lse_a, out_b, lse_b)


def merge_across(
    out: Float[Array, "B T N V"], lse: Float[Array, "B T N"], axis: str
) -> Float[Array, "B T N V"]:
    """Attention over all sets of keys that devices along a mesh axis have, from each one's answer for its own."""
    if across.size(axis) == 1:
        return out
    top = across.maximum(lse, axis)
    shifted = lse - jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.where(jnp.isfinite(lse), jnp.exp(shifted), 0.0)[..., None]
    total, weights = across.total((out * weight, weight), axis)
    return (total / jnp.where(weights > 0, weights, 1.0)).astype(out.dtype)


def fp8_group() -> int:
    """Numbers per scale of a latent in E4M3."""
    from pallas_kernels.fp8 import GROUP

    return GROUP


def fp8(codes: Any, scales: Any) -> Any:
    """A latent in E4M3 as kernels take it."""
    from pallas_kernels.fp8 import Fp8

    return Fp8(codes, scales)


def quantize_latent(c_kv: Float[Array, "B S R"]) -> tuple[Array, Float[Array, "B S groups"]]:
    """Codes in E4M3 and a scale, a power of two, per `fp8_group()` numbers."""
    from pallas_kernels.fp8 import quantize_cache

    codes, scales = quantize_cache(c_kv)
    return codes, scales


def dequantize_latent(
    codes: Array, scales: Float[Array, "B S groups"], dtype: jnp.dtype
) -> Float[Array, "B S R"]:
    from pallas_kernels.fp8 import Fp8, dequantize

    return dequantize(Fp8(codes, scales)).astype(dtype)


def operand(w: Weight, dtype: jnp.dtype) -> Any:
    """A weight as kernels take it: FP8 in blocks and reordered weights stay packed, all others become numbers."""
    from pallas_kernels.fp8 import Fp8

    if isinstance(w, QTensor) and w.reordered:
        return qtensor.as_packed(w)
    return Fp8(*w.parts) if isinstance(w, QTensor) and w.format == "fp8_block" else plain(w, dtype)


def router(
    logits: Float[Array, "n X"],
    bias: Float[Array, " X"] | None,
    some: Bool[Array, " n"] | None,
    **rule: Any,
) -> tuple[Int[Array, "n K"], Float[Array, "n K"]]:
    """The chosen experts and their weights, by the fields of a kernel's `Rule`; the id X for tokens that are not in `some`."""
    from pallas_kernels import router as kernel

    return kernel.router(logits, bias, some, rule=kernel.Rule(**rule))


def largest(x: Float[Array, "n X"], k: int) -> Int[Array, "n k"]:
    """Where the k largest numbers of each row are, of equals the first before the next."""
    from pallas_kernels import router as kernel

    return kernel.xla.largest(x, k)


def moe_decode(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    gate: Weight,
    up: Weight,
    down: Weight,
    *,
    impl: str | None = None,
) -> Float[Array, "n D"]:
    """The weighted sum of each token's experts, none for an id past the last; packed ones are unpacked as they are chosen."""
    from pallas_kernels import moe_decode as kernel

    if not (isinstance(gate, QTensor) or isinstance(up, QTensor) or isinstance(down, QTensor)):
        return kernel.moe_decode(x, topk_ids, topk_weights, gate, up, down, impl=impl)
    chosen = (take(w, topk_ids) for w in (gate, up, down))
    return kernel.xla.of_chosen(x, topk_weights, topk_ids < gate.shape[0], *chosen)


def ragged_swiglu(
    x: Float[Array, "m D"], gate: Weight, up: Weight, group_sizes: Int[Array, " X"],
    *, expected: int | None = None, impl: str | None = None,
) -> Float[Array, "m F"]:  # fmt: skip
    """SwiGLU's first half for rows sorted by expert, each with its expert's matrices; rows past the last group are anything.

    The kernel is tuned to `expected` rows that have a group; None: all."""
    from pallas_kernels import ragged_dot as kernel

    if isinstance(gate, QTensor) and isinstance(up, QTensor) and gate.reordered and gate.format != up.format:
        # the kernel takes two weights of one format
        hidden, factor = (ragged_dot(x, w, group_sizes, expected=expected, impl=impl) for w in (gate, up))
        return jax.nn.silu(hidden) * factor
    return kernel.ragged_swiglu(
        x, operand(gate, x.dtype), operand(up, x.dtype), group_sizes, expected=expected, impl=impl
    )


def ragged_dot(
    x: Float[Array, "m F"],
    w: Weight,
    group_sizes: Int[Array, " X"],
    *,
    expected: int | None = None,
    impl: str | None = None,
) -> Float[Array, "m D"]:
    """Rows sorted by expert, each times its expert's matrix; else as `ragged_swiglu`."""
    from pallas_kernels import ragged_dot as kernel

    return kernel.ragged_dot(x, operand(w, x.dtype), group_sizes, expected=expected, impl=impl)
