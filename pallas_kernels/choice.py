"""The choice of an op's implementation: the named one, or the first that supports the arrays and the device."""

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import import_module
from typing import Any, NamedTuple

import jax

SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")  # 16 MiB in total


class Unsupported(NotImplementedError):
    """The named implementation does not support this, for the reason given."""


class Kind(NamedTuple):
    """A device that need not be here, as JAX would describe it."""

    device_kind: str
    platform: str
    compute_capability: str = ""


_other: ContextVar[Kind | None] = ContextVar("other", default=None)


@contextlib.contextmanager
def as_if_on(kind: Kind) -> Iterator[None]:
    """Chooses for another device, to say who would compute there; programs compiled inside cannot run."""
    token = _other.set(kind)
    try:
        yield
    finally:
        _other.reset(token)


def _first() -> Any:
    return _other.get() or jax.devices()[0]


def device() -> str:
    """The kind of JAX's default device."""
    return _first().device_kind


def sizes(table: dict[str, dict]) -> dict:
    """The entry of a table of tuning.py for this device."""
    return table.get(device(), table["other"])


def not_bfloat16(*arrays) -> str | None:
    """Why a kernel for bfloat16 only does not support these arrays; None: it does."""
    odd = {str(x.dtype) for x in arrays} - {"bfloat16"}
    return f"it takes bfloat16, not {', '.join(sorted(odd))}" if odd else None


def not_e4m3(*codes) -> str | None:
    """Why a kernel for codes in float8_e4m3fn does not support these arrays; None: it does."""
    odd = {str(x.dtype) for x in codes} - {"float8_e4m3fn"}
    return f"it takes codes in float8_e4m3fn, not {', '.join(sorted(odd))}" if odd else None


def too_old() -> str | None:
    """Why this JAX cannot compile the GPU kernels; None: it can, or it is another that will."""
    if _other.get():
        return None
    numbers = re.findall(r"\d+", jax.__version__)[:3]  # a release candidate is 0.12.0rc1
    return (
        None
        if tuple(map(int, numbers)) >= (0, 11, 2)
        else f"it needs JAX 0.11.2 or newer, this is {jax.__version__}"
    )


def _hopper() -> bool:
    first = _first()
    return first.platform == "gpu" and str(getattr(first, "compute_capability", "")) == "9.0"


def _tpu() -> bool:
    return _first().platform == "tpu" and device() not in SMALL_VMEM


DEVICES = {"mosaic_gpu": (_hopper, "a Hopper GPU"), "mosaic_tpu": (_tpu, "a TPU v5e or newer")}


_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """Programs that are traced inside have no kernels: they may be for another device than this machine's."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


def why_not(name: str, checks: dict[str, Callable[..., str | None]], *arrays) -> str | None:
    """Why implementation `name` does not support these arrays or the device; None: it does."""
    if _forbidden.get():
        return "the program is for any device of its platform"
    here, wanted = DEVICES[name]
    return checks[name](*arrays) or (None if here() else f"it needs {wanted}, this is {device()}")


def choose(op: str, impl: str | None, checks: dict[str, Callable[..., str | None]], *arrays) -> str:
    """The implementation to run: `impl`, or with None the first of `checks` that is supported, else "xla".

    Raises Unsupported, with the reason, if `impl` is not supported."""
    if impl is None:
        return next((name for name in checks if not why_not(name, checks, *arrays)), "xla")
    if impl not in (*checks, "xla"):
        raise Unsupported(f'{op}: no impl "{impl}"; there are {", ".join((*checks, "xla"))}')
    if impl in checks and (reason := why_not(impl, checks, *arrays)):
        raise Unsupported(f'{op}: impl="{impl}": {reason}')
    return impl


_record: ContextVar[dict[str, str] | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """Collects who would compute each op that is called inside; the fallback stands in, so that no kernel is traced.

    An op that is called several times is "xla" if any of its calls is."""
    found: dict[str, str] = {}
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


def take(op: str, impl: str | None, checks: dict[str, Callable[..., str | None]], *arrays) -> str:
    """`choose`, for a contract that then computes with the answer."""
    chosen, record = choose(op, impl, checks, *arrays), _record.get()
    if record is None:
        return chosen
    record[op] = "xla" if record.get(op) == "xla" else chosen
    return "xla"


def load_runtime() -> None:
    """Makes compiled programs with kernels for Hopper GPUs loadable in a process that has traced no kernel.

    JAX tells where the library that they call is when it imports Mosaic; without it they fail at their first call."""
    if _hopper():
        import_module("jax.experimental.mosaic.gpu")


def kernels_here() -> bool:
    """Whether this machine's first device is one that any kernel is for, and kernels are not `forbidden`."""
    return not _forbidden.get() and any(here() for here, _ in DEVICES.values())
