"""The shared library: where it is, its C functions, and its statuses as exceptions. Nothing is built or loaded at import."""

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_int32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

ABI = 2
NAME = "libcpu_experts.so"
ISAS = ("best", "portable", "avx2", "avx512", "amx")


class Unsupported(RuntimeError):
    """The library is not built, is another version's, or the processor lacks what was asked for."""


class Closed(RuntimeError):
    """The layer is closed."""


class Weights(Structure):
    """cpu_experts_weights."""

    _fields_ = [
        ("struct_bytes", c_int32),
        ("gate_up_precision", c_int32),
        ("down_precision", c_int32),
        ("experts", c_int32),
        ("model", c_int32),
        ("width", c_int32),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bytes", c_uint64),
        ("down_bytes", c_uint64),
        ("threads", c_int32),
        ("isa", c_int32),
        ("max_rows", c_int32),
    ]


class Batch(Structure):
    """cpu_experts_batch."""

    _fields_ = [
        ("struct_bytes", c_int32),
        ("tokens", c_int32),
        ("chosen", c_int32),
        ("x_dtype", c_int32),
        ("out_dtype", c_int32),
        ("x", c_void_p),
        ("topk_ids", c_void_p),
        ("topk_weights", c_void_p),
        ("out", c_void_p),
    ]


SIGNATURES = {
    "cpu_experts_abi": (c_int32, []),
    "cpu_experts_best_isa": (c_int32, []),
    "cpu_experts_open": (c_int32, [POINTER(Weights), POINTER(c_uint64)]),
    "cpu_experts_check": (c_int32, [c_uint64, POINTER(Batch)]),
    "cpu_experts_forward": (c_int32, [c_uint64, POINTER(Batch)]),
    "cpu_experts_close": (c_int32, [c_uint64]),
    "cpu_experts_last_error": (c_char_p, []),
}

STATUSES = {1: ValueError, 2: Unsupported, 3: MemoryError, 4: Closed}


def places() -> list[Path]:
    """Where the library is looked for, in order: CPU_EXPERTS_LIBRARY alone where it is set."""
    if named := os.environ.get("CPU_EXPERTS_LIBRARY"):
        return [Path(named)]
    return [Path(__file__).parent / NAME, cache_folder() / NAME]


def cache_folder() -> Path:
    """Where `python -m cpu_experts.build` puts it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cpu_experts" / f"abi{ABI}"


@cache
def load() -> ctypes.CDLL:
    """The library, with every function's types; raises Unsupported where there is none that fits."""
    found = next((path for path in places() if path.is_file()), None)
    if found is None:
        looked = ", ".join(str(path) for path in places())
        raise Unsupported(f"the library of cpu_experts is not built (looked at {looked}): run `python -m cpu_experts.build`")
    return opened(found)


def opened(path: Path) -> ctypes.CDLL:
    """The library at a path."""
    rebuild = "run `python -m cpu_experts.build`"
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unsupported(f"{path} cannot be loaded ({error}): {rebuild}") from None
    if library.cpu_experts_abi() != ABI:
        raise Unsupported(f"{path} has ABI {library.cpu_experts_abi()}, expected {ABI}: {rebuild}")
    return library


def check(library: ctypes.CDLL, status: int) -> None:
    """Raises what a status stands for."""
    if status:
        raise STATUSES.get(status, RuntimeError)(library.cpu_experts_last_error().decode())
