"""The experts inside JAX programs, under jit and in loops: of the CPU backend, and of CUDA's, where they work beside the GPU.

    y = ffi.forward(layer, x, topk_ids, topk_weights)

It has two halves, and what a GPU computes in between overlaps with the experts' work:

    ticket = ffi.submit(layer, x, topk_ids, topk_weights)
    shared = mlp(ticket.x)                  # what reads ticket.x comes after the submission
    y = ffi.collect(ticket, after=shared)   # and what is given as `after` comes before the wait

Or the weights come to the device as they lie here, some experts at a time, and unpack.py makes arrays of them:

    gate_up, down = ffi.fetch(layer, first, count)

A program names a layer by a number and does not hold it: keep the `Experts` while programs use it. A closed one is an error.
Programs for several GPUs call it inside `jax.shard_map`: each GPU hands over its own rows.
On a GPU the halves are two small kernels, which XLA captures into CUDA graphs, and a thread here that they talk to by memory that
both see. What fails there is NaN, and an error at `check()`: a graph runs without asking anyone here, so ask after each step. The
memory is that of a call's size, shared by all layers: some slots of x and y, held to the end of the process once in a graph."""

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
    """What was submitted. `x` are the rows themselves, at a time after the submission."""

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
    """`Experts.forward` in a program: rows `[n D]` in `dtype`, or in that of x.

    Differentiating or vmapping it is an error: the weights are constants, and an axis more belongs into n. A GPU waits `patience`
    seconds for the answer, then takes NaN."""
    return collect(submit(experts, x, topk_ids, topk_weights, dtype, patience))


def submit(
    experts: Experts,
    x: ArrayLike,
    topk_ids: ArrayLike,
    topk_weights: ArrayLike,
    dtype: DTypeLike | None = None,
    patience: float = PATIENCE,
) -> Ticket:
    """Hands rows to the experts; programs of the CPU backend compute them when they are collected.

    Calls come in the order in which they are given each other's rows, the next one the ticket's x. A GPU's program that uses its
    own x once more copies it.
    Of calls of one size at least four may be under way on a GPU; with more the first ones are lost, and NaN."""
    layer = _number(experts)
    x, topk_ids, topk_weights = (jnp.asarray(a) for a in (x, topk_ids, topk_weights))
    dtype = np.dtype(x.dtype if dtype is None else dtype)
    _expect(experts, x, topk_ids, topk_weights, dtype)
    number, x = submit_p.bind(x, topk_ids, topk_weights, layer=layer, dtype=dtype, patience=patience)
    return Ticket(number, x, topk_ids, topk_weights, layer, dtype, patience)


def collect(ticket: Ticket, after: object = ()) -> jax.Array:
    """The answer `[n D]`, once the arrays of `after` are there."""
    t, before = ticket, map(jnp.asarray, jax.tree.leaves(after))
    given = (t.number, t.x, t.topk_ids, t.topk_weights, *before)
    return collect_p.bind(*given, layer=t.layer, dtype=t.dtype, patience=t.patience)


def fetch(experts: Experts, first: ArrayLike, count: int) -> tuple[jax.Array, jax.Array]:
    """The packed bytes `[count panels bytes]` of experts from `first` on: of gate and up as one, and of down.

    On a GPU they are copied over the link, once what was computed before is done; the first time of a layer its memory is pinned
    for that, which takes longer. `first` may be traced; experts that are not there are an error when the program runs."""
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
    """Raises what went wrong with the first call from a GPU that failed since this was last asked."""
    check_ffi(_library(), _library().cpu_experts_ffi_failure())


def why_not(platform: str = "cpu") -> str | None:
    """Why programs of a platform, "cpu" or "cuda", cannot call the experts; None where they can."""
    if platform not in _PLATFORMS:
        return f"experts run in programs of {' and '.join(_PLATFORMS)}, not of {platform}"
    try:
        _PLATFORMS[platform]()
    except Unsupported as error:
        return str(error)
    return None


def _expect(experts: Experts, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, dtype: np.dtype) -> None:
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


# The library, and layers as numbers


@cache
def _library() -> ctypes.CDLL:
    """For any platform; its handler for the CPU backend registered with XLA."""
    library = load_ffi()
    _register("cpu_experts_forward", library.cpu_experts_ffi_forward, "cpu")
    _register("cpu_experts_fetch", library.cpu_experts_ffi_fetch, "cpu")
    return library


@cache
def _cuda() -> None:
    """CUDA's driver opened, and the handlers registered; CPU_EXPERTS_LIBCUDA names another driver."""
    library = _library()
    check_ffi(library, library.cpu_experts_ffi_open_driver(os.environ.get("CPU_EXPERTS_LIBCUDA", "libcuda.so.1").encode()))
    _register("cpu_experts_submit", library.cpu_experts_ffi_submit, "CUDA")
    _register("cpu_experts_collect", library.cpu_experts_ffi_collect, "CUDA")
    _register("cpu_experts_fetch", library.cpu_experts_ffi_fetch_on_gpu, "CUDA")
    atexit.register(library.cpu_experts_ffi_stop)


_PLATFORMS: dict[str, Callable[[], object]] = {"cpu": _library, "cuda": _cuda}


def _register(name: str, handler: Callable, platform: str) -> None:
    try:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform)
    except jax.errors.JaxRuntimeError as error:  # this jaxlib takes none that is so old
        raise Unsupported(f"{error}: {REBUILD}") from None


_numbers: weakref.WeakKeyDictionary[Experts, int] = weakref.WeakKeyDictionary()
_numbering = threading.Lock()


def _number(experts: Experts) -> int:
    """By which programs name the layer."""
    with _numbering:  # two numbers for one layer, and closing it would forget one of them
        if experts not in _numbers:
            _introduce(experts)
        if experts._handle is None:  # closed before, or meanwhile
            experts._forget()
            raise Closed("the layer is closed")
        return _numbers[experts]


def _introduce(experts: Experts) -> None:
    """Gives the layer a number, which is forgotten when it is closed."""
    library, functions = _library(), (experts._library.cpu_experts_forward, experts._library.cpu_experts_last_error)
    addresses = (ctypes.cast(f, ctypes.c_void_p) for f in functions)
    handle, sections, sizes = experts._handle, experts._packed, (experts.experts, experts.model)
    if handle is None or not sections:
        raise Closed("the layer is closed")
    weights = (*(s.ctypes.data for s in sections), *(s.nbytes for s in sections))
    read_only = not all(s.flags.writeable for s in sections)
    layer = FfiLayer(ctypes.sizeof(FfiLayer), *sizes, read_only, handle, *weights, *addresses)
    number = library.cpu_experts_ffi_know(layer)
    if not number:
        raise MemoryError("no memory for one more layer")
    _numbers[experts] = number
    experts._forget = weakref.finalize(experts, library.cpu_experts_ffi_forget, number)
    experts._forget.atexit = False


# What programs call, as primitives. XLA is told that they have effects, so that none is dropped, merged or moved out of a loop;
# JAX is not (as by has_side_effect of ffi_call): with effects that JAX knows of a program's dispatch takes 60 us, without 8.
# Their order is that of the data: submit passes x on, in place, and collect is given what comes before it. Where XLA runs kernels
# of a CUDA graph side by side (CONCURRENT), effects and optimization barriers order nothing: the host could get the later of two
# calls first.


def _primitive(name: str, result: Callable, several: bool = False) -> jax.extend.core.Primitive:
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = several
    primitive.def_abstract_eval(result)
    primitive.def_impl(lambda *arrays, **static: _compiled(primitive, **static)(*arrays))

    def refuse(*_, **__):
        raise NotImplementedError(f"{name}: there is no vmap of experts on the CPU; make the axis a part of n")

    batching.primitive_batchers[primitive] = refuse
    return primitive


@cache
def _compiled(primitive: jax.extend.core.Primitive, **static) -> Callable:
    return jax.jit(partial(primitive.bind, **static))


def _ticket_and_rows(x: jax.core.ShapedArray, *_, **__) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray((2,), np.uint32), jax.core.ShapedArray(x.shape, x.dtype)]


submit_p = _primitive("cpu_experts_submit", _ticket_and_rows, True)
collect_p = _primitive("cpu_experts_collect", lambda _, x, *__, dtype, **___: jax.core.ShapedArray(x.shape, dtype))
fetch_p = _primitive("cpu_experts_fetch", lambda _, *, shapes, **__: [jax.core.ShapedArray(s, np.uint8) for s in shapes], True)


def _no_number(x: jax.Array, *_, **__) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(2, jnp.uint32), x


def _forward_now(
    _, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, *__, layer: int, dtype: np.dtype, patience: float
) -> jax.Array:
    call = jax.ffi.ffi_call("cpu_experts_forward", jax.ShapeDtypeStruct(x.shape, dtype))
    return call(x, topk_ids, topk_weights, layer=np.uint64(layer))


def _nanoseconds(patience: float) -> np.uint64:
    return np.uint64(max(0.0, patience) * 1e9)


def _expect_one_gpu(ctx: mlir.LoweringRuleContext) -> None:
    if reason := why_not("cuda"):
        raise Unsupported(reason)
    if getattr(ctx.module_context.axis_context, "num_devices", 1) > 1:  # XLA would not know whose rows go where
        raise Unsupported("experts in a program for several GPUs: call them inside jax.shard_map")


def _submit_on_a_gpu(ctx: mlir.LoweringRuleContext, *arrays, layer: int, dtype: np.dtype, patience: float):
    _expect_one_gpu(ctx)
    attributes = {"layer": np.uint64(layer), "float32": np.bool_(dtype == np.float32), "patience": _nanoseconds(patience)}
    rule = jax.ffi.ffi_lowering("cpu_experts_submit", has_side_effect=True, operand_output_aliases={0: 1})
    return rule(ctx, *arrays, **attributes)


def _collect_on_a_gpu(ctx: mlir.LoweringRuleContext, number, *others, layer: int, dtype: np.dtype, patience: float):
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
