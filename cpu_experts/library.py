"""The shared libraries: where they are, their C functions, and statuses as exceptions. Nothing is built or loaded at import.

The second one, of ffi.py, is built on the headers that jaxlib brings, and serves that version of XLA's FFI and later ones: XLA
takes an older minor version, for a year at least."""

import ctypes
import importlib.util
import os
import re
from ctypes import POINTER, Structure, c_char_p, c_int32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from cpu_experts import intact

ABI = 2
NAME = "libcpu_experts.so"
FFI_ABI = 3
FFI_NAME = "libcpu_experts_ffi.so"  # as it is built
REBUILD = "run `python -m cpu_experts.build`"
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


class ForwardCall(Structure):
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


class FfiLayer(Structure):
    """cpu_experts_ffi_layer."""

    _fields_ = [
        ("struct_bytes", c_int32),
        ("experts", c_int32),
        ("model", c_int32),
        ("read_only", c_int32),
        ("handle", c_uint64),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bytes", c_uint64),
        ("down_bytes", c_uint64),
        ("forward", c_void_p),
        ("last_error", c_void_p),
    ]


SIGNATURES = {
    "cpu_experts_abi": (c_int32, []),
    "cpu_experts_best_isa": (c_int32, []),
    "cpu_experts_open": (c_int32, [POINTER(Weights), POINTER(c_uint64)]),
    "cpu_experts_check": (c_int32, [c_uint64, POINTER(ForwardCall)]),
    "cpu_experts_forward": (c_int32, [c_uint64, POINTER(ForwardCall)]),
    "cpu_experts_close": (c_int32, [c_uint64]),
    "cpu_experts_last_error": (c_char_p, []),
}

FFI_SIGNATURES = {
    "cpu_experts_ffi_abi": (c_int32, []),
    "cpu_experts_ffi_api": (c_int32, []),
    "cpu_experts_ffi_know": (c_uint64, [POINTER(FfiLayer)]),
    "cpu_experts_ffi_forget": (None, [c_uint64]),
    "cpu_experts_ffi_open_driver": (c_int32, [c_char_p]),
    "cpu_experts_ffi_failure": (c_int32, []),
    "cpu_experts_ffi_stop": (None, []),
    "cpu_experts_ffi_last_error": (c_char_p, []),
}

STATUSES = {1: ValueError, 2: Unsupported, 3: MemoryError, 4: Closed}


def places() -> list[Path]:
    """Where the library is looked for, in order: CPU_EXPERTS_LIBRARY alone where it is set."""
    return _places("CPU_EXPERTS_LIBRARY", NAME)


def ffi_places(headers: Path) -> list[Path]:
    """Where that for these headers, then for older ones, is looked for: CPU_EXPERTS_FFI_LIBRARY alone where it is set."""
    api = ffi_api(headers)
    names = (_ffi_name(each) for each in range(api, api - api % 1000 - 1, -1))
    return list(dict.fromkeys(place for name in names for place in _places("CPU_EXPERTS_FFI_LIBRARY", name)))


def _places(variable: str, name: str) -> list[Path]:
    if named := os.environ.get(variable):
        return [Path(named)]
    return [folder / name for folder in (Path(__file__).parent, cache_folder()) if folder is not None]


def cache_folder() -> Path | None:
    """Where `python -m cpu_experts.build` puts them; None for a user without a home, as containers may have."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "cpu_experts" / f"abi{ABI}"


def ffi_headers() -> Path | None:
    """The folder of the installed jaxlib's headers, found without importing it; None where there is none."""
    found = importlib.util.find_spec("jaxlib")
    for folder in (found and found.submodule_search_locations) or ():
        if (headers := Path(folder) / "include").is_dir():
            return headers
    return None


def ffi_api(headers: Path) -> int:
    """The version of XLA's FFI that headers speak: 1000 times the major one, plus the minor one."""
    text = (headers / "xla/ffi/api/c_api.h").read_text()
    found = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    major, minor = (int(part[1]) if part else -1 for part in found)
    return 1000 * major + minor


def ffi_name(headers: Path) -> str:
    """As it is kept: several versions of jaxlib may share a folder."""
    return _ffi_name(ffi_api(headers))


def _ffi_name(api: int | str) -> str:
    stem, suffix = FFI_NAME.split(".")
    return f"{stem}{FFI_ABI}-{api}.{suffix}"


@cache
def load() -> ctypes.CDLL:
    """The library, with every function's types; raises Unsupported where there is none that fits."""
    return opened(_first(places(), "the library of cpu_experts"))


def load_ffi() -> ctypes.CDLL:
    """The library for XLA programs; raises Unsupported where there is none for the installed jaxlib."""
    headers = ffi_headers()
    if headers is None:
        raise Unsupported("experts inside XLA programs need jaxlib with its headers: install jax")
    looked, what = ffi_places(headers), "cpu_experts' library for XLA programs"
    found = next(filter(Path.is_file, looked), None)
    others = (other for place in looked for other in place.parent.glob(_ffi_name("*")))
    if found is None and (other := next(others, None)):
        raise Unsupported(f"{what} is built for another jaxlib ({other}), not for XLA FFI {ffi_api(headers)}: {REBUILD}")
    return opened_ffi(found or _first(looked[:2], what), headers)  # of the two folders


def _first(looked: list[Path], what: str) -> Path:
    found = next(filter(Path.is_file, looked), None)
    if found is None:
        raise Unsupported(f"{what} is not built (looked at {', '.join(map(str, looked))}): {REBUILD}")
    return found


def opened(path: Path) -> ctypes.CDLL:
    """The library at a path."""
    library = _typed(path, SIGNATURES)
    if library.cpu_experts_abi() != ABI:
        raise Unsupported(f"{path} has ABI {library.cpu_experts_abi()}, expected {ABI}: {REBUILD}")
    return library


def opened_ffi(path: Path, headers: Path) -> ctypes.CDLL:
    """The library for XLA programs at a path, if it was built on such headers, or on ones of an older minor version."""
    library = _typed(path, FFI_SIGNATURES)
    newest = ffi_api(headers)
    for what, found, oldest, expected in (
        ("ABI", library.cpu_experts_ffi_abi(), FFI_ABI, FFI_ABI),
        ("XLA FFI", library.cpu_experts_ffi_api(), newest - newest % 1000, newest),
    ):
        if not oldest <= found <= expected:
            raise Unsupported(f"{path} has {what} {found}, expected {expected}: {REBUILD}")
    return library


def _typed(path: Path, signatures: dict) -> ctypes.CDLL:
    try:
        if reason := intact.damage(path):
            raise Unsupported(f"{path} is damaged ({reason}): {REBUILD}")
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unsupported(f"{path} cannot be loaded ({error}): {REBUILD}") from None
    return library


def check(library: ctypes.CDLL, status: int) -> None:
    """Raises what a status stands for."""
    if status:
        raise STATUSES.get(status, RuntimeError)(library.cpu_experts_last_error().decode())


def check_ffi(library: ctypes.CDLL, status: int) -> None:
    """The same, of the library for XLA programs."""
    if status:
        raise STATUSES.get(status, RuntimeError)(library.cpu_experts_ffi_last_error().decode())
