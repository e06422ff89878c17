"""The experts inside JAX programs: under jit and in loops, on the CPU where XLA runs there, and beside the GPU where it runs on one.

    y = ffi.forward(layer, x, topk_ids, topk_weights)

On a GPU this is two halves, and what is computed between them overlaps with the experts' work:

    ticket = ffi.submit(layer, x, topk_ids, topk_weights)
    shared = mlp(ticket.x)                  # what reads ticket.x comes after the submission
    y = ffi.collect(ticket, after=shared)   # and what is given as `after` comes before the wait

A program names a layer by a number and does not hold it: keep the `Experts` while programs use it. A closed one is an error."""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike, DTypeLike

from cpu_experts import Closed, Experts
from cpu_experts.library import FfiLayer, Unsupported, load_ffi

__all__ = ["Ticket", "collect", "forward", "submit", "why_not"]


@partial(
    jax.tree_util.register_dataclass, data_fields=("number", "x", "topk_ids", "topk_weights"), meta_fields=("layer", "dtype")
)
@dataclass(frozen=True)
class Ticket:
    """What was submitted. `x` are the rows themselves, at a time after the submission."""

    number: jax.Array
    x: jax.Array
    topk_ids: jax.Array
    topk_weights: jax.Array
    layer: int
    dtype: np.dtype


def forward(
    experts: Experts, x: ArrayLike, topk_ids: ArrayLike, topk_weights: ArrayLike, dtype: DTypeLike | None = None
) -> jax.Array:
    """`Experts.forward` in a program: rows `[n D]` in `dtype`, or in that of x.

    Differentiating or vmapping it is an error: the weights are constants, and an axis more belongs into n."""
    return collect(submit(experts, x, topk_ids, topk_weights, dtype))


def submit(
    experts: Experts, x: ArrayLike, topk_ids: ArrayLike, topk_weights: ArrayLike, dtype: DTypeLike | None = None
) -> Ticket:
    """Hands rows to the experts, for an answer in `dtype` or that of x; on a CPU they are computed when they are collected."""
    layer = _number(experts)
    x, topk_ids, topk_weights = (jnp.asarray(a) for a in (x, topk_ids, topk_weights))
    dtype = np.dtype(x.dtype if dtype is None else dtype)
    _check(experts, x, topk_ids, topk_weights, dtype)
    number = submit_p.bind(x, topk_ids, topk_weights, layer=layer, dtype=dtype)
    return Ticket(*jax.lax.optimization_barrier((number, x)), topk_ids, topk_weights, layer, dtype)


def collect(ticket: Ticket, after: object = ()) -> jax.Array:
    """The answer `[n D]`, once the arrays of `after` are there."""
    number, _ = jax.lax.optimization_barrier((ticket.number, after))
    return collect_p.bind(number, ticket.x, ticket.topk_ids, ticket.topk_weights, layer=ticket.layer, dtype=ticket.dtype)


@cache
def why_not(platform: str = "cpu") -> str | None:
    """Why programs of a platform, "cpu" or "cuda", cannot call the experts; None where they can."""
    if platform not in _PLATFORMS:
        return f"experts run in programs of {' and '.join(_PLATFORMS)}, not of {platform}"
    try:
        _PLATFORMS[platform]()
    except Unsupported as error:
        return str(error)
    return None


def _check(experts: Experts, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, dtype: np.dtype) -> None:
    """Shapes and dtypes, while the program is traced."""
    n = x.shape[0] if x.ndim else 0
    chosen = topk_ids.shape[-1] if topk_ids.ndim == 2 else 0
    for name, array, shape, dtypes in (
        ("x", x, (n, experts.model), _FLOATS),
        ("topk_ids", topk_ids, (n, chosen), ("int32",)),
        ("topk_weights", topk_weights, (n, chosen), ("float32",)),
    ):
        if array.dtype.name not in dtypes:
            raise TypeError(f"{name}: {array.dtype}, must be {' or '.join(dtypes)}")
        if array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}, must be {shape}")
    if not chosen:
        raise ValueError("topk_ids: no experts chosen")
    if dtype.name not in _FLOATS:
        raise TypeError(f"dtype: {dtype}, must be {' or '.join(_FLOATS)}")


_FLOATS = ("float32", "bfloat16")


# Layers as numbers


@cache
def _library() -> ctypes.CDLL:
    """The library, its handlers registered with XLA."""
    library = load_ffi()
    jax.ffi.register_ffi_target("cpu_experts_forward", jax.ffi.pycapsule(library.cpu_experts_ffi_forward), platform="cpu")
    return library


_PLATFORMS: dict[str, Callable[[], object]] = {"cpu": _library}

_numbers: weakref.WeakKeyDictionary[Experts, int] = weakref.WeakKeyDictionary()


def _number(experts: Experts) -> int:
    """By which programs name the layer."""
    if experts._handle is None:
        raise Closed("the layer is closed")
    if experts not in _numbers:
        functions = (experts._library.cpu_experts_forward, experts._library.cpu_experts_last_error)
        addresses = (ctypes.cast(f, ctypes.c_void_p) for f in functions)
        layer = FfiLayer(ctypes.sizeof(FfiLayer), experts.experts, experts.model, experts._handle, *addresses)
        number = _library().cpu_experts_ffi_know(layer)
        if not number:
            raise MemoryError("no memory for one more layer")
        _numbers[experts] = number
        weakref.finalize(experts, _library().cpu_experts_ffi_forget, number)
    return _numbers[experts]


# The two halves as primitives: XLA must see them as having effects, so that none is dropped, merged or moved out of a loop; were
# JAX told of these (has_side_effect of ffi_call), a call of any program with experts would take 80 us instead of 8.


def _primitive(name: str, result: Callable[..., jax.core.ShapedArray]) -> jax.extend.core.Primitive:
    primitive = jax.extend.core.Primitive(name)
    primitive.def_abstract_eval(result)
    primitive.def_impl(lambda *arrays, **static: _compiled(primitive, **static)(*arrays))

    def refuse(*_, **__):
        raise NotImplementedError(f"{name}: there is no vmap of experts on the CPU; make the axis a part of n")

    batching.primitive_batchers[primitive] = refuse
    return primitive


@cache
def _compiled(primitive: jax.extend.core.Primitive, **static) -> Callable:
    return jax.jit(partial(primitive.bind, **static))


submit_p = _primitive("cpu_experts_submit", lambda *_, **__: jax.core.ShapedArray((2,), np.uint32))
collect_p = _primitive("cpu_experts_collect", lambda _, x, *__, dtype, **___: jax.core.ShapedArray(x.shape, dtype))


def _no_number(*_, **__) -> jax.Array:
    return jnp.zeros(2, jnp.uint32)


def _forward_now(_, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, *, layer: int, dtype: np.dtype) -> jax.Array:
    call = jax.ffi.ffi_call("cpu_experts_forward", jax.ShapeDtypeStruct(x.shape, dtype))
    return call(x, topk_ids, topk_weights, layer=np.uint64(layer))


mlir.register_lowering(submit_p, mlir.lower_fun(_no_number, multiple_results=False), platform="cpu")
mlir.register_lowering(collect_p, mlir.lower_fun(_forward_now, multiple_results=False), platform="cpu")
