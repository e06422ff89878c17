"""Checks of the environment: versions, devices, and files in the working folder that hide modules."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mla_jax.base.errors import Unsupported
from mla_jax.base.files import DEVICE_RATES, HOST_RATES, cache_folder
from mla_jax.base.limits import cores
from mla_jax.offload import library

NEEDED = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "ml_dtypes",
    "jaxtyping",
    "tokenizers",
    "safetensors",
    "jinja2",
    "tyro",
    "prompt_toolkit",
)
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
OPTIONAL = ("matplotlib", *CUDA_PLUGINS, "libtpu")
HIDDEN_BY = (*NEEDED, "mla_jax", "convert", "json", "types", "random", "typing", "dataclasses", "resource")


def doctor() -> Iterator[str]:
    """Findings, one per line. A process of its own lists the devices: a broken driver or module cannot end this one."""
    usable = cores()
    yield f"Python {platform.python_version()} on {platform.platform()}, {usable} core{'s' * (usable != 1)}"
    for name in NEEDED:
        yield f"{name:<20}{_version(name) or 'MISSING: pip install . (in the checkout)'}"
    installed = [f"{name} {_version(name)}" for name in OPTIONAL if _version(name)]
    yield "optional: " + (", ".join(installed) or "none installed")
    for name, path in shadows(Path.cwd()):
        yield f"WARNING: {path} hides the module {name}; rename it or work in another folder"
    yield from _devices()
    yield from gpu_without_support(Path("/"))
    yield experts_on_the_cpu()
    yield measured_rates(cache_folder())
    yield compiled_programs(cache_folder())


def shadows(folder: Path) -> list[tuple[str, Path]]:
    """Modules that a file or folder in `folder` would hide from `python -m`."""
    own = Path(__file__).resolve().parents[2]  # in a checkout, its own packages hide nothing
    candidates = [
        (name, path) for name in HIDDEN_BY for path in (folder / f"{name}.py", folder / name / "__init__.py")
    ]
    return [(name, path) for name, path in candidates if path.exists() and folder.resolve() != own]


def experts_on_the_cpu() -> str:
    """Whether the libraries are built, and which instructions they use."""
    try:
        found = library.instructions()
    except Unsupported as e:
        return f"experts on the CPU: not available, {e}"
    try:
        library.refuse_without_programs()
    except Unsupported as e:
        return f"experts on the CPU: {found}, but not available to models, {e}"
    return f"experts on the CPU: {found}"


def measured_rates(folder: Path | None) -> str:
    """Where measured rates are stored. Rates that were measured on a busy machine make predictions worse until measured again."""
    files = [
        path for name in (HOST_RATES, DEVICE_RATES) if folder is not None and (path := folder / name).exists()
    ]
    kept = [f"{path} of {datetime.date.fromtimestamp(path.stat().st_mtime)}" for path in files]
    return "measured rates: " + (
        ", ".join(kept) + "; delete a file to measure again" if kept else "none kept"
    )


def compiled_programs(folder: Path | None) -> str:
    """Where JAX keeps compiled programs between two starts."""
    kept = (
        folder / "compiled"
        if folder
        else "not kept, for this user has no home; set JAX_COMPILATION_CACHE_DIR"
    )
    return f"compiled programs: {os.environ.get('JAX_COMPILATION_CACHE_DIR') or kept}"


def gpu_without_support(root: Path) -> Iterator[str]:
    """A warning if the machine has an NVIDIA GPU and this environment no CUDA support for JAX."""
    if (root / "proc/driver/nvidia/version").exists() and not any(map(_version, CUDA_PLUGINS)):
        yield 'WARNING: an NVIDIA GPU, but no CUDA support for JAX: pip install ".[cuda12]" (or ".[cuda13]") in the checkout'


_ASK_FOR_DEVICES = """
import jax
for device in jax.devices():
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    print(f"{device.platform}: {device.device_kind}" + (f", {limit / 2**30:.1f} GiB usable" if limit else ""))
"""


def _devices() -> Iterator[str]:
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_FOR_DEVICES], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        yield "WARNING: JAX did not find its devices within 120 s"
        return
    if found.returncode:
        asked = os.environ.get("JAX_PLATFORMS")
        platform = f" with JAX_PLATFORMS={asked}" if asked else ""
        yield f"WARNING: JAX does not start{platform}: {found.stderr.strip().splitlines()[-1]}"
    yield from (f"device {line}" for line in found.stdout.splitlines())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
