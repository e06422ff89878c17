"""The shared libraries: their paths, their C functions, and status codes as exceptions. Nothing is built or loaded at import.

There are two: one for this package, and one for XLA programs (ffi.py). The second is compiled with the headers in jaxlib. It
works with that version of XLA's FFI and with later minor versions: XLA accepts older minor versions for at least a year."""

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
    """The library is not built or has another version, or the processor lacks the requested instruction set."""


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
    """The paths to look for the library at, in order. CPU_EXPERTS_LIBRARY replaces them all."""
    return _places("CPU_EXPERTS_LIBRARY", NAME)


def ffi_places(headers: Path) -> list[Path]:
    """The paths to look for the library for XLA programs at: for these headers, then for older minor versions.

    CPU_EXPERTS_FFI_LIBRARY replaces them all."""
    newest = ffi_api(headers)
    oldest = newest - newest % 1000
    found: list[Path] = []
    for api in range(newest, oldest - 1, -1):
        found += _places("CPU_EXPERTS_FFI_LIBRARY", _ffi_name(api))
    return list(dict.fromkeys(found))


def _places(variable: str, name: str) -> list[Path]:
    if named := os.environ.get(variable):
        return [Path(named)]
    return [folder / name for folder in (Path(__file__).parent, cache_folder()) if folder is not None]


def cache_folder() -> Path | None:
    """The folder that `python -m cpu_experts.build` writes to; None for a user without a home, as in some containers."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "cpu_experts" / f"abi{ABI}"


def ffi_headers() -> Path | None:
    """The folder of headers of the installed jaxlib, found without importing it; None if there is none."""
    found = importlib.util.find_spec("jaxlib")
    for folder in (found and found.submodule_search_locations) or ():
        if (headers := Path(folder) / "include").is_dir():
            return headers
    return None


def ffi_api(headers: Path) -> int:
    """The version of XLA's FFI in the headers: 1000 times the major version, plus the minor version."""
    text = (headers / "xla/ffi/api/c_api.h").read_text()

    def version(part: str) -> int:
        found = re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)
        return int(found[1]) if found else -1

    return 1000 * version("MAJOR") + version("MINOR")


def ffi_name(headers: Path) -> str:
    """The file's name in its folder, which several versions of jaxlib may share."""
    return _ffi_name(ffi_api(headers))


def _ffi_name(api: int | str) -> str:
    stem, suffix = FFI_NAME.split(".")
    return f"{stem}{FFI_ABI}-{api}.{suffix}"


@cache
def load() -> ctypes.CDLL:
    """The library, with the types of its functions; raises Unsupported if it is missing or does not fit."""
    looked = places()
    if (found := _first_file(looked)) is None:
        raise _not_built(looked, "the library of cpu_experts")
    return opened(found)


def load_ffi() -> ctypes.CDLL:
    """The library for XLA programs; raises Unsupported if there is none for the installed jaxlib."""
    headers = ffi_headers()
    if headers is None:
        raise Unsupported("experts inside XLA programs need jaxlib with its headers: install jax")
    looked, what = ffi_places(headers), "cpu_experts' library for XLA programs"
    if (found := _first_file(looked)) is not None:
        return opened_ffi(found, headers)
    for place in looked:
        for other in place.parent.glob(_ffi_name("*")):
            raise Unsupported(
                f"{what} is built for another jaxlib ({other}), not for XLA FFI {ffi_api(headers)}: {REBUILD}"
            )
    raise _not_built(looked[:2], what)  # the first name, in both folders


def _first_file(paths: list[Path]) -> Path | None:
    return next(filter(Path.is_file, paths), None)


def _not_built(looked: list[Path], what: str) -> Unsupported:
    return Unsupported(f"{what} is not built (looked at {', '.join(map(str, looked))}): {REBUILD}")


def opened(path: Path) -> ctypes.CDLL:
    """The library in a file."""
    library = _typed(path, SIGNATURES)
    if library.cpu_experts_abi() != ABI:
        raise Unsupported(f"{path} has ABI {library.cpu_experts_abi()}, expected {ABI}: {REBUILD}")
    return library


def opened_ffi(path: Path, headers: Path) -> ctypes.CDLL:
    """The library for XLA programs in a file; raises Unsupported unless its version of XLA's FFI works with these headers."""
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
    """Raises the exception of a status other than 0."""
    if status:
        raise STATUSES.get(status, RuntimeError)(library.cpu_experts_last_error().decode())


def check_ffi(library: ctypes.CDLL, status: int) -> None:
    """The same, for the library for XLA programs."""
    if status:
        raise STATUSES.get(status, RuntimeError)(library.cpu_experts_ffi_last_error().decode())
