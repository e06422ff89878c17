"""Compiled programs as files, so that the next start traces and compiles nothing.

A file's name is a digest of its inputs: the version of the code, the model, shapes and options, JAX, the device. Whatever is
wrong with a file or the folder, the program is compiled instead. A file holds a pickle, which is code: the folder must be the
user's own, and closed to others."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pickle
import platform
import stat
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jaxlib
from flax import nnx
from jax.experimental import serialize_executable

from mla_jax.base.files import cache_folder
from mla_jax.base.platforms import default_device
from mla_jax.decode.program_sharding import Spread
from mla_jax.model.kernels import load_runtime
from mla_jax.model.transformer import Transformer

LIMIT = 1 << 30  # bytes of files; the ones that were not used for longest are removed
CODE = ("mla_jax", "pallas_kernels", "cpu_experts")  # packages whose functions are traced
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
CHECKSUM = 32  # bytes of SHA-256 in front
HIT = "/jax/compilation_cache/cache_hits"


class Built(NamedTuple):
    """A compiled program, and the structure of its value, whose leaves it returns as a list."""

    compiled: jax.stages.Compiled
    structure: Any
    temporaries: int  # bytes that it takes besides its arguments, by XLA's account

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, structure: Any) -> "Built":
        compiled = lowered.compile()
        memory = compiled.memory_analysis()  # None where a platform has no account
        taken = 0
        if memory is not None:
            taken = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return cls(compiled, structure, max(taken, 0))


class ProgramStore:
    """Programs for `devices` in `folder`, of the model that `context` tells apart from all others."""

    def __init__(self, folder: Path, devices: Sequence[Any], context: str):
        self.folder, self.devices, self.context = folder, devices, context
        self.version = digest(code(), context)[:8]

    @classmethod
    def of(cls, folder: Path, model: Transformer) -> "ProgramStore | None":
        """None for a model that computes by functions of a user's own: no name of a file tells their code."""
        if not is_ours(model.dispatch.functions):
            return None
        graph, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        devices = Spread.of(model).devices or _devices_of(leaves[0])
        return cls(
            folder, devices, repr((graph, structure, [(leaf.shape, leaf.dtype.name) for leaf in leaves]))
        )

    def name(self, program: str, *facts: Any) -> str:
        """The file of a program that follows from these facts, as their `repr` tells them."""
        return f"{program}-{digest(code(), self.context, environment(self.devices), *map(repr, facts))}"

    def has(self, name: str) -> bool:
        return self._is_own() and (self.folder / name).is_file()

    def load(self, name: str) -> Built | None:
        """The program of a file; None if it cannot be used, for whatever reason."""
        path = self.folder / name
        try:
            data = path.read_bytes()
            if hashlib.sha256(data[CHECKSUM:]).digest() != data[:CHECKSUM]:
                return None
            load_runtime()
            *program, structure, temporaries = pickle.loads(zlib.decompress(data[CHECKSUM:]))
            compiled = serialize_executable.deserialize_and_load(*program, execution_devices=self.devices)
            os.utime(path)
        except Exception:
            return None
        return Built(compiled, structure, temporaries)

    def compile(self, lowered: jax.stages.Lowered, structure: Any, name: str) -> Built:
        """Compiles, and stores the program; that it cannot be stored is no error."""
        with _cache_hits() as hits:
            built = Built.of(lowered, structure)
        # A CPU's program that JAX read from its own cache lacks functions once it is stored again
        if not hits:
            with contextlib.suppress(Exception):
                self._save(name, built)
        return built

    def _save(self, name: str, built: Built) -> None:
        program = serialize_executable.serialize(built.compiled)
        packed = zlib.compress(pickle.dumps((*program, built.structure, built.temporaries)), level=1)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_own():
            return
        partial = self.folder / f"{name}.{os.getpid()}"
        try:
            partial.write_bytes(hashlib.sha256(packed).digest() + packed)
            partial.replace(self.folder / name)
        finally:
            partial.unlink(missing_ok=True)
        self._trim()

    def _is_own(self) -> bool:
        """Whether the folder is this user's, and nobody else may write or read there."""
        try:
            found = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077

    def _trim(self) -> None:
        """Removes the files that were not used for longest, until what stays is no larger than LIMIT."""
        newest = sorted(
            ((path.stat(), path) for path in self.folder.iterdir()),
            key=lambda one: one[0].st_mtime,
            reverse=True,
        )
        reached = accumulate(found.st_size for found, _ in newest)
        for size, (_, path) in zip(reached, newest, strict=True):
            if size > LIMIT:
                path.unlink(missing_ok=True)


def _devices_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> list[Any]:
    """Where an array is, or will be: a shape's array goes to the default device."""
    return [default_device()] if isinstance(leaf, jax.ShapeDtypeStruct) else list(leaf.devices())


def default_folder() -> Path | None:
    """Where programs are stored: with JAX's own cache, where that is the one that `cache_folder` has; else nowhere."""
    folder = cache_folder()
    if folder is None or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    is_ours = jax.config.values["jax_compilation_cache_dir"] == str(folder / "compiled")
    return folder / "programs" if is_ours else None


def digest(*parts: str) -> str:
    """A hash of texts, and of where one ends and the next begins."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def is_ours(value: Any) -> bool:
    """Whether the code of a value is the library's: of a function or an object, and of all that it is made of."""
    package = (getattr(value, "__module__", "builtins") or "").partition(".")[0]
    return package in (*CODE, "builtins", "numpy") and all(map(is_ours, _parts(value)))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, tuple | list):
        return value
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


@functools.cache
def code() -> str:
    """A hash of the Python sources of all that is traced."""
    found = hashlib.sha256()
    for package in CODE:
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(root).rglob("*.py")):
                found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def environment(devices: Sequence[Any]) -> str:
    """All else that tracing and compiling depend on: versions, settings, the devices."""
    device = devices[0]
    versions = (
        sys.version,
        jax.__version__,
        jaxlib.version.__version__,
        flax.__version__,
        device.client.platform_version,
    )
    settings = {
        name: value for name, value in jax.config.values.items() if name != "jax_compilation_cache_dir"
    }
    variables = [os.environ.get(name) for name in VARIABLES]
    return repr(
        (
            versions,
            device.device_kind,
            [one.id for one in devices],
            len(jax.devices()),
            _processor(),
            settings,
            variables,
        )
    )


@functools.cache
def _processor() -> str:
    """The features of the CPU, by which XLA chooses instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


_of_thread = threading.local()


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """The programs that this thread meanwhile takes from JAX's cache."""
    _of_thread.hits = hits = []
    try:
        yield hits
    finally:
        del _of_thread.hits


def _listen(event: str, **_: Any) -> None:
    if event == HIT and hasattr(_of_thread, "hits"):
        _of_thread.hits.append(event)


# For good: JAX loses events of other threads while a listener is taken away
jax.monitoring.register_event_listener(_listen)
