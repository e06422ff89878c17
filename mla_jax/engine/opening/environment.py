"""The process that a model is opened in: variables that JAX reads, where it stores compiled programs, and other processes."""

import os
from contextlib import AbstractContextManager, nullcontext

import jax

from mla_jax.base.files import cache_folder
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.options import MEMORY_FRACTION, Options
from mla_jax.base.platforms import default_device
from mla_jax.engine.processes import started
from mla_jax.hosts.distributed import Processes
from mla_jax.model import kernels

# JAX's variables, the newer one first
FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def prepare_environment(options: Options) -> tuple[Options, Processes | None]:
    """Sets up this process; returns the options, with the mesh that several processes need, and those processes."""
    if options.mesh.device is None:
        set_memory_fraction(options.memory.memory_fraction)
    processes = started(options)
    if processes is not None and options.mesh.mesh is None:
        options = options.replace(mesh="auto")
    cache_compiled_programs(default_device().platform, several=processes is not None)
    return options, processes


def set_memory_fraction(asked: float | None) -> None:
    """Sets the share of a GPU's memory that JAX takes. JAX reads it when it first uses a GPU.

    Without a fraction that is asked for, what the user has set in the environment stays."""
    if asked is None and any(map(os.environ.get, FRACTION)):
        return
    for name in FRACTION:  # JAX refuses both
        os.environ.pop(name, None)
    os.environ[FRACTION[0]] = str(asked or MEMORY_FRACTION)


def cache_compiled_programs(platform: str, several: bool) -> None:
    """Turns on JAX's persistent compilation cache, unless the user has set one.

    Several processes on GPUs have none, not even the user's. Each tunes a part of a program's kernels and waits for what the
    others found: forever, if one of them has the program in its cache."""
    if several and platform == "gpu":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.values["jax_compilation_cache_dir"] is None and (folder := cache_folder()) is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def kernels_of(options: Options) -> AbstractContextManager[None]:
    """Inside, kernels answer for the device that is planned for."""
    if options.mesh.device is None:
        return nullcontext()
    kind = PLANNED[options.mesh.device]
    return kernels.as_if_on(kind.kind, kind.figures.platform, kind.capability)
