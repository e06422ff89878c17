"""CPU experts inside JAX programs, under jit and in loops, on the CPU and CUDA backends. The GPU can work at the same time.

    y = ffi.forward(layer, x, topk_ids, topk_weights)

The call can be split in two. The GPU's work in between overlaps with the experts:

    ticket = ffi.submit(layer, x, topk_ids, topk_weights)
    shared = mlp(ticket.x)                  # reads ticket.x: runs after the submission
    y = ffi.collect(ticket, after=shared)   # waits after `shared` is computed

Or the packed weights of some experts are copied to the device, where unpack.py unpacks them:

    gate_up, down = ffi.fetch(layer, first, count)

A program refers to a layer by a number and does not keep it alive: keep the `Experts` while programs use it. Calling a closed
layer is an error. A program for several GPUs calls these inside `jax.shard_map`: each GPU submits its own rows.

On a GPU, submit and collect are two small kernels, which XLA captures into CUDA graphs. They exchange data with a host thread
through memory that both see. A failed call returns NaN, and `check()` raises its error: a graph runs without the host, so call
`check()` after each step. The buffers are sized by the call and shared by all layers: a few slots of x and y. Once a graph uses
them they stay allocated until the process ends."""

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike, DTypeLike

from cpu_experts import Closed, Experts
from cpu_experts.library import REBUILD, FfiLayer, Unsupported, check_ffi, load_ffi

__all__ = ["Ticket", "check", "collect", "fetch", "forward", "submit", "why_not"]

PATIENCE = 60.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ticket:
    """A submitted call. `x` are the same rows, as a value that depends on the submission."""

    number: jax.Array
    x: jax.Array
    topk_ids: jax.Array
    topk_weights: jax.Array
    layer: int = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})
    patience: float = field(metadata={"static": True})


def forward(
    experts: Experts,
    x: ArrayLike,
    topk_ids: ArrayLike,
    topk_weights: ArrayLike,
    dtype: DTypeLike | None = None,
    patience: float = PATIENCE,
) -> jax.Array:
    """`Experts.forward` in a program: the output `[n D]` in `dtype`, by default x's own.

    grad and vmap raise an error: the weights are constants, and further axes can be merged into n. A GPU waits `patience` seconds
    for the result, then returns NaN."""
    return collect(submit(experts, x, topk_ids, topk_weights, dtype, patience))


def submit(
    experts: Experts,
    x: ArrayLike,
    topk_ids: ArrayLike,
    topk_weights: ArrayLike,
    dtype: DTypeLike | None = None,
    patience: float = PATIENCE,
) -> Ticket:
    """Submits rows to the experts. On the CPU backend they are computed at `collect`.

    Data dependencies order the calls: give the next call the ticket's x. On a GPU, using the original x again costs a copy. At
    least four calls of one size may be in flight on a GPU; if more are, the oldest ones are lost and return NaN."""
    layer = _number(experts)
    x, topk_ids, topk_weights = (jnp.asarray(a) for a in (x, topk_ids, topk_weights))
    dtype = np.dtype(x.dtype if dtype is None else dtype)
    _expect(experts, x, topk_ids, topk_weights, dtype)
    number, x = submit_p.bind(x, topk_ids, topk_weights, layer=layer, dtype=dtype, patience=patience)
    return Ticket(number, x, topk_ids, topk_weights, layer, dtype, patience)


def collect(ticket: Ticket, after: object = ()) -> jax.Array:
    """Waits for the output `[n D]`, after the arrays of `after` are computed."""
    before = [jnp.asarray(leaf) for leaf in jax.tree.leaves(after)]
    given = (ticket.number, ticket.x, ticket.topk_ids, ticket.topk_weights, *before)
    return collect_p.bind(*given, layer=ticket.layer, dtype=ticket.dtype, patience=ticket.patience)


def fetch(experts: Experts, first: ArrayLike, count: int) -> tuple[jax.Array, jax.Array]:
    """The packed bytes `[count panels bytes]` of `count` experts from `first` on: of gate and up as one, and of down.

    On a GPU they are copied in stream order. The first copy of a layer also pins its memory, which takes longer. `first` may be
    traced; if such experts do not exist, the program fails when it runs."""
    layer = _number(experts)
    first = jnp.asarray(first)
    if first.shape or first.dtype.kind not in "iu":
        raise TypeError(f"first: {first.dtype}{list(first.shape)}, must be an integer")
    if not 1 <= count <= experts.experts:
        raise ValueError(f"count: {count}, must be 1 to {experts.experts}")
    shapes = tuple((count, *section.shape[1:]) for section in experts._packed)
    gate_up, down = fetch_p.bind(first.astype(jnp.int32), layer=layer, shapes=shapes)
    return gate_up, down


def check() -> None:
    """Raises the error of the first call from a GPU that failed after the last `check`."""
    check_ffi(_library(), _library().cpu_experts_ffi_failure())


def why_not(platform: str = "cpu") -> str | None:
    """The reason why programs of a platform, "cpu" or "cuda", cannot call the experts; None if they can."""
    if platform not in _PLATFORMS:
        return f"experts run in programs of {' and '.join(_PLATFORMS)}, not of {platform}"
    try:
        _PLATFORMS[platform]()
    except Unsupported as error:
        return str(error)
    return None


def _expect(
    experts: Experts, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, dtype: np.dtype
) -> None:
    """Checks shapes and dtypes while the program is traced."""
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


# The library, and layers as numbers


@cache
def _library() -> ctypes.CDLL:
    """The library for XLA programs, with its handlers for the CPU backend registered."""
    library = load_ffi()
    _register("cpu_experts_forward", library.cpu_experts_ffi_forward, "cpu")
    _register("cpu_experts_fetch", library.cpu_experts_ffi_fetch, "cpu")
    return library


@cache
def _cuda() -> None:
    """Opens CUDA's driver, or the one that CPU_EXPERTS_LIBCUDA names, and registers the handlers for CUDA."""
    library = _library()
    check_ffi(
        library,
        library.cpu_experts_ffi_open_driver(os.environ.get("CPU_EXPERTS_LIBCUDA", "libcuda.so.1").encode()),
    )
    _register("cpu_experts_submit", library.cpu_experts_ffi_submit, "CUDA")
    _register("cpu_experts_collect", library.cpu_experts_ffi_collect, "CUDA")
    _register("cpu_experts_fetch", library.cpu_experts_ffi_fetch_on_gpu, "CUDA")
    atexit.register(library.cpu_experts_ffi_stop)


_PLATFORMS: dict[str, Callable[[], object]] = {"cpu": _library, "cuda": _cuda}


def _register(name: str, handler: Callable, platform: str) -> None:
    try:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform)
    except jax.errors.JaxRuntimeError as error:
        # The library's version of XLA's FFI is too old for this jaxlib
        raise Unsupported(f"{error}: {REBUILD}") from None


_numbers: weakref.WeakKeyDictionary[Experts, int] = weakref.WeakKeyDictionary()
_numbering = threading.Lock()


def _number(experts: Experts) -> int:
    """The layer's number, by which programs refer to it."""
    with _numbering:  # else a layer could get two numbers, and closing it would remove only one
        if experts not in _numbers:
            _register_layer(experts)
        if experts._handle is None:  # another thread may have closed it meanwhile
            experts._forget()
            raise Closed("the layer is closed")
        return _numbers[experts]


def _register_layer(experts: Experts) -> None:
    """Gives the layer a number, which is removed when it is closed."""
    library = _library()
    functions = (experts._library.cpu_experts_forward, experts._library.cpu_experts_last_error)
    pointers = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
    handle, sections = experts._handle, experts._packed
    if handle is None or not sections:
        raise Closed("the layer is closed")
    weights = (*(s.ctypes.data for s in sections), *(s.nbytes for s in sections))
    read_only = not all(s.flags.writeable for s in sections)
    sizes = (experts.experts, experts.model)
    number = library.cpu_experts_ffi_know(
        FfiLayer(ctypes.sizeof(FfiLayer), *sizes, read_only, handle, *weights, *pointers)
    )
    if not number:
        raise MemoryError("out of memory: cannot register another layer")
    _numbers[experts] = number
    experts._forget = weakref.finalize(experts, library.cpu_experts_ffi_forget, number)
    experts._forget.atexit = False


# The primitives of programs. XLA knows that they have effects, so it does not drop or merge them or move them out of a loop. JAX
# does not know it (has_side_effect of ffi_call would tell it): JAX dispatches a program with effects in 60 us, others in 8 us.
# Data dependencies order the calls: submit returns x in place, and collect takes the arrays that must come before it. Effects and
# optimization barriers do not order kernels that a CUDA graph runs concurrently: the host could get two calls in reverse order.


def _primitive(name: str, result: Callable, several: bool = False) -> jax.extend.core.Primitive:
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = several
    primitive.def_abstract_eval(result)
    primitive.def_impl(lambda *arrays, **static: _compiled(primitive, **static)(*arrays))

    def refuse(*_, **__):
        raise NotImplementedError(f"{name}: there is no vmap of experts on the CPU; merge the axis into n")

    batching.primitive_batchers[primitive] = refuse
    return primitive


@cache
def _compiled(primitive: jax.extend.core.Primitive, **static) -> Callable:
    return jax.jit(partial(primitive.bind, **static))


def _ticket_and_rows(x: jax.core.ShapedArray, *_, **__) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray((2,), np.uint32), jax.core.ShapedArray(x.shape, x.dtype)]


def _rows(
    number: jax.core.ShapedArray, x: jax.core.ShapedArray, *_, dtype: np.dtype, **__
) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(x.shape, dtype)


def _sections(
    first: jax.core.ShapedArray, *, shapes: tuple[tuple[int, ...], ...], **_
) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(shape, np.uint8) for shape in shapes]


submit_p = _primitive("cpu_experts_submit", _ticket_and_rows, True)
collect_p = _primitive("cpu_experts_collect", _rows)
fetch_p = _primitive("cpu_experts_fetch", _sections, True)


def _no_number(x: jax.Array, *_, **__) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(2, jnp.uint32), x


def _forward_now(
    _,
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    *__,
    layer: int,
    dtype: np.dtype,
    patience: float,
) -> jax.Array:
    call = jax.ffi.ffi_call("cpu_experts_forward", jax.ShapeDtypeStruct(x.shape, dtype))
    return call(x, topk_ids, topk_weights, layer=np.uint64(layer))


def _nanoseconds(patience: float) -> np.uint64:
    return np.uint64(max(0.0, patience) * 1e9)


def _expect_one_gpu(ctx: mlir.LoweringRuleContext) -> None:
    if reason := why_not("cuda"):
        raise Unsupported(reason)
    # XLA cannot partition the call by itself
    if getattr(ctx.module_context.axis_context, "num_devices", 1) > 1:
        raise Unsupported("experts in a program for several GPUs: call them inside jax.shard_map")


def _submit_on_a_gpu(ctx: mlir.LoweringRuleContext, *arrays, layer: int, dtype: np.dtype, patience: float):
    _expect_one_gpu(ctx)
    attributes = {
        "layer": np.uint64(layer),
        "float32": np.bool_(dtype == np.float32),
        "patience": _nanoseconds(patience),
    }
    rule = jax.ffi.ffi_lowering("cpu_experts_submit", has_side_effect=True, operand_output_aliases={0: 1})
    return rule(ctx, *arrays, **attributes)


def _collect_on_a_gpu(
    ctx: mlir.LoweringRuleContext, number, *others, layer: int, dtype: np.dtype, patience: float
):
    number_aval, x, topk_ids, _, *before = ctx.avals_in
    size = {"x_float32": np.bool_(x.dtype == np.float32), "chosen": np.uint64(topk_ids.shape[1])}
    attributes = {"layer": np.uint64(layer), "patience": _nanoseconds(patience)} | size
    rule = jax.ffi.ffi_lowering("cpu_experts_collect", has_side_effect=True)
    return rule(ctx.replace(avals_in=[number_aval, *before]), number, *others[3:], **attributes)


def _fetch_anywhere(ctx: mlir.LoweringRuleContext, first, *, layer: int, **_):
    return jax.ffi.ffi_lowering("cpu_experts_fetch", has_side_effect=True)(ctx, first, layer=np.uint64(layer))


def _fetch_on_a_gpu(ctx: mlir.LoweringRuleContext, first, **static):
    _expect_one_gpu(ctx)
    return _fetch_anywhere(ctx, first, **static)


mlir.register_lowering(submit_p, mlir.lower_fun(_no_number, multiple_results=True), platform="cpu")
mlir.register_lowering(collect_p, mlir.lower_fun(_forward_now, multiple_results=False), platform="cpu")
mlir.register_lowering(submit_p, _submit_on_a_gpu, platform="cuda")
mlir.register_lowering(collect_p, _collect_on_a_gpu, platform="cuda")
mlir.register_lowering(fetch_p, _fetch_anywhere, platform="cpu")
mlir.register_lowering(fetch_p, _fetch_on_a_gpu, platform="cuda")
