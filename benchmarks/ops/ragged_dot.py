"""ragged_dot and ragged_swiglu on a Hopper GPU, compared with XLA's grouped matmul, JAX's Pallas kernel and the floor."""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ops import timing

from pallas_kernels import choice, fp8, ragged_dot, testing
from pallas_kernels.ragged_dot import reference

# rows -> target in microseconds on an H200, for ragged_dot with 32 experts of 7168 x 2048
BARS = {1024: 235, 16384: 740}
# experts, rows, depth, features of gate and up, whether all experts have equal numbers of rows
SHAPES = [
    *((32, rows, 7168, 2048, even) for rows in BARS for even in (True, False)),
    *((64, rows, 2048, 1408, False) for rows in (6, 48, 384)),
    *((256, rows, 7168, 2048, False) for rows in (8, 64, 512)),
]
# kinds of operands: bfloat16, weights in E4M3, both in E4M3
HELD = ("bf16", "w8", "w8a8")
# operands of each op in addition to the rows
OPERANDS = {ragged_dot.ragged_dot: ("gate",), ragged_dot.ragged_swiglu: ("gate", "up")}
# JAX's kernel: tokens, features and depth in a block, steps in flight, adjacent blocks of features
PALLAS = [(64, 128, 64, 6, 1), (128, 128, 64, 5, 8), (128, 256, 64, 4, 4)]


@jax.jit
def quantized(w: jax.Array) -> fp8.Fp8:
    """A weight at a time, because all would not fit in float32."""
    return jax.lax.map(fp8.quantize_weight, w)


def held(inputs: dict, how: str) -> dict:
    """`inputs` with the operands of kind `how` of HELD."""
    out = dict(inputs)
    if how != "bf16":
        out |= {name: quantized(inputs[name]) for name in ("gate", "up")}
    if how == "w8a8":
        out |= {"x": jax.jit(fp8.quantize)(inputs["x"])}
    return out


def check() -> list[str]:
    """One line per named case, op and kind of operands; the kernel's error may be twice the fallback's."""
    return [line for case in testing.RAGGED_DOT for how in HELD for line in _check(case, how)]


def _check(case: testing.RaggedDotCase, how: str) -> Iterator[str]:
    if how == "w8a8" and case.depth % fp8.GROUP:
        return
    inputs = held(testing.ragged_dot_inputs(case), how)
    for op, names in OPERANDS.items():
        args = [inputs[name] for name in ("x", *names, "group_sizes")]
        title = f"{op.__name__}, {case.name}, {how}"
        if reason := choice.why_not("mosaic_gpu", ragged_dot.CHECKS, *args[:-1]):
            yield f"ok   {title}: refused, {reason}"
            continue
        wanted = getattr(reference, op.__name__)(*args)[: case.rows]
        off, own = (
            testing.error(jax.jit(functools.partial(op, impl=impl))(*args)[: case.rows], wanted)
            for impl in ("mosaic_gpu", "xla")
        )
        yield f"{'ok  ' if off <= 2 * own else 'FAIL'} {title}: {off:.5f}, fallback {own:.5f}"


def deal(rows: int, experts: int, sets: int, even: bool) -> list[jax.Array]:
    """Group sizes: equal; one row each for experts that differ between adjacent sets; or random."""
    if even:
        return [jnp.full((experts,), rows // experts, jnp.int32)] * sets
    rng = np.random.default_rng(0)
    if rows > experts // 2:
        return [
            jnp.asarray(rng.multinomial(rows, np.full(experts, 1 / experts)), jnp.int32) for _ in range(sets)
        ]
    order = np.resize(rng.permutation(experts), sets * rows).reshape(sets, rows)
    return [jnp.asarray(np.bincount(some, minlength=experts), jnp.int32) for some in order]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def weight(key: jax.Array, experts: int, features: int, depth: int) -> jax.Array:
    """An expert at a time, because all would not fit in float32."""
    make = functools.partial(jax.random.normal, shape=(features, depth), dtype=jnp.bfloat16)
    return jax.lax.map(lambda key: make(key) * depth**-0.5, jax.random.split(key, experts))


def random_inputs(shape: tuple[int, ...]) -> dict:
    X, M, D, F, _ = shape
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = {"gate": weight(keys[0], X, F, D), "up": weight(keys[1], X, F, D)}
    return inputs | {"x": jax.random.normal(keys[2], (M, D), jnp.bfloat16)}


def _lax(x, w, sizes):
    return jax.lax.ragged_dot(x, w.swapaxes(1, 2), sizes)


def _pallas(blocks: tuple[int, ...]) -> Callable:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    names = "block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n"
    options = dict(zip(names, blocks, strict=True)) | {"transpose_rhs": True}
    return lambda x, w, sizes: ragged_dot_mgpu.ragged_dot(x, w, group_sizes=sizes, **options)


def _time(call: Callable, args_sets: list[tuple]) -> float | None:
    """The result, or None for a peer that refuses."""
    try:
        return timing.microseconds(lambda sizes, *rest: call(*rest, sizes), args_sets)
    except Exception as fault:
        print(f"a peer refuses: {str(fault)[:100]}", flush=True)
        return None


def bytes_of(inputs: dict, names: Sequence[str]) -> float:
    """The bytes of one expert's weights."""
    leaves = jax.tree.leaves([inputs[name] for name in names])
    return sum(leaf.nbytes for leaf in leaves) / leaves[0].shape[0]


def work(op: Callable, shape: tuple[int, ...], how: str, inputs: dict, names: Sequence[str]) -> timing.Work:
    """Times an op on `inputs` from `held`."""
    X, M, _, _, even = shape
    sets = deal(M, X, timing.sets_of(int(bytes_of(inputs, names) * min(M, X))), even)
    x, weights = inputs["x"], [inputs[name] for name in names]
    wanted = jax.jit(getattr(reference, op.__name__))(x, *weights, sets[0])
    error = functools.partial(testing.error, wanted=wanted)
    if how == "w8":  # the preparation of x is part of every call
        return timing.Work(
            lambda both, *w: op(both[1], *w, both[0]), [((sizes, x), *weights) for sizes in sets], error
        )
    return timing.Work(lambda sizes, *rest: op(*rest, sizes), [(sizes, x, *weights) for sizes in sets], error)


def _row(op: Callable, shape: tuple[int, ...], how: str, inputs: dict, names: Sequence[str]) -> dict:
    X, M, D, F, even = shape
    ours = work(op, shape, how, inputs, names)
    us, error = ours.measure()
    sets = [jax.tree.leaves(first)[0] for first, *_ in ours.args_sets]
    touched = float(np.mean([(np.asarray(sizes) > 0).sum() for sizes in sets]))
    flops, read = 2 * M * D * F * len(names), touched * bytes_of(inputs, names)
    peak = timing.FP8 if how == "w8a8" else timing.BF16
    row = {
        "op": op.__name__,
        "held": how,
        "experts": X,
        "touched": touched,
        "rows": M,
        "even": even,
        "depth": D,
        "features": F,
    }
    row |= {"us": us, "bar": BARS.get(M) if (op, X, how) == (ragged_dot.ragged_dot, 32, "bf16") else None}
    row |= {
        "floor": max(read / timing.HBM, flops / peak) * 1e6,
        "TB/s": read / us / 1e6,
        "TFLOP/s": flops / us / 1e6,
    }
    row["error"], args_sets = error, ours.args_sets
    if how == "bf16" and len(names) == 1:
        row["jax.lax"] = _time(_lax, args_sets)
        if X <= 32:  # its loop over groups is unrolled
            times = [_time(_pallas(blocks), args_sets) for blocks in PALLAS]
            row["jax pallas"] = min((us for us in times if us), default=None)
    return row


def rows(peers: dict[tuple, float] | None = None) -> list[dict]:
    """Gate and up as one SwiGLU, and a plain product of the same depth and width; there are no `peers` of these ops."""
    found = []
    for shape in SHAPES:
        inputs = random_inputs(shape)
        for how in HELD:
            given = held(inputs, how)
            for op, names in OPERANDS.items():
                args = [given[name] for name in ("x", *names)]
                if not choice.why_not("mosaic_gpu", ragged_dot.CHECKS, *args):
                    found.append(_row(op, shape, how, given, names))
                    print(found[-1], flush=True)
    return found
